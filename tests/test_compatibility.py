"""Upgrades and downgrades: agents, daemons and stores of other versions.

The literals in this file are the messages and the schema of the first version. They do not change, because programs
with an old agent run for weeks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from gpumond.sim.device import MIB, DeviceSpec, create
from gpumond.store.database import MIGRATIONS
from tests.helpers.agent_daemon import FAKES, environment, finished, host
from tests.helpers.running import RunningDaemon, until
from tests.helpers.torch_program import program

Serve = Callable[..., RunningDaemon]
Body = dict[str, Any]

UUID = "GPU-simulated"
HELLO = {"v": 1, "type": "hello", "workload": "train", "agent_version": "0.0.1", "python_version": "3.10.4"}


def ready(daemon: RunningDaemon) -> RunningDaemon:
    """Wait until the daemon has a frame."""
    until(lambda: daemon.request("/api/v1/status")[0] == 200)
    return daemon


def pool(held: int) -> Body:
    reclaimable = {"low": held - 8 * MIB, "likely": held - 8 * MIB, "high": held - 8 * MIB, "exactness": "exact"}
    statistics = {"live_bytes": 8 * MIB, "held_bytes": held, "reclaimable": reclaimable, "stranded_bytes": 0}
    unknown = ("inside", "peak_live_bytes", "peak_held_bytes", "ooms", "retries", "device_allocations", "device_frees")
    return {"allocator": "torch", "device_uuid": UUID, **statistics, **dict.fromkeys(unknown)}


REPORT = {"v": 1, "type": "report", "flush_policy": "allow", "frameworks": ["torch"], "pools": [pool(48 * MIB)]}
FLUSH = {"v": 1, "type": "flush", "id": "f1", "allocator": "torch", "steps": ["cache"], "dry_run": False}
FLUSH |= {"timeout_seconds": 30.0}
FIELDS_OF_MESSAGES = {
    "hello": {"workload": str, "agent_version": str, "python_version": str},
    "report": {"flush_policy": str, "frameworks": list, "pools": list},
    "result": {"id": str, "outcome": str, "reason": str, "pools": list, "steps": list},
    "bye": {},
}
"""Messages of an agent that the first daemon knew. It closed a connection on any other message."""
POOL = {key: type(value) for key, value in pool(9 * MIB).items() if value is not None}


RESULT = {
    "v": 1,
    "type": "result",
    "outcome": "freed",
    "reason": "",
    "pools": [
        {
            "before": pool(48 * MIB),
            "after": pool(8 * MIB),
            "expected": {"low": 40 * MIB, "likely": 40 * MIB, "high": 40 * MIB},
            "raced": False,
        }
    ],
    "steps": [{"step": "cache", "released_bytes": 40 * MIB, "seconds": 0.01, "detail": ""}],
}


class FirstAgent:
    """Agent of the first version: it answers every flush and knows no other command."""

    def __init__(self, path: Path) -> None:
        self.received: list[Body] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.fspath(path))
        self._send(HELLO, REPORT)
        self._thread = Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._socket.close()

    def _send(self, *bodies: Body) -> None:
        self._socket.sendall(b"".join(json.dumps(body).encode() + b"\n" for body in bodies))

    def _answer(self) -> None:
        with self._socket.makefile("rb") as lines:
            for message in lines:
                self.received.append(json.loads(message))
                self._send(RESULT | {"id": self.received[-1]["id"]})


@contextmanager
def first_daemon(path: Path) -> Iterator[Callable[[], socket.socket]]:
    """Socket of the first version's daemon."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        listener.settimeout(20)
        yield lambda: listener.accept()[0]


def test_first_agent_is_flushed_and_receives_only_known_messages(serve: Serve, tmp_path: Path):
    create(tmp_path / "sim" / "card0", DeviceSpec(UUID, 0, "sim", 1024 * MIB))
    daemon = ready(serve("--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path / "sim")}))
    agent = FirstAgent(daemon.socket)
    try:
        (connected,) = until(lambda: daemon.get("agents"))
        assert (connected["workload"], connected["pools"][0]["held_bytes"]) == ("train", 48 * MIB)
        status, answer, _ = daemon.flush(target={"pid": os.getpid()}, steps=["cache"])
        assert (status, [receipt["outcome"] for receipt in answer["receipts"]]) == (200, ["freed"])
        assert answer["released_bytes"] == 40 * MIB
        token = (daemon.directory / "token").read_text().strip()
        limit = {"bytes": 64 * MIB, "device": UUID}
        response = daemon.request(f"/api/v1/agents/{os.getpid()}/limit", limit, Authorization=f"Bearer {token}")
        assert 400 <= response[0] < 500, response
        (flush,) = agent.received
        assert {key: type(flush.get(key)) for key in FLUSH} == {key: type(value) for key, value in FLUSH.items()}
        assert (flush["v"], flush["type"], flush["steps"]) == (1, "flush", ["cache"])
    finally:
        agent.close()


def test_first_daemon_understands_and_flushes_a_current_agent(tmp_path: Path):
    with (
        first_daemon(tmp_path / "agent.sock") as accepted,
        host(program(), environment(tmp_path / "agent.sock", FAKES)) as process,
        accepted() as connection,
        connection.makefile("rb") as lines,
    ):
        connection.settimeout(20)
        messages = [json.loads(lines.readline())]
        while messages[-1]["type"] != "report" or not messages[-1]["pools"]:
            messages.append(json.loads(lines.readline()))
        connection.sendall(json.dumps(FLUSH).encode() + b"\n")
        while messages[-1]["type"] != "result":
            messages.append(json.loads(lines.readline()))
        assert "empty_cache" in finished(process)
        messages += map(json.loads, lines)
    assert messages[0]["type"] == "hello"
    for message in messages:
        assert message["v"] == 1
        for key, kind in FIELDS_OF_MESSAGES[message["type"]].items():
            assert isinstance(message[key], kind)
        for entry in message.get("pools", ()):
            for own in (entry,) if message["type"] == "report" else (entry["before"], entry["after"]):
                assert all(isinstance(own[key], kind) for key, kind in POOL.items())
    result = next(message for message in messages if message["type"] == "result")
    assert (result["id"], result["outcome"]) == ("f1", "freed")


RULE = {"name": "full", "scope": "device", "value": "used_ratio", "above": 0.99}


def state_of(tmp_path: Path, *statements: str) -> Path:
    """Create a state directory with a store for the daemon that is started next."""
    directory = tmp_path / "daemon0" / "state"
    directory.mkdir(parents=True)
    (tmp_path / "daemon0").chmod(0o755)
    directory.chmod(0o700)
    db = sqlite3.connect(directory / "gpumond.db")
    for statement in statements:
        db.executescript(statement)
    db.close()
    return directory / "gpumond.db"


def test_store_of_the_first_version_is_upgraded(serve: Serve, tmp_path: Path):
    statement_for_a_rule = f"INSERT INTO rules VALUES ('full', 'e1', '{json.dumps(RULE)}');"
    path = state_of(tmp_path, MIGRATIONS[0], "PRAGMA user_version = 1;", statement_for_a_rule)
    daemon = ready(serve("--source", "sim"))
    assert "full" in {rule["name"] for rule in daemon.get("rules")}
    until(lambda: daemon.value("gpumond_store_writable") == 1)
    assert daemon.stop() == 0
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    db.close()


def test_copy_of_the_store_of_a_running_daemon_is_complete(serve: Serve, tmp_path: Path):
    """With the command of docs/how-to/upgrade.md."""
    text = (Path(__file__).parents[1] / "docs/how-to/upgrade.md").read_text()
    (line,) = re.findall(r"^sudo -u gpumond python3 (-c '.*) /var/lib/\S+ /var/lib/\S+$", text, re.MULTILINE)
    daemon = ready(serve("--source", "sim"))
    token = (daemon.directory / "token").read_text().strip()
    until(lambda: daemon.value("gpumond_store_writable") == 1)
    assert daemon.request("/api/v1/rules", RULE, Authorization=f"Bearer {token}")[0] == 201
    copy = tmp_path / "daemon1" / "state" / "gpumond.db"
    copy.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "daemon1").chmod(0o755)
    subprocess.run([sys.executable, *shlex.split(line), daemon.directory / "state" / "gpumond.db", copy], check=True)
    daemon.stop()
    assert "full" in {rule["name"] for rule in ready(serve("--source", "sim")).get("rules")}


def test_store_of_a_newer_version_is_unchanged_and_a_fault(serve: Serve, tmp_path: Path):
    path = state_of(
        tmp_path,
        "PRAGMA journal_mode = WAL;",
        *MIGRATIONS,
        "PRAGMA user_version = 99;",
        "CREATE TABLE of_the_future(x);",
    )
    before = path.read_bytes()
    daemon = ready(serve("--source", "sim"))
    (fault,) = until(lambda: [fault for fault in daemon.get("status")["faults"] if fault["source"] == "store"])
    assert f"written by a newer gpumond (schema 99, this version supports up to {len(MIGRATIONS)})" in fault["detail"]
    assert daemon.value("gpumond_store_writable") == 0
    assert daemon.flush(target={"all": True})[0] in (404, 503)
    assert daemon.stop() == 0
    assert path.read_bytes() == before
