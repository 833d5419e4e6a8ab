"""HTTP API with a view of fixed values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumond.facts.errors import CooldownActive, FlushError, FlushInProgress, NoSuchTarget
from gpumond.facts.flush import FlushResponse
from gpumond.facts.pools import Receipt
from gpumond.serve.examples import DEVICE, RECEIPT, REPORT
from tests.serve.application import TOKEN, View, ask


def test_json_keys_are_the_field_names_of_the_types():
    snapshot = ask(View(), "/api/v1/snapshot").json()
    assert snapshot["devices"][0]["used_bytes"] == DEVICE.used_bytes
    assert snapshot["reports"][0]["pools"][0]["reclaimable"]["likely"] == REPORT.pools[0].reclaimable.likely
    (process,) = ask(View(), "/api/v1/processes").json()
    assert process["cached_bytes"] == 40 * 1024**3
    assert process["opaque_bytes"] is None
    assert process["workload"] == "train"


FRAME_ROUTES = ("snapshot", "devices", "processes", "agents", "ledger", "verdicts", "alerts", "status")


@pytest.mark.parametrize("route", [*FRAME_ROUTES, "rules", "rules/device-lost", "receipts", "alerts/history", "audit"])
def test_read_routes_need_no_token_and_answer_503_before_the_first_frame(route: str):
    assert ask(View(), f"/api/v1/{route}").status_code == 200
    early = ask(View(frame=None), f"/api/v1/{route}")
    assert early.status_code == (503 if route in FRAME_ROUTES else 200)


def test_metrics_are_text_or_openmetrics_plain_or_compressed():
    text = ask(View(), "/metrics", headers={"Accept-Encoding": "identity"})
    assert text.headers["content-type"].startswith("text/plain; version=")
    zipped = ask(View(), "/metrics", headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["content-encoding"] == "gzip"
    for refused in ("x-gzip", "gzip;q=0"):
        assert "content-encoding" not in ask(View(), "/metrics", headers={"Accept-Encoding": refused}).headers
    assert zipped.text == text.text
    newer = ask(View(), "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert newer.headers["content-type"].startswith("application/openmetrics-text")
    assert newer.text.endswith("# EOF\n")
    assert ask(View(frame=None), "/metrics").status_code == 200


def test_liveness_is_not_readiness():
    assert ask(View(frame=None), "/-/healthy").status_code == 200
    assert ask(View(frame=None), "/-/ready").status_code == 503
    assert ask(View(), "/-/ready").status_code == 200
    assert ask(View(frame=None), "/readyz").status_code == 503
    assert [ask(View(), path).status_code for path in ("/readyz", "/healthz")] == [200, 200]


def test_flush_returns_its_receipts():
    view = View()
    answer = ask(
        view, "/api/v1/flushes", "POST", headers=TOKEN, json={"target": {"pid": 4242}, "steps": ["cache", "ipc"]}
    )
    assert answer.status_code == 200
    assert answer.json()["receipts"][0]["outcome"] == "freed"
    assert answer.json()["released_bytes"] == RECEIPT.released_bytes
    assert view.flush_requests[0].steps == ("ipc", "cache")


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}])
def test_flush_without_token_is_refused(headers: dict[str, str]):
    view = View()
    answer = ask(view, "/api/v1/flushes", "POST", headers=headers, json={"target": {"all": True}})
    assert (answer.status_code, view.flush_requests) == (401, [])
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("error", "status"),
    [(NoSuchTarget("no"), 404), (FlushInProgress("busy"), 409), (CooldownActive("soon", 12.0), 429)],
)
def test_flush_errors_are_problem_documents(error: FlushError, status: int):
    answer = ask(View(answer=error), "/api/v1/flushes", "POST", headers=TOKEN, json={"target": {"all": True}})
    assert answer.status_code == answer.json()["status"] == status
    assert answer.json()["detail"] == str(error)
    assert answer.headers.get("retry-after") == ("12" if status == 429 else None)


def test_unfinished_flush_is_never_200():
    timeout = FlushResponse("id", (RECEIPT, Receipt(**{**_fields(RECEIPT), "outcome": "timeout"})), 1)
    answer = ask(View(answer=timeout), "/api/v1/flushes", "POST", headers=TOKEN, json={"target": {"all": True}})
    assert answer.status_code == 504
    assert [receipt["outcome"] for receipt in answer.json()["receipts"]] == ["freed", "timeout"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "body.target: required, but not given"),
        ({"target": {}}, "exactly one"),
        ({"target": {"pid": 1, "all": True}}, "exactly one"),
        ({"target": {"pid": "1"}}, "pid"),
        ({"target": {"pid": -1}}, "pid"),
        ({"target": {"all": True}, "steps": ["magic"]}, "unknown step 'magic'"),
        ({"target": {"all": True}, "steps": []}, "at least one"),
        ({"target": {"all": True}, "dryrun": True}, "dryrun"),
        ({"target": {"all": True}, "timeout_seconds": 0}, "timeout_seconds"),
        ({"target": {"all": True}, "min_reclaimable_bytes": -1}, "min_reclaimable_bytes"),
    ],
)
def test_invalid_request_names_the_expected_values(body: dict[str, Any], says: str):
    view = View()
    answer = ask(view, "/api/v1/flushes", "POST", headers=TOKEN, json=body)
    assert (answer.status_code, view.flush_requests) == (422, [])
    assert says in answer.json()["detail"]


def test_release_returns_its_end_and_504_if_the_driver_is_still_held():
    free = ask(View(), "/api/v1/release", "POST", headers=TOKEN, json={"for_seconds": 60})
    assert (free.status_code, free.json()) == (200, {"released_until": 61.0})
    assert ask(View(), "/api/v1/release", "POST", headers=TOKEN, json={"for_seconds": 600}).status_code == 504
    assert ask(View(), "/api/v1/release", "POST", json={"for_seconds": 60}).status_code == 401


def test_openapi_describes_every_route_with_an_example_of_its_answer():
    document = ask(View(), "/openapi.json").json()
    assert {"/metrics", "/-/healthy", "/-/ready", "/api/v1/flushes", "/api/v1/ledger"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"], path
            good = next(
                operation["responses"][code] for code in ("200", "201", "202", "204") if code in operation["responses"]
            )
            good = good.get("content", {})
            if "application/json" in good:
                assert good["application/json"]["schema"], path
                assert "example" in good["application/json"], path
    assert "Receipt" in document["components"]["schemas"]
    assert json.dumps(document)


def test_unknown_routes_are_problems_too():
    answer = ask(View(), "/api/v1/nothing")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
    assert answer.json()["detail"] == "this daemon doesn't serve /api/v1/nothing; /docs lists what it serves"
    refused = ask(View(), "/api/v1/frame", "POST", json={})
    assert refused.json()["detail"] == "/api/v1/frame doesn't accept POST; it accepts GET and HEAD"
    unnamed = ask(View(), "/api/v1/history")
    assert unnamed.json()["detail"] == "query parameter uuid: required, but not given"


def _fields(receipt: Receipt) -> dict[str, Any]:
    return {name: getattr(receipt, name) for name in receipt.__slots__}
