"""Daemon whose rules change, and the content of its store after a loss of power at any time."""

from __future__ import annotations

import http.client
import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from gpumond.features.rules.registry import rule_table
from gpumond.store.store import Store
from tests.helpers.opened_store import with_store
from tests.helpers.running import RunningDaemon
from tests.store.power import Disk, Event, Log

RULE_NAMES = 7
DELETE_EVERY = 5
ENDS = ("stop", "kill", "kill")
"""Ends of the daemon processes: the second starts after a checkpoint, the third with the content of the log."""


@dataclass(frozen=True)
class Edit:
    """If ``above`` is None, the rule is removed."""

    name: str
    above: float | None

    def text(self) -> str:
        return json.dumps([self.name, self.above])


@dataclass
class EditLog:
    """Edits that the daemon has acknowledged, and the one that may be in progress."""

    acknowledged: list[Edit] = field(default_factory=list)
    asked: Edit | None = None

    def add(self, mark: str) -> None:
        if mark != "acknowledged":
            self.asked = Edit(*json.loads(mark))
        elif self.asked is not None:
            self.acknowledged.append(self.asked)
            self.asked = None

    def possible(self) -> list[list[Edit]]:
        """Return the edits that a store may contain."""
        under_way = [[*self.acknowledged, self.asked]] if self.asked else []
        return [self.acknowledged, *under_way]


def edits(number: int) -> list[Edit]:
    """Return ``number`` edits, each of a different rule; none removes a rule that does not exist."""
    rng, known, made = Random(1), set[str](), list[Edit]()
    for count in range(number):
        name = f"rule-{rng.randrange(RULE_NAMES)}"
        remove = name in known and count % DELETE_EVERY == 0
        made.append(Edit(name, None if remove else 2.0**45 + count))
        (known.discard if remove else known.add)(name)
    return made


def record(directory: Path, library: Path, number: int) -> list[Event]:
    """Return all file operations of three daemon processes with this number of edits.

    Raises AssertionError if the log is incomplete: the content of the disk must follow from it exactly.
    """
    place = directory.resolve() / "daemon"
    place.mkdir(mode=0o755)
    log = Log(directory / "power.log", library, place)
    todo = iter(edits(number))
    for index, end in enumerate(ENDS):
        daemon = RunningDaemon(place, "--source", "sim", environ={**log.environ, "GPUMOND_SIM_DIR": str(directory)})
        try:
            share = number // len(ENDS) + (number % len(ENDS) if index == 0 else 0)
            _edit(daemon, log, [next(todo) for _ in range(share)])
        finally:
            if end == "kill":
                daemon.process.kill()
                daemon.process.wait()
            else:
                daemon.stop()
    state, disk = place / "state", Disk()
    own = (str(place), str(state))
    events = [
        event for event in log.events() if event.kind == "m" or event.path.startswith(own[1]) or event.path in own
    ]
    for event in events:
        disk.add(event)
    there = {str(path): path.read_bytes() for path in state.iterdir() if not path.name.endswith("-shm")}
    assert disk.held() == there, "the log does not tell the whole story"
    return events


def _edit(daemon: RunningDaemon, log: Log, todo: Iterable[Edit]) -> None:
    token = (daemon.directory / "token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=60)
    for edit in todo:
        rule = {"name": edit.name, "scope": "device", "value": "used_bytes", "above": edit.above}
        method, body = ("DELETE", None) if edit.above is None else ("PUT", json.dumps(rule))
        log.mark(edit.text())
        connection.request(method, f"/api/v1/rules/{edit.name}", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        assert answer.status in (200, 204), text
        log.mark("acknowledged")
    connection.close()


def losses(events: Sequence[Event], points: int, seed: int = 1) -> list[str]:
    """Return the losses of this number of power failures: half of them directly after an acknowledgement, half at any
    time.
    """
    rng, disk, edit_log = Random(seed), Disk(), EditLog()
    after = [at for at, event in enumerate(events) if event.data == b"acknowledged" and event.kind == "m"]
    moments = [rng.choice(after) for _ in range(points // 2)]
    moments += [rng.randrange(len(events)) for _ in range(points - len(moments))]
    lost, done = [], 0
    for moment in sorted(moments):
        for event in events[done : moment + 1]:
            disk.add(event)
            if event.kind == "m":
                edit_log.add(event.data.decode())
        done = moment + 1
        if wrong := _wrong(disk.after_power_loss(rng), edit_log):
            lost.append(f"after {len(edit_log.acknowledged)} acknowledged, event {moment}: {wrong}")
    return lost


def _wrong(files: dict[str, bytes], edit_log: EditLog) -> str:
    """Return the error of a store with these files; empty if it contains exactly the acknowledged edits."""
    with TemporaryDirectory() as directory:
        state = Path(directory) / "state"
        state.mkdir(mode=0o700)
        for path, content in files.items():
            (state / Path(path).name).write_bytes(content)
        path = state / "gpumond.db"
        kept, faults = with_store(path, _read)
        if faults:
            return "; ".join(faults)
        if (integrity := _integrity(path)) != "ok":
            return integrity
    if kept not in [_holding(made) for made in edit_log.possible()]:
        return f"{len(kept[0])} rules and {len(kept[1])} audit entries, which is not what was acknowledged"
    return ""


StoreContent = tuple[dict[str, float], list[Edit]]


async def _read(store: Store) -> tuple[StoreContent, list[str]]:
    """Return the rules by name, the edits in the audit, and the error of the store."""
    faults = [fault.detail for fault in store.faults()]
    if faults:
        return ({}, []), faults
    rules = {row.name: row.value["above"] for row in await rule_table(store).rows()}
    entries = [entry.detail for entry in await store.audit_entries(-1) if entry.action.startswith("rule.")]
    return (rules, [Edit(detail["name"], _above(detail)) for detail in entries]), []


def _above(detail: dict[str, Any]) -> float | None:
    body = detail.get("body")
    return float(body["above"]) if body else None


def _holding(made: Sequence[Edit]) -> StoreContent:
    rules: dict[str, float] = {}
    for edit in made:
        if edit.above is None:
            del rules[edit.name]
        else:
            rules[edit.name] = edit.above
    return rules, list(made)


def _integrity(path: Path) -> str:
    db = sqlite3.connect(path)
    try:
        return "; ".join(str(row[0]) for row in db.execute("PRAGMA integrity_check"))
    finally:
        db.close()
