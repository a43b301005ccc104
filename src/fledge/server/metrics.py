"""Figures for Prometheus: what clients met, and how the engine stands. docs/server.md lists them.

What the engine counts begins at zero again when its process is started again, as counters may.
"""

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fledge.contracts.outputs import EngineStats, Stats
from fledge.server.supervisor import EngineSupervisor

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_LENGTHS = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12)

_COUNTERS = {
    "passes": ("num_passes", "Target passes."),
    "drafts": ("num_drafts", "Drafted tokens that were verified."),
    "copies_offered": ("num_copies_offered", "Drafts that were copied, to the first refused."),
    "copies_accepted": ("num_copies_accepted", "Copied drafts that were accepted."),
    "request_cycles": ("num_request_cycles", "Decode cycles, once for each request in them."),
    "emitted_tokens": ("num_emitted", "Tokens that decode cycles yielded."),
    "preemptions": ("num_preemptions", "Requests that had to give up their memory."),
    "evicted_blocks": ("num_evicted_blocks", "Kept blocks given up for new ones."),
    "replays": ("num_replayed", "Halves of cycles and passes over prompts that were replayed."),
    "launches": ("num_launched", "The same launched piece by piece instead."),
    "captures": ("num_captured", "Graphs captured while requests were served."),
    "target_seconds": ("target_s", "Seconds in target passes."),
    "draft_seconds": ("draft_s", "Seconds in passes of the head."),
    "other_seconds": ("other_s", "Seconds of the engine outside passes."),
}
_GAUGES = {
    "requests_running": ("num_running", "Answers being made."),
    "requests_waiting": ("num_waiting", "Answers that wait for room in the engine."),
    "cache_usage_ratio": ("cache_usage", "Share of the cache memory that requests hold."),
    "kept_tokens": ("num_kept_tokens", "Tokens of ended requests that could be reused."),
    "cache_bytes": ("cache_bytes", "Size of the cache memory."),
}


class _EngineCollector(Collector):
    """The engine's own figures, as they were last heard."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        supervisor = self._supervisor
        up = GaugeMetricFamily("fledge_engine_up", "1 while the engine is ready.")
        up.add_metric([], float(supervisor.state == "ready"))
        yield up
        restarts = CounterMetricFamily(
            "fledge_engine_restarts", "Engine processes that ended and were started again."
        )
        restarts.add_metric([], supervisor.num_restarts)
        yield restarts
        if supervisor.stats is not None:
            yield from _engine_metrics(supervisor.stats)


def _engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    for name, (attribute, sentence) in _COUNTERS.items():
        counter = CounterMetricFamily(f"fledge_engine_{name}", sentence)
        counter.add_metric([], getattr(stats, attribute))
        yield counter
    for name, (attribute, sentence) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"fledge_{name}", sentence)
        gauge.add_metric([], getattr(stats, attribute))
        yield gauge
    for name, counts in (
        ("offered", stats.offered_at_depth),
        ("accepted", stats.accepted_at_depth),
    ):
        family = CounterMetricFamily(
            f"fledge_drafts_{name}", f"Drafts {name} at each depth.", labels=["depth"]
        )
        for depth, count in enumerate(counts, start=1):
            family.add_metric([str(depth)], count)
        yield family


class Metrics:
    """All figures of one server."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        disable_created_metrics()  # a second series for each, which nobody looks at
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(supervisor))
        registry = self._registry
        self._requests = Counter(
            "fledge_requests", "HTTP requests.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "fledge_request_seconds",
            "Seconds from a request to the end of its response.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "fledge_prompt_tokens", "Tokens of prompts.", registry=registry
        )
        self._cached_tokens = Counter(
            "fledge_cached_prompt_tokens", "Tokens of prompts that were reused.", registry=registry
        )
        self._answer_tokens = Counter(
            "fledge_answer_tokens", "Tokens of finished answers.", registry=registry
        )
        self._first_token = Histogram(
            "fledge_time_to_first_token_seconds",
            "Seconds from the engine's queue to the first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "fledge_time_per_token_seconds",
            "Mean seconds between the tokens of an answer.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._accept_length = Histogram(
            "fledge_accept_length",
            "Tokens that one target pass yielded, mean of an answer.",
            buckets=_LENGTHS,
            registry=registry,
        )

    def count_request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_answer(self, num_prompt: int, stats: Stats) -> None:
        self._prompt_tokens.inc(num_prompt)
        self._cached_tokens.inc(stats.num_prompt_reused)
        self._answer_tokens.inc(stats.num_tokens)
        self._first_token.observe(stats.time_to_first_token_s)
        if stats.time_per_token_s is not None:
            self._per_token.observe(stats.time_per_token_s)
        if stats.accept_length is not None:
            self._accept_length.observe(stats.accept_length)

    def page(self) -> bytes:
        """What a scraper reads."""
        return generate_latest(self._registry)
