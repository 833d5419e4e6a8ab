from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gpumond.facts import messages
from gpumond.facts.errors import ProtocolError
from gpumond.facts.pools import PoolUsage, Reclaimable
from gpumond.facts.snapshot import Reading
from tests.facts.messages import MESSAGES, POOL, PROGRAM
from tests.helpers.fuzzing import mutated
from tests.helpers.values import make_device, make_fault, make_process


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_round_trips(message: messages.Message):
    encoded = messages.encode(message)
    assert encoded.endswith(b"\n")
    assert encoded.count(b"\n") == 1
    assert messages.decode(encoded) == message


def test_programs_connect_to_the_daemon_in_the_stated_runtime_directory(tmp_path: Path):
    environ = {"GPUMOND_RUNTIME_DIR": os.fspath(tmp_path)}
    assert messages.program_socket(environ) == messages.SERVICE_SOCKET  # it has no daemon
    (tmp_path / "agent.sock").touch()
    assert messages.program_socket(environ) == f"{tmp_path}/agent.sock"
    assert messages.program_socket({**environ, "GPUMOND_SOCKET": "/other/agent.sock"}) == "/other/agent.sock"


def test_reading_round_trips():
    reading = Reading(
        devices=(make_device(processes=(make_process(used_bytes=None),)),),
        faults=(make_fault("GPU-a"),),
        driver_version="580.1",
    )
    assert messages.from_json(Reading, messages.to_json(reading)) == reading


def test_unknown_keys_of_a_newer_peer_are_ignored():
    encoded = json.dumps({"v": 1, "type": "hello", "workload": "w", "mood": {"good": [True]}}).encode()
    assert messages.decode(encoded) == messages.Hello("w")


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        ('{"v":1,"type":"bye"}'.encode("utf-16-le"), "JSON"),
        (b'{"v":2,"type":"bye"}', "version"),
        (b'{"v":1,"type":"shout"}', "shout"),
        (b'{"v":1,"type":["bye"]}', "type"),
        (b'{"v":1,"type":"cancel"}', "cancel.id is missing"),
        (b'{"v":1,"type":"cancel","id":7}', "cancel.id"),
        (b'{"v":1,"type":"hello","workload":"a\\nb"}', "printable"),
        (b'{"v":1,"type":"hello","workload":"\\ud800"}', "printable"),
        (b'{"v":1,"type":"hello","v":1}', "duplicate"),
        (b'{"v":1,"type":"report","flush_policy":"maybe"}', "allow, step, never"),
        (b'{"v":1,"type":"report","pools":{}}', "array"),
        (b'{"v":1,"type":"flush","id":"","allocator":"","steps":[],"timeout_seconds":NaN}', "NaN"),
        (b'{"v":1,"type":"flush","id":"","allocator":"","steps":[],"timeout_seconds":1e999}', "finite"),
        (b"[" * 60_000, "JSON"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_invalid_message_is_refused_with_the_field(encoded: bytes, reason: str):
    with pytest.raises(ProtocolError, match=reason):
        messages.decode(encoded)


@pytest.mark.parametrize("amount", [-1, 2**63, 1.5, "1", True, None])
def test_byte_counts_are_integers_within_the_size_of_a_device(amount: object):
    body = json.loads(messages.encode(messages.Report(pools=(POOL,))))
    body["pools"][0]["held_bytes"] = amount
    with pytest.raises(ProtocolError, match=r"report\.pools\.held_bytes"):
        messages.decode(json.dumps(body).encode())


@pytest.mark.parametrize("amount", [-(2**63), 2**63, 1.5, "1", True, None])
def test_change_may_be_negative_and_is_bounded_in_both_directions(amount: object):
    body = json.loads(messages.encode(messages.Report(program=PROGRAM)))
    body["program"]["scopes"][0]["devices"][0]["retained_bytes"] = amount
    with pytest.raises(ProtocolError, match=r"report\.program\.scopes\.devices\.retained_bytes"):
        messages.decode(json.dumps(body).encode())


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
trees = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner))


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(["v", "type", "workload", "pools", "id", "steps", "outcome"]), trees))
def test_arbitrary_json_is_a_message_or_a_protocol_error(body: dict[str, object]):
    body |= {"v": 1, "type": "report"}
    try:
        message = messages.decode(json.dumps(body).encode())
    except ProtocolError:
        return
    assert isinstance(message, messages.Report)


@pytest.mark.slow
def test_mutated_messages_decode_or_raise_protocol_errors():
    rng = random.Random(7)
    encoded_messages = [messages.encode(message) for message in MESSAGES]
    verdicts = {verdict(mutated(rng, rng.choice(encoded_messages))) for _ in range(100_000)}
    assert "" in verdicts
    assert all(text.isprintable() for text in verdicts)


def verdict(encoded: bytes) -> str:
    try:
        messages.decode(encoded)
    except ProtocolError as error:
        return str(error)
    return ""


def test_text_is_cleaned_for_wire_log_and_terminal():
    assert (
        messages.printable_text("a\x1b[31m\nb\u202e")
        == "a\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    )
    assert len(messages.printable_text("x" * 4096)) == messages.MAX_TEXT_LENGTH


def test_pool_usage_is_the_same_on_both_ends():
    pool = PoolUsage(
        allocator="torch",
        device_uuid="GPU-a",
        live_bytes=1,
        held_bytes=2,
        reclaimable=Reclaimable(0, 1, 1, "interval"),
        stranded_bytes=0,
        inside="rmm",
        ooms=3,
    )
    message = messages.decode(messages.encode(messages.Report(pools=(pool,))))
    assert isinstance(message, messages.Report)
    assert message.pools == (pool,)
