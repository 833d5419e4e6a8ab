from __future__ import annotations

import json
import logging
import sys

import pytest

from gpumond.host.logs import JsonFormatter, RateLimitFilter, TextFormatter, escape_text


def make_record(message: str, line: int = 1, *arguments: object, error: bool = False) -> logging.LogRecord:
    info = None
    if error:
        try:
            raise ValueError("first\nERROR forged \x1b[31m")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("gpumond.x", logging.WARNING, "x.py", line, message, arguments, info)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünï", "plain, ünï"),
        ("a\nb", "a\\nb"),
        ("\r\x1b[2J", "\\r\\x1b[2J"),
        ("\u202eevil", "\\u202eevil"),
        ("\u2028", "\\u2028"),
        ("\x00\x85", "\\x00\\x85"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str):
    assert escape_text(text) == shown
    assert TextFormatter().format(make_record("said %s", 1, text)).endswith(f"said {shown}")
    assert json.loads(JsonFormatter().format(make_record("said %s", 1, text)))["message"] == f"said {shown}"


def test_traceback_cannot_begin_a_line_of_its_own():
    lines = TextFormatter().format(make_record("bad", error=True)).split("\n")
    assert len(lines) > 2
    assert all(line.startswith("    ") for line in lines[1:])
    assert "\x1b" not in "".join(lines)
    (line,) = JsonFormatter().format(make_record("bad", error=True)).split("\n")
    assert json.loads(line)["traceback"][-1] == "ERROR forged \\x1b[31m"


def test_line_has_a_maximum_length():
    assert len(TextFormatter().format(make_record("x" * 10**6))) < 10_000


def test_records_of_a_kind_are_limited_and_drops_are_counted():
    now, dropped = [0.0], []
    bounded = RateLimitFilter(clock=lambda: now[0])
    bounded.dropped = lambda: dropped.append(1)
    passed = [bounded.filter(make_record("from %d", 1, n)) for n in range(100)]
    assert (passed.count(True), passed[:10], len(dropped)) == (10, [True] * 10, 90)
    assert bounded.filter(make_record("another kind", 2))
    now[0] = 1.0
    record = make_record("from %d", 1, 7)
    assert bounded.filter(record)
    assert TextFormatter().format(record).endswith("from 7 (90 similar records dropped)")
    assert json.loads(JsonFormatter().format(record))["left_out"] == 90
    assert json.loads(JsonFormatter().format(make_record("x"))).keys() == {"at", "level", "logger", "message"}


def test_number_of_kinds_is_limited():
    bounded = RateLimitFilter(clock=lambda: 0.0)
    assert all(bounded.filter(make_record("x", line)) for line in range(10_000))
    assert len(bounded._kinds) <= 256


def test_no_digest_of_an_audit_entry_is_dropped():
    record = logging.LogRecord("gpumond.store.audit", logging.INFO, "x.py", 1, "audit entry", (), None)
    limit = RateLimitFilter(lambda: 0.0)
    assert all(limit.filter(record) for _ in range(100))
