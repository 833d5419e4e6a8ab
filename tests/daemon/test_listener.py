"""HTTP listener: limits of connections, eviction, and the share of descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpumond.host.machine import OTHER_DESCRIPTORS, max_http_connections
from gpumond.host.peer import listener_uid, loopback_uid
from gpumond.serve.listener import HttpListener, HttpPeer, first_to_close


def make_peer(stage: str, since: float, begun: bool = False) -> HttpPeer:
    peer = HttpPeer("10.0.0.1", None, 0.0, has_response_started=lambda: begun)
    peer.enter(stage, since)  # type: ignore[arg-type]
    return peer


def test_eviction_prefers_waiting_connections_and_never_served_ones():
    order = [
        make_peer("waiting", 1.0),
        make_peer("waiting", 9.0),
        make_peer("idle", 2.0),
        make_peer("serving", 3.0, begun=True),
        make_peer("serving", 5.0, begun=True),
    ]
    served = make_peer("serving", 0.0)
    left = [served, *order[:2], *reversed(order[2:])]  # in the order in which they connected
    for expected in order:
        assert first_to_close(left) is expected
        left.remove(expected)
    assert first_to_close(left) is None


@pytest.mark.parametrize(
    ("limit", "connections"), [(64, 8), (256, 48), (1024, 240), (4160, 1024), (16384, 1024), (-1, 1024)]
)
def test_connection_limit_follows_the_descriptor_limit(limit: int, connections: int):
    assert max_http_connections(limit) == connections
    assert limit < 256 or connections + OTHER_DESCRIPTORS < limit


HEAD_END = b"\r\n\r\n"


class StageProtocol(asyncio.Protocol):
    """Sets the stage of its peer to the one that the client names, and answers one byte."""

    def __init__(self, peer: HttpPeer, listener: HttpListener) -> None:
        self.peer, self.listener = peer, listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.peer.close = transport.abort

    def data_received(self, data: bytes) -> None:
        self.peer.enter(data.decode().strip(), time.monotonic())  # type: ignore[arg-type]
        self.transport.write(b"!")

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.remove(self.peer)


def uid_of_source(connection: socket.socket) -> int:
    """User of a source address: 127.0.0.N has the uid 1000 + N."""
    return 1000 + int(connection.getpeername()[0].rpartition(".")[2])


class ClientsOfListener:
    """Listener on a port, and its clients."""

    def __init__(self, connections: int, per_user: int, reserved: int) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.reasons: list[str] = []
        self.peers: list[HttpPeer] = []
        self.listener = HttpListener(
            [self.socket],
            self.accept,
            connections=connections,
            per_user=per_user,
            reserved=reserved,
            uid_of_peer=uid_of_source,
            count_rejection=self.reasons.append,
        )
        self.clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def accept(self, peer: HttpPeer) -> asyncio.Protocol:
        self.peers.append(peer)
        return StageProtocol(peer, self.listener)

    async def connect(self, stage: str = "", source: str = "127.0.0.1") -> int:
        """Connect, set the stage of the connection, and return its number."""
        address = self.socket.getsockname()
        reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
        self.clients.append((reader, writer))
        if stage:
            writer.write(stage.encode() + HEAD_END)
            await reader.read(1)
        else:
            await asyncio.sleep(0.05)  # until it is accepted
        return len(self.clients) - 1

    async def is_open(self, number: int) -> bool:
        reader, writer = self.clients[number]
        try:
            writer.write(b"serving" + HEAD_END)
            return await asyncio.wait_for(reader.read(1), 5) == b"!"
        except ConnectionError:
            return False


@asynccontextmanager
async def listening(connections: int = 100, per_user: int = 100, reserved: int = 0) -> AsyncIterator[ClientsOfListener]:
    at = ClientsOfListener(connections, per_user, reserved)
    at.listener.open()
    try:
        yield at
    finally:
        at.listener.close()
        for _, writer in at.clients:
            writer.close()
        await at.listener.wait_closed()


def test_new_connection_evicts_an_idle_one_at_the_limit():
    async def run() -> None:
        async with listening(connections=3) as at:
            stages = ("idle", "", "serving", "serving", "serving")
            idle, silent, *served = [await at.connect(stage) for stage in stages]
            assert not await at.is_open(silent)
            assert not await at.is_open(idle)
            assert [await at.is_open(number) for number in served] == [True] * 3
            refused = await at.connect()
            assert not await at.is_open(refused)
            assert at.reasons == ["crowd"] * 3

    asyncio.run(run())


def test_head_in_pieces_is_processed_when_complete():
    async def run() -> None:
        async with listening() as at:
            reader, writer = at.clients[await at.connect()]
            for piece in (b"id", b"le\r\n", b"\r\n"):
                writer.write(piece)
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(reader.read(1), 5) == b"!"
            leaving = await at.connect()
            at.clients[leaving][1].close()
            await asyncio.sleep(0.05)
            assert at.reasons == []

    asyncio.run(run())


def test_connections_of_one_user_evict_none_of_another():
    async def run() -> None:
        async with listening(connections=10, per_user=5) as at:
            other = await at.connect("idle", source="127.0.0.9")
            many = [await at.connect("idle") for _ in range(20)]
            assert await at.is_open(other)
            assert [await at.is_open(number) for number in many] == [False] * 15 + [True] * 5

    asyncio.run(run())


def test_eviction_at_the_limit_is_from_the_user_with_most_connections():
    async def run() -> None:
        async with listening(connections=6) as at:
            others = [await at.connect("idle", source=f"127.0.0.{number}") for number in (8, 9)]
            many = [await at.connect("serving") for _ in range(2)] + [await at.connect("idle") for _ in range(2)]
            newest = await at.connect("idle", source="127.0.0.10")
            states = [await at.is_open(number) for number in (*others, *many, newest)]
            assert states == [True, True, True, True, False, True, True]

    asyncio.run(run())


def test_reserved_connection_is_available_if_none_can_be_evicted():
    async def run() -> None:
        async with listening(connections=3, reserved=1) as at:
            served = [await at.connect("serving") for _ in range(3)]
            probe = await at.connect("serving", source="127.0.0.9")
            assert [peer.reserved for peer in at.peers] == [False] * 3 + [True]
            assert [await at.is_open(number) for number in (*served, probe)] == [True] * 4
            refused = await at.connect()
            assert not await at.is_open(refused)
            assert at.reasons == ["crowd"]

    asyncio.run(run())


def test_uid_of_a_loopback_connection_comes_from_the_kernel():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.bind(("127.0.0.77", 0))
        client.connect(listener.getsockname())
        connection = listener.accept()[0]
        with connection:
            assert loopback_uid(connection) == os.geteuid()
            client.close()
            assert loopback_uid(connection) is None  # a closed socket is listed as root's


def test_uid_of_a_server_is_known_once_it_has_accepted_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        with pytest.raises(TimeoutError):
            listener_uid(client, 0.05)
        with listener.accept()[0]:
            assert listener_uid(client, 60.0) == os.geteuid()
        with pytest.raises(TimeoutError):
            listener_uid(client, 0.05)


def test_uid_of_a_unix_connection_comes_from_the_kernel(tmp_path: Path):
    async def run() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        peers: list[HttpPeer] = []

        def accept(peer: HttpPeer) -> asyncio.Protocol:
            peers.append(peer)
            return StageProtocol(peer, http_listener)

        http_listener = HttpListener([listener], accept, connections=3)
        http_listener.open()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"idle" + HEAD_END)
        assert await reader.read(1) == b"!"
        assert (peers[0].uid, peers[0].user) == (os.geteuid(), f"uid:{os.geteuid()}")
        writer.close()
        http_listener.close()
        await http_listener.wait_closed()

    asyncio.run(run())
