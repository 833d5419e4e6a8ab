"""Each query of each panel, mark and variable, asked of a real Prometheus that scrapes two machines.

One is the demo, with programs and agents; the other has NVIDIA devices by a stand-in for their driver, with every
sensor, one of them lost. A query has data if it has some for any choice of the variables.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakenvml import FakeDriver, machine
from tests.grafana.boards import BOARDS, NAMES, Target, marks, targets, variables
from tests.grafana.prometheus import Prometheus, fill
from tests.running import RunningDaemon, free_port, until

pytestmark = pytest.mark.timeout(240)
XID = 8

TRIES = 10

EMPTY = {
    ("workload", "Pinned host memory"): "the simulated allocator pins no memory of the host",
}
"""Panels without data in this session, and why."""

CONFIG = """
interval: 0.2s
flush_cooldown: 2s
receivers:
  - {{name: log, type: log}}
  - {{name: nobody, type: webhook, url: "http://127.0.0.1:{nobody}/"}}
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
        """What a user can choose: of a variable with All all values, else each of them."""
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


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Session]:
    directory = tmp_path_factory.mktemp("grafana")
    (directory / "demo.yaml").write_text(CONFIG.format(nobody=free_port()))
    running: list[subprocess.Popen[bytes]] = []

    def start(daemon: RunningDaemon, workload: str, *card: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.grafana.program", workload, *card]
        running.append(subprocess.Popen(command, env=daemon.environ, cwd=Path(__file__).parents[2]))
        return running[-1]

    (directory / "cards").mkdir()
    own = {"TMPDIR": str(directory / "cards")}
    options = ("--config", str(directory / "demo.yaml"))
    demo = RunningDaemon(directory / "demo", *options, verb="demo", environ=own)
    driver = FakeDriver(directory, nvml_library)
    driver.write()
    node = RunningDaemon(directory / "node", "--source", "nvml", "--interval", "0.2", environ=driver.env)
    everything = {
        "gpumond": {"static_configs": [{"targets": [address(demo), address(node)]}]},
        "dcgm": {"params": {"compat": ["dcgm"]}, "static_configs": [{"targets": [address(node)]}]},
    }
    prometheus = Prometheus(directory / "prometheus", everything)
    try:
        (card,) = (directory / "cards").glob("gpumond-demo-*/card0")
        start(demo, "blocks", str(card))
        holder = start(node, "holder")
        equip(driver, [holder.pid, os.getpid()])
        until(lambda: prometheus.instant('gpumond_device_power_watts{gpu="1"}'))
        lose(driver)
        say_nonsense(demo)
        until(lambda: demo.value("gpumond_time_to_oom_seconds"), 150)
        until(lambda: prometheus.instant("gpumond_time_to_oom_seconds"))
        yield Session(prometheus, demo)
    finally:
        prometheus.stop()
        for program in running:
            program.kill()
            program.wait()
        demo.stop()
        node.stop()


def address(daemon: RunningDaemon) -> str:
    return daemon.url.removeprefix("http://")


def equip(driver: FakeDriver, pids: list[int]) -> None:
    driver.devices = machine(2, pids)
    first = driver.devices[0]
    first.gpm_permille, first.addressing, first.numa_node, first.process_sampling = 400, 2, 8, 1
    first.events = [(XID, 31)]
    driver.write()


def lose(driver: FakeDriver) -> None:
    driver.lose(1)
    driver.write()


def say_nonsense(daemon: RunningDaemon) -> None:
    """To the agents' socket; it is refused, and counted."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.socket))
        peer.sendall(b"nonsense\n")
        peer.recv(1)


@pytest.mark.parametrize("name", NAMES)
def test_every_variable_has_values(session: Session, name: str):
    combinations = session.combinations(name)
    assert combinations
    for chosen in combinations:
        assert all(all(values) for values in chosen.values()), chosen
        assert chosen.keys() == {variable["name"] for variable in variables(name)}


@pytest.mark.parametrize("name", NAMES)
def test_every_query_has_data(session: Session, name: str):
    combinations = session.combinations(name)
    missing = [each for each in (*targets(), *marks()) if each.board == name and (name, each.panel) not in EMPTY]
    for _ in range(TRIES):  # just after a flush, say, nothing is reclaimable
        missing = [t for t in missing if not any(session.has_data(t, chosen) for chosen in combinations)]
        if not missing:
            break
        time.sleep(2)
    assert [str(target) for target in missing] == []


@pytest.mark.parametrize("target", [t for t in targets() if (t.board, t.panel) in EMPTY], ids=str)
def test_a_query_that_has_no_data_here_is_at_least_promql(session: Session, target: Target):
    assert not any(session.has_data(target, chosen) for chosen in session.combinations(target.board)), "list it no more"


@pytest.mark.parametrize("name", NAMES)
def test_every_label_that_a_legend_names_is_there(session: Session, name: str):
    combinations = session.combinations(name)
    for target in targets():
        named = set(labels_of(target.legend))
        if target.board == name and named and (name, target.panel) not in EMPTY:
            found = [answer["metric"] for chosen in combinations for answer in session.answer(target, chosen)]
            assert any(named <= labels.keys() for labels in found), target


def labels_of(legend: str) -> list[str]:
    return [part.partition("}}")[0] for part in legend.split("{{")[1:]]


def test_the_areas_of_the_ledger_sum_to_used(session: Session):
    ledger = next(panel for panel in BOARDS["device"]["panels"] if panel["title"] == "Ledger")
    expressions = {target["legendFormat"]: target["expr"] for target in ledger["targets"]}
    used, size = expressions.pop("used by the driver's count"), expressions.pop("size")
    areas = " + ".join(f"({expression} or vector(0))" for expression in expressions.values())
    overcount = 'max(gpumond_memory_overcount_bytes{instance="$machine", uuid="$device"})'
    checked = 0
    for chosen in session.combinations("device"):
        difference = session.prometheus.over_time(fill(f"{areas} - {used} - {overcount}", chosen))
        for series in difference:
            assert {float(value) for _, value in series["values"]} == {0.0}
            checked += 1
        assert all(
            float(value) > 0
            for series in session.prometheus.over_time(fill(f"{size} - {used}", chosen))
            for _, value in series["values"]
        )
    assert checked >= 2


def of_dashboard_12239() -> Callable[[], Iterator[tuple[str, str]]]:
    """The names of metrics, and the labels by which NVIDIA's own dashboard (12239 on grafana.com) sums each of them."""
    by_gpu, by_instance = "Hostname, gpu", "Hostname, gpu, GPU_I_ID, GPU_I_PROFILE"
    plain = ("DEV_GPU_TEMP", "DEV_POWER_USAGE", "DEV_SM_CLOCK")
    split = ("PROF_GR_ENGINE_ACTIVE", "PROF_PIPE_TENSOR_ACTIVE", "DEV_FB_USED")

    def pairs() -> Iterator[tuple[str, str]]:
        yield from product((f"DCGM_FI_{name}" for name in plain), [by_gpu])
        yield from product((f"DCGM_FI_{name}" for name in split), [by_instance])

    return pairs


def test_dashboard_12239_finds_its_metrics_under_dcgms_names(session: Session):
    prometheus = session.prometheus
    hosts = prometheus.choices("label_values(DCGM_FI_DEV_FB_FREE, Hostname)")
    assert hosts
    chosen = {"Hostname": hosts}
    gpus = prometheus.choices(fill('label_values(DCGM_FI_DEV_FB_FREE{Hostname=~"$Hostname"}, gpu)', chosen))
    assert "0" in gpus
    chosen["gpu"] = gpus
    for name, labels in of_dashboard_12239()():
        expression = fill(f'max by ({labels}) ({name}{{Hostname=~"$Hostname", gpu=~"$gpu"}})', chosen)
        found = prometheus.over_time(expression)
        assert {"Hostname", "gpu"} <= {label for series in found for label in series["metric"]}, expression
