"""The collector's child: owns the driver, answers each line on stdin with one Answer on stdout.

``python -m gpumond.sources NAME``. It leaves when stdin closes, after closing the driver in order:
a driver that is killed in the middle of a call may not come back.
"""

from __future__ import annotations

import os
import sys

from gpumond.errors import SourceUnavailable
from gpumond.sources import Answer, load
from gpumond.sources.owners import Owners
from gpumond.wire import clean, to_json


def main(name: str) -> int:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a driver library that prints must not garble the answers

    def answer(value: Answer) -> None:
        answers.write(to_json(value) + b"\n")
        answers.flush()

    try:
        source = load(name)
        source.open()
        answer(Answer())
        owners = Owners()
        for _ in sys.stdin.buffer:
            answer(Answer(owners.complete(source.read())))
        source.close()
    except SourceUnavailable as error:
        answer(Answer(reason=error.reason, message=clean(error)))
        return 1
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
