"""The example notebook runs from its first cell to its last, and shows what it says it shows."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "benchmark.ipynb"


def run_cells(notebook: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Run all code as a notebook does; returns the names, and what the last cell ends with."""
    names: dict[str, Any] = {"__name__": "__main__"}
    value = None
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            ending = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), names)
            if isinstance(ending, ast.Expr):
                value = eval(compile(ast.Expression(ending.value), "cell", "eval"), names)
    return names, value


def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "committed without outputs"
    names, page = run_cells(notebook)
    document = names["document"]
    assert document["is_complete"]
    assert [(row["arm"], row["kind"], row["level"]) for row in document["rows"]] == [
        (arm, kind, level)
        for arm in ("plain", "head")
        for kind, level in (("closed", 1), ("closed", 2), ("poisson", 20.0))
    ]
    assert all(row["good"] == row["requests"] for row in document["rows"])
    plain, head = (
        [row for row in document["rows"] if row["arm"] == arm] for arm in ("plain", "head")
    )
    assert {row["accept_length"]["value"] for row in plain} == {1.0}
    assert all(row["accept_length"]["value"] >= 1.0 for row in head)
    assert all(1 <= len(row["acceptance_at_depth"]) <= 3 for row in head)
    # The head changes how fast an answer comes, not how long it is.
    assert [row["tokens"] for row in plain] == [row["tokens"] for row in head]
    assert names["speedups"].keys() == {1, 2, 20.0}
    assert "Throughput against concurrency" in page._repr_html_()
    assert "tokens/s, TPOT" in capsys.readouterr().out
