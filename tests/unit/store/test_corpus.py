"""The corpus on disk: what was written comes back, by number, and damage is seen."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fledge.contracts.errors import ArtifactError, MismatchError
from fledge.store.corpus import Corpus
from fledge.store.corpus_shard import Sample, Shard, shard_file, token_dtype, write_shard
from fledge.store.manifest import Plan
from fledge.store.stage_directory import open_stage
from fledge.store.vocab_map import VOCAB_MAP_NAME, choose_vocabulary


def sample(number: int, length: int, source: str = "s") -> Sample:
    return Sample(
        token_ids=np.arange(number, number + length, dtype=np.uint32),
        loss_mask=np.arange(length) % 2 == 1,
        row_id=f"{source}/{number}é",
        source=source,
        message=number,
    )


SAMPLES = [sample(0, 3), sample(1, 5, "t"), sample(2, 1), sample(3, 4), sample(4, 7, "t")]


def write_corpus(directory: Path, dtype: str = "uint16") -> Corpus:
    with open_stage(directory, Plan(kind="corpus", settings={}, identity={"target": "x"})) as stage:
        for number, (first, last) in enumerate(((0, 2), (2, 5))):
            write_shard(
                shard_file(directory, number),
                SAMPLES[first:last],
                dtype=dtype,
                next_row=last,
                tally={"rows": last - first},
            )
        choose_vocabulary(np.ones(16, np.int64), 8).save(directory / VOCAB_MAP_NAME)
        stage.finish(counts={}, files=directory.glob("*.safetensors"))
    return Corpus.open(directory)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_samples_come_back_by_number(tmp_path: Path, dtype: str) -> None:
    corpus = write_corpus(tmp_path, dtype)
    assert len(corpus) == 5
    assert corpus.lengths.tolist() == [3, 5, 1, 4, 7]
    for number, (expected, iterated) in enumerate(zip(SAMPLES, corpus, strict=True)):
        for found in (corpus[number], iterated):
            assert found.token_ids.dtype == dtype
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert found.loss_mask.tolist() == expected.loss_mask.tolist()
            assert found.loss_mask.dtype == np.bool_
            assert found[2:] == expected[2:]
    assert len(corpus.vocab_map) == 8
    assert corpus.identity == {"target": "x"}
    assert len(corpus.packed(8)) == 3
    corpus.verify()
    for number in (-1, 5):
        with pytest.raises(IndexError, match=f"sample {number} of 5"):
            corpus[number]


def test_any_program_can_read_a_shard(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    tensors = load_file(tmp_path / "shard-00001.safetensors")
    assert tensors["offsets"].tolist() == [0, 1, 5, 12]
    assert tensors["token_ids"][1:5].tolist() == [3, 4, 5, 6]
    assert tensors["loss_mask"].dtype == np.uint8
    first, last = tensors["row_offsets"][1:3]
    assert tensors["row_ids"][first:last].tobytes().decode() == "s/3é"


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = write_corpus(tmp_path / "a"), write_corpus(tmp_path / "b")
    assert one.manifest.fingerprint == other.manifest.fingerprint
    assert one.manifest.files == other.manifest.files


def test_a_shard_says_where_it_ends(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    note = Shard(tmp_path / "shard-00001.safetensors").note
    assert (note.sources, note.next_row, note.tally) == (("s", "t"), 5, {"rows": 3})


def test_token_types() -> None:
    assert (token_dtype(65536), token_dtype(65537)) == ("uint16", "uint32")


def test_missing_and_short_files_are_seen_when_opening(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(ArtifactError, match=f"is {len(content) - 1} bytes long, and the manifest"):
        Corpus.open(tmp_path)
    path.unlink()
    with pytest.raises(ArtifactError, match="shard-00001.safetensors is missing"):
        Corpus.open(tmp_path)


def test_changed_bytes_are_seen_by_verify(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "shard-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="was changed since it was written"):
        Corpus.open(tmp_path).verify()


def test_other_directories_are_refused(tmp_path: Path) -> None:
    with open_stage(tmp_path, Plan(kind="answers", settings={})) as stage:
        stage.finish(counts={}, files=[])
    with pytest.raises(MismatchError, match="holds answers, not corpus; give a directory that"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b"\xff" * 64, "the header is longer than the file"),
        (b"\x02\0\0\0\0\0\0\0[]", "no table in its header"),
        (b"\x02\0\0\0\0\0\0\0{}", "is not a shard of a corpus"),
    ],
)
def test_files_that_are_no_shards(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=words):
        Shard(path)


def test_tensors_of_other_types_are_no_shard(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    path = tmp_path / "shard-00000.safetensors"
    tensors = load_file(path) | {"token_ids": np.zeros(8, np.float32)}
    note = {"sources": ["s"], "next_row": 1, "tally": {}}
    save_file(tensors, path, metadata={"fledge": json.dumps(note)})
    with pytest.raises(ArtifactError, match="type F32 instead of U16"):
        Shard(path)
    with pytest.raises(ArtifactError, match="there is no .*gone"):
        Shard(tmp_path / "gone")
