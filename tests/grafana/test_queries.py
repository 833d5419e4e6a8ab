"""Queries of the panels, annotations and variables, sent to a real Prometheus that scrapes two machines.

A query has data if it has some for any selection of the variables.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.grafana.boards import BOARDS, NAMES, Target, marks, panels, targets, variables
from tests.grafana.drawn import LEFT, Drawer, drawer, drawing_input, needs_drawer
from tests.grafana.session import Session, running
from tests.helpers.prometheus import fill

pytestmark = [pytest.mark.needs("prometheus"), pytest.mark.timeout(420)]
TRIES = 10

EMPTY = {
    ("workload", "Pinned host memory"): "the simulated allocator pins no memory of the host",
    ("device", "Unmapped, by process"): "no process is in sleep mode",
}
"""Panels without data in this session, with the reason."""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Session]:
    with running(tmp_path_factory.mktemp("grafana"), nvml_library) as session:
        yield session


@pytest.mark.parametrize("name", NAMES)
def test_variables_have_values(session: Session, name: str):
    combinations = session.combinations(name)
    assert combinations
    for chosen in combinations:
        assert all(all(values) for values in chosen.values()), chosen
        assert chosen.keys() == {variable["name"] for variable in variables(name)}


@pytest.mark.parametrize("name", NAMES)
def test_queries_have_data(session: Session, name: str):
    combinations = session.combinations(name)
    missing = [each for each in (*targets(), *marks()) if each.board == name and (name, each.panel) not in EMPTY]
    for _ in range(TRIES):  # for example, nothing is reclaimable just after a flush
        missing = [t for t in missing if not any(session.has_data(t, chosen) for chosen in combinations)]
        if not missing:
            break
        time.sleep(2)
    assert [str(target) for target in missing] == []


@pytest.mark.parametrize("target", [t for t in targets() if (t.board, t.panel) in EMPTY], ids=str)
def test_queries_without_data_are_valid_promql(session: Session, target: Target):
    assert not any(session.has_data(target, chosen) for chosen in session.combinations(target.board)), "list it no more"


@pytest.mark.parametrize("name", NAMES)
def test_labels_of_legends_exist(session: Session, name: str):
    combinations = session.combinations(name)
    for target in targets():
        named = set(labels_of(target.legend))
        if target.board == name and named and (name, target.panel) not in EMPTY:
            found = [answer["metric"] for chosen in combinations for answer in session.answer(target, chosen)]
            assert any(named <= labels.keys() for labels in found), target


def labels_of(legend: str) -> list[str]:
    return [part.partition("}}")[0] for part in legend.split("{{")[1:]]


def test_areas_of_the_ledger_sum_to_the_used_bytes(session: Session):
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


def test_owner_has_the_account_that_the_agent_states(session: Session):
    found = session.prometheus.instant('gpumond_owner_live_bytes{workload="blocks"}')
    assert {each["metric"]["slurm_account"] for each in found} == {"physics"}


def of_dashboard_12239() -> Callable[[], Iterator[tuple[str, str]]]:
    """Names of metrics, and the labels by which NVIDIA's dashboard (12239 on grafana.com) sums each of them."""
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


@pytest.fixture(scope="module")
def drawn_with(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drawer]:
    with drawer(tmp_path_factory.mktemp("drawing")) as drawn_with:
        yield drawn_with


@needs_drawer
@pytest.mark.parametrize("name", NAMES)
def test_panels_are_drawn_by_grafanas_own_components(session: Session, drawn_with: Drawer, name: str):
    """Some selection of the variables fills each panel; no selection makes any of them fail."""
    missing = {panel["title"] for board, panel in panels() if board == name and panel["type"] not in LEFT}
    missing -= {panel for board, panel in EMPTY if board == name}
    for chosen in session.combinations(name) * TRIES:
        drawing = drawn_with.draw(drawing_input(name, session, chosen))
        assert drawing.complaints == ()
        assert drawing.of("failed") == set()
        missing -= drawing.filled
        if not missing:
            break
    assert missing == set()


@needs_drawer
def test_panels_without_data_are_empty_and_drawing_errors_fail(session: Session, drawn_with: Drawer):
    chosen = session.combinations("daemon")[0]
    empty = drawn_with.draw(drawing_input("daemon", session, {name: ["empty"] for name in chosen}))
    assert empty.filled == set()
    broken = copy.deepcopy(drawing_input("daemon", session, chosen))
    figure = next(panel for panel in broken["board"]["panels"] if panel["type"] == "stat")
    del figure["options"]["reduceOptions"]
    assert drawn_with.draw(broken).of("failed") == {figure["title"]}
