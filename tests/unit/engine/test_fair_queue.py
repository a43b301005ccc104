"""Who goes next: urgent requests first, clients by turns, nobody forgotten.

Catches: a client with a thousand requests that keeps the others out, one that saves up turns while
it is away, a preempted request that has to queue again behind its client's others, a cancelled one
that still runs or still counts, and a queue whose cost grows with the number of requests.
"""

import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fledge.engine.fair_queue import FairQueue


def request(client: str = "", priority: int = 0, name: object = None) -> Any:
    return SimpleNamespace(client=client, priority=priority, name=name)


def pop_all(queue: FairQueue) -> list[Any]:
    return [queue.pop() for _ in range(len(queue))]


def test_an_empty_queue() -> None:
    queue = FairQueue()
    assert len(queue) == 0
    assert queue.peek() is None
    assert list(queue) == []
    with pytest.raises(AssertionError, match="the queue is empty"):
        queue.pop()


def test_requests_of_one_client_go_in_the_order_they_came() -> None:
    queue, asked = FairQueue(), [request() for _ in range(5)]
    for one in asked:
        queue.push(one)
    assert list(queue) == asked
    assert queue.peek() is asked[0]
    assert queue.peek() is asked[0], "looking takes nothing"
    assert pop_all(queue) == asked
    assert queue.peek() is None


def test_urgent_requests_go_first_whoever_was_served() -> None:
    queue = FairQueue()
    queue.push(request("a", 0, "late"))
    queue.push(request("b", 5, "urgent"))
    queue.push(request("a", -1, "idle"))
    queue.push(request("b", 5, "urgent too"))
    queue.charge("b", 10_000)
    assert [one.name for one in queue] == ["urgent", "urgent too", "late", "idle"]
    assert [one.name for one in pop_all(queue)] == ["urgent", "urgent too", "late", "idle"]


def test_who_waits_is_listed_from_the_one_that_goes_next() -> None:
    queue = FairQueue()
    for client in ("a", "b", "c"):
        queue.push(request(client))
    queue.charge("a", 20)
    queue.charge("b", 10)
    assert [one.client for one in queue] == ["c", "b", "a"]
    assert queue.peek() is next(iter(queue))


def test_the_client_served_least_goes_next() -> None:
    """Tokens count, not requests: three short answers weigh as much as a long one."""
    queue = FairQueue()
    for i in range(6):
        queue.push(request("long", 0, f"long{i}"))
        queue.push(request("short", 0, f"short{i}"))
    order = []
    for _ in range(8):
        one = queue.pop()
        order.append(one.client)
        queue.charge(one.client, 30 if one.client == "long" else 10)
    assert order.count("short") == 6
    assert order[:4].count("long") == 1


def test_a_crowd_does_not_keep_a_single_request_waiting() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.push(request("crowd"))
    queue.pop()
    queue.charge("crowd", 7)
    queue.push(request("single"))
    queue.charge("crowd", 1)
    assert queue.pop().client == "single"


def test_a_pause_saves_up_nothing() -> None:
    """Back after others were served 1000 tokens, a client has no 1000 tokens coming."""
    queue = FairQueue()
    for _ in range(30):
        queue.push(request("busy"))
    queue.push(request("away"))
    queue.charge("away", 5)
    queue.charge("busy", 1)
    while queue.pop().client != "away":
        queue.charge("busy", 1)
    queue.charge("busy", 1000)
    for _ in range(10):
        queue.push(request("away"))
    turns = []
    for _ in range(10):
        one = queue.pop()
        turns.append(one.client)
        queue.charge(one.client, 10)
    assert turns.count("busy") == 5


def test_what_one_was_served_is_not_forgotten_while_others_wait() -> None:
    queue = FairQueue()
    for _ in range(2):
        queue.push(request("patient"))
    queue.push(request("greedy"))
    queue.charge("greedy", 500)
    queue.charge("patient", 400)
    assert queue.pop().client == "patient"
    greedy = next(one for one in queue if one.client == "greedy")
    queue.remove(greedy)
    queue.push(greedy)  # leaving and coming back does not clear the bill either
    assert [one.client for one in pop_all(queue)] == ["patient", "greedy"]


def test_an_urgent_request_costs_its_client_no_turn_elsewhere() -> None:
    """A client that is waiting does not come back from anywhere when it asks for more."""
    queue = FairQueue()
    queue.push(request("a", 0))
    queue.push(request("b", 0))
    queue.charge("a", 100)
    queue.charge("b", 10)
    queue.push(request("b", 1))
    queue.pop()
    queue.charge("b", 50)
    assert queue.pop().client == "b"


def test_cancelled_requests_do_not_hold_a_level_down() -> None:
    """A client whose only request was cancelled is not waiting: newcomers start with the others."""
    queue = FairQueue()
    gone = request("gone")
    queue.push(gone)
    queue.push(request("busy"))
    queue.charge("busy", 100)
    queue.remove(gone)
    queue.push(request("new"))
    queue.charge("new", 1)
    assert queue.pop().client == "busy"


def test_an_empty_queue_starts_anew() -> None:
    queue = FairQueue()
    queue.push(request("a"))
    queue.pop()
    queue.charge("a", 1000)
    assert queue.peek() is None
    queue.push(request("a", 0, "first"))
    queue.push(request("b", 0, "second"))
    assert queue.pop().name == "first"


def test_a_preempted_request_goes_before_its_clients_others() -> None:
    queue = FairQueue()
    queue.push(request("a", 0, "later"))
    queue.push(request("a", 0, "preempted"), front=True)
    queue.push(request("a", 0, "preempted after"), front=True)
    queue.push(request("b", 0, "of b"))
    queue.charge("a", 1)
    assert [one.name for one in pop_all(queue)] == ["of b", "preempted after", "preempted", "later"]


@pytest.mark.parametrize("removed", range(3))
def test_a_cancelled_request_is_gone_at_once(removed: int) -> None:
    queue, asked = FairQueue(), [request("a", 0, i) for i in range(3)]
    for one in asked:
        queue.push(one)
    queue.remove(asked[removed])
    rest = [one for one in asked if one.name != removed]
    assert len(queue) == 2
    assert list(queue) == rest
    assert queue.peek() is rest[0]
    assert pop_all(queue) == rest


def test_cancelling_the_last_one_leaves_nothing() -> None:
    queue, one = FairQueue(), request("a", 3)
    queue.push(one)
    queue.remove(one)
    assert (len(queue), list(queue), queue.peek()) == (0, [], None)
    queue.push(one)
    assert queue.pop() is one


@pytest.mark.parametrize("seed", range(6))
def test_random_use_against_a_plain_model(seed: int) -> None:
    """Lists of requests by priority and client, searched from end to end."""
    rng = random.Random(seed)
    queue = FairQueue()
    waiting: list[Any] = []
    served: dict[str, float] = {}
    for step in range(600):
        action = rng.choice(["push", "push", "front", "pop", "pop", "remove", "charge"])
        if action in ("push", "front"):
            one = request(rng.choice("abcd"), rng.choice([0, 0, 1]), step)
            others = {other.client for other in waiting}
            if one.client not in others:
                level = min((served[name] for name in others), default=0.0)
                served[one.client] = max(served.get(one.client, 0.0), level)
            queue.push(one, front=action == "front")
            waiting.insert(0 if action == "front" else len(waiting), one)
        elif action == "pop" and waiting:
            urgent = max(one.priority for one in waiting)
            turn = min(served[one.client] for one in waiting if one.priority == urgent)
            got = queue.pop()
            assert got.priority == urgent
            assert served[got.client] == turn
            same = [one for one in waiting if (one.client, one.priority) == (got.client, urgent)]
            assert same[0] is got
            waiting.remove(got)
        elif action == "remove" and waiting:
            waiting.remove(one := rng.choice(waiting))
            queue.remove(one)
        elif action == "charge" and (waiting or rng.random() < 0.5):
            client, count = rng.choice("abcd"), rng.randrange(20)
            queue.charge(client, count)
            served[client] = served.get(client, 0.0) + count
        if queue.peek() is None:
            served.clear()
        assert len(queue) == len(waiting)
        assert {one.name for one in queue} == {one.name for one in waiting}


def test_thousands_wait_at_little_cost() -> None:
    """20,000 requests of 100 clients, a quarter cancelled: searching lists would take minutes."""
    queue = FairQueue()
    rng = random.Random(0)
    asked = [request(str(rng.randrange(100)), rng.randrange(3)) for _ in range(20_000)]
    started = time.process_time()
    for one in asked:
        queue.push(one)
    cancelled = rng.sample(asked, 5_000)
    for one in cancelled:
        queue.remove(one)
    popped = []
    while (one := queue.peek()) is not None:
        assert queue.pop() is one
        queue.charge(one.client, 10)
        popped.append(one)
    assert time.process_time() - started < 10
    gone = {id(one) for one in cancelled}
    assert {id(one) for one in popped} == {id(one) for one in asked} - gone
    assert len(popped) == 15_000


def test_as_many_clients_as_requests() -> None:
    queue = FairQueue()
    started = time.process_time()
    for i in range(1_500):
        queue.push(request(str(i)))
    for _ in range(1_500):
        queue.charge(queue.pop().client, 5)
    assert time.process_time() - started < 10
