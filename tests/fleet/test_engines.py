"""`gpumond fleet sleep` and `wake` with real daemons and fakes of serving engines."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.agents import GIB
from tests.helpers.engines import device, fake_engine, used_bytes
from tests.helpers.running import RunningDaemon, until
from tests.helpers.serving import SIM
from tests.helpers.stubs import fleet, write_targets

pytestmark = pytest.mark.slow

NAMES = ("node-1", "node-2", "node-3")


def test_sleep_keeps_one_replica_and_its_undo_wakes_the_others(tmp_path: Path):
    with ExitStack() as stack:
        cards, daemons = [], {}
        for name in NAMES:
            (tmp_path / name).mkdir()
            cards.append(device(tmp_path / name))
            engine = stack.enter_context(fake_engine("vllm", cards[-1]))
            own = {"name": "chat", "kind": "vllm", "url": engine.url, "allow": ["engine"]}
            config = tmp_path / f"{name}.yaml"
            config.write_text(yaml.safe_dump({"engines": [own], "interval": 0.2}))
            options = (*SIM, "--config", str(config))
            environ = {"GPUMOND_SIM_DIR": str(tmp_path / name)}
            daemons[name] = stack.enter_context(RunningDaemon(tmp_path / f"{name}-daemon", *options, environ=environ))
        used = {"engine": "chat"}
        for daemon in daemons.values():  # the processes of an engine are known before its state
            until(lambda own=daemon: own.value("gpumond_engine_memory_used_bytes", **used) == 7 * GIB, 60)
            until(lambda own=daemon: own.value("gpumond_engine_sleeping", **used) == 0, 60)
        addresses = {name: each.url.removeprefix("http://") for name, each in daemons.items()}
        tokens = tmp_path / "tokens.yaml"
        tokens.touch(0o600)
        tokens.write_text(
            "".join(f"{name}: {(each.directory / 'token').read_text().strip()}\n" for name, each in daemons.items())
        )
        given = ["--targets", str(write_targets(tmp_path / "all.json", addresses)), "--tokens", str(tokens)]

        shown = fleet("sleep", *given, "--engine", "chat", "--reason", "night", "--yes")
        assert shown.returncode == 0, shown.stdout + shown.stderr
        assert "2 engines on 2 machines in 2 waves" in shown.stdout, shown.stdout
        assert "the engine is the last replica awake (--keep 1)" in shown.stdout
        assert [used_bytes(card) for card in cards] == [3 * GIB, 3 * GIB, 7 * GIB]

        *_, undo = shown.stdout.splitlines()
        command = shlex.split(undo.removeprefix("to undo: "))
        assert command[:3] == ["gpumond", "fleet", "undo"]
        until(lambda: all(daemons[name].value("gpumond_engine_sleeping", **used) == 1 for name in NAMES[:2]), 60)
        undone = fleet(*command[2:], "--yes")
        assert undone.returncode == 0, undone.stdout + undone.stderr
        assert undone.stdout.count("wake the engine chat  undone") == 2
        assert [used_bytes(card) for card in cards] == [7 * GIB] * 3

        until(lambda: all(daemons[name].value("gpumond_engine_sleeping", **used) == 0 for name in NAMES[:2]), 60)
        again = fleet("sleep", *given, "--engine", "chat", "--force", "--yes")
        assert again.returncode == 0, again.stdout + again.stderr
        assert [used_bytes(card) for card in cards] == [3 * GIB, 3 * GIB, 7 * GIB]
        until(lambda: all(daemons[name].value("gpumond_engine_sleeping", **used) == 1 for name in NAMES[:2]), 60)
        woken = fleet("wake", *given, "--engine", "chat", "--yes", "--json")
        assert woken.returncode == 0, woken.stdout + woken.stderr
        assert [used_bytes(card) for card in cards] == [7 * GIB] * 3
        operation = json.loads(woken.stdout)["operation"]
        entries: list[dict[str, Any]] = json.loads(fleet("audit", *given, "--operation", operation, "--json").stdout)[
            "entries"
        ]
        assert {(each["machine"], each["detail"]["wake"]) for each in entries if each["action"] == "flush.request"} == {
            ("node-1", True),
            ("node-2", True),
        }
        cannot = fleet("undo", *given, operation, "--dry-run")
        assert cannot.returncode == 3
        assert "an engine that was woken serves requests; use gpumond fleet sleep" in cannot.stdout
