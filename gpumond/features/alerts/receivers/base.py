"""Receivers of alerts: one file for each type, which sends notifications and nothing else.

The outbox is responsible for queues, retries and order.

To add a type, write ``receivers/NAME.py`` with a subclass of `ReceiverType`, and add it to
``features.alerts.receivers.ReceiverConfig``: its configuration, the messages about mistakes in it and
docs/reference/plugins.md derive from it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path

from pydantic import Field, model_validator

from gpumond.config.models import StrictModel
from gpumond.facts.errors import ConfigError, GpumondError, HttpError, HttpFailure
from gpumond.facts.frame import Alert
from gpumond.host.files import read_secret
from gpumond.host.http import HttpRequest, connection_to, exchange_async, split_address, target_of, tls_context
from gpumond.host.machine import MACHINE_NAME
from gpumond.page.runbooks import RUNBOOKS

BATCH_LIMIT = 64


class NotSent(GpumondError):
    """A notification was not accepted. ``reason`` is one word for metrics. The message never contains an address.

    ``status`` is the HTTP status of the answer, None without an answer.
    """

    def __init__(self, reason: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.reason, self.status = reason, status


class TemporaryFailure(NotSent):
    """Another attempt may succeed, not before ``after_seconds``."""

    def __init__(self, reason: str, message: str, after_seconds: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason, message, status)
        self.after_seconds = after_seconds


class Rejected(NotSent):
    """The receiver will not accept this notification."""


class ReceiverType(StrictModel):
    """Base of the types of receivers. Its fields are the keys of its configuration.

    A subclass has a field ``type`` with its name. Addresses and secrets must not be logged; files are read at each
    send.
    """

    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}$", description="name in rules and metrics")

    @property
    def resend_seconds(self) -> float | None:
        """Seconds after which firing alerts are sent again; None if once is enough."""
        return None

    @property
    def batch_limit(self) -> int:
        """Maximum number of alerts of one call of ``send``."""
        return BATCH_LIMIT

    async def send(self, raised: Sequence[Alert], resolved: Sequence[Alert]) -> int | None:
        """Send notifications. Return the HTTP status of the answer; None if the receiver has none.

        Raises TemporaryFailure if another attempt may succeed, Rejected if none will.
        """
        raise NotImplementedError


TIMEOUT_SECONDS = 5.0
MAX_RETRY_AFTER_SECONDS = 3600.0
PRINTABLE_ASCII = re.compile(r"[!-~]+")
REASONS: Mapping[HttpFailure, str] = {"timeout": "timeout", "dns": "dns", "tls": "tls", "certificate": "tls"}
"""Words of the metrics for the failures of an exchange; the others are ``connection``."""
RUNBOOK_URL = "runbook_url"
"""Annotation with the address of the runbook, as in Prometheus' rules."""


class HttpReceiver(ReceiverType):
    """Base of the types that send over HTTP. A URL can be a secret: it is never shown, and can be read from a file."""

    url: str | None = Field(None, description="address; a secret, which is never shown or logged")
    url_file: Path | None = Field(None, description="file that contains the address, instead of `url`")
    bearer_token_file: Path | None = Field(
        None,
        description="file that contains one line, the token for `Authorization: Bearer …`",
    )
    ca_file: Path | None = Field(None, description="file with the CA certificate to trust instead of the system's")
    runbooks: str = Field(
        "",
        max_length=256,
        pattern=r"^(https?://[!-~]+)?$",
        description="beginning of the built-in rules' `runbook_url`, before the rule's name, such as "
        "`https://gpu-1.example:9917/docs/runbooks/`",
    )

    @property
    def instance(self) -> str:
        """Name of this machine, for a receiver of several machines."""
        return MACHINE_NAME

    @property
    def runbooks_address(self) -> str:
        return self.runbooks

    def with_runbook_urls(self, alerts: Sequence[Alert]) -> list[Alert]:
        """Return the alerts; those of built-in rules have the annotation ``runbook_url``, if its beginning is known."""
        address = self.runbooks_address
        return [
            replace(alert, annotations=(*alert.annotations, (RUNBOOK_URL, address + alert.rule)))
            if address and alert.rule in RUNBOOKS and RUNBOOK_URL not in dict(alert.annotations)
            else alert
            for alert in alerts
        ]

    @model_validator(mode="after")
    def _check_url(self) -> HttpReceiver:
        if (self.url is None) == (self.url_file is None):
            raise ValueError(f"{self.name}: set exactly one of url and url_file")
        if self.url is not None and not is_web_address(self.url):
            raise ValueError(
                f"{self.name}: expected an http:// or https:// url with a host and without user or password"
            )
        return self


def is_web_address(url: str) -> bool:
    """Return True for an http:// or https:// address with a host and without user or password."""
    try:
        return "@" not in split_address(url).netloc
    except HttpError:
        return False


def is_linkable(url: str) -> bool:
    """Return True for a web address of printable ASCII, to which messages may link."""
    return is_web_address(url) and PRINTABLE_ASCII.fullmatch(url) is not None


async def post(
    receiver: HttpReceiver,
    path: str,
    body: bytes,
    headers: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> int:
    """POST ``body`` (JSON) to the receiver's address and ``path``, and return the status of the answer.

    Raises TemporaryFailure or Rejected, never with the address.
    """
    request_headers = {"Content-Type": "application/json", **(headers or {})}
    if receiver.bearer_token_file:
        request_headers = {
            "Authorization": f"Bearer {read_receiver_secret(receiver.bearer_token_file)}",
            **request_headers,
        }
    try:
        url = split_address((receiver.url or read_receiver_secret(receiver.url_file or Path())).strip())
        connection = connection_to(url, lambda: tls_context(receiver.ca_file), timeout_seconds)
        request = HttpRequest("POST", target_of(url, path), request_headers, body)
        answer = await exchange_async(connection, request, timeout_seconds, max_bytes=0)
    except ConfigError as error:
        raise TemporaryFailure("tls", str(error)) from None
    except HttpError as error:
        if error.reason == "address":
            raise Rejected("address", str(error)) from None
        raise TemporaryFailure(REASONS.get(error.reason, "connection"), str(error)) from None
    _check_status(answer.status, answer.headers.get("Retry-After"))
    return answer.status


def read_receiver_secret(file: Path) -> str:
    """Return the only line of a file. Raises TemporaryFailure."""
    try:
        return read_secret(file)
    except ConfigError as error:
        raise TemporaryFailure("secret", str(error)) from None


def _check_status(status: int, retry_after: str | None) -> None:
    if 200 <= status < 300:
        return
    text = f"{status} {HTTPStatus(status).phrase}" if status in set(HTTPStatus) else str(status)
    if status == 429:
        raise TemporaryFailure("rate_limited", text, _retry_after_seconds(retry_after), status)
    if status == 408 or status >= 500:
        raise TemporaryFailure("server_error", text, _retry_after_seconds(retry_after), status)
    raise Rejected("auth" if status in (401, 403) else "redirect" if status < 400 else "rejected", text, status)


def _retry_after_seconds(retry_after: str | None) -> float:
    """Parse Retry-After, in seconds or as a date; 0 if it cannot be parsed."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after or "").timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS) if seconds == seconds else 0.0
