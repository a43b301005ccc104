"""`fledge bench` and `fledge report` as users run them; servers are scripted, or our own."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import RunProgram
from tests.unit.lab.result_dirs import bench_dir
from tests.unit.lab.scripted_server import scripted_server

LOAD = ("--concurrency", "1,2", "--requests", "2", "--repeats", "1", "--set", "bench.waves=1")


@pytest.fixture(autouse=True)
def _quick_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client costs is measured elsewhere."""
    cost = {"s_per_chunk": 1e-4, "most_chunks_per_s": 1e4, "first_token_s": 1e-3}
    monkeypatch.setattr("fledge.lab.bench.measure_client", lambda: cost)


def test_a_server_by_its_address(run: RunProgram, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with scripted_server(key="sesame") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_KEY", "sesame")
        command = ["bench", f"mine={server.url}", "--out", out, *LOAD, "--api-key-env", "MY_KEY"]
        command += ["--rates", "50", "--gpu-price", "H200=3.5", "--slo", "ttft=60s,tpot=60s"]
        done = run(*command)
        assert done.exit_code == 0, done.stderr
        again = run(*command, "--json")
        patch.setenv("MY_KEY", "cumin")
        refused = run(*command[:-1], "ttft=1s", "--set", "bench.seed=1", "--out", tmp_path / "o2")
    assert done.stdout == f"{out}\n"
    assert "2 at once  mine" in done.stderr
    assert "client: at most" in done.stderr
    document = json.loads(again.stdout)
    assert document.pop("out") == str(out)
    assert document == json.loads((out / "bench.json").read_text())
    assert [row["level"] for row in document["rows"]] == [1, 2, 50.0]
    assert document["rows"][0]["goodput_per_s"]["value"] > 0
    assert document["rows"][0]["cost_per_million_tokens"]["H200"]["value"] > 0
    assert refused.exit_code == 2
    assert "refused the key (401: wrong API key)" in refused.error
    assert "sesame" not in (out / "bench.json").read_text()


def test_a_server_that_dies(run: RunProgram, tmp_path: Path) -> None:
    with scripted_server(dies_at=6) as server:
        done = run("bench", server.url, "--out", tmp_path / "out", *LOAD)
    assert done.exit_code == 1
    assert "does not answer any more" in done.error
    drawn = run("report", tmp_path / "out", "--out", tmp_path / "report", "--no-png")
    assert drawn.exit_code == 0
    assert "out is unfinished" in (tmp_path / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either the URL of a server, or --target to have one started"),
        (["http://x", "--target", "t"], "give either the URL of a server, or --target"),
        (["http://x", "--head", "h"], "--head and --offline go with --target; a server behind"),
        (["ftp://x"], "URL 'ftp://x' is not a URL; it must be like http://localhost:8000/v1"),
        (["http://x", "--concurrency", "a"], "--concurrency 'a' is not a list of numbers like"),
        (["http://x", "--concurrency", "none"], "there is no load: give concurrency, rates, or"),
        (["http://x", "--gpu-price", "H=x"], "--gpu-price 'H=x' is not of the form H200=3.5"),
        (["http://x", "--slo", "ttft"], "is not of the form ttft=500ms,tpot=30ms"),
        (["http://x", "--prompts", "nowhere.jsonl"], "there is no suite 'nowhere.jsonl'"),
        (["http://x", "--api-key-env", "NOT_SET"], "names NOT_SET, which is not set or empty"),
    ],
)
def test_wrong_use(run: RunProgram, tmp_path: Path, words: list[str], message: str) -> None:
    done = run("bench", *words, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert message in done.error


def test_report(run: RunProgram, tmp_path: Path) -> None:
    bench = bench_dir(tmp_path / "bench", levels=(1, 4), rates=())
    done = run("report", bench, "--out", tmp_path / "page", "--title", "Mine", "--no-png")
    assert done.stdout == f"{tmp_path / 'page' / 'report.html'}\n"
    assert "Head is faster than plain at every load" in done.stderr
    done = run("report", bench, "--out", tmp_path / "page", "--no-png", "--json")
    document = json.loads(done.stdout)
    assert document["out"] == str(tmp_path / "page")
    assert document["title"] == "Speculative decoding of smollm2-135m-instruct"
    wrong = run("report", tmp_path, "--out", tmp_path / "q")
    assert wrong.exit_code == 1
    assert "was not made by fledge" in wrong.error


@pytest.mark.slow
def test_our_own_server_with_and_without_a_head(
    run: RunProgram, target_dir: Path, head_dir: Path, tmp_path: Path
) -> None:
    """Four processes come and go, so this takes half a minute on a quiet machine."""
    done = run(
        "bench", "--target", target_dir, "--head", head_dir, "--device", "cpu", "--out",
        tmp_path / "out", *LOAD, "--set", "bench.prompt_len=4", "--max-tokens", "8",
        "--controller", "fixed", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert [arm["name"] for arm in document["arms"]] == ["plain", "head"]
    assert all(row["good"] == row["requests"] for row in document["rows"])
    assert document["rows"][0]["accept_length"]["value"] == 1.0
    assert document["comparisons"][0]["crossover"]["from"] == 1


@pytest.mark.slow
def test_a_head_of_another_target_is_found_out_first(
    run: RunProgram, target_dir: Path, foreign_head_dir: Path, tmp_path: Path
) -> None:
    command = ["bench", "--target", target_dir, "--device", "cpu", "--out", tmp_path / "out"]
    done = run(*command, "--head", foreign_head_dir)
    assert done.exit_code == 1
    assert done.error.startswith("the server did not start: ")
    assert "made for a target with target_hidden_size 64; this target has 32" in done.error


def test_what_is_no_head_is_refused_at_once(
    run: RunProgram, target_dir: Path, tmp_path: Path
) -> None:
    done = run("bench", "--target", target_dir, "--head", tmp_path, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert str(tmp_path) in done.error
    assert not (tmp_path / "out").exists()
