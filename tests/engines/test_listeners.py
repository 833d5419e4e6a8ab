"""Who listens at an address: only processes whose sockets receive its connections, and of one user only."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from gpumond.features.engines.ownership import find_processes
from gpumond.features.engines.poller import Engines
from gpumond.features.engines.spec import Address
from tests.helpers.engines import candidates, device, fake_engine
from tests.helpers.users import ATTACKER

LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.socket(family)
if len(sys.argv) > 3:
    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(sys.argv[3]))
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen()
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(
    host: str, port: int = 0, *v6only: int, uid: int | None = None, interpreter: str = sys.executable
) -> Iterator[tuple[int, int]]:
    """Listen in another process, also as another user. Yields its pid and port, or raises `ConnectionError`."""
    command = [interpreter, "-c", LISTEN, host, str(port), *map(str, v6only)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=uid, cwd="/"
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            line = process.stdout.readline()
            if not line:
                raise ConnectionError(f"can't listen at {host}, port {port}")
            yield process.pid, int(line)
        finally:
            process.stdin.close()
            process.wait()


@contextmanager
def both_listening(
    first: str, second: str, *v6only: int, uid: int | None = None, interpreter: str = sys.executable
) -> Iterator[tuple[int, int]]:
    """Listen at two addresses of one port, at the second as another user. Yields the first's pid and the port.

    A port that is free at the first address may be in use at the second: then another is tried.
    """
    with ExitStack() as stack:
        for _ in range(10):
            server, port = stack.enter_context(listening(first))
            with suppress(ConnectionError):
                stack.enter_context(listening(second, port, *v6only, uid=uid, interpreter=interpreter))
                break
        else:
            pytest.fail(f"no port is free at both {first} and {second}")
        yield server, port


def found(host: str, port: int) -> set[int]:
    return {key.pid for key in find_processes(Address("http", host, port), []).listeners}


def test_socket_of_ipv4_is_no_listener_of_an_ipv6_address():
    with both_listening("::1", "0.0.0.0") as (server, port):
        assert found("::1", port) == {server}


def test_socket_of_ipv6_that_is_limited_to_it_is_no_listener_of_an_ipv4_address():
    with both_listening("127.0.0.1", "::", 1) as (server, port):
        assert found("127.0.0.1", port) == {server}


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_socket_of_both_families_is_a_listener(host: str):
    with listening("::", 0, 0) as (server, port):
        assert found(host, port) == {server}


def test_socket_of_another_address_is_no_listener():
    with both_listening("127.0.0.1", "127.0.0.2") as (server, port):
        assert found("127.0.0.1", port) == {server}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to listen as another user")


@pytest.fixture
def interpreter() -> str:
    """An interpreter that every user may execute."""
    path = shutil.which("python3", path="/usr/bin:/bin")
    if path is None:
        pytest.skip("needs a Python that every user may execute, in /usr/bin")
    return path


@needs_root
def test_another_users_socket_of_the_other_family_does_not_become_the_engine(interpreter: str):
    """It would make that user the owner, who may then release the engine over the daemon's Unix socket."""
    with both_listening("::1", "0.0.0.0", uid=ATTACKER, interpreter=interpreter) as (server, port):
        engine = find_processes(Address("http", "::1", port), [])
        assert ({key.pid for key in engine.listeners}, engine.uid) == ({server}, os.getuid())


@needs_root
def test_sockets_of_several_users_are_no_engine(interpreter: str, tmp_path: Path):
    with (
        socket.create_server(("127.0.0.1", 0)) as own,
        listening("127.0.0.1", uid=ATTACKER, interpreter=interpreter) as (_, port),
    ):
        tables = tmp_path / "self" / "net"
        tables.mkdir(parents=True)
        ports = {f":{each:04X} ": f":{port:04X} " for each in (own.getsockname()[1], port)}
        table = Path("/proc/self/net/tcp").read_text()
        for other, one in ports.items():  # the kernel lets no two users listen at one address; another may
            table = table.replace(other, one)
        (tables / "tcp").write_text(table)
        engine = find_processes(Address("http", "127.0.0.1", port), [], str(tmp_path))
    assert engine.uid is None
    assert engine.problem.startswith(f"sockets of several users listen at http://127.0.0.1:{port}: uid ")


def secret(directory: Path) -> dict[str, str]:
    (directory / "secret").write_text("s3cret\n")
    return {"bearer_token_file": str(directory / "secret")}


@needs_root
def test_secret_is_sent_only_to_the_user_who_was_seen_first(interpreter: str, tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("ollama", card) as engine:
        port = int(engine.url.rpartition(":")[2])

        async def scenario() -> str:
            engines = Engines(poll_seconds=0.05)
            engines.configure([engine.declaration(auth=secret(tmp_path))])
            engines.start(lambda: dict.fromkeys(candidates(card)))
            while not engines.readings()[0].up:
                await asyncio.sleep(0.01)
            assert engines.readings()[0].pinned_uid == os.getuid()
            engine.process.kill()
            engine.process.wait()
            with listening("127.0.0.1", port, uid=ATTACKER, interpreter=interpreter):
                while f"uid {ATTACKER}, and the earlier one" not in engines.readings()[0].problem:
                    await asyncio.sleep(0.01)
                problem = engines.readings()[0].problem
            await engines.close()
            return problem

        assert "no secret is sent; set user:" in asyncio.run(scenario())


def test_secret_is_not_sent_to_an_unknown_listener(tmp_path: Path):
    card = device(tmp_path)
    with fake_engine("ollama", card) as engine:
        (tmp_path / "proc").mkdir()

        async def scenario() -> str:
            engines = Engines(poll_seconds=0.05, proc=str(tmp_path / "proc"))
            engines.configure([engine.declaration(auth=secret(tmp_path))])
            engines.start(dict)
            while engines.readings()[0].problem == "not read yet":
                await asyncio.sleep(0.01)
            await engines.close()
            return engines.readings()[0].problem

        assert "no socket listens at" in asyncio.run(scenario())
        assert engine.record()["calls"] == []
