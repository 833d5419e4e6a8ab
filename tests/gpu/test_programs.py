"""PyTorch and CuPy programs on a real device, attributed and flushed with a receipt."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.gpu.gpu_programs import MIB, PROGRAMS, GpuProgram, flush, running, shares
from tests.helpers.running import RunningDaemon, until

pytestmark = pytest.mark.gpu
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


@each_program
def test_flush_returns_the_predicted_bytes_and_the_driver_agrees(daemon: RunningDaemon, program: GpuProgram):
    if reason := program.missing():
        pytest.skip(reason)
    figures = flush(daemon, program)
    assert figures["outcome"] == "freed", figures
    assert figures["expected"]["low"] <= figures["released_bytes"] <= figures["expected"]["high"]
    if program.name != "torch-async":
        assert abs(figures["released_bytes"] - figures["expected"]["likely"]) <= 0.01 * figures["held_bytes"]
    assert abs(figures["driver_released_bytes"] - figures["released_bytes"]) <= 64 * MIB
    assert figures["ledger_residual_bytes"] == 0


def test_two_programs_on_one_device_are_distinguished(daemon: RunningDaemon):
    program = PROGRAMS[0]
    if reason := program.missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        one, two = (stack.enter_context(running(daemon, program, name)) for name in ("one", "two"))
        held = {pid: until(lambda pid=pid: shares(daemon, pid)) for pid in (one, two)}
        assert held[one]["live"] == held[two]["live"]
        _, answer, _ = daemon.flush(target={"workload": "one"})
        assert {receipt["pid"] for receipt in answer["receipts"]} == {one}
        assert shares(daemon, two)["cached"] == held[two]["cached"]


def test_ledger_of_the_device_adds_up(daemon: RunningDaemon):
    program = PROGRAMS[0]
    if reason := program.missing():
        pytest.skip(reason)
    with running(daemon, program, program.name):
        series = daemon.series()
    for (name, labels), used in series.items():
        if name == "gpumond_device_memory_used_bytes":
            uuid = dict(labels)["uuid"]
            lines = sum(v for (n, own), v in series.items() if n == "gpumond_memory_bytes" and ("uuid", uuid) in own)
            assert lines == used + series["gpumond_memory_overcount_bytes", labels]
