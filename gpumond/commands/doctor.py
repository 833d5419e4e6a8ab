"""``gpumond doctor``: check this machine, and print a remedy for each problem."""

from __future__ import annotations

import argparse
import asyncio
import glob
import grp
import logging
import os
import platform
import pwd
import resource
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata, util
from typing import Any, Literal

from gpumond import __version__
from gpumond.agent.allocators.adapters import ADAPTERS
from gpumond.agent.transport import SERVICE_DIRECTORY, service_uid, trusted_uids
from gpumond.cli import client
from gpumond.cli.arguments import DONE, FAILED
from gpumond.devices import AUTOMATIC_SOURCES, SourceSpec
from gpumond.devices.child.supervisor import probe
from gpumond.facts.errors import DaemonError, SourceUnavailable, remedy
from gpumond.facts.messages import program_socket, to_json
from gpumond.facts.units import plural, size_text
from gpumond.features.engines.ownership import PTRACE_REMEDY
from gpumond.host.machine import in_private_pid_namespace
from gpumond.host.peer import peer_uid
from gpumond.tick.reading_conditions import device_conditions
from gpumond.view.notices import USUALLY_INTENDED, stuck_processes
from gpumond.view.text import printable

MARKS = {"good": "ok  ", "note": "note", "bad": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    client.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    logging.disable()  # the findings contain what the probe would log
    findings = []
    for finding in examine(partial(client.get, arguments.url)):
        findings.append(finding)
        if not arguments.json:
            print(f"{MARKS[finding.state]}  {finding.subject}: {printable(finding.detail)}", flush=True)
            if finding.remedy:
                print(f"      -> {printable(finding.remedy)}", flush=True)
    if arguments.json:
        print(to_json(findings).decode())
    return FAILED if any(finding.state == "bad" for finding in findings) else DONE


AGENT_SOCKET = "agent socket"
State = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``remedy`` is empty if no action is required."""

    subject: str
    state: State
    detail: str
    remedy: str = ""


def examine(get: Callable[[str], Any], proc: str = "/proc", dev: str = "/dev") -> Iterator[Finding]:
    """Yield all findings. ``get`` requests a path of the daemon's API."""
    yield Finding("gpumond", "good", f"{__version__} on Python {platform.python_version()}, {sys.prefix}")
    yield from check_driver(_daemon_is_simulated(get))
    yield from check_device_nodes(dev)
    yield check_pid_namespace(proc)
    yield check_descriptors()
    daemon_findings = [*check_daemon(get)]
    if all(each.subject != AGENT_SOCKET for each in daemon_findings):
        yield check_agent_socket()
    yield from daemon_findings
    yield from check_frameworks()


def _daemon_is_simulated(get: Callable[[str], Any]) -> bool:
    try:
        return bool(get("/api/v1/status")["source"]["name"] == "sim")
    except DaemonError:
        return False


def check_driver(simulated: bool = False) -> Iterator[Finding]:
    """Check each source with devices, and the first one always. With other devices, its absence is not a fault.

    ``simulated``: the daemon reads simulated devices, which need no driver.
    """
    missing = [spec.requires for spec in AUTOMATIC_SOURCES if spec.requires and util.find_spec(spec.requires) is None]
    for module in missing:
        if util.find_spec("fastapi") is None:
            yield Finding("driver", "note", f"not checked: {module} isn't installed, which only the daemon needs")
        else:
            hint = "in a clone of gpumond's repository: pip install '.[daemon]'"
            yield Finding("driver", "bad", f"the module {module} isn't installed", hint)
    present = {spec.name for spec in AUTOMATIC_SOURCES if spec.requires not in missing and _has_devices(spec)}
    for spec in AUTOMATIC_SOURCES:
        if spec.requires not in missing and (spec.name in present or spec is AUTOMATIC_SOURCES[0]):
            is_needed = not simulated and not present - {spec.name}
            yield from _source_findings(spec.name, "bad" if is_needed else "note", simulated)


def _has_devices(spec: SourceSpec) -> bool:
    try:
        return spec.detect("/sys")
    except SourceUnavailable:
        return False


def _source_findings(name: str, state_without_driver: State, simulated: bool = False) -> Iterator[Finding]:
    state, reading = asyncio.run(probe(name))
    if reading is None:
        detail, source_remedy = _problem_and_remedy(state.reason, state.detail)
        instead = "; the daemon reads simulated GPUs" if simulated else ""
        yield Finding("driver", state_without_driver, detail + instead, "" if simulated else source_remedy)
        return
    library = f", NVML {state.library_version}" if state.library_version else ""
    detail = f"{state.driver_version}{library}, {plural(len(reading.devices), 'GPU')}"
    yield Finding("driver", "good" if reading.devices else "bad", detail)
    for device in reading.devices:
        size = "size unknown" if device.size_bytes is None else size_text(device.size_bytes)
        process_count = "no process list" if device.processes is None else plural(len(device.processes), "process")
        device_state: State = "note" if device.processes is None or device.used_bytes is None else "good"
        yield Finding(f"GPU {device.index}", device_state, f"{device.name}, {size}, {process_count}, {device.uuid}")
        for kind in device_conditions(device):
            yield Finding(f"GPU {device.index}", "note", kind, remedy(kind))
    for fault in reading.faults:
        yield Finding(
            "fault", "bad", f"{fault.device_uuid or fault.source}: {fault.kind}: {fault.detail}", remedy(fault.kind)
        )


def _problem_and_remedy(kind: str, detail: str) -> tuple[str, str]:
    """Return the problem and its remedy. The remedy is removed from details that end with it."""
    advice = remedy(kind)
    return f"{kind}: {detail.removesuffix(advice).rstrip(': ')}", advice


def check_device_nodes(dev: str) -> Iterator[Finding]:
    nodes = sorted(glob.glob(f"{dev}/nvidia*"))
    inaccessible = [node for node in nodes if os.path.exists(node) and not os.path.isdir(node) and not _can_open(node)]
    if inaccessible:
        status = os.stat(inaccessible[0])
        group, mode = _account_name(grp.getgrgid, status.st_gid), stat.S_IMODE(status.st_mode)
        is_member = status.st_gid in (os.getegid(), *os.getgroups())
        advice = access_remedy(mode, group, is_member, _account_name(pwd.getpwuid, os.geteuid()))
        yield Finding(
            "device nodes", "bad", f"not accessible: {', '.join(inaccessible)} (group {group}, {mode:04o})", advice
        )
    elif nodes:
        yield Finding("device nodes", "good", f"{len(nodes)} in {dev}, all accessible")


def access_remedy(mode: int, group: str, is_member: bool, user: str) -> str:
    """Return how a user gains access to device nodes of this mode and group."""
    if mode & 0o006 == 0o006 or (mode & 0o060 == 0o060 and is_member):
        return (
            "the files' mode allows access, so the container's or the unit's device rules must be denying it: recreate "
            "the container (`systemctl daemon-reload` removes its rules, except with CDI), or restart the unit"
        )
    if mode & 0o060 == 0o060 and group not in ("root", "0"):
        return f"usermod -aG {group} {user}, then log in again or restart the service"
    return (
        "set the nvidia module's option NVreg_DeviceFileMode=0666 in /etc/modprobe.d, and reload the module; "
        "or run this command as root"
    )


def _account_name(look_up: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or group, or its number if it has no name here."""
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def check_pid_namespace(proc: str) -> Finding:
    is_private = in_private_pid_namespace(proc)
    if is_private is None:
        return Finding("PID namespace", "note", f"unknown: {proc}/self/ns/pid can't be read")
    if not is_private:
        return Finding("PID namespace", "good", "shared with the host, so the driver's pids match the agents'")
    return Finding(
        "PID namespace",
        "note",
        "private: the driver may list host pids that can't be matched to processes here",
        remedy("private_pid_namespace"),
    )


def check_descriptors() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < 1024:
        return Finding("open files", "bad", f"limit {limit}", "raise it: ulimit -n 8192, or LimitNOFILE=8192")
    return Finding("open files", "good", f"limit {limit}")


def check_agent_socket(environ: Mapping[str, str] = os.environ, service: str = SERVICE_DIRECTORY) -> Finding:
    path = program_socket(environ)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except PermissionError:
            advice = "allow this user access with socket_mode in the configuration"
            return Finding(AGENT_SOCKET, "note", f"this user has no access to {path}", advice)
        except OSError:
            return Finding(
                AGENT_SOCKET, "note", f"no daemon is listening at {path}", "start the daemon: `gpumond serve`"
            )
        uid = peer_uid(probe)
    if uid not in trusted_uids(service):
        detail = f"{path}: this user's agents don't trust uid {uid}; {_service_owner_text(service)}"
        return Finding(AGENT_SOCKET, "bad", detail, f"as root: install -d -o {uid} -m 755 {service}")
    return Finding(AGENT_SOCKET, "good", f"{path} responds")


def _service_owner_text(service: str) -> str:
    """Describe the user who owns the service directory, whose daemon the agents of all users trust."""
    try:
        return f"{service} belongs to uid {service_uid(service)}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def check_daemon(get: Callable[[str], Any]) -> Iterator[Finding]:
    try:
        status, agents, processes, engines = (
            get(f"/api/v1/{route}") for route in ("status", "agents", "processes", "engines")
        )
    except DaemonError as error:
        yield Finding("daemon", "note", str(error))
        return
    source = status["source"]
    state: State = "good" if source["up"] else "bad"
    detail, advice = ("up", "") if source["up"] else _problem_and_remedy(source["reason"], source["detail"])
    yield Finding("daemon", state, f"version {status['version']}, source {source['name']}: {detail}", advice)
    yield from check_other_socket(status.get("agent_socket"))
    for fault in status["faults"]:
        if (fault["source"], fault["kind"]) != (source["name"], source["reason"]):
            subject = fault["device_uuid"] or fault["source"]
            yield Finding("fault", "bad", f"{subject}: {fault['kind']}: {fault['detail']}", fault["remedy"])
    for condition in status["conditions"]:
        subject = condition["device_uuid"] or "this machine"
        detail = f": {condition['detail']}" if condition.get("detail") else ""
        yield Finding("condition", "note", f"{subject}: {condition['kind']}{detail}", condition["remedy"])
    connected = ", ".join(f"{agent['workload'] or 'unnamed'} ({agent['pid']})" for agent in agents)
    hint = "" if agents else "start a program with the agent: gpumond run -- YOUR_PYTHON YOUR_PROGRAM.py"
    yield Finding("agents", "good" if agents else "note", connected or "none connected", hint)
    for engine in engines:
        yield _engine_finding(engine)
    for entry in stuck_processes(processes):
        yield Finding("process", "note" if entry.kind in USUALLY_INTENDED else "bad", entry.sentence, entry.remedy)


def check_other_socket(path: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Yield a finding if the daemon's agent socket is on this machine, but not where this user's programs look.

    ``path``: as the daemon states it; None from an older one.
    """
    own_path = program_socket(environ)
    if path is None or path == own_path or not os.path.exists(path):
        return
    if os.path.exists(own_path) and os.path.samefile(own_path, path):
        return
    detail = f"this daemon's agent socket is {path}, but your programs connect to {own_path}"
    yield Finding(AGENT_SOCKET, "bad", detail, f"set GPUMOND_SOCKET={path} for your programs")


def _engine_finding(engine: Mapping[str, Any]) -> Finding:
    subject = f"engine {engine['name']}"
    if engine["problem"]:
        return Finding(subject, "note", engine["problem"])
    if problem := engine.get("processes_problem"):
        advice = PTRACE_REMEDY if problem.endswith(PTRACE_REMEDY) else ""
        detail = f"the engine responds, but its memory is unknown and can't be released: {problem.removesuffix(advice)}"
        return Finding(subject, "note", detail.rstrip(": "), advice)
    if engine.get("out_of_service_seconds") is not None:
        return Finding(
            subject, "bad", f"the engine isn't back in service after a release: {engine['out_of_service_reason']}"
        )
    if (uid := engine.get("pinned_uid")) is not None:
        detail = (
            f"{engine['kind']} responds; gpumond sends the engine's secret to uid {uid}, the first that listened there"
        )
        return Finding(subject, "note", detail, "set user: to the server's user")
    return Finding(subject, "good", f"{engine['kind']} responds")


def check_frameworks() -> Iterator[Finding]:
    is_any_installed = False
    for spec in ADAPTERS:
        for package in spec.packages:
            if version := _package_version(package):
                is_any_installed = True
                yield Finding(spec.library, "good", f"{package} {version} is installed; the agent supports it")
    if not is_any_installed:
        yield Finding(
            "frameworks",
            "note",
            "none in this Python environment; run gpumond doctor in your programs' environment",
        )


def _package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _can_open(node: str) -> bool:
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass  # a node without a device is not a matter of permissions
    return True
