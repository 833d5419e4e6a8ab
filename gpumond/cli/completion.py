"""``gpumond completion``: completion scripts of bash, zsh and fish, generated from the parser."""

from __future__ import annotations

import argparse

from gpumond.cli import help, main as cli
from gpumond.cli.main import DONE

BASH = """\
_gpumond() {{
  local words
  case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{verbs}" ;;
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{verbs}"; fi
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
  (( CURRENT == 2 )) && own=({verbs})
  compadd -- $own || _files
}}
compdef _gpumond gpumond
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell")


def run(arguments: argparse.Namespace) -> int:
    _, parsers = cli.make_parser(cli.VERBS)
    words = {verb: sorted(set(help.options(parser))) for verb, parser in parsers.items()}
    print(SCRIPTS[arguments.shell](words))
    return DONE


def bash(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {verb}) words="{" ".join(own)}" ;;' for verb, own in words.items())
    return BASH.format(cases=cases, verbs=" ".join(words))


def zsh(words: dict[str, list[str]]) -> str:
    cases = "\n".join(f"    {verb}) own=({' '.join(own)}) ;;" for verb, own in words.items())
    return ZSH.format(cases=cases, verbs=" ".join(words))


def fish(words: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c gpumond -n __fish_use_subcommand -f -a {verb} -d '{cli.VERBS[verb].replace(chr(39), '')}'"
        for verb in words
    ]
    for verb, own in words.items():
        condition = f"complete -c gpumond -n '__fish_seen_subcommand_from {verb}'"
        for word in own:
            name = word.lstrip("-")
            kind = f"-f -a {word}" if name == word else f"-l {name}" if word.startswith("--") else f"-s {name}"
            lines.append(f"{condition} {kind}")
    return "\n".join(lines)


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
