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
AGENT_SOCKET_OPTION, RUNTIME_DIR_OPTION = "--socket DIRECTORY/agent.sock", "--runtime-dir"
"""Options that select another directory for the agent socket, and for the daemon's own files."""


def runtime_directories(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the directories that may contain the daemon's token and socket, the most likely first."""
    if runtime_directory := environ.get("GPUMOND_RUNTIME_DIR"):
        yield Path(runtime_directory)
        return
    socket_path = environ.get("GPUMOND_SOCKET")
    for path in [socket_path] if socket_path else [default_socket(environ), SERVICE_SOCKET]:
        if path == SERVICE_SOCKET:
            yield Path(SERVICE_RUNTIME_DIRECTORY)
        if path is not None:
            yield Path(path).parent


def nonstandard_directory(directory: Path, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the daemon's directory if the command line finds it only by ``GPUMOND_RUNTIME_DIR``, else None."""
    absolute = directory.absolute()
    standard = runtime_directories({name: value for name, value in environ.items() if not name.startswith("GPUMOND_")})
    return None if absolute in standard else absolute


def bind_agent_socket(path: Path, mode: int, daemon_directory: Path | None = None) -> socket.socket:
    """Return a listening socket at ``path``, or systemd's if it listens there. Raises ConfigError with the remedy.

    ``daemon_directory``: the daemon's own directory, if it is separate. It contains the lock file, because any process
    that can read a lock file can hold the lock.
    """
    directory = prepare_directory(path.parent)
    if systemd.owns_agent_socket():
        return systemd.inherited_socket(path)
    lock_directory = directory if daemon_directory is None else prepare_directory(daemon_directory, RUNTIME_DIR_OPTION)
    return _bind(path, mode, lock_directory, AGENT_SOCKET_OPTION)


def bind_api_socket(daemon_directory: Path, mode: int) -> socket.socket:
    """Return the API's Unix socket, whose peers the kernel identifies. Raises ConfigError with the remedy."""
    directory = prepare_directory(daemon_directory, RUNTIME_DIR_OPTION)
    return _bind(directory / API_SOCKET, mode, directory, RUNTIME_DIR_OPTION)


class AgentSocket:
    """The socket at ``path`` on which agents connect, as `bind_agent_socket` returns it.

    ``problem``: why no agent can connect, or empty.
    """

    def __init__(self, path: Path, mode: int, daemon_directory: Path | None = None) -> None:
        self.listener = bind_agent_socket(path, mode, daemon_directory)
        self._path, self._mode, self._file = path, mode, _file_identity(path)
        self.problem = ""

    def restore_if_removed(self) -> bool:
        """Return True if the file had been removed and ``listener`` is another one now."""
        current = _file_identity(self._path)
        if current == self._file:
            self.problem = ""
            return False
        if current is not None or systemd.owns_agent_socket():
            self.problem = f"{self._path} was removed or replaced by another program"
            return False
        try:
            prepare_directory(self._path.parent)
            listener = _listen(self._path, self._mode, AGENT_SOCKET_OPTION)
        except ConfigError as error:
            self.problem = f"{self._path} was removed: {error}"
            return False
        self.listener.close()
        self.listener, self._file, self.problem = listener, _file_identity(self._path), ""
        return True

    def close(self) -> None:
        """Close the socket, and remove its file if it is still its own. One of systemd remains."""
        self.listener.close()
        if _file_identity(self._path) == self._file and not systemd.owns_agent_socket():
            self._path.unlink(missing_ok=True)


def _file_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, None if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _bind(path: Path, mode: int, lock_directory: Path, option: str) -> socket.socket:
    _lock_socket(lock_directory / f"{path.name}.lock", path, option)
    _remove_stale(path, option)
    return _listen(path, mode, option)


def _listen(path: Path, mode: int, option: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous_umask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket {path}: {error.strerror or error}; choose another path with {option}") from None
    finally:
        os.umask(previous_umask)
    os.chmod(path, mode)
    listener.listen(BACKLOG_CONNECTIONS)
    return listener


def prepare_directory(directory: Path, option: str = AGENT_SOCKET_OPTION) -> Path:
    """Create the directory, or check that the existing one is safe. ``option``: the option that selects another."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"runtime directory {directory}: {error.strerror}; choose another path with {option}"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"runtime directory {directory} isn't a directory; choose another path with {option}")
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ConfigError(
            f"runtime directory {directory} is writable by other users; use a directory of your own with mode 0755 or "
            f"stricter, with {option}"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"runtime directory {directory} isn't writable by the daemon's user; change its owner "
            f"(as root: install -d -o {os.geteuid()} -m 755 {directory}), or choose another path with {option}"
        )
    return directory


def write_token(directory: Path) -> str:
    """Create a token for the daemon's user in a file that only this user can read, and return it."""
    token = f"gpm_{secrets.token_urlsafe(32)}"
    replace_file(directory / TOKEN_FILE, f"{token}\n".encode())
    return token


def _lock_socket(lock: Path, path: Path, option: str) -> None:
    """Hold the lock until this process exits, so two daemons never share a socket path."""
    try:
        lock_file(lock)
    except BlockingIOError:
        raise ConfigError(
            f"another daemon uses the socket {path}; stop that daemon or choose another path with {option}"
        ) from None
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigError(
            f"can't open the lock {lock}: {reason}; remove the lock file, or choose another path with {option}"
        ) from None


def _remove_stale(path: Path, option: str) -> None:
    """Remove the socket of a daemon that has exited. Raises ConfigError if ``path`` is anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(f"{path} exists, and isn't a socket that this user owns; choose another path with {option}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        is_refused = probe.connect_ex(str(path)) == errno.ECONNREFUSED
    if not is_refused:
        raise ConfigError(
            f"another program is listening on {path}; stop that program or choose another path with {option}"
        )
    path.unlink()
