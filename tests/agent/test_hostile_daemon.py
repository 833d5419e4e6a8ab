"""Hostile daemon: its messages are refused and counted, and the program continues."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.agent.loaded_allocators import FLUSH_RATE
from gpumond.agent.transport import MESSAGE_RATE, Transport
from gpumond.facts.messages import CancelFlush, FlushCommand, FlushResult, Report, encode
from tests.helpers.agent_daemon import FAKES, FakeDaemon, environment, eventually, finished, host
from tests.helpers.torch_program import flush_command, program

WORKING = """
import sys, threading, time, gpumond.agent
gpumond.agent.start(workload="train", flush_policy="POLICY")
steps = 0
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
while not ended.is_set():
    sum(range(1000))
    gpumond.agent.step()
    steps += 1
print("worked", steps > 0)
"""


def working(policy: str = "allow") -> str:
    return WORKING.replace("POLICY", policy)


def refusals(daemon: FakeDaemon) -> int:
    reports = daemon.received(Report)
    return reports[-1].program.refusals if reports else 0


def test_flushes_above_the_rate_are_refused(daemon: FakeDaemon) -> None:
    burst = FLUSH_RATE[0]
    with host(program(), environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        commands = [FlushCommand(str(number), "torch", ("cache",)) for number in range(3 * burst)]
        daemon.wait_peer().send(*commands)
        daemon.wait(lambda d: True if len(d.received(FlushResult)) == len(commands) else None)
        refused = [result for result in daemon.received(FlushResult) if result.outcome == "refused"]
        assert len(refused) in (2 * burst, 2 * burst - 1)
        assert all("too many commands" in result.reason for result in refused)
        daemon.wait(lambda d: True if refusals(d) == len(refused) else None)
        assert finished(process).count("empty_cache") == len(commands) - len(refused)


def test_command_with_an_unknown_step_is_counted(daemon: FakeDaemon) -> None:
    with host(program(), environment(daemon.path, FAKES)) as process:
        daemon.wait_message(Report)
        daemon.wait_peer().send(flush_command(("cache", "no-such-step")))
        assert daemon.wait_message(FlushResult).outcome == "refused"
        daemon.wait(lambda d: True if refusals(d) == 1 else None)
        assert "empty_cache" not in finished(process)


@pytest.mark.parametrize("policy", ["allow", "step", "never"])
def test_flood_of_messages_closes_the_connection(daemon: FakeDaemon, policy: str) -> None:
    flood = b"".join(encode(FlushCommand(str(number), "torch", ("gc",))) for number in range(20 * MESSAGE_RATE[0]))
    with host(working(policy), environment(daemon.path)) as process:
        daemon.wait_message(Report)
        peer = daemon.wait_peer()
        try:
            peer.connection.sendall(flood)
        except OSError:  # closed before everything was sent
            pass
        daemon.wait(lambda d: True if peer.gone and refusals(d) > 0 else None)
        assert finished(process) == "worked True\n"


def invalid_message(rng: random.Random) -> bytes:
    """Return a valid message with one mistake, or bytes that aren't a message."""
    frame = bytearray(encode(rng.choice([flush_command(), CancelFlush("f1"), flush_command(dry_run=True), Report()])))
    kind = rng.randrange(6)
    if kind == 0:
        frame[rng.randrange(len(frame) - 1)] = rng.randrange(256)
    elif kind == 1:
        del frame[rng.randrange(len(frame)) :]
    elif kind == 2:
        return rng.randbytes(rng.randrange(1, 200)) + b"\n"
    elif kind == 3:
        body = json.loads(frame)
        body[rng.choice(list(body))] = rng.choice([None, -1, 1e400, [], {}, "x" * 1000, True, 2**70])
        return json.dumps(body).encode() + b"\n"
    elif kind == 4:
        return b"[" * 60_000 + b"\n"
    else:
        return b"\n" * rng.randrange(1, 50)
    return bytes(frame) + b"\n"


def test_invalid_data_never_breaks_the_transport(tmp_path: Path) -> None:
    """Ten thousand invalid messages are read or refused; none raises, and no buffer grows."""
    path = os.fspath(tmp_path / "agent.sock")
    rng, now, refused = random.Random(7), 0.0, 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        link = Transport()
        for _ in range(10_000):
            now += 100.0
            if not link.is_connected:
                assert link.connect(path, now)
                server, _ = listener.accept()
            server.sendall(invalid_message(rng))
            messages = link.receive(now)
            assert all(isinstance(message, (FlushCommand, CancelFlush, Report)) for message in messages)
            if not link.is_connected:
                refused += 1
                server.close()
        assert link.refusals == refused > 1000
        link.reset()
        server.close()


def raw(field: str, value: object) -> bytes:
    return json.dumps({**json.loads(encode(flush_command())), field: value}).encode() + b"\n"


HARMFUL: dict[str, Callable[[], bytes]] = {
    "code for a step": lambda: encode(flush_command(("__import__('os')._exit(3)",))),
    "a path for an allocator": lambda: encode(flush_command(allocator="../../os")),
    "ten thousand steps": lambda: raw("steps", ["cache"] * 5_000),
    "an endless timeout": lambda: raw("timeout_seconds", 1e308),
    "a timeout that isn't a number": lambda: (
        b'{"v":1,"type":"flush","id":"f","allocator":"torch","steps":[],"timeout_seconds":NaN}\n'
    ),
    "a step that is not a string": lambda: raw("steps", [["cache"]]),
    "an id of a megabyte": lambda: raw("id", "x" * 60_000),
    "deep nesting": lambda: b"[" * 60_000 + b"\n",
    "no end of a line": lambda: b"x" * 70_000,
    "an agent's own frames": lambda: encode(Report()) + encode(FlushResult("f1", "freed")),
    "terminal escapes": lambda: raw("allocator", "\x1b[2J"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_program_continues_after_harmful_data(daemon: FakeDaemon, name: str) -> None:
    with host(working(), environment(daemon.path), "-W", "error") as process:
        daemon.wait_message(Report)
        peer = daemon.wait_peer()
        peer.connection.sendall(HARMFUL[name]())
        received = len(daemon.received(Report))
        daemon.wait(lambda d: True if len(d.received(Report)) > received + 1 else None)
        assert finished(process) == "worked True\n"


def test_repeated_connections_leak_nothing(tmp_path: Path) -> None:
    """A thousand connections, each closed at a random time."""
    path = os.fspath(tmp_path / "agent.sock")
    rng = random.Random(3)
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        link = Transport()
        for attempt in range(1000):
            assert link.connect(path, float(attempt))
            server, _ = listener.accept()
            with server:
                server.sendall(encode(flush_command())[: rng.randrange(1, 200)])
            link.enqueue(Report())
            for _ in range(3):
                link.send_pending(float(attempt))
                link.receive(float(attempt))
            assert not link.is_connected
    assert len(os.listdir("/proc/self/fd")) == before


def test_untrusted_daemon_is_counted(tmp_path: Path) -> None:
    """The trusted set is empty, so the process of the test is not trusted."""
    path = os.fspath(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        link = Transport(accepted_uids=())
        assert not link.connect(path, 0.0)
        assert link.refusals == 1
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1) == b""


def test_memory_stays_bounded_while_a_daemon_floods(daemon: FakeDaemon) -> None:
    """The flood consists of flush commands that wait, and of answers that the daemon does not read."""
    peak = "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    code = f"import torch; {program('step')}".replace("print(torch.WORLD.calls)", peak)
    with host(code, environment(daemon.path, FAKES)) as process:
        for round_ in range(5):
            daemon.wait_message(Report)
            peer = daemon.wait(lambda d: next((p for p in reversed(d.peers) if p.messages and not p.gone), None))
            frames = b"".join(encode(FlushCommand(f"{round_}-{n}", "torch", ("cache",))) for n in range(5_000))
            try:
                peer.connection.sendall(frames)
            except OSError:
                pass
            eventually(lambda peer=peer: peer.gone)
        assert int(finished(process)) < 200_000  # KiB
