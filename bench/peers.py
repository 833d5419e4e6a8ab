"""gpumond and other exporters in one run: CPU time, scrapes, memory, start.

    python -m bench.peers [--shape 8x64] [--minutes M] [--rounds N] [--save]
    python -m bench.peers --card 48 [--minutes M] [--rounds N] [--save]

A shape is devices x processes of each on the fake driver, whose calls take 20 microseconds. The exporters run one after
another, in each round in the reverse order of the round before. A value is the median of the rounds, a ratio the median
of the ratios in each round. CPU time is measured for M minutes with one scrape a second, as Prometheus makes it.

``--card`` uses the devices of this machine with that many small CUDA programs, which report to gpumond. nvitop-exporter
is taken from PYTHONPATH, or installed into build/ from the package index; prometheus-node-exporter and, with
``--card``, nvidia_gpu_exporter from PATH. An exporter that is missing has no values, and the result states the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pynvml

from bench.exporters import GPUMOND, ROOT, Exporter, RunningExporter, installed_exporters, running, sample
from bench.result import publish, spread
from bench.scrape import LATENCY_MICROSECONDS, compile_daemon, sleepers
from bench.tables import medians, peers_table, ratios
from tests.fakenvml import FakeDriver, build, machine
from tests.helpers.running import until

CONNECTIONS = {"kept": False, "new": True}
"""Each way to scrape: whether its connection is new."""
SCRAPES = 100
"""Scrapes of each way in a round."""
PAUSES_SECONDS = (0.01, 0.05)
WARM_UP_SECONDS = 5.0
AGENTS_SECONDS = 120.0
AGENTS = sample("gpumond_agents", "workload")

Measures = dict[str, float]


class Setting(NamedTuple):
    """What the exporters observe: ``agents`` report to gpumond."""

    name: str
    directory: Path
    devices: int
    environ: Mapping[str, str]
    agents: int


def measure(exporter: Exporter, setting: Setting, seconds: float) -> Measures:
    """Start an exporter, and measure it for one round."""
    with running(exporter, setting.directory / "exporter", setting.environ) as started:
        found: Measures = {"first_data_s": started.first_data(setting.devices)}
        if setting.agents and exporter is GPUMOND:
            until(lambda: agents(started) == setting.agents, AGENTS_SECONDS, every=1.0)
        time.sleep(WARM_UP_SECONDS)
        found |= cost(started, seconds) | scrapes(started)
        if exporter is GPUMOND:
            found["pss_with_web_ui_mib"] = pss_with_web_ui(started)
        return found


def agents(started: RunningExporter) -> int:
    return round(sum(map(float, AGENTS.findall(started.get(started.connect(), "identity")))))


def cost(started: RunningExporter, seconds: float) -> Measures:
    """Measure CPU time in seconds a minute and memory, with one scrape a second."""
    connection = started.connect()
    page = started.get(connection, "gzip")
    before, own, busy = started.cpu(), time.process_time(), busy_seconds()
    began = due = time.monotonic()
    while due < began + seconds:
        started.get(connection, "gzip")
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
    a_minute = 60 / (time.monotonic() - began)
    used, own, busy = started.cpu() - before, time.process_time() - own, busy_seconds() - busy
    return {
        "cpu_s": used * a_minute,
        "cpu_of_other_programs_s": (busy - own - used) * a_minute,
        "pss_mib": started.pss() / 2**20,
        "page_gzip_bytes": float(len(page)),
        "page_bytes": float(len(started.get(connection, "identity"))),
    }


def busy_seconds() -> float:
    """Return the CPU seconds that all programs of this machine have used."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def scrapes(started: RunningExporter) -> Measures:
    """Time scrapes of each way, with random pauses, so they meet every phase of the exporter."""
    rng, seconds, kept = random.Random(1), {way: list[float]() for way in CONNECTIONS}, started.connect()
    for _ in range(SCRAPES):
        for way, new in CONNECTIONS.items():
            time.sleep(rng.uniform(*PAUSES_SECONDS))
            began = time.perf_counter()
            connection = started.connect() if new else kept
            started.get(connection, "gzip")
            seconds[way].append(time.perf_counter() - began)
            if new:
                connection.close()
    found = {way: spread(own) for way, own in seconds.items()}
    return {f"{way}_{name}": own[name] for way, own in found.items() for name in ("p50_ms", "p99_ms")}


def pss_with_web_ui(started: RunningExporter) -> float:
    """Return the memory in MiB while the web UI is open: a client that follows its stream of frames."""
    for path in ("/", "/api/v1/frame"):
        started.open(path).read()
    stream = started.open("/api/v1/live")
    end = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < end:
        stream.read1()
    return started.pss() / 2**20


def compare(exporters: Sequence[Exporter], setting: Setting, rounds: int, seconds: float) -> dict[str, object]:
    found: dict[str, list[Measures]] = {exporter.name: [] for exporter in exporters}
    for number in range(rounds):
        for exporter in exporters if number % 2 == 0 else reversed(exporters):
            found[exporter.name].append(measure(exporter, setting, seconds))
            print(f"round {number + 1}: {exporter.name}: {found[exporter.name][-1]}", file=sys.stderr)
    return {"values": {name: medians(own) for name, own in found.items()}, "ratios": ratios(found)}


@contextlib.contextmanager
def fake_setting(directory: Path, shape: str) -> Iterator[Setting]:
    devices, processes = map(int, shape.split("x"))
    with sleepers(devices * processes) as pids:
        driver = FakeDriver(directory, build(directory), machine(devices, pids))
        driver.slow(LATENCY_MICROSECONDS)
        driver.write()
        yield Setting(f"{devices} devices with {processes} processes each", directory, devices, driver.env, agents=0)


@contextlib.contextmanager
def card_setting(directory: Path, programs: int) -> Iterator[Setting]:
    """Run CUDA programs with agents. Raises SystemExit if one ends before it holds its memory."""
    environ = {**os.environ, "GPUMOND_SOCKET": str(directory / "exporter" / "agent.sock")}
    command = [sys.executable, "-m", "bench.cuda_program"]
    started = [
        subprocess.Popen([*command, str(number)], cwd=ROOT, env=environ, stdout=subprocess.PIPE)
        for number in range(programs)
    ]
    try:
        for program in started:
            assert program.stdout
            if not program.stdout.readline():
                raise SystemExit("a CUDA program has ended; its error is above")
        yield Setting(f"{programs} programs with agents", directory, real_devices(), {}, programs)
    finally:
        for program in started:
            program.kill()
            program.wait()


def real_devices() -> int:
    pynvml.nvmlInit()
    count: int = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="8x64")
    parser.add_argument("--card", type=int, metavar="PROGRAMS")
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    card = wanted.card
    compile_daemon()
    exporters, absent = installed_exporters(card=card is not None)
    with (
        tempfile.TemporaryDirectory() as name,
        fake_setting(Path(name), wanted.shape) if card is None else card_setting(Path(name), card) as setting,
    ):
        figures = {
            "minutes": wanted.minutes,
            "rounds": wanted.rounds,
            "setting": setting.name,
            "versions": {exporter.name: exporter.version() for exporter in exporters},
            "absent": absent,
            **compare(exporters, setting, wanted.rounds, 60 * wanted.minutes),
        }
    publish("peers" if card is None else "peers_card", figures)
    print(peers_table(figures))


if __name__ == "__main__":
    main()
