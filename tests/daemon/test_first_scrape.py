"""The first scrape after the start waits for the first frame, within a limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from gpumond.config.settings import Settings
from gpumond.core import Clock, Core, Dependencies
from gpumond.facts.frame import Frame, Ledger
from gpumond.metrics.telemetry import Telemetry
from tests.helpers.values import make_snapshot


def make_core() -> Core:
    store = SimpleNamespace(path=Path("gpumond.db"), audit=None)
    dependencies = SimpleNamespace(
        devices=None, agents=None, store=store, telemetry=Telemetry(), clock=Clock(), faults={}, services={}
    )
    return Core(Settings(), cast("Dependencies", dependencies))


def test_first_scrape_waits_for_the_first_frame():
    async def run() -> bytes:
        current = make_core()
        scrape = asyncio.ensure_future(current.metrics(""))
        await asyncio.sleep(0.01)
        assert not scrape.done()
        current.set_frame(Frame(make_snapshot(), Ledger(())))
        return (await scrape).body

    assert b"\ngpumond_driver_up " in asyncio.run(run())


def test_first_scrape_of_a_driver_that_hangs_has_the_counters_of_the_daemon():
    async def run() -> bytes:
        core = make_core()
        core.first_frame_seconds = 0.01
        return (await core.metrics("")).body

    page = asyncio.run(run())
    assert b"\ngpumond_driver_up " not in page
    assert b"\ngpumond_build_info{" in page
