"""Loads over HTTP: what is measured is what a server of known times does."""

import statistics
from collections.abc import Sequence

import pytest

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.errors import ConfigError
from fledge.data.regenerate.endpoint import Endpoint
from fledge.lab.bench_figures import measure
from fledge.lab.load_answer import Answer
from fledge.lab.load_check import open_driver
from fledge.lab.load_client_cost import measure_client
from fledge.lab.load_driver import Drive
from fledge.lab.load_http import HttpDriver
from fledge.lab.load_point import Point, num_requests, points_of, send_times_s
from fledge.lab.load_prompts import LoadPrompt, PromptSource, user_prompt
from fledge.lab.load_query import Query
from fledge.lab.sse import SseReader
from tests.unit.lab.scripted_server import MODEL, ScriptedServer, scripted_server

PROMPTS = [user_prompt(f"Prompt {number}") for number in range(8)]


def drive(server: ScriptedServer, point: Point, prompts: Sequence[LoadPrompt] = PROMPTS) -> Drive:
    query = Query(model=MODEL, timeout_s=60)
    with HttpDriver(Endpoint.parse(server.url), query) as driver:
        return driver.drive(point, prompts, max_tokens=8, seed=0, on_answer=lambda: None)


def closest(values: Sequence[float], injected: float) -> float:
    return min(values, key=lambda value: abs(value - injected))


@pytest.mark.parametrize("cuts", [1, 2, 7, 1000])
def test_events_are_whole_however_the_bytes_come(cuts: int) -> None:
    stream = (
        b": hello\n\ndata: one\n\ndata:two\r\n\r\nevent: x\nid: 3\ndata: three\ndata: lines\n\n"
        b"data: [DONE]\n\ndata: half"
    )
    reader, events = SseReader(), []
    for start in range(0, len(stream), cuts):
        events += reader.feed(stream[start : start + cuts])
    assert events == [b"one", b"two", b"three\nlines", b"[DONE]"]


def test_injected_times_are_measured_within_5_percent() -> None:
    """Never less than was injected; of the best answer, which no pause of the machine has hit,
    hardly more."""
    with scripted_server(ttft_s=1.2, gap_s=0.4, chunks=4, tokens_per_chunk=2) as server:
        found = drive(server, Point("closed", 4))
        assert server.script.most_open == 4
    assert [answer.num_tokens for answer in found.answers] == [8] * 8
    ttfts_s = [answer.ttft_s for answer in found.answers]
    gaps_s = [gap for answer in found.answers for gap in answer.gaps_s]
    # Three gaps bring the seven tokens after the first chunk's first.
    tpots_s = [answer.tpot_s or 0.0 for answer in found.answers]
    ends_s = [answer.e2e_s for answer in found.answers]
    assert 1.2 <= min(ttfts_s) <= 1.2 * 1.05
    assert closest(gaps_s, 0.4) == pytest.approx(0.4, rel=0.05)
    assert closest(tpots_s, 1.2 / 7) == pytest.approx(1.2 / 7, rel=0.05)
    assert 2.4 <= min(ends_s) <= 2.4 * 1.05
    figures = measure(found, Point("closed", 4), BenchSettings())
    assert figures["good"] == figures["requests"] == 8
    assert figures["tokens"] == 8 * 8
    for name, values in ("ttft_s", ttfts_s), ("itl_s", gaps_s), ("tpot_s", tpots_s):
        assert figures[name]["p50"] == pytest.approx(statistics.median(values))
    assert figures["e2e_s"]["p50"] == pytest.approx(statistics.median(ends_s))
    assert figures["user_tokens_per_s"] == pytest.approx(1 / statistics.median(tpots_s))
    # Two rounds of four, one after the other; then rates are counts over that time.
    assert figures["seconds"] >= 4.8
    assert figures["tokens_per_s"] == pytest.approx(8 * 8 / figures["seconds"])
    assert figures["requests_per_s"] == pytest.approx(8 / figures["seconds"])


def test_open_loop_counts_from_when_requests_were_due() -> None:
    """Requests do not wait for earlier ones: all are in flight at once when answers are slow."""
    with scripted_server(ttft_s=1.0, chunks=1) as server:
        found = drive(server, Point("constant", 20.0))
        assert server.script.most_open == 8
    dues = [answer.due for answer in found.answers]
    assert sorted(due - min(dues) for due in dues) == pytest.approx([i / 20 for i in range(8)])
    assert all(answer.sent >= answer.due for answer in found.answers)
    assert statistics.median(answer.ttft_s for answer in found.answers) >= 1.0


def test_failures_have_kinds() -> None:
    with scripted_server(status_at={0: 429, 1: 500, 2: 503}, cut_at=frozenset({3})) as server:
        found = drive(server, Point("closed", 1))
    figures = measure(found, Point("closed", 1), BenchSettings())
    assert {kind: entry["count"] for kind, entry in figures["errors"].items()} == {
        "busy": 2,
        "http 500": 1,
        "stream": 1,
    }
    assert figures["errors"]["http 500"]["example"] == "500: no, that is 500"
    assert figures["good"] == 4


def test_a_slow_answer_is_a_timeout() -> None:
    with scripted_server(ttft_s=30.0) as server:
        query = Query(model=MODEL, timeout_s=0.2)
        with HttpDriver(Endpoint.parse(server.url), query) as driver:
            found = driver.drive(
                Point("closed", 1), PROMPTS[:1], max_tokens=8, seed=0, on_answer=lambda: None
            )
    assert [one.failure.kind for one in found.answers if one.failure] == ["timeout"]


def test_a_server_that_dies_is_lost_and_nobody_else_is_asked() -> None:
    with scripted_server(dies_at=2) as server:
        found = drive(server, Point("closed", 1), PROMPTS * 10)
    assert found.lost is not None
    assert sum(answer.is_good for answer in found.answers) == 2
    assert len(found.answers) < 80


def test_a_connection_that_was_idle_for_too_long_is_opened_anew() -> None:
    with scripted_server(drops_used=True) as server:
        found = drive(server, Point("closed", 2))
    assert [answer.failure for answer in found.answers] == [None] * 8


def check(server: ScriptedServer, **options: str) -> HttpDriver:
    model = options.get("model")
    endpoint = Endpoint.parse(server.url, options.get("key"))
    return open_driver(endpoint, Query(model="", timeout_s=30), model=model)


def test_tokens_are_counted_by_usage_or_tokenizer_or_chunk() -> None:
    with scripted_server(tokens_per_chunk=3) as server, check(server) as driver:
        assert driver.query.counting == "usage"
        assert driver.query.model == MODEL
    with scripted_server(has_usage=False) as server, check(server) as driver:
        assert driver.query.counting == "chunks"
    with scripted_server(knows_usage=False, has_usage=False, chunks=3) as server:
        endpoint = Endpoint.parse(server.url)
        with open_driver(endpoint, Query(model=""), model=None, count_tokens=len) as driver:
            assert driver.query.counting == "tokenizer"
            found = driver.drive(
                Point("closed", 1), PROMPTS[:1], max_tokens=8, seed=0, on_answer=lambda: None
            )
            assert found.answers[0].num_tokens == len("word") * 3
            assert "stream_options" not in server.script.bodies[-1]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"key": "right"}, "refused the key (401: wrong API key); put the right one into"),
        ({"is_stream": False}, "answered in one piece (application/json) where a stream"),
        ({"models": ("a", "b")}, "lists a, b; name the one to measure with --model"),
        ({"models": ()}, "lists none; name the one"),
        ({"always_status": 503}, "takes no requests yet (503: no, that is 503); run the same"),
        ({"always_status": 404}, "answered a first request with 404: no, that is 404; check the"),
        ({"chunks": 0}, "gave no whole answer to a first request: an answer without text"),
        ({"cut_at": frozenset({0})}, "gave no whole answer to a first request: "),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(script: dict[str, object], message: str) -> None:
    with scripted_server(**script) as server, pytest.raises(ConfigError) as error:
        check(server)
    assert message in str(error.value)


def test_nobody_there() -> None:
    with scripted_server() as server:
        url = server.url
    for model in (None, "m"):
        with pytest.raises(ConfigError, match="cannot be reached: connection refused; check the"):
            open_driver(Endpoint.parse(url), Query(model=""), model=model)
    with scripted_server() as server, pytest.raises(ConfigError, match="/v2/models answered a fi"):
        open_driver(Endpoint.parse(server.url.replace("v1", "v2")), Query(model=""), model=None)


def test_the_client_knows_what_it_costs() -> None:
    cost = measure_client()
    assert 0 < cost["s_per_chunk"] < 0.1
    assert cost["most_chunks_per_s"] == pytest.approx(1 / cost["s_per_chunk"])
    assert cost["first_token_s"] > 0


def test_arrivals_are_fixed_before_and_have_the_rate() -> None:
    assert send_times_s(Point("constant", 4.0), 3, seed=1) == [0, 0.25, 0.5]
    times = send_times_s(Point("poisson", 10.0), 20_000, seed=1)
    assert times == send_times_s(Point("poisson", 10.0), 20_000, seed=1)
    assert times[0] == 0
    assert times == sorted(times)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.03)
    # Poisson arrivals have gaps as spread as they are long.
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.03)


def test_loads_and_prompts() -> None:
    settings = BenchSettings(
        concurrency=(8, 1), rates=(2.0,), requests=10, prompt_len=12, shared_prefix_len=4
    )
    points = points_of(settings)
    assert [point.label for point in points] == [
        "1 at once",
        "8 at once",
        "2 requests/s (poisson)",
    ]
    assert [num_requests(point, settings) for point in points] == [10, 32, 10]
    source = PromptSource(settings)
    first, second = source.take(0, 0, 2)
    assert len(first.text.split()) == 12
    assert first.text.split()[:4] == second.text.split()[:4]
    assert first != second
    assert source.take(0, 0, 2) == [first, second]
    suite = PromptSource(BenchSettings())
    everything = suite.take(0, 0, 48)
    assert suite.take(1, 40, 16) == [*everything[40:], *everything[:8]]


def made_up(*times: float, tokens: int, due: float = 0.0) -> Answer:
    return Answer(due=due, sent=due, text_times=times, end=times[-1], num_tokens=tokens)


def test_measures_by_hand() -> None:
    answer = made_up(1.0, 1.5, 3.0, tokens=6, due=0.25)
    assert answer.ttft_s == 0.75
    assert answer.tpot_s == 2.0 / 5
    assert answer.gaps_s == [0.5, 1.5]
    assert made_up(1.0, tokens=1).tpot_s is None
