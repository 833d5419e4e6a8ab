"""Frames as the daemon returns them, and a fake daemon with the answers that a test defines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pydantic import TypeAdapter

from gpumond.facts.frame import Alert, ConditionWithRemedy, FaultWithRemedy, Frame, FullFrame, Verdict
from gpumond.facts.quota import GrantedRequest, QueuedRequest
from gpumond.facts.shares import SHARES
from gpumond.facts.snapshot import DeviceReading
from gpumond.serve.full_frame import holdings
from gpumond.tick.ledger import make_ledger
from tests.helpers.agents import GIB
from tests.helpers.values import make_device, make_pool, make_process, make_report, make_snapshot

FRAME = TypeAdapter(FullFrame)


def make_frame(
    *devices: DeviceReading,
    verdicts: tuple[Verdict, ...] = (),
    alerts: tuple[Alert, ...] = (),
    faults: tuple[FaultWithRemedy, ...] = (),
    conditions: tuple[ConditionWithRemedy, ...] = (),
    queue: tuple[QueuedRequest, ...] = (),
    grants: tuple[GrantedRequest, ...] = (),
    **fields: Any,
) -> dict[str, Any]:
    snapshot = make_snapshot(*devices, **fields)
    frame = Frame(snapshot, make_ledger(snapshot), verdicts, alerts)
    return as_json(frame, faults=faults, conditions=conditions, queue=queue, grants=grants)


def as_json(
    frame: Frame,
    faults: tuple[FaultWithRemedy, ...] = (),
    conditions: tuple[ConditionWithRemedy, ...] = (),
    queue: tuple[QueuedRequest, ...] = (),
    grants: tuple[GrantedRequest, ...] = (),
) -> dict[str, Any]:
    whole = FullFrame(
        version="0",
        revision=None,
        host="gpu-17",
        snapshot=frame.snapshot,
        ledger=frame.ledger,
        verdicts=tuple(frame.verdicts),
        alerts=tuple(frame.alerts),
        silences=(),
        queue=queue,
        grants=grants,
        processes=tuple(holdings(frame)),
        faults=faults,
        conditions=conditions,
    )
    decoded: dict[str, Any] = FRAME.dump_python(whole, mode="json")
    return decoded


def busy_frame(**fields: Any) -> dict[str, Any]:
    """80 GiB: train holds 40 (20 live, 12 cached, 6 stranded, 2 overhead), pid 11 without an agent 10."""
    device = make_device(
        name="H100",
        used_bytes=50 * GIB,
        free_bytes=30 * GIB,
        processes=(make_process(10, 40 * GIB), make_process(11, 10 * GIB, comm="python", user="research")),
    )
    report = make_report(10, (make_pool(live=20 * GIB, cached=12 * GIB, stranded=6 * GIB),))
    return make_frame(device, **{"reports": (report,)} | fields)


class FakeDaemon:
    """HTTP server. ``answers`` by path, without the query: (status, JSON). An answer of None is never sent."""

    def __init__(self, frame: dict[str, Any]) -> None:
        self.answers: dict[str, tuple[int, Any] | None] = {"/api/v1/history": (404, {"detail": "nothing is known"})}
        self.requests: list[tuple[str, Any]] = []
        self.queries: list[tuple[str, Any]] = []
        """Return the complete request."""
        self.url = ""
        self.over = threading.Event()
        self.show(frame)

    def show(self, frame: dict[str, Any]) -> None:
        self.answers["/api/v1/frame"] = (200, frame)


@contextmanager
def fake_daemon(frame: dict[str, Any]) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(frame)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            path = self.path.partition("?")[0]
            fake.requests.append((path, body))
            fake.queries.append((self.path, body))
            answer = fake.answers.get(path, (404, {"detail": f"no {path}"}))
            if answer is None:
                fake.over.wait(30)
                return
            sent = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield fake
        finally:
            fake.over.set()
            server.shutdown()


def holding_with(pid: int = 7, **fields: Any) -> dict[str, Any]:
    names = ("container", "container_name", "pod_name", "unit", "slurm_job")
    defaults = {"comm": "python", "workload": "", "kinds": ["compute"], "used_bytes": 3 * GIB, "state": "alive"}
    return {"pid": pid, "device_uuid": "GPU-a", **dict.fromkeys(names), **defaults} | fields


def share_history(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return an answer of `/api/v1/history/shares`: times with opaque bytes."""
    times, sizes = ([point[place] for point in points] for place in (0, 1))
    unknown = {share: [None] * len(points) for share in SHARES}
    used = dict.fromkeys(("low", "high", "used"), sizes)
    return {"at": times, "resolution_seconds": None, "block_seconds": None, **used, **unknown, "opaque": sizes}
