"""The page: what it is about, what it says, and that it needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fledge.contracts.errors import ArtifactError, ConfigError
from fledge.contracts.progress import SilentProgress
from fledge.lab.report import Report, compose, make_report
from fledge.lab.report_select import acceptance
from fledge.lab.report_sources import read_sources
from fledge.store.manifest import CORPUS, TUNING
from tests.unit.lab.result_dirs import (
    bench_dir,
    every_dir,
    select_dir,
    train_dir,
    tune_dir,
    write_stage,
)

FAMILIAR = (
    "Accept length against speed-up",
    "Acceptance at each depth",
    "Throughput against concurrency",
    "Time per token against concurrency",
    "Speed-up by depth and width",
    "Speed-up by task",
    "Accept length while training",
)
"""The pictures that people know from this field."""


def report(paths: list[Path], out: Path) -> tuple[Report, str]:
    made = make_report(paths, out, has_pictures=False, progress=SilentProgress())
    return made, (out / "report.html").read_text(encoding="utf-8")


class Page(HTMLParser):
    """Open elements, the addresses that are asked for, and texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.asked += [value for name in ("src", "href") if (value := found.get(name))]
        self.ids += [value] if (value := found.get("id")) else []
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_one_page_about_everything(tmp_path: Path) -> None:
    made, html = report(every_dir(tmp_path / "results"), tmp_path / "out")
    page = Page(html)
    assert page.open == []
    # Nothing is loaded from anywhere: links lead into the page itself.
    assert all(address.startswith("#") for address in page.asked)
    assert {address[1:] for address in page.asked} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "<script" not in html
    assert "http" not in re.sub(r"<dd>.*?</dd>", "", html)
    for title in FAMILIAR:
        assert f"<h3>{title}</h3>" in html
    assert html.count("<figure>") == html.count('role="img"') == len(made.charts)
    assert html.count("Figures as a table") == len(made.charts)
    assert all(chart.rows and chart.heads for chart in made.charts)
    assert "prefers-color-scheme: dark" in html
    assert "faster than plain up to about" in page.text
    assert "crossover at" in page.text
    assert "Correlation 0." in page.text or "Correlation 1." in page.text


def test_data_and_pictures_beside_the_page(tmp_path: Path) -> None:
    paths = [tune_dir(tmp_path / "tune")]
    out = tmp_path / "out"
    make_report(paths, out, title="Older", has_pictures=False, progress=SilentProgress())
    made = make_report(paths, out, title="Mine", progress=SilentProgress())
    data = json.loads((out / "report.json").read_text())
    assert data["title"] == made.title == "Mine"
    assert [source["kind"] for source in data["sources"]] == ["tuning"]
    names = {chart["name"] for chart in data["charts"]}
    assert names == {path.stem for path in (out / "plots").glob("*.png")}
    (best, *_) = data["figures"]
    assert best["label"] == "fastest tree"
    assert data["sources"][0]["document"]["rows"][0]["depth"] == 1


def test_several_of_a_kind_are_compared_in_one_picture(tmp_path: Path) -> None:
    paths = [
        bench_dir(tmp_path / "june" / "bench", gain=1.5, rates=()),
        bench_dir(tmp_path / "july" / "bench", gain=2.5, rates=()),
        train_dir(tmp_path / "a"),
        train_dir(tmp_path / "b"),
        select_dir(tmp_path / "first", num_heads=3),
        select_dir(tmp_path / "second", num_heads=2),
    ]
    made = compose(read_sources(paths))
    charts = {chart.name: chart for chart in made.charts}
    assert [series.name for series in charts["throughput"].series] == [
        "june/bench: plain",
        "june/bench: head",
        "july/bench: plain",
        "july/bench: head",
    ]
    assert not any(series.is_plain for series in charts["throughput"].series)
    assert [one.name for one in charts["accept-length-while-training"].series] == ["a", "b"]
    scatter = charts["accept-length-against-speed-up"]
    assert [len(series.spots) for series in scatter.series] == [3, 2, 2]
    assert scatter.reading.startswith("Correlation ")
    assert "speed-up-by-task-first" in charts
    assert charts["speed-up-by-task-first"].title == "Speed-up by task: first"
    assert made.headline.startswith("First: step-600 is the fastest head. Second: step-400 is")
    assert made.tiles[0].detail.startswith("first: step-600")
    assert "june/bench: head is faster than plain" in made.headline.lower()


def test_unfinished_and_doubtful_results_say_so(tmp_path: Path) -> None:
    bench = bench_dir(tmp_path / "bench", is_finished=False)
    document = json.loads((bench / "bench.json").read_text())
    document["warnings"] = ["the client was busy <always>"]
    (bench / "bench.json").write_text(json.dumps(document))
    _, html = report([bench, train_dir(tmp_path / "run", is_finished=False)], tmp_path / "out")
    assert "bench is unfinished: these are its figures so far." in html
    assert "run is unfinished" in html
    assert "bench: the client was busy &lt;always&gt;" in html


def test_a_run_without_measurements_has_a_page(tmp_path: Path) -> None:
    empty = select_dir(tmp_path / "select", num_heads=0)
    run = train_dir(tmp_path / "run", steps=0)
    (run / "curves.jsonl").unlink()
    made, html = report([empty, run], tmp_path / "out")
    assert made.charts == []
    assert html.count("Nothing was measured yet.") == 2
    assert "no numbers" in html, "why the head failed"


def test_acceptance_is_averaged_over_tasks_that_reached_a_depth() -> None:
    tasks = {
        "a": {"figures": {"acceptance_at_depth": [0.8, 0.6]}},
        "b": {"figures": {"acceptance_at_depth": [0.4]}},
        "c": {"figures": {"acceptance_at_depth": [None, None]}},
    }
    assert acceptance({"tasks": tasks}) == pytest.approx([0.6, 0.6])


def test_wrong_directories(tmp_path: Path) -> None:
    bench = bench_dir(tmp_path / "bench", levels=(1,), rates=())
    with pytest.raises(ConfigError, match="there is nothing to report on; name at least one"):
        read_sources([])
    with pytest.raises(ConfigError, match="bench is named twice; name it once"):
        read_sources([bench, tmp_path / "x" / ".." / "bench"])
    with pytest.raises(ArtifactError, match="there is no directory"):
        read_sources([tmp_path / "nowhere"])
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="file is a file, and no directory"):
        read_sources([tmp_path / "file"])
    (tmp_path / "strange").mkdir()
    with pytest.raises(ArtifactError, match=r"neither manifest\.json nor plan\.json. Give"):
        read_sources([tmp_path / "strange"])
    corpus = write_stage(tmp_path / "corpus", CORPUS, {"rows": b"x"})
    with pytest.raises(ArtifactError, match="holds corpus, which a report says nothing about"):
        read_sources([corpus])
    early = write_stage(tmp_path / "early", TUNING, {}, is_finished=False)
    with pytest.raises(ArtifactError, match=r"has no tune\.json yet: nothing was measured"):
        read_sources([early])
    (early / "tune.json").write_text('{"rows": [{"depth": 1}]}')
    with pytest.raises(ArtifactError, match=r"tune\.json has no rows with depth, width, budget"):
        compose(read_sources([early]))
    for content, problem in (("{", "is damaged: Expecting"), ("[]", "it is not a table")):
        (early / "tune.json").write_text(content)
        with pytest.raises(ArtifactError, match=problem):
            read_sources([early])
    run = train_dir(tmp_path / "run", steps=8)
    (run / "curves.jsonl").write_text("{\n")
    with pytest.raises(ArtifactError, match=r"curves\.jsonl"):
        read_sources([run])
