"""Requests to many daemons and to Prometheus: credentials, proof of the listener, and one deadline for each."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from gpumond import __version__
from gpumond.agent.transport import SERVICE_DIRECTORY, trusted_uids
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.features.fleet.machines import Machine
from gpumond.host.http_exchange import Connection, HttpAnswer, exchange
from gpumond.host.machine import open_regular, read_text
from gpumond.host.peer import listener_uid, peer_uid
from gpumond.view.frame import FRAME, MAX_FRAME_BYTES, CheckedFrame, frame_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CredentialFiles:
    """``tokens``: a YAML file of tokens by machine. ``certificate`` and ``key``: those of the client."""

    token: Path | None = None
    tokens: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def access(files: CredentialFiles, environ: Mapping[str, str] = os.environ) -> Access:
    """Return tokens and trust. $GPUMOND_TOKEN is used without a token file. Raises ConfigError."""
    named = environ.get("GPUMOND_TOKEN")
    token = secret(files.token) if files.token else (checked(named, "GPUMOND_TOKEN") if named else None)
    tokens = _tokens(files.tokens) if files.tokens else {}
    return Access(trust=trust(files, environ.get("GPUMOND_CA_FILE") or None), token=token, tokens=tokens)


def trust(files: CredentialFiles, authorities: str | None) -> ssl.SSLContext:
    """Return a TLS context with the authorities in a file, else those of the system. Raises ConfigError."""
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ConfigError(f"{authorities}: {error.strerror or error}") from None
    if files.certificate is not None:
        try:
            context.load_cert_chain(files.certificate, files.key, password="")  # no prompt for an encrypted key
        except OSError as error:
            raise ConfigError(f"--client-cert {files.certificate}: {error.strerror or error}") from None
    return context


def secret(file: Path) -> str:
    """Return the only line of a file. Raises ConfigError."""
    try:
        return checked(read_text(file).strip(), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or 'not text'}") from None


def _tokens(file: Path) -> Mapping[str, str]:
    """Return the tokens by name or host of a machine. Raises ConfigError, also if other users may read the file."""
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(f"{file} contains tokens: remove the access of other users (chmod 0600 {file})")
    from gpumond.config.loading import read_yaml  # it takes half a second, and few commands read such a file

    return {name: checked(token, f"{file}: {name}") for name, token in read_yaml(file).items()}


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
