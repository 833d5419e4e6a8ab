"""The HTTP server around a Daemon: its port, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn

from gpumond.api.app import create_app
from gpumond.api.auth import Tokens
from gpumond.api.guard import Guard, Policy
from gpumond.config import LOOPBACK, Settings
from gpumond.config.reloading_file import ReloadingFile
from gpumond.config.tls import alternative_names
from gpumond.config.tokens import Token, read_tokens
from gpumond.config.web import Web
from gpumond.daemon import Daemon, Load
from gpumond.daemon.http_protocol import HttpProtocol
from gpumond.daemon.listener import HttpListener, HttpPeer
from gpumond.errors import ConfigError
from gpumond.host import systemd
from gpumond.host.fd_limits import http_connections, http_connections_of_user, raise_limit
from gpumond.host.logs import RateLimitFilter
from gpumond.host.runtime_directory import API_SOCKET, bind_api_socket, write_token

log = logging.getLogger(__name__)


async def serve(
    settings: Settings,
    source: str,
    load: Load | None = None,
    pace: float = 1.0,
    bounded: RateLimitFilter | None = None,
    bound: Callable[[str], None] = lambda address: None,
) -> None:
    """Runs until SIGINT or SIGTERM. Raises ConfigError if port or socket cannot be had.

    ``bounded``: the log's bounds, whose drops become a metric. ``bound`` is called with the page's address when the
    port accepts connections; they are answered a moment later.
    """
    raise_limit()
    web, others = _web(settings), _others(settings)
    listener = _listen(settings)
    daemon = Daemon(settings, source, load, pace)
    if bounded is not None:
        bounded.dropped = daemon.log_dropped
    own = settings.runtime_directory()
    api = bind_api_socket(own, settings.agent_socket_mode())
    tokens = Tokens(write_token(own), others=others)
    config = uvicorn.Config(
        Guard(create_app(daemon, tokens, daemon.running), tokens, _policy(settings, web, daemon.http_rejected)),
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,  # for the ends of a thousand connections; each is closed after GRACE_SECONDS
        timeout_keep_alive=75,  # longer than a scrape interval, so that Prometheus keeps its connection
    )
    scheme = "http" if web().tls is None else "https"
    address = f"{scheme}://{settings.listen}/"
    listener.listen()
    bound(address)
    log.info("serving %s, agents at %s, source %s", address, settings.agent_socket(), source)
    server = _Server(config, web, daemon.http_rejected)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.leave)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, daemon.reload_on_signal)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, daemon.release_for_maintenance)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: log.info("SIGUSR2 has no effect"))
    telling = asyncio.create_task(systemd.keep_alive(lambda: daemon.frame))
    await server.serve(sockets=[listener, api])
    telling.cancel()
    (own / API_SOCKET).unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn with our door. It raises a signal once more after it has served, which would turn an orderly end into a
    failure: not this one."""

    def __init__(self, config: uvicorn.Config, web: Callable[[], Web], rejected: Callable[[str], None]) -> None:
        super().__init__(config)
        self._web, self._rejected = web, rejected

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise ConfigError("the daemon could not be started; the log says why")
        connections = http_connections()
        door = HttpListener(
            sockets or [],
            lambda visit: self._receiving(visit, door.gone),
            connections=connections,
            per_user=http_connections_of_user(connections),
            tls=self._tls,
            rejected=self._rejected,
        )
        door.open()
        self.servers = [door]  # type: ignore[list-item]  # closed as asyncio's own
        self.started = True
        systemd.notify("READY=1")

    def _receiving(self, visit: HttpPeer, gone: Callable[[HttpPeer], None]) -> asyncio.Protocol:
        uvicorns = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return HttpProtocol(visit, gone, self._rejected, self._admits, **uvicorns)

    def _tls(self) -> ssl.SSLContext | None:
        return self._web().tls

    def _admits(self, transport: asyncio.BaseTransport) -> bool:
        allowed = self._web().allowed_sans
        encrypted = transport.get_extra_info("ssl_object") is not None
        return not (allowed and encrypted) or bool(allowed & alternative_names(transport.get_extra_info("peercert")))

    def leave(self) -> None:
        systemd.notify("STOPPING=1")
        self.should_exit = True


def _web(settings: Settings) -> Callable[[], Web]:
    """The web configuration as its files have it now. Raises ConfigError if it is wrong at the start."""
    watched = ReloadingFile(settings.web, lambda web: web.files)
    return lambda: watched.value


def _others(settings: Settings) -> Callable[[], tuple[Token, ...]]:
    if settings.tokens_file is None:
        return tuple
    path = settings.tokens_file
    watched = ReloadingFile(partial(read_tokens, path), lambda tokens: (path,))
    return lambda: watched.value


def _policy(settings: Settings, web: Callable[[], Web], rejected: Callable[[str], None]) -> Policy:
    names = {*LOOPBACK, *(host.lower() for host in settings.hosts)}
    if not settings.loopback:
        names |= {settings.host.lower(), socket.gethostname().lower()}
    return Policy(frozenset(names), settings.loopback or settings.insecure, web, rejected)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks for it before TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        remedy = "another program has the port; stop it or choose another with --listen" if taken else "see --listen"
        raise ConfigError(f"cannot listen on {settings.listen}: {error.strerror}: {remedy}") from None
    return listener
