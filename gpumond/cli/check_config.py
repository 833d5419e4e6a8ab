"""``gpumond check-config FILE``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpumond.cli import DONE
from gpumond.config import load
from gpumond.config.tokens import read_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print the settings that would hold, as JSON")


def run(arguments: argparse.Namespace) -> int:
    settings = load(arguments.file, environ={})
    settings.web()
    if settings.tokens_file is not None:
        read_tokens(settings.tokens_file)
    if arguments.json:
        print(json.dumps(settings.model_dump(mode="json", by_alias=True), indent=2))
    else:
        print(
            f"{arguments.file}: good; {len(settings.rules)} rules of its own, {len(settings.active_rules())} in force"
        )
    return DONE
