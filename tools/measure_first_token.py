"""Time to the first token with a head and without one.

    python tools/measure_first_token.py --target smollm2-135m-instruct [--head HEAD] --out FILE.json
    python tools/measure_first_token.py --shape llama-8b --out FILE.json

All requests arrive at once; what counts is when each has its first token, and when the last of them
has. An engine with a head and one without take turns on the same prompts, which differ from round
to round; one pair serves all cells and has captured its cycles before, and the first rounds of a
cell warm it up. The ratio is that of medians over rounds, with the 95% interval of resampled ones.
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from measured_engines import (
    ADAPTIVE,
    PLAIN,
    Results,
    Subject,
    numbers,
    option_parser,
    ratio_of,
    wait,
)

from fledge import Engine, SamplingParams

WARM_UPS = 2
FEW_TOKENS = 4
"""Of an answer: with a single token the head would have nothing to read for."""

GOAL = 1.05


def first_tokens_s(engine: Engine, prompts: Sequence[list[int]]) -> tuple[float, float]:
    """Mean and largest time to a first token."""
    wait(engine.target.device)
    params = SamplingParams(max_tokens=FEW_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    sequences = [engine.add(engine.make_request(prompt, params)) for prompt in prompts]
    waiting, times = list(sequences), []
    while waiting:
        engine.step()
        now = time.perf_counter() - started
        times += [now for seq in waiting if seq.output_ids]
        waiting = [seq for seq in waiting if not seq.output_ids]
    while engine.has_work:
        engine.step()
    return statistics.mean(times), max(times)


def captured_engines(subject: Subject, way: str) -> dict[str, Engine]:
    """One without the head and one with it."""
    options, engines = subject.options, {}
    size, length = max(numbers(options.sizes)), max(numbers(options.lengths))
    for name in (PLAIN, way):
        engines[name] = subject.engine(name, size, length + FEW_TOKENS)
        started = time.perf_counter()
        num_graphs = engines[name].capture_ahead(budget_s=options.capture_s)
        seconds = time.perf_counter() - started
        print(f"{name}: {num_graphs} graphs captured ahead in {seconds:.1f} s", flush=True)
    return engines


def cell(
    subject: Subject, engines: dict[str, Engine], way: str, size: int, length: int
) -> dict[str, Any]:
    options = subject.options
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    prompts = subject.prompts(size * (options.rounds + WARM_UPS), length)
    for turn in range(options.rounds + WARM_UPS):
        asked = prompts[turn * size : (turn + 1) * size]
        order = list(engines.items())
        for name, engine in order if turn % 2 else order[::-1]:
            found = first_tokens_s(engine, asked)
            if turn >= WARM_UPS:
                seconds[name].append(found)
    mean_s = {name: [one[0] for one in found] for name, found in seconds.items()}
    last_s = {name: [one[1] for one in found] for name, found in seconds.items()}
    compared = ratio_of(mean_s[way], mean_s[PLAIN])
    return {
        "without_head_s": statistics.median(mean_s[PLAIN]),
        "with_head_s": statistics.median(mean_s[way]),
        **compared,
        "ratio_of_last": ratio_of(last_s[way], last_s[PLAIN])["ratio"],
        "is_within_goal": compared["ratio"] <= GOAL,
        "rounds": mean_s,
    }


def main(words: Iterable[str] | None = None) -> None:
    parser = option_parser(__doc__, budget_s=60.0)
    parser.add_argument("--way", default="5x1x5", help=f"or {ADAPTIVE}")
    parser.add_argument("--sizes", default="1,32")
    parser.add_argument("--lengths", default="128,1024")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--capture-s", type=float, default=20.0, help="for each engine")
    options = parser.parse_args(None if words is None else list(words))
    subject = Subject.load(options, has_head=True)
    engines = captured_engines(subject, options.way)
    results = Results("time to the first token with a head and without", subject, way=options.way)
    cells = list(itertools.product(numbers(options.sizes), numbers(options.lengths)))
    for size, length in results.left(cells):
        results.add((size, length), cell(subject, engines, options.way, size, length))


if __name__ == "__main__":
    main()
