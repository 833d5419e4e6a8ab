"""A million fuzzed messages of eight users to a real daemon: reports of a valid agent, and growth of memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.result import publish
from tests.soak.hostile_frames import send_fuzzed_messages

FRAMES = 1_000_000


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        publish("fuzz", send_fuzzed_messages(Path(directory), FRAMES))


if __name__ == "__main__":
    main()
