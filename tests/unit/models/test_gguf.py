"""GGUF to Hugging Face directory: exact weights, right tokenizer, plain refusals."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fledge.contracts.errors import ArtifactError
from fledge.contracts.progress import SilentProgress
from fledge.models.gguf import convert_gguf
from fledge.models.gguf_header import read_gguf_header
from fledge.models.gguf_slim import is_slimmable, write_slim_copy
from fledge.models.hf_directory import check_directory
from tests.unit.tiny_gguf import CHAT_TEMPLATE, EOS_ID, Recorder, vocabulary, write_tiny_gguf


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def convert(source: Path, directory: Path, **options: object) -> Path:
    directory.mkdir()
    convert_gguf(source, directory, progress=SilentProgress(), **options)
    return directory


def test_directory_has_exactly_the_dequantised_weights(tmp_path, capfd):
    written = write_tiny_gguf(tmp_path / "tiny.gguf")
    directory = convert(tmp_path / "tiny.gguf", tmp_path / "out", extra_eos_ids=(0,))
    assert capfd.readouterr() == ("", "")
    check_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    for name, weight in written.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    tokens = torch.arange(40)[None]
    assert torch.equal(model(tokens).logits, written(tokens).logits)
    assert model.generation_config.eos_token_id == [EOS_ID, 0]


def test_tokenizer_keeps_template_specials_and_eos(gguf, tmp_path):
    directory = convert(gguf, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token_id == EOS_ID
    text = "hello wörld <|im_end|>"
    ids = tokenizer(text).input_ids
    assert ids[-1] == EOS_ID
    assert ids[0] == tokenizer.convert_tokens_to_ids("hello")
    assert tokenizer.decode(ids) == text


def test_bos_is_added_after_reload_when_the_file_asks_for_it(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", add_bos=True)
    directory = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(directory)("hello").input_ids[0] == 1


def test_header_states_what_the_file_holds(gguf):
    header = read_gguf_header(gguf)
    assert header.architecture == "llama"
    assert header.quantisation == "Q8_0"
    assert header.required_bytes <= gguf.stat().st_size
    assert header.token_ids("eos", "pad", "eot") == (EOS_ID,)


def test_truncated_file_names_both_sizes(gguf, tmp_path):
    whole = gguf.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(whole[:-1000])
    needed = read_gguf_header(gguf).required_bytes
    with pytest.raises(ArtifactError, match=f"has {len(whole) - 1000} bytes.*describes {needed}"):
        read_gguf_header(short)


@pytest.mark.parametrize("size", [60, 500, 3000])
def test_file_cut_inside_its_header(gguf, tmp_path, size):
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf.read_bytes()[:size])
    with pytest.raises(ArtifactError, match=f"inside its header: it has {size} bytes"):
        read_gguf_header(short)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file: it has only 0 bytes"),
        (b"PK" + bytes(100), r"begins with b'PK\\x00\\x00' instead of b'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "is GGUF version 1; versions"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(40), "does not say which architecture"),
        (
            b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99) + bytes(40),
            "uses type number 99 at byte",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 77, 0) + bytes(40),
            "uses type number 77 at byte",
        ),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, message):
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message):
        read_gguf_header(path)


def test_split_file_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", extra={"split.count": 3})
    with pytest.raises(ArtifactError, match="one of 3 parts.*gguf-split --merge"):
        read_gguf_header(tmp_path / "tiny.gguf")


def test_unsupported_architecture_is_named(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="rwkv7")
    with pytest.raises(ArtifactError, match=r"architecture 'rwkv7'.*Hugging Face directory or id"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")


def test_missing_tensor_is_not_filled_in(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ArtifactError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out")


def test_conversion_is_shown_as_a_task(gguf, tmp_path):
    recorder = Recorder()
    (tmp_path / "out").mkdir()
    convert_gguf(gguf, tmp_path / "out", progress=recorder)
    assert recorder.amounts == {"dequantising to float32": 4}


def test_slim_copy_differs_in_the_vocabulary_only(gguf, tmp_path):
    slim = tmp_path / "slim.gguf"
    header = read_gguf_header(gguf)
    write_slim_copy(gguf, header, slim)
    assert slim.stat().st_size < gguf.stat().st_size
    before, after = GGUFReader(gguf), GGUFReader(slim)
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.tensor_type) == (new.name, new.tensor_type)
        assert np.array_equal(old.data, new.data)
    dropped = {f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type")}
    for key in header.metadata.keys() - dropped:
        assert before.fields[key].contents() == after.fields[key].contents()
    assert after.fields["tokenizer.ggml.tokens"].contents() == len(vocabulary())
    assert "tokenizer.ggml.merges" not in after.fields


def test_file_without_vocabulary_size_gets_it_from_its_tokens(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf", states_vocab_size=False)
    directory = convert(tmp_path / "tiny.gguf", tmp_path / "out")
    assert AutoConfig.from_pretrained(directory).vocab_size == len(vocabulary())


def test_architectures_that_count_tokens_keep_them(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    write_tiny_gguf(tmp_path / "gpt2.gguf", architecture="gpt2")
    assert is_slimmable(read_gguf_header(tmp_path / "tiny.gguf"))
    assert not is_slimmable(read_gguf_header(tmp_path / "gpt2.gguf"))
