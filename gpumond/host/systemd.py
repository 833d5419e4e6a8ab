"""What systemd is told, and what it hands over: sd_notify(3), the watchdog, sd_listen_fds(3).

Where systemd did not start this process, none of it does anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from gpumond.errors import ConfigError
from gpumond.model.frame import Frame

log = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3
STATUS_SECONDS = 5.0
STALLED_SECONDS = 180.0
"""Three of the longest intervals: if there is no new frame by then, there will be none."""


def notify(state: str, environ: Mapping[str, str] = os.environ) -> None:
    """``READY=1``, ``STOPPING=1``, ``STATUS=…``; said where systemd asked to be told, and never waited for."""
    address = environ.get("NOTIFY_SOCKET")
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
    except OSError as error:
        log.warning("systemd could not be told %s: %s", state.partition("=")[0], error.strerror)


async def keep_alive(frame: Callable[[], Frame | None], environ: Mapping[str, str] = os.environ) -> None:
    """Tells systemd for ever how it goes, and feeds its watchdog as long as frames come. Ends if nobody listens."""
    if not environ.get("NOTIFY_SOCKET"):
        return
    limit = int(environ.get("WATCHDOG_USEC", 0)) / 1e6
    period = min(STATUS_SECONDS, limit / 3) if limit else STATUS_SECONDS
    clock = asyncio.get_running_loop().time
    seen, seen_at = frame(), clock()
    while True:
        newest = frame()
        if newest is not seen:
            seen, seen_at = newest, clock()
        turning = clock() - seen_at < STALLED_SECONDS
        notify(f"STATUS={status(newest)}" + ("\nWATCHDOG=1" if turning else ""), environ)
        await asyncio.sleep(period)


def status(frame: Frame | None) -> str:
    """One line for ``systemctl status``."""
    if frame is None:
        return "the first reading is under way"
    snapshot = frame.snapshot
    if not snapshot.source.up:
        return f"no device can be read: {snapshot.source.reason}"
    firing = sum(alert.phase == "firing" for alert in frame.alerts)
    agents = len({(report.pid, report.start_ticks) for report in snapshot.reports})
    return f"{len(snapshot.devices)} devices, {agents} agents, {firing} alerts firing"


def listens(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd owns the agents' socket: then it outlives this process."""
    return environ.get("LISTEN_PID") == str(os.getpid()) and environ.get("LISTEN_FDS", "0") != "0"


def handed_over(path: Path) -> socket.socket:
    """The socket that systemd listens on for us. Raises ConfigError if it is not the one at ``path``."""
    os.set_inheritable(FIRST_DESCRIPTOR, False)
    listener = socket.socket(fileno=FIRST_DESCRIPTOR)
    if listener.family != socket.AF_UNIX or listener.getsockname() != str(path):
        raise ConfigError(
            f"systemd listens on {listener.getsockname()!r}, and the agents' socket is {path}: "
            "say the same in ListenStream= of gpumond.socket and in --socket"
        )
    return listener
