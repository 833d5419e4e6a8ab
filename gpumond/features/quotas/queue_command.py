"""``gpumond queue``: the programs that wait for memory."""

from __future__ import annotations

import argparse
import json

from gpumond.cli import client
from gpumond.cli.exits import DONE
from gpumond.view.queue import queue_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    frame = client.frame(arguments.url)
    if arguments.json:
        print(json.dumps(frame["queue"], indent=2))
    else:
        print(queue_table(frame) or "no program waits for memory")
    return DONE
