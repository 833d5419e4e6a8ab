"""The command line: one file per verb, imported only when it is chosen.

To add a verb: write ``cli/NAME.py`` with ``add_arguments(parser)`` and ``run(arguments) -> exit code``,
and add it to ``VERBS``. Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 nothing to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from gpumond import __version__
from gpumond.errors import AmbiguousDevice, ConfigError, GpumondError, NoSuchDevice

DONE, FAILED, WRONG_USE, NOTHING_TO_DO = 0, 1, 2, 3

VERBS = {
    "serve": "run the daemon",
    "demo": "run the daemon on a simulated device with programs on it; needs no GPU",
    "status": "devices, processes and who holds what",
    "top": "the same in a terminal, every second, with what they mean; flush from there",
    "flush": "make programs give memory back, with a receipt",
    "release": "let go of the driver for maintenance",
    "run": "start an unmodified program with the agent inside",
    "attach": "start the agent in a program that runs already (Python 3.14)",
    "load": "make a shape of GPU memory use on purpose, on a device or a simulated card",
    "doctor": "what works on this machine, what does not, and the remedy",
    "check-config": "check a configuration file",
    "rules": "check rules, and test them on series of values",
    "diagnose": "what a recorded log shows: leaks, with the time left, fragmentation, crashes",
    "baseline": "measure what workloads hold, and compare after a change",
    "record": "write a daemon's snapshots to a file, for `gpumond diagnose`",
    "audit": "who changed and flushed what, and whether the record is whole",
}


EXTRAS = {"top": "top"}
"""The extra that a verb's own libraries are in, where it is not ``daemon``."""


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviated options, nor do its subcommands, which are of its class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | options)


class Verb(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(
        prog="gpumond",
        description="GPU memory: every byte attributed, and given back with a receipt.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 nothing to do.",
    )
    parser.add_argument("--version", action="version", version=f"gpumond {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    chosen = next((word for word in argv if word in VERBS), None)
    for name, summary in VERBS.items():
        verb = verbs.add_parser(name, help=summary, description=summary[:1].upper() + summary[1:] + ".")
        if name == chosen:
            try:
                _load(name).add_arguments(verb)
            except ImportError as error:
                return _missing_extra(name, error)
    arguments = parser.parse_args(argv)
    try:
        return _load(arguments.verb).run(arguments)
    except ImportError as error:
        return _missing_extra(arguments.verb, error)
    except (ConfigError, NoSuchDevice, AmbiguousDevice) as error:
        print(f"gpumond: {error}", file=sys.stderr)
        return WRONG_USE
    except GpumondError as error:
        print(f"gpumond: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output has left
        return FAILED
    except KeyboardInterrupt:
        return 130


def _load(name: str) -> Verb:
    return cast("Verb", import_module(f"gpumond.cli.{name.replace('-', '_')}"))


def _missing_extra(verb: str, error: ImportError) -> int:
    if error.name is None or error.name.startswith("gpumond"):
        raise error
    extra = EXTRAS.get(verb, "daemon")
    print(f"gpumond: {error.name} is not installed: pip install 'gpumond[{extra}]'", file=sys.stderr)
    return WRONG_USE
