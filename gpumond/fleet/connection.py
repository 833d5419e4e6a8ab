"""Requests to many daemons and to Prometheus at the same time, each with one deadline.

The addresses come from service discovery: `gpumond.fleet.http` decides who may receive a token, and `Access` whose.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gpumond import __version__
from gpumond.errors import DaemonError, DiscoveryError
from gpumond.fleet import Machine
from gpumond.fleet.http import MAX_ANSWER_BYTES, connection, decoded, is_proven, may_receive_token
from gpumond.host.http_exchange import HttpAnswer, exchange
from gpumond.top.frame import FRAME, MAX_FRAME_BYTES, CheckedFrame, frame_of

_DECODER = ThreadPoolExecutor(1, "gpumond-decoder")
"""Answers are decoded one at a time, which limits the memory, and not in the event loop."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """``tokens`` are by name or host of a machine; ``token`` is for the others. ``trust`` contains the trusted
    authorities, and the client's certificate if it has one.

    A machine of a list whose server is not verified receives only the token of its host, which TLS verifies: such a
    list could give any address the name of another machine.
    """

    trust: ssl.SSLContext
    token: str | None = field(default=None, repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    def token_of(self, machine: Machine) -> str | None:
        if not machine.proven:
            return self.tokens.get(machine.host)
        return self.tokens.get(machine.name) or self.tokens.get(machine.host) or self.token

    def reason_without_token(self, machine: Machine) -> str:
        """Return why a machine receives no token; empty if there is none for it."""
        if (self.token or machine.name in self.tokens) and not machine.proven:
            return (
                "the token was not sent, since the list of machines came without TLS; name the host of the machine in "
                "--tokens, or list the machines over https or in a file"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Client:
    """``timeout_seconds`` limits each request that does not state another limit."""

    access: Access
    timeout_seconds: float = 5.0

    async def frame(self, machine: Machine) -> CheckedFrame:
        """Return the frame of a daemon. Raises DaemonError."""
        return await self._call(machine, "GET", FRAME, None, self.timeout_seconds, frame_of, MAX_FRAME_BYTES)

    async def get(self, machine: Machine, path: str) -> Any:
        """Return the decoded answer of a daemon to GET. Raises DaemonError."""
        return await self._call(machine, "GET", path, None, self.timeout_seconds)

    async def post(self, machine: Machine, path: str, body: object, timeout_seconds: float) -> Any:
        """Return the decoded answer of a daemon to POST. Raises DaemonError.

        A request that requires a token which must not be sent is not sent.
        """
        return await self._call(machine, "POST", path, json.dumps(body).encode(), timeout_seconds)

    async def get_list(self, url: str) -> tuple[Any, bool]:
        """Return the decoded answer of another service, to which no token is sent, and whether it is verified.

        Raises DiscoveryError.
        """
        try:
            proven = await asyncio.to_thread(is_proven, url, self.timeout_seconds)
            answer = await send(url, "GET", "", None, {}, self.access.trust, self.timeout_seconds)
            return await decoded_answer(answer), proven
        except DaemonError as error:
            raise DiscoveryError(f"{url}: {error}") from None

    async def _call(
        self,
        machine: Machine,
        method: str,
        path: str,
        body: bytes | None,
        seconds: float,
        convert: Callable[[Any], T] = lambda content: content,
        limit: int = MAX_ANSWER_BYTES,
    ) -> T:
        token, fields = self.access.token_of(machine), {"Content-Type": "application/json"}
        withheld = "" if token else self.access.reason_without_token(machine)
        if token and may_receive_token(machine.url):
            fields["Authorization"] = f"Bearer {token}"
        elif token:
            withheld = "the token was not sent, since the connection is without TLS"
            if method != "GET":
                raise DaemonError("the token is not sent without TLS; give the daemon a web_config and use https")
        answer = await send(machine.url, method, path, body, fields, self.access.trust, seconds, limit)
        try:
            return await decoded_answer(answer, convert)
        except DaemonError as error:
            note = f"; {withheld}" if withheld and error.status in (401, 403) else ""
            raise DaemonError(f"{error}{note}", error.status, error.problem) from None


async def send(
    url: str,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    trust: ssl.SSLContext,
    seconds: float,
    limit: int = MAX_ANSWER_BYTES,
) -> HttpAnswer:
    """Return the answer to one request, whatever its status, if it has at most ``limit`` bytes.

    Raises DaemonError, with the reason only.
    """
    fields = {"User-Agent": f"gpumond/{__version__}", "Connection": "close", "Accept": "application/json", **headers}
    try:
        parts = urlsplit(url)
        target = parts.path.rstrip("/") + path if path else parts.path or "/"
        target += f"?{parts.query}" if parts.query else ""
        to = connection(parts, seconds, lambda: trust, "Authorization" in fields)
        exchanged = exchange(to, method, target, body, fields, limit + 1)
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
    if len(answer.body) > limit:
        raise DaemonError(f"its answer has more than {limit >> 20} MiB")
    return answer


async def decoded_answer(answer: HttpAnswer, convert: Callable[[Any], T] = lambda content: content) -> T:
    """Return the content of a 200, decoded and converted outside of the event loop. Raises DaemonError."""

    def work() -> T:
        try:
            return convert(decoded(answer.status, answer.body))
        except DaemonError as error:
            if not error.status:
                raise
            detail = f": {error}" if str(error) else ""
            raise DaemonError(f"it answered {error.status}{detail}", error.status, error.problem) from None

    return await asyncio.get_running_loop().run_in_executor(_DECODER, work)


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
