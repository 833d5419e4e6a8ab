"""Trust in the daemon: the users that it may run as, and the rate of its messages.

The environment of a program states the path of the daemon's socket, but not its user. The kernel states the user
(SO_PEERCRED), and the administrator states the trusted one, as the owner of a directory at a fixed path. Only root can
create a directory in ``/run`` and give it to a user, and a container that mounts the directory sees the same owner.
"""

from __future__ import annotations

import os
import stat

from gpumond.protocol.sockets import SERVICE_SOCKET

SERVICE_DIRECTORY = os.path.dirname(SERVICE_SOCKET)
OVERFLOW_UID = 65534
"""Represents every user that a user namespace does not know."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_uids(directory: str = SERVICE_DIRECTORY) -> frozenset[int]:
    """Return root, the program's own user, and the user that root has given the service's directory to."""
    trusted = {0, os.geteuid()}
    try:
        trusted.add(service_uid(directory))
    except OSError:
        pass
    return frozenset(trusted)


def service_uid(directory: str = SERVICE_DIRECTORY) -> int:
    """Return the owner of the service's directory, if only root can have set it. Raises OSError with the reason."""
    path = directory
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        parent = os.lstat(path)
        if not stat.S_ISDIR(parent.st_mode) or parent.st_uid != 0 or parent.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} is not a directory that root alone can change")
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{directory} is not a directory that its owner alone can change")
    if status.st_uid == OVERFLOW_UID:
        raise PermissionError(f"{directory} belongs to a user that is unknown in this user namespace")
    return status.st_uid


class RateLimit:
    """A token bucket: ``burst`` at once, then one every ``seconds``. ``now`` is any monotonic clock."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst, self._seconds = burst, seconds
        self._left, self._filled_at = float(burst), float("-inf")

    def allows(self, now: float) -> bool:
        """Return whether one more is within the rate; if so, count it."""
        self._left = min(self._burst, self._left + (now - self._filled_at) / self._seconds)
        self._filled_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
