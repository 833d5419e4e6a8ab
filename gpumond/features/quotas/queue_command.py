"""``gpumond queue``: the programs that wait for memory."""

from __future__ import annotations

import argparse

from gpumond.cli import client
from gpumond.cli.arguments import DONE, print_answer
from gpumond.view.queue import queue_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    frame = client.frame(arguments.url)
    print_answer(arguments, frame["queue"], lambda: queue_table(frame) or "no program waits for memory")
    return DONE
