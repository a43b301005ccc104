"""Charts as SVG, PNG and tables: what is drawn is what was measured."""

import math
import re
from xml.etree import ElementTree

import pytest

from fledge.lab.chart import (
    Axis,
    Chart,
    Kind,
    Mark,
    Series,
    Spot,
    log_ticks,
    nice_ticks,
    number,
    spot_values,
    tick_label,
)
from fledge.lab.chart_frame import make_frame
from fledge.lab.chart_heat import best_spot, shade
from fledge.lab.chart_png import draw_png
from fledge.lab.chart_svg import draw_svg
from fledge.lab.chart_tags import place_tags

PLAIN = Series(name="plain", spots=[Spot(1, 10, 9, 11), Spot(16, 40)], is_plain=True)
HEAD = Series(name="<head>", spots=[Spot(1, 25, 20, 30), Spot(16, 35, 34, 36)])


def chart(kind: Kind, series: list[Series], **changes: object) -> Chart:
    fields: dict[str, object] = {
        "name": "one",
        "title": "Tokens & time",
        "reading": "More is better.",
        "x": Axis(label="users", scale="log"),
        "y": Axis(label="tokens/s", includes=(0.0,)),
        "marks": [Mark("x", 8.0, "crossover"), Mark("y", 20.0, "limit")],
    }
    return Chart(kind=kind, series=series, **(fields | changes))


def elements(svg: str, css: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    return [one for one in root.iter() if css in one.get("class", "").split()]


def test_lines_stand_where_the_figures_are() -> None:
    svg = draw_svg(chart("lines", [PLAIN, HEAD]))
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert [child.text for child in root][:2] == ["Tokens & time", "More is better."]
    lines = [re.findall(r"[\d.]+", one.get("d", "")) for one in elements(svg, "line")]
    plain = [float(value) for value in lines[0]]
    assert plain[0] < plain[2]
    assert plain[1] > plain[3], "more is further up, where y is smaller"
    titles = [one[0].text for one in elements(svg, "dot") if len(one)]
    assert titles[0] == "plain, users 1.00: 10.0 (9.00 to 11.0)"
    assert titles[-1] == "<head>, users 16.0: 35.0 (34.0 to 36.0)"
    assert len(elements(svg, "band")) == 1, "a band needs two intervals"
    assert {one.text for one in elements(svg, "mark") if one.text} == {"crossover", "limit"}


def test_bars_begin_at_zero_and_have_whiskers() -> None:
    tasks = Axis(label="task", categories=("maths", "code"))
    series = [Series(name="a", spots=[Spot(0, 2.0, 1.5, 2.5), Spot(1, 4.0)])]
    svg = draw_svg(chart("bars", series, x=tasks, marks=[]))
    low, high = (float(one.get("height", "0")) for one in elements(svg, "bar"))
    assert high == pytest.approx(2 * low, rel=0.02)
    assert len(elements(svg, "whisker")) == 1
    assert "maths" in svg


def test_a_heat_map_shades_by_figure_and_frames_the_best() -> None:
    rows = [Series(name="1", spots=[Spot(0, 1.0), Spot(1, 1.5)])]
    rows.append(Series(name="2", spots=[Spot(0, 2.0), Spot(1, 3.0)]))
    widths, depths = Axis(label="width", categories=("1", "4")), Axis(label="depth")
    heat = chart("heat", rows, x=widths, y=depths, marks=[])
    assert [shade(heat, spot) for row in rows for spot in row.spots] == [0, 2, 4, 8]
    assert best_spot(heat) == Spot(1, 3.0)
    svg = draw_svg(heat)
    (best,) = elements(svg, "best")
    assert best[0].text == "depth 2, width 4: 3.00"
    assert best_spot(chart("heat", [])) is None


def test_names_of_points_cover_neither_points_nor_each_other() -> None:
    frame = make_frame(
        x=Axis(label="x"), y=Axis(label="y"), x_ticks=[0, 1], y_ticks=[0, 1], legend=[]
    )
    near = [(100.0 + i, 100.0, f"point {i}") for i in range(8)]
    tags = place_tags(near, frame)
    assert 1 <= len(tags) < 8
    assert len(place_tags([(100.0, 100.0, "a"), (300.0, 200.0, "b")], frame)) == 2
    (edge,) = place_tags([(frame.right, 100.0, "a long name")], frame)
    assert edge.is_left


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.5, "1,234"), (12.345, "12.3"), (0.01234, "0.0123"), (0, "0"), (None, "–"),
     (math.nan, "–")],
)  # fmt: skip
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_ticks_are_round() -> None:
    assert nice_ticks(0.0, 4.7) == [0, 1, 2, 3, 4, 5]
    assert nice_ticks(3.0, 3.0)[0] <= 3
    assert log_ticks(1, 100, is_doubling=True) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert log_ticks(0.01, 300.0) == [0.01, 0.1, 1, 10, 100, 1000]
    labels = [tick_label(value) for value in (0.5, 1500, 20000, 3e6)]
    assert labels == ["0.5", "1,500", "20k", "3M"]
    assert tick_label(0.4, is_percent=True) == "40%"


def test_pictures_of_every_kind() -> None:
    tasks = Axis(label="task", categories=("maths", "code"))
    trend = Series(name="trend", spots=[Spot(1, 10), Spot(16, 30)], is_faint=True)
    joined = Series(name="j", spots=[Spot(1, 1, label="p"), Spot(2, 2)], is_joined=True)
    charts = [
        chart("lines", [PLAIN, HEAD]),
        chart("scatter", [HEAD, trend, joined], x=Axis(label="x")),
        chart("bars", [Series(name="a", spots=[Spot(0, 2, 1, 3), Spot(1, 4)])], x=tasks),
        chart("heat", [Series(name="1", spots=[Spot(0, 1.0), Spot(1, 2.0)])], x=tasks),
    ]
    for one in charts:
        assert draw_png(one).startswith(b"\x89PNG")
        ElementTree.fromstring(draw_svg(one))


def test_wide_intervals_do_not_hide_the_figures() -> None:
    wild = Series(name="a", spots=[Spot(1, 10, -900, 900), Spot(2, 11, 10, 12)])
    linear = chart("lines", [wild], x=Axis(label="x"), marks=[])
    assert max(spot_values(linear)[1]) == 12
    scale = Axis(label="y", scale="log")
    by_logarithm = chart("lines", [wild], x=Axis(label="x"), y=scale, marks=[])
    assert min(spot_values(by_logarithm)[1]) == 10
    for one in (linear, by_logarithm):
        ElementTree.fromstring(draw_svg(one))
