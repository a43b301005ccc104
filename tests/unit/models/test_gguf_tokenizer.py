"""Tokenizers rebuilt from GGUF headers, as they are after a reload."""

from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fledge.contracts.errors import ArtifactError
from fledge.models.gguf_tokenizer import build_tokenizer
from fledge.models.tokenizer_files import SPACE

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6


def write_vocabulary(
    path: Path,
    kind: str,
    tokens: dict[str, int],
    *,
    architecture: str = "llama",
    cut: str | None = None,
    merges: tuple[str, ...] = (),
    scores: list[float] | None = None,
    **fields: bool | int,
) -> Path:
    """A GGUF file with a tokenizer and nothing else; `tokens` gives each token's type."""
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(tokens.values()))
    if cut is not None:
        writer.add_tokenizer_pre(cut)
    if merges:
        writer.add_token_merges(list(merges))
    if scores is not None:
        writer.add_token_scores(scores)
    for name, value in fields.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reload(source: Path) -> PreTrainedTokenizerBase:
    directory = source.parent / "out"
    build_tokenizer(source).save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def split(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)


BYTES = {f"<0x{number:02X}>": BYTE for number in range(256)}
SENTENCEPIECE = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, **BYTES}


def test_sentencepiece_merges_by_score_with_a_prefix_space(tmp_path):
    tokens = {**SENTENCEPIECE, **dict.fromkeys((SPACE, "a", "b", "ab", f"{SPACE}a"), NORMAL)}
    scores = [0.0] * (len(tokens) - 2) + [-2.0, -1.0]
    path = write_vocabulary(
        tmp_path / "t.gguf", "llama", tokens, scores=scores, bos_token_id=1, eos_token_id=2
    )
    tokenizer = reload(path)
    assert split(tokenizer, "ab") == [f"{SPACE}a", "b"]
    assert split(tokenizer, "z</s>") == [SPACE, "<0x7A>", "</s>"]
    assert tokenizer("ab").input_ids[0] == 1, "files that do not say begin with BOS"
    assert tokenizer.decode(tokenizer("ab é").input_ids, skip_special_tokens=True) == "ab é"
    assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}


def test_gemma_merges_by_position_without_a_prefix_space(tmp_path):
    tokens = {**SENTENCEPIECE, **dict.fromkeys((SPACE, "a", "b", "ab", f"{SPACE}a"), NORMAL)}
    tokens |= {"  ": USER_DEFINED, "<x>": USER_DEFINED}
    scores = [0.0] * (len(tokens) - 4) + [-2.0, -1.0, 0.0, 0.0]
    path = write_vocabulary(
        tmp_path / "t.gguf",
        "llama",
        tokens,
        architecture="gemma3",
        scores=scores,
        bos_token_id=1,
        add_bos_token=True,
        add_space_prefix=False,
    )
    tokenizer = reload(path)
    assert split(tokenizer, " ab") == [SPACE, "ab"]
    assert split(tokenizer, "a  <x>b") == ["a", SPACE * 2, "<x>", "b"]
    assert tokenizer("ab").input_ids == [1, len(SENTENCEPIECE) + 3]


BYTE_LEVEL = {
    "<eot>": CONTROL,
    **dict.fromkeys(sorted(ByteLevel.alphabet()), NORMAL),
    **dict.fromkeys(("12", "Ġ1", "ab", "abc"), NORMAL),
    "<think>": USER_DEFINED,
}


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("gpt-2", ["Ġ1", "2", "Ġ", "ab", "c"]),
        ("smollm", ["Ġ", "1", "2", "Ġ", "ab", "c"]),
        ("qwen2", ["Ġ", "1", "2", "Ġ", "ab", "c"]),
        ("llama-bpe", ["Ġ", "12", "Ġ", "ab", "c"]),
        ("gpt-4o", ["Ġ", "12", "Ġ", "ab", "c"]),
        ("tekken", ["Ġ", "1", "2", "Ġ", "ab", "c"]),
    ],
)
def test_byte_level_text_is_cut_as_the_file_says(tmp_path, cut, expected):
    merges = ("Ġ 1", "1 2", "a b")
    path = write_vocabulary(tmp_path / "t.gguf", "gpt2", BYTE_LEVEL, cut=cut, merges=merges)
    tokenizer = reload(path)
    assert split(tokenizer, " 12 abc") == expected
    assert split(tokenizer, "<think>a<eot>") == ["<think>", "a", "<eot>"]
    assert tokenizer.decode(tokenizer(" 12 é\n<eot>").input_ids) == " 12 é\n<eot>"


def test_whole_words_come_first_where_the_family_has_it_so(tmp_path):
    path = write_vocabulary(
        tmp_path / "t.gguf", "gpt2", BYTE_LEVEL, cut="llama-bpe", merges=("a b",)
    )
    assert split(reload(path), "abc") == ["abc"]


def test_characters_are_composed_where_the_family_has_it_so(tmp_path):
    path = write_vocabulary(tmp_path / "t.gguf", "gpt2", BYTE_LEVEL, cut="qwen2", merges=("a b",))
    assert split(reload(path), "e\u0301") == split(reload(path), "\u00e9")
    path = write_vocabulary(tmp_path / "u.gguf", "gpt2", BYTE_LEVEL, cut="gpt-2", merges=("a b",))
    assert split(reload(path), "e\u0301") != split(reload(path), "\u00e9")


def test_unknown_kinds_are_refused(tmp_path):
    path = write_vocabulary(tmp_path / "t.gguf", "t5", {"a": NORMAL})
    with pytest.raises(ArtifactError, match=r"tokenizer of kind 't5'; 'gpt2', 'llama' and"):
        build_tokenizer(path)
    path = write_vocabulary(tmp_path / "u.gguf", "gpt2", {"a": NORMAL}, cut="newfangled")
    with pytest.raises(ArtifactError, match=r"in the way 'newfangled' before merging.*Hugging"):
        build_tokenizer(path)
