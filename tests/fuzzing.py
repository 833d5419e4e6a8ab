"""Frames that were honest once."""

from __future__ import annotations

import random


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
