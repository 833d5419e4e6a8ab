"""The key of `gpumond top` that shows what a program's memory consists of."""

from __future__ import annotations

from typing import Any

import pytest

from gpumond.facts.frame import Verdict
from tests.helpers.agents import GIB
from tests.helpers.frames import busy_frame, fake_daemon
from tests.helpers.screens import top

pytestmark = pytest.mark.slow
LEAK = Verdict(
    device_uuid="GPU-a",
    pid=10,
    start_ticks=100,
    kind="leak",
    since=5.0,
    summary="train is leaking 1.0 GiB/min; retained by `losses` in `leak` at train.py:125 (24 tensors added in 20 s)",
)
CLASSES: dict[str, Any] = {
    "allocator": "torch",
    "device_uuid": "GPU-a",
    "live_bytes": 4 * GIB,
    "parameters_bytes": 3 * GIB,
    "gradients_bytes": 0,
    "optimizer_bytes": 0,
    "buffers_bytes": 0,
    "tensors_bytes": GIB,
    "activations_bytes": 0,
    "excess_bytes": 0,
}
WHY: dict[str, Any] = {
    "classes": [CLASSES],
    "sites": [],
    "unrecorded_bytes": 0,
    "kv_cache_bytes": None,
    "advice": [],
    "snapshot": None,
    "folded": None,
    "reason": "",
    "paused_seconds": 0.0,
    "age_seconds": 0.0,
}


def test_key_w_shows_the_line_that_leaks_and_the_classes_of_live_memory():
    with fake_daemon(busy_frame(verdicts=(LEAK,))) as fake, top(fake.url, size=(120, 24)) as session:
        fake.answers["/api/v1/agents/10/why"] = (200, WHY)
        session.shows("train")
        session.press("w")
        screen = session.shows(
            "memory of train (pid 10)", "torch on GPU 0: 4.0 GiB live", "--record", f"GPUMOND_URL={fake.url}"
        )
        lines = [line.strip() for line in screen.splitlines() if line.strip()]
        assert "retained by `losses` in `leak` at train.py:125" in lines[2]
        assert next(line.split() for line in lines if "%" in line)[:3] == ["3.0", "GiB", "75%"]
        session.press("w")
        session.shows("VERDICT", without="memory of train")


def test_program_without_an_answer_states_why():
    with fake_daemon(busy_frame()) as fake, top(fake.url) as session:
        fake.answers["/api/v1/agents/10/why"] = (404, {"detail": "no agent has this pid"})
        session.shows("train")
        session.press("w")
        session.shows("no agent has this pid")
