"""Flushes that Alertmanager requests: the programs of an alert, once for each start, on this machine only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from gpumond.facts.errors import StoreUnavailable
from gpumond.facts.snapshot import AgentReport
from gpumond.features.flush.alertmanager_hook import (
    MAX_FIRINGS_PER_CALLER,
    REFUSED_ACTION,
    AlertmanagerHook,
    HookAlert,
    HookAnswer,
    host_of,
    programs_of,
)
from gpumond.store.audit import AuditEntry
from tests.helpers.agents import GIB
from tests.helpers.scripted_programs import ScriptedPrograms, train
from tests.helpers.values import make_device, make_snapshot

MACHINE = ("node7", "node7.example.org")
UPTIME = 1000.0
TAKEN_AT = 1_000_000.0
STARTED_AT = TAKEN_AT - UPTIME + 1.0
"""Start of the programs, whose ``start_ticks`` are 100."""


class MemoryStore:
    """In-memory audit."""

    def __init__(self, entries: Sequence[AuditEntry] = ()) -> None:
        self.audited: list[AuditEntry] = list(entries)
        self.full = False

    async def audit(self, actor: str, action: str, detail: Any) -> None:
        if self.full:
            raise StoreUnavailable("the disk is full", full=True)
        self.audited.append(AuditEntry(len(self.audited) + 1, 1.0, actor, action, detail))

    async def audit_entries(self, *, include_users: bool) -> list[AuditEntry]:
        return self.audited


class Setup:
    """A hook over scripted programs. ``dry_run`` is the setting."""

    def __init__(self, *programs: AgentReport, store: MemoryStore | None = None, **options: Any) -> None:
        self.scripted = ScriptedPrograms(*programs)
        self.store, self.dry_run = store or MemoryStore(), False
        self.flusher = self.scripted.flusher(**options)
        self.hook = AlertmanagerHook(self.flusher.flush, self.store, lambda: MACHINE, lambda: self.dry_run)

    def receive(self, *alerts: HookAlert, by: str = "token:am", **options: Any) -> HookAnswer:
        return asyncio.run(self.hook.receive(alerts, snapshot(*self.scripted.programs), by, **options))

    def outcome(self, alert: HookAlert, **options: Any) -> str:
        (result,) = self.receive(alert, **options).alerts
        return result.outcome

    def actions(self) -> list[str]:
        return [entry.action for entry in self.store.audited]


def snapshot(*programs: AgentReport, uptime: float | None = UPTIME) -> Any:
    devices = (make_device("GPU-a"), make_device("GPU-b"), make_device("DRM-pci-0000:03:00.0"))
    return make_snapshot(*devices, reports=programs, uptime_seconds=uptime, taken_at=TAKEN_AT)


def alert(fingerprint: str = "a1", starts_at: float = TAKEN_AT, firing: bool = True, **labels: str) -> HookAlert:
    named = {"alertname": "Waste", "instance": "10.0.0.9:9917", **(labels or {"uuid": "GPU-a"})}
    return HookAlert(fingerprint=fingerprint, starts_at=starts_at, firing=firing, labels=named)


def test_alert_flushes_its_programs_and_a_second_notification_has_no_effect():
    setup = Setup(train(10), train(11, device="GPU-b"))
    first = setup.receive(alert())
    (result,) = first.alerts
    assert (result.outcome, result.alert, result.pids) == ("flushed", "Waste", (10,))
    assert result.released_bytes == first.released_bytes == 3 * GIB
    assert [receipt.requested_by for receipt in first.receipts] == ["token:am"]
    again = setup.receive(alert())
    assert ([each.outcome for each in again.alerts], again.receipts) == (["repeated"], ())
    assert setup.scripted.flushed == [10]
    assert setup.actions() == ["hook.flush"]
    assert setup.store.audited[0].detail == {"fingerprint": "a1", "starts_at": TAKEN_AT, "alert": "Waste", "pids": [10]}


def test_new_start_and_another_caller_are_other_requests():
    setup = Setup(train(10), cooldown_seconds=0.0)
    assert setup.outcome(alert()) == "flushed"
    assert setup.outcome(alert(starts_at=TAKEN_AT + 60)) == "flushed"
    assert setup.outcome(alert(), by="uid:1000", uid=1000) == "flushed"
    assert setup.outcome(alert()) == "repeated"


def test_notification_during_the_flush_has_no_effect():
    async def run() -> list[str]:
        setup.scripted.gate = asyncio.Event()
        programs = snapshot(*setup.scripted.programs)
        first = asyncio.create_task(setup.hook.receive([alert()], programs, "token:am"))
        while not setup.scripted.flushed:
            await asyncio.sleep(0)
        second = await setup.hook.receive([alert()], programs, "token:am")
        setup.scripted.gate.set()
        return [each.outcome for answer in (await first, second) for each in answer.alerts]

    setup = Setup(train(10))
    assert asyncio.run(run()) == ["flushed", "repeated"]
    assert setup.scripted.flushed == [10]


def test_program_of_several_alerts_is_flushed_once():
    setup = Setup(train(10))
    answer = setup.receive(alert("a1"), alert("a2", pid="10", uuid="GPU-a"), alert("a1"))
    assert [each.outcome for each in answer.alerts] == ["flushed", "flushed", "repeated"]
    assert (setup.scripted.flushed, len(answer.receipts), answer.released_bytes) == ([10], 1, 3 * GIB)


@pytest.mark.parametrize("by_setting", [False, True])
def test_dry_run_plans_and_has_no_effect(by_setting: bool):
    setup = Setup(train(10))
    setup.dry_run = by_setting
    answer = setup.receive(alert(), dry_run=not by_setting)
    assert answer.dry_run
    assert ([each.outcome for each in answer.alerts], answer.released_bytes) == (["planned"], 0)
    assert [receipt.outcome for receipt in answer.receipts] == ["planned"]
    assert setup.actions() == []
    setup.dry_run = False
    assert setup.outcome(alert()) == "flushed"


def test_alert_in_the_cooldown_of_rules_is_refused_and_tried_again_later():
    setup = Setup(train(10), cooldown_seconds=600.0)
    assert setup.outcome(alert("a1")) == "flushed"
    (result,) = setup.receive(alert("a2")).alerts
    assert result.outcome == "refused"
    assert "try again in" in result.reason
    assert setup.actions() == ["hook.flush", "hook.flush", REFUSED_ACTION]
    setup.flusher.cooldown_seconds = 0.0
    assert setup.outcome(alert("a2")) == "flushed"


def test_nothing_is_flushed_if_it_cannot_be_recorded():
    setup = Setup(train(10))
    setup.store.full = True
    with pytest.raises(StoreUnavailable):
        setup.receive(alert())
    assert setup.scripted.flushed == []
    setup.store.full = False
    assert setup.outcome(alert()) == "flushed"


def test_two_alertmanagers_with_one_token_have_one_effect():
    setup = Setup(train(10))
    outcomes = [
        [each.outcome for each in setup.receive(alert(), by=f"token:am@{place}").alerts]
        for place in ("10.0.0.7", "10.0.0.8")
    ]
    assert outcomes == [["flushed"], ["repeated"]]


def test_restarted_daemon_remembers_the_starts_that_had_an_effect():
    store = MemoryStore()
    before = Setup(train(10), store=store, cooldown_seconds=600.0)
    assert [before.outcome(alert("a1")), before.outcome(alert("a2"))] == ["flushed", "refused"]
    store.audited.append(AuditEntry(9, 1.0, "token:am", "hook.flush", {"fingerprint": 7}))
    after = Setup(train(10), store=store)
    asyncio.run(after.hook.restore())
    assert [after.outcome(alert("a1")), after.outcome(alert("a2"))] == ["repeated", "flushed"]


def test_number_of_remembered_starts_is_limited():
    setup = Setup(train(10), cooldown_seconds=0.0)
    for number in range(MAX_FIRINGS_PER_CALLER + 1):
        setup.hook._remember("token:am", ("a1", float(number)))
    assert setup.outcome(alert("a1", starts_at=1.0, uuid="GPU-a")) == "repeated"
    assert setup.outcome(alert("a1", starts_at=0.0, uuid="GPU-a")) == "flushed"


def test_user_flushes_only_own_programs():
    setup = Setup(train(10, uid=7, workload="a"), train(11, uid=8, workload="b"))
    (result,) = setup.receive(alert(), by="uid:8", uid=8).alerts
    assert (result.outcome, result.pids) == ("flushed", (11,))


LABELS: dict[str, tuple[dict[str, str], list[int] | str]] = {
    "device": ({"uuid": "GPU-a"}, [10, 11]),
    "process": ({"uuid": "GPU-a", "pid": "11"}, [11]),
    "process with its start": ({"uuid": "GPU-a", "pid": "11", "start_ticks": "100"}, [11]),
    "workload": ({"instance": "node7:9917", "workload": "train"}, [10, 12]),
    "workload of a user": ({"instance": "NODE7.example.org", "workload": "train", "uid": "1000"}, [10, 12]),
    "pid without a device": ({"instance": "node7", "pid": "12"}, [12]),
    "another start": (
        {"uuid": "GPU-a", "pid": "11", "start_ticks": "99"},
        "no program with an agent has the alert's labels",
    ),
    "another workload": ({"uuid": "GPU-a", "workload": "other"}, "no program with an agent has the alert's labels"),
    "other": ({"uuid": "GPU-a", "pid": "other"}, "no program with an agent has the alert's labels"),
    "no subject": ({"instance": "node7:9917"}, "the alert's labels contain neither a device nor a program"),
    "device of another machine": ({"uuid": "GPU-c"}, "no device of this machine has the UUID GPU-c"),
    "workload without a machine": ({"workload": "train", "instance": ""}, "needs the label `instance`"),
    "workload of another machine": ({"workload": "train"}, "not a known name of this machine"),
    "pid of another machine": ({"instance": "node8:9917", "pid": "10"}, "not a known name of this machine"),
    "address on another machine's bus": ({"uuid": "DRM-pci-0000:03:00.0"}, "not a known name of this machine"),
    "policy": ({"uuid": "GPU-a", "pid": "13"}, "the alert's programs don't allow flushes"),
    "nothing to release": ({"uuid": "GPU-a", "pid": "14"}, "no memory that a flush would release"),
    "nothing on this device": ({"uuid": "GPU-b", "pid": "10"}, "no memory that a flush would release"),
}


@pytest.mark.parametrize(("labels", "expected"), LABELS.values(), ids=LABELS)
def test_programs_are_those_that_the_labels_name(labels: dict[str, str], expected: list[int] | str):
    programs = (
        train(10),
        train(11, workload="serve"),
        train(12, device="GPU-b"),
        train(13, workload="private", flush_policy="never"),
        train(14, workload="idle", cached=0),
    )
    found = programs_of(alert(**labels), snapshot(*programs), MACHINE, None)
    if isinstance(expected, str):
        assert isinstance(found, str)
        assert expected in found
    else:
        assert not isinstance(found, str), found
        assert [each.pid for each in found] == expected


def test_resolved_alert_is_skipped():
    (result,) = Setup(train(10)).receive(alert(firing=False)).alerts
    assert (result.outcome, result.reason) == ("skipped", "the alert is resolved")


def test_process_that_started_after_the_alert_is_another_one():
    early = alert(starts_at=STARTED_AT - 60, pid="10", uuid="GPU-a")
    late = alert(starts_at=STARTED_AT, pid="10", uuid="GPU-a")
    found = programs_of(early, snapshot(train(10)), MACHINE, None)
    assert found == "the process 10 started after the alert: the pid was reused"
    assert programs_of(late, snapshot(train(10)), MACHINE, None) == (train(10),)
    assert programs_of(early, snapshot(train(10), uptime=None), MACHINE, None) == (train(10),)
    of_device = alert(starts_at=STARTED_AT - 60, uuid="GPU-a")
    assert programs_of(of_device, snapshot(train(10)), MACHINE, None) == (train(10),)


@pytest.mark.parametrize(
    ("instance", "host"),
    [
        ("node7:9917", "node7"),
        ("Node7.example.org", "node7.example.org"),
        ("[2001:DB8::1]:9917", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("", ""),
    ],
)
def test_instance_names_a_host(instance: str, host: str):
    assert host_of(instance) == host
