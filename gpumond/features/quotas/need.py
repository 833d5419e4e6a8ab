"""Requests for device memory by ``gpumond run --need``. Not a verb."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import print_error
from gpumond.facts import units
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.units import human
from gpumond.view.text import safe

NO_ROOM = 75
"""Exit code for a program that was not started because its memory is not available (EX_TEMPFAIL of sysexits.h)."""
POLL_SECONDS = 1.0
LOST, UNREACHABLE, STARTING = 404, 0, 503
"""Status of a request that the daemon does not know any more, without a response, and before its first reading."""

ROUTE = "/api/v1/admissions"


def size(text: str) -> int:
    """Return the bytes of a text such as 40GiB. Raises ConfigError."""
    try:
        if (value := units.byte_size(text)) > 0:
            return value
    except ValueError:
        pass
    raise ConfigError(f"run: --need {text}: expected a size such as 40GiB")


def wait_seconds(text: str | None) -> float:
    """Return the seconds of a text such as 10m; 0 without one. Raises ConfigError."""
    try:
        return units.seconds(text) if text else 0.0
    except ValueError as error:
        raise ConfigError(f"run: --wait {text}: {error}") from None


@contextmanager
def admitted(url: str, need_bytes: int, device: str | None, seconds: float) -> Iterator[str | None]:
    """Yield the id of the granted request; None, with a message, if the memory is not available in time.

    Whatever happens before this process has become the program releases the request. Raises DaemonError.
    """
    body: dict[str, Any] = {"need_bytes": need_bytes, "wait": seconds > 0, "pid": os.getpid()}
    if device is not None:
        body["device"] = device
    end, shown = time.monotonic() + seconds, ""
    answer = client.post(url, ROUTE, body, 30.0)
    try:
        while answer["state"] == "waiting" and time.monotonic() < end:
            if (text := explained(answer)) != shown:
                print_error(f"gpumond run: waiting: {text}")
                shown = text
            time.sleep(min(POLL_SECONDS, max(0.0, end - time.monotonic())))
            answer = _renewed(url, answer, body)
        if answer["state"] == "granted":
            yield str(answer["id"])
            return
        print_error(f"gpumond run: {explained(answer)}")
        if answer["state"] == "refused" and not answer["missing_bytes"]:
            print("gpumond run: with --wait 10m, gpumond makes this room and starts the program", file=sys.stderr)
        yield None
    finally:
        if answer["state"] != "refused":
            with suppress(DaemonError):
                client.delete(url, f"{ROUTE}/{answer['id']}")


def _renewed(url: str, answer: Mapping[str, Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep the place of a request. A daemon that lost it gets a new one; one that is stopped or starts is awaited."""
    try:
        renewed: Mapping[str, Any] = client.put(url, f"{ROUTE}/{answer['id']}", None)
        return renewed
    except DaemonError as error:
        if error.status in (UNREACHABLE, STARTING):
            return answer
        if error.status != LOST:
            raise
    try:
        again: Mapping[str, Any] = client.post(url, ROUTE, body, 30.0)
        return again
    except DaemonError as error:
        if error.status not in (UNREACHABLE, STARTING):
            raise
        return answer


def explained(answer: Mapping[str, Any]) -> str:
    """Return why the memory is not available, and the flushes after which it is."""
    need, available = human(answer["need_bytes"]), answer["available_bytes"]
    free = "an unknown amount is" if available is None else f"{human(max(0, available))} are"
    parts = [f"{need} do not fit on GPU {answer['device_index']}: {free} available"]
    if answer["ahead"]:
        requests = "request waits" if answer["ahead"] == 1 else "requests wait"
        parts.append(f"{answer['ahead']} earlier {requests}")
    methods: dict[str, list[str]] = {}
    for each in answer["plan"]:
        name = f"{safe(each['workload']) or 'pid'} (pid {each['pid']}, {human(each['reclaimable_bytes'])})"
        methods.setdefault("suspension" if each.get("method") == "suspend" else "flush", []).append(name)
    steps = " and ".join(f"a {method} of {', '.join(names)}" for method, names in methods.items())
    if answer["missing_bytes"]:
        parts.append(f"{human(answer['missing_bytes'])} are missing" + (f" even after {steps}" if steps else ""))
    elif steps:
        parts.append(f"they fit after {steps}")
    return "; ".join(parts)
