"""kill -9 at random times under rule changes and flushes: lost data, and time to the next answer."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.result import publish, spread
from tests.fakenvml import FakeDriver, build
from tests.integration.killing import Killing

KILLS = 100


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        killing = Killing(Path(directory), FakeDriver(Path(directory), build(Path(directory))))
        for _ in range(KILLS):
            killing.round()  # raises an error if data is lost
        killing.end()
    figures = killing.figures
    serving = spread(figures.serving_seconds)
    publish("kill", {"kills": figures.kills, "acknowledged": figures.acknowledged, "lost": 0, "serving_again": serving})


if __name__ == "__main__":
    main()
