"""Requests to daemons and to Prometheus: one deadline, verified TLS, no redirect, no proxy of the environment.

A token is sent over TLS or to a loopback address, and never otherwise: the addresses come from service discovery.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gpumond import __version__
from gpumond.errors import DaemonError, DiscoveryError
from gpumond.fleet import Machine
from gpumond.host.http_exchange import HttpAnswer, exchange

MAX_ANSWER_BYTES = 32 << 20

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """``tokens`` are by name or host of a machine; ``token`` is for the others. ``trust`` contains the trusted
    authorities, and the client's certificate if it has one.
    """

    trust: ssl.SSLContext
    token: str | None = field(default=None, repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    def token_of(self, machine: Machine) -> str | None:
        return self.tokens.get(machine.name) or self.tokens.get(machine.host) or self.token


@dataclass(frozen=True, slots=True)
class Client:
    """``timeout_seconds`` limits each request that does not state another limit."""

    access: Access
    timeout_seconds: float = 5.0

    async def get(self, machine: Machine, path: str) -> Any:
        """Return the decoded answer of a daemon to GET. Raises DaemonError."""
        return await self._call(machine, "GET", path, None, self.timeout_seconds)

    async def post(self, machine: Machine, path: str, body: object, timeout_seconds: float) -> Any:
        """Return the decoded answer of a daemon to POST. Raises DaemonError.

        A request that requires a token which must not be sent is not sent.
        """
        return await self._call(machine, "POST", path, json.dumps(body).encode(), timeout_seconds)

    async def get_list(self, url: str) -> Any:
        """Return the decoded answer of another service, to which no token is sent. Raises DiscoveryError."""
        try:
            return decoded(await send(url, "GET", "", None, {}, self.access.trust, self.timeout_seconds))
        except DaemonError as error:
            raise DiscoveryError(f"{url}: {error}") from None

    async def _call(self, machine: Machine, method: str, path: str, body: bytes | None, seconds: float) -> Any:
        token, fields, withheld = self.access.token_of(machine), {"Content-Type": "application/json"}, ""
        if token and may_receive_token(machine.url):
            fields["Authorization"] = f"Bearer {token}"
        elif token:
            withheld = "; the token was not sent, since the connection is without TLS"
            if method != "GET":
                raise DaemonError("the token is not sent without TLS; give the daemon a web_config and use https")
        answer = await send(machine.url, method, path, body, fields, self.access.trust, seconds)
        try:
            return decoded(answer)
        except DaemonError as error:
            note = withheld if error.status in (401, 403) else ""
            raise DaemonError(f"{error}{note}", error.status, error.problem) from None


async def send(
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    trust: ssl.SSLContext,
    seconds: float,
) -> HttpAnswer:
    """Return the answer to one request, whatever its status. Raises DaemonError, with the reason only."""
    fields = {"User-Agent": f"gpumond/{__version__}", "Connection": "close", "Accept": "application/json", **headers}
    try:
        parts = urlsplit(url)
        target = parts.path.rstrip("/") + path if path else parts.path or "/"
        target += f"?{parts.query}" if parts.query else ""
        connection = _connection(parts.scheme, parts.hostname or "", parts.port, trust, seconds)
        exchanged = exchange(connection, method, target, body, fields, MAX_ANSWER_BYTES + 1)
        answer = await asyncio.wait_for(exchanged, seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise DaemonError(f"no answer within {seconds:g} s") from None
    except socket.gaierror as error:
        raise DaemonError(f"the host name cannot be resolved: {error.strerror}") from None
    except ssl.SSLCertVerificationError as error:
        raise DaemonError(f"its certificate is not valid for this address: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise DaemonError(f"no TLS connection: {error.reason or 'failed'}") from None
    except ConnectionRefusedError:
        raise DaemonError("nothing listens at its address") from None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise DaemonError(f"no answer: {reason}") from None
    if len(answer.body) > MAX_ANSWER_BYTES:
        raise DaemonError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return answer


def may_receive_token(url: str) -> bool:
    """Return True for an address over TLS, whose certificate is always verified, and for one of this machine."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "https" or parts.hostname == "localhost":
            return True
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:  # a name, or no address
        return False


async def run_each(
    items: Iterable[T],
    work: Callable[[T], Awaitable[R]],
    parallel: int,
    done: Callable[[], None] = lambda: None,
) -> list[R]:
    """Return the results for all items, in their order, with at most ``parallel`` at a time.

    ``done`` is called after each.
    """
    free = asyncio.Semaphore(parallel)

    async def one(item: T) -> R:
        async with free:
            result = await work(item)
        done()
        return result

    return await asyncio.gather(*map(one, items))


def _connection(scheme: str, host: str, port: int | None, trust: ssl.SSLContext, seconds: float) -> HTTPConnection:
    if scheme not in ("http", "https") or not host:
        raise DaemonError("its address is not http:// or https://")
    if scheme == "https":
        return HTTPSConnection(host, port, timeout=seconds, context=trust)
    return HTTPConnection(host, port, timeout=seconds)


def decoded(answer: HttpAnswer) -> Any:
    """Return the JSON of a 200. Raises DaemonError, with the problem document of another status if it has one."""
    try:
        content = json.loads(answer.body) if answer.body else None
    except (ValueError, RecursionError):
        content = None
        if answer.status == 200:
            raise DaemonError("its answer is not JSON") from None
    if answer.status == 200:
        return content
    problem = content if isinstance(content, dict) else {}
    detail = str(problem.get("detail") or problem.get("error") or "")
    raise DaemonError(f"it answered {answer.status}" + (f": {detail:.300}" if detail else ""), answer.status, problem)
