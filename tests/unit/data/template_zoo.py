"""Chat templates of many families, each with a small tokenizer that knows the family's tokens.

A token is a special token, a tag or one byte, so an expectation written by hand gives the token ids
without asking the tokenizer: `parse` reads texts in which ⟦ ⟧ surround what has loss.
"""

from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fledge.models.chat_spans import TurnFinder
from fledge.models.tokenizer import TargetTokenizer

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
DAY = date(2024, 7, 26)
_OPEN, _CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Family:
    specials: tuple[str, ...]
    """Tokens that stand for no text; the first ends the answers."""

    bos: str | None = None
    eos: str | None = None
    tags: tuple[str, ...] = ()
    more_ends: tuple[str, ...] = ()


_CHATML = Family(("<|im_end|>", "<|im_start|>", "<|endoftext|>"))
_THINKING = Family(_CHATML.specials, tags=("<think>", "</think>", "<tool_call>", "</tool_call>"))
_LLAMA = Family(
    ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    bos="<|begin_of_text|>",
)
FAMILIES = {
    "chatml": _CHATML,
    "llama3": _LLAMA,
    "qwen3": _THINKING,
    "opened_think": _THINKING,
    "gemma": Family(("<end_of_turn>", "<start_of_turn>", "<bos>", "<eos>"), bos="<bos>"),
    "mistral": Family(("</s>", "<s>"), bos="<s>", eos="</s>"),
    "mistral_tools": Family(
        (
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        bos="<s>",
        eos="</s>",
    ),
    "phi3": Family(
        ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>"),
        eos="<|endoftext|>",
        more_ends=("<|endoftext|>",),
    ),
    "deepseek_r1": Family(
        ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        tags=("<think>", "</think>"),
    ),
    "hermes_tools": Family(_CHATML.specials, tags=("<tool_call>", "</tool_call>")),
    "llama31_tools": _LLAMA,
    "zephyr": Family(("</s>", "<s>"), bos="<s>", eos="</s>"),
    "generation_block": _CHATML,
    "merging": _CHATML,
    "harmony": Family(
        ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
        + ("<|call|>",),
        more_ends=("<|call|>",),
    ),
    "no_prompt": Family(("</s>",), eos="</s>"),
    "mistral_system": Family(("</s>", "<s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>"),
    "next_header": Family(
        ("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>", "[gMASK]", "<|endoftext|>"),
        eos="<|endoftext|>",
        tags=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        more_ends=("<|observation|>", "<|endoftext|>"),
    ),
    "closed_block": Family(
        ("<turn|>", "<|turn>", "<|channel>", "<channel|>", "<bos>"), bos="<bos>"
    ),
    "open_last": _CHATML,
}


def byte_letters() -> dict[int, str]:
    """How byte-level tokenizers write each byte: as itself where that can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in seen}
    hidden = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


@cache
def vocabulary(name: str) -> dict[str, int]:
    """Ids: special tokens, then tags, then the 256 bytes."""
    family = FAMILIES[name]
    pieces = [*family.specials, *family.tags, *byte_letters().values()]
    return {piece: token_id for token_id, piece in enumerate(pieces)}


@cache
def fast_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return make_fast_tokenizer(name, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))


def make_fast_tokenizer(
    name: str, template: str | None, merges: tuple[tuple[str, str], ...] = ()
) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    pieces = dict(vocabulary(name))
    for left, right in merges:
        pieces[left + right] = len(pieces)
    inner = Tokenizer(models.BPE(vocab=pieces, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(one, special=True) for one in family.specials])
    inner.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=family.bos, eos_token=family.eos or family.specials[0]
    )
    tokenizer.chat_template = template
    return tokenizer


def target_tokenizer(name: str) -> TargetTokenizer:
    return TargetTokenizer(fast_tokenizer(name), day=DAY)


def end_ids(name: str) -> frozenset[int]:
    """What the target's generation config would name as the ends of answers."""
    family = FAMILIES[name]
    return frozenset(vocabulary(name)[one] for one in (family.specials[0], *family.more_ends))


def turn_finder(name: str) -> TurnFinder:
    return TurnFinder(target_tokenizer(name), end_ids(name))


def parse(name: str, marked: str) -> tuple[list[int], list[bool]]:
    """Token ids and loss mask of a text with ⟦ ⟧ around what has loss."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    has_loss = False
    for piece in marked.replace(_OPEN, f"\0{_OPEN}").replace(_CLOSE, f"\0{_CLOSE}").split("\0"):
        if piece[:1] in (_OPEN, _CLOSE):
            has_loss = piece[0] == _OPEN
            piece = piece[1:]
        found = spell(name, piece)
        token_ids += found
        loss_mask += [has_loss] * len(found)
    return token_ids, loss_mask


def spell(name: str, text: str) -> list[int]:
    """Ids of a text: its special tokens and tags, the longest first, and single bytes."""
    ids = vocabulary(name)
    known = [*FAMILIES[name].specials, *FAMILIES[name].tags]
    letters = byte_letters()
    found: list[int] = []
    while text:
        token = max((one for one in known if text.startswith(one)), key=len, default=None)
        if token is None:
            found += [ids[letters[byte]] for byte in text[0].encode()]
        else:
            found.append(ids[token])
        text = text[len(token or text[0]) :]
    return found
