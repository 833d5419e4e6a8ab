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


OPTIONS_WITHOUT_COMMAND = ("--help", "--version")
"""Options without a command."""
SYNONYMS = {
    "export": "record",
    "ps": "status",
    "free": "flush",
    "logs": "events",
    "mute": "silence",
    "past": "history",
    "port": "listen",
}
"""Commands and options for words of other tools."""


def overview_text(commands: Iterable[Command]) -> str:
    """Return the text of `gpumond --help`: the commands by group."""
    lines = ["usage: gpumond [-h] [--version] COMMAND ...", ""]
    lines.append("See what GPU memory is used for, get alerts, and release cached memory.")
    for group, members in groupby(commands, key=lambda command: command.group):
        lines += ["", f"{group}:", *(f"  {command.name:14} {command.help}" for command in members)]
    lines += ["", "`gpumond COMMAND --help` shows options and examples."]
    lines.append("Exit codes: 0 success, 1 failure, 2 usage or configuration error,\n3 no match, or nothing to do.")
    lines.append("`gpumond run` exits with its command's status; see its help.")
    return "\n".join(lines)


def examples_text(examples: Iterable[str]) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in examples)])


def unknown_word_message(kind: str, word: str, known: Iterable[str], before: str = "") -> str:
    """Return the message about a word that is not known, with the most similar known one after the words ``before``."""
    names = {each.lstrip("-"): each for each in known}  # two short options are similar only in their hyphens
    name = word.partition("=")[0].lstrip("-")
    matches = difflib.get_close_matches(name, list(names), n=1)
    matches = matches or [each for each in (SYNONYMS.get(name, ""),) if each in names]
    return f"unknown {kind} {word!r:.80}" + (f"; did you mean {before}{names[matches[0]]}?" if matches else "")


def parser_of_subcommand(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the subcommand that the first word names, else the parser."""
    choices = (each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((subparsers[words[0]] for subparsers in choices if words and words[0] in subparsers), parser)


def first_unknown_option(parser: argparse.ArgumentParser, words: Iterable[str]) -> str | None:
    """Return the first word that has the form of a long option and is none of the parser's."""
    known = {"--", *option_words(parser)}
    before = takewhile(lambda word: word != "--", words)
    return next((word for word in before if word.startswith("--") and word.partition("=")[0] not in known), None)


def describe_subcommands(parser: argparse.ArgumentParser, lines: Sequence[str]) -> None:
    """Describe each subcommand in its own help as in the help of the parser. ``lines``: examples of the command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                command = action.choices[choice.dest]
                text = choice.help or ""
                command.description = command.description or f"{text[:1].upper()}{text[1:]}."
                own_examples = [line for line in lines if line.startswith(f"{command.prog} ")]
                command.epilog = examples_text(own_examples) if own_examples else None


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                yield from arguments_of(subcommand)


def option_words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options and subcommands of a parser, and those of its subcommands."""
    for action in arguments_of(parser):
        yield from action.option_strings or map(str, action.choices or ())


def with_options_last(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the words of a command with its options, and their values, after the others.

    argparse accepts no option before a subcommand, nor one between two optional positional arguments.
    """
    with_value = {name for each in arguments_of(parser) if each.nargs != 0 for name in each.option_strings}
    words_before: list[str] = []
    options: list[str] = []
    option = ""
    for index, word in enumerate(words):
        if word == "--":
            return [*words_before, *options, *words[index:]]
        if word.startswith("-") and word != "-":
            option = word
            options.append(word)
        elif option in with_value:
            option = ""
            options.append(word)
        else:
            words_before.append(word)
    return words_before + options


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

WRONG_USE_STATUSES = (404, 422)
"""Statuses of the answers to a name or a value that the daemon does not know."""
COMMANDS_WITH_A_COMMAND = ("run",)
"""Commands whose arguments contain another command, with its own options."""


@cache
def commands() -> Mapping[str, Command]:
    """Return all commands by name, in the order of their groups."""
    all_commands = [
        replace(command, module=f"{feature.package}.{command.module}")
        for feature in (Feature("gpumond.commands", commands=COMMANDS), *features())
        for command in feature.commands
    ]
    return {command.name: command for command in sorted(all_commands, key=lambda command: GROUPS.index(command.group))}


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
            self.error(unknown_word_message("subcommand", value, action.choices, f"{self.prog} "))
        choices = [*map(str, action.choices)]
        hint = did_you_mean(str(value), choices)
        problem = f" is unknown{hint}" if hint else f": expected one of {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"{value!r:.80}{problem}")

    def error(self, message: str) -> NoReturn:
        hint = "" if message.endswith("?") else f"; see `{self.prog} --help`"
        example = re.search("^  (gpumond .+)$", self.epilog or "", re.MULTILINE)
        if example and message.startswith(("the following arguments are required", "one of the arguments")):
            hint = f", as in `{example[1]}`{hint}"
        elif example and example[1] != self.prog and hint and message.startswith("unknown "):
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
        print(overview_text(commands().values()), flush=True)
        return DONE if argv else WRONG_USE
    is_option = argv[0].startswith("-")
    if argv[0] not in (["--version"] if is_option else commands()):
        if is_option:
            message = unknown_word_message("option", argv[0], OPTIONS_WITHOUT_COMMAND)
        else:
            message = unknown_word_message("command", argv[0], commands(), "gpumond ")
        hint = "" if message.endswith("?") else "; to list the commands: gpumond --help"
        print_error(f"gpumond: {message}{hint}")
        return WRONG_USE
    command_name = argv[0] if argv[0] in commands() else None
    try:
        parser, parsers = make_parser([command_name] if command_name else [])
    except ImportError as error:
        return _report_missing_library(error)
    command_parser = parsers.get(argv[0])
    if command_parser is not None and argv[0] not in COMMANDS_WITH_A_COMMAND:
        used_parser = parser_of_subcommand(command_parser, argv[1:])
        if (word := first_unknown_option(used_parser, argv)) is not None:
            used_parser.error(unknown_word_message("option", word, option_words(used_parser)))
        argv = [argv[0], *with_options_last(command_parser, argv[1:])]
    arguments, unknown_words = parser.parse_known_args(argv)
    arguments.words = argv
    if unknown_words:
        used_parser, word = command_parser or parser, unknown_words[0]
        kind = "option" if word.startswith("--") else "argument"
        used_parser.error(unknown_word_message(kind, word, option_words(used_parser)))
    try:
        return _module(arguments.command_name).run(arguments)
    except ImportError as error:
        return _report_missing_library(error)
    except (ConfigError, NoSuchDevice, AmbiguousDevice) as error:
        print_error(f"gpumond: {error}")
        return WRONG_USE
    except GpumondError as error:
        print_error(f"gpumond: {with_typed_option(error, arguments)}")
        return WRONG_USE if isinstance(error, DaemonError) and error.status in WRONG_USE_STATUSES else FAILED
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        client = sys.modules.get("gpumond.cli.client")
        if client is None or not client.has_responded:
            raise
        reason = f"{type(error).__name__}: {error}"
        print_error(f"gpumond: the server isn't gpumond, or has an incompatible version ({reason:.200}); check --url")
        return FAILED


def _version_text() -> str:
    commit = revision()
    return f"gpumond {__version__} (revision {commit})" if commit else f"gpumond {__version__}"


def make_parser(with_arguments: Collection[str]) -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and those of the commands in ``with_arguments`` with theirs, or of all commands without.

    Raises ImportError if a library of such a command is not installed.
    """
    parser = Parser(prog="gpumond")
    parser.add_argument("--version", action="version", version=_version_text())
    subparsers = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    for name in with_arguments or commands():
        command = commands()[name]
        description = f"{command.help[:1].upper()}{command.help[1:]}."
        subparser = subparsers.add_parser(name, description=description, epilog=examples_text(command.examples))
        if name in with_arguments:
            _module(name).add_arguments(subparser)
            describe_subcommands(subparser, command.examples)
    return parser, subparsers.choices


def _module(name: str) -> CommandModule:
    return cast("CommandModule", resolve(commands()[name].module))


def _report_missing_library(error: ImportError) -> int:
    if error.name is None or error.name.startswith("gpumond"):
        raise error
    print_error(
        f"gpumond: {error.name} isn't installed; in a clone of gpumond's repository, run: pip install '.[daemon]'"
    )
    return WRONG_USE
