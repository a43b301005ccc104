"""Answers are checked, and what a model wrote can do no harm while it is run."""

import sys
import time
from pathlib import Path

import pytest

from fledge.lab import sandbox
from fledge.lab.sandbox import NoSandboxError, passes
from fledge.lab.scoring import Scorer, program_of
from fledge.lab.suite_prompts import NumberCheck, ProgramCheck
from fledge.lab.suites import load_suite

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made for Linux")

SOLUTIONS = {
    "count_vowels": "    return sum(letter in 'aeiouAEIOU' for letter in text)\n",
    "merge_ranges": (
        "    found = []\n    for low, high in sorted(ranges):\n"
        "        if found and low <= found[-1][1]:\n"
        "            found[-1] = (found[-1][0], max(high, found[-1][1]))\n"
        "        else:\n            found.append((low, high))\n    return found\n"
    ),
    "roman": (
        "    parts = zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),\n"
        "        'M CM D CD C XC L XL X IX V IV I'.split())\n    text = ''\n"
        "    for value, sign in parts:\n        text += sign * (number // value)\n"
        "        number %= value\n    return text\n"
    ),
    "longest_run": (
        "    from itertools import groupby\n"
        "    return max((len(list(group)) for _, group in groupby(values)), default=0)\n"
    ),
    "transpose": "    return [list(column) for column in zip(*table)]\n",
    "is_balanced": (
        "    open_, pairs = [], {')': '(', ']': '[', '}': '{'}\n    for sign in text:\n"
        "        if sign in pairs.values():\n            open_.append(sign)\n"
        "        elif sign in pairs and (not open_ or open_.pop() != pairs[sign]):\n"
        "            return False\n    return not open_\n"
    ),
    "word_counts": (
        "    words = text.lower().split()\n    return {word: words.count(word) for word in words}\n"
    ),
    "nth_prime": (
        "    found, number = [], 2\n    while len(found) < n:\n"
        "        if all(number % one for one in found):\n            found.append(number)\n"
        "        number += 1\n    return found[-1]\n"
    ),
}

HARM = {
    "a wrong result": "assert 1 == 2",
    "leaving early": "import os; os._exit(0)",
    "a network": "import socket; socket.socket()",
    "writing": "open('notes', 'w')",
    "a new directory": "import os; os.mkdir('d')",
    "removing": "import os; os.unlink('absent')\n",
    "another process": "import os; os.fork()",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "a signal": "import os; os.kill(os.getppid(), 0)",
    "more memory": "x = bytearray(2 << 30)",
    "higher limits": "import resource as r; r.setrlimit(r.RLIMIT_CPU, (100, 100))",
    "no Python": "def f(:",
}


@linux
@pytest.mark.parametrize("name", HARM)
def test_harm_is_kept_out(name: str) -> None:
    try_it = HARM[name]
    if name == "removing":
        # The refusal, not the missing file, must be what stops it.
        try_it = f"try:\n    {try_it}except FileNotFoundError:\n    pass\n"
    assert passes(try_it) is False


@linux
def test_computing_is_allowed() -> None:
    assert passes(
        "import math, re, threading, collections, hashlib\n"
        "t = threading.Thread(target=print); t.start(); t.join()\n"
        "print('x' * 10**6)\n"
        "assert math.sqrt(4) == 2\n"
    )


@linux
def test_programs_that_do_not_end_are_ended() -> None:
    started = time.monotonic()
    assert passes("import time; time.sleep(1000)", timeout_s=0.5) is False
    assert passes("while True: pass", timeout_s=60, cpu_s=1) is False
    assert time.monotonic() - started < 60


@linux
def test_the_built_in_functions_can_be_written_and_unwritten() -> None:
    prompts = load_suite("builtin/code").prompts
    scorer = Scorer()
    for prompt in prompts:
        check = prompt.check
        assert isinstance(check, ProgramCheck)
        body = SOLUTIONS[check.entry_point]
        whole = f"Here it is:\n```python\n{check.stub}{body}```\nIt works."
        assert scorer.score(check, whole) is True, check.entry_point
    first = prompts[0].check
    assert isinstance(first, ProgramCheck)
    assert scorer.score(first, "```python\ndef count_vowels(text):\n    return 4\n```") is False


def test_where_the_function_is_found() -> None:
    check = ProgramCheck(stub="import math\n\ndef f(x):\n    'doc'\n", entry_point="f", test="T")
    ending = "\n\nT\n\ncheck(f)\n"
    block = program_of(check, "a\n```py\nx = 1\n```\nb\n```\ndef f(x):\n    return 1\n```")
    assert block == "import math\n\ndef f(x):\n    return 1\n" + ending
    prose = program_of(check, "Sure.\ndef f(x):\n    return 1\nThis works.")
    assert prose == "import math\n\ndef f(x):\n    return 1" + ending
    body = program_of(check, "    return 1\nprint(f(1))")
    assert body == "import math\n\ndef f(x):\n    'doc'\n    return 1" + ending


def test_numbers_need_no_sandbox_and_programs_are_not_run_without() -> None:
    scorer = Scorer()
    assert scorer.score(NumberCheck(number="42"), "It is 6 times 7 = 42.") is True
    assert scorer.score(NumberCheck(number="42"), "It is 41.") is False
    assert scorer.score(NumberCheck(number="42"), "no idea") is False


def test_a_machine_without_a_sandbox_scores_no_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text("import os; os.write(1, b'unsafe there is no sandbox for it')")
    monkeypatch.setattr(sandbox, "_CHILD", child)
    with pytest.raises(NoSandboxError, match="there is no sandbox for it"):
        passes("x = 1")
    scorer = Scorer()
    check = ProgramCheck(stub="def f(): ...\n", entry_point="f", test="def check(f): f()")
    assert [scorer.score(check, "```\ndef f(): pass\n```") for _ in range(2)] == [None, None]
    assert scorer.problem == "there is no sandbox for it"
