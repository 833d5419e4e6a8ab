"""HTTP POST with one deadline for the whole exchange: no redirects, no proxy from the environment.

Only the status and Retry-After of the answer are used. No thread delays the daemon's end.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from gpumond import __version__
from gpumond.alerting.receivers import ReceiverType, Rejected, Retry
from gpumond.host.files import read_text
from gpumond.protocol.text import has_control_characters

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 * 1024
MAX_RETRY_AFTER_SECONDS = 3600.0


class HttpReceiver(ReceiverType):
    """Base of the types that send over HTTP. A URL can be a secret: it is never shown, and can be read from a file."""

    url: str | None = Field(None, description="the address; it is a secret and is never shown or logged")
    url_file: Path | None = Field(None, description="a file with the address, instead of `url`")
    bearer_token_file: Path | None = Field(
        None,
        description="send `Authorization: Bearer …`; one line. A file with another line end or a control character is "
        "not sent",
    )
    ca_file: Path | None = Field(None, description="trust this CA instead of the system's")

    @property
    def instance(self) -> str:
        """Name of this machine, for a receiver of several machines."""
        return socket.gethostname()

    @model_validator(mode="after")
    def _addressed(self) -> HttpReceiver:
        if (self.url is None) == (self.url_file is None):
            raise ValueError(f"{self.name}: expected exactly one of url and url_file")
        if self.url is not None and not _web_address(self.url):
            raise ValueError(
                f"{self.name}: expected an http:// or https:// url with a host and without user or password"
            )
        return self


def _web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
        )
    except ValueError:
        return False


async def post(
    receiver: HttpReceiver,
    path: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    """POST ``body`` (JSON) to the receiver's address and ``path``. Raises Retry or Rejected, never with the address."""
    try:
        status, retry_after = await asyncio.wait_for(_exchange(receiver, path, body, headers or {}), timeout_seconds)
    except (asyncio.TimeoutError, TimeoutError):
        raise Retry("timeout", f"no answer within {timeout_seconds:g} s") from None
    except socket.gaierror as error:
        raise Retry("dns", f"its name has no address: {error.strerror}") from None
    except ssl.SSLError as error:
        raise Retry("tls", f"no secure connection: {error.reason or 'failed'}") from None
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise Retry("connection", f"no answer: {type(error).__name__}") from None
    _judge(status, retry_after)


def secret(file: Path) -> str:
    """Return a secret's file without its last line end, read at each use so that it can be replaced.

    Raises Retry, also for a control character: a line end in a token would begin another header.
    """
    try:
        text = read_text(file).removesuffix("\n").removesuffix("\r").strip(" \t")
    except (OSError, UnicodeDecodeError):
        raise Retry("secret", f"{file} cannot be read") from None
    if has_control_characters(text):
        raise Retry("secret", f"{file} has a line end or another control character; expected one line")
    return text


async def _exchange(
    receiver: HttpReceiver, path: str, body: bytes, headers: Mapping[str, str]
) -> tuple[int, str | None]:
    url = urlsplit((receiver.url or secret(receiver.url_file or Path())).strip())
    if url.scheme not in ("http", "https") or not url.hostname:
        raise Rejected("address", "its address is not http:// or https://")
    port = url.port or (443 if url.scheme == "https" else 80)
    reader, writer = await _connect(url.hostname, port, _context(receiver) if url.scheme == "https" else None)
    try:
        target = (url.path.rstrip("/") + path if path else url.path or "/") + (f"?{url.query}" if url.query else "")
        lines = {
            "Host": url.netloc.rpartition("@")[2],
            "User-Agent": f"gpumond/{__version__}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **headers,
        }
        if receiver.bearer_token_file:
            lines["Authorization"] = f"Bearer {secret(receiver.bearer_token_file)}"
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        await writer.drain()
        return _answer(await reader.readuntil(b"\r\n\r\n"))
    finally:
        writer.transport.abort()


def _answer(head: bytes) -> tuple[int, str | None]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, status = first.split(" ", 2)[:2]
    if not version.startswith("HTTP/1."):
        raise ValueError("not HTTP")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status), fields.get("retry-after")


def _judge(status: int, retry_after: str | None) -> None:
    if 200 <= status < 300:
        return
    text = f"{status} {HTTPStatus(status).phrase}" if status in set(HTTPStatus) else str(status)
    if status == 429:
        raise Retry("rate_limited", text, _seconds(retry_after))
    if status == 408 or status >= 500:
        raise Retry("server_error", text, _seconds(retry_after))
    raise Rejected("auth" if status in (401, 403) else "redirect" if status < 400 else "rejected", text)


def _seconds(retry_after: str | None) -> float:
    """Parse Retry-After, in seconds or as a date; 0 if it cannot be parsed."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after or "").timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS) if seconds == seconds else 0.0


def _context(receiver: HttpReceiver) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=receiver.ca_file)


async def _connect(
    host: str, port: int, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    failure: OSError = OSError("no address")
    for family, *_, address in await _resolve(host, port):
        try:
            name = host if context else None
            return await asyncio.open_connection(
                address[0], address[1], family=family, ssl=context, server_hostname=name, limit=MAX_ANSWER_BYTES
            )
        except ssl.SSLError:
            raise
        except OSError as error:
            failure = error
    raise failure


async def _resolve(host: str, port: int) -> list[Any]:
    """Resolve a name in a daemon thread, since a resolver may block for minutes."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[Any]] = loop.create_future()

    def settle(addresses: list[Any] | None, error: OSError | None) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(addresses or [])

    def resolve() -> None:
        addresses, failure = None, None
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            failure = error
        except UnicodeError:
            failure = socket.gaierror(socket.EAI_NONAME, "not a name")
        try:
            loop.call_soon_threadsafe(settle, addresses, failure)
        except RuntimeError:
            pass  # the daemon has ended meanwhile

    Thread(target=resolve, name="gpumond-resolve", daemon=True).start()
    return await found
