"""The tokenizer of a Hugging Face directory in the words of a GGUF file: the way back of
`gguf_tokenizer`.

A GGUF file only names how text is cut before merging. Which name is right is found by cutting
sample texts in every known way; a tokenizer that cuts otherwise is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fledge.contracts.errors import MismatchError
from fledge.models.gguf_tokenizer import CUTS, build_cut

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_SAMPLES = (
    "Hello world, it's 12345 tests; we've 3.14 and I'LL go!",
    "  two  spaces\n\nlines\r\n\ttabs \n end ",
    "naïve Ünïcode Ωμέγα 漢字かな 한국어 हिन्दी \U0001f600\U0001f680 e\u0301",
    "CamelCase snake_case path/to/file.py x=1+2*3 [a](b) {c: d} http://e.f/g?h=1",
    "1 22 333 4444 55555 ٣٤ ½ 10,000.00",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """What a GGUF file says about byte-level tokens."""

    cut: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    special_ids: Mapping[str, int]
    """Ids by role: bos, eos, unknown, padding."""

    adds_bos: bool
    chat_template: str | None


def read_vocabulary(directory: Path, vocab_size: int) -> GgufVocabulary:
    """The vocabulary of a directory's tokenizer.json, padded to the model's size."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise MismatchError(
            f"{directory} has no tokenizer.json, of which a GGUF vocabulary is made. "
            "Make the file with llama.cpp's own converter."
        )
    backend = Tokenizer.from_file(str(path))
    data = json.loads(backend.to_str())
    model = data["model"]
    if model["type"] != "BPE" or model.get("byte_fallback") or "ByteLevel" not in json.dumps(data):
        raise MismatchError(
            f"{path} is not byte-level BPE, the one kind that is written as GGUF here. "
            "Make the file with llama.cpp's own converter, or give the target as a GGUF file."
        )
    by_id = {number: token for token, number in backend.get_vocab(with_added_tokens=True).items()}
    added = {token["id"]: token["special"] for token in data["added_tokens"]}
    size = max(vocab_size, max(by_id) + 1)
    ids = _special_ids(directory, backend)
    return GgufVocabulary(
        cut=_find_cut(backend, path),
        tokens=tuple(by_id.get(number, f"[PAD{number}]") for number in range(size)),
        types=tuple(_token_type(number, by_id, added) for number in range(size)),
        merges=_merges(model["merges"], by_id),
        special_ids=ids,
        adds_bos=backend.encode("a").ids[:1] == [ids.get("bos", -1)],
        chat_template=_chat_template(directory),
    )


def _token_type(number: int, by_id: Mapping[int, str], added: Mapping[int, bool]) -> int:
    if number not in by_id:
        return _UNUSED
    if number not in added:
        return _NORMAL
    return _CONTROL if added[number] else _USER_DEFINED


def _merges(merges: list[Any], by_id: Mapping[int, str]) -> tuple[str, ...]:
    spelled = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in merges)
    # llama.cpp wants at least one. Words are cut into single characters, so that this one, of
    # a long token with itself, never comes up.
    return spelled or (" ".join([max(by_id.values(), key=len)] * 2),)


def _find_cut(backend: Tokenizer, path: Path) -> str:
    """llama.cpp's name of how the tokenizer cuts text."""
    ours = [_pieces(backend, text) for text in _SAMPLES]
    for name in CUTS:
        if [_pieces(build_cut(name), text) for text in _SAMPLES] == ours:
            return name
    raise MismatchError(
        f"{path} cuts text before merging in a way that has no name here; tokens would come out "
        "wrong. Make the file with llama.cpp's own converter."
    )


def _pieces(backend: Tokenizer, text: str) -> list[str]:
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def _special_ids(directory: Path, backend: Tokenizer) -> dict[str, int]:
    config = _read_json(directory / "config.json")
    named = _read_json(directory / "tokenizer_config.json")
    found: dict[str, int] = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token = named.get(f"{key}_token")
        text = token.get("content") if isinstance(token, dict) else token
        number = backend.token_to_id(text) if isinstance(text, str) else None
        if number is None:
            number = config.get(f"{key}_token_id")
            number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int):
            found[role] = number
    return found


def _chat_template(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(directory / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content if isinstance(content, dict) else {}
