"""`fledge export` and `fledge import` as a user runs them."""

import json
from pathlib import Path

import pytest

from fledge.models.head_files import load_head, save_head
from fledge.testing import save_tiny_target, target_of, tiny_head, tiny_model, tiny_tokenizer
from tests.e2e.conftest import RunProgram
from tests.unit.models.head_on_disk import assert_same

VLLM = ("export", "HEAD", "--to", "vllm", "--out", "new")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("targets") / "tiny", num_hidden_layers=8)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = target_of(tiny_model("llama", num_hidden_layers=8, vocab_size=len(tiny_tokenizer())))
    place = tmp_path_factory.mktemp("heads") / "head"
    save_head(tiny_head(model), place)
    return place


def test_there_and_back(run: RunProgram, head: Path, target: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    words = ("export", head, "--to", "sglang", "--target", target, "--verify", "--out", out)
    done = run(*words, "--depth", 6, "--width", 8, "--budget", 40)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("python -m sglang.launch_server --model-path ")
    assert done.stdout.endswith("--speculative-num-draft-tokens 41\n")
    assert "verified · target layers read: 2, 4, 5" in done.stderr
    assert "SGLang counts the root too: 41 draft tokens" in done.stderr
    assert "SGLang is not installed beside fledge, so its acceptance was not" in done.stderr
    done = run("import", out, "--target", target, "--out", back)
    assert done.exit_code == 0, done.stderr
    assert "13 tensors, read from fledge's layout; target layers 2, n//2, n-3" in done.stderr
    assert_same(load_head(back), load_head(head))


def test_json_documents(run: RunProgram, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = json.loads(run("export", head, "--to", "vllm", "--out", out, "--json").stdout)
    assert document["files"] == ["README.md", "config.json", "model.safetensors"]
    assert document["serve_command"].startswith("vllm serve TARGET --speculative-config ")
    assert set(document) == {"directory", "to", "files", "serve_command", "notes", "checks"}
    document = json.loads(run("import", out, "--out", tmp_path / "back", "--json").stdout)
    assert document["num_tensors"] == 13
    assert set(document) == {"directory", "source", "layout", "num_tensors", "layers", "notes"}


def test_settings_of_a_tuning(run: RunProgram, head: Path, tmp_path: Path) -> None:
    row = {"depth": 5, "width": 4, "budget": 12, "speedup": 2.0}
    (tmp_path / "tune.json").write_text(json.dumps({"rows": [row]}))
    words = ("export", head, "--to", "sglang", "--tuned", tmp_path, "--out", tmp_path / "out")
    done = run(*words)
    assert done.stdout.endswith("-eagle-topk 4 --speculative-num-draft-tokens 13\n")
    for typed in (("--depth", 3), ("--width", 1)):
        again = run(*words, *typed)
        assert again.exit_code == 2
        assert "either --tuned, or --depth" in again.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("export", "HEAD", "--to", "onnx", "--out", "new"), 2, "'onnx' is none of vllm, sglang"),
        (("export", "HEAD", "--to", "gguf", "--out", "new"), 2, "name the target with --target"),
        (("export", "nowhere", "--to", "vllm", "--out", "new"), 1, "there is no head directory"),
        (("export", "HEAD", "--to", "vllm", "--out", "HEAD"), 1, "exists already"),
        (("export", "HEAD", "--to", "vllm", "--out", "new", "--width", 4), 2, "need --depth"),
        ((*VLLM, "--width", 1), 2, "need --depth"),
        ((*VLLM, "--depth", 3, "--budget", 0), 2, "tree budget is 0"),
        ((*VLLM, "--engine-python", "x"), 2, "it belongs to --verify"),
        ((*VLLM, "--engine-python", "x", "--verify"), 2, "it needs --target"),
        (
            ("export", "HEAD", "--to", "eagle", "--out", "new", "--verify", "--engine-python", "x"),
            2,
            "an export for eagle is not run by fledge",
        ),
        ((*VLLM, "--precision", "q8_0"), 2, "--precision q8_0 is for GGUF heads"),
        (("export", "HEAD", "--to", "vllm", "--out", "FILE/new"), 2, "Choose a directory you may"),
        (("import", "HEAD", "--out", "FILE/new"), 2, "Choose a directory you may"),
        (("export", "FILE", "--to", "vllm", "--out", "new"), 1, "is a file; give the directory"),
        (("import", "nowhere", "--out", "new"), 1, "there is no head directory nowhere"),
    ],
)
def test_mistakes(
    run: RunProgram, head: Path, tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    file = head / "config.json"
    places = {"HEAD": head, "FILE": file, "FILE/new": file / "new", "new": tmp_path / "new"}
    done = run(*(places.get(word, word) for word in words))
    assert done.exit_code == code
    assert message in done.error
    assert not (tmp_path / "new").exists()
