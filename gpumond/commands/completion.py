"""``gpumond completion``: completion scripts of bash, zsh and fish, generated from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, address
from gpumond.commands.main import commands, make_parser, options
from gpumond.facts.errors import ConfigError, GpumondError

BASH = """\
_gpumond() {{
  local words="" kind="" word="${{COMP_WORDS[COMP_CWORD]}}"
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  elif [ -n "$kind" ]; then
    words="$(gpumond completion --values "$kind" 2>/dev/null)"
  else
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{nested}
    esac
    [ -n "$words" ] || case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "${{COMP_WORDS[1]}} $word" in
      *\\ -*) ;;
{named}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -F _gpumond gpumond
"""
ZSH = """\
_gpumond() {{
  local -a own
  local kind=""
  case "$words[CURRENT-1]" in
{values}
  esac
  case "$words[2]" in
{cases}
  esac
  (( CURRENT == 2 )) && own=({commands})
  [ -n "$kind" ] && own=(${{(f)"$(gpumond completion --values $kind 2>/dev/null)"}})
  compadd -- $own || _files
}}
compdef _gpumond gpumond
"""
VALUES = {
    "--workload": "workloads",
    "--pid": "pids",
    "--device": "devices",
}
"""Kinds of the values of options that the daemon knows."""
NAMED = ("flush", "why", "limit", "snapshot")
"""Commands whose first argument is a program."""
SECONDS = 0.5
"""Longest wait for the daemon."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=tuple(SCRIPTS), help="the shell")
    parser.add_argument(
        "--values", choices=tuple(READERS), metavar="KIND", help="print the existing values for an option"
    )
    parser.add_argument("--url", type=address, default=None, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.values:
        print("\n".join(values(arguments.values, arguments.url or address(client.default_url()))))
        return DONE
    if arguments.shell is None:
        raise ConfigError(f"completion: expected a shell: {', '.join(SCRIPTS)}")
    _, parsers = make_parser(commands())
    words = {command: sorted(set(options(parser))) for command, parser in parsers.items()}
    print(SCRIPTS[arguments.shell](words))
    return DONE


def values(kind: str, url: str) -> list[str]:
    """Return the values that the daemon knows; none if it does not answer at once."""
    path, read = READERS[kind]
    try:
        return sorted({str(value) for value in read(client.get(url, path, seconds=SECONDS)) if value})
    except GpumondError:
        return []


def _workloads(agents: Any) -> Iterator[str]:
    yield from (agent["workload"] for agent in agents)


def _pids(processes: Any) -> Iterator[int]:
    yield from (process["pid"] for process in processes)


def _devices(devices: Any) -> Iterator[str]:
    for device in devices:
        yield from (str(device["index"]), device["uuid"])


def _names(entries: Any) -> Iterator[str]:
    yield from (entry["name"] for entry in entries)


READERS: Mapping[str, tuple[str, Callable[[Any], Iterator[Any]]]] = {
    "workloads": ("/api/v1/agents", _workloads),
    "pids": ("/api/v1/processes", _pids),
    "devices": ("/api/v1/devices", _devices),
    "rules": ("/api/v1/rules", _names),
    "baselines": ("/api/v1/baselines", _names),
}


def bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'      {command}) words="{" ".join(own)}" ;;' for command, own in words.items())
    kinds = "\n".join(f"    {option}) kind={kind} ;;" for option, kind in VALUES.items())
    named = "\n".join(
        f'      {command}\\ *) words="$words $(gpumond completion --values workloads 2>/dev/null)" ;;'
        for command in NAMED
    )
    nested = "\n".join(f'      "{name}") words="{" ".join(own)}" ;;' for name, own in subcommands())
    return BASH.format(cases=cases, commands=" ".join(words), values=kinds, named=named, nested=nested)


def subcommands() -> Iterator[tuple[str, list[str]]]:
    """Yield each subcommand after its command, and its options."""
    _, parsers = make_parser(commands())
    for command, parser in parsers.items():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, own in action.choices.items():
                    yield f"{command} {name}", sorted(set(options(own)))


def zsh(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    {command}) own=({' '.join(own)}) ;;" for command, own in words.items())
    kinds = "\n".join(f"    {option}) kind={kind} ;;" for option, kind in VALUES.items())
    return ZSH.format(cases=cases, commands=" ".join(words), values=kinds)


def fish(words: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c gpumond -n __fish_use_subcommand -f -a {command.name} -d '{command.help.replace(chr(39), '')}'"
        for command in commands().values()
    ]
    for command, own in words.items():
        condition = f"complete -c gpumond -n '__fish_seen_subcommand_from {command}'"
        for word in own:
            name = word.lstrip("-")
            if word in VALUES:
                lines.append(f"{condition} -l {name} -x -a '(gpumond completion --values {VALUES[word]})'")
                continue
            kind = f"-f -a {word}" if name == word else f"-l {name}" if word.startswith("--") else f"-s {name}"
            lines.append(f"{condition} {kind}")
    return "\n".join(lines)


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
