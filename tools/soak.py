"""Many requests with random lengths, bursts and cancels through one engine: does anything leak?

    python tools/soak.py --requests 10000 --out benchmarks/FILE.json

A tiny random target, a random head, little memory. Every answer is compared with plain decoding of
the same prompt, integrity is checked on the way, and at the end nothing may be left behind.
"""

import argparse
import json
import random
import resource
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

from fledge import Engine, EngineSettings, SamplingParams, TreeSettings
from fledge.contracts import provenance
from fledge.engine.sequence import Sequence
from fledge.testing import target_of, tiny_head, tiny_model

Asked = tuple[tuple[int, ...], SamplingParams]


def workload(rng: random.Random) -> list[Asked]:
    """Prompts of very different lengths, some beginning alike, greedy and sampled."""
    stems = [[rng.randrange(3, 97) for _ in range(60)] for _ in range(4)]
    asked = []
    for number in range(200):
        stem = rng.choice(stems)[: rng.randrange(60)]
        prompt = (*stem, *(rng.randrange(3, 97) for _ in range(1 + int(rng.expovariate(0.1)))))
        temperature = rng.choice([0.0, 0.0, 0.8, 1.2])
        params = SamplingParams(
            max_tokens=1 + int(rng.expovariate(0.06)),
            temperature=temperature,
            seed=number,
            ignore_eos=rng.random() < 0.8,
        )
        asked.append((prompt[:200], params))
    return asked


class Soak:
    """Adds, cancels and steps at random until every request has ended."""

    def __init__(self, engine: Engine, asked: list[Asked], rng: random.Random) -> None:
        self._engine, self._asked, self._rng = engine, asked, rng
        self._open: list[tuple[Sequence, Asked]] = []
        self.ended: Counter[str] = Counter()
        self.answers: dict[Asked, set[tuple[int, ...]]] = {}
        self.most_waiting = 0

    def run(self, num_requests: int) -> None:
        num_added = steps = 0
        while num_added < num_requests or self._open:
            burst = self._rng.choice([0, 0, 0, 1, 2, 5, 60])
            for _ in range(min(burst, num_requests - num_added)):
                self._add()
                num_added += 1
            if self._engine.has_work:
                self._engine.step()
            self._cancel_some()
            self._collect()
            self.most_waiting = max(self.most_waiting, self._engine.stats.num_waiting)
            steps += 1
            if steps % 25 == 0:
                self._engine.check_integrity()

    def _add(self) -> None:
        one = self._rng.choice(self._asked)
        request = self._engine.make_request(one[0], one[1])
        client, priority = self._rng.choice("abc"), self._rng.choice([0, 0, 0, 1])
        self._open.append((self._engine.add(request, client=client, priority=priority), one))

    def _cancel_some(self) -> None:
        if self._open and self._rng.random() < 0.03:
            gone = self._rng.sample(self._open, min(len(self._open), self._rng.randrange(1, 6)))
            self._engine.abort([seq for seq, _ in gone])
            self.ended["cancelled"] += len(gone)
            self._open = [pair for pair in self._open if pair not in gone]

    def _collect(self) -> None:
        for seq, one in self._open:
            if seq.has_ended:
                assert seq.error is None, seq.error
                self.ended[str(seq.finish_reason)] += 1
                self.answers.setdefault(one, set()).add(tuple(seq.output_ids))
        self._open = [pair for pair in self._open if not pair[0].has_ended]


def soak(num_requests: int, seed: int = 0) -> dict[str, object]:
    rng = random.Random(seed)
    layer_types = ["sliding_attention", "full_attention"]
    target = target_of(tiny_model("gemma3-hybrid", num_hidden_layers=2, layer_types=layer_types))
    settings = EngineSettings(
        tree=TreeSettings(depth=3, width=2, budget=4),
        max_requests=24,
        max_pass_tokens=128,
        cache_tokens=400,
        block_size=8,
    )
    engine = Engine(target, tiny_head(target, num_taps=1, taps=(1,)), settings)
    asked = workload(rng)
    running = Soak(engine, asked, rng)
    memory_before, started = _resident_bytes(), time.perf_counter()
    running.run(num_requests)
    elapsed = time.perf_counter() - started
    engine.check_integrity()
    stats = engine.stats
    assert not engine.has_work
    assert stats.num_running == stats.num_waiting == 0
    assert sum(running.ended.values()) == num_requests, "a request was lost"
    assert all(len(answers) == 1 for answers in running.answers.values()), "answers differ"
    plain = Engine(target)
    for (prompt, params), (answer,) in running.answers.items():
        assert plain.generate([prompt], params)[0].token_ids == answer, "not the target's answer"
    return {
        "requests": num_requests,
        "ended": dict(running.ended),
        "distinct_answers_checked": len(running.answers),
        "most_waiting": running.most_waiting,
        "seconds": round(elapsed, 1),
        "resident_bytes_before": memory_before,
        "resident_bytes_after": _resident_bytes(),
        "stats": asdict(stats),
    }


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = soak(options.requests, options.seed)
    document = {"provenance": provenance.collect(device="cpu"), **result}
    options.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
