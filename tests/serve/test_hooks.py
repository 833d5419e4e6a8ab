"""Notifications of Alertmanager over HTTP: body, limits and answers."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest

from gpumond.features.flush.routes import HOOK_BODY_EXAMPLE, MAX_ALERTS, MAX_LABEL_LENGTH, STARTS_AT
from gpumond.serve import examples
from gpumond.serve.limits import FLUSHES_PER_MINUTE
from tests.serve.application import TOKEN, View, ask
from tests.serve.guarded import GuardedApi, bearer

HOOK = "/api/v1/hooks/alertmanager"

NOTIFICATION: dict[str, Any] = {
    "version": "4",
    "groupKey": '{}:{alertname="GpumondReclaimableWaste"}',
    "truncatedAlerts": 0,
    "status": "firing",
    "receiver": "gpumond",
    "groupLabels": {"alertname": "GpumondReclaimableWaste"},
    "commonLabels": {"alertname": "GpumondReclaimableWaste", "job": "gpumond"},
    "commonAnnotations": {"summary": "GPU 0: 30% of its memory is unused cache"},
    "externalURL": "http://alertmanager:9093",
    "alerts": [
        {
            "status": "firing",
            "labels": {
                "alertname": "GpumondReclaimableWaste",
                "instance": "node7:9917",
                "job": "gpumond",
                "uuid": examples.UUID,
            },
            "annotations": {"summary": "GPU 0: 30% of its memory is unused cache"},
            "startsAt": "2026-09-21T14:13:20.123456789Z",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "http://prometheus:9090/graph",
            "fingerprint": "b1f4f0c0d9a3e7c2",
        }
    ],
}
"""As Alertmanager sends it."""


def changed(**fields: Any) -> dict[str, Any]:
    body = deepcopy(NOTIFICATION)
    body["alerts"][0] |= fields
    return body


def post(view: View, body: object, query: str = "") -> Any:
    return ask(view, HOOK + query, "POST", headers=TOKEN, json=body)


def test_notification_flushes_the_programs_by_the_limits_of_rules():
    view = View()
    answer = post(view, NOTIFICATION)
    assert answer.status_code == 200
    assert answer.json()["released_bytes"] == examples.RECEIPT.released_bytes
    (result,) = answer.json()["alerts"]
    assert result == {
        "fingerprint": "b1f4f0c0d9a3e7c2",
        "alert": "GpumondReclaimableWaste",
        "starts_at": 1_790_000_000.123456,
        "outcome": "flushed",
        "reason": "",
        "pids": [4242],
        "released_bytes": examples.RECEIPT.released_bytes,
    }
    (request,) = view.flush_requests
    assert (request.target.pid, request.target.start_ticks) == (4242, examples.START_TICKS)
    assert (request.by_rule, request.force, request.dry_run) == (True, False, False)
    assert post(view, NOTIFICATION).json()["alerts"][0]["outcome"] == "repeated"
    assert [action for _, action, _ in view.store.audited] == ["hook.flush"]


def test_example_of_the_document_is_accepted():
    assert post(View(), HOOK_BODY_EXAMPLE).json()["alerts"][0]["starts_at"] == 1_790_000_000.125
    assert STARTS_AT.endswith("20.125Z")


def test_query_requests_a_plan():
    view = View()
    answer = post(view, NOTIFICATION, "?dry_run=true")
    assert (answer.json()["dry_run"], answer.json()["alerts"][0]["outcome"]) == (True, "planned")
    assert [request.dry_run for request in view.flush_requests] == [True]
    assert post(view, NOTIFICATION, "?dry_run=perhaps").status_code == 422


def test_other_alerts_are_skipped_with_the_reason():
    view = View()
    others = [
        changed(status="resolved"),
        changed(labels={"alertname": "Waste", "uuid": "GPU-of-another-machine"}),
        changed(labels={"alertname": "GpumondDaemonDown", "instance": "node7:9917"}),
    ]
    answer = post(view, {"version": "4", "alerts": [body["alerts"][0] for body in others]})
    assert answer.status_code == 200
    assert [each["outcome"] for each in answer.json()["alerts"]] == ["skipped"] * 3
    assert all(each["reason"] for each in answer.json()["alerts"])
    assert view.flush_requests == []


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (NOTIFICATION | {"version": "3"}, "version"),
        (NOTIFICATION | {"alerts": NOTIFICATION["alerts"] * (MAX_ALERTS + 1)}, "alerts"),
        (changed(status="pending"), "status"),
        (changed(startsAt="yesterday"), "startsAt"),
        (changed(startsAt="2026-13-41T00:00:00Z"), "startsAt"),
        (changed(startsAt=1_790_000_000), "startsAt"),
        (changed(fingerprint="../x"), "fingerprint"),
        (changed(labels={"uuid": "x" * (MAX_LABEL_LENGTH + 1)}), "labels"),
        (changed(labels={f"l{number}": "" for number in range(65)}), "labels"),
        (changed(labels={"uuid": 1}), "labels"),
        (changed(labels={"uuid": "\ud800"}), "surrogate"),
    ],
)
def test_wrong_notification_is_refused(body: dict[str, Any], place: str):
    view = View()
    headers = TOKEN | {"Content-Type": "application/json"}
    answer = ask(view, HOOK, "POST", headers=headers, content=json.dumps(body))
    assert answer.status_code == 422
    assert place in answer.json()["detail"]
    assert view.flush_requests == []


def test_large_notification_is_refused():
    body = NOTIFICATION | {"commonAnnotations": {"summary": "x" * 65536}}
    answer = GuardedApi().ask("POST", HOOK, headers=bearer("gpm_flusher"), json=body)
    assert answer.status_code == 413


def test_notification_that_cannot_be_handled_now_is_sent_again_by_alertmanager():
    """Alertmanager repeats a notification after a status 5xx."""
    assert post(View(frame=None), NOTIFICATION).status_code == 503
    view = View()
    view.store.full = True
    assert (post(view, NOTIFICATION).status_code, view.flush_requests) == (507, [])


def test_notifications_of_one_caller_are_bounded_and_plans_are_not():
    api = GuardedApi()
    flusher = bearer("gpm_flusher")

    def status(query: str = "", body: object = NOTIFICATION) -> int:
        return api.ask("POST", HOOK + query, headers=flusher, json=body).status_code

    assert [status() for _ in range(FLUSHES_PER_MINUTE + 1)] == [200] * FLUSHES_PER_MINUTE + [429]
    assert [status("?dry_run=true"), status(body=changed(status="resolved"))] == [200, 200]
