"""``gpumond demo``: the daemon on a simulated device, with real agent processes on it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpumond.cli.client import DEFAULT_URL
from gpumond.cli.serve import add_common_arguments, flags, serve
from gpumond.config import Settings, load
from gpumond.sim.card import MIB, Spec, create

PROGRAMS = ("training", "serving", "leak", "fragmentation")
CARD = Spec(
    uuid="GPU-51300000-0000-4000-8000-000000000001",
    index=0,
    name="Simulated 24 GiB",
    size_bytes=24 * 1024 * MIB,
    reserved_bytes=512 * MIB,
    idle_celsius=35.0,
    idle_watts=60.0,
)

RESTART_SECONDS = 5.0
"""So often it is looked for programs that have ended."""

PACE = 20.0
INTERVAL_SECONDS = 0.2
"""A minute of the demo is judged as twenty, so that nobody has to wait for its leak to be found. A minute so short
needs ticks as short, or there would be too little of it to see."""

RULES = (
    {
        "name": "give-back-after-fragmentation",
        "scope": "pool",
        "value": "reclaimable_bytes",
        "above": "1GiB",
        "for": "5s",
        "match": {"workload": "fragmentation"},
        "labels": {"severity": "info"},
        "annotations": {"summary": "{workload} keeps {reclaimable} that it does not use"},
        "action": {"flush": {"min_reclaimable": "1GiB", "steps": ["cache"]}, "cooldown": "1m", "max_per_hour": 60},
    },
)
"""The closed loop: what the fragmented program leaves in its cache is flushed by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="gpumond-demo-") as directory:

        def reload() -> Settings:
            given = {name: value for name, value in flags(arguments).items() if value is not None}
            own = {} if arguments.config else {"rules": RULES, "interval": INTERVAL_SECONDS}
            return load(arguments.config, {"state_dir": directory} | own | given | {"source": "sim"})

        settings = reload()
        create(Path(directory) / "card0", CARD)
        os.environ["GPUMOND_SIM_DIR"] = directory
        with _programs(Path(directory) / "card0", settings):
            return serve(settings, "sim", reload, PACE, lambda address: print(_welcome(address), flush=True))


@contextmanager
def _programs(card: Path, settings: Settings) -> Iterator[None]:
    """The programs, for as long as the daemon runs; their agents find its socket when it is there.

    One that ends is started again, as whoever runs a leaking program does.
    """
    environ = os.environ | {"GPUMOND_SOCKET": str(settings.agent_socket())}
    command = (sys.executable, "-m", "gpumond.sim.programs")
    options = ("--card", str(card), "--parent", str(os.getpid()))

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen((*command, name, *options), env=environ, stdin=subprocess.DEVNULL)

    running = {name: start(name) for name in PROGRAMS}
    over = threading.Event()

    def keep() -> None:
        while not over.wait(RESTART_SECONDS):
            for name in PROGRAMS:
                if running[name].poll() is not None:
                    running[name] = start(name)

    keeper = threading.Thread(target=keep, name="gpumond-demo", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
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
    """The page's address alone in the first line, and below it commands to try."""
    command = sys.argv[0] if os.path.basename(sys.argv[0]) == "gpumond" else "gpumond"
    url = address.rstrip("/")
    option = "" if url == DEFAULT_URL else f" --url {url}"
    return f"""\
open {address}

A simulated device with four programs: {", ".join(PROGRAMS)}. In another terminal:

  {command} status{option}
  {command} flush{option} --all --dry-run
  {command} flush{option} --workload training

The demo judges memory curves {PACE:.0f} times as fast as usual: the alerts for the fragmented program and for the
leak fire within two minutes. Press Ctrl-C to stop.
"""
