"""The stage as a whole: what comes out, what is counted, what is refused."""

import errno
import io
import json
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fledge.contracts.conversation import Conversation, Origin
from fledge.contracts.data_settings import (
    DecontaminateSettings,
    DuplicateSettings,
    PrepareSettings,
    PrivacySettings,
    SelfSettings,
    SourceSettings,
)
from fledge.contracts.errors import ArtifactError, CapacityError, ConfigError, MismatchError
from fledge.contracts.progress import SilentProgress
from fledge.data import inputs
from fledge.data.card import ROW_COUNTS
from fledge.data.prepare import prepare
from fledge.data.prepare_estimate import estimate_prepare
from fledge.data.self_filter import DiversityMeter, SelfPromptReport
from fledge.data.sources.places import SourceFile
from fledge.store.manifest import Manifest, read_manifest
from fledge.store.rows import read_rows
from fledge.store.stage_directory import open_stage
from tests.unit.data.prepare_support import BENCHMARK, chat, contents, sentence, write_sources


def run(settings: PrepareSettings, base: Path, out: Path, **options: Any) -> Manifest:
    return prepare(
        settings,
        out,
        target="tiny",
        base=base,
        progress=SilentProgress(),
        **{"self_prompts": None, **options},
    )


def read_card(out: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((out / "card.json").read_text(encoding="utf-8"))
    return card


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[PrepareSettings, Path]:
    base = tmp_path_factory.mktemp("sources")
    return write_sources(base), base


@pytest.fixture(scope="module")
def finished(
    sources: tuple[PrepareSettings, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    run(*sources, out)
    return out


def test_every_filter_counts_what_it_drops(finished: Path) -> None:
    card = read_card(finished)
    by_name = {entry["name"]: entry for entry in card["sources"]}
    assert by_name["chat"]["rows"] == {
        "read": 216,
        "bad": 2,
        "private": 2,
        "exact_duplicates": 5,
        "near_duplicates": 4,
        "overlaps": 3,
        "kept": 200,
        "left_out": 0,
        "out": 200,
    }
    assert by_name["prompts"]["rows"]["out"] == 100
    assert by_name["prompts"]["identifiers"] == {"email": 6}
    assert (by_name["shared"]["rows"]["bad"], by_name["shared"]["rows"]["out"]) == (1, 49)
    assert by_name["chat"]["overlaps"] == {"bench.jsonl": 3}
    assert [row["line"] for row in by_name["chat"]["bad_rows"]] == [4, 5]
    assert card["licences"] == {"Apache-2.0": 49, "CC0-1.0": 100, "MIT": 200}


def assert_counts_add_up(card: dict[str, Any], num_rows: int) -> None:
    for entry in [*card["sources"], card["totals"]]:
        rows = entry["rows"]
        assert tuple(rows) == ROW_COUNTS
        dropped = rows["private"] + rows["exact_duplicates"] + rows["near_duplicates"]
        assert rows["read"] == rows["bad"] + dropped + rows["overlaps"] + rows["kept"]
        assert rows["kept"] == rows["left_out"] + rows["out"]
        assert sum(entry["overlaps"].values()) == rows["overlaps"]
    for name in ROW_COUNTS:
        assert card["totals"]["rows"][name] == sum(e["rows"][name] for e in card["sources"])
    for entry in card["sources"]:
        assert sum(entry["bad_by_reason"].values()) == entry["rows"]["bad"]
    output = card["output"]
    assert card["rows"] == output["rows"] == card["totals"]["rows"]["out"] == num_rows
    assert sum(output["languages"].values()) == sum(output["scripts"].values()) == num_rows
    assert sum(card["licences"].values()) == num_rows


def test_counts_add_up(finished: Path) -> None:
    assert_counts_add_up(read_card(finished), len(list(read_rows(finished))))


def test_rows_keep_where_they_came_from(finished: Path) -> None:
    rows = list(read_rows(finished))
    assert len({row.id for row in rows}) == len(rows)
    licences = {"chat": "MIT", "prompts": "CC0-1.0", "shared": "Apache-2.0"}
    for row in rows:
        assert row.origin.licence == licences[row.origin.source]
        assert row.origin.file in ("chat.jsonl", "prompts.txt", "shared.json")
    texts = [message["content"] for row in rows for message in row.messages]
    assert not [text for text in texts if "example.org" in text or "4111" in text]
    assert not [text for text in texts if BENCHMARK in text]


def test_only_the_result_is_left(finished: Path) -> None:
    manifest = read_manifest(finished)
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "rows-00000.jsonl",
        "card.json",
        "card.md",
        "manifest.json",
        "plan.json",
        ".lock",
    }
    assert set(manifest.files) == {"rows-00000.jsonl", "card.json", "card.md"}
    assert manifest.counts["rows"] == 349
    assert manifest.counts["sources"]["chat"]["out"] == 200
    assert manifest.plan.identity == {}
    assert set(manifest.plan.parents) == {
        "chat: chat.jsonl",
        "prompts: prompts.txt",
        "shared: shared.json",
        "benchmarks: bench.jsonl",
    }


def test_the_page_shows_the_figures(finished: Path) -> None:
    page = (finished / "card.md").read_text(encoding="utf-8")
    assert "349 conversations from 3 sources" in page
    assert "| chat | 216 | 2 | 2 | 5 | 4 | 3 | 200 | 0 | 200 |" in page
    assert "`chat.jsonl:4`" in page
    assert "| prompts | 0 | 6 |" in page


def test_the_same_work_has_the_same_bytes_and_fingerprint(
    sources: tuple[PrepareSettings, Path], finished: Path, tmp_path: Path
) -> None:
    again = run(*sources, tmp_path / "again", rows_per_save=50)
    ours, theirs = contents(tmp_path / "again"), contents(finished)
    for name in ("rows-00000.jsonl", "plan.json"):
        assert ours[name] == theirs[name]
    # The index was built in other steps, so its bytes per row may differ; nothing else does.
    cards = [read_card(tmp_path / "again"), read_card(finished)]
    for card in cards:
        assert card["duplicate_index"].pop("bytes_per_row") > 0
    assert cards[0] == cards[1]
    run(*sources, tmp_path / "third", rows_per_save=50)
    assert read_manifest(tmp_path / "third").fingerprint == again.fingerprint


def test_other_processes_change_nothing(
    sources: tuple[PrepareSettings, Path], finished: Path, tmp_path: Path
) -> None:
    run(*sources, tmp_path / "out", num_workers=2)
    assert contents(tmp_path / "out") == contents(finished)


def test_a_worker_that_dies_is_an_error_in_words(
    sources: tuple[PrepareSettings, Path], tmp_path: Path
) -> None:
    settings, base = sources
    own = SourceSettings(name="own", path=("self",), licence="MIT")

    def kill_worker(*_: object) -> Iterator[Conversation]:
        for number, row in enumerate(OwnPrompts()(own, SelfSettings(rows=1200), 0, ())):
            if number == 600:
                for child in multiprocessing.active_children():
                    child.kill()
            yield row

    with pytest.raises(CapacityError, match="has died, .* fewer than 2 workers"):
        run(
            replace(settings, sources=(own,)),
            base,
            tmp_path / "out",
            num_workers=2,
            self_prompts=kill_worker,
        )


def test_finished_work_is_not_done_again(
    sources: tuple[PrepareSettings, Path], finished: Path
) -> None:
    before = (finished / "manifest.json").read_bytes()
    (finished / "work").mkdir()  # a run killed while it tidied up
    run(*sources, finished)
    assert (finished / "manifest.json").read_bytes() == before
    assert not (finished / "work").exists()


def test_caps_and_weights(sources: tuple[PrepareSettings, Path], tmp_path: Path) -> None:
    settings, base = sources
    chat_source, prompts, shared = settings.sources
    blended = replace(
        settings,
        sources=(replace(chat_source, weight=3.0), prompts, replace(shared, max_rows=10)),
        rows=130,
    )
    run(blended, base, tmp_path / "out")
    card = read_card(tmp_path / "out")
    assert [entry["rows"]["out"] for entry in card["sources"]] == [90, 30, 10]
    assert [entry["rows"]["left_out"] for entry in card["sources"]] == [110, 70, 39]
    assert_counts_add_up(card, 130)
    rows = list(read_rows(tmp_path / "out"))
    for start in range(0, 130, 13):  # spread evenly, in the order of each source
        share = [row.origin.source for row in rows[start : start + 13]]
        assert 7 <= share.count("chat") <= 11
    numbers = [row.origin.row for row in rows if row.origin.source == "chat"]
    assert numbers == sorted(numbers)
    run(replace(blended, seed=1), base, tmp_path / "other")
    assert {row.id for row in rows} != {row.id for row in read_rows(tmp_path / "other")}


def test_a_blend_larger_than_its_sources_takes_all(
    sources: tuple[PrepareSettings, Path], tmp_path: Path
) -> None:
    settings, base = sources
    assert run(replace(settings, rows=10_000), base, tmp_path / "out").counts["rows"] == 349


def test_filters_can_be_turned_off(sources: tuple[PrepareSettings, Path], tmp_path: Path) -> None:
    settings, base = sources
    plain = replace(
        settings,
        privacy=PrivacySettings(enabled=False),
        duplicates=DuplicateSettings(exact=False, near=False),
        decontaminate=DecontaminateSettings(),
    )
    run(plain, base, tmp_path / "out")
    card = read_card(tmp_path / "out")
    assert card["totals"]["rows"]["out"] == card["totals"]["rows"]["read"] - 3
    assert_counts_add_up(card, 214 + 100 + 49)
    page = (tmp_path / "out" / "card.md").read_text()
    for text in ("turns privacy off", "not compared with benchmark", "turns both kinds off"):
        assert text in page


class OwnPrompts:
    """Stands for a target that writes prompts."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def __call__(
        self, source: SourceSettings, settings: SelfSettings, seed: int, examples: Sequence[str]
    ) -> Iterator[Conversation]:
        assert not examples
        self.calls.append((source.name, settings.rows, seed))
        rng = random.Random(seed)
        for number in range(1, settings.rows + 1):
            yield Conversation(
                id=f"{source.name}/{number}",
                messages=({"role": "user", "content": sentence(rng)},),
                origin=Origin(source=source.name, licence=source.licence, file="self", row=number),
            )

    def report(self, source_name: str) -> SelfPromptReport:
        meter = DiversityMeter()
        for _ in range(40):
            meter.keep([source_name])
        return meter.report()


def test_prompts_of_the_target_are_a_source_like_others(
    sources: tuple[PrepareSettings, Path], tmp_path: Path
) -> None:
    settings, base = sources
    own = SourceSettings(name="own", path=("self",), licence="Apache-2.0")
    mixed = replace(
        settings, sources=(settings.sources[2], own), self_prompts=SelfSettings(rows=40), seed=5
    )
    prompts = OwnPrompts()
    manifest = run(mixed, base, tmp_path / "out", self_prompts=prompts)
    assert prompts.calls == [("own", 40, 5)]
    assert manifest.plan.identity == {"target": "tiny"}
    assert manifest.counts["sources"]["own"]["out"] == 40
    card = read_card(tmp_path / "out")
    assert card["target"] == "tiny"
    assert card["sources"][1]["self_prompts"]["kept"] == 40
    assert "| own | 40 | 40 |" in (tmp_path / "out" / "card.md").read_text(encoding="utf-8")
    assert_counts_add_up(card, 89)
    with pytest.raises(ConfigError, match="source own takes its prompts from the target"):
        run(mixed, base, tmp_path / "none")


def test_a_source_may_have_self_prompts_of_its_own(
    sources: tuple[PrepareSettings, Path], tmp_path: Path
) -> None:
    settings, base = sources
    own = SourceSettings(name="own", path=("self",), licence="Apache-2.0")
    code = replace(own, name="own-code", self_prompts={"rows": 30, "topics": ["sorting"]})
    both = replace(settings, sources=(own, code), self_prompts=SelfSettings(rows=40))
    estimate = estimate_prepare(both, tmp_path, base=base, progress=SilentProgress())
    assert [one.rows for one in estimate.sources] == [40, 30]
    prompts = OwnPrompts()
    manifest = run(both, base, tmp_path / "out", self_prompts=prompts)
    assert prompts.calls == [("own", 40, 0), ("own-code", 30, 0)]
    # A source without any has the plan that it had before there were any.
    planned = manifest.plan.settings["sources"]
    before = {"name", "path", "licence", "format", "weight", "max_rows", "variants"}
    assert set(planned[0]) == before
    assert planned[1]["self_prompts"] == {"rows": 30, "topics": ["sorting"]}
    other = replace(code, self_prompts={"rows": 30, "topics": ["searching"]})
    with pytest.raises(MismatchError, match=r"sources\[1\].self_prompts.topics\[0\] = 'sorting'"):
        run(replace(both, sources=(own, other)), base, tmp_path / "out", self_prompts=prompts)


def test_a_directory_of_other_work_is_refused(
    sources: tuple[PrepareSettings, Path], finished: Path
) -> None:
    settings, base = sources
    with pytest.raises(MismatchError, match=r"finished work with settings.seed = 0, and this run"):
        run(replace(settings, seed=3), base, finished)


def test_an_input_that_changed_is_noticed(tmp_path: Path) -> None:
    settings = write_sources(tmp_path, num_rows=20)
    run(settings, tmp_path, tmp_path / "out")
    with (tmp_path / "prompts.txt").open("a") as file:
        file.write("One more prompt.\n")
    with pytest.raises(MismatchError, match=r"finished work with parents\.prompts: prompts\.txt ="):
        run(settings, tmp_path, tmp_path / "out")


def test_two_runs_into_one_directory(sources: tuple[PrepareSettings, Path], finished: Path) -> None:
    with (
        open_stage(finished, read_manifest(finished).plan),
        pytest.raises(ArtifactError, match="another fledge process is writing"),
    ):
        run(*sources, finished)


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(
        "\n".join([chat(BENCHMARK), chat(f"{BENCHMARK} Why?"), chat(f"Hm. {BENCHMARK}")])
    )
    (tmp_path / "bench.jsonl").write_text(json.dumps({"prompt": BENCHMARK}))
    settings = PrepareSettings(
        sources=(SourceSettings(name="chat", path=("chat.jsonl",), licence="MIT"),),
        decontaminate=DecontaminateSettings(against=("bench.jsonl",)),
        duplicates=DuplicateSettings(exact=False, near=False),
    )
    with pytest.raises(
        ConfigError, match=r"no rows are left of the 3 .* \(3 in a benchmark\)\. Loosen"
    ):
        run(settings, tmp_path, tmp_path / "out")


def test_missing_files_are_named(tmp_path: Path) -> None:
    settings = write_sources(tmp_path, num_rows=20)
    (tmp_path / "shared.json").unlink()
    with pytest.raises(ArtifactError, match=r"there is no file or directory .*shared\.json"):
        run(settings, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bad_row_can_end_the_run(tmp_path: Path) -> None:
    settings = replace(write_sources(tmp_path, num_rows=20), on_bad_row="stop")
    with pytest.raises(ArtifactError, match=r"chat\.jsonl, line 4"):
        run(settings, tmp_path, tmp_path / "out")


def test_brackets_in_the_recipes_directory_are_no_pattern(tmp_path: Path) -> None:
    base = tmp_path / "data [old]"
    base.mkdir()
    settings = write_sources(base, num_rows=20)
    source = SourceSettings(name="all", path=("prompt*.txt",), licence="MIT")
    manifest = run(replace(settings, sources=(source,)), base, tmp_path / "out")
    assert manifest.counts["rows"] == 10


def test_an_input_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = write_sources(tmp_path, num_rows=20)

    def fail(path: Path, task: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(inputs, "hash_part", fail)  # a disk with a bad sector
    with pytest.raises(ArtifactError, match=r"chat\.jsonl cannot be read: Input/output error\."):
        run(settings, tmp_path, tmp_path / "out")


def test_inputs_elsewhere_are_known_by_name_and_size(tmp_path: Path) -> None:
    remote = SourceFile(name="x", identity="s3://bucket/x", size=12, open=lambda: io.BytesIO())
    with SilentProgress().task("checking") as task:
        assert inputs._fingerprint(remote, task) == "s3://bucket/x, 12 bytes"
    settings = write_sources(tmp_path, num_rows=20)
    cloud = replace(settings.sources[0], path=("s3://bucket/x", "hf://owner/name", "self.jsonl"))
    resolved = inputs.resolve_paths(replace(settings, sources=(cloud,)), Path("/base"))
    assert resolved.sources[0].path == ("s3://bucket/x", "hf://owner/name", "/base/self.jsonl")
    assert resolved.decontaminate.against == ("/base/bench.jsonl",)
