"""The main job on a real card: PyTorch and CuPy programs, attributed and flushed with a receipt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tests.gpu.scenes import MIB, SCENES, Scene, flush, program, shares
from tests.running import RunningDaemon, until

pytestmark = pytest.mark.gpu
scenes = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)


@pytest.fixture
def daemon(serve: Callable[..., RunningDaemon]) -> RunningDaemon:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs an NVIDIA card")
    started: RunningDaemon = serve("--source", "nvml")
    until(lambda: started.request("/-/ready")[0] == 200, 60)
    return started


@scenes
def test_a_flush_returns_what_was_predicted_and_the_driver_agrees(daemon: RunningDaemon, scene: Scene):
    if reason := scene.missing():
        pytest.skip(reason)
    figures = flush(daemon, scene)
    assert figures["outcome"] == "freed", figures
    assert figures["expected"]["low"] <= figures["released_bytes"] <= figures["expected"]["high"]
    if scene.name != "torch-async":
        assert abs(figures["released_bytes"] - figures["expected"]["likely"]) <= 0.01 * figures["held_bytes"]
    assert abs(figures["driver_released_bytes"] - figures["released_bytes"]) <= 64 * MIB
    assert figures["ledger_residual_bytes"] == 0


def test_two_programs_on_one_card_are_told_apart(daemon: RunningDaemon):
    scene = SCENES[0]
    if reason := scene.missing():
        pytest.skip(reason)
    with ExitStack() as running:
        one, two = (running.enter_context(program(daemon, scene, name)) for name in ("one", "two"))
        held = {pid: until(lambda pid=pid: shares(daemon, pid)) for pid in (one, two)}
        assert held[one]["live"] == held[two]["live"]
        _, answer, _ = daemon.flush(target={"workload": "one"})
        assert {receipt["pid"] for receipt in answer["receipts"]} == {one}
        assert shares(daemon, two)["cached"] == held[two]["cached"]


def test_the_ledger_of_the_card_adds_up(daemon: RunningDaemon):
    scene = SCENES[0]
    if reason := scene.missing():
        pytest.skip(reason)
    with program(daemon, scene, scene.name):
        series = daemon.series()
    for (name, labels), used in series.items():
        if name == "gpumond_device_memory_used_bytes":
            uuid = dict(labels)["uuid"]
            lines = sum(v for (n, own), v in series.items() if n == "gpumond_memory_bytes" and ("uuid", uuid) in own)
            assert lines == used + series["gpumond_memory_overcount_bytes", labels]
