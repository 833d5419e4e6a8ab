"""The client of admissions: `gpumond run --need` requests device memory, waits for it and keeps it for its program."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlencode

from gpumond.cli import client
from gpumond.cli.arguments import print_error
from gpumond.facts import units
from gpumond.facts.errors import ConfigError, DaemonError
from gpumond.facts.messages import MAX_WORKLOAD_LENGTH
from gpumond.facts.units import list_text, size_text
from gpumond.view.rows import claimed_bytes, requests_ahead
from gpumond.view.text import cut, printable

NO_MEMORY_EXIT_CODE = 75
"""Exit code for a program that was not started because its memory is not available (EX_TEMPFAIL of sysexits.h)."""
POLL_SECONDS = 1.0
LOG_SECONDS = 30.0
"""Longest time between two lines about a request in a log."""
LOST_STATUS, UNREACHABLE_STATUS, STARTING_STATUS = 404, 0, 503
"""Status of a request that the daemon does not know anymore, without a response, and before its first reading."""

ROUTE = "/api/v1/admissions"
AUTO = "auto"


def parse_size(text: str) -> int:
    """Return the bytes of a text such as 40GiB. Raises ConfigError."""
    try:
        value = units.parse_size_argument(text)
    except ValueError as error:
        raise ConfigError(f"--need {text!r:.80}: {error}") from None
    if value <= 0:
        raise ConfigError(f"--need {text!r:.80}: the size must be above 0")
    return value


def auto_need(url: str, workload: str, device: str | None, world_size: int) -> int:
    """Return what 95% of a workload's runs need, from this user's earlier ones. Raises ConfigError, DaemonError."""
    if not workload:
        raise ConfigError("--need auto requires --workload, the name of your earlier runs")
    query: dict[str, Any] = {"workload": workload, "world_size": world_size, "uid": os.getuid()}
    if device is not None:
        query["device"] = device
    answer = client.get(url, f"/api/v1/need?{urlencode(query)}")
    runs, need = answer["runs"], answer["need_bytes"]
    where = f"runs of {printable(workload)} on {printable(answer['device_name'])}"
    if need is None:
        known_runs = f"{runs} {'is' if runs == 1 else 'are'} known"
        raise ConfigError(f"--need auto requires three {where}, but {known_runs}; pass a size")
    print_error(f"gpumond: {size_text(need)} needed, from {runs} {where}")
    return int(need)


def parse_wait(text: str | None) -> float:
    """Return the seconds of a text such as 10m; 0 without one. Raises ConfigError."""
    try:
        return units.parse_seconds_argument(text) if text else 0.0
    except ValueError as error:
        raise ConfigError(f"--wait {text!r:.80}: {error}") from None


@contextmanager
def request_admission(
    url: str, need_bytes: int, device: str | None, workload: str, wait_seconds: float
) -> Iterator[str | None]:
    """Yield the id of the granted request; None, with a message, if the memory is not available in time.

    Whatever happens before this process has become the program releases the request. Raises DaemonError.
    """
    body: dict[str, Any] = {
        "need_bytes": need_bytes,
        "wait": wait_seconds > 0,
        "pid": os.getpid(),
        "workload": workload[:MAX_WORKLOAD_LENGTH],
    }
    if device is not None:
        body["device"] = device
    deadline, status_line = time.monotonic() + wait_seconds, WaitStatusLine()
    answer = client.post(url, ROUTE, body, 30.0)
    try:
        while answer["state"] == "waiting" and time.monotonic() < deadline:
            status_line.show(answer, time.monotonic())
            time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))
            answer = _renew(url, answer, body)
        status_line.end()
        if answer["state"] == "granted":
            yield str(answer["id"])
            return
        advice = ""
        if answer["state"] == "refused" and not answer["missing_bytes"]:
            advice = ": add --wait 10m to let gpumond do it" if answer["plan"] else "; add --wait 10m to wait for it"
        timed_out = f"not started after {units.duration_text(wait_seconds)}: " if answer["state"] == "waiting" else ""
        print_error(f"gpumond: {timed_out}{explanation(answer)}{advice}")
        yield None
    finally:
        status_line.end()
        if answer["state"] != "refused":
            with suppress(DaemonError):
                client.delete(url, f"{ROUTE}/{answer['id']}")


class WaitStatusLine:
    """Why a request waits, on standard error: one line that is rewritten on a terminal; in a log a line when the
    available memory has changed by 1 GiB, the queue has changed, or 30 s have passed.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown: tuple[int, int] | None = None
        self._due_at = 0.0
        self._is_line_open = False

    def show(self, answer: Mapping[str, Any], now: float) -> None:
        """Show the state of a request. ``now``: seconds of the monotonic clock."""
        text = f"gpumond: waiting: {explanation(answer)}"
        if self._terminal:
            columns = shutil.get_terminal_size().columns
            print(f"\r\x1b[K{cut(text, columns - 1)}", end="", file=sys.stderr, flush=True)
            self._is_line_open = True
            return
        state = (answer["ahead"], answer["available_bytes"] or 0)
        has_changed = self._shown is None or self._shown[0] != state[0] or abs(self._shown[1] - state[1]) >= units.GIB
        if has_changed or now >= self._due_at:
            print_error(text)
            self._shown, self._due_at = state, now + LOG_SECONDS

    def end(self) -> None:
        """End the line of a terminal."""
        if self._is_line_open:
            print(file=sys.stderr)
            self._is_line_open = False


def _renew(url: str, answer: Mapping[str, Any], body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keep the place of a request. A daemon that lost it gets a new one; one that is stopped or starts is awaited."""
    renewed: Mapping[str, Any] = answer
    try:
        try:
            renewed = client.put(url, f"{ROUTE}/{answer['id']}", None)
        except DaemonError as error:
            if error.status != LOST_STATUS:
                raise
            renewed = client.post(url, ROUTE, body, 30.0)
    except DaemonError as error:
        if error.status not in (UNREACHABLE_STATUS, STARTING_STATUS):
            raise
    return renewed


def explanation(answer: Mapping[str, Any]) -> str:
    """Return why the memory is not available, and the flushes after which it is."""
    needed, available = f"{size_text(answer['need_bytes'])} is needed", answer["available_bytes"]
    free = "an unknown amount" if available is None else size_text(max(0, available))
    position = ""
    if answer["ahead"]:
        position = (
            f"number {answer['ahead'] + 1} in the queue, {requests_ahead(answer['ahead'], answer.get('behind', ()))}; "
        )
    if (room := claimed_bytes(answer)) is not None:
        kept_back = f"the {size_text(room)} available on GPU {answer['device_index']} is kept for earlier requests"
        return f"{position}{kept_back}, and {needed}"
    text = f"{position}GPU {answer['device_index']} has {free} available, but {needed}"
    plan_text = _plan_text(answer["plan"])
    if answer["missing_bytes"]:
        missing = size_text(answer["missing_bytes"])
        return (
            f"{text}; {missing} would be missing even after {plan_text}"
            if plan_text
            else f"{text}; {missing} is missing"
        )
    return f"{text}. {plan_text[:1].upper()}{plan_text[1:]} would make room" if plan_text else text


def _plan_text(plan: Sequence[Mapping[str, Any]]) -> str:
    """Return the steps of a plan, ``flushing train (pid 7, 2.0 GiB) and suspending lab (pid 9, 60.0 GiB)``."""
    programs_by_verb: dict[str, list[str]] = {}
    for each in plan:
        pid, size = each["pid"], size_text(each["reclaimable_bytes"])
        program = f"{printable(each['workload'])} (pid {pid}, {size})" if each["workload"] else f"pid {pid} ({size})"
        verb = "suspending" if each.get("method") == "suspend" else "flushing"
        programs_by_verb.setdefault(verb, []).append(program)
    return " and ".join(f"{verb} {list_text(programs)}" for verb, programs in programs_by_verb.items())
