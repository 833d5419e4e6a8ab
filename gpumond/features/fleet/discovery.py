"""Machines that the options of ``gpumond fleet`` select: lists of daemons in files in Prometheus' file_sd format,
http_sd, Prometheus, Kubernetes and Slurm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml

from gpumond.cli.arguments import duration
from gpumond.config.expectations import yaml_problem
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError
from gpumond.features.fleet.connection import Client, CredentialFiles, access, run_each, secret
from gpumond.features.fleet.machines import METRICS_PATH, Machine, Machines, machine
from gpumond.features.fleet.prometheus import Prometheus
from gpumond.host.files import read_text
from gpumond.host.http import trust
from gpumond.view.frame import CheckedFrame

COMMAND_SECONDS = 60.0
DEFAULT_SERVICE = "gpumond/gpumond"
"""Namespace and name of the service in ``deploy/kubernetes``."""
PORT_NAME = "metrics"
DAEMONS = 'up{job=~".*gpumond.*"} or gpumond_build_info or gpumond:up'
"""The daemons in Prometheus, whatever the name of their job, as ``deploy/prometheus/gpumond.rules.yaml`` finds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the machines are listed. Of the first four at most one is set; ``prometheus`` lists them without one.

    ``job``: the label ``job`` of the daemons in Prometheus; None for any. ``scheme``: that of addresses without one.
    """

    file: Path | None = None
    http_sd: str | None = None
    kubernetes: str | None = None
    slurm: bool = False
    prometheus: Prometheus | None = None
    job: str | None = None
    scheme: str = "http"


async def discover(sources: Sources, client: Client) -> Machines:
    """Return the machines that the source lists. Raises DiscoveryError, and ConfigError without a source."""
    if sources.file is not None:
        return Machines(from_file(sources.file, sources.scheme))
    if sources.http_sd is not None:
        groups, proven = await client.get_list(sources.http_sd)
        found = from_groups(groups, sources.scheme, sources.http_sd)
        return Machines(replace(each, proven=proven) for each in found)
    if sources.kubernetes is not None:
        namespace, slash, service = sources.kubernetes.partition("/")
        if not (namespace and slash and service) or "/" in service:
            raise ConfigError(f"--kubernetes {sources.kubernetes!r:.80}: expected NAMESPACE/SERVICE")
        selector = f"--selector=kubernetes.io/service-name={service}"
        command = ("kubectl", "get", "endpointslices", f"--namespace={namespace}", selector, "--output=json")
        return Machines(from_slices(_json(_output(command), command[0]), sources.scheme))
    if sources.slurm:
        return Machines(from_nodes(_output(("sinfo", "-h", "-N", "-o", "%N")), sources.scheme))
    if sources.prometheus is not None:
        selected = DAEMONS if sources.job is None else f"up{{job={json.dumps(sources.job)}}}"
        daemons = await sources.prometheus.query(f"group by (job, instance) ({selected})")
        found = from_prometheus(await sources.prometheus.targets(), [each.labels for each in daemons])
        proven = await sources.prometheus.proven()
        return Machines(replace(each, proven=proven) for each in found)
    raise ConfigError("no machines given: use --targets, --http-sd, --prometheus, --kubernetes or --slurm")


def from_file(path: Path, scheme: str) -> Iterator[Machine]:
    """Yield the machines of a file in the format of file_sd."""
    return from_groups(_read(path), scheme, str(path))


def from_groups(groups: Any, scheme: str, where: str) -> Iterator[Machine]:
    """Yield the machines of a list in the format of file_sd and http_sd."""
    for group in _sequence(groups, where):
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            raise DiscoveryError(f'{where}: expected a list of {{"targets": [ADDRESS], "labels": {{NAME: TEXT}}}}')
        labels = group.get("labels") or {}
        if not isinstance(labels, Mapping):
            raise DiscoveryError(f"{where}: expected names and texts under labels")
        for address in group["targets"]:
            yield machine(str(address), {str(name): str(text) for name, text in labels.items()}, scheme=scheme)


def from_prometheus(targets: Sequence[Mapping[str, Any]], daemons: Sequence[Mapping[str, str]]) -> Iterator[Machine]:
    """Yield the daemons among the targets of Prometheus, by the addresses that it scrapes.

    ``daemons``: their labels ``job`` and ``instance``.
    """
    known = {(each.get("job"), each.get("instance")) for each in daemons}
    for target in targets:
        labels, scraped = target.get("labels"), target.get("scrapeUrl")
        if not isinstance(labels, Mapping) or not isinstance(scraped, str):
            continue
        if (labels.get("job"), labels.get("instance")) not in known:
            continue
        url = urlsplit(scraped)
        texts = {str(name): str(text) for name, text in labels.items()}
        path = {"__scheme__": url.scheme, "__metrics_path__": url.path or METRICS_PATH}
        yield machine(url.netloc, texts | path, port=None)


def from_slices(answer: Any, scheme: str) -> Iterator[Machine]:
    """Yield the machines of Kubernetes' EndpointSlices, named as their nodes. Those that are not ready are included."""
    items = answer.get("items") if isinstance(answer, Mapping) else None
    for item in _sequence(items, "kubectl"):
        ports = {each.get("name"): each.get("port") for each in item.get("ports") or ()}
        port = ports.get(PORT_NAME) or next(iter(ports.values()), None)
        for endpoint in item.get("endpoints") or ():
            addresses, pod = endpoint.get("addresses"), endpoint.get("targetRef") or {}
            if not addresses:
                continue
            host = f"[{addresses[0]}]" if item.get("addressType") == "IPv6" else addresses[0]
            labels = {"instance": endpoint.get("nodeName"), "namespace": pod.get("namespace"), "pod": pod.get("name")}
            known = {name: text for name, text in labels.items() if text}
            yield machine(f"{host}:{port}" if port else host, known, scheme=scheme)


def from_nodes(text: str, scheme: str) -> Iterator[Machine]:
    """Yield a machine for each node that `sinfo` lists, once."""
    for node in dict.fromkeys(text.split()):
        yield machine(node, {}, scheme=scheme)


def to_groups(machines: Iterable[Machine]) -> list[dict[str, Any]]:
    """Return the machines in the format of file_sd, from which `from_groups` returns the same machines."""
    return [{"targets": [each.address], "labels": dict(_labels(each))} for each in machines]


def _labels(each: Machine) -> Iterator[tuple[str, str]]:
    yield from each.labels
    yield "instance", each.name
    yield "__scheme__", each.scheme
    if each.prefix:
        yield "__metrics_path__", each.prefix + METRICS_PATH


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise DiscoveryError(f"{where}: expected a list")
    return value


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DiscoveryError(f"{where}: not JSON") from None


def _read(path: Path) -> Any:
    """Return the value in a YAML file or, by its name, in a JSON file, which is read faster. Raises ConfigError."""
    try:
        text = read_text(path)
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: invalid JSON") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        line, problem = yaml_problem(error)
        raise ConfigError(f"{path}{'' if line is None else f', line {line}'}: {problem}") from None


def _output(command: Sequence[str]) -> str:
    """Return the output of a command of the user's environment. Raises DiscoveryError."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise DiscoveryError(f"{command[0]}: {error.strerror or os.strerror(error.errno or 0)}") from None
    except subprocess.TimeoutExpired:
        raise DiscoveryError(f"{command[0]}: no result within {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        message = " ".join(done.stderr.decode(errors="replace").split())
        raise DiscoveryError(f"{command[0]} failed with status {done.returncode}: {message:.300}")
    return done.stdout.decode(errors="replace")


PARALLEL = 64
"""Requests at a time, by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--targets", type=Path, metavar="FILE", help="file with the daemons, in Prometheus' file_sd format"
    )
    sources.add_argument(
        "--http-sd", metavar="URL", help="service that lists the daemons, in Prometheus' http_sd format"
    )
    sources.add_argument(
        "--kubernetes",
        nargs="?",
        const=DEFAULT_SERVICE,
        metavar="NAMESPACE/SERVICE",
        help=f"use the endpoints of this service, read with kubectl (default: {DEFAULT_SERVICE})",
    )
    sources.add_argument("--slurm", action="store_true", help="use the nodes that sinfo lists")
    add_prometheus(parser)
    parser.add_argument(
        "--scheme", choices=("http", "https"), default="http", help="scheme for addresses without one (default: http)"
    )
    parser.add_argument(
        "--machine",
        action="append",
        metavar="PATTERN",
        help="only machines whose name matches, such as 'gpu-*'; repeatable",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with your token for the daemons (default: $GPUMOND_TOKEN)"
    )
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="per-machine tokens (YAML); override --token-file")
    parser.add_argument("--client-cert", type=Path, metavar="FILE", help="client certificate to present to the daemons")
    parser.add_argument("--client-key", type=Path, metavar="FILE", help="private key for --client-cert")
    parser.add_argument(
        "--timeout", type=duration, default=5.0, metavar="DURATION", help="time limit for each request (default: 5s)"
    )
    parser.add_argument(
        "--parallel",
        type=int,
        default=PARALLEL,
        metavar="N",
        help=f"maximum number of requests at a time (default: {PARALLEL})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_prometheus(parser: argparse.ArgumentParser) -> None:
    """Add the options of the connection to Prometheus."""
    parser.add_argument(
        "--prometheus", metavar="URL", help="Prometheus server that scrapes the daemons; also used to find them"
    )
    parser.add_argument("--prometheus-token-file", type=Path, metavar="FILE", help="file with a token for Prometheus")
    parser.add_argument("--prometheus-ca-file", metavar="FILE", help="CA bundle for Prometheus (default: system CAs)")
    parser.add_argument("--job", metavar="NAME", help="only daemons in this Prometheus job (default: all jobs)")


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


async def selected(arguments: argparse.Namespace) -> tuple[Client, list[Machine]]:
    """Return the client and the machines that the options select. Raises DiscoveryError, ConfigError."""
    client = make_client(arguments)
    return client, chosen(arguments, (await listed(arguments, client, make_prometheus(arguments))).all)


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


R = TypeVar("R")


async def read_frames(
    client: Client,
    machines: Sequence[Machine],
    convert: Callable[[Machine, CheckedFrame], R],
    parallel: int,
    done: Callable[[], None] = lambda: None,
) -> list[R | DaemonError]:
    """Return what ``convert`` makes of the frame of each machine, in their order, or why there is none."""

    async def read(machine: Machine) -> R | DaemonError:
        try:
            return convert(machine, await client.frame(machine))
        except DaemonError as error:
            return error

    return await run_each(machines, read, parallel, done)
