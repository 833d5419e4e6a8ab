"""Exit codes of commands, their answers on standard output, and messages on standard error."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from gpumond.view.text import safe

DONE, FAILED, WRONG_USE, NOTHING_TO_DO = 0, 1, 2, 3


def print_error(message: str) -> None:
    """Print a message to standard error. It may contain text of a daemon: no character of it changes the terminal."""
    print("\n".join(map(safe, message.split("\n"))), file=sys.stderr, flush=True)


def print_answer(arguments: argparse.Namespace, answer: object, text: Callable[[], str]) -> None:
    """Print an answer as JSON with ``--json``, else as text."""
    print(json.dumps(answer, indent=2) if arguments.json else text())
