"""Common parts of the fakes: memory on a simulated device, requests in progress, faults, and a record of calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

from gpumond.sim.device import SimDevice
from tests.helpers.agents import GIB

HOLDER = """
import sys
from gpumond.sim.device import SimDevice
context = SimDevice(sys.argv[1]).attach()
for line in sys.stdin:
    word, size = line.split()
    (context.allocate if word == "allocate" else context.free)(int(size))
    print("done", flush=True)
"""
Response = tuple[int, Any]


class Holder:
    """A child process that holds memory of the engine."""

    def __init__(self, card: str, size: int) -> None:
        command = [sys.executable, "-c", HOLDER, card]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.size = 0
        self.allocate(size)

    def _command(self, word: str, size: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{word} {size}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def allocate(self, size: int) -> None:
        self._command("allocate", size)
        self.size += size

    def free(self, size: int) -> None:
        self._command("free", size)
        self.size -= size

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()
        self.size = 0


class Engine:
    """What all fakes share: requests in flight, faults, and the record of calls."""

    kind: ClassVar[str]

    def __init__(self, card: str, faults: list[str]) -> None:
        self.card, self.faults = card, faults
        self.lock = threading.RLock()
        self.running = 0
        self.completed = 0
        self.harms: list[str] = []
        self.calls: list[str] = []
        self.paused = False
        self.finish = threading.Event()
        self.cut = threading.Event()
        self.start()

    def start(self) -> None:
        """Allocate the memory."""

    def call(self, method: str, path: str, query: dict[str, str], body: Any) -> Response:
        raise NotImplementedError

    def request(self) -> Response:
        """Serve one inference request until the test finishes it, or the engine cuts it."""
        if self.paused:
            return 503, {"error": "paused"}
        with self.lock:
            self.running += 1
        while not self.finish.wait(0.01):
            if self.cut.is_set():
                with self.lock:
                    self.running -= 1
                    self.harms.append("request cut")
                return 500, {"error": "aborted"}
        with self.lock:
            self.running -= 1
            self.completed += 1
        return 200, {"text": "done"}

    def drained(self) -> None:
        while self.running:
            time.sleep(0.01)

    def abort(self) -> None:
        """End running requests, as an engine without a drain does."""
        if self.running:
            self.cut.set()
            self.drained()
            self.cut.clear()

    def act(self, release: Callable[[], None]) -> None:
        """Release as the faults say: never, later, or with the end of the server."""
        if "hang" in self.faults:
            threading.Event().wait()
        if "die" in self.faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "lie" in self.faults:
            return
        if "late" in self.faults:
            threading.Timer(0.5, release).start()
        else:
            release()

    def metrics(self, **values: float) -> str:
        return "".join(f'{name.replace("__", ":")}{{model_name="m"}} {value}\n' for name, value in values.items())


class InProcess(Engine):
    """An engine whose own process holds the memory."""

    held = 4 * GIB
    rest = GIB

    def start(self) -> None:
        self.memory = SimDevice(self.card).attach()
        self.memory.allocate(self.held)
        self.sleeping = False

    def free(self) -> None:
        if not self.sleeping:
            self.sleeping = True
            self.memory.free(self.held - self.rest)

    def reload(self) -> None:
        if self.sleeping:
            self.memory.allocate(self.held - self.rest)
            self.sleeping = False
