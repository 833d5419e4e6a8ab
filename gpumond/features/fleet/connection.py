"""Requests to many daemons and to Prometheus: who receives which credentials, and what failed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from gpumond.agent.transport import trusted_uids
from gpumond.cli.progress import Progress
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError, HttpError
from gpumond.facts.units import plural
from gpumond.host.files import open_regular, read_secret, unreadable_text
from gpumond.host.http import (
    MAX_RESPONSE_BYTES,
    HttpRequest,
    check_token,
    connection_to,
    exchange_async,
    may_receive_token,
    split_address,
    target_of,
    tls_context,
)
from gpumond.view.frame import FRAME_ROUTE, MAX_FRAME_BYTES, decode_response

DEFAULT_PORT = 9917
METRICS_PATH = "/metrics"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9._~/-]*")


@dataclass(frozen=True, slots=True)
class Machine:
    """One daemon. ``name`` is its label ``instance``, ``url`` its address, ``labels`` are the other labels.

    ``from_verified_list``: the list with this name and address is from this computer or from a verified server.
    """

    name: str
    url: str
    labels: tuple[tuple[str, str], ...] = ()
    from_verified_list: bool = True

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise DiscoveryError(f"{self.name!r:.80} isn't a machine name")

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def address(self) -> str:
        """``HOST:PORT``"""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """The path before those of the API; empty without a proxy that adds one."""
        return urlsplit(self.url).path


class Machines:
    """Machines by name, in the order in which they were found, each address once."""

    def __init__(self, machines: Iterable[Machine]) -> None:
        self.all = tuple({(each.name, each.url): each for each in machines}.values())
        self._by_name: dict[str, list[Machine]] = {}
        self._by_address: dict[str, list[Machine]] = {}
        self._by_host: dict[str, list[Machine]] = {}
        for each in self.all:
            self._by_name.setdefault(each.name, []).append(each)
            self._by_address.setdefault(each.address, []).append(each)
            for host in {each.host, _host_and_port(each.name)[0]}:
                self._by_host.setdefault(host, []).append(each)

    def machine_of(self, instance: str, cluster: str = "") -> Machine:
        """Return the machine of a label ``instance``: by its name, its address or, if one of the two has no port, its
        host. With a cluster, those with another label ``cluster`` are left out.

        Raises DiscoveryError for none, and for several with different addresses.
        """
        host, port = _host_and_port(instance)
        same_host = [
            each for each in self._by_host.get(host, ()) if port is None or _host_and_port(each.name)[1] is None
        ]
        machines = self._by_name.get(instance) or self._by_address.get(instance) or same_host
        machines = [each for each in machines if not cluster or dict(each.labels).get("cluster", cluster) == cluster]
        if len({each.url for each in machines}) > 1:
            urls = ", ".join(each.url for each in machines)
            hint = "" if cluster else "; if they have the label cluster, keep it in the query"
            raise DiscoveryError(f"several addresses have the name {instance}: {urls}{hint}")
        if not machines:
            raise DiscoveryError(f"no address of {instance} is known")
        return machines[0]


def parse_machine(
    address: str, labels: Mapping[str, str], *, scheme: str = "http", port: int | None = DEFAULT_PORT
) -> Machine:
    """Return the machine of an address such as ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``. Raises DiscoveryError.

    The labels ``__scheme__`` and ``__metrics_path__`` have the meaning that Prometheus defines; ``scheme`` and ``port``
    are the defaults. Without the label ``instance``, the address is the name.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2] or 1) not in range(1, 65536):
        raise DiscoveryError(f"{address!r:.80} isn't an address; expected HOST or HOST:PORT")
    scheme = labels.get("__scheme__", scheme)
    if scheme not in ("http", "https"):
        raise DiscoveryError(f"{address}: __scheme__ is {scheme!r:.40}; expected http or https")
    prefix = labels.get("__metrics_path__", METRICS_PATH).removesuffix(METRICS_PATH).rstrip("/")
    if not _PREFIX.fullmatch(prefix) or (prefix and not prefix.startswith("/")):
        raise DiscoveryError(f"{address}: __metrics_path__ {prefix!r:.80} isn't a path")
    default_port = port or {"http": 80, "https": 443}[scheme]
    own_labels = {name: text for name, text in labels.items() if name != "instance" and not name.startswith("__")}
    url = f"{scheme}://{match[1]}:{match[2] or default_port}{prefix}"
    return Machine(labels.get("instance") or address, url, tuple(sorted(own_labels.items())))


def _host_and_port(name: str) -> tuple[str, str | None]:
    """Return host and port of a name; the port is None without one. A name of another form is its own host."""
    match = _ADDRESS.fullmatch(name)
    return (match[1].strip("[]").lower(), match[2]) if match else (name, None)


def read_credentials(
    *,
    token_file: Path | None = None,
    tokens_file: Path | None = None,
    certificate_file: Path | None = None,
    key_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Credentials:
    """Return the credentials in these files. Raises ConfigError.

    ``tokens_file``: a YAML file of tokens by machine. $GPUMOND_TOKEN is used without a token file. ``certificate_file``
    and ``key_file``: those of the client.
    """
    environ_token, context = environ.get("GPUMOND_TOKEN"), tls_context(environ.get("GPUMOND_CA_FILE") or None)
    if certificate_file is not None:
        try:
            context.load_cert_chain(certificate_file, key_file, password="")  # no prompt for an encrypted key
        except OSError as error:
            expected = "a PEM file with your certificate, and its key in it or in --client-key"
            raise ConfigError(f"--client-cert {unreadable_text(certificate_file, error, expected)}") from None
    return Credentials(
        ssl_context=context,
        token=read_token(token_file)
        if token_file
        else (check_token(environ_token, "GPUMOND_TOKEN") if environ_token else None),
        tokens=_read_tokens(tokens_file) if tokens_file else {},
    )


def read_token(file: Path) -> str:
    """Return the token in a file. Raises ConfigError."""
    try:
        return check_token(read_secret(file), str(file))
    except ConfigError as error:
        raise ConfigError(f"token file {error}") from None


def _read_tokens(file: Path) -> Mapping[str, str]:
    """Return the tokens by name or host of a machine. Raises ConfigError, also if other users may read the file."""
    try:
        with open_regular(file) as opened:
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise ConfigError(unreadable_text(file, error, "the token of each machine, as in node1: TOKEN")) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ConfigError(f"{file} contains tokens, but other users have access to it; run: chmod 600 {file}")
    from gpumond.config.loading import read_yaml  # it takes half a second, and few commands read such a file

    return {name: check_token(token, f"{file}: {name}") for name, token in read_yaml(file).items()}


_DECODER = ThreadPoolExecutor(1, "gpumond-decoder")
"""Answers are decoded one at a time, which limits the memory, and not in the event loop."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """``tokens`` are by name or host of a machine; ``token`` is for the others. ``ssl_context`` has the trusted
    authorities and, if there is one, the client's certificate.

    A machine of a list whose server is not verified receives only the token of its host, which TLS verifies: such a
    list could give any address the name of another machine.
    """

    ssl_context: ssl.SSLContext
    token: str | None = field(default=None, repr=False)
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    def token_of(self, machine: Machine) -> str | None:
        if not machine.from_verified_list:
            return self.tokens.get(machine.host)
        return self.tokens.get(machine.name) or self.tokens.get(machine.host) or self.token

    def withheld_token_reason(self, machine: Machine) -> str:
        """Return why a machine receives no token; empty if there is none for it."""
        if (self.token or machine.name in self.tokens) and not machine.from_verified_list:
            return (
                "the token wasn't sent, because the list of machines came without TLS; name the host of the machine in "
                "--tokens, or list the machines over https or in a file"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Client:
    """``timeout_seconds`` limits each request that does not state another limit. ``operation``: the id that changes
    state for the audit; empty without one.
    """

    credentials: Credentials
    timeout_seconds: float = 5.0
    operation: str = ""

    async def frame(self, machine: Machine, convert: Callable[[Any], T]) -> T:
        """Return what ``convert`` makes of the frame of a daemon, which it checks. Raises DaemonError."""
        return await self._call(machine, "GET", FRAME_ROUTE, None, self.timeout_seconds, convert, MAX_FRAME_BYTES)

    async def get(self, machine: Machine, path: str) -> Any:
        """Return the decoded answer of a daemon to GET. Raises DaemonError."""
        return await self._call(machine, "GET", path, None, self.timeout_seconds)

    async def post(self, machine: Machine, path: str, body: object, timeout_seconds: float) -> Any:
        """Return the decoded answer of a daemon to POST. Raises DaemonError.

        A request that requires a token which must not be sent is not sent.
        """
        return await self._call(machine, "POST", path, json.dumps(body).encode(), timeout_seconds)

    async def delete(self, machine: Machine, path: str) -> None:
        """Send DELETE to a daemon, like POST. Raises DaemonError."""
        await self._call(machine, "DELETE", path, None, self.timeout_seconds)

    async def _call(
        self,
        machine: Machine,
        method: str,
        path: str,
        body: bytes | None,
        timeout_seconds: float,
        convert: Callable[[Any], T] = lambda content: content,
        max_bytes: int = MAX_RESPONSE_BYTES,
    ) -> T:
        token, headers = self.credentials.token_of(machine), {"Content-Type": "application/json"}
        withheld_token_reason = "" if token else self.credentials.withheld_token_reason(machine)
        if self.operation and method != "GET":
            headers["Gpumond-Operation"] = self.operation
        if token and may_receive_token(machine.url):
            headers["Authorization"] = f"Bearer {token}"
        elif token:
            withheld_token_reason = "the token wasn't sent, because the connection doesn't use TLS"
            if method != "GET":
                raise DaemonError(
                    "the token isn't sent without TLS; set web_config in the daemon's configuration, and use https"
                )
        request = HttpRequest(method, path, headers, body)
        try:
            return await request_json(
                machine.url, request, self.credentials.ssl_context, timeout_seconds, convert, max_bytes
            )
        except DaemonError as error:
            note = f"; {withheld_token_reason}" if withheld_token_reason and error.status in (401, 403) else ""
            raise DaemonError(f"{error}{note}", error.status, error.problem) from None


async def request_json(
    url: str,
    request: HttpRequest,
    ssl_context: ssl.SSLContext,
    timeout_seconds: float,
    convert: Callable[[Any], T] = lambda content: content,
    max_bytes: int = MAX_RESPONSE_BYTES,
) -> T:
    """Return the converted content of a 200 with at most ``max_bytes``. The target of the request is below ``url``.

    The content is decoded and converted outside of the event loop. Raises DaemonError, with the reason only.
    """
    headers = {"Accept": "application/json", **request.headers}
    try:
        address = split_address(url)
        request = request._replace(target=target_of(address, request.target), headers=headers)
        trusted = trusted_uids() if "Authorization" in headers else None
        connection = connection_to(address, lambda: ssl_context, timeout_seconds, trusted)
        answer = await exchange_async(connection, request, timeout_seconds, max_bytes)
    except HttpError as error:
        raise DaemonError(str(error)) from None

    def decode() -> T:
        try:
            return convert(decode_response(answer.status, answer.body))
        except DaemonError as error:
            if not error.status:
                raise
            detail = f": {error}" if str(error) else ""
            raise DaemonError(f"HTTP status {error.status}{detail}", error.status, error.problem) from None

    return await asyncio.get_running_loop().run_in_executor(_DECODER, decode)


async def run_each(items: Iterable[T], work: Callable[[T], Awaitable[R]], concurrency: int) -> list[R]:
    """Return the results of ``work`` for all items, in their order, with at most ``concurrency`` at a time.

    The number of completed items is shown.
    """
    semaphore, progress, completed = asyncio.Semaphore(concurrency), Progress(), 0
    all_items = [*items]

    async def run_one(item: T) -> R:
        nonlocal completed
        async with semaphore:
            result = await work(item)
        completed += 1
        progress.show(f"{completed} of {plural(len(all_items), 'request')} completed")
        return result

    try:
        return await asyncio.gather(*map(run_one, all_items))
    finally:
        progress.end()
