"""``gpumond doctor``: check this machine, and print a remedy for each problem."""

from __future__ import annotations

import argparse
import logging
from functools import partial

from gpumond.cli import DONE, FAILED, client
from gpumond.cli.doctor_checks import examine
from gpumond.cli.table import safe
from gpumond.protocol.messages import to_json

MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    logging.disable()  # the findings contain what the probe would log
    findings = []
    for finding in examine(partial(client.get, arguments.url)):
        findings.append(finding)
        if not arguments.json:
            print(f"{MARKS[finding.state]}  {finding.subject}: {safe(finding.detail)}", flush=True)
            if finding.remedy:
                print(f"      -> {safe(finding.remedy)}", flush=True)
    if arguments.json:
        print(to_json(findings).decode())
    return FAILED if any(finding.state == "bad" for finding in findings) else DONE
