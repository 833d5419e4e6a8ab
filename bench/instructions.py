"""Instructions of the paths that run every second: they differ by less than 1% between runs, unlike times.

python -m bench.instructions [--save | --check]

Each path runs under valgrind (cachegrind) a few times in one process and more often in another, both forks of one that
has prepared it; the difference is the cost of one run without that of the start. ``--check`` compares with
``bench/results/instructions.json`` and exits with 1 if a path needs over 5% more; fewer are reported, so the
record can be renewed with ``--save``.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from bench.result import RESULTS, publish

ROOT = Path(__file__).resolve().parents[1]
FAKES = ROOT / "tests" / "agent" / "fakes"
TOLERANCE = 0.05
UNUSED_PIDS = range(4_190_000, 4_190_064)
"""Pids that a machine hardly has, so the facts about processes cost the same on each."""
VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
FEW = 4
"""Runs in the shorter one of the two measurements."""


def tick() -> Callable[[], object]:
    """Observe and advance: 8 devices, 512 processes with agents, the built-in rules and four others."""
    from bench.tick import CALM, SOURCE_STATE, facts, rules
    from gpumond.tick.observe import observe
    from tests.helpers.values import TickState, advance

    state, snapshot, active = TickState(), None, rules(CALM)
    prepared, numbers = cycle([facts(number) for number in range(4)]), iter(range(1_000_000))

    def run() -> None:
        nonlocal state, snapshot
        number = float(next(numbers))
        snapshot = observe(snapshot, SOURCE_STATE, *next(prepared), number, number)
        state = advance(state, active, snapshot).memory

    return run


def render() -> Callable[[], object]:
    """Render the metrics of a new frame with 8 devices and 512 processes."""
    from bench.tick import CALM, SOURCE_STATE, facts, rules
    from gpumond.metrics.exposition import Exposition, ScrapeFormat
    from gpumond.metrics.telemetry import Telemetry
    from gpumond.tick.observe import observe
    from tests.helpers.values import TickState, advance

    state, snapshot, frames = TickState(), None, []
    for number in range(2):
        snapshot = observe(snapshot, SOURCE_STATE, *facts(number), float(number), float(number))
        result = advance(state, rules(CALM), snapshot)
        state = result.memory
        frames.append(result.frame)
    exposition, next_frame = Exposition(Telemetry()), cycle(frames)
    return lambda: exposition.scrape(next(next_frame), ScrapeFormat.of(""))


def decode() -> Callable[[], object]:
    """Read 50 reports of an agent, each with other values."""
    read = reader()
    return lambda: [read(number) for number in range(50)]


def unchanged() -> Callable[[], object]:
    """Read 50 reports of an agent, each like the one before."""
    read = reader()
    return lambda: [read(0) for _ in range(50)]


def reader() -> Callable[[int], object]:
    """Return a function that reads one of 50 reports of an agent, as the daemon does before a tick."""
    from gpumond.facts.messages import Report, encode
    from gpumond.host.peer import PeerIdentity
    from gpumond.programs.agent_connection import AgentConnection, ReadBudget, SocketLimits
    from tests.helpers.agents import GIB
    from tests.helpers.values import make_pool

    lines = [encode(Report(pools=(make_pool("GPU-0", live=GIB + number, cached=GIB),))) for number in range(50)]
    one, _ = socket.socketpair()
    agent = AgentConnection(one, PeerIdentity(1, 1, 0), None, 0, ReadBudget(SocketLimits(), 0.0), 0.0)

    def read(number: int) -> object:
        (agent.undecoded_report,) = agent.split_messages(lines[number], 0.0)
        return agent.newest_report()

    return read


def report() -> Callable[[], object]:
    """Read and encode the pools of PyTorch (a fake) on 8 devices, as an agent does for a report, 10 times."""
    sys.path.insert(0, str(FAKES))
    import torch
    from torch.world import ACTIVE, FREE, Segment

    from gpumond.agent.allocators.torch import adapter
    from gpumond.facts.messages import Report, encode

    def statistics(mib: int) -> list[object]:
        segments = [Segment([(mib << 20, ACTIVE), (14 << 20, FREE)], device) for device in range(8)]
        torch.WORLD.reset(segments=segments, devices=8, contexts=set(range(8)))
        return [torch.WORLD.stats(device) for device in range(8)]

    worlds = [statistics(6), statistics(8)]
    torch.WORLD.stats = lambda device: worlds[0][device]
    read = adapter().read

    def run() -> None:
        for _ in range(10):
            worlds.reverse()
            encode(Report(pools=tuple(read())))

    return run


def reading() -> Callable[[], object]:
    """Read 8 devices with 8 processes each from the fake of the driver's library, once a second.

    The seconds are counted: on a slow machine, a longer run would make more of the queries that are due every 10 s.
    """
    from gpumond.devices.nvml.source import NvmlSource

    now = 0.0
    source = NvmlSource(clock=lambda: now)
    source.open()

    def run() -> object:
        nonlocal now
        now += 1.0
        return source.read()

    return run


PATHS = {path.__name__: path for path in (tick, render, decode, unchanged, report, reading)}
RUNS = {"tick": 8, "render": 12, "decode": 24, "unchanged": 24, "report": 24, "reading": 24}


def repeat(path: str) -> None:
    """Run a path a few times in one child and more often in another, and print their pids. Valgrind observes this."""
    run, children = PATHS[path](), []
    run()  # imports and writes bytecode, which is part of no measurement
    gc.collect()
    gc.freeze()
    gc.disable()
    for runs in (FEW, RUNS[path]):
        if child := os.fork():
            children.append(child)
            continue
        for _ in range(runs):
            run()
        os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    print(*children)


def measure(path: str, environ: dict[str, str], directory: str) -> int:
    """Return the instructions of one run."""
    command = [*VALGRIND, f"--log-file={directory}/%p", sys.executable, "-c"]
    command.append(f"from bench.instructions import repeat; repeat({path!r})")
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    few, many = (instructions(Path(directory, pid).read_text()) for pid in done.stdout.split())
    return round((many - few) / (RUNS[path] - FEW))


def instructions(log: str) -> int:
    found = re.search(r"I +refs: +([\d,]+)", log)
    assert found, log
    return int(found[1].replace(",", ""))


def main() -> None:
    from tests.fakenvml import FakeDriver, build, machine

    with tempfile.TemporaryDirectory() as directory:
        driver = FakeDriver(Path(directory), build(Path(directory)), machine(8, UNUSED_PIDS))
        driver.write()
        environ = {**os.environ, **driver.env, "PYTHONHASHSEED": "0", "GPUMOND_SOCKET": f"{directory}/none"}
        environ["PYTHONDONTWRITEBYTECODE"] = ""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            figures = dict(zip(PATHS, pool.map(lambda path: measure(path, environ, directory), PATHS), strict=True))
    if "--check" in sys.argv:
        raise SystemExit(check(figures))
    publish("instructions", {"instructions": figures})


def check(figures: dict[str, int]) -> int:
    """Print the difference of each path from the record. Return the exit code."""
    recorded = json.loads((RESULTS / "instructions.json").read_text())
    version, own = recorded["machine"]["python"], sys.version.split()[0]
    if version.rpartition(".")[0] != own.rpartition(".")[0]:
        print(f"the record is of Python {version}, not {own}: nothing is compared")
        return 0
    exceeded = 0
    for path, before in recorded["figures"]["instructions"].items():
        change = figures[path] / before - 1
        exceeded += change > TOLERANCE
        hint = "  more than 5%" if change > TOLERANCE else "  renew with --save" if change < -TOLERANCE else ""
        print(f"{path:9} {before:>13,} -> {figures[path]:>13,} {change:+7.1%}{hint}")
    return int(exceeded > 0)


if __name__ == "__main__":
    main()
