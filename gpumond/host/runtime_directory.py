"""Runtime directories: the agents' directory with their socket, and the daemon's with the API socket and its token.

An agent trusts the daemon behind its socket. The directory must therefore belong to this user and be writable by no
other user, and a socket has its mode before it listens. The two directories may be the same. Where containers mount
the agents' directory, the daemon's own directory should be separate, because its files permit more than agents may do.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpumond.facts.errors import ConfigError
from gpumond.facts.messages import SERVICE_SOCKET, default_socket
from gpumond.host import systemd
from gpumond.host.files import lock_file, replace_file

BACKLOG_CONNECTIONS = 4096
TOKEN_FILE = "token"
API_SOCKET = "api.sock"
SERVICE_RUNTIME_DIRECTORY = "/run/gpumond-api"
"""Runtime directory of the system service; deploy/systemd/gpumond.service sets the same path."""
AGENTS, OWN = "--socket DIRECTORY/agent.sock", "--runtime-dir"
"""Options that select another directory for the agent socket, and for the daemon's own files."""


def runtime_directories(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the directories that may contain the daemon's token and socket, the most likely first."""
    if own := environ.get("GPUMOND_RUNTIME_DIR"):
        yield Path(own)
        return
    named = environ.get("GPUMOND_SOCKET")
    for path in [named] if named else [default_socket(environ), SERVICE_SOCKET]:
        if path == SERVICE_SOCKET:
            yield Path(SERVICE_RUNTIME_DIRECTORY)
        if path is not None:
            yield Path(path).parent


def nonstandard_directory(directory: Path, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the daemon's directory if the command line finds it only by ``GPUMOND_RUNTIME_DIR``, else None."""
    found = directory.absolute()
    usual = runtime_directories({name: value for name, value in environ.items() if not name.startswith("GPUMOND_")})
    return None if found in usual else found


def bind_agent_socket(path: Path, mode: int, own: Path | None = None) -> socket.socket:
    """Return a listening socket at ``path``, or systemd's if it listens there. Raises ConfigError with the remedy.

    ``own``: the daemon's own directory, if it is separate. It contains the lock file, because any process that can read
    a lock file can hold the lock.
    """
    directory = prepare_directory(path.parent)
    if systemd.owns_agent_socket():
        return systemd.inherited_socket(path)
    locks = directory if own is None else prepare_directory(own, OWN)
    return _bound(path, mode, locks, AGENTS)


def bind_api_socket(own: Path, mode: int) -> socket.socket:
    """Return the API's Unix socket, whose peers the kernel identifies. Raises ConfigError with the remedy."""
    directory = prepare_directory(own, OWN)
    return _bound(directory / API_SOCKET, mode, directory, OWN)


class AgentSocket:
    """The socket at ``path`` on which agents connect, as `bind_agent_socket` returns it.

    ``problem``: why no agent can connect, or empty.
    """

    def __init__(self, path: Path, mode: int, own: Path | None = None) -> None:
        self.listener = bind_agent_socket(path, mode, own)
        self._path, self._mode, self._file = path, mode, _file(path)
        self.problem = ""

    def restore_if_removed(self) -> bool:
        """Return True if the file had been removed and ``listener`` is another one now."""
        found = _file(self._path)
        if found == self._file:
            self.problem = ""
            return False
        if found is not None or systemd.owns_agent_socket():
            self.problem = f"{self._path} was removed or replaced by another program"
            return False
        try:
            prepare_directory(self._path.parent)
            listener = _listening(self._path, self._mode, AGENTS)
        except ConfigError as error:
            self.problem = f"{self._path} was removed: {error}"
            return False
        self.listener.close()
        self.listener, self._file, self.problem = listener, _file(self._path), ""
        return True

    def close(self) -> None:
        """Close the socket, and remove its file if it is still its own. One of systemd remains."""
        self.listener.close()
        if _file(self._path) == self._file and not systemd.owns_agent_socket():
            self._path.unlink(missing_ok=True)


def _file(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, None if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _bound(path: Path, mode: int, locks: Path, choice: str) -> socket.socket:
    _claim(locks / f"{path.name}.lock", path, choice)
    _remove_stale(path, choice)
    return _listening(path, mode, choice)


def _listening(path: Path, mode: int, choice: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket {path}: {error.strerror or error}; choose another with {choice}") from None
    finally:
        os.umask(previous_umask)
    os.chmod(path, mode)
    listener.listen(BACKLOG_CONNECTIONS)
    return listener


def prepare_directory(directory: Path, choice: str = AGENTS) -> Path:
    """Create the directory, or check that the existing one is safe. ``choice``: the option that names another."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"runtime directory {directory}: {error.strerror}; choose another with {choice}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"runtime directory {directory} isn't a directory; choose another with {choice}")
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ConfigError(
            f"runtime directory {directory} is writable by other users; use a directory of your own with mode 0755 or "
            f"stricter, with {choice}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"runtime directory {directory} isn't writable by the daemon's user; change its owner "
            f"(as root: install -d -o {os.geteuid()} -m 755 {directory}), or choose another with {choice}"
        )
    return directory


def write_token(directory: Path) -> str:
    """Create a token for the daemon's user in a file that only this user can read, and return it."""
    token = f"gpm_{secrets.token_urlsafe(32)}"
    replace_file(directory / TOKEN_FILE, f"{token}\n".encode())
    return token


def _claim(lock: Path, path: Path, choice: str) -> None:
    """Hold the lock until this process exits, so two daemons never share a socket path."""
    try:
        lock_file(lock)
    except BlockingIOError:
        raise ConfigError(
            f"another daemon uses the socket {path}; stop that daemon or choose another with {choice}"
        ) from None
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(
            f"can't open the lock {lock}: {reason}; remove the lock or choose another with {choice}"
        ) from None


def _remove_stale(path: Path, choice: str) -> None:
    """Remove the socket of a daemon that has exited. Raises ConfigError if ``path`` is anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{path} exists and isn't a socket of this user; choose another with {choice}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        refused = probe.connect_ex(str(path)) == errno.ECONNREFUSED
    if not refused:
        raise ConfigError(f"another program is listening on {path}; stop that program or choose another with {choice}")
    path.unlink()
