"""Series of owners: their sums, what is unknown, and their number in a day."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from bench.series_of_a_day import BOUNDED, frame as frame_of_a_day, series_of_a_day
from gpumond.facts.frame import Frame, Verdict
from gpumond.facts.snapshot import Owner
from gpumond.metrics.exposition import Exposition, Group, ScrapeFormat
from gpumond.metrics.owners import MAX_OWNERS, OWNER_RETENTION_SECONDS, owners_with_series
from gpumond.metrics.telemetry import Telemetry
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

NEW_SERIES_OF_A_DAY = 2_000
ADA, BOB = {"user": "ada", "uid": 1}, {"user": "bob", "uid": 2, "pod_namespace": "lab"}


def values(frame: Frame, *groups: Group) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return the values of each metric by its labels that are not empty."""
    text = (
        Exposition(Telemetry()).scrape(frame, ScrapeFormat(False, groups=frozenset(groups or ("owner",)))).body.decode()
    )
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in parse(text):
        for sample in family.samples:
            labels = frozenset((name, text) for name, text in sample.labels.items() if text)
            found.setdefault(sample.name.removeprefix("gpumond_owner_"), {})[labels] = sample.value
    return found


def owner(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(({"model": "H100"} | labels).items())


def shared_machine() -> Frame:
    """Return a frame with two devices: train of bob with an agent on both, another of his, and one of ada without."""
    devices = (
        make_device(
            "GPU-a",
            name="H100",
            used_bytes=30 * GIB,
            processes=(make_process(10, 12 * GIB, **BOB), make_process(11, 10 * GIB, **ADA)),
        ),
        make_device("GPU-b", index=1, name="H100", used_bytes=9 * GIB, processes=(make_process(10, 9 * GIB, **BOB),)),
        make_device("GPU-c", index=2, name="A100", used_bytes=6 * GIB, processes=(make_process(12, 6 * GIB, **BOB),)),
    )
    pools = (
        make_pool("GPU-a", live=4 * GIB, cached=5 * GIB, stranded=2 * GIB),
        make_pool("GPU-b", live=6 * GIB, cached=GIB, stranded=GIB),
    )
    reports = (
        make_report(10, pools, workload="train", account="physics"),
        make_report(12, (make_pool("GPU-c", live=2 * GIB, cached=3 * GIB),), workload="serve"),
    )
    snapshot = make_snapshot(*devices, reports=reports)
    idle = Verdict(device_uuid="GPU-c", pid=12, start_ticks=100, kind="idle-holder", since=1.0)
    leak = Verdict(
        device_uuid="GPU-a", pid=10, start_ticks=100, kind="leak", since=1.0, time_to_full_seconds=600.0, summary=""
    )
    return Frame(snapshot, make_ledger(snapshot), (idle, leak, replace(leak, device_uuid="GPU-b", kind="steady")))


def test_memory_is_summed_by_owner_and_model():
    found = values(shared_machine())
    train = owner(user="bob", pod_namespace="lab", workload="train", slurm_account="physics")
    serve = owner(user="bob", pod_namespace="lab", workload="serve", model="A100")
    ada = owner(user="ada")
    assert found["used_bytes"] == {train: 21 * GIB, serve: 6 * GIB, ada: 10 * GIB}
    assert found["live_bytes"] == {train: 10 * GIB, serve: 2 * GIB}
    assert found["cached_bytes"] == {train: 6 * GIB, serve: 3 * GIB}
    assert found["stranded_bytes"] == {train: 3 * GIB, serve: 0}
    assert found["idle_held_bytes"] == {train: 0, serve: 6 * GIB, ada: 0}
    assert found["idle_and_reclaimable_bytes"] == {train: 6 * GIB, serve: 6 * GIB}
    assert found["wasted_bytes"] == {train: 9 * GIB, serve: 6 * GIB}
    assert found["processes"] == {train: 1, serve: 1, ada: 1}
    assert found["agent_processes"] == {train: 1, serve: 1, ada: 0}


def test_verdicts_and_time_to_full_have_an_owner():
    found = values(shared_machine())
    train = {("user", "bob"), ("pod_namespace", "lab"), ("workload", "train"), ("slurm_account", "physics")}
    serve = {("user", "bob"), ("pod_namespace", "lab"), ("workload", "serve")}
    assert found["verdicts"] == {
        frozenset(train | {("kind", "leak")}): 1,
        frozenset(serve | {("kind", "idle-holder")}): 1,
    }
    assert found["time_to_full_seconds"] == {frozenset(train): 600.0}


def test_owners_and_unattributed_memory_are_used_memory():
    frame = shared_machine()
    found = values(frame, "owner", "device")
    of_owners = sum(found["used_bytes"].values())
    shares = found["gpumond_device_memory_share_bytes"]
    unattributed = sum(value for labels, value in shares.items() if ("share", "unattributed") in labels)
    assert of_owners + unattributed == sum(found["gpumond_device_memory_used_bytes"].values()) == 45 * GIB
    assert sum(shares.values()) == 45 * GIB


def test_sums_of_the_machine_are_those_of_its_devices_and_owners():
    frame = shared_machine()
    found = {name.removeprefix("gpumond_machine_"): own for name, own in values(frame, "device").items()}
    whole = {name: found[name][frozenset()] for name in ("memory_size_bytes", "memory_used_bytes", "idle_held_bytes")}
    assert whole == {"memory_size_bytes": 240 * GIB, "memory_used_bytes": 45 * GIB, "idle_held_bytes": 6 * GIB}
    owned = values(frame)
    shares = {dict(labels)["share"]: size for labels, size in found["memory_share_bytes"].items()}
    assert sum(shares.values()) == 45 * GIB
    assert found["idle_and_reclaimable_bytes"][frozenset()] == sum(owned["idle_and_reclaimable_bytes"].values())
    assert found["wasted_bytes"][frozenset()] == sum(owned["wasted_bytes"].values()) + shares["unattributed"]
    assert (found["processes"][frozenset()], found["agent_processes"][frozenset()]) == (3, 2)


def test_machine_without_a_known_device_has_no_sums():
    snapshot = make_snapshot(make_device(used_bytes=None, free_bytes=None))
    found = values(Frame(snapshot, make_ledger(snapshot)), "device")
    assert not [name for name in found if name.startswith("gpumond_machine_")]
    snapshot = make_snapshot(make_device(used_bytes=0))
    found = values(Frame(snapshot, make_ledger(snapshot)), "device")
    assert found["gpumond_machine_processes"] == found["gpumond_machine_wasted_bytes"] == {frozenset(): 0}


def test_memory_of_a_mig_instance_counts_once():
    used = (make_process(10, 5 * GIB, **ADA),)
    whole = make_device("GPU-a", name="H100", used_bytes=5 * GIB, processes=used)
    instance = make_device("MIG-a", name="H100 MIG", parent_uuid="GPU-a", used_bytes=5 * GIB, processes=used)
    report = make_report(10, (make_pool("MIG-a", live=4 * GIB),), uid=1)
    snapshot = make_snapshot(whole, instance, reports=(report,))
    found = values(Frame(snapshot, make_ledger(snapshot)))
    ada = owner(user="ada", workload="train")
    assert (found["used_bytes"], found["live_bytes"]) == ({ada: 5 * GIB}, {ada: 4 * GIB})


def test_program_that_the_driver_does_not_list_belongs_to_the_user_of_its_agent():
    device = make_device("GPU-a", name="H100", used_bytes=5 * GIB, processes=None)
    snapshot = make_snapshot(device, reports=(make_report(10, (make_pool("GPU-a", live=4 * GIB),), uid=1000),))
    found = values(Frame(snapshot, make_ledger(snapshot)))
    assert found["live_bytes"] == {owner(user="1000", workload="train"): 4 * GIB}


def programs(*workloads: str, at: float, user: str = "ada") -> Frame:
    """Return a frame in which a program of each of these workloads uses one GiB."""
    pids = range(10, 10 + len(workloads))
    listed = tuple(make_process(pid, GIB, user=user, uid=1) for pid in pids)
    reports = tuple(
        make_report(pid, (make_pool(live=GIB),), workload=workload)
        for pid, workload in zip(pids, workloads, strict=True)
    )
    device = make_device(name="H100", used_bytes=len(workloads) * GIB, processes=listed)
    snapshot = make_snapshot(device, reports=reports, elapsed_seconds=at)
    return Frame(snapshot, make_ledger(snapshot))


def with_owners(frame: Frame, before: Mapping[Owner, float] | None = None) -> Frame:
    return replace(frame, owners=owners_with_series(before or {}, frame.snapshot))


def test_owners_beyond_the_limit_are_summed_without_their_workload():
    names = [f"run-{number}" for number in range(MAX_OWNERS + 3)]
    frame = with_owners(programs(*names, at=1.0))
    used = values(frame)["used_bytes"]
    assert len(used) == MAX_OWNERS + 1
    assert used[owner(user="ada")] == 3 * GIB
    assert sum(used.values()) == len(names) * GIB


def test_owner_keeps_its_place_for_a_day():
    names = [f"run-{number}" for number in range(MAX_OWNERS)]
    first = with_owners(programs(*names, at=0.0))
    soon = with_owners(programs("new", at=OWNER_RETENTION_SECONDS - 1), first.owners)
    assert values(soon)["used_bytes"] == {owner(user="ada"): GIB}
    assert values(with_owners(programs("run-1", at=OWNER_RETENTION_SECONDS - 1), first.owners))["used_bytes"] == {
        owner(user="ada", workload="run-1"): GIB
    }
    later = with_owners(programs("new", at=OWNER_RETENTION_SECONDS), first.owners)
    assert values(later)["used_bytes"] == {owner(user="ada", workload="new"): GIB}


def test_users_beyond_the_limit_are_summed_without_labels():
    owners: Mapping[Owner, float] = {Owner(user=f"u{number}"): 0.0 for number in range(MAX_OWNERS)}
    owners |= {Owner(f"w{number}", "root"): 0.0 for number in range(MAX_OWNERS)}
    frame = with_owners(programs("a", "b", at=1.0), owners)
    assert values(frame)["used_bytes"] == {owner(): 2 * GIB}


def test_page_without_programs_has_no_series_of_a_process():
    frame = frame_of_a_day(range(10), 1.0, False, {})
    text = Exposition(Telemetry()).scrape(frame, ScrapeFormat(False, groups=BOUNDED)).body.decode()
    labels = {name for family in parse(text) for sample in family.samples for name in sample.labels}
    assert "pid" not in labels
    assert {"user", "uuid", "state"} <= labels


@pytest.mark.slow
def test_day_of_program_starts_makes_a_bounded_number_of_series():
    """200 starts an hour on one machine, all with an agent, each with a workload of its own."""
    assert series_of_a_day(BOUNDED, own_workload=True)["new_in_a_day"] <= NEW_SERIES_OF_A_DAY
