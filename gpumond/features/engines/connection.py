"""Requests to a declared engine: to its address only, without redirects, proxies or an Origin header."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
from base64 import b64encode
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from gpumond.facts.errors import ConfigError, EngineError, EngineTimeout, HttpError, HttpFailure
from gpumond.features.engines.settings import AuthConfig, EngineConfig
from gpumond.features.engines.spec import Address, Answer, Call, Dialogue, T
from gpumond.host.files import read_secret
from gpumond.host.http import Connection, Request, exchange_async, trust

MAX_ANSWER_BYTES = 2 << 20
HINTS: Mapping[tuple[str, HttpFailure], str] = {
    ("http", "not_http"): "; if the server uses TLS, declare an https:// url",
    ("https", "tls"): "; if the server has no TLS, declare an http:// url",
    ("https", "certificate"): "; declare ca_file, and server_name if the certificate has another name",
}
"""What resolves a failure, by the scheme of the address and the reason."""


async def carry_out(engine: EngineConfig, dialogue: Dialogue[T], seconds: float) -> T:
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
            answer = await send(engine, call, max(0.001, limit))
        except EngineError as failure:
            error = failure


def _advance(dialogue: Dialogue[T], answer: Answer | None, error: EngineError | None) -> tuple[Call | None, T | None]:
    """Return the next call, or the result of the dialogue."""
    try:
        return dialogue.throw(error) if error else next(dialogue) if answer is None else dialogue.send(answer), None
    except StopIteration as done:
        return None, done.value


async def send(engine: EngineConfig, call: Call, seconds: float) -> Answer:
    """Return the answer to one request. Raises EngineError, and EngineTimeout after ``seconds``."""
    address = engine.metrics_address if call.of_metrics and engine.metrics_address else engine.address
    body = None if call.body is None else json.dumps(call.body).encode()
    target = address.prefix + call.path
    fields = {"Accept": "*/*"} | ({} if body is None else {"Content-Type": "application/json"})
    try:
        fields |= _credentials(engine.auth, call.method, urlsplit(target).path, body or b"")
        request = Request(call.method, target, fields, body)
        answer = await exchange_async(_connection(engine, address), request, seconds, MAX_ANSWER_BYTES)
    except ConfigError as error:
        raise EngineError(str(error)) from None
    except HttpError as error:
        if error.reason == "timeout":
            path = urlsplit(call.path).path
            raise EngineTimeout(f"no answer to {call.method} {path} within {seconds:.3g} s") from None
        hint = HINTS.get((address.scheme, error.reason), "")
        raise EngineError(f"{address}: {error}{hint}") from None
    return Answer(answer.status, answer.body)


def _connection(engine: EngineConfig, address: Address) -> Connection:
    if address.scheme == "unix":
        return Connection("localhost", path=address.host)
    tls = trust(engine.ca_file) if address.scheme == "https" else None
    return Connection(address.host, address.port, tls=tls, server_name=engine.server_name)


def _credentials(auth: AuthConfig | None, method: str, path: str, body: bytes) -> Mapping[str, str]:
    if auth is None:
        return {}
    if auth.bearer_token_file:
        return {"Authorization": f"Bearer {read_secret(auth.bearer_token_file)}"}
    if auth.password_file:
        pair = f"{auth.username}:{read_secret(auth.password_file)}"
        return {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
    if auth.header and auth.header_file:
        return {auth.header: read_secret(auth.header_file)}
    if auth.hmac_key_file:
        return signed(read_secret(auth.hmac_key_file), method, path, body, str(int(time.time())), secrets.token_hex(16))
    return {}


def signed(key: str, method: str, path: str, body: bytes, timestamp: str, nonce: str) -> Mapping[str, str]:
    """Return the headers of TensorRT-LLM's runtime control: an HMAC-SHA256 of request, time and nonce."""
    lines = "\n".join(("trtllm-runtime-control-v1", method, path, timestamp, nonce, ""))
    digest = hmac.new(key.encode(), lines.encode() + body, hashlib.sha256).hexdigest()
    name = "x-trtllm-runtime-control"
    return {f"{name}-auth": f"sha256={digest}", f"{name}-timestamp": timestamp, f"{name}-nonce": nonce}
