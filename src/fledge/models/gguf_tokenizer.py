"""The tokenizer inside a GGUF file.

The file names the kind of vocabulary and, for byte-level ones, how text is cut before merging; it
does not hold the whole pipeline, so the known kinds are spelled out here. Token types follow
llama.cpp: control tokens are special, user-defined ones are matched whole but are ordinary text.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from fledge.contracts.errors import ArtifactError
from fledge.models.gguf_header import GgufHeader, read_gguf_header
from fledge.models.tokenizer_files import (
    SPACE,
    build_byte_level,
    build_sentencepiece,
    find_merges,
    wrap_backend,
)

_ARRAYS = frozenset(
    f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")
)
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_REST_SLASH}"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}|{_REST_SLASH}"
)

_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
_GPT2_SPLIT = frozenset({"gpt-2", "gpt2", "default", "olmo", "mpt", "phi-2", "jais"})
_DIGITS_SPLIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""Vocabularies in which a word that is a token stays one, whatever the merges say."""

_COMPOSED = frozenset({"qwen2"})
"""Vocabularies made from text in Unicode's composed form (NFC)."""


CUTS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken")
"""One name for each way of cutting that is known, as GGUF files spell it."""


def build_cut(name: str) -> Tokenizer:
    """A tokenizer without a vocabulary that cuts text in a known way."""
    return build_byte_level(
        [],
        [],
        split=_SPLITS.get(name),
        splits_digits=name in _DIGITS_SPLIT,
        composes_characters=name in _COMPOSED,
    )


def build_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file; refuses a kind it cannot rebuild exactly."""
    header = read_gguf_header(source, _ARRAYS)
    vocabulary = _Vocabulary(source, header)
    backend = vocabulary.build()
    vocabulary.add_special_tokens(backend)
    return wrap_backend(
        backend,
        vocabulary.roles,
        adds_bos=vocabulary.adds_bos,
        chat_template=vocabulary.chat_template,
    )


class _Vocabulary:
    """The tokenizer part of a GGUF header."""

    def __init__(self, source: Path, header: GgufHeader) -> None:
        self._source = source
        self._fields = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in header.metadata.items()
            if key.startswith("tokenizer.")
        }
        self._is_gemma = header.architecture.startswith("gemma")
        self.kind = str(self._fields.get("model"))
        self.pieces = [_respell(text) if self._is_gemma else text for text in self._list("tokens")]
        self.types: list[int] = self._list("token_type") or [1] * len(self.pieces)

    def _list(self, name: str) -> list[Any]:
        value = self._fields.get(name)
        return value if isinstance(value, list) else []

    @property
    def roles(self) -> dict[str, str]:
        """Special tokens by the name transformers has for their role."""
        found = {name: self._fields.get(f"{role}_token_id") for role, name in _ROLES.items()}
        return {
            name: self.pieces[token_id]
            for name, token_id in found.items()
            if isinstance(token_id, int) and token_id < len(self.pieces)
        }

    @property
    def adds_bos(self) -> bool:
        """Whether a prompt begins with the beginning-of-text token; without it some models fail."""
        stated = self._fields.get("add_bos_token")
        # Files that do not say follow the habit of their kind of vocabulary.
        wanted = bool(stated) if stated is not None else self.kind == "llama"
        return wanted and "bos_token" in self.roles

    @property
    def chat_template(self) -> str | None:
        template = self._fields.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def build(self) -> Tokenizer:
        if self.kind == "gpt2":
            return self._build_byte_level()
        if self.kind in ("llama", "gemma4"):
            return self._build_sentencepiece()
        raise ArtifactError(
            f"{self._source} has a tokenizer of kind {self.kind!r}; 'gpt2', 'llama' and 'gemma4' "
            "can be rebuilt. Give the model's Hugging Face directory or id instead."
        )

    def _merges(self) -> list[tuple[str, str]]:
        known = set(self.pieces)
        pairs = (text.partition(" ")[::2] for text in self._list("merges"))
        # A file must have a merge, so that one without any has one that can never be made.
        return [(left, right) for left, right in pairs if left + right in known]

    def _build_byte_level(self) -> Tokenizer:
        cut = str(self._fields.get("pre", "default"))
        if cut not in _GPT2_SPLIT | _DIGITS_SPLIT | set(_SPLITS):
            raise ArtifactError(
                f"{self._source} cuts text in the way {cut!r} before merging, which is not known "
                "here; tokens would come out wrong. Give the model's Hugging Face directory or id."
            )
        return build_byte_level(
            self.pieces,
            self._merges(),
            split=_SPLITS.get(cut),
            splits_digits=cut in _DIGITS_SPLIT,
            ignores_merges=cut in _WHOLE_WORDS_FIRST,
            composes_characters=cut in _COMPOSED,
        )

    def _build_sentencepiece(self) -> Tokenizer:
        merges = self._merges()
        if not merges:
            scores = self._list("scores")
            # Gemma's scores do not follow the order of its merges; the order of its tokens does.
            if self._is_gemma or not scores:
                scores = [-float(token_id) for token_id in range(len(self.pieces))]
            plain = (i for i, kind in enumerate(self.types) if kind not in (_CONTROL, _BYTE))
            merges = find_merges(self.pieces, scores, plain)
        return build_sentencepiece(
            self.pieces,
            merges,
            unk_token=self.roles.get("unk_token"),
            prefixes_space=bool(self._fields.get("add_space_prefix", not self._is_gemma)),
        )

    def add_special_tokens(self, backend: Tokenizer) -> None:
        backend.add_special_tokens(
            [AddedToken(text, normalized=False) for text in self._of_type(_CONTROL)]
        )
        backend.add_tokens(
            [
                AddedToken(text, normalized=False)
                for text in self._of_type(_USER_DEFINED)
                if text.strip(SPACE)
            ]
        )

    def _of_type(self, wanted: int) -> list[str]:
        return [text for text, kind in zip(self.pieces, self.types, strict=True) if kind == wanted]


def _respell(text: str) -> str:
    """Gemma files hold runs of spaces as they are, among tokens that spell spaces otherwise."""
    return SPACE * len(text) if text and not text.strip(" ") else text
