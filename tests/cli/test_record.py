"""``gpumond record``: every snapshot of a daemon, once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path

from gpumond.facts.messages import from_json, to_json
from gpumond.facts.snapshot import Snapshot
from tests.fakenvml import FakeDriver, machine
from tests.helpers.running import RunningDaemon, free_port, until
from tests.helpers.values import make_device, make_snapshot


def record(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "gpumond", "record", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60)


def recorded(lines: bytes) -> list[Snapshot]:
    return [from_json(Snapshot, line) for line in lines.splitlines()]


@contextmanager
def answering(*answers: bytes | int) -> Iterator[str]:
    """Serve these answers (a snapshot in JSON, or a status), the last one repeatedly."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = left.pop(0) if len(left) > 1 else left[0]
            body = answer if isinstance(answer, bytes) else json.dumps({"detail": "not yet"}).encode()
            self.send_response(200 if isinstance(answer, bytes) else answer)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def at(seq: int) -> Snapshot:
    return make_snapshot(make_device(), seq=seq, elapsed_seconds=float(seq), taken_at=1000.0 + seq)


def test_snapshots_are_written_once():
    with answering(to_json(at(1)), to_json(at(1)), to_json(at(2)), to_json(at(2)), to_json(at(3))) as url:
        done = record("--url", url, "--for", "3s")
    assert recorded(done.stdout) == [at(1), at(2), at(3)]
    assert (done.returncode, done.stderr) == (0, b"gpumond: 3 snapshots recorded\n")


def test_progress_is_told_after_two_seconds_and_the_summary_as_json(tmp_path: Path):
    with answering(*(to_json(at(seq)) for seq in range(1, 100))) as url:
        done = record("--url", url, "--for", "3s", "--out", str(tmp_path / "log"), "--json")
    count = len((tmp_path / "log").read_bytes().splitlines())
    assert json.loads(done.stdout) == {"snapshots": count, "missed": 0}
    (progress,) = done.stderr.decode().splitlines()
    assert progress.endswith(" snapshots recorded")
    assert int(progress.split()[1]) < count
    assert record("--json").returncode == 2, "the output is JSON already"


def test_missed_snapshots_are_reported():
    with answering(to_json(at(1)), to_json(at(4))) as url:
        done = record("--url", url, "--for", "1s")
    assert done.stderr == b"gpumond: 2 snapshots recorded, 2 missed between two requests\n"


def test_record_waits_for_a_daemon_that_is_not_ready_or_is_gone():
    with answering(503, to_json(at(1)), 500, to_json(at(2))) as url:
        done = record("--url", url, "--for", "3s")
    assert recorded(done.stdout) == [at(1), at(2)]
    assert done.stderr.count(b"waiting") == 2


def test_missing_daemon_exits_with_1_and_the_remedy():
    refused = record("--url", f"http://127.0.0.1:{free_port()}")
    assert refused.returncode == 1
    assert b"no daemon is reachable at" in refused.stderr
    assert b"gpumond serve" in refused.stderr


def test_snapshot_of_another_version_exits_with_1():
    with answering(b'{"seq": "x"}') as url:
        refused = record("--url", url)
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert b"can't decode the daemon's snapshot" in refused.stderr


def test_unwritable_file_exits_with_2(tmp_path: Path):
    refused = record("--out", str(tmp_path / "no" / "file"))
    assert (refused.returncode, b"no isn't a directory; create it" in refused.stderr) == (2, True)


def test_record_writes_snapshots_of_a_real_daemon_until_it_is_interrupted(
    serve: Callable[..., RunningDaemon], driver: FakeDriver, tmp_path: Path
):
    driver.devices = machine(2)
    driver.write()
    daemon = serve("--source", "nvml", "--interval", "0.2s", environ=driver.env)
    file = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "gpumond", "record", "--out", str(file)]
    recorder = subprocess.Popen(command, env=daemon.environ, stderr=subprocess.PIPE)
    until(lambda: file.exists() and file.read_bytes().count(b"\n") > 5)
    recorder.send_signal(signal.SIGINT)
    _, errors = recorder.communicate(timeout=60)
    snapshots = recorded(file.read_bytes())
    assert recorder.returncode == 0
    assert errors.decode().splitlines()[-1].startswith(f"gpumond: {len(snapshots)} snapshots recorded")
    assert all(one.seq < other.seq for one, other in pairwise(snapshots))
    assert {device.uuid for device in snapshots[-1].devices} == {device.uuid for device in driver.devices}


def test_csv_is_appended_to_with_one_header_and_diagnose_reads_it(tmp_path: Path):
    file = tmp_path / "log.csv"
    for seq in (1, 3):
        with answering(to_json(at(seq)), to_json(at(seq + 1))) as url:
            assert record("--url", url, "--for", "1s", "--csv", "--out", str(file)).returncode == 0
    times = [line.partition(",")[0] for line in file.read_text().splitlines()]
    assert times == ["time", "1001.000", "1002.000", "1003.000", "1004.000"]
    done = subprocess.run([sys.executable, "-m", "gpumond", "diagnose", str(file)], capture_output=True, timeout=60)
    assert b"4 readings over 3 s: 1 device, 0 processes" in done.stdout
