"""``gpumond demo``: the daemon on a simulated device that real agent processes use."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpumond.cli.client import DEFAULT_URL
from gpumond.commands.serve import add_common_arguments, flags, serve
from gpumond.config.settings import Settings
from gpumond.facts.units import MIB
from gpumond.sim.device import Spec, create

PROGRAMS = ("training", "serving", "leak", "fragmentation")
DEVICE = Spec(
    uuid="GPU-51300000-0000-4000-8000-000000000001",
    index=0,
    name="Simulated 24 GiB",
    size_bytes=24 * 1024 * MIB,
    reserved_bytes=512 * MIB,
    idle_celsius=35.0,
    idle_watts=60.0,
)

RESTART_SECONDS = 5.0
"""Interval between checks for programs that have ended."""

PACE = 20.0
INTERVAL_SECONDS = 0.2
"""The demo diagnoses one minute as twenty, so that its leak is found soon. The tick interval is shorter accordingly,
so that a diagnosed minute has enough readings."""

RULES = (
    {
        "name": "flush-after-fragmentation",
        "scope": "pool",
        "value": "reclaimable_bytes",
        "above": "1GiB",
        "for": "5s",
        "match": {"workload": "fragmentation"},
        "labels": {"severity": "info"},
        "annotations": {"summary": "{workload} holds {reclaimable} of cached memory"},
        "action": {"flush": {"min_reclaimable": "1GiB", "steps": ["cache"]}, "cooldown": "1m", "max_per_hour": 60},
    },
)
"""A rule with an action: it flushes the cache of the fragmented program automatically."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        type=Path,
        metavar="DIRECTORY",
        help="use the simulated device in DIRECTORY/card0, in real time and without the sample programs",
    )
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="gpumond-demo-") as directory:

        def reload() -> Settings:
            from gpumond.config.loading import load

            given = {name: value for name, value in flags(arguments).items() if value is not None}
            own = {} if arguments.config or arguments.device else {"rules": RULES, "interval": INTERVAL_SECONDS}
            return load(arguments.config, {"state_dir": directory} | own | given | {"source": "sim"})

        settings = reload()
        devices = arguments.device or Path(directory)
        if not (devices / "card0").exists():
            create(devices / "card0", DEVICE)
        os.environ["GPUMOND_SIM_DIR"] = str(devices)
        with ExitStack() as programs:

            def started(address: str) -> None:
                if arguments.device:
                    print(f"open {address}\n\nA simulated device without programs: {devices / 'card0'}", flush=True)
                    return
                print(_welcome(address), flush=True)
                programs.enter_context(_programs(devices / "card0", settings))

            return serve(settings, "sim", reload, 1.0 if arguments.device else PACE, started)


@contextmanager
def _programs(device_directory: Path, settings: Settings) -> Iterator[None]:
    """Run the programs while the daemon runs. They start after it: if its port is in use, their agents would connect
    to the daemon that uses it.

    A program that ends is started again.
    """
    environ = os.environ | {"GPUMOND_SOCKET": str(settings.agent_socket())}
    command = (sys.executable, "-m", "gpumond.sim.programs")
    options = ("--card", str(device_directory), "--parent", str(os.getpid()))

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen((*command, name, *options), env=environ, stdin=subprocess.DEVNULL)

    running = {name: start(name) for name in PROGRAMS}
    stopping = threading.Event()

    def restart_ended() -> None:
        while not stopping.wait(RESTART_SECONDS):
            for name in PROGRAMS:
                if running[name].poll() is not None:
                    running[name] = start(name)

    restarter = threading.Thread(target=restart_ended, name="gpumond-demo", daemon=True)
    restarter.start()
    try:
        yield
    finally:
        stopping.set()
        restarter.join()
        for program in running.values():
            program.terminate()
        until = time.monotonic() + 1.0
        for program in running.values():
            try:
                program.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def _welcome(address: str) -> str:
    """Return the text printed at start: the page's address in the first line, then commands to try."""
    command = sys.argv[0] if os.path.basename(sys.argv[0]) == "gpumond" else "gpumond"
    url = address.rstrip("/")
    option = "" if url == DEFAULT_URL else f" --url {url}"
    return f"""\
open {address}

A simulated device with four programs: {", ".join(PROGRAMS)}. In another terminal:

  {command} status{option}
  {command} flush{option} --all --dry-run
  {command} flush{option} --workload training

The demo evaluates memory curves {PACE:.0f} times as fast as usual: the alerts for the fragmented program and for the
leak fire within three minutes. Press Ctrl-C to stop.
"""
