"""Requests to a declared engine: to its address only, without redirects, proxies or an Origin header."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

from gpumond import __version__
from gpumond.engines.spec import Address, Answer, Auth, Call, Declaration, Dialogue, T
from gpumond.errors import EngineError, EngineTimeout
from gpumond.host.files import read_text
from gpumond.host.http_exchange import exchange
from gpumond.protocol.text import has_control_characters

MAX_ANSWER_BYTES = 8 << 20
CONNECT_SECONDS = 5.0


async def carry_out(engine: Declaration, dialogue: Dialogue[T], seconds: float) -> T:
    """Return the result of a dialogue. Raises EngineError.

    ``seconds`` limits all calls together. When it is over, the dialogue receives EngineTimeout, and the calls with
    which it responds have their own time limits.
    """
    deadline = time.monotonic() + seconds
    answer: Answer | None = None
    error: EngineError | None = None
    while True:
        try:
            call = dialogue.throw(error) if error else next(dialogue) if answer is None else dialogue.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        rest = deadline - time.monotonic()
        limit = call.seconds if error and call.seconds else min(rest, call.seconds or rest)
        answer, error = None, None
        try:
            answer = await asyncio.wait_for(send(engine, call), max(0.001, limit))
        except (asyncio.TimeoutError, TimeoutError):
            path = urlsplit(call.path).path
            error = EngineTimeout(f"no answer to {call.method} {path} within {max(0.0, limit):.3g} s")
        except EngineError as failure:
            error = failure


async def send(engine: Declaration, call: Call) -> Answer:
    """Return the answer to one request. Raises EngineError."""
    address = engine.metrics_address if call.of_metrics and engine.metrics_address else engine.address
    body = None if call.body is None else json.dumps(call.body).encode()
    target = address.prefix + call.path
    fields = {"User-Agent": f"gpumond/{__version__}", "Connection": "close", "Accept": "*/*"}
    if body is not None:
        fields["Content-Type"] = "application/json"
    try:
        fields |= _credentials(engine.auth, call.method, urlsplit(target).path, body or b"")
        connection = _connection(engine, address)
        answer = await exchange(connection, call.method, target, body, fields, MAX_ANSWER_BYTES + 1)
    except ssl.SSLError as error:
        raise EngineError(f"no secure connection to {address}: {error.reason or 'failed'}") from None
    except (ConnectionRefusedError, FileNotFoundError):
        raise EngineError(f"nothing listens at {address}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise EngineError(f"no answer from {address}: {type(error).__name__}") from None
    if len(answer.body) > MAX_ANSWER_BYTES:
        raise EngineError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return Answer(answer.status, answer.body)


def _connection(engine: Declaration, address: Address) -> HTTPConnection:
    if address.scheme == "unix":
        return _UnixConnection(address.host)
    if address.scheme == "http":
        return HTTPConnection(address.host, address.port)
    context = ssl.create_default_context(cafile=engine.ca_file)
    return _TlsConnection(address.host, address.port, context, engine.server_name)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class _TlsConnection(HTTPSConnection):
    """TLS connection whose certificate may be for another name than the address."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext, server_name: str | None) -> None:
        super().__init__(host, port, context=context)
        self._tls, self._server_name = context, server_name or host

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), CONNECT_SECONDS)
        self.sock.settimeout(None)
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server_name)


def _credentials(auth: Auth, method: str, path: str, body: bytes) -> Mapping[str, str]:
    if auth.bearer_token_file:
        return {"Authorization": f"Bearer {_secret(auth.bearer_token_file)}"}
    if auth.password_file:
        pair = f"{auth.username}:{_secret(auth.password_file)}"
        return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
    if auth.header_file:
        return {auth.header: _secret(auth.header_file)}
    if auth.hmac_key_file:
        return signed(_secret(auth.hmac_key_file), method, path, body, str(int(time.time())), secrets.token_hex(16))
    return {}


def signed(key: str, method: str, path: str, body: bytes, timestamp: str, nonce: str) -> Mapping[str, str]:
    """Return the headers of TensorRT-LLM's runtime control: an HMAC-SHA256 of request, time and nonce."""
    lines = "\n".join(("trtllm-runtime-control-v1", method, path, timestamp, nonce, ""))
    digest = hmac.new(key.encode(), lines.encode() + body, hashlib.sha256).hexdigest()
    name = "x-trtllm-runtime-control"
    return {f"{name}-auth": f"sha256={digest}", f"{name}-timestamp": timestamp, f"{name}-nonce": nonce}


def _secret(file: Path) -> str:
    """Return a secret's file without its last line end. Raises EngineError."""
    try:
        text = read_text(file).removesuffix("\n").removesuffix("\r").strip(" \t")
    except (OSError, UnicodeDecodeError):
        raise EngineError(f"{file} cannot be read: check that the daemon's user may read it") from None
    if not text or has_control_characters(text):
        raise EngineError(f"{file} is empty or has a line end or another control character; expected one line")
    return text
