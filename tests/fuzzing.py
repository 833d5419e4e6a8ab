"""Frames that were honest once: changed in their bytes, or in the structure of their JSON."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any


def fuzzed(dice: random.Random, frame: bytes) -> bytes:
    """Half of them with other bytes, half well-formed JSON that means something else."""
    return mutated(dice, frame) if dice.random() < 0.5 else restructured(dice, frame)


def mutated(dice: random.Random, frame: bytes) -> bytes:
    changed = bytearray(frame)
    for _ in range(dice.randint(0, 3)):
        place = dice.randrange(len(changed))
        kind = dice.randrange(3)
        if kind == 0:
            changed[place] = dice.randrange(256)
        elif kind == 1:
            del changed[place : place + dice.randint(1, 8)]
        else:
            changed[place:place] = dice.choice([b"9" * 30, b'"', b"[", b"}", b"null", b"-1", b"1e999", b"\\ud800"])
        if not changed:
            return b"\n"
    return bytes(changed)


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**4000, 0.5, -0.0, 1e308, 10**400),
    *(
        "",
        "x",
        "0",
        "allow",
        "cache",
        "\x00",
        "\x1b[2J",
        "\ud800",
        "\u202e",
        "é" * 128,
        "y" * 256,
        "z" * 257,
        "w" * 5000,
    ),
    *([], {}, [[]], [None], {"": {}}, {"v": 1}, [0] * 1000, {str(number): number for number in range(300)}),
)


def restructured(dice: random.Random, frame: bytes) -> bytes:
    """One to three values of the object are another's, of another type, repeated, nested, left out or renamed."""
    body = json.loads(frame)
    for _ in range(dice.randint(1, 3)):
        _change(dice, body)
    text = json.dumps(body)
    if dice.random() < 0.02:
        text = text.replace("{", '{"v":1,', 1)  # a key twice
    if dice.random() < 0.02:
        text = text.replace("null", dice.choice(["NaN", "-Infinity", "[" * 2000, '{"a":' * 2000]), 1)
    return text.encode() + b"\n"


def _change(dice: random.Random, body: dict[str, Any]) -> None:
    places = [(body, key) for key in body]
    for holder, key in places:  # grows while it is gone through: the values of the values too
        value = holder[key]
        places += [(value, inner) for inner in (value if isinstance(value, dict) else range(_length(value)))]
    if not places:
        body["v"] = 1
        return
    holder, key = dice.choice(places)
    other_holder, other_key = dice.choice(places)
    kind = dice.randrange(5)
    if kind == 0:
        holder[key] = deepcopy(dice.choice(ODD))
    elif kind == 1:
        holder[key] = deepcopy(other_holder[other_key])
    elif kind == 2:
        holder[key] = [holder[key]] * dice.choice((1, 2, 70))
    elif kind == 3 and isinstance(holder, dict):
        holder[dice.choice(("", "v", "id", "new", "type", "q" * 300))] = holder.pop(key)
    else:
        del holder[key]


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) and len(value) < 100 else 0
