"""One person with a range in /etc/subuid, who has as many uids as the range."""

from __future__ import annotations

import shlex
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumond.facts.messages import Hello, encode
from gpumond.features.quotas.admissions import MAX_REQUESTS_PER_USER
from tests.helpers.users import ATTACKER
from tests.isolation.machine import GIB, Machine, delays

FIRST, UIDS = 300_000, 8
DESCRIPTORS = 2048
"""Of the daemon: room for some hundred agents, fewer than the uids may have together."""


@pytest.fixture(scope="module")
def _machine(start_machine: Callable[..., Machine], tmp_path_factory: pytest.TempPathFactory) -> Machine:
    subuid = Path("/etc/subuid")
    if not subuid.exists():
        pytest.skip("needs a file /etc/subuid, which the daemon's mount namespace replaces")
    ranges = tmp_path_factory.mktemp("etc") / "subuid"
    ranges.write_text(f"{ATTACKER}:{FIRST}:65536\n")
    replace = f'mount --bind {shlex.quote(str(ranges))} {subuid} && exec "$@"'
    around = ("prlimit", f"--nofile={DESCRIPTORS}", "unshare", "--mount", "sh", "-c", replace, "sh")
    return start_machine(around=around)


def test_uids_of_one_person_leave_places_for_agents_of_others(machine: Machine):
    hello = encode(Hello("many")).decode()
    for uid in (ATTACKER, *range(FIRST, FIRST + UIDS)):
        machine.attack("silent_agents", uid, path=str(machine.daemon.socket), connections=128, first=hello)
    assert len(delays(machine)) > 0


def test_uids_of_one_person_have_one_owner_in_the_audit(machine: Machine):
    for uid in (ATTACKER, FIRST, FIRST + 1):
        assert machine.flush(uid, target={"workload": f"absent-{uid}"}).answer()[0] == 404
    entries = [entry for entry in machine.daemon.get("audit") if "absent-" in str(entry["detail"])]
    assert {entry["actor"] for entry in entries} == {f"uid:{uid}" for uid in (ATTACKER, FIRST, FIRST + 1)}
    with sqlite3.connect(f"file:{machine.state}/gpumond.db?mode=ro", uri=True) as db:
        assert db.execute("SELECT DISTINCT owner FROM audit WHERE owner LIKE 'uid:%'").fetchall() == [
            (f"uid:{ATTACKER}",)
        ]
    db.close()


def test_uids_of_one_person_have_the_requests_for_memory_of_one(machine: Machine):
    body = {"need_bytes": 140 * GIB, "wait": True}
    asked = [machine.ask(FIRST + i % 2, "POST", "/api/v1/admissions", body) for i in range(MAX_REQUESTS_PER_USER + 1)]
    statuses = Counter(request.answer()[0] for request in asked)
    assert statuses == {200: MAX_REQUESTS_PER_USER, 429: 1}
