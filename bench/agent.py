"""What the agent costs the program that carries it: its import, its thread, one reading.

Torch is the stand-in of the tests (its statistics are built in Python on each call, PyTorch's own in C++), so
that one reading is an upper bound of our part.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.result import publish

PROCESSES, SECONDS = 15, 10.0
ROOT = Path(__file__).resolve().parents[1]
STANDINS = ROOT / "tests" / "agent" / "standins"

TIMED = "import time; started = time.perf_counter(); {}; print(1000 * (time.perf_counter() - started))"

MODULES = """
import sys
before = set(sys.modules)
import gpumond.agent, time
gpumond.agent.start()
gpumond.agent.report()
time.sleep(1.5)
names = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(names - {"gpumond", *sys.stdlib_module_names}))
"""

READ = """
import time, torch
from torch.world import ACTIVE, FREE, Segment
from gpumond.agent.adapters.torch import adapter
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

REPORT = """
import time, torch
from torch.world import ACTIVE, FREE, Segment
from gpumond.agent.adapters.torch import adapter
from gpumond.agent.levers import LEVERS
from gpumond.agent.session import Still
from gpumond.agent.told import look, told
from gpumond.wire import Report, encode
torch.WORLD.reset(
    segments=[Segment([(6 << 20, ACTIVE), (14 << 20, FREE)], device) for device in range(8)],
    devices=8, contexts=set(range(8)),
)
stats = [torch.WORLD.stats(device) for device in range(8)]
torch.WORLD.stats = stats.__getitem__
still = Still(LEVERS.adapters())
def report():
    pools = LEVERS.read()
    look(pools)
    return encode(Report("allow", still.frameworks, pools, told(still.distributed), still.host_pools))
assert report().count(b"GPU-") == 8
started = time.thread_time()
for _ in range(2_000):
    report()
print(1e6 * (time.thread_time() - started) / 2_000)
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
    """What a fresh process prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (STANDINS, ROOT))), "GPUMOND_SOCKET": socket}
    return subprocess.run(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def milliseconds(statement: str, processes: int) -> float:
    """Of a statement in a fresh process, the bare interpreter not counted: the median."""
    return round(statistics.median(float(run(TIMED.format(statement))) for _ in range(processes)), 2)


def cpu_share(seconds: float) -> float:
    """The share of one core that a program uses which sleeps, and reports once a second to a listening daemon."""
    with TemporaryDirectory() as directory:
        path = os.path.join(directory, "agent.sock")
        command = [sys.executable, "-c", LISTENER, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
            try:
                assert listener.stdout is not None
                assert listener.stdout.readline() == "listening\n"
                return round(float(run(SHARE.replace("SECONDS", str(seconds)), path)), 5)
            finally:
                listener.kill()


def main() -> None:
    started = "gpumond.agent.start()"
    publish(
        "agent",
        {
            "import_ms": milliseconds("import gpumond.agent", PROCESSES),
            "import_and_start_ms": milliseconds(f"import gpumond.agent; {started}", PROCESSES),
            "modules_outside_stdlib": json.loads(run(MODULES).replace("'", '"')),
            "torch_read_us": round(float(run(READ)), 1),
            "torch": "a stand-in with the statistics of a real one",
            "report_of_8_devices_us": round(float(run(REPORT)), 1),
            "step_ns": round(float(run(STEP)), 0),
            "scope_us": round(float(run(SCOPE)), 1),
            "cpu_share_of_a_core_at_1_hz": cpu_share(SECONDS),
        },
    )


if __name__ == "__main__":
    main()
