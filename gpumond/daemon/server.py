"""HTTP server of a Daemon: port, signals and shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

import uvicorn

from gpumond.config.loading import LastValidFile
from gpumond.config.settings import LOOPBACK_HOSTS, Settings
from gpumond.config.tokens import Token, check_subjects, read_tokens
from gpumond.config.web_file import ReloadingFile, WebSettings, alternative_names
from gpumond.daemon.daemon import Daemon, LoadSettings, system_dependencies
from gpumond.facts.errors import ConfigError
from gpumond.facts.snapshot import Fault
from gpumond.features import routers
from gpumond.host import systemd
from gpumond.host.logs import RateLimitFilter
from gpumond.host.machine import (
    max_http_connections,
    max_http_connections_per_user,
    raise_descriptor_limit,
    reduce_garbage_collection,
)
from gpumond.host.runtime_directory import API_SOCKET, TOKEN_FILE, bind_api_socket, write_token
from gpumond.host.tasks import background_task
from gpumond.serve.authentication import Tokens, make_token_reviews
from gpumond.serve.deferred_app import DeferredApp
from gpumond.serve.guard import Guard, Policy
from gpumond.serve.http import HttpProtocol
from gpumond.serve.identity import IdentityHeaders
from gpumond.serve.listener import HttpListener, HttpPeer

log = logging.getLogger(__name__)

DATE_INTERVAL_SECONDS = 1.0
"""Interval at which the Date header is renewed."""
PORT_RETRY_SECONDS = 5.0
"""Interval at which a port that another program uses is tried again."""


class PortInUse(ConfigError):
    """Another program uses the port of `listen`."""


async def serve(
    settings: Settings,
    source: str,
    load: LoadSettings | None = None,
    speedup: float = 1.0,
    log_filter: RateLimitFilter | None = None,
    on_listening: Callable[[str], None] = lambda address: None,
    last_valid: LastValidFile | None = None,
    wait_for_port: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError if the port or a socket cannot be bound.

    ``wait_for_port``: while another program uses the port, agents, rules and api.sock are served, with a fault.
    ``log_filter`` counts the log lines that it drops, for a metric. ``on_listening`` is called with the web UI's
    address when the port accepts connections; they are answered a moment later. ``last_valid``: the content in effect
    instead of an invalid configuration file. However this ends, sockets are removed and tasks have ended.
    """
    raise_descriptor_limit()
    web, reviews = _web_settings(settings), make_token_reviews(settings)
    file_tokens, identities = _file_tokens(settings, web), _identities(settings)
    async with AsyncExitStack() as stack:
        try:
            listener, problem = stack.enter_context(_bind_port(settings)), ""
        except PortInUse as error:
            if not wait_for_port:
                raise
            listener, problem = None, str(error)
        dependencies = stack.enter_context(system_dependencies(settings, source))
        daemon = Daemon(settings, dependencies, load, speedup, last_valid)
        if log_filter is not None:
            log_filter.dropped = daemon.core.telemetry.count_dropped_log_line
        directory = settings.runtime_directory()
        api_socket = stack.enter_context(bind_api_socket(directory, settings.agent_socket_mode()))
        stack.callback((directory / API_SOCKET).unlink, missing_ok=True)
        tokens = Tokens(write_token(directory), file_tokens=file_tokens, reviews=reviews)
        stack.callback((directory / TOKEN_FILE).unlink, missing_ok=True)
        config = uvicorn.Config(
            Guard(
                DeferredApp(daemon.core, tokens, daemon.running, routers),
                tokens,
                _policy(settings, web, identities, daemon.core.telemetry.count_http_rejection),
            ),
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=6,  # for thousands of connections; each is closed after GRACE_SECONDS
            timeout_keep_alive=75,  # longer than a scrape interval, so Prometheus keeps its connection
        )
        scheme = "http" if web().tls is None else "https"
        port = listener.getsockname()[1] if listener else settings.port  # any free port was asked for with 0
        url = f"{scheme}://{settings.listen.rpartition(':')[0]}:{port}"
        if listener is None:
            log.error(
                "%s; retrying every %g s, and %s responds meanwhile",
                problem,
                PORT_RETRY_SECONDS,
                directory / API_SOCKET,
            )
            daemon.core.faults["http"] = Fault("http", "port_in_use", None, problem)
        else:
            listener.listen()
            daemon.core.url = url
            on_listening(f"{url}/")
            log.info("serving %s/, agents at %s, source %s", url, settings.agent_socket(), source)
        server = _Server(config, web, daemon.core.telemetry.count_http_rejection)
        _handle_signals(stack, server, daemon)
        await stack.enter_async_context(background_task(systemd.keep_alive(lambda: daemon.core.frame)))
        if listener is None:
            await stack.enter_async_context(background_task(_await_port(settings, url, server, daemon)))
        reduce_garbage_collection()
        await server.serve(sockets=[api_socket] if listener is None else [listener, api_socket])


async def _await_port(settings: Settings, url: str, server: _Server, daemon: Daemon) -> None:
    """Serve on the port as soon as no other program uses it."""
    while True:
        await asyncio.sleep(PORT_RETRY_SECONDS)
        if not server.started:
            continue
        with suppress(PortInUse):
            server.http.add(_bind_port(settings))
            del daemon.core.faults["http"]
            daemon.core.url = url
            log.info("listening on %s, which is free now", settings.listen)
            return


def _handle_signals(stack: AsyncExitStack, server: _Server, daemon: Daemon) -> None:
    handlers: dict[signal.Signals, Callable[[], None]] = {
        signal.SIGINT: server.stop,
        signal.SIGTERM: server.stop,
        signal.SIGHUP: daemon.reload_on_signal,
        signal.SIGUSR1: daemon.detach_on_signal,
        signal.SIGUSR2: lambda: log.info("SIGUSR2 ignored: gpumond reloads on SIGHUP"),
    }
    loop = asyncio.get_running_loop()
    for each, handler in handlers.items():
        loop.add_signal_handler(each, handler)
        stack.callback(loop.remove_signal_handler, each)


class _Server(uvicorn.Server):
    """uvicorn with our listener, without its signal handling: it raises a signal again after it has served, so an
    orderly end would look like a failure."""

    def __init__(
        self, config: uvicorn.Config, web: Callable[[], WebSettings], count_rejection: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._web, self._count_rejection = web, count_rejection
        self._stopping = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await self.lifespan.startup()
            if not self.lifespan.should_exit:
                self._open(sockets or [])
        except BaseException:
            await self.lifespan.shutdown()
            raise
        if self.lifespan.should_exit:
            raise ConfigError("the daemon couldn't be started; the log gives the reason")
        self.started = True
        systemd.notify("READY=1")

    async def main_loop(self) -> None:
        """Serve until `stop`. The loop of uvicorn wakes ten times a second, a tenth of an idle daemon's CPU time."""
        try:
            while not await self.on_tick(0):  # renews the Date header
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), DATE_INTERVAL_SECONDS)
        except BaseException:
            await self.shutdown()
            raise

    def _open(self, sockets: list[socket.socket]) -> None:
        connections = max_http_connections()
        self.http = listener = HttpListener(
            sockets,
            lambda peer: self._protocol(peer, listener.remove),
            connections=connections,
            per_user=max_http_connections_per_user(connections),
            tls=self._tls,
            count_rejection=self._count_rejection,
        )
        listener.open()
        self.servers = [listener]  # type: ignore[list-item]  # closed as asyncio's own

    def _protocol(self, peer: HttpPeer, on_close: Callable[[HttpPeer], None]) -> asyncio.Protocol:
        uvicorn_arguments = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return HttpProtocol(peer, on_close, self._count_rejection, self._accepts_certificate, **uvicorn_arguments)

    def _tls(self) -> ssl.SSLContext | None:
        return self._web().tls

    def _accepts_certificate(self, transport: asyncio.BaseTransport) -> bool:
        allowed = self._web().allowed_sans
        encrypted = transport.get_extra_info("ssl_object") is not None
        return not (allowed and encrypted) or bool(allowed & alternative_names(transport.get_extra_info("peercert")))

    def stop(self) -> None:
        systemd.notify("STOPPING=1")
        self.should_exit = True
        self._stopping.set()


def _web_settings(settings: Settings) -> Callable[[], WebSettings]:
    """Return a function that reads the web configuration when its files change. Raises ConfigError if it is invalid at
    the start."""
    reloading = ReloadingFile(settings.web, lambda web: web.files)
    return lambda: reloading.value


def _file_tokens(settings: Settings, web: Callable[[], WebSettings]) -> Callable[[], tuple[Token, ...]]:
    """Return a function that reads the tokens when their file changes. Raises ConfigError if it is invalid at the
    start."""
    if settings.tokens_file is None:
        return tuple
    path = settings.tokens_file

    def read() -> tuple[Token, ...]:
        tokens = read_tokens(path)
        reviews, proxy = settings.token_review_audience is not None, settings.identity_proxy is not None
        check_subjects(tokens, web().accepts_client_certificates, reviews, proxy)
        return tokens

    reloading = ReloadingFile(read, lambda tokens: (path,))
    return lambda: reloading.value


def _identities(settings: Settings) -> IdentityHeaders | None:
    proxy = settings.identity_proxy
    return None if proxy is None else IdentityHeaders(proxy, proxy.resolve_uid())


def _policy(
    settings: Settings,
    web: Callable[[], WebSettings],
    identities: IdentityHeaders | None,
    count_rejection: Callable[[str], None],
) -> Policy:
    names = {*LOOPBACK_HOSTS, *(host.lower() for host in settings.hosts)}
    if not settings.is_loopback:
        names |= {settings.host.lower(), socket.gethostname().lower()}
    return Policy(frozenset(names), settings.is_loopback or settings.insecure, web, identities, count_rejection)


def _bind_port(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks for it before TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            cause = "because another program uses the port; stop that program, or choose another port with --listen"
            raise PortInUse(f"can't listen on {settings.listen}, {cause}") from None
        raise ConfigError(
            f"can't listen on {settings.listen}: {error.strerror}; choose another address with --listen"
        ) from None
    return listener
