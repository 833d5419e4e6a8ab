"""Machines that the options of ``gpumond fleet`` select: lists of daemons in files in Prometheus' file_sd format,
Kubernetes, Slurm, and queries to Prometheus, Thanos or Mimir, which change nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlencode, urlsplit

import yaml

from gpumond.agent.transport import trusted_uids
from gpumond.cli.arguments import add_option, option_type, parse_duration
from gpumond.config.models import yaml_problem
from gpumond.facts.errors import ConfigError, DaemonError, DiscoveryError, HttpError
from gpumond.features.fleet.connection import (
    METRICS_PATH,
    Client,
    Machine,
    Machines,
    parse_machine,
    read_credentials,
    read_token,
    request_json,
    run_each,
)
from gpumond.host.files import read_text, unreadable_text
from gpumond.host.http import HttpRequest, is_verified_server, may_receive_token, split_address, tls_context
from gpumond.view.text import printable

R = TypeVar("R")

Point = tuple[float, float]
"""Unix time and value."""


class SeriesSample(NamedTuple):
    """Labels of a series, the Unix time at which the query was evaluated, and the value."""

    labels: Mapping[str, str]
    at: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prometheus:
    """``token`` is sent over TLS or to a loopback address only. It is not a token of the daemons."""

    url: str
    ssl_context: ssl.SSLContext
    token: str | None = field(default=None, repr=False)
    timeout_seconds: float = 30.0

    async def is_verified(self) -> bool:
        """Return whether the server is verified, by TLS or by the kernel."""
        return await asyncio.to_thread(is_verified_server, self.url, self.timeout_seconds, trusted_uids())

    async def targets(self) -> Sequence[Mapping[str, Any]]:
        """Return the active targets. Raises DiscoveryError."""
        data = await self._call("GET", "/api/v1/targets?state=active", None)
        active = data.get("activeTargets") if isinstance(data, Mapping) else None
        if not isinstance(active, list) or not all(isinstance(target, Mapping) for target in active):
            raise DiscoveryError(f"{self.url} doesn't list its targets (Thanos and Mimir don't either); use --targets")
        return active

    async def query(self, expression: str, at: float | None = None) -> Sequence[SeriesSample]:
        """Return the instant vector of an expression, now or at a Unix time.

        Raises DiscoveryError, and ConfigError for an expression that is not valid.
        """
        parameters = {"query": expression} | ({} if at is None else {"time": f"{at:.3f}"})
        data = await self._call("POST", "/api/v1/query", urlencode(parameters).encode())
        if not isinstance(data, Mapping) or data.get("resultType") != "vector":
            raise ConfigError(f"the result of {expression!r:.200} isn't an instant vector; query one value per process")
        try:
            return [_sample(series) for series in data["result"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DiscoveryError(f"{self.url}: the result isn't in Prometheus' format") from None

    async def _call(self, method: str, path: str, form: bytes | None) -> Any:
        headers = {"Content-Type": "application/x-www-form-urlencoded"} if form is not None else {}
        if self.token and not may_receive_token(self.url):
            raise DiscoveryError(f"{self.url}: the token isn't sent without TLS")
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            url = self.url.rstrip("/") + path
            answer: Any = await request_json(
                url, HttpRequest(method, "", headers, form), self.ssl_context, self.timeout_seconds
            )
        except DaemonError as error:
            kind = ConfigError if error.status in (400, 422) else DiscoveryError  # the expression is not valid
            remedy = "" if error.status else "; pass the address of a Prometheus server that scrapes your daemons"
            raise kind(f"{self.url}: {error}{remedy}") from None
        return answer.get("data") if isinstance(answer, Mapping) else None


async def query_all(queries: Iterable[Awaitable[R]]) -> list[R]:
    """Return the answers of queries that run at the same time. Waits for all, then raises the first error."""
    answers = await asyncio.gather(*queries, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return cast("list[R]", answers)


def _sample(series: Mapping[str, Any]) -> SeriesSample:
    at, value = series["value"]
    return SeriesSample({str(name): str(text) for name, text in series["metric"].items()}, float(at), float(value))


SNAPSHOT_TIME_METRIC = "gpumond_snapshot_timestamp_seconds"
"""Metric with the time of the snapshot that was scraped last, by the clock of the machine."""
LOOKBACK_SECONDS = 300.0
"""Prometheus' default lookback: the longest age of a sample in an instant vector, and of a recorded sample."""

_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`[^`]*`|#[^\n]*', re.DOTALL)
_RANGE_OR_OFFSET = re.compile(r"\[([^\]]*)\]|\boffset\s+(-?\s*[\w.]+|\()", re.IGNORECASE)
_DURATION = re.compile(r"(?:\d+(?:ms|[smhdwy]))+")
_DURATION_PART = re.compile(r"(\d+)(ms|[smhdwy])")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_RECORDED_SERIES = re.compile(r'\bALERTS\b|\b__name__\b|\w:\w|[{,]\s*""\s*[,}]')
"""Names of recorded series and alerts, and selectors whose metric is a string."""


@dataclass(frozen=True, slots=True)
class QueriedProcess:
    """A process as a query names it: it ran at the Unix time ``ran_at``, by the clock of its machine.

    ``uuids`` and ``workloads`` are those of its series; empty without such a label.
    """

    pid: int
    ran_at: float
    uuids: frozenset[str] = frozenset()
    workloads: frozenset[str] = frozenset()


def lookback_seconds(expression: str) -> float:
    """Return an upper bound of the time before the last scrape from which a query reads data: the sum of its ranges,
    resolutions and offsets, and the lookback if it reads recorded series or alerts.

    Raises ConfigError for the modifier ``@`` and for durations of another form.
    """
    code = _STRING_OR_COMMENT.sub('""', expression)
    if "@" in code:
        raise ConfigError(
            "the query uses the @ modifier, so its data may come from processes that have ended; remove the modifier"
        )
    total = 0.0
    for match in _RANGE_OR_OFFSET.finditer(code):
        for text in (match[1] if match[1] is not None else match[2]).split(":"):
            total += _duration_seconds(text.strip())
    names = re.sub(r"\[[^\]]*\]", "", code)
    return total + (LOOKBACK_SECONDS if _RECORDED_SERIES.search(names) else 0.0)


Instance = tuple[str, str]
"""Labels ``cluster``, empty without one, and ``instance``."""


def processes_by_instance(
    samples: Iterable[SeriesSample], snapshot_times: Sequence[SeriesSample], age_seconds: float
) -> Mapping[Instance, Mapping[int, QueriedProcess]]:
    """Return the processes that the series of a result name, by cluster and instance, and by pid.

    ``snapshot_times``: the result of the query SNAPSHOT_TIME_METRIC at the same time. Raises ConfigError for a series
    without the labels instance and pid.
    """
    scraped_at: dict[Instance, float] = {}
    for sample in snapshot_times:
        name = sample.labels.get("instance", "")
        for key in {(sample.labels.get("cluster", ""), name), ("", name)}:
            scraped_at[key] = min(sample.value, scraped_at.get(key, sample.value))
    processes: dict[Instance, dict[int, QueriedProcess]] = {}
    for sample in samples:
        instance, pid = sample.labels.get("instance"), sample.labels.get("pid")
        if not instance or not pid:
            raise ConfigError(
                "a series in the result lacks the labels instance and pid; keep them, for example with by "
                "(instance, pid)"
            )
        if not pid.isdecimal():
            continue  # "other": the sum of several processes
        key = sample.labels.get("cluster", ""), instance
        snapshot_at = scraped_at.get(key, sample.at - LOOKBACK_SECONDS)
        instance_processes = processes.setdefault(key, {})
        process = instance_processes.get(int(pid), QueriedProcess(int(pid), snapshot_at - age_seconds))
        instance_processes[int(pid)] = QueriedProcess(
            process.pid,
            process.ran_at,
            process.uuids | _label_values(sample, "uuid"),
            process.workloads | _label_values(sample, "workload"),
        )
    return processes


def _label_values(sample: SeriesSample, name: str) -> frozenset[str]:
    text = sample.labels.get(name)
    return frozenset((text,)) if text else frozenset()


def _duration_seconds(text: str) -> float:
    if not text:
        return 0.0  # the default resolution of a subquery, which reads no earlier data
    if text.isdecimal():
        return float(text)
    if not _DURATION.fullmatch(text):
        raise ConfigError(f"{text!r:.40} in the query isn't a duration such as 5m or 1h30m")
    return sum(int(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


COMMAND_TIMEOUT_SECONDS = 60.0
DEFAULT_SERVICE = "gpumond/gpumond"
"""Namespace and name of the service in ``deploy/kubernetes``."""
PORT_NAME = "metrics"
DAEMONS_QUERY = 'up{job=~".*gpumond.*"} or gpumond_build_info or gpumond:up'
"""The daemons in Prometheus, whatever the name of their job, as ``deploy/prometheus/gpumond.rules.yaml`` finds them."""


async def list_machines(arguments: argparse.Namespace, prometheus: Prometheus | None) -> Machines:
    """Return all machines that the options list; Prometheus lists them without another source.

    Raises DiscoveryError, and ConfigError without a source.
    """
    scheme, kubernetes = arguments.scheme, arguments.kubernetes
    if arguments.targets is not None:
        return Machines(machines_from_file(arguments.targets, scheme))
    if kubernetes is not None:
        namespace, slash, service = kubernetes.partition("/")
        if not (namespace and slash and service) or "/" in service:
            raise ConfigError(f"--kubernetes {kubernetes!r:.80}: expected NAMESPACE/SERVICE")
        selector = f"--selector=kubernetes.io/service-name={service}"
        command = ("kubectl", "get", "endpointslices", f"--namespace={namespace}", selector, "--output=json")
        return Machines(machines_from_endpoint_slices(_parse_json(_command_output(command), command[0]), scheme))
    if arguments.slurm:
        return Machines(machines_from_slurm_nodes(_command_output(("sinfo", "-h", "-N", "-o", "%N")), scheme))
    if prometheus is not None:
        query = DAEMONS_QUERY if arguments.job is None else f"up{{job={json.dumps(arguments.job)}}}"
        daemons = await prometheus.query(f"group by (job, instance) ({query})")
        machines = machines_from_prometheus(await prometheus.targets(), [each.labels for each in daemons])
        is_verified = await prometheus.is_verified()
        return Machines(replace(each, from_verified_list=is_verified) for each in machines)
    sources = "--targets, --prometheus, --kubernetes or --slurm"
    raise ConfigError(f"pass a list of machines: {sources}, as in `gpumond fleet status --targets gpus.json`")


def machines_from_file(path: Path, scheme: str) -> Iterator[Machine]:
    """Yield the machines of a file in the format of file_sd. Raises ConfigError."""
    try:
        yield from machines_from_groups(_read_document(path), scheme, str(path))
    except DiscoveryError as error:
        raise ConfigError(str(error)) from None


def machines_from_groups(groups: Any, scheme: str, source: str) -> Iterator[Machine]:
    """Yield the machines of a list in the format of file_sd."""
    for group in _check_list(groups, source):
        if not isinstance(group, Mapping) or not isinstance(group.get("targets"), list):
            raise DiscoveryError(f'{source}: expected a list of {{"targets": [ADDRESS], "labels": {{NAME: TEXT}}}}')
        labels = group.get("labels") or {}
        if not isinstance(labels, Mapping):
            raise DiscoveryError(f"{source}: expected names and strings under labels")
        for address in group["targets"]:
            yield parse_machine(str(address), {str(name): str(text) for name, text in labels.items()}, scheme=scheme)


def machines_from_prometheus(
    targets: Sequence[Mapping[str, Any]], daemons: Sequence[Mapping[str, str]]
) -> Iterator[Machine]:
    """Yield the daemons among the targets of Prometheus, by the addresses that it scrapes.

    ``daemons``: their labels ``job`` and ``instance``.
    """
    daemon_keys = {(each.get("job"), each.get("instance")) for each in daemons}
    for target in targets:
        labels, scrape_url = target.get("labels"), target.get("scrapeUrl")
        if not isinstance(labels, Mapping) or not isinstance(scrape_url, str):
            continue
        if (labels.get("job"), labels.get("instance")) not in daemon_keys:
            continue
        url = urlsplit(scrape_url)
        texts = {str(name): str(text) for name, text in labels.items()}
        path = {"__scheme__": url.scheme, "__metrics_path__": url.path or METRICS_PATH}
        yield parse_machine(url.netloc, texts | path, port=None)


def machines_from_endpoint_slices(answer: Any, scheme: str) -> Iterator[Machine]:
    """Yield the machines of Kubernetes' EndpointSlices, named as their nodes. Those that are not ready are included."""
    items = answer.get("items") if isinstance(answer, Mapping) else None
    for item in _check_list(items, "kubectl"):
        ports = {each.get("name"): each.get("port") for each in item.get("ports") or ()}
        port = ports.get(PORT_NAME) or next(iter(ports.values()), None)
        for endpoint in item.get("endpoints") or ():
            addresses, pod = endpoint.get("addresses"), endpoint.get("targetRef") or {}
            if not addresses:
                continue
            host = f"[{addresses[0]}]" if item.get("addressType") == "IPv6" else addresses[0]
            labels = {"instance": endpoint.get("nodeName"), "namespace": pod.get("namespace"), "pod": pod.get("name")}
            present_labels = {name: text for name, text in labels.items() if text}
            yield parse_machine(f"{host}:{port}" if port else host, present_labels, scheme=scheme)


def machines_from_slurm_nodes(text: str, scheme: str) -> Iterator[Machine]:
    """Yield a machine for each node that `sinfo` lists, once."""
    for node in dict.fromkeys(text.split()):
        yield parse_machine(node, {}, scheme=scheme)


def file_sd_groups(machines: Iterable[Machine]) -> list[dict[str, Any]]:
    """Return the machines in the format of file_sd, from which `machines_from_groups` returns them."""
    groups = []
    for each in machines:
        labels = {**dict(each.labels), "instance": each.name, "__scheme__": each.scheme}
        if each.prefix:
            labels["__metrics_path__"] = each.prefix + METRICS_PATH
        groups.append({"targets": [each.address], "labels": labels})
    return groups


def _check_list(value: Any, source: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise DiscoveryError(f"{source}: expected a list, as in: - targets: [node1:9917]")
    return value


def _parse_json(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise DiscoveryError(f"{source}: not JSON") from None


FILE_FORMAT = "a file that lists your daemons, as in: - targets: [node1:9917]"


def _read_document(path: Path) -> Any:
    """Return the value in a YAML file or, by its name, in a JSON file, which is read faster. Raises ConfigError."""
    try:
        text = read_text(path)
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(unreadable_text(path, error, FILE_FORMAT)) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: invalid JSON") from None
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        line, problem = yaml_problem(error)
        raise ConfigError(f"{path}{'' if line is None else f', line {line}'}: {problem}") from None


def _command_output(command: Sequence[str]) -> str:
    """Return the output of a command of the user's environment. Raises DiscoveryError."""
    try:
        completed = subprocess.run(
            command, capture_output=True, timeout=COMMAND_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        missing = f"not found in $PATH; run gpumond on a machine that has {command[0]}"
        reason = missing if isinstance(error, FileNotFoundError) else error.strerror or os.strerror(error.errno or 0)
        raise DiscoveryError(f"{command[0]}: {reason}") from None
    except subprocess.TimeoutExpired:
        raise DiscoveryError(f"{command[0]}: no result within {COMMAND_TIMEOUT_SECONDS:g} s") from None
    if completed.returncode:
        message = " ".join(completed.stderr.decode(errors="replace").split())
        raise DiscoveryError(f"{command[0]} failed with status {completed.returncode}: {message:.300}")
    return completed.stdout.decode(errors="replace")


DEFAULT_CONCURRENCY = 64
"""Requests at a time, by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_mutually_exclusive_group()
    add_option(sources, "--targets FILE", "file that lists your daemons, in Prometheus' file_sd format", type=Path)
    add_option(
        sources,
        "--kubernetes NAMESPACE/SERVICE",
        f"use this service's endpoints, read with kubectl (if you pass no value: {DEFAULT_SERVICE})",
        nargs="?",
        const=DEFAULT_SERVICE,
    )
    add_option(sources, "--slurm", "use the nodes that sinfo lists")
    add_prometheus_arguments(parser, "; also used to find them")
    add_option(
        parser,
        "--scheme",
        "scheme for addresses without one (default: http)",
        choices=("http", "https"),
        default="http",
    )
    add_option(
        parser, "--machine PATTERN", "only machines whose name matches, such as 'gpu-*'; repeatable", action="append"
    )
    add_option(
        parser,
        "--label NAME=PATTERN",
        "only machines with a matching label in the list of daemons, such as zone=eu-*; repeatable, all must match",
        action="append",
        type=option_type(_parse_label_pattern),
    )
    add_option(
        parser,
        "--token-file FILE",
        "file with your token for the daemons (default: the token in $GPUMOND_TOKEN)",
        type=Path,
    )
    add_option(parser, "--tokens FILE", "your tokens by machine (YAML), which override --token-file", type=Path)
    add_option(parser, "--client-cert FILE", "your client certificate for the daemons", type=Path)
    add_option(parser, "--client-key FILE", "your private key for --client-cert", type=Path)
    add_option(
        parser, "--timeout DURATION", "time limit for each request (default: 5s)", type=parse_duration, default=5.0
    )
    add_option(
        parser, "--parallel N", "maximum concurrent requests (default: 64)", type=int, default=DEFAULT_CONCURRENCY
    )
    add_option(parser, "--json", "print JSON")


def _parse_label_pattern(text: str) -> tuple[str, str]:
    name, equals, pattern = text.partition("=")
    if not (name and equals):
        raise ValueError("expected NAME=PATTERN")
    return name, pattern


def add_prometheus_arguments(parser: argparse.ArgumentParser, role: str = "") -> None:
    """Add the options of the connection to Prometheus. ``role``: what else it is used for."""
    add_option(parser, "--prometheus URL", f"Prometheus server that scrapes your daemons{role}")
    add_option(parser, "--prometheus-token-file FILE", "file with your token for Prometheus", type=Path)
    add_option(parser, "--prometheus-ca-file FILE", "CA bundle for Prometheus (default: system CAs)")
    add_option(parser, "--job NAME", "only daemons in this Prometheus job (default: all jobs)")


LISTING_OPTIONS = (
    "targets",
    "kubernetes",
    "prometheus",
    "prometheus_token_file",
    "prometheus_ca_file",
    "job",
    "token_file",
    "tokens",
    "client_cert",
    "client_key",
)


def listing_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options with which another command lists the same machines with the same credentials."""
    values = ((name, getattr(arguments, name)) for name in LISTING_OPTIONS)
    options = [
        text for name, value in values if value is not None for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    slurm = ["--slurm"] if arguments.slurm else []
    return [*options, *slurm, *([] if arguments.scheme == "http" else ["--scheme", arguments.scheme])]


def make_client(arguments: argparse.Namespace) -> Client:
    """Return the client that the options describe. Raises ConfigError."""
    if arguments.parallel < 1 or not arguments.timeout > 0:
        raise ConfigError("--parallel and --timeout must be above 0")
    if arguments.client_key and not arguments.client_cert:
        raise ConfigError("--client-key requires --client-cert")
    credentials = read_credentials(
        token_file=arguments.token_file,
        tokens_file=arguments.tokens,
        certificate_file=arguments.client_cert,
        key_file=arguments.client_key,
    )
    return Client(credentials, arguments.timeout)


def make_prometheus(arguments: argparse.Namespace) -> Prometheus | None:
    """Return the Prometheus of the options, None without one. Raises ConfigError."""
    if arguments.prometheus is None:
        return None
    token = read_token(arguments.prometheus_token_file) if arguments.prometheus_token_file else None
    ssl_context = tls_context(arguments.prometheus_ca_file)
    try:
        split_address(arguments.prometheus)
    except HttpError:
        option_text = f"--prometheus {arguments.prometheus!r:.80}"
        raise ConfigError(f"{option_text}: expected an http:// or https:// address") from None
    return Prometheus(url=arguments.prometheus, ssl_context=ssl_context, token=token)


async def select_machines(arguments: argparse.Namespace) -> tuple[Client, list[Machine]]:
    """Return the client and the machines that the options select. Raises DiscoveryError, ConfigError."""
    client = make_client(arguments)
    return client, matching_machines(arguments, (await list_machines(arguments, make_prometheus(arguments))).all)


def matching_machines(arguments: argparse.Namespace, machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines whose name a pattern of --machine matches, and whose labels those of --label match.

    All match without such an option. A label that a machine does not have is empty.
    """
    patterns, labels = arguments.machine or ["*"], arguments.label or []
    return [
        each
        for each in machines
        if any(fnmatchcase(each.name, pattern) for pattern in patterns)
        and all(fnmatchcase(dict(each.labels).get(name, ""), pattern) for name, pattern in labels)
    ]


NO_RESPONSE_STATUSES = (0, 502, 503, 504)
"""Statuses after which a read is repeated."""
RETRY_TIMEOUT_SECONDS = 2.0
"""Limit of a repeated read: this host is no longer busy then."""


async def read_each(
    machines: Sequence[Machine],
    read: Callable[[Machine], Awaitable[R]],
    concurrency: int,
) -> list[R | DaemonError]:
    """Return what ``read`` returns for each machine, in their order, or its DaemonError.

    A machine that does not answer is read again once, after all others: this host may have been too busy.
    """

    async def attempt(machine: Machine) -> R | DaemonError:
        try:
            return await read(machine)
        except DaemonError as error:
            return error

    answers = await run_each(machines, attempt, concurrency)
    unanswered = [
        index
        for index, answer in enumerate(answers)
        if isinstance(answer, DaemonError) and answer.status in NO_RESPONSE_STATUSES
    ]

    async def read_again(index: int) -> None:
        with suppress(asyncio.TimeoutError):  # the first error remains
            answers[index] = await asyncio.wait_for(attempt(machines[index]), RETRY_TIMEOUT_SECONDS)

    await run_each(unanswered, read_again, concurrency)
    return answers


class UnreadMachine(NamedTuple):
    """A machine that was not read, with the reason. Its processes are unknown."""

    machine: str
    url: str | None
    problem: str

    def __str__(self) -> str:
        address = f" ({self.url})" if self.url else ""
        return printable(f"unavailable: {self.machine}{address}: {self.problem}")


def unread_machines(machines: Iterable[Machine], answers: Iterable[object]) -> list[UnreadMachine]:
    """Return the machines without an answer."""
    return [
        UnreadMachine(machine.name, machine.url, str(answer))
        for machine, answer in zip(machines, answers, strict=True)
        if isinstance(answer, DaemonError)
    ]


async def read_frames(
    client: Client,
    machines: Sequence[Machine],
    convert: Callable[[Machine, Any], R],
    concurrency: int,
) -> list[R | DaemonError]:
    """Return what ``convert`` makes of the frame of each machine, which it checks, as `read_each` does."""

    async def read(machine: Machine) -> R:
        return await client.frame(machine, partial(convert, machine))

    return await read_each(machines, read, concurrency)
