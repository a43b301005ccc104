"""Hypothesis without deadlines and without luck: a busy machine is not a slow test, and what passed
once passes again. And object stores to write to, of three makes.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.unit.store.object_servers import Cloud

settings.register_profile(
    "fledge",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fledge")


@pytest.fixture(scope="module", params=["s3", "gs", "az"])
def running(request: pytest.FixtureRequest) -> "Iterator[Cloud]":
    # Most tests need no server, and importing them takes seconds.
    from tests.unit.store.object_servers import SERVERS

    with SERVERS[request.param]() as cloud:
        yield cloud


@pytest.fixture
def cloud(running: "Cloud", monkeypatch: pytest.MonkeyPatch) -> "Cloud":
    """An object store that the environment points to, without faults until a test asks for some."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    running.gateway.share = 0
    running.gateway.seen.clear()
    return running
