"""Requests to engines: credentials, TLS, limits, and what is never sent."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpumond.facts.errors import EngineError
from gpumond.features.engines.poller import MAX_RESPONSE_BYTES, send
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import EngineResponse, get, post
from tests.helpers import certificates
from tests.helpers.engines import answering


class Server(HTTPServer):
    """Server that records requests and answers with ``body``."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.body = b"{}"
        server = self

        class Handler(BaseHTTPRequestHandler):
            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.requests.append((self.command, self.path, headers, body))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(server.body)

            do_GET = do_POST = serve

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running
        running.shutdown()


def ask(server: Server, call: Any = get("/x"), scheme: str = "http", path: str = "", **fields: Any) -> EngineResponse:
    url = f"{scheme}://127.0.0.1:{server.server_port}{path}"
    config = EngineConfig.model_validate({"name": "e", "kind": "ollama", "url": url} | fields)
    return asyncio.run(send(config, call, 10.0))


def secret(directory: Path, text: str = "s3cret\n") -> str:
    path = directory / "secret"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("auth", "name", "value"),
    [
        ({"bearer_token_file": ""}, "authorization", "Bearer s3cret"),
        ({"username": "me", "password_file": ""}, "authorization", "Basic bWU6czNjcmV0"),
        ({"header": "X-Key", "header_file": ""}, "x-key", "s3cret"),
    ],
)
def test_credentials_are_sent(server: Server, tmp_path: Path, auth: dict[str, str], name: str, value: str):
    path = secret(tmp_path)
    ask(server, auth={key: text or path for key, text in auth.items()})
    ((_, _, headers, _),) = server.requests
    assert headers[name] == value


def test_request_is_signed_for_tensorrt_llm(server: Server, tmp_path: Path):
    auth = {"hmac_key_file": secret(tmp_path)}
    ask(server, post("/release_memory", {"tags": ["kv_cache"]}), auth=auth)
    ((method, path, headers, body),) = server.requests
    timestamp, nonce = (headers[f"x-trtllm-runtime-control-{part}"] for part in ("timestamp", "nonce"))
    lines = b"\n".join([b"trtllm-runtime-control-v1", method.encode(), path.encode(), timestamp.encode()])
    digest = hmac.new(b"s3cret", lines + b"\n" + nonce.encode() + b"\n" + body, hashlib.sha256).hexdigest()
    assert headers["x-trtllm-runtime-control-auth"] == f"sha256={digest}"
    assert (len(nonce), body) == (32, b'{"tags": ["kv_cache"]}')


def test_no_origin_and_no_body_is_sent_without_need(server: Server):
    ask(server, path="/base")
    ((method, path, headers, body),) = server.requests
    assert (method, path, body) == ("GET", "/base/x", b"")
    assert not {"origin", "referer", "content-type", "authorization"} & headers.keys()


@pytest.mark.parametrize("text", ["", "a\nb", "a\x00b"])
def test_secret_that_is_not_one_line_is_not_sent(server: Server, tmp_path: Path, text: str):
    with pytest.raises(EngineError, match="expected one line"):
        ask(server, auth={"bearer_token_file": secret(tmp_path, text)})
    assert server.requests == []


def test_missing_secret_is_an_error(server: Server, tmp_path: Path):
    with pytest.raises(EngineError, match="can't be read"):
        ask(server, auth={"bearer_token_file": str(tmp_path / "missing")})


def test_long_answer_is_an_error(server: Server):
    server.body = b"x" * (MAX_RESPONSE_BYTES + 1)
    with pytest.raises(EngineError, match="more than 2 MiB"):
        ask(server)


def test_text_that_is_not_json_is_an_error(server: Server):
    server.body = b"<html>"
    with pytest.raises(EngineError, match="isn't JSON"):
        _ = ask(server).json


def test_nothing_at_the_address_is_an_error(server: Server):
    port = server.server_port
    server.shutdown()  # else its poll keeps the closed socket for half a second
    server.server_close()
    with pytest.raises(EngineError, match=f"http://127.0.0.1:{port}: nothing is listening"):
        ask(server)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "Infinity", "NaN", "1" * 400, "9" * 5000, "1e300"])
def test_number_that_is_not_finite_or_too_large_is_an_error(server: Server, number: str):
    server.body = f'{{"requests": {number}}}'.encode()
    with pytest.raises(EngineError, match="isn't JSON"):
        _ = ask(server).json


def test_rejection_names_what_resolves_it():
    with answering(b"Unauthorized", 401) as url:
        config = EngineConfig.model_validate({"name": "e", "kind": "ollama", "url": url})
        with pytest.raises(EngineError, match="HTTP status 401: Unauthorized; set the engine's key with auth:"):
            asyncio.run(send(config, get("/x"), 10.0)).raise_for_status()


def test_server_without_tls_is_named(server: Server):
    with pytest.raises(EngineError, match="if the server has no TLS, set an http:// url"):
        ask(server, scheme="https")


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("trusted", [True, False])
def test_certificate_is_verified(server: Server, tmp_path: Path, trusted: bool):
    directory = certificates.make(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.crt", directory / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    fields = {"ca_file": str(directory / "ca.crt")} | ({} if trusted else {"server_name": "other.example.com"})
    if trusted:
        assert ask(server, scheme="https", **fields).status == 200
    else:
        with pytest.raises(EngineError, match=r"the certificate isn't valid.*set ca_file, and server_name"):
            ask(server, scheme="https", **fields)
        assert server.requests == []


@pytest.mark.needs("openssl")
def test_server_with_tls_is_named(server: Server, tmp_path: Path):
    directory = certificates.make(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "server.crt", directory / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with pytest.raises(EngineError, match="if the server uses TLS, set an https:// url"):
        ask(server)
