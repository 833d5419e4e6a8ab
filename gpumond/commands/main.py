"""The command line: one module per command, imported only when that command is used."""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, takewhile
from typing import Any, NoReturn, Protocol, cast

from gpumond import __version__, revision
from gpumond.cli.arguments import (
    DONE,
    FAILED,
    WRONG_USE,
    parse_number,
    parse_whole_number,
    print_error,
    with_typed_option,
)
from gpumond.facts.errors import AmbiguousDevice, ConfigError, DaemonError, GpumondError, NoSuchDevice, did_you_mean
from gpumond.facts.units import list_text
from gpumond.feature import Command, Feature, resolve
from gpumond.features import features
from gpumond.view.text import adapt_output

GROUPS = ("Memory", "Problems", "Programs", "Analysis", "Daemon", "Machines", "Shell")
"""Groups of commands in the overview, in this order."""


OWN_OPTIONS = ("--help", "--version")
"""Options without a command."""
SYNONYMS = {"export": "record", "ps": "status", "free": "flush", "logs": "events", "mute": "silence", "past": "history"}
"""Commands for words of other tools."""


def overview(commands: Iterable[Command]) -> str:
    """Return the text of `gpumond --help`: the commands by group."""
    lines = ["usage: gpumond [-h] [--version] COMMAND ...", ""]
    lines.append("See what GPU memory is used for, get alerts, and release cached memory.")
    for group, members in groupby(commands, key=lambda command: command.group):
        lines += ["", f"{group}:", *(f"  {command.name:14} {command.help}" for command in members)]
    lines += ["", "`gpumond COMMAND --help` shows options and examples."]
    lines.append("Exit codes: 0 success, 1 failure, 2 usage or configuration error,\n3 no match, or nothing to do.")
    lines.append("`gpumond run` exits with its command's status; see its help.")
    return "\n".join(lines)


def examples(command: Command) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in command.examples)])


def unknown_word(kind: str, word: str, known: Iterable[str]) -> str:
    """Return the message about a word that is not known, with the most similar known one."""
    names = {each.lstrip("-"): each for each in known}  # two short options are similar only in their hyphens
    similar = difflib.get_close_matches(word.partition("=")[0].lstrip("-"), list(names), n=1)
    similar = similar or [each for each in (SYNONYMS.get(word, ""),) if each in names]
    return f"unknown {kind} {word!r:.80}" + (f"; did you mean {names[similar[0]]}?" if similar else "")


def subparser(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the subcommand that the first word names, else the parser."""
    choices = (each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((own[words[0]] for own in choices if words and words[0] in own), parser)


def misspelled_option(parser: argparse.ArgumentParser, words: Iterable[str]) -> str | None:
    """Return the first word that has the form of a long option and is none of the parser's."""
    known = {"--", *options(parser)}
    before = takewhile(lambda word: word != "--", words)
    return next((word for word in before if word.startswith("--") and word.partition("=")[0] not in known), None)


def describe_subcommands(parser: argparse.ArgumentParser, lines: Sequence[str]) -> None:
    """Describe each subcommand in its own help as in the help of the parser. ``lines``: examples of the command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                text = listed.help or ""
                command.description = command.description or f"{text[:1].upper()}{text[1:]}."
                own = [line for line in lines if line.startswith(f"{command.prog} ")]
                command.epilog = "\n".join(["examples:", *(f"  {line}" for line in own)]) if own else None


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from arguments_of(subcommand)


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options and subcommands of a parser, and those of its subcommands."""
    for action in arguments_of(parser):
        yield from action.option_strings or map(str, action.choices or ())


def options_last(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words of a command with its options, and their values, after the others.

    argparse accepts no option before a subcommand, nor one between two optional positional arguments.
    """
    with_value = {name for each in arguments_of(parser) if each.nargs != 0 for name in each.option_strings}
    first: list[str] = []
    last: list[str] = []
    option = ""
    for place, word in enumerate(words):
        if word == "--":
            return [*first, *last, *words[place:]]
        if word.startswith("-") and word != "-":
            option = word
            last.append(word)
        elif option in with_value:
            option = ""
            last.append(word)
        else:
            first.append(word)
    return first + last


def _command(name: str, group: str, help: str, *examples: str, module: str = "") -> Command:
    return Command(name, group, help, examples, module or name)


COMMANDS = (
    _command(
        "serve",
        "Daemon",
        "run the daemon",
        "gpumond serve --source auto",
        "gpumond serve --config /etc/gpumond/gpumond.yaml --log-format json",
    ),
    _command(
        "demo",
        "Daemon",
        "run the daemon with simulated GPUs and sample programs",
        "gpumond demo",
        "gpumond demo --listen 127.0.0.1:9918",
        "gpumond demo --sim-device simulated",
    ),
    _command(
        "status",
        "Memory",
        "show GPUs and processes, and what their memory is used for",
        "gpumond status",
        "gpumond status train",
        "gpumond status --sort waste",
        "gpumond status -v --url http://127.0.0.1:9917",
    ),
    _command(
        "history",
        "Memory",
        "show memory use over time, or each program's use at one time",
        "gpumond history --device 0 --last 1h",
        "gpumond history train --last 30m --csv",
        "gpumond history train --until 08:45 --last 1m --every 1s",
        "gpumond history train eval --every 5m",
        "gpumond history --at 10m",
        "gpumond history --at 08:30 --at 08:45",
    ),
    _command("open", "Memory", "open the web UI in a browser, signed in", "gpumond open", "gpumond open --print"),
    _command(
        "top",
        "Memory",
        "show GPUs, processes and problems live, and flush programs",
        "gpumond top",
        "gpumond top --device 0",
        "gpumond top --url http://node1:9917 --url http://node2:9917",
        "gpumond top --once",
    ),
    _command(
        "verdicts",
        "Problems",
        "show leaks, fragmentation and other diagnosed problems",
        "gpumond verdicts",
        "gpumond verdicts --all",
    ),
    _command(
        "events",
        "Problems",
        "show past events and, with --follow, new ones",
        "gpumond events --limit 20",
        "gpumond events -f",
    ),
    _command(
        "detach-driver",
        "Daemon",
        "detach the daemon from the driver, for example to reset a GPU",
        "gpumond detach-driver --for 10m",
        module="detach_driver",
    ),
    _command(
        "run",
        "Programs",
        "start your unmodified program with the agent",
        "gpumond run --workload train -- torchrun --nproc-per-node 8 train.py",
        "gpumond run --need 40GiB --wait 10m -- python train.py",
    ),
    _command(
        "attach",
        "Programs",
        "start the agent in your running program (Python 3.14 or newer)",
        "gpumond attach 4242 --workload train",
    ),
    _command(
        "doctor",
        "Daemon",
        "check your machine and show a remedy for each problem",
        "gpumond doctor",
        "gpumond doctor --json",
    ),
    _command(
        "check-config",
        "Daemon",
        "check your configuration file",
        "gpumond check-config /etc/gpumond/gpumond.yaml",
        module="check_config",
    ),
    _command(
        "completion",
        "Shell",
        "print a shell's completion script",
        "source <(gpumond completion bash)",
        "gpumond completion fish | source",
    ),
)
"""Commands that belong to no feature. To add one, add it here, with a module like `CommandModule`."""

MISNAMED = (404, 422)
"""Statuses of the answers to a name or a value that the daemon does not know."""
WITH_OTHER_COMMANDS = ("run",)
"""Commands whose arguments contain another command, with its own options."""


@cache
def commands() -> Mapping[str, Command]:
    """Return all commands by name, in the order of their groups."""
    known = [
        replace(command, module=f"{feature.package}.{command.module}")
        for feature in (Feature("gpumond.commands", commands=COMMANDS), *features())
        for command in feature.commands
    ]
    return {command.name: command for command in sorted(known, key=lambda command: GROUPS.index(command.group))}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows choices as ``a|b``, and breaks no line at a hyphen, such as that of an option."""

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.metavar is None and action.choices is not None:
            default_metavar = "|".join(map(str, action.choices))
            return lambda count: (default_metavar,) * count
        return super()._metavar_formatter(action, default_metavar)

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap  # needed for help only

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated options, with one line per error. Its subcommands inherit this."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter}
        super().__init__(**defaults | options)
        self.register("type", int, parse_whole_number)
        self.register("type", float, parse_number)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            self.error(unknown_word("command", value, action.choices))
        choices = [*map(str, action.choices)]
        hint = did_you_mean(str(value), choices)
        problem = f" is unknown{hint}" if hint else f": expected one of {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"{value!r:.80}{problem}")

    def error(self, message: str) -> NoReturn:
        hint = "" if message.endswith("?") else f"; see `{self.prog} --help`"
        example = re.search("^  (gpumond .+)$", self.epilog or "", re.MULTILINE)
        if example and message.startswith(("the following arguments are required", "one of the arguments")):
            hint = f", as in `{example[1]}`{hint}"
        elif example and hint and message.startswith("unknown "):
            hint = f"; an example: `{example[1]}`{hint}"
        if required := re.fullmatch(r"the following arguments are required: ([a-z|-]+)\|([a-z-]+)", message):
            message = f"a subcommand is required: {required[1].replace('|', ', ')} or {required[2]}"
        elif required := re.fullmatch("the following arguments are required: (.+)", message):
            names = required[1].split(", ")
            message = f"{list_text(names)} {'is' if len(names) == 1 else 'are'} required"
        for action in self._actions:
            if not action.option_strings and action.metavar is None:  # its name is one of the code
                message = message.removeprefix(f"argument {action.dest}: ")
        message = re.sub(r"^argument (\S+):(?= ')", r"\1", message).removeprefix("argument ")
        if valued := re.fullmatch(r"(\S+): expected one argument", message):
            option = valued[1].rpartition("/")[2]
            message = f"{valued[1]}: expected a value; if it begins with -, write {option}=VALUE"
        if excluded := re.fullmatch(r"(\S+): not allowed with argument (\S+)", message):
            message = f"{excluded[1]} can't be combined with {excluded[2]}"
        if required := re.fullmatch("one of the arguments (.+) (.+) is required", message):
            message = f"one of {', '.join(required[1].split())} and {required[2]} is required"
        print_error(f"{self.prog}: {message}{hint}")
        raise SystemExit(WRONG_USE)


class CommandModule(Protocol):
    """The module of a command. ``run`` returns the exit code."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    try:
        argv = sys.argv[1:] if argv is None else list(argv)
        if argv[:1] == ["help"]:
            argv = [*argv[1:2], "--help"]
        adapt_output()
        return _run(argv)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left to write has no reader, or no room
        if error.errno == errno.EPIPE:
            return 141  # as of a program that SIGPIPE ends
        print_error(f"gpumond: the output can't be written: {error.strerror}")
        return FAILED


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview(commands().values()), flush=True)
        return DONE if argv else WRONG_USE
    is_option = argv[0].startswith("-")
    if argv[0] not in (["--version"] if is_option else commands()):
        unknown = (
            unknown_word("option", argv[0], OWN_OPTIONS) if is_option else unknown_word("command", argv[0], commands())
        )
        hint = "" if unknown.endswith("?") else "; `gpumond --help` lists the commands"
        print_error(f"gpumond: {unknown}{hint}")
        return WRONG_USE
    chosen = argv[0] if argv[0] in commands() else None
    try:
        parser, parsers = make_parser([chosen] if chosen else [])
    except ImportError as error:
        return _missing_extra(error)
    parser_of_command = parsers.get(argv[0])
    if parser_of_command is not None and argv[0] not in WITH_OTHER_COMMANDS:
        used = subparser(parser_of_command, argv[1:])
        if (word := misspelled_option(used, argv)) is not None:
            used.error(unknown_word("option", word, options(used)))
        argv = [argv[0], *options_last(parser_of_command, argv[1:])]
    arguments, rest = parser.parse_known_args(argv)
    arguments.words = argv
    if rest:
        used, word = parser_of_command or parser, rest[0]
        used.error(unknown_word("option" if word.startswith("--") else "argument", word, options(used)))
    try:
        return _module(arguments.command_name).run(arguments)
    except ImportError as error:
        return _missing_extra(error)
    except (ConfigError, NoSuchDevice, AmbiguousDevice) as error:
        print_error(f"gpumond: {error}")
        return WRONG_USE
    except GpumondError as error:
        print_error(f"gpumond: {with_typed_option(error, arguments)}")
        return WRONG_USE if isinstance(error, DaemonError) and error.status in MISNAMED else FAILED
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        client = sys.modules.get("gpumond.cli.client")
        if client is None or not client.responded:
            raise
        reason = f"{type(error).__name__}: {error}"
        print_error(f"gpumond: the server isn't gpumond, or has an incompatible version ({reason:.200}); check --url")
        return FAILED


def _version() -> str:
    commit = revision()
    return f"gpumond {__version__} (revision {commit})" if commit else f"gpumond {__version__}"


def make_parser(complete: Collection[str]) -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and those of the commands ``complete`` with their arguments, or of all commands without.

    Raises ImportError if a library of such a command is not installed.
    """
    parser = Parser(prog="gpumond")
    parser.add_argument("--version", action="version", version=_version())
    subparsers = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    for name in complete or commands():
        command = commands()[name]
        description = f"{command.help[:1].upper()}{command.help[1:]}."
        subparser = subparsers.add_parser(name, description=description, epilog=examples(command))
        if name in complete:
            _module(name).add_arguments(subparser)
            describe_subcommands(subparser, command.examples)
    return parser, subparsers.choices


def _module(name: str) -> CommandModule:
    return cast("CommandModule", resolve(commands()[name].module))


def _missing_extra(error: ImportError) -> int:
    if error.name is None or error.name.startswith("gpumond"):
        raise error
    print_error(
        f"gpumond: {error.name} isn't installed; in a clone of gpumond's repository, run: pip install '.[daemon]'"
    )
    return WRONG_USE
