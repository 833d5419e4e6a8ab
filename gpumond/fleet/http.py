"""Connections to daemons that ask who listens before a secret is said: TLS verifies the host, the kernel the user.

No redirect is followed, no proxy of the environment is used, and the answers are finite JSON of a limited size.
"""

from __future__ import annotations

import ipaddress
import json
import os
import ssl
from collections.abc import Callable, Iterable
from http.client import HTTPException
from math import isfinite
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gpumond.agent.daemon_trust import SERVICE_DIRECTORY, trusted_uids
from gpumond.errors import ConfigError, DaemonError
from gpumond.host.http_exchange import Connection
from gpumond.host.peer_credentials import listener_uid, peer_uid

MAX_ANSWER_BYTES = 32 << 20
MAX_DETAIL = 300
ACCEPTED_SECONDS = 10.0
"""Longest wait until a server has accepted a connection over which a token is sent."""
MAX_DIGITS = 19
"""Digits of the integers below 2**63."""


class UntrustedListener(DaemonError):
    """Another user than root, this one or the daemon's listens at the address."""


class UnixConnection(Connection):
    """Connection to a daemon's Unix socket. ``connect`` raises UntrustedListener for the socket of another user."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", path=path, seconds=seconds)

    def connect(self) -> None:
        super().connect()
        uid, directory = peer_uid(self.sock), os.path.dirname(self._path)
        if uid not in trusted_uids(directory):
            self.close()
            raise UntrustedListener(
                f"uid {uid} listens on {self._path}, which is neither root, nor you, nor the user to whom root has "
                f"given {directory}: no request was sent"
            )


class _LoopbackConnection(Connection):
    """Connection over which a secret is sent. ``connect`` raises UntrustedListener for the socket of another user."""

    def __init__(self, host: str, port: int | None, seconds: float, directories: Iterable[str]) -> None:
        super().__init__(host, port, seconds=seconds)
        self._longest, self._directories = min(seconds, ACCEPTED_SECONDS), (SERVICE_DIRECTORY, *directories)

    def connect(self) -> None:
        super().connect()
        uid = listener_uid(self.sock, self._longest)
        if uid is None or not any(uid in trusted_uids(directory) for directory in self._directories):
            self.close()
            who = "the kernel does not name the user who listens" if uid is None else f"uid {uid} listens"
            raise UntrustedListener(
                f"{who} at {self.host}:{self.port}, and a token is sent only to root, to yourself, to the user of the "
                "service, or over TLS; check the address, or use unix:///DIRECTORY/api.sock or https://"
            )


def connection(
    url: SplitResult, seconds: float, trust: Callable[[], ssl.SSLContext], secret: bool, directories: Iterable[str] = ()
) -> Connection:
    """Return a connection to an http:// or https:// address, which is not open yet.

    ``secret``: the request contains a token. It is then sent only over TLS, or to a listener of this machine that
    belongs to root, to this user, or to the owner of the service's directory or of one of ``directories``. Raises
    DaemonError if there is no such way, and ValueError for a port that is no number.
    """
    if url.scheme == "https" and url.hostname:
        return Connection(url.hostname, url.port, tls=trust(), seconds=seconds)
    if url.scheme != "http" or not url.hostname:
        raise DaemonError("its address is not http:// or https://")
    if not secret:
        return Connection(url.hostname, url.port, seconds=seconds)
    if not is_loopback(url.hostname):
        raise DaemonError("the token is not sent without TLS; give the daemon a web_config and use https")
    return _LoopbackConnection(url.hostname, url.port, seconds, directories)


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # another name
        return False


def may_receive_token(url: str) -> bool:
    """Return True for an address over TLS, and for one of this machine, whose listener is asked for (`connection`)."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme == "https" or is_loopback(parts.hostname)


def is_proven(url: str, seconds: float, directories: Iterable[str] = ()) -> bool:
    """Return True if the server is verified: by TLS, or by the kernel as a user whom a token may reach."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "https":
            return True
        probe = connection(parts, seconds, ssl.create_default_context, True, directories)
        probe.connect()
    except (OSError, ValueError, HTTPException, DaemonError):
        return False
    probe.close()
    return True


def checked(token: object, where: str) -> str:
    """Return a token. Raises ConfigError if it is empty, or has a character that a header must not contain."""
    if not isinstance(token, str) or not token or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{where}: expected a token: one line of ASCII without spaces")
    return token


def decoded(status: int, body: bytes) -> Any:
    """Return the JSON of a 2xx, or None. Raises DaemonError, with the problem document of other statuses."""
    try:
        content = _JSON.decode(body.decode()) if body else None
    except (ValueError, RecursionError):
        content = None
        if 200 <= status < 300:
            raise DaemonError("its answer is not JSON with finite numbers") from None
    if 200 <= status < 300:
        return content
    problem = content if isinstance(content, dict) else {}
    detail = " ".join(str(problem.get("detail") or problem.get("error") or "").split())
    raise DaemonError(f"{detail:.{MAX_DETAIL}}", status, problem)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS + digits.startswith("-"):
        raise ValueError("too many digits")
    return int(digits)


def _number(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError("not finite")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


_JSON = json.JSONDecoder(parse_int=_integer, parse_float=_number, parse_constant=_no_constant)
