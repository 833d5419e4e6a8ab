"""``gpumond check-config FILE``: check a configuration file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpumond.cli.arguments import DONE, add_option
from gpumond.config.loading import read_settings_config
from gpumond.config.tokens import check_subjects, read_tokens

FIRST_LISTENER_NOTE = (
    "gpumond sends the secret to whichever user listens first at the address; to prevent this, set user: to the "
    "server's user"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="configuration file")
    add_option(parser, "--json", "print the effective settings as JSON")


def run(arguments: argparse.Namespace) -> int:
    config = read_settings_config(arguments.file, environ={})
    settings = config.settings()
    web = settings.web()
    if settings.tokens_file is not None:
        tokens = read_tokens(settings.tokens_file)
        reviews, proxy = settings.token_review_audience is not None, settings.identity_proxy is not None
        check_subjects(tokens, web.accepts_client_certificates, reviews, proxy)
    if arguments.json:
        print(json.dumps(config.model_dump(mode="json", by_alias=True), indent=2))
    else:
        active = settings.active_rules()
        print(f"{arguments.file}: valid; rules in the file: {len(settings.rules)}, active rules: {len(active)}")
        for engine in settings.engines:
            if engine.trusts_the_first_listener:
                print(f"note: engines: {engine.name}: {FIRST_LISTENER_NOTE}")
    return DONE
