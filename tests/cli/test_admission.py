"""``gpumond run --need`` and a daemon with scripted answers: lost places, a stopped daemon, the end of the wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gpumond.features.quotas.admission_client import NO_MEMORY_EXIT_CODE, explanation

GIB = 1 << 30
LOST = (404, {"detail": "no request has this id"})


def state(state: str, name: str = "a", **fields: Any) -> tuple[int, dict[str, Any]]:
    known = {"ahead": 0, "available_bytes": GIB, "missing_bytes": GIB, "plan": []}
    return 200, {
        "id": name,
        "state": state,
        "device_uuid": "GPU-a",
        "device_index": 0,
        "need_bytes": 2 * GIB,
    } | known | fields


@contextmanager
def scripted(*answers: tuple[int, dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a daemon that gives these answers, the last one again and again, and its requests."""
    requests: list[str] = []
    remaining = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            requests.append(f"{self.command} {self.path.removeprefix('/api/v1/admissions')}".strip())
            status, body = (204, {}) if self.command == "DELETE" else remaining[0]
            if len(remaining) > 1 and self.command != "DELETE":
                remaining.pop(0)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode() if status != 204 else b"")

        do_POST = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(url: str, options: Sequence[str] = (), command: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    code = "import os; print('started', os.environ['GPUMOND_ADMISSION'])"
    command = command or (sys.executable, "-c", code)
    environ = {**os.environ, "GPUMOND_TOKEN": "secret", "GPUMOND_SOCKET": "/nonexistent/agent.sock"}
    line = [sys.executable, "-m", "gpumond", "run", "--url", url, "--need", "2GiB", *options, "--", *command]
    return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)


def test_request_that_the_daemon_has_lost_is_sent_again():
    with scripted(state("waiting"), LOST, state("waiting", "b"), state("granted", "b")) as (url, requests):
        done = run(url, ("--wait", "1m"))
    assert (done.returncode, done.stdout) == (0, "started b\n")
    assert requests == ["POST", "PUT /a", "POST", "PUT /b"]


def test_daemon_that_has_just_started_is_awaited():
    starting = (503, {"detail": "the first reading is in progress"})
    with scripted(state("waiting"), LOST, starting, LOST, state("granted", "b")) as (url, requests):
        done = run(url, ("--wait", "1m"))
    assert (done.returncode, done.stdout) == (0, "started b\n")
    assert requests == ["POST", "PUT /a", "POST", "PUT /a", "POST"]


def test_request_is_withdrawn_when_the_time_has_passed():
    with scripted(state("waiting")) as (url, requests):
        done = run(url, ("--wait", "1s"))
    assert (done.returncode, done.stdout) == (NO_MEMORY_EXIT_CODE, "")
    assert "gpumond: not started after 1 s: GPU 0 has 1.0 GiB available, but 2.0 GiB is needed" in done.stderr
    assert requests[0] == "POST"
    assert requests[-1] == "DELETE /a"


def test_refused_request_is_not_withdrawn():
    with scripted(state("refused")) as (url, requests):
        done = run(url)
    assert (done.returncode, requests) == (NO_MEMORY_EXIT_CODE, ["POST"])
    assert "GPU 0 has 1.0 GiB available, but 2.0 GiB is needed; 1.0 GiB is missing" in done.stderr


def test_grant_of_a_command_that_does_not_exist_is_released():
    with scripted(state("granted")) as (url, requests):
        done = run(url, command=("/nonexistent/program",))
    assert (done.returncode, requests) == (127, ["POST", "DELETE /a"])


def test_daemon_that_cannot_be_reached_is_an_error():
    done = run("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no daemon is reachable" in done.stderr


def test_explanation_names_programs_and_earlier_requests():
    plan = [{"pid": 7, "start_ticks": 1, "workload": "train\n", "reclaimable_bytes": GIB}]
    _, answer = state("waiting", ahead=2, available_bytes=None, missing_bytes=0, plan=plan)
    text = explanation(answer)
    assert text.startswith("number 3 in the queue, behind 2 other requests; GPU 0 has an unknown amount")
    assert "but 2.0 GiB is needed. Flushing train" in text
    assert "(pid 7, 1.0 GiB)" in text
    assert "\n" not in text


def test_wait_names_what_is_ahead_with_its_size():
    before = {"workload": "bigjob", "pid": 8, "need_bytes": 20 * GIB}
    with scripted(state("waiting", ahead=1, behind=[before]), state("granted")) as (url, _):
        done = run(url, ["--wait", "1m"])
    assert "waiting: number 2 in the queue, behind bigjob (20.0 GiB); GPU 0 has 1.0 GiB available" in done.stderr


def test_room_that_earlier_requests_claim_is_stated():
    claimed = {"ahead": 1, "available_bytes": -10 * GIB, "claimed_bytes": 20 * GIB, "missing_bytes": 12 * GIB}
    _, answer = state("waiting", behind=[{"workload": "bigjob", "pid": 8, "need_bytes": 20 * GIB}], **claimed)
    room = "the 10.0 GiB available on GPU 0 is kept for earlier requests, and 2.0 GiB is needed"
    assert explanation(answer) == f"number 2 in the queue, behind bigjob (20.0 GiB); {room}"
