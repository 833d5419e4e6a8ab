"""HTTP requests of the command line and the daemon: one exchange, one deadline, a bounded answer, one kind of error.

``http.client`` follows no redirect and reads no proxy from the environment. An exchange runs in a thread of its own,
since a resolver may block for minutes; its deadline closes the connection, whatever the thread waits for.

A secret is sent over TLS, or to a listener of this machine whose user the kernel names and the caller trusts.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from http.client import BadStatusLine, HTTPConnection, HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from gpumond import __version__
from gpumond.facts.errors import ConfigError, HttpError
from gpumond.host.files import unreadable_text
from gpumond.host.peer import listener_uid, peer_uid

CONNECT_TIMEOUT_SECONDS = 30.0
"""Limit of one attempt to connect, which nothing else can end."""
ACCEPT_TIMEOUT_SECONDS = 10.0
"""Longest wait until a server has accepted a connection over which a secret is sent."""
MAX_RESPONSE_BYTES = 32 << 20


class HttpRequest(NamedTuple):
    method: str
    target: str
    headers: Mapping[str, str] = {}
    body: bytes | None = None


class HttpResponse(NamedTuple):
    status: int
    headers: HTTPMessage
    body: bytes


class Connection(HTTPConnection):
    """A connection that another thread can end, from the moment it exists to the last byte of an answer.

    ``http.client`` drops its own reference to the socket when the headers of an answer have arrived. ``socket_path`` is
    that of a Unix socket. ``tls`` adds TLS, with ``server_name`` as the name in the certificate if it is not the host.
    ``timeout_seconds`` is the longest wait for the next bytes; None if only `abort` limits it. ``trusted_uids``: the
    users to whose listener it may connect, as the kernel names them; None for any.
    """

    def __init__(
        self,
        host: str,
        port: int | None = None,
        *,
        socket_path: str = "",
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        timeout_seconds: float | None = None,
        trusted_uids: frozenset[int] | None = None,
    ) -> None:
        self.default_port = 443 if tls else 80
        super().__init__(host, port or self.default_port)
        self.socket_path, self._tls, self._server_name = socket_path, tls, server_name
        self._timeout_seconds, self._trusted_uids = timeout_seconds, trusted_uids
        self._socket: socket.socket | None = None
        self._is_aborted = False

    def connect(self) -> None:
        """Open the connection. Raises OSError, and HttpError for the listener of a user who is not trusted."""
        if self.socket_path:
            new_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._set_socket(new_socket)
            new_socket.settimeout(self._timeout_seconds)
            new_socket.connect(self.socket_path)
        else:
            try:
                connect_seconds = self._timeout_within(CONNECT_TIMEOUT_SECONDS)
                new_socket = socket.create_connection((self.host, self.port), connect_seconds)
            except UnicodeError:
                raise socket.gaierror(socket.EAI_NONAME, "not a name") from None
            new_socket.settimeout(self._timeout_seconds)
            new_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            name = self._server_name or self.host
            new_socket = self._tls.wrap_socket(new_socket, server_hostname=name, do_handshake_on_connect=False)
        self._set_socket(new_socket)
        if isinstance(new_socket, ssl.SSLSocket):
            new_socket.do_handshake()
        if self._trusted_uids is not None:
            self._verify_listener(new_socket, self._trusted_uids)

    def abort(self) -> None:
        """Make the call on the socket return, which another thread waits for, and each later one fail."""
        self._is_aborted = True
        if self._socket is not None:
            with suppress(OSError):  # closed in the meantime
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS would drop its state

    def _timeout_within(self, limit_seconds: float) -> float:
        return limit_seconds if self._timeout_seconds is None else min(self._timeout_seconds, limit_seconds)

    def _set_socket(self, new_socket: socket.socket) -> None:
        self.sock = self._socket = new_socket
        if self._is_aborted:
            raise ConnectionAbortedError

    def _verify_listener(self, connected: socket.socket, trusted_uids: frozenset[int]) -> None:
        wait_seconds = self._timeout_within(ACCEPT_TIMEOUT_SECONDS)
        try:
            uid = peer_uid(connected) if self.socket_path else listener_uid(connected, wait_seconds)
        except TimeoutError:
            self.close()
            raise HttpError(
                "timeout", f"no response: the server has accepted no connection for {wait_seconds:g} s"
            ) from None
        if uid not in trusted_uids:
            self.close()
            who = "an unknown user listens" if uid is None else f"uid {uid} listens"
            where = f"on {self.socket_path}" if self.socket_path else f"at {self.host}:{self.port}"
            raise HttpError(
                "untrusted",
                f"{who} {where}, and this request is sent only to root, to yourself, to the user of the service, or "
                "over TLS; check the address, or use unix:///DIRECTORY/api.sock or https://",
            )


def split_address(url: str) -> SplitResult:
    """Return the parts of an http:// or https:// address with a host. Raises HttpError for anything else."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets or the port
        is_valid = False
    if not is_valid:
        raise HttpError("address", "the address isn't http:// or https://")
    return parts


def connection_to(
    url: SplitResult,
    tls: Callable[[], ssl.SSLContext],
    timeout_seconds: float | None = None,
    trusted_uids: frozenset[int] | None = None,
) -> Connection:
    """Return a connection to the address that `split_address` has returned, which is not open yet.

    ``trusted_uids``: the request contains a secret, and without TLS it is sent only to a listener of this machine that
    belongs to one of these users. Raises HttpError if there is no such way.
    """
    host = url.hostname or ""
    if url.scheme == "https":
        return Connection(host, url.port, tls=tls(), timeout_seconds=timeout_seconds)
    if trusted_uids is not None and not is_loopback(host):
        raise HttpError(
            "untrusted",
            "the token isn't sent without TLS; set web_config in the daemon's configuration, and use https",
        )
    return Connection(host, url.port, timeout_seconds=timeout_seconds, trusted_uids=trusted_uids)


def target_of(url: SplitResult, path: str = "") -> str:
    """Return the target of a request for a path below an address; without a path, for the address itself."""
    target = url.path.rstrip("/") + path if path else url.path or "/"
    return f"{target}?{url.query}" if url.query else target


LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of the address at which a daemon listens on its own machine; the rest of 127.0.0.0/8 may be anything."""


def is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # another name
        return False


def may_receive_token(url: str) -> bool:
    """Return True for an address over TLS, and for one of this machine, whose listener `Connection` then proves."""
    try:
        parts = split_address(url)
    except HttpError:
        return False
    return parts.scheme == "https" or is_loopback(parts.hostname)


def is_verified_server(url: str, timeout_seconds: float, trusted_uids: frozenset[int]) -> bool:
    """Return True if the server is verified: by TLS, or by the kernel as a listener of a trusted user."""
    try:
        verify_server(url, timeout_seconds, trusted_uids)
    except HttpError:
        return False
    return True


def verify_server(url: str, timeout_seconds: float, trusted_uids: frozenset[int]) -> None:
    """Verify the server, as `is_verified_server` does. Raises HttpError if it isn't trusted or can't be reached."""
    with http_errors():
        parts = split_address(url)
        if parts.scheme != "https":
            probe = connection_to(parts, tls_context, timeout_seconds, trusted_uids)
            probe.connect()
            probe.close()


def tls_context(authorities: str | Path | None = None) -> ssl.SSLContext:
    """Return a TLS context with the authorities in a file, else those of the system. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:
        raise ConfigError(unreadable_text(str(authorities), error, "a PEM file with CA certificates")) from None


def check_token(token: object, where: str) -> str:
    """Return a token. Raises ConfigError if it is empty, or has a character that a header must not contain."""
    if not isinstance(token, str) or not token or not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{where}: expected a token: one line of ASCII without spaces")
    return token


NO_TLS_REASONS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
"""What OpenSSL, by version, calls a response without TLS."""


@contextmanager
def http_errors(timeout_seconds: float = CONNECT_TIMEOUT_SECONDS) -> Iterator[None]:
    """Raise HttpError for a failure of the network. Its sentence has neither the address nor a header."""
    try:
        yield
    except TimeoutError:
        raise HttpError("timeout", f"no response within {timeout_seconds:g} s") from None
    except socket.gaierror as error:
        raise HttpError("dns", f"the host name can't be resolved: {error.strerror}") from None
    except ssl.SSLCertVerificationError as error:
        mismatch = error.verify_message.partition(",")[0]  # the name of the host follows
        raise HttpError("certificate", f"the certificate isn't valid for this address: {mismatch}") from None
    except ssl.SSLError as error:
        reason = "the server doesn't use TLS" if error.reason in NO_TLS_REASONS else error.reason or "failed"
        raise HttpError("tls", f"no TLS connection: {reason}") from None
    except (ConnectionRefusedError, FileNotFoundError):
        raise HttpError("refused", "nothing is listening at this address") from None
    except (ConnectionResetError, BadStatusLine) as error:
        raise HttpError("not_http", f"no response: {type(error).__name__}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise HttpError(
            "connection", f"no response: {getattr(error, 'strerror', None) or type(error).__name__}"
        ) from None


@contextmanager
def response_to(connection: Connection, request: HttpRequest) -> Iterator[HTTPResponse]:
    """Send the request and yield the response, whose body is not read yet. The connection is closed afterwards."""
    try:
        if connection.sock is None:
            connection.connect()
        headers = {"User-Agent": f"gpumond/{__version__}", "Connection": "close", **request.headers}
        with suppress(BrokenPipeError):  # the server has answered before it read the body
            connection.request(request.method, request.target, request.body, headers)
        with connection.getresponse() as response:
            yield response
    finally:
        connection.close()


def exchange(
    connection: Connection, request: HttpRequest, timeout_seconds: float, max_bytes: int = MAX_RESPONSE_BYTES
) -> HttpResponse:
    """Return the answer, whatever its status, if its body has at most ``max_bytes``; with 0, the body is not read.

    ``timeout_seconds`` limits the whole exchange. A request that was not sent by then is never sent. Raises HttpError.
    """
    future = _start_exchange(connection, request, timeout_seconds, max_bytes)
    try:
        return future.result(timeout_seconds)
    except FutureTimeoutError:
        raise HttpError("timeout", f"no response within {timeout_seconds:g} s") from None
    finally:
        if not future.done():
            connection.abort()


async def exchange_async(
    connection: Connection, request: HttpRequest, timeout_seconds: float, max_bytes: int = MAX_RESPONSE_BYTES
) -> HttpResponse:
    """Return the answer as `exchange` does, without a delay of the event loop. Raises HttpError."""
    import asyncio  # the command line starts faster without

    future = _start_exchange(connection, request, timeout_seconds, max_bytes)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout_seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise HttpError("timeout", f"no response within {timeout_seconds:g} s") from None
    finally:
        if not future.done():
            connection.abort()


def _start_exchange(
    connection: Connection, request: HttpRequest, timeout_seconds: float, max_bytes: int
) -> Future[HttpResponse]:
    """Return the answer of an exchange in another thread."""
    future: Future[HttpResponse] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            with http_errors(timeout_seconds), response_to(connection, request) as response:
                body = response.read(max_bytes + 1) if max_bytes else b""
                result = HttpResponse(response.status, response.headers, body)
            if len(body) > max_bytes:
                raise HttpError("too_large", f"the response has more than {max_bytes >> 20} MiB")
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=work, name="gpumond-http", daemon=True).start()
    return future
