"""Answers of Prometheus's query_range."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumond.facts.errors import ConfigError
from tests.helpers.agents import GIB
from tests.recordings.reading import elapsed, read, read_with_notices, used
from tests.recordings.samples import answer, series

MIB = 1024**2


DCGM = {"gpu": "3", "UUID": "GPU-a", "instance": "node1:9400", "modelName": "NVIDIA H100"}


@pytest.mark.parametrize(
    ("log", "size"),
    [
        ([series("gpumond_device_memory_used_bytes", 100 * MIB, 200 * MIB, uuid="GPU-a", gpu="0")], None),
        (
            [
                series("DCGM_FI_DEV_FB_USED", 100, 200, **DCGM),
                series("DCGM_FI_DEV_FB_FREE", 924, 824, **DCGM),
                series("DCGM_FI_DEV_GPU_UTIL", 50, 50, **DCGM),
            ],
            GIB,
        ),
        (
            [
                series("DCGM_FI_DEV_FB_USED_BYTES", 100 * MIB, 200 * MIB, **DCGM),
                series("DCGM_FI_DEV_FB_CAPACITY_BYTES", GIB, GIB, **DCGM),
                series("DCGM_FI_DEV_GPU_UTIL_RATIO", 0.5, 0.5, **DCGM),
            ],
            GIB,
        ),
        (
            [
                series("nvidia_smi_memory_used_bytes", 100 * MIB, 200 * MIB, uuid="GPU-a"),
                series("nvidia_smi_memory_total_bytes", GIB, GIB, uuid="GPU-a"),
            ],
            GIB,
        ),
        (
            [
                series("gpu_memory_used_MiB", 100, 200, uuid="GPU-a", hostname="n", index="0"),
                series("gpu_memory_total_MiB", 1024, 1024, uuid="GPU-a", hostname="n", index="0"),
            ],
            GIB,
        ),
        (
            [
                series("hw_gpu_memory_usage_bytes", 100 * MIB, 200 * MIB, hw_id="GPU-a"),
                series("hw_gpu_memory_limit_bytes", GIB, GIB, hw_id="GPU-a"),
                series("hw_gpu_utilization_ratio", 0.5, 0.5, hw_id="GPU-a", hw_gpu_task="general"),
                series("hw_gpu_utilization_ratio", 0.1, 0.1, hw_id="GPU-a", hw_gpu_task="encoder"),
            ],
            GIB,
        ),
        (
            [
                series("hw.gpu.memory.usage", 100 * MIB, 200 * MIB, **{"hw.id": "GPU-a"}),
                series("hw.gpu.memory.limit", GIB, GIB, **{"hw.id": "GPU-a"}),
            ],
            GIB,
        ),
        ([series("", 100 * MIB, 200 * MIB, uuid="GPU-a")], None),
        ([series("nvidia_smi_memory_used_bytes", 100 * MIB, 200 * MIB, uuid="GPU-a"), series("up", 1, 1)], None),
    ],
    ids=[
        "gpumond",
        "dcgm",
        "dcgm-4.9",
        "nvidia_gpu_exporter",
        "nvitop",
        "otel",
        "otel-utf-8",
        "expression",
        "with-others",
    ],
)
def test_exporters_are_read_in_their_own_units(log: list[dict[str, Any]], size: int | None):
    snapshots = read(answer(*log))
    assert (elapsed(snapshots), used(snapshots, "GPU-a")) == ([0, 15], [100 * MIB, 200 * MIB])
    assert snapshots[0].devices[0].size_bytes == size
    assert snapshots[0].devices[0].processes is None


def test_dcgm_has_name_index_and_utilization():
    snapshots = read(answer(series("DCGM_FI_DEV_FB_USED", 1, **DCGM), series("DCGM_FI_DEV_GPU_UTIL", 50, **DCGM)))
    device = snapshots[0].devices[0]
    assert (device.index, device.name, device.sensors.gpu_utilization_ratio) == (3, "NVIDIA H100", 0.5)


def test_answer_has_processes_and_their_pools():
    own = {"uuid": "GPU-a", "pid": "7"}
    snapshots = read(
        answer(
            series("gpumond_process_memory_used_bytes", 50, 60, **own),
            series("gpumond_pool_live_bytes", 10, 20, allocator="torch", **own),
            series("gpumond_pool_live_bytes", 1, 1, allocator="cupy", **own),
            series("gpumond_pool_held_bytes", 30, 30, allocator="torch", **own),
            series("gpumond_process_memory_used_bytes", 9, 9, uuid="GPU-a", pid="other"),
        )
    )
    assert [[(p.pid, p.used_bytes) for p in s.devices[0].processes or ()] for s in snapshots] == [[(7, 50)], [(7, 60)]]
    assert [(s.reports[0].pools[0].live_bytes, s.reports[0].pools[0].held_bytes) for s in snapshots] == [
        (11, 30),
        (21, 30),
    ]


def test_device_in_two_instances_remains_two_series():
    log = answer(
        series("", 5, 6, uuid="GPU-a", instance="one"),
        series("", 7, 8, uuid="GPU-a", instance="two"),
    )
    assert used(read(log), "two GPU-a") == [7, 8]


def test_successive_pods_on_a_device_are_one_series():
    first, second = (
        series("DCGM_FI_DEV_FB_USED", 1, 2, pod="x", **DCGM),
        series("DCGM_FI_DEV_FB_USED", 0, 0, 3, pod="y", **DCGM),
    )
    second["values"] = second["values"][2:]
    assert used(read(answer(first, second)), "GPU-a") == [1 * MIB, 2 * MIB, 3 * MIB]


def test_conflicting_series_of_one_device_are_refused_with_the_remedy():
    log = answer(series("", 5, uuid="GPU-a", job="x"), series("", 6, uuid="GPU-a", job="y"))
    with pytest.raises(ConfigError, match=r"two different series of GPU-a; combine them with: max by"):
        read(log)


def test_non_numbers_are_not_readings():
    assert used(read(answer(series("", 5, float("nan"), float("inf"), 6, uuid="a"))), "a") == [5, 6]


@pytest.mark.parametrize("indent", [None, 2])
def test_answer_is_read_without_its_envelope_and_pretty_printed(indent: int | None):
    assert used(read(json.dumps([series("", 5, uuid="a")], indent=indent)), "a") == [5]
    assert used(read(json.dumps(json.loads(answer(series("", 5, uuid="a")))["data"], indent=indent)), "a") == [5]


@pytest.mark.parametrize(
    ("log", "complaint"),
    [
        ('{"status":"success","data":', "line 1: not JSON, or truncated.*query_range"),
        (json.dumps({"status": "error", "error": "bad query"}), "Prometheus returned an error: bad query"),
        (json.dumps({"data": {"resultType": "vector", "result": []}}), "the result is an instant query's vector"),
        (json.dumps({"data": {"result": [{"metric": {}}]}}), "not a matrix of series"),
        (json.dumps({"data": {"result": [{"metric": {}, "values": [[1]]}]}}), r"isn't \[time, value\]"),
        (answer(), "no memory-usage series found; query one of gpumond_device_memory_used_bytes"),
        (answer(series("up", 1)), "no memory-usage series found"),
        ("[1, 2]", "not a matrix"),
        ("{" * 100_000, "not JSON"),
    ],
)
def test_unusable_answer_is_refused(log: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        read(log, "prometheus")


def test_ignored_lines_are_reported():
    _, remarks = read_with_notices(answer(series("", 5, uuid="a"), series("up", 1)))
    assert remarks == ["the series up don't describe device memory; they are ignored"]


def test_name_of_a_device_is_no_name_of_its_processes():
    labels = {"uuid": "GPU-a", "hostname": "n", "index": "0", "devicename": "NVIDIA H100"}
    process = series("process_gpu_memory_MiB", 60, 70, pid="7", username="ada", **labels)
    (device,) = read(answer(series("gpu_memory_used_MiB", 100, 200, **labels), process))[0].devices
    assert (device.name, [(p.pid, p.used_bytes, p.comm) for p in device.processes or ()]) == (
        "NVIDIA H100",
        [(7, 60 * MIB, None)],
    )


def test_utilization_of_opentelemetry_is_that_of_the_general_task():
    tasks = [
        series("hw_gpu_utilization_ratio", value, hw_id="a", hw_gpu_task=name)
        for name, value in (("encoder", 0.1), ("general", 0.5))
    ]
    (device,) = read(answer(series("hw_gpu_memory_usage_bytes", 5, hw_id="a", hw_name="H100"), *tasks))[0].devices
    assert (device.name, device.sensors.gpu_utilization_ratio) == ("H100", 0.5)
