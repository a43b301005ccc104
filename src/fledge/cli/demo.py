"""`fledge demo`: the shortest way to see the target answer.

A run is one engine answering the prompt. There is one run today, the target alone; a run with a
head, beside it, is another entry in the list that `demo` shows and compares.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from fledge.cli import options
from fledge.cli.answering import show_answer
from fledge.cli.loading import Choice, Loaded, load
from fledge.cli.render import figures, print_json, say
from fledge.contracts.outputs import Completion
from fledge.contracts.recipe import DEFAULT_TARGET
from fledge.contracts.sampling import SamplingParams

PROMPT = "In three sentences, explain how a young eagle learns to fly."
_MAX_TOKENS = 160
_NEXT_STEPS = """\
Try next:
  {program} chat
  {program} generate --prompt "Write a haiku about rivers." --temperature 0.8 --seed 7
  {program} doctor"""


def demo(
    target: options.TargetOption = DEFAULT_TARGET,
    dtype: options.DtypeOption = "auto",
    device: options.DeviceOption = "auto",
    max_tokens: options.MaxTokensOption = _MAX_TOKENS,
    json: options.JsonOption = False,
) -> None:
    """Load the default target and watch it answer.

    The first time, the target is fetched (about 93 MB) and kept in the cache; after that no
    network is needed.

    Example: [cyan]fledge demo[/cyan]
    """
    params = SamplingParams(max_tokens=max_tokens)
    loaded = load(Choice(target=target, dtype=dtype, device=device))
    if json:
        print_json(_document(loaded, loaded.engine.generate([PROMPT], params)[0]))
        return
    say(f"\n{target} is asked: {PROMPT}\n")
    completion = show_answer(loaded.engine, PROMPT, params)
    say(f"\n{figures(completion)}\n\n{_next_steps()}")


def _document(loaded: Loaded, completion: Completion) -> dict[str, Any]:
    names = loaded.names
    return {
        "target": names["target"],
        "target_dir": names["target_dir"],
        "prompt": PROMPT,
        "text": completion.text,
        "num_tokens": completion.stats.num_tokens,
        "tokens_per_s": round(completion.stats.tokens_per_s, 3),
    }


def _next_steps() -> str:
    return _NEXT_STEPS.format(program=_program())


def _program() -> str:
    """How to call this program from here: by name when the shell finds it, else by its path."""
    script = Path(sys.argv[0])
    if script.name != "fledge":
        return "python -m fledge"
    found = shutil.which("fledge")
    if found is not None and Path(found).samefile(script):
        return "fledge"
    here = Path.cwd()
    return str(script.relative_to(here) if script.is_relative_to(here) else script)
