"""Mutations of valid messages: of their bytes, or of the structure of their JSON."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any


def fuzzed(rng: random.Random, message: bytes) -> bytes:
    """Change the bytes of one half of the messages, and the meaning of the well-formed JSON of the other."""
    return mutated(rng, message) if rng.random() < 0.5 else restructured(rng, message)


def mutated(rng: random.Random, message: bytes) -> bytes:
    changed = bytearray(message)
    for _ in range(rng.randint(0, 3)):
        place = rng.randrange(len(changed))
        kind = rng.randrange(3)
        if kind == 0:
            changed[place] = rng.randrange(256)
        elif kind == 1:
            del changed[place : place + rng.randint(1, 8)]
        else:
            changed[place:place] = rng.choice([b"9" * 30, b'"', b"[", b"}", b"null", b"-1", b"1e999", b"\\ud800"])
        if not changed:
            return b"\n"
    return bytes(changed)


UNUSUAL: tuple[Any, ...] = (
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


def restructured(rng: random.Random, message: bytes) -> bytes:
    """Replace, repeat, nest, drop or rename one to three values of the object."""
    body = json.loads(message)
    for _ in range(rng.randint(1, 3)):
        _change(rng, body)
    text = json.dumps(body)
    if rng.random() < 0.02:
        text = text.replace("{", '{"v":1,', 1)  # a key twice
    if rng.random() < 0.02:
        text = text.replace("null", rng.choice(["NaN", "-Infinity", "[" * 2000, '{"a":' * 2000]), 1)
    return text.encode() + b"\n"


def _change(rng: random.Random, body: dict[str, Any]) -> None:
    places = [(body, key) for key in body]
    for holder, key in places:  # grows during the iteration by the values of the values
        value = holder[key]
        places += [(value, inner) for inner in (value if isinstance(value, dict) else range(_length(value)))]
    if not places:
        body["v"] = 1
        return
    holder, key = rng.choice(places)
    other_holder, other_key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        holder[key] = deepcopy(rng.choice(UNUSUAL))
    elif kind == 1:
        holder[key] = deepcopy(other_holder[other_key])
    elif kind == 2:
        holder[key] = [holder[key]] * rng.choice((1, 2, 70))
    elif kind == 3 and isinstance(holder, dict):
        holder[rng.choice(("", "v", "id", "new", "type", "q" * 300))] = holder.pop(key)
    else:
        del holder[key]


def _length(value: object) -> int:
    return len(value) if isinstance(value, list) and len(value) < 100 else 0
