"""Figures of one measurement: one load, applied once to one arm. docs/bench.md defines them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fledge.contracts.bench_settings import BenchSettings
from fledge.lab.bench_statistics import distribution
from fledge.lab.load_answer import Answer
from fledge.lab.load_driver import Drive
from fledge.lab.load_point import Point
from fledge.lab.statistics import percentile

_MILLION = 1_000_000


def measure(drive: Drive, point: Point, settings: BenchSettings) -> dict[str, Any]:
    """Everything that is said about one measurement."""
    answers = drive.answers
    good = [answer for answer in answers if answer.is_good]
    span_s = _seconds(answers)
    tokens = sum(answer.num_tokens for answer in good)
    rate = tokens / span_s if span_s else 0.0
    tpots = [seconds for answer in good if (seconds := answer.tpot_s) is not None]
    steady = _steady_rate(good, answers, point)
    tpot = distribution(tpots)
    return {
        "requests": len(answers),
        "good": len(good),
        "errors": _errors(answers),
        "seconds": span_s,
        "tokens": tokens,
        "prompt_tokens": sum(answer.num_prompt_tokens for answer in good),
        "cached_prompt_tokens": sum(answer.num_cached_tokens for answer in good),
        "ttft_s": distribution([answer.ttft_s for answer in good]),
        "tpot_s": tpot,
        "itl_s": distribution([gap for answer in good for gap in answer.gaps_s]),
        "e2e_s": distribution([answer.e2e_s for answer in good]),
        "requests_per_s": len(good) / span_s if span_s else 0.0,
        "tokens_per_s": rate,
        "steady_tokens_per_s": steady,
        "user_tokens_per_s": 1 / tpot["p50"] if tpot and tpot["p50"] > 0 else None,
        "goodput_per_s": _goodput(good, settings.limits_s, span_s),
        "cost_per_million_tokens": _costs(steady or rate, settings),
        **_speculation(good),
        "client": _client(drive, span_s),
    }


def _seconds(answers: Sequence[Answer]) -> float:
    """From when the first request was due to the end of the last answer."""
    if not answers:
        return 0.0
    return max(answer.end for answer in answers) - min(answer.due for answer in answers)


def _errors(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """How often each kind of failure came, with one reason as an example."""
    failures = [answer.failure for answer in answers if answer.failure is not None]
    counts = Counter(failure.kind for failure in failures)
    reasons = {failure.kind: failure.reason for failure in reversed(failures)}
    return {kind: {"count": n, "example": reasons[kind]} for kind, n in counts.most_common()}


def _steady_rate(good: Sequence[Answer], answers: Sequence[Answer], point: Point) -> float | None:
    """Tokens per second while every user of a closed loop was busy.

    That ends when the last request is sent: from then on fewer and fewer are in flight, and the
    load is not the one that was asked for. None when hardly any time was like that.
    """
    if not point.is_closed or len(answers) < 2 * point.users:
        return None
    begin, end = min(answer.sent for answer in answers), max(answer.sent for answer in answers)
    if end - begin <= 0:
        return None
    tokens = 0.0
    for answer in good:
        times = answer.text_times
        tokens += answer.num_tokens * sum(time <= end for time in times) / len(times)
    return tokens / (end - begin)


def _goodput(good: Sequence[Answer], limits_s: Mapping[str, float], seconds: float) -> float | None:
    """Answers per second that kept the service level; None where there is none to keep."""
    if not limits_s or not seconds:
        return None
    return sum(is_within(answer, limits_s) for answer in good) / seconds


def is_within(answer: Answer, limits_s: Mapping[str, float]) -> bool:
    """Whether an answer kept every limit; of its gaps the 99th percentile counts."""
    gaps = answer.gaps_s
    measured = {
        "ttft": answer.ttft_s,
        "tpot": answer.tpot_s,
        "itl": percentile(gaps, 0.99) if gaps else None,
        "e2e": answer.e2e_s,
    }
    pairs = [(measured[name], limit_s) for name, limit_s in limits_s.items()]
    return all(value is None or value <= limit_s for value, limit_s in pairs)


def _costs(tokens_per_s: float, settings: BenchSettings) -> dict[str, float | None]:
    """The price of a million tokens of answers, for each price of a GPU's hour."""
    per_hour = tokens_per_s * 3600
    return {
        name: price * settings.gpus * _MILLION / per_hour if per_hour else None
        for name, price in settings.gpu_prices.items()
    }


def _speculation(good: Sequence[Answer]) -> dict[str, Any]:
    """Accept length and acceptance by depth, where the server tells."""
    told = [answer for answer in good if answer.speculation is not None]
    cycles = sum(answer.speculation.cycles for answer in told if answer.speculation)
    if not cycles:
        return {"accept_length": None, "acceptance_at_depth": []}
    emitted = sum(answer.num_tokens - 1 for answer in told)
    offered = _sums([one.speculation.offered_at_depth for one in told if one.speculation])
    accepted = _sums([one.speculation.accepted_at_depth for one in told if one.speculation])
    pairs = zip(accepted, offered, strict=True)
    return {
        "accept_length": emitted / cycles,
        "acceptance_at_depth": [a / o if o else None for a, o in pairs],
    }


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    width = max(map(len, rows), default=0)
    return [sum(row[depth] for row in rows if depth < len(row)) for depth in range(width)]


def _client(drive: Drive, seconds: float) -> dict[str, Any]:
    client = drive.client
    return {
        "busy_share": client.busy_share,
        "lag_p99_s": client.lag_s,
        "chunks_per_s": client.chunks / seconds if seconds else 0.0,
    }
