"""What goes over the wire to webhooks and Alertmanagers, and what their answers mean."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

from gpumond.alerting.receivers import NotSent, Receiver, Rejected, Retry, notifier
from gpumond.alerting.receivers.http_client import post
from gpumond.model.frame import Alert
from tests.alerting.listener import OK, Listener, answer

ALERT = Alert(
    rule="full",
    phase="firing",
    labels=(("alertname", "full"), ("gpu", "0")),
    annotations=(("summary", "much"),),
    value=0.9,
    active_at=1000.0,
    fired_at=1060.0,
)
OVER = replace(ALERT, resolved_at=2000.0)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


def send(receiver: Receiver, raised: tuple[Alert, ...] = (ALERT,), resolved: tuple[Alert, ...] = ()) -> None:
    asyncio.run(notifier(receiver).send(raised, resolved))


def webhook(listener: Listener, **fields: str) -> Receiver:
    return Receiver("hook", "webhook", **{"url": f"{listener.url}/alerts?team=a", **fields})


def test_a_webhook_gets_the_documented_json(listener: Listener):
    send(webhook(listener), (ALERT,), (OVER,))
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


def test_a_webhook_is_signed_with_the_secret_as_it_is_now(listener: Listener, tmp_path: Path):
    secret = tmp_path / "secret"
    for key in ("first", "second"):
        secret.write_text(f"{key}\n")
        send(webhook(listener, secret_file=str(secret)))
        request = listener.requests[-1]
        signed = request.headers["x-gpumond-timestamp"].encode() + b"." + request.body
        expected = hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()
        assert request.headers["x-gpumond-signature"] == f"sha256={expected}"


def test_an_address_and_a_token_can_stay_in_files(listener: Listener, tmp_path: Path):
    (tmp_path / "url").write_text(f"{listener.url}/secret-path\n")
    (tmp_path / "token").write_text("tok\n")
    send(Receiver("hook", "webhook", url_file=str(tmp_path / "url"), bearer_token_file=str(tmp_path / "token")))
    assert listener.requests[0].line == "POST /secret-path HTTP/1.1"
    assert listener.requests[0].headers["authorization"] == "Bearer tok"


def test_an_alertmanager_gets_its_api_with_an_end_that_outlives_four_resends(listener: Listener):
    send(Receiver("am", "alertmanager", f"{listener.url}/prefix/", instance="node7"), (ALERT,), (OVER,))
    (request,) = listener.requests
    assert request.line == "POST /prefix/api/v2/alerts HTTP/1.1"
    firing, resolved = request.json
    assert firing["labels"] == {"alertname": "full", "gpu": "0", "instance": "node7"}
    assert firing["startsAt"] == "1970-01-01T00:17:40+00:00"
    assert firing["endsAt"] > "2020"
    assert resolved["endsAt"] == "1970-01-01T00:33:20+00:00"


def failure(receiver: Receiver, timeout_seconds: float = 5.0) -> NotSent:
    with pytest.raises(NotSent) as failed:
        asyncio.run(post(receiver, "", b"{}", timeout_seconds=timeout_seconds))
    assert "127.0.0.1" not in str(failed.value), "an address is a secret"
    return failed.value


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (400, Rejected, "rejected"),
        (401, Rejected, "auth"),
        (403, Rejected, "auth"),
        (404, Rejected, "rejected"),
        (408, Retry, "server_error"),
        (429, Retry, "rate_limited"),
        (500, Retry, "server_error"),
        (503, Retry, "server_error"),
    ],
)
def test_only_what_may_pass_is_worth_another_try(listener: Listener, status: int, kind: type[NotSent], reason: str):
    listener.answer = answer(status)
    failed = failure(webhook(listener))
    assert (type(failed), failed.reason) == (kind, reason)


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7.0), ("100000", 3600.0), ("-3", 0.0), ("soon", 0.0), ("nan", 0.0)]
)
def test_retry_after_is_honoured_within_reason(listener: Listener, said: str, seconds: float):
    listener.answer = answer(429, Retry_After=said)
    failed = failure(webhook(listener))
    assert isinstance(failed, Retry)
    assert failed.after_seconds == seconds


def test_retry_after_may_be_a_date(listener: Listener):
    listener.answer = answer(503, Retry_After=formatdate(time.time() + 60, usegmt=True))
    failed = failure(webhook(listener))
    assert isinstance(failed, Retry)
    assert 50 < failed.after_seconds <= 60


def test_a_redirect_is_not_followed(listener: Listener):
    elsewhere = Listener()
    listener.answer = answer(307, Location=f"{elsewhere.url}/latest/meta-data")
    assert failure(webhook(listener)).reason == "redirect"
    assert elsewhere.requests == []
    elsewhere.close()


def test_a_proxy_of_the_environment_is_not_used(listener: Listener, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    send(webhook(listener))
    assert len(listener.requests) == 1


def stall(connection: socket.socket) -> None:
    connection.recv(1)


def drip(connection: socket.socket) -> None:
    """A header that never ends, a byte at a time."""
    try:
        while True:
            connection.sendall(b"H")
            time.sleep(0.01)
    except OSError:
        pass


def flood(connection: socket.socket) -> None:
    try:
        while True:
            connection.sendall(b"x" * 65536)
    except OSError:
        pass


@pytest.mark.parametrize(("does", "reason"), [(stall, "timeout"), (drip, "timeout"), (flood, "connection")])
def test_a_receiver_that_stalls_drips_or_floods_is_left(listener: Listener, does: object, reason: str):
    listener.answer = does  # type: ignore[assignment]
    failed = failure(webhook(listener), timeout_seconds=0.3)
    assert (type(failed), failed.reason) == (Retry, reason)


def test_an_endless_body_after_the_answer_costs_nothing(listener: Listener):
    def endless(connection: socket.socket) -> None:
        connection.sendall(OK.replace(b"Content-Length: 0\r\n", b""))
        flood(connection)

    listener.answer = endless
    send(webhook(listener))


def test_what_cannot_be_reached_may_be_later(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert failure(Receiver("hook", "webhook", f"http://127.0.0.1:{port}")).reason == "connection"
    assert failure(Receiver("hook", "webhook", "http://name.invalid")).reason == "dns"
    assert failure(Receiver("hook", "webhook", url_file=str(tmp_path / "none"))).reason == "secret"


def test_a_receiver_without_tls_is_no_tls_receiver(listener: Listener):
    listener.answer = b"no"
    failed = failure(Receiver("hook", "webhook", listener.url.replace("http", "https")), timeout_seconds=1.0)
    assert failed.reason in ("tls", "timeout", "connection")


def test_an_address_from_a_file_must_be_one_of_the_web(tmp_path: Path):
    (tmp_path / "url").write_text("file:///etc/passwd")
    assert type(failure(Receiver("hook", "webhook", url_file=str(tmp_path / "url")))) is Rejected
