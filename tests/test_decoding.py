from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from gpumond import decoding, wire
from gpumond.errors import ProtocolError
from gpumond.model import Reading
from tests.fuzzing import fuzzed
from tests.making import a_device, a_fault, a_process
from tests.test_wire import MESSAGES, POOL

LAX = ("duplicate key", "is not a number")
"""What ``wire`` says of keys given twice, and of NaN under keys that nobody knows: here the last one holds, and those
that nobody knows are not looked at."""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives(message: wire.Message):
    assert decoding.decode(wire.encode(message)) == message


def test_a_reading_survives_the_pipe():
    reading = Reading((a_device(processes=(a_process(used_bytes=None),)),), (a_fault("GPU-a"),), "580.1")
    assert decoding.from_json(Reading, wire.to_json(reading)) == reading


@pytest.mark.parametrize(
    "frame", [b'{"type":"hello","v":1}', b'{ "v": 1, "type": "hello", "mood": [1] }', b'{"v":1,"type":"hello","a":{}}']
)
def test_keys_may_be_more_and_in_any_order(frame: bytes):
    assert decoding.decode(frame) == wire.Hello()


@pytest.mark.parametrize("frame", [b"", b"[]", b'{"v":2,"type":"hello"}', b'{"v":1,"type":"shout"}', b"\xff"])
def test_nonsense_is_refused_as_by_the_wire(frame: bytes):
    assert isinstance(meaning(decoding.decode, frame), str)
    assert meaning(decoding.decode, frame) == meaning(wire.decode, frame)


@pytest.mark.parametrize("amount", [-1, 2**63, 1.5, 1.0, "1", True, None, 10**400])
def test_bytes_are_whole_numbers_that_a_device_can_have(amount: object):
    body = json.loads(wire.encode(wire.Report(pools=(POOL,))))
    body["pools"][0]["live_bytes"] = amount
    with pytest.raises(ProtocolError, match=r"report\.pools\.live_bytes"):
        decoding.decode(wire.to_json(body))


def test_fifty_thousand_frames_mean_the_same_to_both():
    dice = random.Random(11)
    frames = [wire.encode(message) for message in MESSAGES]
    meanings = [(meaning(decoding.decode, frame), meaning(wire.decode, frame)) for frame in some(dice, frames)]
    assert any(isinstance(here, wire.Report) for here, _ in meanings)
    assert any(isinstance(here, str) for here, _ in meanings)
    for here, there in meanings:
        assert repr(here) == repr(there) or (isinstance(there, str) and any(reason in there for reason in LAX))


def some(dice: random.Random, frames: list[bytes]) -> list[bytes]:
    return [fuzzed(dice, dice.choice(frames)) for _ in range(50_000)]


def meaning(decode: Callable[[bytes], wire.Message], frame: bytes) -> wire.Message | str:
    try:
        return decode(frame)
    except ProtocolError as error:
        return f"{error.reason}: {error}"
