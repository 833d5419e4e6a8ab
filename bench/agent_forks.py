"""Ten thousand forks of a program with an agent while its threads hold locks, and the duration of its exit.

A fork hangs if its child has not ended after ten seconds. The exit of a program is timed from its last statement to its
end as its parent sees it, and compared with the same program without the agent.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.result import publish
from gpumond.facts.messages import FlushCommand, encode

FORKS, EXITS = 10_000, 8
ROOT = Path(__file__).resolve().parents[1]

AGENT = "import gpumond.sim.allocator, gpumond.agent; gpumond.agent.start(workload='forks'); gpumond.agent.flush()"

FLUSHING = f"""{AGENT}
import threading, time
begun = threading.Event()
gpumond.agent.on_flush(lambda: begun.set() or time.sleep(60))
assert begun.wait(10)
"""
"""The agent is in a flush of the daemon that lasts longer than the program."""

LOAD = """
import logging, threading
lock = threading.Lock()
def work():
    while True:
        with lock:
            logging.getLogger("work").debug("held")
            USE
threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
[thread.start() for thread in threads]
"""

FORKING = """
import os, signal, statistics, sys, time, warnings
warnings.simplefilter("ignore")
AGENT
LOAD
time.sleep(0.5)
hung, seconds = 0, []
for number in range(FORKS):
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        USE
        os._exit(0)
    seconds.append(time.perf_counter() - started)
    hung += os.waitpid(child, 0)[1] != 0
print(hung, 1000 * statistics.median(seconds), 1000 * max(seconds))
"""

EXITING = """
import sys, time
AGENT
LOAD
time.sleep(float(sys.argv[1]))
print(time.monotonic(), flush=True)
"""


def program_code(text: str, agent: str) -> str:
    use = "gpumond.agent.report()" if agent else "sum(range(100))"
    return text.replace("LOAD", LOAD).replace("AGENT", agent).replace("USE", use)


@contextmanager
def running_daemon(serves: bool, command: bytes = b"") -> Iterator[str]:
    """Yield the path of a socket with a daemon that sends a command and reads, or with one that is stopped."""
    with TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(directory, "agent.sock")
        listener.bind(path)
        listener.listen(1)
        if not serves:
            yield path
            return
        code = "import socket, sys\nl = socket.socket(fileno=int(sys.argv[1]))\n"
        code += "while True:\n  c, _ = l.accept()\n  c.sendall(sys.argv[2].encode())\n  while c.recv(65536): pass"
        arguments = [sys.executable, "-c", code, str(listener.fileno()), command.decode()]
        with subprocess.Popen(arguments, pass_fds=[listener.fileno()]) as daemon:
            yield path
            daemon.kill()


def run(code: str, path: str, *arguments: str) -> str:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "GPUMOND_SOCKET": path}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def exit_ms(agent: str, path: str, seconds: float) -> float:
    """Return the milliseconds from the program's last statement to its end."""
    over = float(run(program_code(EXITING, agent), path, str(seconds)))
    return 1000 * (time.monotonic() - over)


def main() -> None:
    figures: dict[str, object] = {"forks": FORKS}
    for name, agent in (("with", AGENT), ("without", "")):
        code = program_code(FORKING, agent).replace("FORKS", str(FORKS if agent else FORKS // 10))
        with running_daemon(serves=True) as path:
            hung, median, longest = map(float, run(code, path).split())
        figures |= {f"hung_{name}_agent": int(hung), f"fork_ms_{name}_agent": round(median, 2)}
        figures |= {f"longest_fork_ms_{name}_agent": round(longest, 1)}
    for name, serves in (("daemon_reads", True), ("daemon_stopped", False)):
        with running_daemon(serves) as path:
            times = [exit_ms(AGENT, path, at) for at in (0.0, 0.2, 0.21, 0.3, 1.3) for _ in range(EXITS)]
        figures |= {f"exit_ms_{name}": round(statistics.median(times), 1), f"longest_{name}": round(max(times), 1)}
    with running_daemon(serves=True, command=encode(FlushCommand("bench", "sim", ("hooks",)))) as path:
        times = [exit_ms(FLUSHING, path, 0.0) for _ in range(EXITS)]
    figures |= {"exit_ms_in_a_flush": round(statistics.median(times), 1), "longest_in_a_flush": round(max(times), 1)}
    times = [exit_ms("", "/nowhere", 0.0) for _ in range(EXITS)]
    figures |= {"exit_ms_without_agent": round(statistics.median(times), 1), "longest_without": round(max(times), 1)}
    publish("agent_forks", figures)


if __name__ == "__main__":
    main()
