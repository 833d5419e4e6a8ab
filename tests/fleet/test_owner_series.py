"""Prometheus that scrapes owners and no programs: sums, dashboards and alerts keep their data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.grafana.boards import ROOT, targets
from tests.helpers.prometheus import Prometheus, fill
from tests.helpers.running import until
from tests.helpers.stubs import SimulatedMachine, simulated

pytestmark = [pytest.mark.slow, pytest.mark.needs("prometheus"), pytest.mark.timeout(300)]
RULES = ROOT / "deploy/prometheus/gpumond.rules.yaml"
PROGRAMS = {"train": {"ooms": 0}, "serve": {}}
GROUPS = ["device", "owner", "daemon"]
NOT_HERE = {
    "Alerts": "no alert is active",
    "Alerts firing, by severity": "no alert is active",
    "Machines": "no alert is active: its column Firing",
    "Full soon": "no program grows",
    "Released by flushes, by machine": "nothing is flushed",
    "Released by flushes, by workload": "nothing is flushed",
    "Receipts by outcome": "nothing is flushed",
    "Verdicts": "the programs are new",
    "Age of firing alerts": "no alert is active",
    "Notifications": "the daemon has no receiver",
    "Notifications delivered": "the daemon has no receiver",
    "Oldest alert": "no alert is active",
}
"""Panels without data here, with the reason."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[SimulatedMachine]:
    with simulated(tmp_path_factory.mktemp("machine"), nvml_library, {"gpu-1": PROGRAMS}) as (one,):
        yield one


@pytest.fixture(scope="module")
def prometheus(machine: SimulatedMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    job = {"params": {"collect[]": GROUPS}, "static_configs": [{"targets": [machine.address]}]}
    with Prometheus(tmp_path_factory.mktemp("prometheus") / "data", {"gpumond": job}, RULES) as running:
        wasted = ("owner:gpumond_wasted_gibibyte_hours:sum1h", "instance:gpumond_wasted_gibibyte_hours:sum1h")
        for name in (*wasted, "instance:gpumond_agent_coverage:ratio"):
            until(lambda name=name: running.instant(name), 120)  # the first value is that of the next whole minute
        yield running


def test_no_series_has_a_pid(prometheus: Prometheus):
    assert prometheus.instant("gpumond_owner_processes")
    assert prometheus.instant('count({pid!=""})') == []


def test_owners_have_their_sums(prometheus: Prometheus):
    found = prometheus.instant("sum by (workload) (owner:gpumond_wasted_bytes:sum)")
    assert {each["metric"]["workload"]: float(each["value"][1]) for each in found} == {
        "train": 3 * 2**30,
        "serve": 3 * 2**30,
    }
    unattributed = 'gpumond_machine_memory_share_bytes{share="unattributed"}'
    (wasted,) = prometheus.instant(f"gpumond_machine_wasted_bytes - on (instance) {unattributed}")
    assert float(wasted["value"][1]) == 6 * 2**30


def test_fleet_has_data(prometheus: Prometheus):
    everything = {name: [".*"] for name in ("cluster", "job", "namespace", "machine")}

    def missing() -> set[str]:
        asked = [(prometheus.instant if each.instant else prometheus.over_time, each) for each in fleet]
        return {each.panel for ask, each in asked if not ask(fill(each.expression, everything))}

    fleet = [each for each in targets() if each.board == "fleet"]
    assert missing() <= NOT_HERE.keys()


def test_alert_on_a_program_fires_and_names_the_machine(machine: SimulatedMachine, prometheus: Prometheus):
    alert = 'ALERTS{alertname="GpumondProgramAlert", rule="out-of-memory", alertstate="firing"}'
    assert prometheus.instant(alert) == []
    machine.change("train", ooms=1)
    until(lambda: prometheus.instant(alert), 60)
    (firing,) = prometheus.instant(alert)
    assert (firing["metric"]["instance"], firing["metric"]["severity"]) == (machine.address, "critical")
