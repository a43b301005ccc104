"""The picture of a run: there, whole, self-contained, whatever was measured so far."""

import math
import struct
from pathlib import Path

import pytest

from fledge.training.curves import CurveLog
from fledge.training.plots import PAGE_NAME, PLOT_NAME, draw_curves


def write_run(directory: Path, *, num_steps: int = 60) -> None:
    with CurveLog(directory, is_mirrored=False) as log:
        for step in range(1, num_steps + 1):
            learnt = 1 - math.exp(-step / 20)
            depths: list[float | None] = [learnt * 0.8, learnt * 0.6, None]
            shown = {"accuracy_at_depth": depths, "acceptance_at_depth": depths}
            log.add(
                step,
                "train",
                {"loss": 5 - learnt, "learning_rate": 1e-3, "grad_norm": 0.4, **shown},
                {"tokens_per_s": 12_345.0},
            )
            if step % 20 == 0:
                log.add(step, "held_out", {"loss": 5.1, "ideal_speed_up": 1 + learnt, **shown})
                log.add(step, "decode", {"accept_length": 2.345})


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_run_is_one_png_and_one_page(tmp_path: Path) -> None:
    run = tmp_path / "my <run>"
    write_run(run)
    draw_curves(run)
    first = (run / PLOT_NAME).read_bytes()
    draw_curves(run)
    assert (run / PLOT_NAME).read_bytes() == first, "the same curves, the same picture"
    width, height = png_size(run / PLOT_NAME)
    assert width > 1000
    assert height > 600
    page = (run / PAGE_NAME).read_text()
    assert "<td>accept length, decoded</td><td>2.345</td>" in page
    assert "<td>tokens/s</td><td>12,345</td>" in page
    assert "my &lt;run&gt;" in page
    assert page.count('src="data:image/png;base64,') == page.count("src=") == 1
    assert "<script" not in page
    assert "http" not in page, "the page needs nothing from elsewhere"


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_that_has_hardly_begun_has_a_picture_too(tmp_path: Path, num_steps: int) -> None:
    write_run(tmp_path, num_steps=num_steps)
    draw_curves(tmp_path)
    assert png_size(tmp_path / PLOT_NAME)
    assert f"<td>step</td><td>{num_steps}</td>" in (tmp_path / PAGE_NAME).read_text()
