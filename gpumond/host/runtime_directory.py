"""The daemon's runtime directories: the agents' with their socket, and its own with the API's and the daemon's token.

A socket that anyone can replace is an agent that obeys a stranger, so a directory must belong to this user and be
writable by nobody else, and a socket gets its mode before it listens. The two may be one: the agents' is what a
container is given, so what says or does more than agents may is apart from it where there are containers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import socket
import stat
from pathlib import Path

from gpumond.errors import ConfigError
from gpumond.host import systemd

BACKLOG = 4096
TOKEN_FILE = "token"
API_SOCKET = "api.sock"
AGENTS, OWN = "--socket DIRECTORY/agent.sock", "--runtime-dir"
"""What chooses another place for the agents' socket, and for what is the daemon's own."""


def bind_agent_socket(path: Path, mode: int, own: Path | None = None) -> socket.socket:
    """A bound, listening socket at ``path``, or systemd's if that listens there. Raises ConfigError with the remedy.

    ``own``: the daemon's own directory, if it is another one. The lock is there: whoever reads a lock can hold it.
    """
    directory = prepare_directory(path.parent)
    if systemd.listens():
        return systemd.handed_over(path)
    locks = directory if own is None else prepare_directory(own, OWN)
    return _bound(path, mode, locks, AGENTS)


def bind_api_socket(own: Path, mode: int) -> socket.socket:
    """The API's own socket, where the kernel says who asks. Raises ConfigError with the remedy."""
    directory = prepare_directory(own, OWN)
    return _bound(directory / API_SOCKET, mode, directory, OWN)


def _bound(path: Path, mode: int, locks: Path, choice: str) -> socket.socket:
    _claim(locks / f"{path.name}.lock", path, choice)
    _remove_stale(path, choice)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket {path}: {error.strerror or error}; choose another with {choice}") from None
    finally:
        os.umask(before)
    os.chmod(path, mode)
    listener.listen(BACKLOG)
    return listener


def remove_agent_socket(path: Path) -> None:
    """Our own goes with us; at systemd's, agents wait for the next daemon."""
    if not systemd.listens():
        path.unlink(missing_ok=True)


def prepare_directory(directory: Path, choice: str = AGENTS) -> Path:
    """Make the directory, or see that what is there is safe. ``choice``: what names another."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"runtime directory {directory}: {error.strerror}; choose another with {choice}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"runtime directory {directory} is not a directory; choose another with {choice}")
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ConfigError(
            f"runtime directory {directory} can be written by others; use one of your own with mode 0755 or stricter, "
            f"with {choice}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"runtime directory {directory} cannot be written by this daemon's user; give it to that user "
            f"(as root: install -d -o {os.geteuid()} -m 755 {directory}), or choose another with {choice}"
        )
    return directory


def leave_token(directory: Path) -> str:
    """A new token for the daemon's own user, in a file of its own directory that only this user can read."""
    token = f"gpm_{secrets.token_urlsafe(32)}"
    path = directory / TOKEN_FILE
    fresh = path.with_name(f".{TOKEN_FILE}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    fresh.rename(path)
    return token


def _claim(lock: Path, path: Path, choice: str) -> None:
    """Hold the lock as long as this process lives, so that two daemons never share a socket path."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        what = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(f"lock {lock} cannot be opened: {what}; remove it or choose another with {choice}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"another daemon serves the socket {path}; stop it or choose another with {choice}") from None


def _remove_stale(path: Path, choice: str) -> None:
    """Remove a socket that a dead daemon left; anything else at that path is not ours to remove."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{path} exists and is not a socket of this user; choose another with {choice}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        refused = probe.connect_ex(str(path)) == errno.ECONNREFUSED
    if not refused:
        raise ConfigError(f"another program listens on {path}; stop it or choose another with {choice}")
    path.unlink()
