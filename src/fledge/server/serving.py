"""Runs the server from the first listening to the last answer.

On SIGTERM or Ctrl-C it says so at /ready, takes no new work, lets what runs finish for a while, and
then leaves; a second signal makes it leave at once.
"""

import asyncio
import ipaddress
import logging
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from fledge.contracts.errors import ConfigError, FledgeError
from fledge.contracts.server_settings import ServeSettings
from fledge.server.api_errors import UnavailableError
from fledge.server.app import make_app
from fledge.server.http_guard import guarded_protocol
from fledge.server.service import Service
from fledge.server.wire import EngineChoice, LoadFailure

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_TICK_S = 0.05


class EngineLoadError(FledgeError):
    """The engine could not be loaded."""

    def __init__(self, failure: LoadFailure) -> None:
        super().__init__(failure.message)
        self.exit_code = failure.exit_code


class DrainingServer(uvicorn.Server):
    """uvicorn, which leaves only when the service has nothing left to say."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchers: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        watches = (self._announce_engine(), self._watch_engine())
        self._watchers = [asyncio.create_task(watch) for watch in watches]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the draining, the second ends it."""
        del frame
        if self._service.is_draining or self._loop is None:
            self.should_exit = self.force_exit = True
            return
        self._loop.call_soon_threadsafe(self.drain, signal.Signals(sig).name)

    def drain(self, reason: str) -> None:
        self._service.is_draining = True
        _log.info(
            "%s: taking no new requests, %d still run", reason, self._service.supervisor.num_waiting
        )
        asyncio.get_running_loop().create_task(self._leave_when_done())

    async def _leave_when_done(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._service.settings.drain_s
        while self._service.num_open and loop.time() < deadline:
            await asyncio.sleep(_TICK_S)
        if self._service.num_open:
            _log.warning("%d requests are cut off", self._service.num_open)
            error = UnavailableError("the server is shutting down and could not finish; ask again.")
            self._service.supervisor.fail_all(error)
        self.should_exit = True

    async def _announce_engine(self) -> None:
        await self._service.supervisor.was_ready.wait()
        self._on_ready()

    async def _watch_engine(self) -> None:
        """Without an engine, and without hope for one, there is nothing to serve."""
        await self._service.supervisor.ended.wait()
        self.should_exit = True


def open_socket(host: str, port: int) -> socket.socket:
    """The listening socket; what is wrong with the address is said before anything is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another "
            "--host or --port."
        ) from error
    return listener


def make_server(service: Service, on_ready: Callable[[], None] = lambda: None) -> DrainingServer:
    """The web server around a service; says when the engine can be asked for the first time."""
    settings = service.settings
    config = uvicorn.Config(
        make_app(service),
        loop="uvloop",
        http=guarded_protocol(settings.client_timeout_s),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    return DrainingServer(config, service, on_ready)


def serve(
    choice: EngineChoice,
    settings: ServeSettings,
    *,
    on_listening: Callable[[str], None],
    on_ready: Callable[[str], None],
) -> None:
    """Serve until told to leave; both are told the address, before the engine loads and after."""
    _allow_many_connections()
    listener = open_socket(settings.host, settings.port)
    service = Service(choice, settings)
    service.open_batches()
    port = listener.getsockname()[1]
    if not (service.keys.are_needed or is_loopback(settings.host)):
        _log.warning("listening on %s without API keys: whoever reaches it may ask", settings.host)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{port}"
    on_listening(url)
    make_server(service, lambda: on_ready(url)).run(sockets=[listener])
    failure = service.supervisor.failure
    if service.supervisor.state == "failed" and failure is not None:
        raise EngineLoadError(failure)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _allow_many_connections() -> None:
    """Each stream is an open file, and the usual limit is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
