"""The sides of a comparison: servers by address, or our own. Nothing here needs torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fledge.contracts.bench_settings import BenchSettings
from fledge.contracts.progress import Progress
from fledge.contracts.settings import EngineSettings
from fledge.data.regenerate.endpoint import Endpoint, read_api_key
from fledge.lab.load_check import open_driver
from fledge.lab.load_driver import Arm, Driver
from fledge.lab.load_query import Query
from fledge.lab.load_server import own_server

PLAIN, HEAD = "plain", "head"
"""How results call the arm without the head and the one with it."""


def query_of(settings: BenchSettings) -> Query:
    return Query(
        model="",
        api=settings.api,
        temperature=settings.temperature,
        repetition_penalty=settings.repetition_penalty,
        ignore_eos=settings.ignore_eos,
        timeout_s=settings.timeout_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlArm:
    """A server that somebody else started."""

    name: str
    endpoint: Endpoint
    settings: BenchSettings
    model: str | None = None
    count_tokens: Callable[[str], int] | None = None
    """Counts where the server does not report usage."""

    is_quick_to_open = True

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"url": self.endpoint.url, "model": self.model}

    @contextmanager
    def opened(self, progress: Progress) -> Iterator[Driver]:
        del progress
        driver = open_driver(
            self.endpoint,
            query_of(self.settings),
            model=self.model,
            count_tokens=self.count_tokens,
        )
        with driver:
            yield driver


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """A target with or without a head, and how it runs."""

    target: str
    head: Path | None
    dtype: str
    device: str
    engine: EngineSettings

    @property
    def identity(self) -> Mapping[str, Any]:
        head = None if self.head is None else self.head.name
        named = {"target": self.target, "head": head, "dtype": self.dtype, "device": self.device}
        return {**named, "engine": asdict(self.engine)}

    @property
    def serve_options(self) -> list[str]:
        """What `fledge serve` is given."""
        tree = self.engine.tree
        options = {
            "--target": self.target,
            "--dtype": self.dtype,
            "--device": self.device,
            "--max-requests": self.engine.max_requests,
            "--cache-tokens": self.engine.cache_tokens,
            "--depth": tree.depth,
            "--width": tree.width,
            "--budget": tree.budget,
            "--accept": self.engine.accept,
            "--controller": self.engine.controller,
        }
        options["--head"] = "none" if self.head is None else str(self.head)
        copies = "--copies" if self.engine.copies else "--no-copies"
        return [copies, *(str(word) for pair in options.items() for word in pair)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArm:
    """Our own server, in processes of its own; one at a time, since each takes the whole device."""

    name: str
    choice: EngineChoice
    settings: BenchSettings

    is_quick_to_open = False

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"server": "fledge", **self.choice.identity}

    @contextmanager
    def opened(self, progress: Progress) -> Iterator[Driver]:
        with (
            own_server(self.choice.serve_options, name=self.name, progress=progress) as url,
            open_driver(Endpoint.parse(url), query_of(self.settings), model=None) as driver,
        ):
            yield driver


def url_arms(
    typed: Sequence[str],
    settings: BenchSettings,
    *,
    model: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
    key_variable: str | None = None,
) -> list[Arm]:
    """Servers as the command line names them: URL, or NAME=URL."""
    key = read_api_key(key_variable)
    arms: list[Arm] = []
    for number, entry in enumerate(typed, start=1):
        name, equals, address = entry.partition("=")
        if not equals or "/" in name:
            name, address = ("server" if len(typed) == 1 else f"server {number}"), entry
        endpoint = Endpoint.parse(address, key, option="URL")
        arms.append(
            UrlArm(
                name=name,
                endpoint=endpoint,
                settings=settings,
                model=model,
                count_tokens=count_tokens,
            )
        )
    return arms


def server_arms(choice: EngineChoice, settings: BenchSettings) -> list[Arm]:
    """The target without its head, and, where there is one, with it."""
    return [
        ServerArm(name=name, choice=one, settings=settings)
        for name, one in with_and_without(choice).items()
    ]


def with_room(engine: EngineSettings, settings: BenchSettings) -> EngineSettings:
    """The same engine with a place for every user of the closed loop."""
    most_users = max((engine.max_requests, *settings.concurrency))
    return replace(
        engine,
        max_requests=most_users,
        max_pass_tokens=max(engine.max_pass_tokens, most_users),
    )


def with_and_without(choice: EngineChoice) -> dict[str, EngineChoice]:
    """What is compared: plain decoding first, then the head if there is one."""
    plain = {PLAIN: replace(choice, head=None)}
    return plain if choice.head is None else {**plain, HEAD: choice}
