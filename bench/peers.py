"""gpumond and nvitop-exporter in one run: scrapes, CPU time, memory, start, delay.

    python -m bench.peers [--shapes 8x8,8x64,64x50] [--latency-us 0,20] [--minutes M] [--rounds N] [--save]
    python -m bench.peers --card 0,8,48 [--minutes M] [--rounds N] [--save]

A shape is devices x processes of each on the fake driver, whose calls take the latency. The exporters run one after
another, in each round in the reverse order of the round before. A value is the median of the rounds, a ratio the median
of the ratios in each round. CPU time is measured for M minutes with one scrape a second, as Prometheus makes it. The
delay is the time from a change of used memory until a scrape shows it. Driver calls are counted in a run of their own.

``--card`` uses the devices of this machine with that many small CUDA programs, without and with agents; delay and
driver calls are unknown there. nvitop-exporter is taken from PYTHONPATH, or installed into build/ from the package
index. An exporter that is missing has no values, and the result states the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pynvml

from bench.exporters import GPUMOND, ROOT, Exporter, Running, installed, running, sample
from bench.result import publish, spread
from bench.scrape import compile_daemon, sleepers
from bench.tables import medians, peers_table, ratios
from tests.fakenvml import GIB, FakeDriver, build, machine
from tests.helpers.running import until

FORMS = {f"{way}_{encoding}": (way == "new", encoding) for way in ("kept", "new") for encoding in ("gzip", "identity")}
"""Each way to scrape: whether its connection is new, and the encoding."""
SCRAPES = 100
"""Scrapes of each form in a round."""
PAUSES_SECONDS = (0.01, 0.05)
CHANGES = 8
WARM_UP_SECONDS = 5.0
COUNTED_SECONDS = 20.0
AGENTS_SECONDS = 120.0
TICK_SECONDS = sample("gpumond_tick_duration_seconds_sum")
AGENTS = sample("gpumond_agents", "workload")

Measures = dict[str, float]


class Setting:
    """What the exporters observe: ``driver`` is None on real devices; ``agents`` report to gpumond."""

    def __init__(self, directory: Path, devices: int, driver: FakeDriver | None, agents: int = 0) -> None:
        self.directory, self.devices, self.driver, self.agents = directory, devices, driver, agents
        self.environ: Mapping[str, str] = driver.env if driver else {}


def measure(exporter: Exporter, setting: Setting, seconds: float) -> Measures:
    """Start an exporter, and measure it for one round."""
    with running(exporter, setting.directory / "exporter", setting.environ) as started:
        found: Measures = {"first_data_s": started.first_data(setting.devices)}
        if setting.agents and exporter is GPUMOND:
            until(lambda: agents(started) == setting.agents, AGENTS_SECONDS, every=1.0)
        time.sleep(WARM_UP_SECONDS)
        found |= cost(started, seconds)
        found |= scrapes(started)
        if setting.driver:
            found |= delays(started, setting.driver)
        return found


def agents(started: Running) -> int:
    return round(sum(map(float, AGENTS.findall(started.get(started.connect(), "identity")))))


def cost(started: Running, seconds: float) -> Measures:
    """Measure CPU time in seconds a minute and memory, with one scrape a second."""
    connection = started.connect()
    page = started.get(connection, "gzip")
    main, others = started.cpu()
    tick, own, busy = tick_seconds(started), time.process_time(), busy_seconds()
    began = due = time.monotonic()
    while due < began + seconds:
        started.get(connection, "gzip")
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
    passed = time.monotonic() - began
    own, busy = time.process_time() - own, busy_seconds() - busy
    main, others = (now - before for now, before in zip(started.cpu(), (main, others), strict=True))
    a_minute = 60 / passed
    found = {
        "cpu_s": (main + others) * a_minute,
        "cpu_main_s": main * a_minute,
        "cpu_children_s": others * a_minute,
        "cpu_of_other_programs_s": (busy - own - main - others) * a_minute,
        "pss_mib": started.pss() / 2**20,
        "page_gzip_bytes": float(len(page)),
        "page_bytes": float(len(started.get(connection, "identity"))),
    }
    if tick is not None and (now := tick_seconds(started)) is not None:
        found["tick_s"] = (now - tick) * a_minute
    return found


def tick_seconds(started: Running) -> float | None:
    """Return the duration of all ticks of gpumond."""
    found = TICK_SECONDS.search(started.get(started.connect(), "identity"))
    return float(found[1]) if found else None


def busy_seconds() -> float:
    """Return the CPU seconds that all programs of this machine have used."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def scrapes(started: Running) -> Measures:
    """Time scrapes of each form, with random pauses, so that they meet every phase of the exporter."""
    dice, seconds = random.Random(1), {form: list[float]() for form in FORMS}
    kept = {encoding: started.connect() for _, encoding in FORMS.values()}
    for _ in range(SCRAPES):
        for form, (new, encoding) in FORMS.items():
            time.sleep(dice.uniform(*PAUSES_SECONDS))
            began = time.perf_counter()
            connection = started.connect() if new else kept[encoding]
            started.get(connection, encoding)
            seconds[form].append(time.perf_counter() - began)
            if new:
                connection.close()
    found = {form: spread(own) for form, own in seconds.items()}
    return {f"{form}_{name}": own[name] for form, own in found.items() for name in ("p50_ms", "p99_ms")}


def delays(started: Running, driver: FakeDriver) -> Measures:
    """Return the time from a change of used memory, at a random moment, until a scrape shows it."""
    dice, seconds = random.Random(1), list[float]()
    for number in range(CHANGES):
        before = started.values()
        time.sleep(dice.uniform(0.2, 1.2))
        driver.devices[0].used_bytes += GIB if number % 2 else -GIB
        driver.write()
        began = time.perf_counter()
        until(lambda before=before: started.values() not in (before, []), every=0.02)
        seconds.append(time.perf_counter() - began)
    return {"delay_p50_s": statistics.median(seconds), "delay_max_s": max(seconds)}


def calls(exporter: Exporter, setting: Setting) -> Measures:
    """Return the driver calls a second of an exporter that is not scraped."""
    driver = setting.driver
    if driver is None:
        return {}
    driver.count_calls()
    try:
        with running(exporter, setting.directory / "exporter", driver.env) as started:
            started.first_data(setting.devices)
            time.sleep(WARM_UP_SECONDS)
            driver.calls()
            time.sleep(COUNTED_SECONDS)
            return {"driver_calls_a_second": driver.calls().total() / COUNTED_SECONDS}
    finally:
        del driver.env["FAKENVML_CALLS"]


def compare(exporters: Sequence[Exporter], setting: Setting, rounds: int, seconds: float) -> dict[str, object]:
    found: dict[str, list[Measures]] = {exporter.name: [] for exporter in exporters}
    for number in range(rounds):
        for exporter in exporters if number % 2 == 0 else reversed(exporters):
            found[exporter.name].append(measure(exporter, setting, seconds))
            print(f"round {number + 1}: {exporter.name}: {found[exporter.name][-1]}", file=sys.stderr)
    values = {exporter.name: medians(found[exporter.name]) | calls(exporter, setting) for exporter in exporters}
    return {"values": values, "ratios": ratios(found)}


@contextlib.contextmanager
def fake_setting(directory: Path, library: Path, shape: str, latency: float) -> Iterator[Setting]:
    devices, processes = map(int, shape.split("x"))
    with sleepers(devices * processes) as pids:
        driver = FakeDriver(directory, library, machine(devices, pids))
        if latency:
            driver.slow(latency)
        driver.write()
        yield Setting(directory, devices, driver)


@contextlib.contextmanager
def card_setting(directory: Path, programs: int, with_agents: bool) -> Iterator[Setting]:
    """Run CUDA programs. Raises SystemExit if one ends before it holds its memory."""
    environ = {**os.environ, "GPUMOND_SOCKET": str(directory / "exporter" / "agent.sock")}
    option = ["--agent"] if with_agents else []
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.cuda_program", str(number), *option],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
        )
        for number in range(programs)
    ]
    try:
        for program in started:
            assert program.stdout
            if not program.stdout.readline():
                raise SystemExit("a CUDA program has ended; its error is above")
        yield Setting(directory, real_devices(), None, programs if with_agents else 0)
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
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="8x8,8x64,64x50")
    parser.add_argument("--latency-us", default="0,20")
    parser.add_argument("--card", metavar="PROGRAMS")
    parser.add_argument("--save", action="store_true")
    wanted = parser.parse_args()
    compile_daemon()
    exporters, absent = installed()
    settings: dict[str, object] = {}
    figures = {
        "minutes": wanted.minutes,
        "rounds": wanted.rounds,
        "load_average_before": round(os.getloadavg()[0], 1),
        "versions": {exporter.name: exporter.version() for exporter in exporters},
        "absent": absent,
        "settings": settings,
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if wanted.card is None:
            library = build(directory)
            cases = [
                (
                    f"{shape.replace('x', ' devices with ')} processes each, {latency} µs a call",
                    fake_setting(directory, library, shape, float(latency)),
                )
                for shape in wanted.shapes.split(",")
                for latency in wanted.latency_us.split(",")
            ]
        else:
            cases = [
                (f"{programs} programs{' with agents' * with_agents}", card_setting(directory, programs, with_agents))
                for programs in map(int, wanted.card.split(","))
                for with_agents in ((False, True) if programs else (False,))
            ]
        for case, setting in cases:
            with setting as opened:
                settings[case] = compare(exporters, opened, wanted.rounds, 60 * wanted.minutes)
            publish("peers" if wanted.card is None else "peers_card", figures)
    print(peers_table(figures))


if __name__ == "__main__":
    main()
