"""`fledge train` as a user runs it, up to a head that drafts."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fledge.store.manifest import read_manifest
from fledge.training.curves import read_curves
from tests.e2e.conftest import RunProgram
from tests.unit.features.capture_support import random_samples, save_corpus
from tests.unit.training.train_support import curve
from tests.warm_programs import WarmPrograms

SMALL = {
    "epochs": 2,
    "max_steps": 6,
    "micro_tokens": 96,
    "batch_tokens": 96,
    "loss.steps": 2,
    "held_out.share": 0.1,
    "held_out.every": 2,
    "held_out.decode_prompts": 2,
    "held_out.decode_tokens": 6,
}


def settings(**changes: object) -> list[str]:
    """As words of a command line; dots are written as double underscores."""
    named = {**SMALL, **{name.replace("__", "."): value for name, value in changes.items()}}
    return [word for name, value in named.items() for word in ("--set", f"train.{name}={value}")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    samples = random_samples([40, 50, 60, 30, 20, 80, 90, 25] * 2)
    return save_corpus(tmp_path_factory.mktemp("train") / "corpus", target_dir, samples)


def test_from_a_corpus_to_a_head_that_drafts(
    run: RunProgram, tmp_path: Path, target_dir: Path, corpus: Path
) -> None:
    words = ("train", "--corpus", corpus, "--out", tmp_path / "run", "--target", target_dir)
    done = run(*words, *settings(), "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["out"] == str(tmp_path / "run")
    assert (document["mode"], document["steps"], document["planned_steps"]) == ("online", 6, 6)
    assert document["best"]["accept_length"] >= 1.0
    assert document["tokens_per_s"] > 0
    assert 0 <= document["data_wait_share"] <= 1
    assert document["fingerprint"] == read_manifest(tmp_path / "run").fingerprint
    assert "step 2 of 6, held out: loss " in done.stderr
    assert {"curves.html", "curves.png"} <= {path.name for path in (tmp_path / "run").iterdir()}
    for head in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000004"):
        options = ("--target", target_dir, "--head", head, "--controller", "fixed", "--depth", 2)
        answer = run("generate", "--prompt", "Hi", "--max-tokens", 4, *options, "--json")
        assert json.loads(answer.stdout)["accept_length"] >= 1.0

    again = run(*words, *settings())
    assert again.exit_code == 0
    assert again.stdout == f"{tmp_path / 'run'}\n"
    assert "6 steps, " in again.stderr
    other = run(*words, *settings(seed=3))
    assert other.exit_code == 1
    assert "finished work with settings.seed = 0, and this run has settings.seed = 3" in other.error


def test_a_head_is_trained_further(
    run: RunProgram, tmp_path: Path, target_dir: Path, corpus: Path
) -> None:
    words = ("train", "--corpus", corpus, "--target", target_dir)
    few = settings(max_steps=2, held_out__decode_prompts=0)
    assert run(*words, "--out", tmp_path / "first", *few).exit_code == 0
    onward = (*words, "--from", tmp_path / "first", "--out", tmp_path / "second", *few)
    done = run(*onward, "--json")
    assert done.exit_code == 0, done.stderr
    assert read_manifest(tmp_path / "second").plan.parents.keys() == {"corpus", "head"}
    later, earlier = (curve(tmp_path / name)[0][1]["loss"] for name in ("second", "first"))
    assert later < earlier
    refused = run(*onward, "--set", "train.head.fc_norm=true")
    assert refused.exit_code != 0
    assert "train.head.fc_norm=false" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_from_features_after_a_kill(
    run: RunProgram,
    warm: WarmPrograms,
    program: list[str],
    tmp_path: Path,
    target_dir: Path,
    corpus: Path,
) -> None:
    """The program is killed in the middle; the same command ends with the unbroken run's curve."""
    features = tmp_path / "features"
    chosen = ("--set", "capture.shard_tokens=300", "--target", target_dir)
    assert run("capture", corpus, "--out", features, *chosen).exit_code == 0
    more = settings(max_steps=24, epochs=10, held_out__every=3, held_out__decode_prompts=0)
    words = ["train", "--features", features, "--target", target_dir, *more]
    out = tmp_path / "run"
    process = warm.start(
        [*program, *words, "--out", out], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    while len(read_curves(out)) < 6 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    resumed, whole = (run(*words, "--out", place) for place in (out, tmp_path / "whole"))
    assert (resumed.exit_code, whole.exit_code) == (0, 0), resumed.stderr
    assert "of 24 steps were taken before." in resumed.stderr
    assert len(curve(out)) == 24
    for kind in ("train", "held_out"):
        assert curve(out, kind) == curve(tmp_path / "whole", kind)
    assert read_manifest(out).fingerprint == read_manifest(tmp_path / "whole").fingerprint


def test_a_plan_writes_nothing(
    run: RunProgram, tmp_path: Path, target_dir: Path, corpus: Path
) -> None:
    words = ("train", "--corpus", corpus, "--out", tmp_path / "run", "--target", target_dir)
    done = run(*words, *settings(), "--plan")
    assert done.exit_code == 0, done.stderr
    assert "takes: 6 steps, " in done.stdout
    assert "held-out measurements not counted" in done.stdout
    planned = json.loads(run(*words, *settings(), "--plan", "--json").stdout)
    assert (planned["mode"], planned["steps"]) == ("online", 6)
    assert planned["samples"] + planned["samples_held_out"] == 16
    assert planned["stored_bytes"] > 4 * planned["weights"]
    assert planned["device_bytes"] > 0
    more = save_corpus(tmp_path / "more", target_dir, random_samples([40] * 4, seed=1))
    done = run(*words, "--corpus", more, *settings(), "--plan", "--json")
    assert f"2 corpora; the draft vocabulary is that of the first, {corpus}" in done.stderr
    both = json.loads(done.stdout)
    assert both["samples"] + both["samples_held_out"] == 20
    assert both["read_bytes"] > planned["read_bytes"]
    assert not (tmp_path / "run").exists()


def test_wrong_use_is_said_in_one_line(
    run: RunProgram, tmp_path: Path, target_dir: Path, corpus: Path
) -> None:
    out = ("--out", tmp_path / "run", "--target", target_dir)
    for words in ((), ("--corpus", corpus, "--features", corpus)):
        wrong = run("train", *words, *out)
        assert wrong.exit_code == 2
        assert "give either --features" in wrong.error
    for kind in ("--corpus", "--features"):
        missing = run("train", kind, tmp_path / "nowhere", *out)
        assert (missing.exit_code, "there is no directory" in missing.error) == (1, True)
        file = run("train", kind, corpus / "manifest.json", *out)
        assert (file.exit_code, "manifest.json is a file; give" in file.error) == (2, True)
    words = ("train", "--corpus", corpus, "--target", target_dir, "--plan")
    cloud = run(*words, "--out", "s3://bucket/head")
    assert cloud.exit_code == 2
    assert "writes to a local directory only" in cloud.error
    unfit = run("train", "--features", corpus, *out)
    assert "holds corpus, not features" in unfit.error
    unknown = run("train", "--corpus", corpus, *out, "--set", "train.los.steps=3")
    assert "did you mean `loss`?" in unknown.error
    uneven = run("train", "--corpus", corpus, *out, "--set", "train.batch_tokens=10000")
    assert "must be a multiple" in uneven.error
    assert not (tmp_path / "run").exists()


def test_answers_longer_than_the_context_are_refused(
    run: RunProgram, tmp_path: Path, target_dir: Path, corpus: Path
) -> None:
    words = ("train", "--corpus", corpus, "--out", tmp_path / "run", "--target", target_dir)
    wrong = run(*words, *settings(held_out__decode_tokens=510))
    assert wrong.exit_code == 2
    assert "decode_tokens is 510, and with drafts of 2 tokens that leaves no room" in wrong.error
