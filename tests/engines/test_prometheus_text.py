"""Metrics pages of engines: what is read, and what a page of any content costs."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from gpumond.facts.errors import EngineError
from gpumond.features.engines.engine_kinds import read_vllm
from gpumond.features.engines.poller import MAX_RESPONSE_BYTES, carry_out
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.engines.spec import MAX_LINES, Exchange, MetricsPage, get
from tests.helpers.engines import answering

NAME = b"vllm:num_requests_running"


def test_samples_of_a_name_are_summed():
    page = MetricsPage(b'# HELP a x\na{x="1"} 2\na{x="2"} 3.5 1700000000\nab 7\na_total 1\n')
    assert (page.total("a"), page.request_count("a"), page.mean("missing", "a")) == (5.5, 5, 2.75)
    assert [sample.labels for sample in page.samples("a")] == [{"x": "1"}, {"x": "2"}]
    assert (page.total("missing"), page.request_count("missing", "ab", "a_total")) == (None, 8)


@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"1e999", b"1e300", b"-1e19", b"x", b"1.2.3", b""])
def test_value_that_is_no_usable_number_is_absent(value: bytes):
    page = MetricsPage(b"a " + value + b"\nb 1\n")
    assert (page.total("a"), page.total("b")) == (None, 1.0)


def test_counters_are_unknown_only_if_all_are_absent():
    page = MetricsPage(b"a 1\n")
    assert (page.totals("a", "b"), page.totals("b", "c")) == ((1.0, 0.0), None)


def test_page_of_too_many_lines_is_an_error():
    with pytest.raises(EngineError, match="more than 20,000 lines"):
        MetricsPage(b"\n" * (MAX_LINES + 1))


def test_line_with_a_long_label_is_skipped():
    page = MetricsPage(b'a{x="' + b"y" * 2000 + b'"} 1\na 2\n')
    assert page.total("a") == 2.0


PAGES = {
    "line ends": b"\n" * MAX_RESPONSE_BYTES,
    "one label": NAME + b'{a="' + b"\\x" * (MAX_RESPONSE_BYTES // 2 - 100),
    "many labels": (NAME + b"{" + b"a" * 900 + b"} 1\n") * (MAX_RESPONSE_BYTES // 1024),
    "many samples": (NAME + b'{model_name="m"} 1\n') * MAX_LINES,
    "random": bytes(range(256)) * (MAX_RESPONSE_BYTES // 256),
}


def carried_out(url: str, exchange: Any) -> Any:
    engine = EngineConfig.model_validate({"name": "e", "kind": "vllm", "url": url})
    return asyncio.run(carry_out(engine, exchange, 60.0))


@pytest.mark.parametrize("content", PAGES)
def test_page_of_any_content_takes_bounded_memory(content: str):
    engine = EngineConfig.model_validate({"name": "e", "kind": "vllm", "url": "http://127.0.0.1:1"})
    with answering(PAGES[content]) as url:
        tracemalloc.start()
        with suppress(EngineError):
            carried_out(url, read_vllm(engine))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 << 20


def test_answers_are_decoded_off_the_event_loop():
    def exchange() -> Exchange[bool]:
        yield get("/")
        return threading.current_thread() is threading.main_thread()

    with answering(b"{}") as url:
        assert carried_out(url, exchange()) is False
