"""Random frames, and their documents in the stream of events."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from gpumond.facts.frame import Alert, Frame, FullFrame, Verdict
from gpumond.facts.snapshot import Sensors
from gpumond.serve.full_frame import full_frame
from gpumond.serve.live import FULL_FRAME_ADAPTER, frame_changes, live_frame
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_fault, make_pool, make_process, make_report, make_snapshot


def random_frame(rng: random.Random, seq: int) -> Frame:
    """Return a frame of few devices and processes, so successive frames have many of them in common."""
    devices, reports = [], []
    for index in rng.sample(range(3), rng.randint(0, 3)):
        uuid = f"GPU-{index}"
        pids = rng.sample(range(1, 6), rng.randint(0, 4))
        used = {pid: rng.choice((None, rng.randint(1, 3) * GIB)) for pid in pids}
        processes = tuple(make_process(pid, used[pid], idle_seconds=rng.choice((None, 0.0, 7.0))) for pid in pids)
        sensors = Sensors(power_watts=rng.choice((None, 100.5, float("nan"))))
        listed = rng.choice((processes, processes, None))
        devices.append(make_device(uuid, index=index, used_bytes=9 * GIB, processes=listed, sensors=sensors))
        for pid in pids:
            if rng.random() < 0.5 and all(report.pid != pid for report in reports):
                pools = (make_pool(uuid, live=rng.randint(0, GIB), cached=rng.randint(0, GIB)),)
                reports.append(make_report(pid, pools, workload=rng.choice(("train", "\u2028<ü>"))))
    faults = tuple(make_fault(rng.choice((None, "GPU-0"))) for _ in range(rng.randint(0, 1)))
    snapshot = make_snapshot(*devices, seq=seq, taken_at=1e6 + seq, reports=tuple(reports), faults=faults)
    verdicts = [
        Verdict(device_uuid="GPU-0", pid=pid, start_ticks=100, kind="leak", since=1.0, evidence=(("points", seq),))
        for pid in rng.sample(range(1, 6), rng.randint(0, 2))
    ]
    alert = Alert(
        rule="full", phase="firing", labels=(("gpu", "0"),), annotations=(), value=rng.random(), active_at=1.0
    )
    alerts = tuple(replace(alert, pid=rng.choice((None, 1))) for _ in range(rng.randint(0, 2)))  # keys may be equal
    return Frame(snapshot, make_ledger(snapshot), tuple(verdicts), alerts)


def random_wholes(seed: int, count: int = 12) -> list[FullFrame]:
    rng = random.Random(seed)
    frames = [live_frame(full_frame(random_frame(rng, seq))) for seq in range(count)]
    return [frame for frame in frames for _ in range(rng.randint(1, 2))]


def as_json(whole: FullFrame) -> Any:
    return json.loads(FULL_FRAME_ADAPTER.dump_json(whole))


def changes_as_json(before: FullFrame, after: FullFrame) -> Any:
    return json.loads(to_json(frame_changes(before, after), inf_nan_mode="null"))
