"""Two machines under a real Prometheus, for the queries and the panels of the dashboards.

One machine is the demo, with programs and agents. The other has NVIDIA devices of a fake for their driver, with
every sensor, one of them lost.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.fakenvml import FakeDriver, machine
from tests.grafana.boards import ROOT, Target, variables
from tests.helpers.prometheus import Prometheus, fill
from tests.helpers.running import RunningDaemon, free_port, until

Xid = 8

CONFIG = """
interval: 0.2s
flush_cooldown: 2s
receivers:
  - {{name: log, type: log}}
  - {{name: unreachable, type: webhook, url: "http://127.0.0.1:{port}/"}}
rules:
  - name: give-back
    scope: pool
    value: reclaimable_bytes
    above: 64MiB
    labels: {{severity: info}}
    annotations: {{summary: "{{workload}} keeps {{reclaimable}}"}}
    action: {{flush: {{steps: [cache]}}, cooldown: 20s}}
"""


class Session(NamedTuple):
    prometheus: Prometheus
    demo: RunningDaemon

    def has_data(self, target: Target, chosen: dict[str, Sequence[str]]) -> bool:
        return bool(self.answer(target, chosen))

    def answer(self, target: Target, chosen: dict[str, Sequence[str]]) -> list[dict[str, dict[str, str]]]:
        ask = self.prometheus.instant if target.instant else self.prometheus.over_time
        return ask(fill(target.expression, chosen))

    def combinations(self, board: str) -> list[dict[str, Sequence[str]]]:
        """Yield the selections of a user: all values of a variable with All, else each value."""
        found: list[dict[str, Sequence[str]]] = [{}]
        for variable in variables(board):
            query, pattern = variable["query"]["query"], variable.get("regex", "")
            further = []
            for chosen in found:
                values = self.prometheus.choices(fill(query, chosen), pattern)
                options = [values] if variable["includeAll"] else [[value] for value in values]
                further += [{**chosen, variable["name"]: option} for option in options]
            found = further
        return found


@contextmanager
def running(directory: Path, nvml_library: Path) -> Iterator[Session]:
    (directory / "demo.yaml").write_text(CONFIG.format(port=free_port()))
    (directory / "cards").mkdir()
    own = {"TMPDIR": str(directory / "cards")}
    options = ("--config", str(directory / "demo.yaml"))
    driver = FakeDriver(directory, nvml_library)
    driver.write()
    with ExitStack() as running:

        def start(daemon: RunningDaemon, workload: str, rank: int, *card: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "tests.grafana.program", workload, *card]
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "GPUMOND_JOB": "night/1", "SLURM_JOB_ACCOUNT": "physics"}
            program = running.enter_context(subprocess.Popen(command, env={**daemon.environ, **place}, cwd=ROOT))
            running.callback(program.kill)
            return program

        demo = running.enter_context(RunningDaemon(directory / "demo", *options, command="demo", environ=own))
        serving = ("--source", "nvml", "--interval", "0.2s")
        node = running.enter_context(RunningDaemon(directory / "node", *serving, environ=driver.env))
        everything = {
            "gpumond": {"static_configs": [{"targets": [address(demo), address(node)]}]},
            "dcgm": {"params": {"compat": ["dcgm-4.7"]}, "static_configs": [{"targets": [address(node)]}]},
        }
        rules = ROOT / "deploy/prometheus/gpumond.rules.yaml"
        prometheus = running.enter_context(Prometheus(directory / "prometheus", everything, rules))
        (card,) = (directory / "cards").glob("gpumond-demo-*/card0")
        start(demo, "blocks", 0, str(card))
        holder = start(node, "holder", 1)
        equip(driver, [holder.pid, os.getpid()])
        until(lambda: prometheus.instant('gpumond_device_power_watts{gpu="1"}'))
        lose(driver)
        send_invalid_message(demo)
        until(lambda: demo.value("gpumond_verdict", kind="leak"), 270, every=0.5)
        until(lambda: prometheus.instant('gpumond_verdict{kind="leak"} == 1'))
        until(lambda: prometheus.instant("gpumond_flush_released_bytes_total > 0"), 120, every=0.5)
        yield Session(prometheus, demo)


def address(daemon: RunningDaemon) -> str:
    return daemon.url.removeprefix("http://")


def equip(driver: FakeDriver, pids: list[int]) -> None:
    driver.devices = machine(2, pids)
    first = driver.devices[0]
    first.gpm_permille, first.addressing, first.numa_node, first.process_sampling = 400, 2, 8, 1
    first.events = [(Xid, 31)]
    driver.write()


def lose(driver: FakeDriver) -> None:
    driver.lose(1)
    driver.write()


def send_invalid_message(daemon: RunningDaemon) -> None:
    """Send an invalid message to the agents' socket, which refuses and counts it."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.socket))
        peer.sendall(b"nonsense\n")
        peer.recv(1)
