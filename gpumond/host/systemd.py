"""Interface to systemd: sd_notify(3), the watchdog, and sd_listen_fds(3).

Without effect if systemd did not start this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from gpumond.facts.errors import ConfigError
from gpumond.facts.frame import Frame
from gpumond.facts.units import plural

log = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3
STATUS_SECONDS = 5.0
STALLED_SECONDS = 180.0
"""Three times the longest interval; without a new frame by then, the daemon has stalled."""


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send ``READY=1``, ``STOPPING=1`` or ``STATUS=…`` if systemd requests notifications. Never blocks."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        log.warning("can't notify systemd of %s: %s", state.partition("=")[0], error.strerror)


async def keep_alive(frame: Callable[[], Frame | None], environ: Mapping[str, str] = os.environ) -> None:
    """Send the status and, while frames arrive, the watchdog signal. Returns at once without a notify socket."""
    if not environ.get("NOTIFY_SOCKET"):
        return
    watchdog_seconds = int(environ.get("WATCHDOG_USEC", 0)) / 1e6
    pause_seconds = min(STATUS_SECONDS, watchdog_seconds / 3) if watchdog_seconds else STATUS_SECONDS
    clock = asyncio.get_running_loop().time
    seen, seen_at = frame(), clock()
    while True:
        newest = frame()
        if newest is not seen:
            seen, seen_at = newest, clock()
        is_alive = clock() - seen_at < STALLED_SECONDS
        notify(f"STATUS={status_text(newest)}" + ("\nWATCHDOG=1" if is_alive else ""), environ)
        await asyncio.sleep(pause_seconds)


def status_text(frame: Frame | None) -> str:
    """Return one line for ``systemctl status``."""
    if frame is None:
        return "the first reading is in progress"
    snapshot = frame.snapshot
    if not snapshot.source.up:
        return f"can't read devices: {snapshot.source.reason}"
    firing = sum(alert.phase == "firing" for alert in frame.alerts)
    agents = len(snapshot.reports_by_process)
    return f"{plural(len(snapshot.devices), 'device')}, {plural(agents, 'agent')}, {plural(firing, 'alert')} firing"


def owns_agent_socket(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if systemd owns the agent socket, which then outlives this process."""
    return environ.get("LISTEN_PID") == str(os.getpid()) and environ.get("LISTEN_FDS", "0") != "0"


def inherited_socket(path: Path) -> socket.socket:
    """Return the socket that systemd listens on. Raises ConfigError if it is not the one at ``path``."""
    os.set_inheritable(FIRST_DESCRIPTOR, False)
    listener = socket.socket(fileno=FIRST_DESCRIPTOR)
    if listener.family != socket.AF_UNIX or listener.getsockname() != str(path):
        raise ConfigError(
            f"systemd listens on {listener.getsockname()!r}, but the agent socket is {path}: "
            "set ListenStream= in gpumond.socket and --socket to the same path"
        )
    return listener
