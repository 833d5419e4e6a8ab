"""Receivers that fail in every way, on real sockets: others do not wait, and missed notifications follow later."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumond.features.alerts.outbox import Outbox
from gpumond.features.alerts.receivers.base import post
from gpumond.features.alerts.receivers.webhook import Webhook
from tests.alerts.deliveries import FIRED, QUICK, RESOLVED, DeliveryCounts, Recorder, UnwritableStore, make_alert, until
from tests.helpers import certificates
from tests.helpers.alert_listener import OK, Answer, Listener, answer, drip, failure, stall

pytestmark = pytest.mark.slow

TEN_MIB = 10 << 20


def refuse_tls(connection: socket.socket) -> None:
    connection.sendall(b"\x15\x03\x03\x00\x02\x02\x28")  # the alert handshake_failure


def ten_mib(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n" % TEN_MIB)
    for _ in range(TEN_MIB // 65536):
        connection.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (answer(500), "server_error"),
        (answer(503), "server_error"),
        (answer(429, Retry_After="0"), "rate_limited"),
        (answer(502, Retry_After="0"), "server_error"),
        (b"", "connection"),
        (b"SSH-2.0-x\r\n\r\n", "connection"),
        (ten_mib, "server_error"),
        (stall, "timeout"),
        (drip, "timeout"),
    ],
    ids=["500", "503", "429", "502", "hangs up", "is no HTTP", "10 MiB", "stalls", "drips"],
)
def test_failing_receiver_delays_no_other_and_gets_its_notifications_later(response: Answer, reason: str):
    listener, other, counts = Listener(), Recorder("other"), DeliveryCounts()
    listener.answer = response
    hook = Webhook(name="hook", url=listener.url)

    async def work() -> None:
        outbox = Outbox([hook, other], UnwritableStore(), counts, backoff_seconds=QUICK)
        await outbox.open()
        outbox.put([make_alert()])
        await until(lambda: ("hook", reason) in counts.failed)
        outbox.put([])
        await until(lambda: other.received == [FIRED, RESOLVED])
        listener.answer = OK
        before = len(listener.requests)
        await until(lambda: statuses(listener, before) == ["firing", "resolved"])
        await outbox.close()

    asyncio.run(asyncio.wait_for(work(), 60))
    listener.close()


def statuses(listener: Listener, since: int) -> list[str]:
    """Statuses of the alerts of all requests after the first ``since``. A repetition of the one in progress counts
    once.
    """

    sent = [alert["status"] for request in listener.requests[since:] for alert in request.json["alerts"]]
    return [kind for before, kind in zip([None, *sent], sent, strict=False) if kind != before]


@pytest.fixture
def connected() -> Iterator[list[Any]]:
    """Addresses that this process connects to."""
    addresses: list[Any] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "socket.connect":
            addresses.append(arguments[1])

    sys.addaudithook(watch)  # an audit hook cannot be removed
    yield addresses
    watching = False


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "place", ["http://169.254.169.254/latest/meta-data", "//[fd00:ec2::254]/", "file:///etc/passwd"]
)
def test_redirect_is_not_followed(connected: list[Any], status: int, place: str):
    listener = Listener()
    listener.answer = answer(status, Location=place)
    assert failure(Webhook(name="hook", url=listener.url)).reason == "redirect"
    port = int(listener.url.rpartition(":")[2])
    assert connected == [("127.0.0.1", port)]
    listener.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("certificates"))


def over_tls(directory: Path, name: str) -> Callable[[socket.socket], None]:
    """Answer over TLS with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / f"{name}.crt", directory / f"{name}.key")

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            received = b""
            while not received.endswith(b"\r\n\r\n{}"):
                received += secure.recv(65536)
            secure.sendall(OK)

    return serve


class TlsListener(Listener):
    """Listener that leaves TLS to its answer."""

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            assert callable(self.answer)
            self.answer(connection)


@pytest.mark.needs("openssl")
@pytest.mark.parametrize(
    ("server", "trusted", "reason"),
    [("server", True, None), ("server", False, "tls"), ("unlisted", True, "tls"), (None, True, "tls")],
    ids=["valid", "unknown authority", "another name", "handshake failure"],
)
def test_receivers_certificate_is_verified(authority: Path, server: str | None, trusted: bool, reason: str | None):
    listener = TlsListener()
    listener.answer = refuse_tls if server is None else over_tls(authority, server)
    url = listener.url.replace("http", "https")
    receiver = Webhook(name="hook", url=url, ca_file=authority / "ca.crt" if trusted else None)
    if reason is None:
        asyncio.run(post(receiver, "", b"{}"))
    else:
        assert failure(receiver).reason == reason
    listener.close()
