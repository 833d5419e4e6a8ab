"""A job of two ranks on two real devices: labels, ledger, the rank that holds more, and one wave of a flush.

Needs two NVIDIA devices and torch (CUDA, NCCL).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.gpu_programs import MIB, REPORT_SECONDS, reported
from tests.helpers.running import RunningDaemon, free_port, until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

MORE = 3072 * MIB
"""Bytes that rank 1 keeps and rank 0 does not."""
CACHED = 1024 * MIB
"""Bytes that each rank allocates at once and frees."""
PROGRAM = f"""
import os, time, torch
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(4096, 4096).cuda())
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(64, 4096, device="cuda")).sum().backward()
    optimizer.step()
kept = torch.empty({MORE} if rank else 1, dtype=torch.uint8, device="cuda")
del [torch.empty({CACHED}, dtype=torch.uint8, device="cuda")][:]
torch.cuda.synchronize()
torch.distributed.barrier()
with open(f"live{{rank}}", "w") as file:
    file.write(str(torch.cuda.memory_allocated()))
open(f"ready{{rank}}", "w").close()
while os.path.exists("ready0"):
    time.sleep(0.1)
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def job(daemon: RunningDaemon, tmp_path: Path) -> Iterator[RunningDaemon]:
    """The daemon, once it has a complete report of both ranks."""
    count = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], capture_output=True, text=True
    )
    if count.returncode:
        pytest.skip("needs torch")
    if int(count.stdout) < 2:
        pytest.skip("needs two NVIDIA devices")
    (tmp_path / "train.py").write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), "train.py"]
    command = [sys.executable, "-m", "gpumond", "run", "--workload", "job", "--", *launcher]
    log = tmp_path / "job.log"
    flags = [tmp_path / f"ready{rank}" for rank in range(2)]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=tmp_path, env=daemon.environ, stdout=output, stderr=output) as process,
    ):
        try:
            until(lambda: process.poll() is not None or all(flag.exists() for flag in flags), 120)
            assert process.poll() is None, log.read_text()
            since = time.time() + REPORT_SECONDS
            until(lambda: reported(daemon, "job", since) and len(ranks(daemon)) == 2, 60)
            yield daemon
        finally:
            for flag in flags:
                flag.unlink(missing_ok=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=60)
            process.kill()


def ranks(daemon: RunningDaemon) -> dict[str, int]:
    """Return the pid of each rank."""
    infos = (dict(labels) for (name, labels), _ in daemon.series().items() if name == "gpumond_process_info")
    job = [labels for labels in infos if labels["workload"] == "job" and labels["rank"]]
    assert all(labels["world_size"] == "2" for labels in job)
    return {labels["rank"]: int(labels["pid"]) for labels in job}


def per_process(daemon: RunningDaemon) -> dict[int, dict[str, Any]]:
    frame = daemon.get("frame")
    for device in frame["snapshot"]["devices"]:
        lines = [line for line in frame["ledger"]["lines"] if line["device_uuid"] == device["uuid"]]
        assert sum(line["used_bytes"] for line in lines) == device["used_bytes"]
    assert [each for each in frame["ledger"]["overcounts"] if each["overcount_bytes"]] == []
    return {each["pid"]: each for each in frame["processes"]}


def test_ranks_add_up_and_the_outlier_is_seen(job: RunningDaemon, tmp_path: Path) -> None:
    pids, processes = ranks(job), per_process(job)
    zero, one = (processes[pids[rank]] for rank in ("0", "1"))
    assert [zero["live_bytes"], one["live_bytes"]] == [int((tmp_path / f"live{rank}").read_text()) for rank in range(2)]
    assert one["live_bytes"] - zero["live_bytes"] > MORE / 2
    assert min(zero["cached_bytes"], one["cached_bytes"]) >= CACHED


def test_fleet_flush_treats_both_ranks_in_one_wave(job: RunningDaemon, tmp_path: Path) -> None:
    targets = tmp_path / "targets.json"
    targets.write_text(json.dumps([{"targets": [job.url.removeprefix("http://")], "labels": {}}]))
    before = per_process(job)
    command = ["fleet", "flush", "--targets", str(targets), "--token-file", str(job.directory / "token")]
    done = job.run(*command, "--workload", "job", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert {each["wave"] for each in results} == {1}
    receipts = {each["pid"]: receipt for each in results for receipt in each["receipts"]}
    assert receipts.keys() == set(ranks(job).values())
    for pid, receipt in receipts.items():
        assert receipt["outcome"] == "freed"
        assert receipt["released_bytes"] >= CACHED
        assert abs(receipt["driver_released_bytes"] - receipt["released_bytes"]) <= 64 * MIB
        until(lambda pid=pid: per_process(job)[pid]["used_bytes"] <= before[pid]["used_bytes"] - CACHED, 60)
