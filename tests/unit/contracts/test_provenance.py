"""What a measured file says about itself."""

import sys

import pytest

from fledge.contracts import provenance


def test_commands_do_not_say_where_somebody_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/opt/bin/fledge", "--tuned", "cpu=/some/where/tuned", "--set", "a=b", "x/y", "/a/b"]
    monkeypatch.setattr(sys, "argv", words)
    found = provenance.collect(device="cpu", commit="abc")
    assert found["command"] == "python fledge --tuned cpu=tuned --set a=b x/y b"
    assert (found["device"], found["commit"]) == ("cpu", "abc")
