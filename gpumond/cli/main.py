"""The command line: one module per verb, imported only when that verb is used.

To add a verb: write ``cli/NAME.py`` with ``add_arguments(parser)`` and ``run(arguments) -> exit code``,
and add it to ``VERBS``. Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 nothing to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from gpumond import __version__, revision
from gpumond.cli import help
from gpumond.facts.errors import AmbiguousDevice, ConfigError, GpumondError, NoSuchDevice

DONE, FAILED, WRONG_USE, NOTHING_TO_DO = 0, 1, 2, 3

VERBS = {
    "serve": "run the daemon",
    "demo": "run the daemon on a simulated device with sample programs; needs no GPU",
    "status": "show devices, processes and the memory of each",
    "open": "open the page in a browser, signed in",
    "top": "show devices, processes, alerts and verdicts live in the terminal, and flush programs",
    "flush": "make programs release cached memory, and print receipts",
    "limit": "limit the memory that the allocators of one program may hold",
    "alerts": "show active or past alerts",
    "verdicts": "show the problems found in the memory curves of devices and programs",
    "events": "show past events, and follow new ones",
    "receipts": "show the receipts of past flushes",
    "release": "release the driver for maintenance",
    "run": "start an unmodified program with the agent",
    "attach": "start the agent in a running program (Python 3.14)",
    "load": "generate a known pattern of memory use on a device or a simulated device",
    "doctor": "check this machine, and print a remedy for each problem",
    "check-config": "check a configuration file",
    "rules": "list, check, test and override rules, and test receivers of alerts",
    "silence": "silence alerts for a time, list silences, and end them",
    "diagnose": "find leaks, fragmentation and crashes in a recorded log",
    "baseline": "measure the memory use of workloads, and compare it after a change",
    "why": "show what the live memory of a program consists of",
    "snapshot": "make a program write its framework's memory snapshot, and fetch the file",
    "record": "write a daemon's snapshots to a file, for `gpumond diagnose`",
    "completion": "print the completion script of a shell",
    "audit": "show the audit log of changes and flushes, and verify its integrity",
    "fleet": "list the daemons of several machines, show their state and use, and flush programs on them",
}


OTHER_COMMANDS = ("run",)
"""Verbs whose arguments contain another command, with its own options."""


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options. Its subcommands inherit this."""

    def __init__(self, **options: Any) -> None:
        own: dict[str, Any] = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**own | options)


class Verb(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(help.overview(VERBS))
        return DONE if argv else WRONG_USE
    if not argv[0].startswith("-") and argv[0] not in VERBS:
        print(f"gpumond: {help.unknown('verb', argv[0], VERBS)}\n`gpumond --help` lists the verbs", file=sys.stderr)
        return WRONG_USE
    chosen = argv[0] if argv[0] in VERBS else None
    try:
        parser, verbs = make_parser([chosen] if chosen else [])
    except ImportError as error:
        return _missing_extra(error)
    own = verbs.get(argv[0])
    if own is not None and argv[0] not in OTHER_COMMANDS and (word := help.misspelt(own, argv)) is not None:
        own.error(help.unknown("option", word, help.options(own)))
    arguments = parser.parse_args(argv)
    try:
        return _load(arguments.verb).run(arguments)
    except ImportError as error:
        return _missing_extra(error)
    except (ConfigError, NoSuchDevice, AmbiguousDevice) as error:
        print_error(f"gpumond: {error}")
        return WRONG_USE
    except GpumondError as error:
        print_error(f"gpumond: {error}")
        return FAILED
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        client = sys.modules.get("gpumond.cli.client")
        if client is None or not client.answered:
            raise
        reason = f"{type(error).__name__}: {error}"
        print_error(f"gpumond: the server is not gpumond, or has an incompatible version ({reason:.200}); check --url")
        return FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of standard output has closed it
        return FAILED
    except KeyboardInterrupt:
        return 130


def _version() -> str:
    commit = revision()
    return f"gpumond {__version__} (revision {commit})" if commit else f"gpumond {__version__}"


def print_error(message: str) -> None:
    """Print a message to standard error. It may contain text of a daemon: no character of it changes the terminal."""
    from gpumond.view.text import safe

    print("\n".join(map(safe, message.split("\n"))), file=sys.stderr, flush=True)


def make_parser(complete: Collection[str]) -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and those of the verbs ``complete`` with their arguments, or those of all verbs without.

    Raises ImportError if a library of such a verb is not installed.
    """
    parser = Parser(prog="gpumond")
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in complete or VERBS:
        description = VERBS[name][:1].upper() + VERBS[name][1:] + "."
        verb = verbs.add_parser(name, description=description, epilog=help.examples(name))
        if name in complete:
            _load(name).add_arguments(verb)
            help.describe_subcommands(verb)
    return parser, verbs.choices


def _load(name: str) -> Verb:
    return cast("Verb", import_module(f"gpumond.cli.main.{name.replace('-', '_')}"))


def _missing_extra(error: ImportError) -> int:
    if error.name is None or error.name.startswith("gpumond"):
        raise error
    print_error(f"gpumond: {error.name} is not installed: pip install 'gpumond[daemon]'")
    return WRONG_USE
