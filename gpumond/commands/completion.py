"""``gpumond completion``: completion scripts of bash, zsh and fish, generated from the parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import DONE, add_option, parse_address
from gpumond.commands.main import commands, make_parser, option_words
from gpumond.facts.errors import ConfigError, GpumondError

BASH_TEMPLATE = """\
_gpumond() {{
  local words="" kind="" label="" word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}} "
  if [ "$word" = "=" ]; then
    label="${{COMP_WORDS[COMP_CWORD-1]}}=" word=""
  elif [ "${{COMP_WORDS[COMP_CWORD-1]}}" = "=" ]; then
    label="${{COMP_WORDS[COMP_CWORD-2]}}="
  fi
  [ "$COMP_CWORD" -gt 2 ] && command="$command${{COMP_WORDS[2]}} "
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  elif [ -z "$kind" ]; then
    case "$command" in
{cases}
    esac
    case "$word" in -*) kind="" ;; esac
  fi
  [ -n "$kind" ] && words="$words $(gpumond completion --values "$kind" 2>/dev/null)"
  COMPREPLY=($(compgen -W "$words" -- "$label$word"))
  COMPREPLY=("${{COMPREPLY[@]#"$label"}}")
  if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -F _gpumond gpumond
"""
ZSH_TEMPLATE = """\
_gpumond() {{
  local -a own
  local kind="" command="$words[2] "
  (( CURRENT > 3 )) && command="$command$words[3] "
  case "$words[CURRENT-1]" in
{values}
  esac
  if (( CURRENT == 2 )); then
    own=({commands})
  elif [[ -z "$kind" ]]; then
    case "$command" in
{cases}
    esac
    [[ "$words[CURRENT]" == -* ]] && kind=""
  fi
  [[ -n "$kind" ]] && own+=(${{(f)"$(gpumond completion --values $kind 2>/dev/null)"}})
  compadd -- $own || _files
}}
compdef _gpumond gpumond
"""
OPTION_KINDS = {
    "--workload": "workloads",
    "--pid": "pids",
    **dict.fromkeys(("--device", "--need-device"), "devices"),
}
"""Kinds of the values of options that the daemon knows."""
ARGUMENT_KINDS = {
    **dict.fromkeys(("flush", "why", "limit", "snapshot", "suspend", "resume", "history"), "workloads"),
    **dict.fromkeys(("rules override", "rules restore"), "rules"),
    **dict.fromkeys(("baseline compare", "baseline delete"), "baselines"),
    "silence add": "matchers",
    "silence delete": "silences",
    "oom show": "cases",
    "loadgen": "scenarios",
}
"""Kinds of the first argument of commands."""
LABEL_KINDS = {"rule": "rules", "workload": "workloads"}
"""Labels of matchers, and the kinds of their values; the others are completed from active alerts."""
TIMEOUT_SECONDS = 0.5
"""Longest wait for the daemon."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"%(prog)s [-h] {'|'.join(SCRIPTS)}"
    parser.add_argument("shell", nargs="?", choices=tuple(SCRIPTS), help="your shell")
    add_option(
        parser,
        "--values KIND",
        argparse.SUPPRESS,
        choices=sorted({*OPTION_KINDS.values(), *ARGUMENT_KINDS.values()}),
    )
    add_option(parser, "--url URL", argparse.SUPPRESS, type=parse_address)


def run(arguments: argparse.Namespace) -> int:
    if arguments.values:
        print("\n".join(known_values(arguments.values, arguments.url or parse_address(client.default_url()))))
        return DONE
    if arguments.shell is None:
        raise ConfigError(f"expected a shell: {', '.join(SCRIPTS)}")
    print(SCRIPTS[arguments.shell](dict(words_by_command())))
    return DONE


def words_by_command() -> Iterator[tuple[str, list[str]]]:
    """Yield each command with its subcommands and options, after its subcommands, of which each has its own."""
    _, parsers = make_parser(commands())
    for command, parser in parsers.items():
        subparsers = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        subcommands = {name: each for action in subparsers for name, each in action.choices.items()}
        for name, each in subcommands.items():
            yield f"{command} {name}", sorted(set(option_words(each)))
        subcommand_options = {option for each in subcommands.values() for option in option_words(each)}
        own_options = {option for action in parser._actions for option in action.option_strings}
        yield command, sorted((set(option_words(parser)) - subcommand_options) | own_options)


def known_values(kind: str, url: str) -> list[str]:
    """Return the values that the daemon knows; none if it does not answer at once."""
    if kind == "scenarios":
        from gpumond.features.loadgen.plan import SCENARIOS

        return sorted(SCENARIOS)
    if kind == "matchers":
        matchers = (f"{label}={value}" for label, kind in LABEL_KINDS.items() for value in known_values(kind, url))
        return sorted({*matchers, *known_values("labels", url)})
    path, values_of = READERS[kind]
    try:
        response = client.get(url, path, timeout_seconds=TIMEOUT_SECONDS)
        return sorted({str(value) for value in values_of(response) if value})
    except GpumondError:
        return []


READERS: Mapping[str, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    "workloads": ("/api/v1/agents", lambda agents: (each["workload"] for each in agents)),
    "pids": ("/api/v1/processes", lambda processes: (each["pid"] for each in processes)),
    "devices": (
        "/api/v1/devices",
        lambda devices: (name for each in devices for name in (each["index"], each["uuid"])),
    ),
    "rules": ("/api/v1/rules", lambda rules: (each["name"] for each in rules)),
    "baselines": ("/api/v1/baselines", lambda baselines: (each["name"] for each in baselines)),
    "labels": (
        "/api/v1/alerts",
        lambda alerts: (
            f"{name}={value}" for each in alerts for name, value in each["labels"] if not re.search(r"\s|^$", value)
        ),
    ),
    "silences": (
        "/api/v1/silences",
        lambda entries: (each["silence"]["id"] for each in entries if each["state"] != "ended"),
    ),
    "cases": ("/api/v1/oom", lambda cases: (each["id"] for each in cases)),
}


def bash(words: Mapping[str, Sequence[str]]) -> str:
    cases = (
        f"      \"{command} \"*) words='{' '.join(command_words)}' kind={_kind(command)} ;;"
        for command, command_words in words.items()
    )
    return _fill_template(BASH_TEMPLATE, cases, words)


def zsh(words: Mapping[str, Sequence[str]]) -> str:
    cases = (
        f'      "{command} "*) own=({" ".join(command_words)}) kind={_kind(command)} ;;'
        for command, command_words in words.items()
    )
    return _fill_template(ZSH_TEMPLATE, cases, words)


def _kind(command: str) -> str:
    return ARGUMENT_KINDS.get(command, "''")


def _fill_template(script: str, cases: Iterable[str], words: Iterable[str]) -> str:
    kinds = "\n".join(f"    {option}) kind={kind} ;;" for option, kind in OPTION_KINDS.items())
    names = " ".join(command for command in words if " " not in command)
    return script.format(values=kinds, commands=names, cases="\n".join(cases))


def fish(words: Mapping[str, Sequence[str]]) -> str:
    lines = [
        f"complete -c gpumond -n __fish_use_subcommand -f -a {command.name} -d '{command.help.replace(chr(39), '')}'"
        for command in commands().values()
    ]
    for path, command_words in words.items():
        command, _, nested = path.partition(" ")
        inner = [each.partition(" ")[2] for each in words if each.startswith(f"{command} ")]
        own_part = f"; and __fish_seen_subcommand_from {nested}" if nested else ""
        exclusion = f"; and not __fish_seen_subcommand_from {' '.join(inner)}" if inner and not nested else ""
        condition = f"complete -c gpumond -n '__fish_seen_subcommand_from {command}{own_part}{exclusion}'"
        lines += [f"{condition} {_fish_word(word)}" for word in command_words]
        if path in ARGUMENT_KINDS:
            lines.append(f"{condition} -f -a '(gpumond completion --values {ARGUMENT_KINDS[path]} 2>/dev/null)'")
    return "\n".join(lines)


def _fish_word(word: str) -> str:
    name = word.lstrip("-")
    if word in OPTION_KINDS:
        return f"-l {name} -x -a '(gpumond completion --values {OPTION_KINDS[word]} 2>/dev/null)'"
    return f"-f -a {word}" if name == word else f"-l {name}" if word.startswith("--") else f"-s {name}"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
