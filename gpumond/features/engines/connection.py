"""Requests to a declared engine: to its address only, without redirects, proxies or an Origin header."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import ssl
import time
from base64 import b64encode
from collections.abc import Mapping
from http.client import BadStatusLine, HTTPException
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from gpumond import __version__
from gpumond.facts.errors import EngineError, EngineTimeout
from gpumond.facts.text import has_control_characters
from gpumond.features.engines.spec import Address, Answer, Auth, Call, Declaration, Dialogue, T
from gpumond.host.http_exchange import Connection, exchange
from gpumond.host.machine import read_text

MAX_ANSWER_BYTES = 2 << 20


async def carry_out(engine: Declaration, dialogue: Dialogue[T], seconds: float) -> T:
    """Return the result of a dialogue. Raises EngineError.

    ``seconds`` limits all calls together. When it is over, the dialogue receives EngineTimeout, and the calls with
    which it responds have their own time limits. Answers are decoded in a thread, which delays nothing else.
    """
    deadline = time.monotonic() + seconds
    answer: Answer | None = None
    error: EngineError | None = None
    while True:
        call, result = await asyncio.to_thread(_advance, dialogue, answer, error)
        if call is None:
            return cast("T", result)
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


def _advance(dialogue: Dialogue[T], answer: Answer | None, error: EngineError | None) -> tuple[Call | None, T | None]:
    """Return the next call, or the result of the dialogue."""
    try:
        return dialogue.throw(error) if error else next(dialogue) if answer is None else dialogue.send(answer), None
    except StopIteration as done:
        return None, done.value


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
        raise EngineError(f"no secure connection to {address}: {error.reason or 'failed'}{_tls_hint(error)}") from None
    except (ConnectionRefusedError, FileNotFoundError):
        raise EngineError(f"nothing listens at {address}") from None
    except (ConnectionResetError, BadStatusLine) as error:
        hint = "; if the server uses TLS, declare an https:// url" if address.scheme == "http" else ""
        raise EngineError(f"no answer from {address}: {type(error).__name__}{hint}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise EngineError(f"no answer from {address}: {type(error).__name__}") from None
    if len(answer.body) > MAX_ANSWER_BYTES:
        raise EngineError(f"its answer has more than {MAX_ANSWER_BYTES >> 20} MiB")
    return Answer(answer.status, answer.body)


def _tls_hint(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f" ({error.verify_message}); declare ca_file, and server_name if the certificate has another name"
    return "; if the server has no TLS, declare an http:// url" if error.reason == "WRONG_VERSION_NUMBER" else ""


def _connection(engine: Declaration, address: Address) -> Connection:
    if address.scheme == "unix":
        return Connection("localhost", path=address.host)
    tls = ssl.create_default_context(cafile=engine.ca_file) if address.scheme == "https" else None
    return Connection(address.host, address.port, tls=tls, server_name=engine.server_name)


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
