"""Overview of the commands, examples of each, and suggestions for misspelt words."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile

from gpumond.feature import Command

GROUPS = ("Memory", "Problems", "Programs", "Analysis", "Daemon", "Machines", "Shell")
"""Groups of commands in the overview, in this order."""


def overview(commands: Iterable[Command]) -> str:
    """Return the text of `gpumond --help`: the commands by group."""
    lines = ["usage: gpumond [-h] [--version] COMMAND ...", ""]
    lines.append("GPU memory accounting, alerts and flushes with a receipt.")
    for group, members in groupby(commands, key=lambda command: command.group):
        lines += ["", f"{group}:", *(f"  {command.name:13} {command.help}" for command in members)]
    lines += ["", "`gpumond COMMAND --help` shows the options of a command, and examples."]
    lines.append("Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 nothing to do.")
    return "\n".join(lines)


def examples(command: Command) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in command.examples)])


def unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """Return the message about a word that is not known, with the most similar known one."""
    similar = difflib.get_close_matches(word.partition("=")[0], list(known), n=1)
    return f"unknown {kind} {word!r:.80}" + (f", did you mean {similar[0]}?" if similar else "")


def misspelt(parser: argparse.ArgumentParser, words: Iterable[str]) -> str | None:
    """Return the first word that has the form of a long option and is none of the parser's."""
    known = {"--", *options(parser)}
    before = takewhile(lambda word: word != "--", words)
    return next((word for word in before if word.startswith("--") and word.partition("=")[0] not in known), None)


def describe_subcommands(parser: argparse.ArgumentParser) -> None:
    """Describe each subcommand in its own help as in the help of the parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                text = listed.help or ""
                command.description = command.description or f"{text[:1].upper()}{text[1:]}."


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options and subcommands of a parser, and those of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for name, own in action.choices.items():
                yield name
                yield from options(own)
        elif not action.option_strings and action.choices:
            yield from map(str, action.choices)
