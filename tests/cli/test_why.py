"""``gpumond why``: its text, and the requests that it sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumond.api.agents import WHY, WHY_EXAMPLE, Why
from gpumond.api.examples import GIB, LIVE_CLASSES
from gpumond.cli.why import lines
from tests.top.frames import FakeDaemon, busy_frame, fake_daemon

PATH = "/api/v1/agents/4242"
CLASSES = Why(classes=(LIVE_CLASSES,))


def shown(why: Why) -> list[str]:
    return [" ".join(line.split()) for line in lines(WHY.dump_python(why, mode="json"))]


def run(fake: FakeDaemon, *options: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "GPUMOND_TOKEN": "secret"}
    line = [sys.executable, "-m", "gpumond", "why", "--pid", "4242", "--url", fake.url, *options]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)


def test_classes_have_their_size_and_their_part_of_the_live_bytes():
    first, *classes = shown(CLASSES)
    assert first.endswith("40.0 GiB live")
    assert classes == [
        "4.0 GiB 10% parameters",
        "4.0 GiB 10% gradients",
        "8.0 GiB 20% optimizer state",
        "0 B 0% buffers",
        "2.0 GiB 5% other leaf tensors",
        "22.0 GiB 55% activations, the rest",
    ]


def test_inexact_classes_and_parts_of_others_are_stated():
    inexact = replace(CLASSES, classes=(replace(LIVE_CLASSES, exactness="sampled", excess_bytes=GIB),))
    text = "\n".join(shown(replace(inexact, kv_cache_bytes=GIB)))
    assert "40.0 GiB live, sampled: not every tensor was visited in time" in text
    assert "1.0 GiB of these are KV cache" in text
    assert "1.0 GiB of these belong to another allocator" in text


def test_sites_of_a_recording_and_advice_follow_the_classes():
    text = "\n".join(shown(WHY_EXAMPLE))
    assert "12.0 GiB train.py:31 step < train.py:50 main" in text
    assert "1.0 GiB allocated before the recording" in text
    for name in ("snapshot: /home/research", "treemap: /home/research", "advice: use a smaller batch"):
        assert name in text


def test_recording_is_requested_and_its_treemap_fetched(tmp_path: Path):
    answer: Any = WHY.dump_python(WHY_EXAMPLE, mode="json")
    with fake_daemon(busy_frame()) as fake:
        fake.answers |= {f"{PATH}/why": (200, answer), f"{PATH}/snapshots/2": (200, "treemap")}
        done = run(fake, "--record", "60s", "--html", os.fspath(tmp_path / "memory.html"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == answer
    assert fake.requests == [(f"{PATH}/why", {"record_seconds": 60.0}), (f"{PATH}/snapshots/2", None)]
    assert (tmp_path / "memory.html").read_text() == '"treemap"'


def test_refusal_of_the_program_is_the_message():
    refusal = {"detail": "this program's flush_policy is step: its history is not recorded"}
    with fake_daemon(busy_frame()) as fake:
        fake.answers[f"{PATH}/why"] = (409, refusal)
        done = run(fake)
        wrong = run(fake, "--record", "soon")
    assert (done.returncode, done.stdout) == (1, "")
    assert refusal["detail"] in done.stderr
    assert (wrong.returncode, "--record 'soon'" in wrong.stderr) == (2, True)
