"""HTTP client that the verbs use to reach the daemon. Not a verb.

Requests that modify state carry the token in $GPUMOND_TOKEN, or the token file of a daemon on this machine. Without a
readable token they use the daemon's Unix socket, where the kernel identifies the user. Token file and socket are in
$GPUMOND_RUNTIME_DIR, else in the default runtime directory of this user's or the machine's daemon.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from gpumond.cli.arguments import address
from gpumond.errors import DaemonError, GpumondError
from gpumond.model.device_names import device_uuid
from gpumond.model.snapshot import DeviceReading
from gpumond.protocol.sockets import SERVICE_SOCKET, default_socket

DEFAULT_URL = "http://127.0.0.1:9917"
LOCAL = ("127.0.0.1", "localhost", "::1")
DOWNLOAD_SECONDS = 60.0
"""Longest wait for the next bytes of a download."""
CHUNK_BYTES = 1 << 20
UNAUTHORIZED = 401
SERVICE_RUNTIME_DIRECTORY = "/run/gpumond-api"
"""Runtime directory of the system service; deploy/systemd/gpumond.service sets the same path."""


class Origin(NamedTuple):
    """Address and source of the token of a request, for messages. The source is empty without a token."""

    address: str
    token_source: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        type=address,
        default=default_url(),
        help=f"address of the daemon (default: $GPUMOND_URL, then {DEFAULT_URL})",
    )


def default_url() -> str:
    return os.environ.get("GPUMOND_URL") or DEFAULT_URL


def is_local(url: str) -> bool:
    return url.startswith("unix://") or urlsplit(url).hostname in LOCAL


def device(url: str, name: str) -> str:
    """Return the UUID of the device that a name matches. Raises DaemonError, NoSuchDevice, AmbiguousDevice."""
    known = get(url, "/api/v1/devices")
    fields = ("uuid", "index", "pci_bus_id", "parent_uuid")
    return device_uuid(name, [DeviceReading(**{field: each[field] for field in fields}) for each in known])


def get(url: str, path: str, headers: Mapping[str, str] = {}) -> Any:
    """Return the decoded response to GET. Raises DaemonError."""
    return _call(url, path, None, dict(headers), 10.0)


def post(url: str, path: str, body: object, timeout: float) -> Any:
    """Return the decoded response to POST, which is sent with a token. Raises DaemonError."""
    return _change("POST", url, path, body, timeout)


def put(url: str, path: str, body: object) -> Any:
    return _change("PUT", url, path, body, 30.0)


def delete(url: str, path: str) -> None:
    _change("DELETE", url, path, None, 30.0)


def download(url: str, path: str, file: BinaryIO) -> int:
    """Write the response to GET, which is sent as a change is, to a file. Return its size. Raises GpumondError."""
    request, opener, origin = _request(url, path, None, {}, "GET", authorised=True)
    with _errors(origin), opener.open(request, timeout=DOWNLOAD_SECONDS) as answer:
        size = int(answer.headers.get("Content-Length", -1))
        received = 0
        while chunk := answer.read(CHUNK_BYTES):
            try:
                file.write(chunk)
            except OSError as error:  # not of the connection
                raise GpumondError(f"the response cannot be written: {error.strerror}") from None
            received += len(chunk)
    if received != size:
        raise DaemonError(f"the download ended after {received} of {size} bytes")
    return received


def _change(method: str, url: str, path: str, body: object, timeout: float) -> Any:
    headers = {"Content-Type": "application/json"}
    return _call(url, path, None if body is None else json.dumps(body).encode(), headers, timeout, method)


def _call(url: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float, method: str = "GET") -> Any:
    request, opener, origin = _request(url, path, body, headers, method, authorised=method != "GET")
    with _errors(origin), opener.open(request, timeout=timeout) as answer:
        empty = answer.status == 204 or answer.headers.get("Content-Type", "").startswith("text/plain")
        return None if empty else json.load(answer)


def _request(
    url: str, path: str, body: bytes | None, headers: dict[str, str], method: str, authorised: bool
) -> tuple[urllib.request.Request, urllib.request.OpenerDirector, Origin]:
    """Return a request, its opener, and its origin. ``authorised``: it requires a token or the socket."""
    if not url.startswith(("http://", "https://", "unix:///")):
        raise DaemonError(f"{url}: expected an http:// or https:// address, or unix:///DIRECTORY/api.sock")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]  # the daemon is on this machine
    (token, source), named = _token(url), url
    if url.startswith("unix://"):
        url, handlers = "http://localhost", [*handlers, _OverUnix(url.removeprefix("unix://"))]
    if token:
        headers = headers | {"Authorization": f"Bearer {token}"}
    elif authorised and urlsplit(url).hostname in LOCAL and (api := _api_socket()):
        url, handlers = "http://localhost", [*handlers, _OverUnix(api)]
    if url.startswith("https://"):
        handlers.append(urllib.request.HTTPSHandler(context=_trust()))
    request = urllib.request.Request(url.rstrip("/") + path, body, headers, method=method)
    return request, urllib.request.build_opener(*handlers), Origin(named, source)


@contextmanager
def _errors(origin: Origin) -> Iterator[None]:
    """Raise DaemonError for refusals, and for an address without a daemon."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error, origin.token_source) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise DaemonError(
            f"no daemon answers at {origin.address} ({reason}); "
            "start one with `gpumond serve`, or pass its address with --url"
        ) from None


def _refusal(error: urllib.error.HTTPError, token_source: str) -> DaemonError:
    sent = f" (the token is from {token_source})" if error.code == UNAUTHORIZED and token_source else ""
    try:
        problem = json.load(error)
        return DaemonError(f"{problem['detail']}{sent}", error.code, problem)
    except (OSError, ValueError, KeyError, TypeError):
        return DaemonError(f"the daemon answered {error.code} {error.reason}{sent}", error.code)


def _token(url: str) -> tuple[str, str]:
    """Return $GPUMOND_TOKEN, else, for a daemon on this machine, the first readable token file's content, and its
    source.

    Both are empty without a token.
    """
    if token := os.environ.get("GPUMOND_TOKEN"):
        return token, "$GPUMOND_TOKEN"
    if urlsplit(url).hostname not in LOCAL:
        return "", ""
    for directory in runtime_directories():
        try:
            return (directory / "token").read_text().strip(), str(directory / "token")
        except OSError:
            pass
    return "", ""


def _api_socket() -> str | None:
    """Return the first API socket on this machine that this user may connect to."""
    sockets = (str(directory / "api.sock") for directory in runtime_directories())
    return next((path for path in sockets if os.access(path, os.W_OK)), None)


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


def _trust() -> ssl.SSLContext:
    """Return a TLS context with the authorities in $GPUMOND_CA_FILE, else those of the system."""
    named = os.environ.get("GPUMOND_CA_FILE") or None
    try:
        return ssl.create_default_context(cafile=named)
    except OSError as error:
        raise DaemonError(f"GPUMOND_CA_FILE {named}: {error.strerror or error}") from None


class _OverUnix(urllib.request.HTTPHandler):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        def connection(host: str, **options: Any) -> http.client.HTTPConnection:
            return _UnixConnection(self._path, **options)

        return self.do_open(connection, req)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__("localhost", **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
