from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from gpumond.facts import messages
from gpumond.facts.errors import ProtocolError
from gpumond.programs import validator
from tests.facts.messages import MESSAGES, POOL
from tests.helpers.fuzzing import fuzzed

LAX = ("duplicate key", "is not a number")
"""Errors that ``messages`` reports for repeated keys, and for NaN under unknown keys. The validator uses the last of
repeated keys and ignores unknown ones.
"""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_round_trips(message: messages.Message):
    assert validator.decode(messages.encode(message)) == message


@pytest.mark.parametrize(
    "encoded",
    [b'{"type":"hello","v":1}', b'{ "v": 1, "type": "hello", "mood": [1] }', b'{"v":1,"type":"hello","a":{}}'],
)
def test_keys_may_be_unknown_and_in_any_order(encoded: bytes):
    assert validator.decode(encoded) == messages.Hello()


@pytest.mark.parametrize("encoded", [b"", b"[]", b'{"v":2,"type":"hello"}', b'{"v":1,"type":"shout"}', b"\xff"])
def test_invalid_messages_are_refused_like_messages_decode(encoded: bytes):
    assert isinstance(meaning(validator.decode, encoded), str)
    assert meaning(validator.decode, encoded) == meaning(messages.decode, encoded)


@pytest.mark.parametrize("amount", [-1, 2**63, 1.5, 1.0, "1", True, None, 10**400])
def test_byte_counts_are_integers_within_the_size_of_a_device(amount: object):
    body = json.loads(messages.encode(messages.Report(pools=(POOL,))))
    body["pools"][0]["held_bytes"] = amount
    with pytest.raises(ProtocolError, match=r"report\.pools\.held_bytes"):
        validator.decode(messages.to_json(body))


@pytest.mark.slow
def test_both_decoders_agree_on_mutated_messages():
    rng = random.Random(11)
    encoded_messages = [messages.encode(message) for message in MESSAGES]
    meanings = [
        (meaning(validator.decode, encoded), meaning(messages.decode, encoded))
        for encoded in some(rng, encoded_messages)
    ]
    assert any(isinstance(here, messages.Report) for here, _ in meanings)
    assert any(isinstance(here, str) for here, _ in meanings)
    for here, there in meanings:
        assert repr(here) == repr(there) or (isinstance(there, str) and any(reason in there for reason in LAX))


def some(rng: random.Random, encoded_messages: list[bytes]) -> list[bytes]:
    return [fuzzed(rng, rng.choice(encoded_messages)) for _ in range(50_000)]


def meaning(decode: Callable[[bytes], messages.Message], encoded: bytes) -> messages.Message | str:
    try:
        return decode(encoded)
    except ProtocolError as error:
        return f"{error.reason}: {error}"
