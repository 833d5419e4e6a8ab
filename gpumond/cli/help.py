"""Overview of the verbs, examples of each, and suggestions for misspelt words."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Memory": ("status", "top", "open", "flush", "limit", "receipts"),
    "Problems": ("alerts", "silence", "verdicts", "events"),
    "Programs": ("run", "attach", "why", "snapshot"),
    "Analysis": ("diagnose", "record", "baseline", "load"),
    "Daemon": ("serve", "demo", "doctor", "check-config", "rules", "release", "audit"),
    "Machines": ("fleet",),
    "Shell": ("completion",),
}

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "serve": ("gpumond serve --source auto", "gpumond serve --config /etc/gpumond/gpumond.yaml --log-format json"),
    "demo": ("gpumond demo", "gpumond demo --listen 127.0.0.1:9918", "gpumond demo --device simulated"),
    "status": ("gpumond status", "gpumond status --wide", "gpumond status -v --url http://127.0.0.1:9917"),
    "open": ("gpumond open", "gpumond open --print"),
    "top": (
        "gpumond top",
        "gpumond top --device 0",
        "gpumond top --url http://node1:9917 --url http://node2:9917",
        "gpumond top --once",
    ),
    "flush": (
        "gpumond flush --workload train --dry-run",
        "gpumond flush --pid 4242",
        "gpumond flush --device 0 --step gc --step cache --min-reclaimable 1GiB",
    ),
    "limit": ("gpumond limit --pid 4242 40GiB", "gpumond limit --workload train --device 0 none"),
    "alerts": ("gpumond alerts", "gpumond alerts --past"),
    "silence": (
        "gpumond silence add rule=leak 'workload=~train.*' --for 1h --reason 'a known leak'",
        "gpumond silence list",
    ),
    "verdicts": ("gpumond verdicts", "gpumond verdicts --all"),
    "events": ("gpumond events --limit 20", "gpumond events -f"),
    "receipts": ("gpumond receipts --limit 10",),
    "release": ("gpumond release --for 10m",),
    "run": (
        "gpumond run --workload train -- torchrun --nproc-per-node 8 train.py",
        "gpumond run --need 40GiB --wait 10m -- python train.py",
    ),
    "why": ("gpumond why --workload train", "gpumond why --pid 4242 --record 60 --html sites.html"),
    "snapshot": ("gpumond snapshot --pid 4242 --out memory.pickle",),
    "attach": ("gpumond attach 4242 --workload train",),
    "load": ("gpumond load --list", "gpumond load leak-linear --seed 1 --duration 5m"),
    "doctor": ("gpumond doctor", "gpumond doctor --json"),
    "check-config": ("gpumond check-config /etc/gpumond/gpumond.yaml",),
    "rules": (
        "gpumond rules check rules.yaml",
        "gpumond rules test rules.test.yaml",
        "gpumond rules override device-nearly-full --level 97%",
    ),
    "diagnose": ("gpumond diagnose smi.csv", "gpumond diagnose recording.jsonl --json"),
    "baseline": (
        "gpumond baseline record before --workload train --for 10m",
        "gpumond baseline compare before --for 10m --fail-above 5%",
    ),
    "record": ("gpumond record --out recording.jsonl --for 1h",),
    "audit": ("gpumond audit", "gpumond audit verify"),
    "fleet": (
        "gpumond fleet targets --kubernetes --json",
        "gpumond fleet status --targets gpus.json --scheme https",
        "gpumond fleet top --slurm --machine 'gpu-1*'",
        "gpumond fleet doctor --slurm --machine 'gpu-*'",
        "gpumond fleet flush --targets gpus.json --workload 'train-*' --dry-run",
        "gpumond fleet flush --prometheus http://127.0.0.1:9090 --query 'gpumond_pool_reclaimable_bytes > 2e9'",
        "gpumond fleet sleep --targets gpus.json --engine 'chat-*'",
        "gpumond fleet report --prometheus http://127.0.0.1:9090 --by workload --for 1d --html report.html",
    ),
    "completion": ("source <(gpumond completion bash)", "gpumond completion fish | source"),
}


def overview(verbs: Mapping[str, str]) -> str:
    """Return the text of `gpumond --help`: the verbs by group."""
    lines = ["usage: gpumond [-h] [--version] VERB ...", ""]
    lines.append("GPU memory accounting, alerts and flushes with a receipt.")
    for group, names in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:13} {verbs[name]}" for name in names)]
    lines += ["", "`gpumond VERB --help` shows the options of a verb, and examples."]
    lines.append("Exit codes: 0 done, 1 failed, 2 wrong use or configuration, 3 nothing to do.")
    return "\n".join(lines)


def examples(verb: str) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in EXAMPLES[verb])])


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
