"""Options of `gpumond fleet` that list the machines and define the requests to them. Not a verb."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from gpumond.cli.arguments import duration
from gpumond.facts.errors import ConfigError
from gpumond.features.fleet.connection import Client, CredentialFiles, access, secret
from gpumond.features.fleet.discovery import DEFAULT_SERVICE, Sources, discover
from gpumond.features.fleet.machines import Machine, Machines
from gpumond.features.fleet.prometheus import Prometheus
from gpumond.host.http import trust

PARALLEL = 64
"""Requests at a time, by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument("--targets", type=Path, metavar="FILE", help="list of daemons in Prometheus' file_sd format")
    sources.add_argument("--http-sd", metavar="URL", help="service that lists the daemons, as http_sd")
    sources.add_argument(
        "--kubernetes",
        nargs="?",
        const=DEFAULT_SERVICE,
        metavar="NAMESPACE/SERVICE",
        help=f"list the endpoints of a service with kubectl (default: {DEFAULT_SERVICE})",
    )
    sources.add_argument("--slurm", action="store_true", help="list the nodes with sinfo")
    add_prometheus(parser)
    parser.add_argument(
        "--scheme", choices=("http", "https"), default="http", help="scheme of addresses without one (default: http)"
    )
    parser.add_argument(
        "--machine", action="append", metavar="PATTERN", help="machines with this name, such as 'gpu-*'; repeatable"
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the token for the daemons (default: $GPUMOND_TOKEN)"
    )
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE", help="YAML file of tokens by machine, which precede the other token"
    )
    parser.add_argument("--client-cert", type=Path, metavar="FILE", help="client certificate for the daemons")
    parser.add_argument("--client-key", type=Path, metavar="FILE", help="key of the client certificate")
    parser.add_argument(
        "--timeout", type=duration, default=5.0, metavar="DURATION", help="time limit of a read (default: 5s)"
    )
    parser.add_argument(
        "--parallel", type=int, default=PARALLEL, metavar="N", help=f"number of concurrent reads (default: {PARALLEL})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_prometheus(parser: argparse.ArgumentParser) -> None:
    """Add the options of the connection to Prometheus."""
    parser.add_argument("--prometheus", metavar="URL", help="Prometheus that scrapes the daemons; it also lists them")
    parser.add_argument("--prometheus-token-file", type=Path, metavar="FILE", help="file with a token for Prometheus")
    parser.add_argument(
        "--prometheus-ca-file", metavar="FILE", help="authorities for Prometheus (default: those of the system)"
    )
    parser.add_argument(
        "--job", metavar="NAME", help="job of the daemons in Prometheus (default: all jobs with daemons)"
    )


def make_client(arguments: argparse.Namespace) -> Client:
    """Return the client that the options describe. Raises ConfigError."""
    if arguments.parallel < 1 or not arguments.timeout > 0:
        raise ConfigError("--parallel and --timeout must be positive")
    if arguments.client_key and not arguments.client_cert:
        raise ConfigError("--client-key requires --client-cert")
    files = CredentialFiles(
        token=arguments.token_file,
        tokens=arguments.tokens,
        certificate=arguments.client_cert,
        key=arguments.client_key,
    )
    return Client(access(files), arguments.timeout)


def make_prometheus(arguments: argparse.Namespace) -> Prometheus | None:
    """Return the Prometheus of the options, None without one. Raises ConfigError."""
    if arguments.prometheus is None:
        return None
    token = secret(arguments.prometheus_token_file) if arguments.prometheus_token_file else None
    authorities = trust(arguments.prometheus_ca_file)
    return Prometheus(url=arguments.prometheus, trust=authorities, token=token)


async def listed(arguments: argparse.Namespace, client: Client, prometheus: Prometheus | None) -> Machines:
    """Return all machines that the options list. Raises DiscoveryError, ConfigError."""
    sources = Sources(
        file=arguments.targets,
        http_sd=arguments.http_sd,
        kubernetes=arguments.kubernetes,
        slurm=arguments.slurm,
        prometheus=prometheus,
        job=arguments.job,
        scheme=arguments.scheme,
    )
    return await discover(sources, client)


def chosen(arguments: argparse.Namespace, machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines that a pattern of --machine matches; all without one."""
    patterns = arguments.machine
    return [each for each in machines if not patterns or any(fnmatchcase(each.name, text) for text in patterns)]


@contextmanager
def progress(count: int, action: str) -> Iterator[Callable[[], None]]:
    """Show the number of completed requests on a terminal. The function is called after each."""
    shown, completed = sys.stderr.isatty(), 0

    def done() -> None:
        nonlocal completed
        completed += 1
        if shown:
            print(f"\r{action}: {completed} of {count}", end="", file=sys.stderr, flush=True)

    try:
        yield done
    finally:
        if shown and completed:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
