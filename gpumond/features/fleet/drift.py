"""``gpumond fleet status --drift``: the machines whose version, configuration or rules differ from those of most
machines, and those that could not load their configuration.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from gpumond.cli.arguments import DONE, FAILED, NOTHING_TO_DO
from gpumond.facts.errors import DaemonError
from gpumond.facts.frame import StatedFault
from gpumond.facts.units import counted
from gpumond.features.fleet.connection import Client, Machine
from gpumond.features.fleet.discovery import progress, read_each
from gpumond.view.frame import checked_as
from gpumond.view.text import safe, table

STATUS = "/api/v1/status"
NOT_LOADED = "not_loaded"
"""Kind of the fault of a configuration that could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Status:
    """What is read of a daemon's status; None: an earlier version did not state it."""

    version: str
    revision: str | None
    config_hash: str | None
    rules_hash: str | None
    faults: tuple[StatedFault, ...]


@dataclass(frozen=True, slots=True)
class Build:
    """What a daemon runs: its version with the commit, the hashes of its settings and rules, and where its
    configuration file is invalid, if it could not be loaded. None: unknown.
    """

    version: str
    config: str | None
    rules: str | None
    not_loaded: str = ""


ASPECTS = {"version": "VERSION", "config": "CONFIGURATION", "rules": "RULES"}
"""Attributes of `Build` that are compared, each with its column."""


def version_of(version: str, revision: object) -> str:
    """Return the version with the beginning of the commit, if the daemon knows it."""
    if not isinstance(revision, str) or not revision:
        return version
    commit, *modified = revision.split("-", 1)
    return f"{version}+{'-'.join([commit[:9], *modified])}"


def build_of(answer: object) -> Build:
    """Return what a daemon runs, from its status. Raises DaemonError."""
    status = checked_as(_Status, answer, "status")
    failed = (each["detail"] or "unknown place" for each in status["faults"] if each["kind"] == NOT_LOADED)
    return Build(
        version=version_of(status["version"], status["revision"]),
        config=status["config_hash"],
        rules=status["rules_hash"],
        not_loaded=next(failed, ""),
    )


async def read_builds(
    client: Client, machines: Sequence[Machine], parallel: int, done: Callable[[], None] = lambda: None
) -> list[Build | DaemonError]:
    """Return what each machine's daemon runs, or why it is unknown."""

    async def read(machine: Machine) -> Build:
        return build_of(await client.get(machine, STATUS))

    return await read_each(machines, read, parallel, done)


def usual(builds: Iterable[Build]) -> Mapping[str, str | None]:
    """Return the most frequent value of each aspect; None without a known one."""
    known = [*builds]
    found: dict[str, str | None] = {}
    for name in ASPECTS:
        counts = Counter(value for value in (getattr(each, name) for each in known) if value is not None)
        found[name] = counts.most_common(1)[0][0] if counts else None
    return found


def differences(build: Build, most: Mapping[str, str | None]) -> list[str]:
    """Return the aspects in which a daemon differs from most."""
    return [name for name in ASPECTS if getattr(build, name) != most[name]]


async def show(client: Client, machines: Sequence[Machine], parallel: int, as_json: bool) -> int:
    """Print the machines that differ. Return FAILED if one does, or does not answer."""
    with progress(len(machines), "machines read") as done:
        answers = await read_builds(client, machines, parallel, done)
    read = [*zip(machines, answers, strict=True)]
    builds = {machine: each for machine, each in read if isinstance(each, Build)}
    silent = {machine: str(each) for machine, each in read if isinstance(each, DaemonError)}
    most = usual(builds.values())
    differing = {machine: own for machine, own in builds.items() if own.not_loaded or differences(own, most)}
    if as_json:
        document = {
            "most": most,
            "differing": [
                {"machine": machine.name, **asdict(own), "differences": differences(own, most)}
                for machine, own in differing.items()
            ],
            "missing": [{"machine": each.name, "url": each.url, "problem": why} for each, why in silent.items()],
        }
        print(json.dumps(document, indent=2))
    else:
        print("\n\n".join(filter(None, _texts(builds, differing, silent, most))))
    if not machines:
        return NOTHING_TO_DO
    return FAILED if silent or differing else DONE


def _texts(
    builds: Mapping[Machine, Build],
    differing: Mapping[Machine, Build],
    silent: Mapping[Machine, str],
    most: Mapping[str, str | None],
) -> Iterator[str]:
    header = ("MACHINE", *ASPECTS.values(), "FAILED RELOAD")
    rows = [("most machines", *(most[name] or "unknown" for name in ASPECTS), "")]
    for machine, own in differing.items():
        values = ((getattr(own, name) or "unknown") if name in differences(own, most) else "same" for name in ASPECTS)
        rows.append((machine.name, *values, own.not_loaded))
    yield table(header, rows) if builds else ""
    yield "\n".join(safe(f"unavailable: {each.name} ({each.url}): {why}") for each, why in silent.items())
    yield (
        f"{len(differing)} of {counted(len(builds), 'reachable machine')} differ"
        if differing
        else (f"{counted(len(builds), 'machine')} with the same version, configuration and rules" if builds else "")
    )
