"""The target's vocabulary inside a GGUF file; llama.cpp wants it in the head's file too."""

from pathlib import Path

from gguf import GGUFWriter

from fledge.contracts.errors import MismatchError
from fledge.models.gguf_header import read_gguf_header
from fledge.models.gguf_vocabulary import GgufVocabulary, read_vocabulary

_ARRAYS = {"tokens": "tokens", "merges": "merges", "scores": "scores", "token_type": "types"}
_PREFIX = "tokenizer."


def add_vocabulary(writer: GGUFWriter, directory: Path, vocab_size: int) -> None:
    """Write the tokens of a Hugging Face directory."""
    vocabulary = read_vocabulary(directory, vocab_size)
    if len(vocabulary.tokens) != vocab_size:
        raise MismatchError(
            f"the tokenizer in {directory} has {len(vocabulary.tokens)} tokens, the target "
            f"{vocab_size}; llama.cpp takes the number of tokens from the tokenizer."
        )
    _add(writer, vocabulary)


def _add(writer: GGUFWriter, vocabulary: GgufVocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.cut)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    writer.add_token_merges(list(vocabulary.merges))
    for role, number in vocabulary.special_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def copy_vocabulary(writer: GGUFWriter, source: Path) -> None:
    """Write the tokens of another GGUF file as they stand there."""
    arrays = {f"tokenizer.ggml.{name}" for name in _ARRAYS}
    for key, value in read_gguf_header(source, arrays).metadata.items():
        if not key.startswith(_PREFIX):
            continue
        if key in arrays:
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int) and not _is_length(key):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)


def _is_length(key: str) -> bool:
    """Arrays that were not asked for are read as their length."""
    return not key.endswith(("_id", "_token"))
