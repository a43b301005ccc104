"""The default head where the device is known late: the server's engine, bench, other engines."""

import socket
from pathlib import Path

from fledge.cli.bench import _own_arms
from fledge.cli.drafting import Drafting, choose_drafting
from fledge.cli.engine_options import NOTHING_TYPED, TypedDrafting
from fledge.cli.loading import load
from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.progress import SilentProgress
from fledge.contracts.settings import CONTROLLERS, EngineSettings, TreeSettings
from fledge.server.engine_process import Sender, _load
from fledge.server.wire import EngineChoice
from tests.e2e.conftest import RunProgram

TUNED = TreeSettings(depth=3, width=2, budget=5)


def drafting(target: Path, head: str = "default", typed: TypedDrafting = NOTHING_TYPED) -> Drafting:
    return choose_drafting(head, target=str(target), typed=typed)


def test_the_engine_of_a_server_is_tuned(heads: Path, target_dir: Path) -> None:
    chosen = drafting(target_dir)
    assert chosen.head == heads / target_dir.name
    assert set(chosen.tuned_by_kind) == {"cpu"}
    choice = EngineChoice(
        target=str(target_dir),
        head=chosen.head,
        dtype="auto",
        device="cpu",
        settings=EngineSettings(max_requests=4, cache_tokens=2048),
        tuned=chosen.tuned_by_kind,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = _load(choice, Sender(ours))
    assert engine.settings.tree == TUNED
    assert engine.settings.controller == "adaptive", "tuned for one request, and four may come"


def test_bench_compares_with_the_default_head(heads: Path, target_dir: Path) -> None:
    def arms(chosen: Drafting) -> dict[str, object]:
        made, _ = _own_arms(
            chosen,
            BenchSettings(concurrency=(1, 2)),
            {"target": str(target_dir), "dtype": "auto", "device": "cpu"},
            is_offline=True,
            progress=SilentProgress(),
        )
        return {arm.name: arm.identity for arm in made}

    with_head = arms(drafting(target_dir))
    assert list(with_head) == ["plain", "head"]
    engine = with_head["head"]
    assert isinstance(engine, dict)
    assert engine["engine"]["tree"] == {"depth": 3, "width": 2, "budget": 5}
    assert list(arms(drafting(target_dir, "none"))) == ["plain"]


def test_what_is_typed_counts_more_than_the_tuning(heads: Path, target_dir: Path) -> None:
    chosen = drafting(target_dir, typed=TypedDrafting(depth=2))
    assert chosen.head is not None
    assert chosen.shipped is None
    tuned = chosen.tuned_on("cpu")
    assert tuned is not None
    assert tuned.tree.depth == 2
    usual = TreeSettings()
    for typed in (
        TypedDrafting(depth=usual.depth),
        TypedDrafting(width=usual.width),
        TypedDrafting(budget=usual.budget),
    ):
        tuned = drafting(target_dir, typed=typed).tuned_on("cpu")
        assert tuned is not None
        assert tuned.tree == usual, "the usual value, and typed"
    assert drafting(target_dir).tuned_on("cuda") is None
    by_path = drafting(target_dir, str(heads / target_dir.name))
    assert by_path.head == heads / target_dir.name
    assert by_path.tuned_on("cpu") is None, "a directory is taken as it is"


def test_a_typed_controller_counts_more_than_the_tuned_one(heads: Path, target_dir: Path) -> None:
    def engine(chosen: Drafting) -> EngineSettings:
        choice = chosen.choice(str(target_dir), dtype="auto", device="cpu", max_requests=1)
        return load(choice).engine.settings

    assert engine(drafting(target_dir)).controller == "fixed", "as it was tuned for one request"
    for name in CONTROLLERS:
        settings = engine(drafting(target_dir, typed=TypedDrafting(controller=name)))
        assert (settings.tree, settings.controller) == (TUNED, name)


def test_a_server_of_others_gets_the_head_too(
    run: RunProgram, heads: Path, target_dir: Path
) -> None:
    asked = ("serve", "--target", target_dir, "--engine", "vllm", "--print-command")
    # Four layers are too few for three different taps, which is for whoever exports to refuse.
    assert "the head reads the target after [2, 2, 1] completed layers" in run(*asked).error
    plain = run(*asked, "--head", "none")
    assert plain.exit_code == 0
    assert "speculative" not in plain.stdout
