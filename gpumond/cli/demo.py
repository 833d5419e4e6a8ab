"""``gpumond demo``: the daemon on a simulated device, with real agent processes on it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        "action": {"flush": {"min_reclaimable": "1GiB", "steps": ["cache"]}, "cooldown": "1m"},
    },
)
"""The closed loop: what the fragmented program leaves in its cache is flushed by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="gpumond-demo-") as directory:

        def reload() -> Settings:
            given = {name: value for name, value in flags(arguments).items() if value is not None}
            own = {} if arguments.config else {"rules": RULES}
            return load(arguments.config, {"state_dir": directory} | own | given | {"source": "sim"})

        settings = reload()
        create(Path(directory) / "card0", CARD)
        os.environ["GPUMOND_SIM_DIR"] = directory
        with _programs(Path(directory) / "card0", settings):
            print(_welcome(settings), flush=True)
            return serve(settings, "sim", reload)


@contextmanager
def _programs(card: Path, settings: Settings) -> Iterator[None]:
    """The programs, for as long as the daemon runs; their agents find its socket when it is there."""
    environ = os.environ | {"GPUMOND_SOCKET": str(settings.agent_socket())}
    command = (sys.executable, "-m", "gpumond.sim.programs")
    options = ("--card", str(card), "--parent", str(os.getpid()))
    running = [subprocess.Popen((*command, name, *options), env=environ, stdin=subprocess.DEVNULL) for name in PROGRAMS]
    try:
        yield
    finally:
        for program in running:
            program.terminate()
        until = time.monotonic() + 1.0
        for program in running:
            try:
                program.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def _welcome(settings: Settings) -> str:
    url = f"http://{settings.listen}"
    command = sys.argv[0] if os.path.basename(sys.argv[0]) == "gpumond" else "gpumond"
    option = "" if settings.port == 9917 else f" --url {url}"
    return f"""\
gpumond demo: a simulated device with four programs on it: {", ".join(PROGRAMS)}.

  look   {url}/metrics   {url}/docs   {url}/api/v1/ledger
  try    {command} status{option}
         {command} flush{option} --all --dry-run
         {command} flush{option} --workload training

Within two minutes the fragmented program raises an alert. Ctrl-C ends it.
"""
