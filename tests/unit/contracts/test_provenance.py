"""What a measured file says about itself."""

import sys

import pytest

from fledge.contracts import provenance


def test_commands_do_not_say_where_somebody_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/opt/bin/fledge", "--tuned", "cpu=/some/where/tuned", "--set", "a=b", "x/y", "/a/b"]
    monkeypatch.setattr(sys, "argv", words)
    found = provenance.collect(device="cpu", commit="abc")
    assert found["command"] == "fledge --tuned cpu=tuned --set a=b x/y b"
    assert (found["device"], found["commit"]) == ("cpu", "abc")


@pytest.mark.parametrize(
    ("started", "said"),
    [
        ("/opt/lib/fledge/__main__.py", "python -m fledge train"),
        (".venv/bin/fledge", "fledge train"),
        ("tools/measure.py", "python tools/measure.py train"),
        ("/opt/tools/measure.py", "python measure.py train"),
    ],
)
def test_commands_can_be_typed_elsewhere(
    started: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started, "train"])
    assert provenance.collect(device="cpu", commit="abc")["command"] == said
