"""Programs of other users that send fuzzed messages to the agents' socket.

python -m tests.soak.attackers SOCKET UID SEED MESSAGES

Each program finds the first invalid message of a connection with the protocol's own decoder and sends nothing after it,
because the daemon would not read it. So every counted message is one that the daemon has to check. ``wrong``
connections are those that the daemon has to reject.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from gpumond.facts.errors import ProtocolError
from gpumond.facts.messages import (
    MAX_MESSAGE_BYTES,
    AgentResponse,
    CancelFlush,
    FlushResult,
    Goodbye,
    Hello,
    Report,
    decode,
    encode,
)
from gpumond.facts.program import MAX_SCOPES, Dump, Oom, Program, ScopeUsage
from gpumond.programs.agent_connection import check_hello, check_report
from tests.helpers.fuzzing import fuzzed
from tests.helpers.values import make_pool

FIRST_UID = 20_001
LINGERING = 4
"""Number of connections of each attacker that stay open after their last message."""
HELLOS = (encode(Hello("train")), encode(Hello("a/b", "1.2", "3.12", ("limit", "snapshot"))))
SEEDS = (
    *HELLOS,
    encode(
        Report(pools=(make_pool(live=7), make_pool("GPU-b", live=1 << 33, cached=1 << 30)), frameworks=("torch 2",))
    ),
    encode(
        Report(
            program=Program(scopes=tuple(ScopeUsage(name=f"epoch/{number}", entries=1) for number in range(MAX_SCOPES)))
        )
    ),
    encode(Report(program=Program(ooms=(Oom(number=1, at=1000.0, seen="scope", device_uuid="GPU-a"),)))),
    encode(FlushResult("one", "freed")),
    encode(AgentResponse("one", dump=Dump("torch", "/tmp/x", 5))),
    encode(Goodbye()),
    encode(CancelFlush("one")),
    b'{"v":1,"type":"report","pools":[[]]}\n',
)


def messages_of_connection(rng: random.Random) -> tuple[bytes, int, bool]:
    """Data of one connection: the bytes, the number of messages, and whether the last one is invalid."""
    first = rng.choice(HELLOS) if rng.random() < 0.8 else fuzzed(rng, rng.choice(SEEDS))
    messages = (first + b"".join(fuzzed(rng, rng.choice(SEEDS)) for _ in range(rng.randint(1, 12)))).split(b"\n")
    rest = messages.pop()
    for number, message in enumerate(messages, 1):
        verdict = classify(message, first=number == 1)
        if verdict != "right":
            return b"\n".join(messages[:number]) + b"\n", number, verdict == "wrong"
    return b"\n".join([*messages, rest]), len(messages), False


def classify(line: bytes, first: bool) -> str:
    """Return ``right``, ``wrong``, or ``bye``, after which the daemon reads nothing."""
    if len(line) > MAX_MESSAGE_BYTES:
        return "wrong"
    try:
        message = decode(line)
        if first != isinstance(message, Hello):
            return "wrong"
        if isinstance(message, Hello):
            check_hello(message)
        elif isinstance(message, Report):
            check_report(message)
        elif isinstance(message, Goodbye):
            return "bye"
        elif not isinstance(message, (FlushResult, AgentResponse)):
            return "wrong"
    except ProtocolError:
        return "wrong"
    return "right"


def send(path: str, seed: int, messages: int) -> Counter[str]:
    rng, counts = random.Random(seed), Counter[str]()
    lingering: deque[tuple[socket.socket, bool]] = deque()
    while counts["frames"] < messages:
        data, number, wrong = messages_of_connection(rng)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)  # blocks while the daemon accepts no connection
        connection.settimeout(60)
        try:
            connection.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            counts["cut_off"] += 1  # the daemon has already closed it
        counts.update(frames=number, connections=1, wrong=int(wrong))
        lingering.append((connection, wrong))
        if len(lingering) > LINGERING:
            close(*lingering.popleft())
    for connection, wrong in lingering:
        close(connection, wrong)
    return counts


def close(connection: socket.socket, wrong: bool) -> None:
    """Close the connection; after a wrong message, wait until the daemon has closed it. Raises TimeoutError if it does
    not.
    """
    with connection:
        try:
            while wrong and connection.recv(4096):
                pass
        except ConnectionResetError:
            pass  # closed with unread data


def main() -> None:
    path, uid, seed, messages = sys.argv[1], *map(int, sys.argv[2:])
    os.nice(10)
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    counts = send(path, seed, messages)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in counts.items()) + "\n")


class Attackers:
    """Attackers that run at the same time, each with a uid of its own if this process is root."""

    def __init__(self, path: Path, messages: int, users: int, seed: int = 1) -> None:
        root = os.geteuid() == 0
        self._running: Sequence[subprocess.Popen[str]] = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.soak.attackers", str(path)),
                    *(str(FIRST_UID + number if root else os.geteuid()), str(1000 * seed + number)),
                    str(-(-messages // users)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(users)
        ]

    def busy(self) -> bool:
        return any(attacker.poll() is None for attacker in self._running)

    def totals(self) -> Counter[str]:
        """Wait until all have ended. Raises AssertionError if one of them failed."""
        counts = Counter[str]()
        for attacker in self._running:
            text = attacker.communicate()[0]
            assert attacker.returncode == 0, "an attacker failed; see its errors above"
            counts.update({name: int(count) for name, _, count in (pair.partition("=") for pair in text.split())})
        return counts

    def stop(self) -> None:
        for attacker in self._running:
            attacker.kill()
            attacker.wait()
            if attacker.stdout:
                attacker.stdout.close()


if __name__ == "__main__":
    main()
