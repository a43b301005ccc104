"""The page on the layout: its numpy program reads what fledge wrote, without fledge."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fledge.features.capture_layout import final_codec
from fledge.features.reader import FeatureReader
from tests.unit.features.invented_features import invent_layout, invent_samples, write_features

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "features.md"


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("form", ["exact", "q8", "q6", "q5", "q4"])
@pytest.mark.parametrize("hidden_size", [40, 64])
def test_the_numpy_program(form: str, hidden_size: int, tmp_path: Path, monkeypatch) -> None:
    layout = invent_layout(form, dtype=torch.bfloat16, hidden_size=hidden_size)
    store = write_features(tmp_path / "features", layout, invent_samples(layout, 6))
    (program,) = (snippet for snippet in snippets() if "import numpy" in snippet)
    assert "fledge" not in program
    # What the program has for each sample, kept at the end of its loop.
    program += "        found[int(number)] = (token_ids, features, labels, shard)\n"
    found: dict[int, Any] = {}
    names: dict[str, Any] = {"found": found}
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(PAGE), "exec"), names)
    assert len(found) == 6
    final = final_codec(layout)
    assert final is not None
    for batch in FeatureReader(store, batch_tokens=40, shuffle=False):
        stops = batch.documents.starts[1:]
        label = 0
        for number, length, stop in zip(
            batch.sample_numbers, batch.documents.lengths, stops, strict=True
        ):
            token_ids, features, labels, shard = found[number]
            here = slice(stop - length, stop)
            assert token_ids.tolist() == batch.token_ids_T[here].tolist()
            expected = batch.features_TF[here][:-2].numpy()
            np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-5)
            rows = slice(label, label + len(labels))
            label = rows.stop
            assert (labels + here.start).tolist() == batch.targets.rows_R[rows].tolist()
            if form != "exact":
                coded = shard[f"{number}.final.codes"], shard[f"{number}.final.scales"]
                hidden = names["decode"](*coded, final.bits, hidden_size, 1)
                np.testing.assert_allclose(
                    hidden, batch.targets.final_RD[rows].numpy(), rtol=1e-5, atol=1e-5
                )


def test_the_program_with_fledge(tmp_path: Path, monkeypatch, capsys) -> None:
    layout = invent_layout()
    write_features(tmp_path / "features", layout, invent_samples(layout, 9))
    (program,) = (snippet for snippet in snippets() if "FeatureReader" in snippet)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(PAGE), "exec"), {})
    assert capsys.readouterr().out.startswith("9 (2, 5, 8)")
