"""Silences of a real daemon: alerts are shown and not sent, over kills and to the end of the silence."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gpumond.view.text import time_text
from tests.fakenvml import FakeDriver, machine
from tests.helpers.alert_listener import Listener
from tests.helpers.running import RunningDaemon, gpumond, until

Serve = Callable[..., RunningDaemon]

CONFIG = """
interval: 0.1
receivers: [{{name: hook, type: webhook, url: "{url}/services/T0/secret"}}]
rules:
  - {{name: full, scope: device, value: used_ratio, above: 50%}}
  - {{name: present, scope: device, value: up, above: 0, labels: {{team: ops}}}}
"""
FULL = {"name": "rule", "operator": "=", "value": "full"}


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def refusing(listener: Listener) -> Listener:
    """A listener that accepts nothing, from before the daemon starts."""
    listener.answer = b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"
    return listener


@pytest.fixture
def daemon(serve: Serve, driver: FakeDriver, tmp_path: Path, listener: Listener) -> RunningDaemon:
    driver.devices = machine(1)
    fill(driver, 0.1)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(url=listener.url))
    return serve("--source", "nvml", "--config", str(config), environ=driver.env)


def fill(driver: FakeDriver, share: float) -> None:
    driver.devices[0].used_bytes = int(driver.devices[0].total_bytes * share)
    driver.write()


def change(daemon: RunningDaemon, method: str, path: str, body: object = None, token: str | None = None) -> Any:
    """Send a request with the daemon's token, and return status and decoded answer."""
    own = (daemon.directory / "token").read_text().strip() if token is None else token
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {own}"} if own else {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{daemon.url}/api/v1/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def silence(daemon: RunningDaemon, *matchers: dict[str, str], **fields: Any) -> str:
    body = {"matchers": matchers or [FULL], "reason": "maintenance", **({"for_seconds": 3600} | fields)}
    status, answer = change(daemon, "POST", "silences", body)
    assert status == 201, answer
    id: str = answer["silence"]["id"]
    return id


def sent(listener: Listener) -> list[tuple[str, str]]:
    """Return the notifications about the rules of this module: the faults of the device have rules of their own."""
    alerts = [alert for request in list(listener.requests) for alert in request.json["alerts"]]
    return [(alert["status"], alert["rule"]) for alert in alerts if alert["rule"] in ("full", "present")]


def silenced_by(daemon: RunningDaemon) -> list[list[str]]:
    return [alert["silenced_by"] for alert in daemon.get("alerts") if alert["rule"] == "full"]


def after_next_tick(daemon: RunningDaemon) -> None:
    """Wait until two ticks have passed: one may have begun before a change."""
    seq = daemon.get("status")["snapshot_seq"]
    until(lambda: daemon.get("status")["snapshot_seq"] > seq + 1)


def test_silenced_alert_is_shown_and_sent_when_the_silence_ends(
    daemon: RunningDaemon, driver: FakeDriver, listener: Listener
):
    until(lambda: ("firing", "present") in sent(listener))
    id = silence(daemon)
    assert daemon.get("silences")[0]["state"] == "active"
    fill(driver, 0.9)
    until(lambda: silenced_by(daemon) == [[id]])
    assert daemon.value("gpumond_silences", state="active") == 1
    frame = daemon.get("frame")
    assert [each["id"] for each in frame["silences"]] == [id]
    assert [each["silenced_by"] for each in frame["alerts"] if each["rule"] == "present"] == [[]]
    after_next_tick(daemon)
    assert sent(listener) == [("firing", "present")]
    assert change(daemon, "DELETE", f"silences/{id}")[0] == 204
    until(lambda: ("firing", "full") in sent(listener))
    until(lambda: silenced_by(daemon) == [[]])
    assert [entry["state"] for entry in daemon.get("silences")] == ["ended"]
    entries = [entry for entry in daemon.get("audit") if entry["action"].startswith("silence.")]
    assert [(entry["actor"], entry["action"]) for entry in entries] == [
        (f"token@uid:{os.geteuid()}", "silence.create"),
        (f"token@uid:{os.geteuid()}", "silence.expire"),
    ]
    assert entries[0]["detail"]["matchers"] == [FULL]


def test_silence_ends_by_itself(daemon: RunningDaemon, driver: FakeDriver, listener: Listener):
    silence(daemon, FULL | {"value": "another"})  # the first request takes longest
    end = time.time() + 6
    silence(daemon, ends_at=end, for_seconds=None)
    fill(driver, 0.9)
    until(lambda: ("firing", "full") in sent(listener))
    full = next(each for each in listener.requests if "full" in [alert["rule"] for alert in each.json["alerts"]])
    assert full.json["sent_at"] >= end


def test_alert_that_was_never_sent_is_not_sent_as_resolved(
    daemon: RunningDaemon, driver: FakeDriver, listener: Listener
):
    silence(daemon)
    fill(driver, 0.9)
    until(lambda: silenced_by(daemon))
    fill(driver, 0.1)
    until(lambda: not silenced_by(daemon))
    driver.devices = []
    driver.write()
    until(lambda: ("resolved", "present") in sent(listener))
    assert {rule for _, rule in sent(listener)} == {"present"}


def test_alert_that_was_sent_is_sent_as_resolved_while_it_is_silenced(
    daemon: RunningDaemon, driver: FakeDriver, listener: Listener
):
    fill(driver, 0.9)
    until(lambda: ("firing", "full") in sent(listener))
    id = silence(daemon)
    until(lambda: silenced_by(daemon) == [[id]])
    fill(driver, 0.1)
    until(lambda: ("resolved", "full") in sent(listener))


def test_silences_and_silenced_queue_survive_a_kill(
    refusing: Listener, daemon: RunningDaemon, driver: FakeDriver, tmp_path: Path
):
    listener = refusing
    fill(driver, 0.9)
    until(lambda: listener.requests and silenced_by(daemon) == [[]])  # not accepted: it is still queued
    active, ended = silence(daemon), silence(daemon, {"name": "rule", "operator": "=", "value": "other"})
    pending = silence(daemon, starts_at=time.time() + 1800)
    assert change(daemon, "DELETE", f"silences/{ended}")[0] == 204
    before = daemon.get("silences")
    daemon.process.send_signal(signal.SIGKILL)
    daemon.process.wait()
    listener.requests.clear()
    listener.answer = b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n"
    config = str(tmp_path / "config.yaml")
    with RunningDaemon(daemon.directory, "--source", "nvml", "--config", config, environ=driver.env) as again:
        assert again.get("silences") == before
        assert [entry["state"] for entry in before] == ["active", "ended", "pending"]
        until(lambda: ("firing", "present") in sent(listener))
        until(lambda: silenced_by(again) == [[active]])
        after_next_tick(again)
        assert ("firing", "full") not in sent(listener)
        assert change(again, "DELETE", f"silences/{active}")[0] == 204
        until(lambda: ("firing", "full") in sent(listener))
        assert change(again, "GET", f"silences/{pending}")[1]["state"] == "pending"


def test_silences_require_the_scope_of_rules(serve: Serve, driver: FakeDriver, tmp_path: Path):
    tokens = tmp_path / "tokens"
    scopes = {"ruler": "rules", "flusher": "flush"}
    lines = [f"{name} {scope} {sha256(name.encode()).hexdigest()}\n" for name, scope in scopes.items()]
    tokens.write_text("".join(lines))
    tokens.chmod(0o600)
    daemon = serve("--source", "nvml", "--tokens-file", str(tokens), environ=driver.env)
    body = {"matchers": [FULL], "for_seconds": 60, "reason": "x"}
    assert change(daemon, "POST", "silences", body, token="")[0] == 401
    assert change(daemon, "POST", "silences", body, token="flusher")[0] == 403
    status, made = change(daemon, "POST", "silences", body | {"author": "Research"}, token="ruler")
    assert (status, made["silence"]["author"], made["silence"]["created_by"]) == (
        201,
        "Research",
        f"token:ruler@uid:{os.geteuid()}",
    )
    path = f"silences/{made['silence']['id']}"
    assert [change(daemon, "DELETE", path, token=token)[0] for token in ("", "flusher", "ruler")] == [401, 403, 204]
    empty = [change(daemon, "POST", "silences", {}, token)[0] for token in ("", "flusher", "ruler")]
    assert empty == [401, 403, 422], "`gpumond top` asks in this way whether you may silence"
    assert [change(daemon, "POST", "receivers/log/test", {}, token)[0] for token in ("", "flusher")] == [401, 403]
    assert change(daemon, "POST", "receivers/log/test", {}, token="ruler")[0] == 200


def test_receiver_test_sends_a_marked_message_and_returns_the_answer(daemon: RunningDaemon, listener: Listener):
    until(lambda: ("firing", "present") in sent(listener))
    status, result = change(daemon, "POST", "receivers/hook/test", {})
    assert (status, result["accepted"], result["status"], result["reason"]) == (200, True, 200, "")
    assert result["duration_seconds"] > 0
    (alert,) = listener.requests[-1].json["alerts"]
    assert (alert["rule"], alert["labels"]["test"]) == ("gpumond-test", "true")
    assert alert["annotations"]["summary"].startswith(
        f"Test message from gpumond, requested by token@uid:{os.geteuid()}."
    )
    assert listener.requests[-1].line == "POST /services/T0/secret HTTP/1.1"
    listener.answer = b"HTTP/1.1 403 X\r\nContent-Length: 0\r\n\r\n"
    done = daemon.run("rules", "test-receiver", "hook")
    assert (done.returncode, done.stdout) == (1, "hook didn't accept the message: auth: 403 Forbidden\n")
    listener.answer = lambda connection: None  # closes the connection
    status, result = change(daemon, "POST", "receivers/hook/test", {})
    assert (status, result["accepted"], result["status"], result["reason"]) == (200, False, None, "connection")
    assert "secret" not in json.dumps(result)
    status, problem = change(daemon, "POST", "receivers/none/test", {})
    assert (status, problem["detail"]) == (404, "no receiver has the name none; known receivers: hook")
    entries = [entry for entry in daemon.get("audit") if entry["action"] == "receiver.test"]
    assert [(entry["actor"], entry["detail"]) for entry in entries] == [
        (f"token@uid:{os.geteuid()}", {"receiver": "hook"})
    ] * 3
    assert "secret" not in daemon.log.read_text()


def test_expensive_expressions_cost_the_daemon_nothing(daemon: RunningDaemon):
    cheap = daemon.run("silence", "add", r"gpu=~\w+", "--for", "1h", "--reason", "x")  # it imports the API
    assert cheap.returncode == 0
    before = rss(daemon)
    for number in range(8):
        wrong = daemon.run("silence", "add", rf"gpu=~\w{{200}}{number:04}", "--for", "1h", "--reason", "x")
        assert (wrong.returncode, "shorten repetitions" in wrong.stderr) == (2, True)
    assert rss(daemon) < before + 10 * 1024
    assert len(daemon.get("silences")) == 1


def rss(daemon: RunningDaemon) -> int:
    """Return the KiB of the daemon's resident memory."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def test_start_is_in_utc_like_what_commands_print(daemon: RunningDaemon):
    day = datetime.now(timezone.utc) + timedelta(days=1)
    options = ("--for", "1h", "--reason", "x", "--start", f"{day:%Y-%m-%dT18:00}")
    added = gpumond("silence", "add", "rule=leak", *options, **{**daemon.environ, "TZ": "Asia/Tokyo"})
    assert f" from {day:%Y-%m-%d} 18:00:00Z until {day:%Y-%m-%d} 19:00:00Z: " in added.stdout


def test_command_adds_lists_and_deletes_silences(daemon: RunningDaemon, driver: FakeDriver):
    fill(driver, 0.9)
    until(lambda: silenced_by(daemon) == [[]])
    added = daemon.run("silence", "add", "rule=full", "gpu=~[0-9]+", "--for", "1h30m", "--reason", "new disk")
    assert (added.returncode, added.stderr) == (0, "")
    (entry,) = daemon.get("silences")
    id, end = entry["silence"]["id"], time_text(entry["silence"]["ends_at"])
    assert added.stdout == f"silence {id} until {end}: silences 1 active alert\n"
    assert entry["silence"]["reason"] == "new disk"
    assert entry["silence"]["ends_at"] - entry["silence"]["starts_at"] == pytest.approx(5400)
    until(lambda: silenced_by(daemon) == [[id]])
    listed = daemon.run("silence", "list").stdout
    assert "rule=full gpu=~[0-9]+" in listed or 'rule=full gpu=~"[0-9]+"' in listed
    by = f"{pwd.getpwuid(os.geteuid()).pw_name} (token)"
    assert listed.rstrip().endswith(f"  {by}  new disk")
    assert f"  {by}  silenced rule=full" in daemon.run("audit").stdout
    assert "full firing for" in (status := daemon.run("status").stdout)
    assert ", silenced" in status
    assert re.search(f"\nfiring +[-a-z]+ +full .+  silenced until {end}", daemon.run("alerts").stdout)
    assert daemon.run("silence", "delete", id).returncode == 0
    again = daemon.run("silence", "delete", id)
    assert (again.returncode, again.stdout) == (3, "")
    assert again.stderr.startswith(f"gpumond: silence {id} has already ended, at 20")
    assert id not in daemon.run("silence", "list").stdout
    assert id in daemon.run("silence", "list", "--all").stdout
    until(lambda: {"full", "present"} <= {each["rule"] for each in daemon.get("alerts")})
    other = daemon.run("silence", "add", "rule=full", "pid=1", "--for", "1h", "--reason", "x")
    assert "no active alert of full has the label pid; the labels are alertname, gpu, " in other.stderr
    useless = daemon.run("silence", "add", "rulle=full", "--for", "1h", "--reason", "x")
    assert (useless.returncode, useless.stdout) == (2, "")
    assert useless.stderr == "gpumond: no rule's alerts have the label rulle; did you mean rule?\n"
    useless = daemon.run("silence", "add", "rule=ful", "--for", "1h", "--reason", "x")
    assert (useless.returncode, useless.stdout) == (2, "")
    assert "no rule has the name ful; did you mean full?" in useless.stderr
    assert "rule=ful " not in daemon.run("silence", "list", "--all").stdout
    useless = daemon.run("silence", "add", "rule=xyz", "--for", "1h", "--reason", "x")
    assert "no rule has the name xyz; to list the rules: gpumond rules list" in useless.stderr
    wrong = daemon.run("silence", "add", "rule=~(", "--for", "1h", "--reason", "x")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("gpumond: MATCHER: rule=~(: not a regular expression")
    wrong = daemon.run("silence", "add", "full", "--for", "1h")
    assert (wrong.returncode, "MATCHER 'full': expected LABEL=TEXT" in wrong.stderr) == (2, True)
    wrong = daemon.run("silence", "add", "rule=full", "--for", "soon", "--reason", "x")
    assert (wrong.returncode, "expected a duration such as 30s" in wrong.stderr) == (2, True)
