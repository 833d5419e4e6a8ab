"""Requests to webhooks and Alertmanagers, and the meaning of their answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate
from functools import partial
from pathlib import Path

import pytest

from gpumond.facts.frame import Alert
from gpumond.features.alerts.receivers.alertmanager import Alertmanager
from gpumond.features.alerts.receivers.base import NotSent, ReceiverType, Rejected, TemporaryFailure
from gpumond.features.alerts.receivers.webhook import Webhook
from tests.helpers.alert_listener import OK, Listener, answer, drip, failure, stall
from tests.helpers.running import until

ALERT = Alert(
    rule="full",
    phase="firing",
    labels=(("alertname", "full"), ("gpu", "0")),
    annotations=(("summary", "much"),),
    value=0.9,
    active_at=1000.0,
    fired_at=1060.0,
)
RESOLVED = replace(ALERT, resolved_at=2000.0)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def send(receiver: ReceiverType, raised: tuple[Alert, ...] = (ALERT,), resolved: tuple[Alert, ...] = ()) -> None:
    asyncio.run(receiver.send(raised, resolved))


def webhook(listener: Listener, **fields: Path) -> Webhook:
    return Webhook(name="hook", url=f"{listener.url}/alerts?team=a", **fields)


def test_webhook_request_has_the_documented_json(listener: Listener):
    send(webhook(listener), (ALERT,), (RESOLVED,))
    (request,) = listener.requests
    assert request.line == "POST /alerts?team=a HTTP/1.1"
    assert request.headers["content-type"] == "application/json"
    document = request.json
    assert document.keys() == {"version", "receiver", "instance", "sent_at", "alerts"}
    assert (document["version"], document["receiver"]) == (1, "hook")
    firing, resolved = document["alerts"]
    assert firing == {
        "status": "firing",
        "fingerprint": firing["fingerprint"],
        "rule": "full",
        "labels": {"alertname": "full", "gpu": "0"},
        "annotations": {"summary": "much"},
        "value": 0.9,
        "active_at": 1000.0,
        "fired_at": 1060.0,
        "resolved_at": None,
    }
    assert (resolved["status"], resolved["resolved_at"]) == ("resolved", 2000.0)
    assert resolved["fingerprint"] == firing["fingerprint"]


def test_webhook_request_is_signed_with_the_current_secret(listener: Listener, tmp_path: Path):
    secret = tmp_path / "secret"
    for key in ("first", "second"):
        secret.write_text(f"{key}\n")
        send(webhook(listener, secret_file=secret))
        request = listener.requests[-1]
        signed = request.headers["x-gpumond-timestamp"].encode() + b"." + request.body
        expected = hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()
        assert request.headers["x-gpumond-signature"] == f"sha256={expected}"


def test_address_and_token_can_be_read_from_files(listener: Listener, tmp_path: Path):
    (tmp_path / "url").write_text(f"{listener.url}/secret-path\n")
    (tmp_path / "token").write_text("tok\n")
    send(Webhook(name="hook", url_file=tmp_path / "url", bearer_token_file=tmp_path / "token"))
    assert listener.requests[0].line == "POST /secret-path HTTP/1.1"
    assert listener.requests[0].headers["authorization"] == "Bearer tok"


def test_alertmanager_request_ends_after_four_resend_intervals(listener: Listener):
    send(Alertmanager(name="am", url=f"{listener.url}/prefix/"), (ALERT,), (RESOLVED,))
    (request,) = listener.requests
    assert request.line == "POST /prefix/api/v2/alerts HTTP/1.1"
    firing, resolved = request.json
    assert firing["labels"] == {
        "alertname": "full",
        "gpu": "0",
        "instance": socket.gethostname(),
        "machine": socket.gethostname(),
        "rule": "full",
    }
    assert firing["startsAt"] == "1970-01-01T00:17:40+00:00"
    assert firing["endsAt"] > "2020"
    assert resolved["endsAt"] == "1970-01-01T00:33:20+00:00"


@pytest.mark.parametrize(
    "receiver",
    [
        partial(Alertmanager, runbooks="https://gpu.example/docs/runbooks/"),
        partial(Webhook, runbooks="https://gpu.example/docs/runbooks/"),
        partial(Webhook, page_url="https://gpu.example"),
    ],
)
def test_receivers_link_built_in_rules_to_their_runbooks(
    listener: Listener, receiver: Callable[..., Alertmanager | Webhook]
):
    leak = replace(ALERT, rule="leak", annotations=(("summary", "it leaks"),))
    send(receiver(name="x", url=listener.url), (ALERT, leak), ())
    sent = listener.requests[-1].json
    plain, linked = sent["alerts"] if isinstance(sent, dict) else sent
    assert "runbook_url" not in plain["annotations"]
    assert linked["annotations"] == {"summary": "it leaks", "runbook_url": "https://gpu.example/docs/runbooks/leak"}


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (400, Rejected, "rejected"),
        (401, Rejected, "auth"),
        (403, Rejected, "auth"),
        (404, Rejected, "rejected"),
        (408, TemporaryFailure, "server_error"),
        (429, TemporaryFailure, "rate_limited"),
        (500, TemporaryFailure, "server_error"),
        (503, TemporaryFailure, "server_error"),
    ],
)
def test_only_temporary_errors_are_retried(listener: Listener, status: int, kind: type[NotSent], reason: str):
    listener.answer = answer(status)
    failed = failure(webhook(listener))
    assert (type(failed), failed.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), ("100000", 3600.0), ("-3", 0.0), ("soon", 0.0), ("nan", 0.0)]
)
def test_retry_after_is_used_up_to_a_limit(listener: Listener, header: str, seconds: float):
    listener.answer = answer(429, Retry_After=header)
    failed = failure(webhook(listener))
    assert isinstance(failed, TemporaryFailure)
    assert failed.after_seconds == seconds


def test_retry_after_may_be_a_date(listener: Listener):
    listener.answer = answer(503, Retry_After=formatdate(time.time() + 60, usegmt=True))
    failed = failure(webhook(listener))
    assert isinstance(failed, TemporaryFailure)
    assert 50 < failed.after_seconds <= 60


def test_redirect_is_not_followed(listener: Listener):
    elsewhere = Listener()
    listener.answer = answer(307, Location=f"{elsewhere.url}/latest/meta-data")
    assert failure(webhook(listener)).reason == "redirect"
    assert elsewhere.requests == []
    elsewhere.close()


def test_proxy_of_the_environment_is_not_used(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    send(webhook(listener))
    assert len(listener.requests) == 1


def flood(connection: socket.socket) -> None:
    try:
        while True:
            connection.sendall(b"x" * 65536)
    except OSError:
        pass


@pytest.mark.parametrize(("does", "reason"), [(stall, "timeout"), (drip, "timeout"), (flood, "connection")])
def test_receiver_that_stalls_drips_or_floods_times_out(listener: Listener, does: object, reason: str):
    listener.answer = does  # type: ignore[assignment]
    failed = failure(webhook(listener), timeout_seconds=0.3)
    assert (type(failed), failed.reason) == (TemporaryFailure, reason)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "gpumond-http"], seconds=3)


def test_endless_response_body_is_not_read(listener: Listener):
    def endless(connection: socket.socket) -> None:
        connection.sendall(OK.replace(b"Content-Length: 0\r\n", b""))
        flood(connection)

    listener.answer = endless
    send(webhook(listener))


def test_unreachable_receiver_is_retried(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert failure(Webhook(name="hook", url=f"http://127.0.0.1:{port}")).reason == "connection"
    assert failure(Webhook(name="hook", url="http://name.invalid")).reason == "dns"
    assert failure(Webhook(name="hook", url_file=tmp_path / "none")).reason == "secret"


def test_receiver_without_tls_fails_at_an_https_address(listener: Listener):
    listener.answer = b"no"
    failed = failure(Webhook(name="hook", url=listener.url.replace("http", "https")), timeout_seconds=1.0)
    assert failed.reason in ("tls", "timeout", "connection")


def test_address_from_a_file_must_be_http(tmp_path: Path):
    (tmp_path / "url").write_text("file:///etc/passwd")
    assert type(failure(Webhook(name="hook", url_file=tmp_path / "url"))) is Rejected
