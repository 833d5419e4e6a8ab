"""Who comes in when the house is full, in whose place, and with what descriptors."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpumond.daemon.listener import HttpListener, HttpPeer, first_to_leave
from gpumond.host.fd_limits import OTHERS, http_connections
from gpumond.host.peer_credentials import loopback_uid


def a_visit(stage: str, since: float, begun: bool = False) -> HttpPeer:
    visit = HttpPeer("10.0.0.1", None, 0.0, begun=lambda: begun)
    visit.turn(stage, since)  # type: ignore[arg-type]
    return visit


def test_who_keeps_us_waiting_leaves_first_and_who_is_served_never():
    order = [
        a_visit("waiting", 1.0),
        a_visit("waiting", 9.0),
        a_visit("idle", 2.0),
        a_visit("serving", 3.0, begun=True),
        a_visit("serving", 5.0, begun=True),
    ]
    served = a_visit("serving", 0.0)
    left = [served, *order[:2], *reversed(order[2:])]  # in the order in which they came
    for expected in order:
        assert first_to_leave(left) is expected
        left.remove(expected)
    assert first_to_leave(left) is None


@pytest.mark.parametrize(
    ("limit", "connections"), [(64, 8), (256, 48), (1024, 240), (4160, 1024), (16384, 1024), (-1, 1024)]
)
def test_descriptors_are_shared_out(limit: int, connections: int):
    assert http_connections(limit) == connections
    assert limit < 256 or connections + OTHERS < limit


HEAD_END = b"\r\n\r\n"


class Silent(asyncio.Protocol):
    """Takes its visit to the stage that the peer names, and says one byte then."""

    def __init__(self, visit: HttpPeer, door: HttpListener) -> None:
        self.visit, self.door = visit, door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.visit.leave = transport.abort

    def data_received(self, data: bytes) -> None:
        self.visit.turn(data.decode().strip(), time.monotonic())  # type: ignore[arg-type]
        self.transport.write(b"!")

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.gone(self.visit)


def of_source(connection: socket.socket) -> int:
    """A user for each source address: 127.0.0.N is the uid 1000 + N."""
    return 1000 + int(connection.getpeername()[0].rpartition(".")[2])


class Street:
    """A door, and who stands before it."""

    def __init__(self, connections: int, per_user: int, reserved: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.reasons: list[str] = []
        self.visits: list[HttpPeer] = []
        self.door = HttpListener(
            [self.listener],
            self.welcome,
            connections=connections,
            per_user=per_user,
            reserved=reserved,
            owner=of_source,
            rejected=self.reasons.append,
        )
        self.peers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def welcome(self, visit: HttpPeer) -> asyncio.Protocol:
        self.visits.append(visit)
        return Silent(visit, self.door)

    async def come(self, stage: str = "", source: str = "127.0.0.1") -> int:
        """Connects, and takes its visit to a stage; its number."""
        address = self.listener.getsockname()
        reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
        self.peers.append((reader, writer))
        if stage:
            writer.write(stage.encode() + HEAD_END)
            await reader.read(1)
        else:
            await asyncio.sleep(0.05)  # until it is in
        return len(self.peers) - 1

    async def inside(self, number: int) -> bool:
        reader, writer = self.peers[number]
        try:
            writer.write(b"serving" + HEAD_END)
            return await asyncio.wait_for(reader.read(1), 5) == b"!"
        except ConnectionError:
            return False


@asynccontextmanager
async def a_street(connections: int = 100, per_user: int = 100, reserved: int = 0) -> AsyncIterator[Street]:
    street = Street(connections, per_user, reserved)
    street.door.open()
    try:
        yield street
    finally:
        street.door.close()
        for _, writer in street.peers:
            writer.close()
        await street.door.wait_closed()


def test_the_newest_comes_in_the_place_of_who_says_nothing():
    async def run() -> None:
        async with a_street(connections=3) as street:
            stages = ("idle", "", "serving", "serving", "serving")
            idle, mute, *served = [await street.come(stage) for stage in stages]
            assert not await street.inside(mute)
            assert not await street.inside(idle)
            assert [await street.inside(number) for number in served] == [True] * 3
            refused = await street.come()
            assert not await street.inside(refused)
            assert street.reasons == ["crowd"] * 3

    asyncio.run(run())


def test_who_speaks_in_pieces_is_heard_once_all_is_said():
    async def run() -> None:
        async with a_street() as street:
            reader, writer = street.peers[await street.come()]
            for piece in (b"id", b"le\r\n", b"\r\n"):
                writer.write(piece)
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(reader.read(1), 5) == b"!"
            leaving = await street.come()
            street.peers[leaving][1].close()
            await asyncio.sleep(0.05)
            assert street.reasons == []

    asyncio.run(run())


def test_many_connections_of_one_user_close_none_of_another():
    async def run() -> None:
        async with a_street(connections=10, per_user=5) as street:
            other = await street.come("idle", source="127.0.0.9")
            crowd = [await street.come("idle") for _ in range(20)]
            assert await street.inside(other)
            assert [await street.inside(number) for number in crowd] == [False] * 15 + [True] * 5

    asyncio.run(run())


def test_a_full_house_takes_the_place_from_the_user_with_most_connections():
    async def run() -> None:
        async with a_street(connections=6) as street:
            honest = [await street.come("idle", source=f"127.0.0.{number}") for number in (8, 9)]
            greedy = [await street.come("serving") for _ in range(2)] + [await street.come("idle") for _ in range(2)]
            newest = await street.come("idle", source="127.0.0.10")
            inside = [await street.inside(number) for number in (*honest, *greedy, newest)]
            assert inside == [True, True, True, True, False, True, True]

    asyncio.run(run())


def test_where_nobody_can_be_closed_a_reserved_place_is_left():
    async def run() -> None:
        async with a_street(connections=3, reserved=1) as street:
            served = [await street.come("serving") for _ in range(3)]
            probe = await street.come("serving", source="127.0.0.9")
            assert [visit.reserved for visit in street.visits] == [False] * 3 + [True]
            assert [await street.inside(number) for number in (*served, probe)] == [True] * 4
            refused = await street.come()
            assert not await street.inside(refused)
            assert street.reasons == ["crowd"]

    asyncio.run(run())


def test_the_kernel_tells_whose_socket_is_behind_a_loopback_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.bind(("127.0.0.77", 0))
        client.connect(listener.getsockname())
        connection = listener.accept()[0]
        with connection:
            assert loopback_uid(connection) == os.geteuid()
            client.close()
            assert loopback_uid(connection) is None  # a closed socket is listed as root's


def test_on_a_unix_socket_the_kernel_says_who_comes(tmp_path: Path):
    async def run() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        seen: list[HttpPeer] = []

        def welcome(visit: HttpPeer) -> asyncio.Protocol:
            seen.append(visit)
            return Silent(visit, door)

        door = HttpListener([listener], welcome, connections=3)
        door.open()
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(b"idle" + HEAD_END)
        assert await reader.read(1) == b"!"
        assert (seen[0].uid, seen[0].user) == (os.geteuid(), f"uid:{os.geteuid()}")
        writer.close()
        door.close()
        await door.wait_closed()

    asyncio.run(run())
