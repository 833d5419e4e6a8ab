"""Requests that a connection repeats byte by byte: answered without new checks, with the current body."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import uvicorn
from starlette.types import Receive, Scope, Send

from gpumond.api.auth import Tokens
from gpumond.api.guard import Guard, Policy
from gpumond.api.repeats import offer
from gpumond.api.sending import FEW_ANSWERS, LARGE_PIECE_BYTES
from gpumond.config.web import Web
from gpumond.daemon.server import _Server
from tests.running import until
from tests.serving import connect, start_daemon

SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: identity\r\n\r\n"


class Counting:
    """An application that counts the requests it handles, and offers to repeat its answers."""

    def __init__(self, body: bytes = b"first") -> None:
        self.body: bytes | None = body
        self.handled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.handled += 1
        body = self.body or b"new"
        offer(scope, lambda: self.body)
        headers = [(b"content-length", b"%d" % len(body)), (b"vary", b"Accept")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def get(self, request: bytes = SCRAPE) -> tuple[list[bytes], bytes]:
        """Return the lines of the head, without the date, and the body."""
        self._writer.write(request)
        return await self.answer()

    async def answer(self) -> tuple[list[bytes], bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        length = next(int(line.partition(b":")[2]) for line in head if line.startswith(b"content-length"))
        dated = [line for line in head if line.startswith(b"date: ")]
        assert len(dated) == 1
        return sorted(set(head) - set(dated)), await self._reader.readexactly(length)

    async def ended(self) -> bool:
        return await self._reader.read() == b""


@asynccontextmanager
async def serving(app: Counting, policy: Policy, keep_alive: int = 75) -> AsyncIterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    guard = Guard(app, Tokens("t"), policy)
    config = uvicorn.Config(guard, lifespan="off", log_config=None, server_header=False, timeout_keep_alive=keep_alive)
    config.load()
    server = _Server(config, policy.web, lambda reason: None)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listener])
    await server.on_tick(0)
    try:
        yield listener.getsockname()
    finally:
        server.servers[0].close()
        while server.server_state.connections:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(*address)
    with closing(writer):
        yield Client(reader, writer)


def policy(*webs: Web) -> Policy:
    """A policy whose web configuration is the last element of ``webs``, which a test may extend."""
    configurations = list(webs or (Web(),))
    return Policy(web=lambda: configurations[-1])


def run(test: object) -> None:
    asyncio.run(asyncio.wait_for(test, 30))  # type: ignore[arg-type]


def test_repeated_request_is_answered_with_the_same_headers_and_the_current_body():
    async def repeat() -> None:
        app = Counting()
        async with serving(app, policy()) as address, connected(address) as client:
            first = await client.get()
            app.body = b"a second, longer one"
            second = await client.get()
            assert (first[1], second[1], app.handled) == (b"first", app.body, 1)
            changed = {b"content-length: 5", b"content-length: 20"}
            assert set(first[0]) - changed == set(second[0]) - changed
            assert b"x-content-type-options: nosniff" in second[0]

    run(repeat())


def test_request_without_a_current_body_is_handled_as_a_new_one():
    async def repeat() -> None:
        app = Counting()
        async with serving(app, policy()) as address, connected(address) as client:
            await client.get()
            app.body = None
            assert (await client.get())[1] == b"new"
            assert app.handled == 2

    run(repeat())


def test_other_requests_and_other_connections_are_checked():
    async def repeat() -> None:
        app = Counting()
        async with serving(app, policy()) as address, connected(address) as client:
            await client.get()
            await client.get(SCRAPE.replace(b"identity", b"gzip"))
            await client.get()
            await client.get()
            assert app.handled == 3
            assert b"HTTP/1.1 421 Misdirected Request" in (await client.get(SCRAPE.replace(b"127.0.0.1", b"evil")))[0]
            async with connected(address) as other:
                await other.get()
            assert app.handled == 4

    run(repeat())


def test_head_pipelined_and_partial_requests_are_handled_in_order():
    async def repeat() -> None:
        app = Counting()
        async with serving(app, policy()) as address, connected(address) as client:
            await client.get()
            await client.get(SCRAPE + SCRAPE)
            await client.answer()
            assert app.handled == 3
            client._writer.write(SCRAPE[:20])
            await asyncio.sleep(0.05)
            assert (await client.get(SCRAPE[20:]))[1] == b"first"
            assert app.handled == 4
            await client.get()
            await client.get()
            assert app.handled == 5
            for _ in range(2):
                client._writer.write(b"HEAD" + SCRAPE.removeprefix(b"GET"))
                await client._reader.readuntil(b"\r\n\r\n")
            assert app.handled == 7
            assert (await client.get())[1] == b"first"

    run(repeat())


def test_rate_limit_and_new_web_configuration_are_obeyed():
    async def repeat() -> None:
        app, webs = Counting(), [Web()]
        async with serving(app, Policy(web=lambda: webs[-1])) as address, connected(address) as client:
            await client.get()
            await client.get()
            assert app.handled == 1
            webs.append(Web(users={"prometheus": b"$2b$04$"}))  # type: ignore[dict-item]
            assert b"HTTP/1.1 401 Unauthorized" in (await client.get())[0]
        limited = Counting()
        slow = policy(Web(rate_interval=60.0, rate_burst=2))
        async with serving(limited, slow) as address, connected(address) as client:
            await client.get()
            await client.get()
            assert b"HTTP/1.1 429 Too Many Requests" in (await client.get())[0]
        assert limited.handled == 2

    run(repeat())


def test_connection_is_kept_while_requests_are_repeated():
    async def repeat() -> None:
        app = Counting()
        async with serving(app, policy(), keep_alive=1) as address, connected(address) as client:
            for _ in range(8):
                await client.get()
                await asyncio.sleep(0.25)
            assert app.handled == 1
            assert await client.ended()

    run(repeat())


def test_unread_answers_are_counted():
    """Readers that read only the first answer get a few repeated ones; the others wait like new requests."""

    async def repeat() -> None:
        app = Counting(bytes(LARGE_PIECE_BYTES))
        policy_ = policy()
        async with serving(app, policy_) as address:
            sockets = [socket.socket() for _ in range(2 * FEW_ANSWERS)]
            loop = asyncio.get_running_loop()
            for each in sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.setblocking(False)
                await loop.sock_connect(each, address)
                await loop.sock_sendall(each, SCRAPE)
                received = 0
                while received < LARGE_PIECE_BYTES:
                    received += len(await loop.sock_recv(each, 1 << 20))
            assert app.handled == len(sockets)
            for each in sockets:
                for _ in range(40):
                    await loop.sock_sendall(each, SCRAPE)
                    await asyncio.sleep(0)
            while app.handled == len(sockets):
                await asyncio.sleep(0.01)
            for each in sockets:
                each.close()

    run(repeat())


def test_scrapes_of_a_daemon_show_each_frame(tmp_path: Path):
    daemon = start_daemon(tmp_path)
    with connect(daemon) as connection:

        def scraped() -> bytes:
            connection.sendall(SCRAPE)
            received = b""
            while b"\r\n\r\n" not in received:
                received += connection.recv(1 << 20)
            head, _, body = received.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(1 << 20)
            return next(line for line in body.splitlines() if line.startswith(b"gpumond_snapshot_timestamp_seconds "))

        seen = {scraped()}
        until(lambda: len(seen) > 4 or seen.add(scraped()), every=0.1)
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log.read_text()
