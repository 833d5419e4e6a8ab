"""Acknowledged changes survive a loss of power; bench.power tests thousands of times of loss."""

from __future__ import annotations

from random import Random

import pytest

from tests.store.losing_power import losses, record
from tests.store.power import Disk, Event, build, without_commit_syncs, without_syncs

EDITS = 90
LOSSES = 60


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    """Events of three daemon processes."""
    directory = tmp_path_factory.mktemp("power")
    return record(directory, build(directory), EDITS)


@pytest.mark.needs("cc")
def test_acknowledged_rules_and_audit_entries_survive_a_loss_of_power(events: list[Event]):
    assert losses(events, LOSSES) == []


@pytest.mark.needs("cc")
def test_synchronous_normal_would_lose_changes_but_not_consistency(events: list[Event]):
    lost = losses(without_commit_syncs(events), LOSSES)
    assert len(lost) > LOSSES / 4
    errors = ("not what was acknowledged", "entries were missing when a daemon started")
    assert all(any(one in each for one in errors) for each in lost)


@pytest.mark.needs("cc")
def test_disk_that_never_syncs_would_lose_changes(events: list[Event]):
    assert len(losses(without_syncs(events), LOSSES)) > LOSSES / 4


def test_disk_keeps_synced_data_and_any_sectors_of_the_rest():
    disk, rng = Disk(), Random(1)
    for event in (
        Event("c", "/d/kept", 0, b""),
        Event("w", "/d/kept", 0, b"a" * 1024),
        Event("s", "/d/kept", 0, b""),
        Event("s", "/d", 0, b""),
        Event("w", "/d/kept", 0, b"b" * 1024),
        Event("r", "/d/kept", 0, b"/d/renamed"),
        Event("c", "/d/new", 0, b""),
    ):
        disk.add(event)
    assert disk.held() == {"/d/renamed": b"b" * 1024, "/d/new": b""}
    found = [disk.after_power_loss(rng) for _ in range(200)]
    names = {tuple(sorted(each)) for each in found}
    assert names == {("/d/kept",), ("/d/renamed",), ("/d/kept", "/d/new"), ("/d/new", "/d/renamed")}
    contents = {each.get("/d/kept", b"") + each.get("/d/renamed", b"") for each in found}
    assert contents == {one * 512 + other * 512 for one in (b"a", b"b") for other in (b"a", b"b")}
