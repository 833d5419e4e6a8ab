"""The HTTP server around a Daemon: its port, its signals, its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from gpumond.api.app import create_app
from gpumond.api.auth import Tokens
from gpumond.config import Settings
from gpumond.daemon import Daemon, Load
from gpumond.errors import ConfigError

log = logging.getLogger(__name__)


async def serve(settings: Settings, source: str, load: Load | None = None) -> None:
    """Runs until SIGINT or SIGTERM. Raises ConfigError if port or socket cannot be had."""
    listener = _listen(settings)
    daemon = Daemon(settings, source, load)
    app = create_app(daemon, Tokens(daemon.token), daemon.running)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,  # longer than a scrape interval, so that Prometheus keeps its connection
    )
    log.info("serving http://%s, agents at %s, source %s", settings.listen, settings.agent_socket(), source)
    server = _Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.leave)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, daemon.reload_on_signal)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, daemon.release_for_maintenance)
    await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn raises a signal once more after it has served, which would turn an orderly end into a failure."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def leave(self) -> None:
        self.should_exit = True


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio asks for it before TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        mend = "another program has the port; stop it or choose another with --listen" if taken else "see --listen"
        raise ConfigError(f"cannot listen on {settings.listen}: {error.strerror}: {mend}") from None
    return listener
