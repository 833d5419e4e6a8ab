"""Upgrades and downgrades: agents, daemons and stores of other versions, as they were when they were first written.

What is written out here is what the first version said. It stays as it is: programs that carry it run for weeks.
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

from gpumond.sim.device import MIB, Spec, create
from gpumond.store import verify_audit
from gpumond.store.database import STEPS
from tests.agent.daemon import STANDINS, environment, finished, host
from tests.agent.test_flush import program
from tests.running import RunningDaemon, until

Serve = Callable[..., RunningDaemon]
Body = dict[str, Any]

UUID = "GPU-simulated"
HELLO = {"v": 1, "type": "hello", "workload": "train", "agent_version": "0.0.1", "python_version": "3.10.4"}


def begun(daemon: RunningDaemon) -> RunningDaemon:
    """Once it has a frame to answer from."""
    until(lambda: daemon.request("/api/v1/status")[0] == 200)
    return daemon


def pool(held: int) -> Body:
    reclaimable = {"low": held - 8 * MIB, "likely": held - 8 * MIB, "high": held - 8 * MIB, "exactness": "exact"}
    told = {"live_bytes": 8 * MIB, "held_bytes": held, "reclaimable": reclaimable, "stranded_bytes": 0}
    unknown = ("inside", "peak_live_bytes", "peak_held_bytes", "ooms", "retries", "device_allocations", "device_frees")
    return {"allocator": "torch", "device_uuid": UUID, **told, **dict.fromkeys(unknown)}


REPORT = {"v": 1, "type": "report", "flush_policy": "allow", "frameworks": ["torch"], "pools": [pool(48 * MIB)]}
FLUSH = {"v": 1, "type": "flush", "id": "f1", "allocator": "torch", "steps": ["cache"], "dry_run": False}
FLUSH |= {"timeout_seconds": 30.0}
SAID = {
    "hello": {"workload": str, "agent_version": str, "python_version": str},
    "report": {"flush_policy": str, "frameworks": list, "pools": list},
    "result": {"id": str, "outcome": str, "reason": str, "pools": list, "steps": list},
    "bye": {},
}
"""Every frame of an agent that the first daemon knew; it closed a connection on which another came."""
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
    """The first version's agent: answers every flush, and knows nothing else."""

    def __init__(self, path: Path) -> None:
        self.heard: list[Body] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.fspath(path))
        self._say(HELLO, REPORT)
        self._thread = Thread(target=self._answer, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._socket.close()

    def _say(self, *bodies: Body) -> None:
        self._socket.sendall(b"".join(json.dumps(body).encode() + b"\n" for body in bodies))

    def _answer(self) -> None:
        with self._socket.makefile("rb") as frames:
            for frame in frames:
                self.heard.append(json.loads(frame))
                self._say(RESULT | {"id": self.heard[-1]["id"]})


@contextmanager
def first_daemon(path: Path) -> Iterator[Callable[[], socket.socket]]:
    """The first version's daemon, as far as it listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen(1)
        listener.settimeout(20)
        yield lambda: listener.accept()[0]


def test_the_first_agent_is_heard_and_flushed_and_asked_nothing_that_it_does_not_know(serve: Serve, tmp_path: Path):
    create(tmp_path / "sim" / "card0", Spec(UUID, 0, "sim", 1024 * MIB))
    daemon = begun(serve("--source", "sim", environ={"GPUMOND_SIM_DIR": str(tmp_path / "sim")}))
    agent = FirstAgent(daemon.socket)
    try:
        (seen,) = until(lambda: daemon.get("agents"))
        assert (seen["workload"], seen["pools"][0]["held_bytes"]) == ("train", 48 * MIB)
        status, answer, _ = daemon.flush(target={"pid": os.getpid()}, steps=["cache"])
        assert (status, [receipt["outcome"] for receipt in answer["receipts"]]) == (200, ["freed"])
        assert answer["released_bytes"] == 40 * MIB
        token = (daemon.directory / "token").read_text().strip()
        limit = {"bytes": 64 * MIB, "device": UUID}
        asked = daemon.request(f"/api/v1/agents/{os.getpid()}/limit", limit, Authorization=f"Bearer {token}")
        assert 400 <= asked[0] < 500, asked
        (flush,) = agent.heard
        assert {key: type(flush.get(key)) for key in FLUSH} == {key: type(value) for key, value in FLUSH.items()}
        assert (flush["v"], flush["type"], flush["steps"]) == (1, "flush", ["cache"])
    finally:
        agent.close()


def test_the_agent_says_to_the_first_daemon_what_that_understands_and_obeys_it(tmp_path: Path):
    with (
        first_daemon(tmp_path / "agent.sock") as accepted,
        host(program(), environment(tmp_path / "agent.sock", STANDINS)) as process,
        accepted() as connection,
        connection.makefile("rb") as frames,
    ):
        connection.settimeout(20)
        said = [json.loads(frames.readline())]
        while said[-1]["type"] != "report" or not said[-1]["pools"]:
            said.append(json.loads(frames.readline()))
        connection.sendall(json.dumps(FLUSH).encode() + b"\n")
        while said[-1]["type"] != "result":
            said.append(json.loads(frames.readline()))
        assert "empty_cache" in finished(process)
        said += map(json.loads, frames)
    assert said[0]["type"] == "hello"
    for frame in said:
        assert frame["v"] == 1
        for key, kind in SAID[frame["type"]].items():
            assert isinstance(frame[key], kind)
        for entry in frame.get("pools", ()):
            for own in (entry,) if frame["type"] == "report" else (entry["before"], entry["after"]):
                assert all(isinstance(own[key], kind) for key, kind in POOL.items())
    result = next(frame for frame in said if frame["type"] == "result")
    assert (result["id"], result["outcome"]) == ("f1", "freed")


RULE = {"name": "full", "scope": "device", "value": "used_ratio", "above": 0.99}


def state_of(tmp_path: Path, *statements: str) -> Path:
    """The state directory of the daemon that is started next, with a store in it."""
    directory = tmp_path / "daemon0" / "state"
    directory.mkdir(parents=True)
    (tmp_path / "daemon0").chmod(0o755)
    directory.chmod(0o700)
    db = sqlite3.connect(directory / "gpumond.db")
    for statement in statements:
        db.executescript(statement)
    db.close()
    return directory / "gpumond.db"


def test_a_daemon_takes_over_the_store_of_the_first_version(serve: Serve, tmp_path: Path):
    kept = f"INSERT INTO rules VALUES ('full', 'e1', '{json.dumps(RULE)}');"
    path = state_of(tmp_path, STEPS[0], "PRAGMA user_version = 1;", kept)
    daemon = begun(serve("--source", "sim"))
    assert "full" in {rule["name"] for rule in daemon.get("rules")}
    until(lambda: daemon.value("gpumond_store_writable") == 1)
    assert daemon.stop() == 0
    assert verify_audit(path) == []
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone() == (len(STEPS),)
    db.close()


def test_a_copy_made_while_a_daemon_runs_is_a_whole_store(serve: Serve, tmp_path: Path):
    """By the line of docs/how-to/upgrade.md."""
    text = (Path(__file__).parents[1] / "docs/how-to/upgrade.md").read_text()
    (line,) = re.findall(r"^sudo -u gpumond python3 (-c '.*) /var/lib/\S+ /var/lib/\S+$", text, re.MULTILINE)
    daemon = begun(serve("--source", "sim"))
    token = (daemon.directory / "token").read_text().strip()
    until(lambda: daemon.value("gpumond_store_writable") == 1)
    assert daemon.request("/api/v1/rules", RULE, Authorization=f"Bearer {token}")[0] == 201
    copy = tmp_path / "daemon1" / "state" / "gpumond.db"
    copy.parent.mkdir(parents=True, mode=0o700)
    (tmp_path / "daemon1").chmod(0o755)
    subprocess.run([sys.executable, *shlex.split(line), daemon.directory / "state" / "gpumond.db", copy], check=True)
    daemon.stop()
    assert verify_audit(copy) == []
    assert "full" in {rule["name"] for rule in begun(serve("--source", "sim")).get("rules")}


def test_a_daemon_leaves_the_store_of_a_newer_version_alone_and_says_so(serve: Serve, tmp_path: Path):
    path = state_of(
        tmp_path, "PRAGMA journal_mode = WAL;", *STEPS, "PRAGMA user_version = 99;", "CREATE TABLE of_the_future(x);"
    )
    before = path.read_bytes()
    daemon = begun(serve("--source", "sim"))
    (fault,) = until(lambda: [fault for fault in daemon.get("status")["faults"] if fault["source"] == "store"])
    assert f"written by a newer gpumond (schema 99, this one knows {len(STEPS)})" in fault["detail"]
    assert daemon.value("gpumond_store_writable") == 0
    assert daemon.flush(target={"all": True})[0] in (404, 503)
    assert daemon.stop() == 0
    assert path.read_bytes() == before
