"""The first scrape after the start waits for the first frame, within a limit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from gpumond.config.settings import Settings
from gpumond.daemon import kernel as parts
from gpumond.daemon.kernel import CurrentFrame, Edges
from gpumond.facts.frame import Frame, Ledger
from gpumond.metrics.telemetry import Telemetry
from gpumond.testing import make_snapshot


def current_frame() -> CurrentFrame:
    edges = SimpleNamespace(telemetry=Telemetry(), clock=SimpleNamespace(monotonic=lambda: 0.0))
    return CurrentFrame(cast("Edges", edges), Settings())


def test_first_scrape_waits_for_the_first_frame():
    async def run() -> bytes:
        current = current_frame()
        scrape = asyncio.ensure_future(current.metrics(""))
        await asyncio.sleep(0.01)
        assert not scrape.done()
        current.swap(Frame(make_snapshot(), Ledger(())))
        return (await scrape).plain

    assert b"\ngpumond_driver_up " in asyncio.run(run())


def test_first_scrape_of_a_driver_that_hangs_has_the_counters_of_the_daemon(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "FIRST_FRAME_SECONDS", 0.01)
    page = asyncio.run(current_frame().metrics("")).plain
    assert b"\ngpumond_driver_up " not in page
    assert b"\ngpumond_build_info{" in page
