"""``gpumond completion``: completion scripts of bash, zsh and fish, generated from the parser."""

from __future__ import annotations

import argparse

from gpumond.cli.arguments import DONE
from gpumond.commands.main import commands, make_parser, options

BASH = """\
_gpumond() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{commands}" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{commands}"; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
  if [ "${{#COMPREPLY[@]}}" -eq 0 ]; then COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}")); fi
}}
complete -F _gpumond gpumond
"""
ZSH = """\
_gpumond() {{
  local -a own
  case "$words[2]" in
{cases}
  esac
  (( CURRENT == 2 )) && own=({commands})
  compadd -- $own || _files
}}
compdef _gpumond gpumond
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    _, parsers = make_parser(commands())
    words = {command: sorted(set(options(parser))) for command, parser in parsers.items()}
    print(SCRIPTS[arguments.shell](words))
    return DONE


def bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {command}) words="{" ".join(own)}" ;;' for command, own in words.items())
    return BASH.format(cases=cases, commands=" ".join(words))


def zsh(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    {command}) own=({' '.join(own)}) ;;" for command, own in words.items())
    return ZSH.format(cases=cases, commands=" ".join(words))


def fish(words: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c gpumond -n __fish_use_subcommand -f -a {command.name} -d '{command.help.replace(chr(39), '')}'"
        for command in commands().values()
    ]
    for command, own in words.items():
        condition = f"complete -c gpumond -n '__fish_seen_subcommand_from {command}'"
        for word in own:
            name = word.lstrip("-")
            kind = f"-f -a {word}" if name == word else f"-l {name}" if word.startswith("--") else f"-s {name}"
            lines.append(f"{condition} {kind}")
    return "\n".join(lines)


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
