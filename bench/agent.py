"""Cost of the agent for its program: import, thread, memory, one report.

Torch is the fake of the tests with prepared statistics. PyTorch needs another 20 to 60 µs a device to compute its
own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.result import publish

PROCESSES, SECONDS = 15, 10.0
MEMORY_PROCESSES = 5
ROOT = Path(__file__).resolve().parents[1]
FAKES = ROOT / "tests" / "agent" / "fakes"

TIMED = "import time; started = time.perf_counter(); {}; print(1000 * (time.perf_counter() - started))"

MODULES = """
import sys
before = set(sys.modules)
import gpumond.agent, time
gpumond.agent.start()
gpumond.agent.report()
time.sleep(1.5)
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(names - {"gpumond", "_xxsubinterpreters", *sys.stdlib_module_names}))  # that one is Python's own, too
"""

READ = """
import time, torch
from torch.world import ACTIVE, FREE, Segment
from gpumond.agent.allocators.torch import adapter
torch.WORLD.reset(segments=[Segment([(6 << 20, ACTIVE), (14 << 20, FREE)])])
stats = torch.WORLD.stats(0)
torch.WORLD.stats = lambda device: stats
read = adapter().read
read()
started = time.perf_counter()
for _ in range(10_000):
    read()
print(1e6 * (time.perf_counter() - started) / 10_000)
"""

WORLD = """
import torch
from torch.world import ACTIVE, FREE, Segment
def stats(mib):
    torch.WORLD.reset(
        segments=[Segment([(mib << 20, ACTIVE), (14 << 20, FREE)], device) for device in range(8)],
        devices=8, contexts=set(range(8)),
    )
    return [torch.WORLD.stats(device) for device in range(8)]
worlds = [stats(6), stats(8)]
torch.WORLD.stats = lambda device: worlds[0][device]
"""
"""Eight devices, and the same ones a second later."""

REPORT = (
    WORLD
    + """
import gc, json, statistics, sys, time
from gpumond.agent import session
from gpumond.agent.settings import AgentSettings
from gpumond.agent.wakeup import WakeupPipe
session.REPORT_INTERVAL_SECONDS = 0.0
agent = session.AgentSession(AgentSettings([], []), WakeupPipe())
others = bytearray(64 << 20)
def report(changed=True, cold=False):
    if changed:
        worlds.reverse()
    if cold:
        others[:] = bytes(len(others))
    started = time.thread_time_ns()
    agent.run_once()
    return (time.thread_time_ns() - started) / 1000
for _ in range(100):
    report()
figures = {}
for name, changed in (("all_changed", True), ("unchanged", False)):
    hot = min(statistics.median(report(changed) for _ in range(50)) for _ in range(20))
    cold = statistics.median(report(changed, cold=True) for _ in range(100))
    figures[name] = {"hot": round(hot, 1), "cold": round(cold, 1)}
gc.collect()
gc.disable()
before, most = gc.get_count()[0], 0
def note(*_):
    global most
    most = max(most, gc.get_count()[0])
sys.setprofile(note)
report()
sys.setprofile(None)
for _ in range(1_000):
    report()
garbage = gc.collect()
gc.enable()
collections = [generation["collections"] for generation in gc.get_stats()]
for _ in range(1_000):
    report()
collections = [now["collections"] - then for now, then in zip(gc.get_stats(), collections)]
print(json.dumps({
    "report_of_8_devices_us": figures,
    "report_of_8_devices_gc": {
        "tracked_objects_at_most": most - before,
        "cyclic_garbage_of_1000_reports": garbage,
        "collections_by_1000_reports": collections,
    },
}))
"""
)
"""One pass of the agent: wait, read, encode, send. Hot: directly after the previous one. Cold: after other code has
used the caches, as in a program that works for a second in between.
"""

ALLOCATORS = (
    "argparse ast asyncio atexit base64 bz2 calendar collections.abc contextlib contextvars copy csv ctypes "
    "dataclasses datetime difflib dis email enum fcntl fnmatch functools gc gettext glob gzip hashlib heapq "
    "http.client importlib.metadata importlib.resources inspect ipaddress json linecache locale logging lzma math mmap "
    "multiprocessing numbers operator pathlib pickle pickletools pkgutil platform pprint queue random re runpy select "
    "selectors shutil signal socket ssl string struct subprocess tarfile tempfile textwrap threading timeit tokenize "
    "traceback types typing unittest urllib.request uuid warnings weakref zipfile zlib"
)
"""Modules of the standard library that ``import torch`` (2.13) loads."""

MEMORY = """
import os, sys, time
rollup = os.open("/proc/self/smaps_rollup", os.O_RDONLY)
def private():
    lines = os.pread(rollup, 1 << 16, 0).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith((b"Private_Clean", b"Private_Dirty")))
private()
before = private()
import gpumond.agent
gpumond.agent.start()
time.sleep(1.0)
import threading
thread = next(thread for thread in threading.enumerate() if thread.name == "gpumond-agent")
start = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
from gpumond.agent import session
session.REPORT_INTERVAL_SECONDS = 0.02
gpumond.agent.start()
time.sleep(60 * 0.02 + 0.3)
print(private() - before, 1000 * start)
"""

STEP = """
import timeit, gpumond.agent
gpumond.agent.start()
print(1e9 * min(timeit.repeat(gpumond.agent.step, number=1_000_000, repeat=5)) / 1_000_000)
"""

SCOPE = """
import timeit, torch
from torch.world import ACTIVE, FREE, Segment
import gpumond.agent
torch.WORLD.reset(segments=[Segment([(6 << 20, ACTIVE), (14 << 20, FREE)])])
stats = torch.WORLD.stats(0)
torch.WORLD.stats = lambda device: stats
def block():
    with gpumond.agent.scope("block"):
        pass
block()
print(1e6 * min(timeit.repeat(block, number=5_000, repeat=5)) / 5_000)
"""

SHARE = """
import resource, sys, time, torch
from torch.world import ACTIVE, FREE, Segment
import gpumond.agent
torch.WORLD.reset(segments=[Segment([(6 << 20, ACTIVE), (14 << 20, FREE)])])
gpumond.agent.start()
time.sleep(2)
used = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
before, started = used(), time.monotonic()
time.sleep(SECONDS)
print((used() - before) / (time.monotonic() - started))
"""

LISTENER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen(8)
    print("listening", flush=True)
    connection, _ = listener.accept()
    while connection.recv(65536):
        pass
"""


def run(code: str, socket: str = "/nowhere") -> str:
    """Return the output of a new process."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (FAKES, ROOT))), "GPUMOND_SOCKET": socket}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def milliseconds(statement: str, processes: int) -> float:
    """Return the median duration of a statement in a new process, minus that of the bare interpreter."""
    return round(statistics.median(float(run(TIMED.format(statement))) for _ in range(processes)), 2)


@contextmanager
def listener() -> Iterator[str]:
    """Run a daemon that reads everything and sends nothing, and yield the path of its socket."""
    with TemporaryDirectory() as directory:
        path = os.path.join(directory, "agent.sock")
        command = [sys.executable, "-c", LISTENER, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
            try:
                assert listener.stdout is not None
                assert listener.stdout.readline() == "listening\n"
                yield path
            finally:
                listener.kill()


def cpu_share(seconds: float) -> float:
    """Return the share of one core that a sleeping program uses while it reports once a second."""
    with listener() as path:
        return round(float(run(SHARE.replace("SECONDS", str(seconds)), path)), 5)


def report() -> Any:
    with listener() as path:
        return json.loads(run(REPORT, path))


def memory(before: str) -> tuple[int, float]:
    """Return the medians of the KiB that import, start and 60 reports add to a program, and of the milliseconds of
    processor time until the agent's thread has started.
    """
    rows = []
    for _ in range(MEMORY_PROCESSES):
        with listener() as path:
            rows.append([float(word) for word in run(before + MEMORY, path).split()])
    kibibytes, start = map(statistics.median, zip(*rows, strict=True))
    return round(kibibytes), round(start, 1)


def main() -> None:
    started = "gpumond.agent.start()"
    trained = f"import {ALLOCATORS.replace(' ', ', ')}\n{WORLD}"
    with TemporaryDirectory() as cache:  # compiled, as an installed package is
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = cache
        memory(trained)
        bare, _ = memory("")
        loaded, start_ms = memory(trained)
        publish(
            "agent",
            {
                "import_ms": milliseconds("import gpumond.agent", PROCESSES),
                "import_and_start_ms": milliseconds(f"import gpumond.agent; {started}", PROCESSES),
                "start_in_its_own_thread_cpu_ms": start_ms,
                "modules_outside_stdlib": json.loads(run(MODULES).replace("'", '"')),
                "memory_kib": {"bare_interpreter": bare, "program_with_what_torch_loads": loaded},
                "torch_read_us": round(float(run(READ)), 1),
                "torch": "a fake with the statistics of a real one",
                **report(),
                "step_ns": round(float(run(STEP)), 0),
                "scope_us": round(float(run(SCOPE)), 1),
                "cpu_share_of_a_core_at_1_hz": cpu_share(SECONDS),
            },
        )


if __name__ == "__main__":
    main()
