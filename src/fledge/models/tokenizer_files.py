"""Builds tokenizers from vocabularies, as files that reload to exactly what was built.

Their pipelines are written out with the `tokenizers` package instead of being left to a model's
own tokenizer class: what those rebuild from a vocabulary depends on the version of transformers.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
"""How sentencepiece spells a space."""


def build_sentencepiece(
    pieces: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    unk_token: str | None = None,
    prefixes_space: bool = True,
) -> Tokenizer:
    """Sentencepiece-style BPE: spaces are part of the tokens, unknown characters become bytes."""
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    model = BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unk_token)
    backend = Tokenizer(model)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes_space:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        steps.append(decoders.Strip(" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


def build_byte_level(
    pieces: Sequence[str],
    merges: list[tuple[str, str]],
    *,
    split: str | None = None,
    splits_digits: bool = False,
    ignores_merges: bool = False,
    composes_characters: bool = False,
) -> Tokenizer:
    """Byte-level BPE; text is cut by the `split` pattern first, by GPT-2's when there is none."""
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocabulary, merges, ignore_merges=ignores_merges))
    if composes_characters:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def find_merges(
    pieces: Sequence[str], scores: Sequence[float], token_ids: Iterable[int]
) -> list[tuple[str, str]]:
    """Every way to make one of the tokens of two others, the best score first."""
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    found = [
        (-scores[token_id], -len(left), -len(right), left, right)
        for token_id in token_ids
        for cut in range(1, len(pieces[token_id]))
        if (left := pieces[token_id][:cut]) in vocabulary
        and (right := pieces[token_id][cut:]) in vocabulary
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def wrap_backend(
    backend: Tokenizer,
    roles: dict[str, str],
    *,
    adds_bos: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerFast:
    """A transformers tokenizer with the given special tokens, such as `eos_token`."""
    if adds_bos:
        bos = roles["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, backend.token_to_id(bos))],
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **roles)
    tokenizer.chat_template = chat_template
    return tokenizer
