"""Programs of other users that send fuzzed frames over the agents' socket, as many as they are told.

    python -m tests.soak.attackers SOCKET UID SEED FRAMES

Each knows by the wire's own decoder which frame of a connection is the first that is wrong, and sends nothing behind
it, since nobody would read it: every frame that is counted is one that the daemon has to judge. ``wrong`` connections
are those that the daemon has to refuse.
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

from gpumond.agents.connection import check_hello, check_report
from gpumond.errors import ProtocolError
from gpumond.model.program import SCOPES, Dump, Oom, Program, ScopeUsage
from gpumond.protocol.messages import (
    MAX_MESSAGE_BYTES,
    AgentResponse,
    Bye,
    Cancel,
    FlushResult,
    Hello,
    Report,
    decode,
    encode,
)
from gpumond.testing import make_pool
from tests.fuzzing import fuzzed

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
        Report(program=Program(scopes=tuple(ScopeUsage(name=f"epoch/{number}", entries=1) for number in range(SCOPES))))
    ),
    encode(Report(program=Program(ooms=(Oom(number=1, at=1000.0, seen="observer", device_uuid="GPU-a"),)))),
    encode(FlushResult("one", "freed")),
    encode(AgentResponse("one", dump=Dump("torch", "/tmp/x", 5))),
    encode(Bye()),
    encode(Cancel("one")),
    b'{"v":1,"type":"report","pools":[[]]}\n',
)


def volley(dice: random.Random) -> tuple[bytes, int, bool]:
    """Data of one connection: the bytes, the number of messages, and whether the last one is invalid."""
    first = dice.choice(HELLOS) if dice.random() < 0.8 else fuzzed(dice, dice.choice(SEEDS))
    frames = (first + b"".join(fuzzed(dice, dice.choice(SEEDS)) for _ in range(dice.randint(1, 12)))).split(b"\n")
    rest = frames.pop()
    for number, frame in enumerate(frames, 1):
        said = judge(frame, first=number == 1)
        if said != "right":
            return b"\n".join(frames[:number]) + b"\n", number, said == "wrong"
    return b"\n".join([*frames, rest]), len(frames), False


def judge(frame: bytes, first: bool) -> str:
    """right, wrong, or bye, behind which nobody listens."""
    if len(frame) > MAX_MESSAGE_BYTES:
        return "wrong"
    try:
        message = decode(frame)
        if first != isinstance(message, Hello):
            return "wrong"
        if isinstance(message, Hello):
            check_hello(message)
        elif isinstance(message, Report):
            check_report(message)
        elif isinstance(message, Bye):
            return "bye"
        elif not isinstance(message, (FlushResult, AgentResponse)):
            return "wrong"
    except ProtocolError:
        return "wrong"
    return "right"


def send(path: str, seed: int, frames: int) -> Counter[str]:
    dice, told = random.Random(seed), Counter[str]()
    lingering: deque[tuple[socket.socket, bool]] = deque()
    while told["frames"] < frames:
        said, number, wrong = volley(dice)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)  # waits while the daemon lets nobody in
        connection.settimeout(60)
        try:
            connection.sendall(said)
        except (BrokenPipeError, ConnectionResetError):
            told["cut_off"] += 1  # the daemon was quicker
        told.update(frames=number, connections=1, wrong=int(wrong))
        lingering.append((connection, wrong))
        if len(lingering) > LINGERING:
            leave(*lingering.popleft())
    for connection, wrong in lingering:
        leave(connection, wrong)
    return told


def leave(connection: socket.socket, wrong: bool) -> None:
    """After a wrong frame it is the daemon that has to close the connection. Raises TimeoutError if it does not."""
    with connection:
        try:
            while wrong and connection.recv(4096):
                pass
        except ConnectionResetError:
            pass  # closed with something unread


def main() -> None:
    path, uid, seed, frames = sys.argv[1], *map(int, sys.argv[2:])
    os.nice(10)
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    told = send(path, seed, frames)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in told.items()) + "\n")


class Vandals:
    """So many of them at a time, each a user of his own where this one is root; ``told`` is what all have done."""

    def __init__(self, path: Path, frames: int, users: int, seed: int = 1) -> None:
        root = os.geteuid() == 0
        self._running: Sequence[subprocess.Popen[str]] = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.soak.attackers", str(path)),
                    *(str(FIRST_UID + number if root else os.geteuid()), str(1000 * seed + number)),
                    str(-(-frames // users)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(users)
        ]

    def busy(self) -> bool:
        return any(vandal.poll() is None for vandal in self._running)

    def told(self) -> Counter[str]:
        """Waits for their end. Raises AssertionError if one of them failed."""
        told = Counter[str]()
        for vandal in self._running:
            text = vandal.communicate()[0]
            assert vandal.returncode == 0, "a vandal failed; see its errors above"
            told.update({name: int(count) for name, _, count in (pair.partition("=") for pair in text.split())})
        return told

    def stop(self) -> None:
        for vandal in self._running:
            vandal.kill()
            vandal.wait()
            if vandal.stdout:
                vandal.stdout.close()


if __name__ == "__main__":
    main()
