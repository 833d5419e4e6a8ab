"""``gpumond demo``: the daemon on a simulated device that real agent processes use, with captions of what happens."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpumond.cli import client
from gpumond.cli.arguments import add_option, option_type
from gpumond.commands.serve import add_common_arguments, option_values, serve
from gpumond.config.settings import Settings
from gpumond.devices.process.procfs import user_name
from gpumond.facts.errors import GpumondError
from gpumond.facts.units import GIB, MIB, caller_text, duration_text, plural, size_text
from gpumond.host.python_commands import code_command, module_command
from gpumond.sim.device import DeviceSpec, SimDevice, create

TRAINING_WORKLOAD, IDLE_WORKLOAD = "train-llm", "embeddings"
PROGRAMS = (
    {TRAINING_WORKLOAD: "training", "chat-api": "serving", "notebook": "leak", "etl": "fragmentation"},
    {IDLE_WORKLOAD: "idle", "finetune": "finetune"},
)
"""Workloads on the first devices, and what they do: a program of `gpumond.sim.programs`."""
FURTHER_PATTERNS = ("training", "serving")
"""What the programs of further devices do, in turn."""
MAX_DEVICES = 16
WAITING_WORKLOAD, NEEDED_GIB = "pretrain", 16
"""A workload that waits for memory of the second device, which `embeddings` holds."""


def programs_on(index: int) -> Mapping[str, str]:
    """Return the workloads on a device, and what they do."""
    pattern = FURTHER_PATTERNS[index % len(FURTHER_PATTERNS)]
    return PROGRAMS[index] if index < len(PROGRAMS) else {f"{pattern}-{index}": pattern}


def device_spec(index: int) -> DeviceSpec:
    return DeviceSpec(
        uuid=f"GPU-51300000-0000-4000-8000-{index + 1:012}",
        index=index,
        name="Simulated 24 GiB",
        size_bytes=24 * 1024 * MIB,
        reserved_bytes=512 * MIB,
        idle_celsius=35.0,
        idle_watts=60.0,
        can_suspend=True,
    )


COMMAND_WITH_PARENT = f"""
import ctypes
ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}, 0, 0, 0)  # PR_SET_PDEATHSIG
from gpumond.commands.main import main
raise SystemExit(main())
"""
"""`gpumond`, with its program, ends with its parent, however that ends: a demo that was killed leaves no request."""

QUOTAS = ({"name": "chat-api", "match": {"workload": "chat-api"}, "soft_limit": "2.7GiB", "limit": "2.9GiB"},)
SUSPENSIONS = {"allow_suspend": True, "suspend_after_idle": "3m"}
"""A waiting program suspends one that has been idle for this long, unless somebody does so before."""

CAPTION_SECONDS = 2.0
"""Interval between two looks at the daemon for captions."""

SIGN_IN_SECONDS = 600.0
"""Validity of the printed address: you read the text above it first."""

RESTART_SECONDS = 5.0
"""Interval between checks for programs that have ended."""

DIAGNOSIS_SPEED = 20.0
INTERVAL_SECONDS = 0.2
"""The demo diagnoses one minute as twenty, so that its leak is found soon. The tick interval is shorter accordingly,
so that a diagnosed minute has enough readings."""

RULES = (
    {
        "name": "flush-after-etl",
        "scope": "pool",
        "value": "reclaimable_bytes",
        "above": "1GiB",
        "for": "5s",
        "match": {"workload": "etl"},
        "labels": {"severity": "info"},
        "annotations": {"summary": "{workload} finished a round and holds {reclaimable} of cached memory"},
        "action": {"flush": {"min_reclaimable": "1GiB", "steps": ["cache"]}, "cooldown": "1m", "max_per_hour": 60},
    },
)
"""A rule with an action: it flushes the cache of the fragmented program automatically."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--sim-device DIR",
        "use the simulated GPU in DIR/card0, in real time and without the sample programs",
        type=Path,
    )
    add_option(
        parser,
        "--devices N",
        f"number of simulated GPUs, at most {MAX_DEVICES} (default: 2)",
        type=option_type(_parse_device_count),
        default=2,
    )
    otherwise = "with --config or --sim-device"
    add_common_arguments(parser, f"0.2s; 1s {otherwise}", f"error; info {otherwise}", "a temporary one")


def _parse_device_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= MAX_DEVICES):
        raise ValueError(f"must be a whole number from 1 to {MAX_DEVICES}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="gpumond-demo-") as directory:

        def reload() -> Settings:
            from gpumond.config.loading import load_settings

            options = {name: value for name, value in option_values(arguments).items() if value is not None}
            defaults = {
                "rules": RULES,
                "quotas": QUOTAS,
                "interval": INTERVAL_SECONDS,
                "log_level": "error",
            } | SUSPENSIONS
            defaults = {} if arguments.config or arguments.sim_device else defaults
            return load_settings(arguments.config, {"state_dir": directory} | defaults | options | {"source": "sim"})

        settings = reload()
        devices_directory = arguments.sim_device or Path(directory)
        count = 1 if arguments.sim_device else arguments.devices
        for index in range(count):
            if not (devices_directory / f"card{index}").exists():
                create(devices_directory / f"card{index}", device_spec(index))
        os.environ["GPUMOND_SIM_DIR"] = str(devices_directory)
        with ExitStack() as programs:

            def on_started(address: str) -> None:
                if arguments.sim_device:
                    print(
                        f"open {address}\n\nA simulated GPU without programs: {devices_directory / 'card0'}", flush=True
                    )
                    return
                os.environ["GPUMOND_RUNTIME_DIR"] = str(settings.runtime_directory())
                threading.Thread(
                    target=_print_captions, args=(address, count), name="gpumond-captions", daemon=True
                ).start()
                programs.enter_context(_running_programs(devices_directory, count, settings, address))

            return serve(settings, "sim", reload, 1.0 if arguments.sim_device else DIAGNOSIS_SPEED, on_started)


def _print_captions(address: str, count: int) -> None:
    """Print the address that signs a browser in, and then each caption when it becomes true."""
    print(_welcome_text(address, count, *_request_sign_in_address(address)), flush=True)
    printed, command = set[str](), partial(client.command_line, url=address)
    while True:
        time.sleep(CAPTION_SECONDS)
        with suppress(GpumondError):
            frame, receipts = client.get(address, "/api/v1/frame"), client.get(address, "/api/v1/receipts")
            receipts += client.get(address, "/api/v1/suspensions/receipts")
            for subject, text in captions(frame, receipts, command):
                if subject not in printed:
                    printed.add(subject)
                    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _request_sign_in_address(address: str) -> tuple[str, str]:
    """Return the address that signs a browser in, and what it does; the plain one if the daemon doesn't answer.

    It is asked for over the socket, which tells the daemon the user: receipts and the audit log name them.
    """
    try:
        answer = client.post(
            f"unix://{os.environ['GPUMOND_RUNTIME_DIR']}/api.sock",
            "/api/v1/sessions/code",
            {"valid_seconds": SIGN_IN_SECONDS},
            30.0,
        )
    except GpumondError:
        return address, ""
    valid = duration_text(answer["valid_seconds"])
    note = f"\nThis address signs you in once, within the next {valid}.\n"
    return f"{address.rstrip('/')}/#code={answer['code']}", note


@contextmanager
def _running_programs(devices_directory: Path, count: int, settings: Settings, address: str) -> Iterator[None]:
    """Run the programs while the daemon runs. They start after it: if its port is in use, their agents would connect
    to the daemon that uses it.

    A program that ends is started again.
    """
    state = os.fspath(settings.store_file().parent)  # the programs' snapshots end with the demo, too
    environ = os.environ | {"GPUMOND_SOCKET": str(settings.agent_socket()), "XDG_STATE_HOME": state}
    commands: dict[str, tuple[str, ...]] = {}
    for index in range(count):
        options = ("--device", str(devices_directory / f"card{index}"), "--parent", str(os.getpid()))
        for name, pattern in programs_on(index).items() | (
            {WAITING_WORKLOAD: WAITING_WORKLOAD}.items() if index == 1 else ()
        ):
            commands[name] = (*module_command("gpumond.sim.programs"), pattern, "--workload", name, *options)
    if count > 1:
        need_options = ("--need", f"{NEEDED_GIB}GiB", "--need-device", "1", "--wait", "1d", "--url", address)
        run = (*code_command(COMMAND_WITH_PARENT), "run", "--workload", WAITING_WORKLOAD, *need_options)
        commands[WAITING_WORKLOAD] = (*run, "--", *commands[WAITING_WORKLOAD])

    def start(name: str) -> subprocess.Popen[bytes]:
        error_output = subprocess.DEVNULL if name == WAITING_WORKLOAD else None
        return subprocess.Popen(commands[name], env=environ, stdin=subprocess.DEVNULL, stderr=error_output)

    running = {name: start(name) for name in commands if name != WAITING_WORKLOAD}
    stopping = threading.Event()

    def start_others() -> None:
        while WAITING_WORKLOAD in commands and WAITING_WORKLOAD not in running and not stopping.wait(0.2):
            free_bytes = SimDevice(devices_directory / "card1").read().current_free_bytes
            if free_bytes is not None and free_bytes < NEEDED_GIB * GIB:  # else it would get the memory of the others
                running[WAITING_WORKLOAD] = start(WAITING_WORKLOAD)
        while not stopping.wait(RESTART_SECONDS):
            for name in running:
                if running[name].poll() is not None:
                    running[name] = start(name)

    starter = threading.Thread(target=start_others, name="gpumond-demo", daemon=True)
    starter.start()
    try:
        yield
    finally:
        stopping.set()
        starter.join()
        for program in running.values():
            program.terminate()
        deadline = time.monotonic() + 1.0
        for program in running.values():
            try:
                program.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()


def _welcome_text(address: str, count: int, sign_in_address: str, note: str) -> str:
    """Return the text printed at start: the web UI's address in the first line, then commands to try."""
    command_words = ("status", "flush --all --dry-run", f"flush {TRAINING_WORKLOAD}", f"why {TRAINING_WORKLOAD}")
    names = [name for index in range(count) for name in programs_on(index)]
    waits = f".\nOne more, {WAITING_WORKLOAD}, is waiting for memory." if count > 1 else "."
    commands = "\n".join(f"  {client.command_line(each, address)}" for each in command_words)
    return f"""\
open {sign_in_address}
{note}
{plural(count, "simulated GPU")} with {plural(len(names), "program")}: {", ".join(names)}{waits} In another terminal:

{commands}

The demo evaluates memory curves {DIAGNOSIS_SPEED:.0f} times as fast as usual: the alerts about etl's fragmentation and
notebook's leak fire within three minutes. Press Ctrl-C to stop.
"""


LARGE_CACHE_BYTES = 2 * GIB
"""Cached bytes from which a program's cache is worth a caption."""


def captions(
    frame: Mapping[str, Any],
    receipts: Sequence[Mapping[str, Any]],
    command: Callable[[str], str] = "gpumond {}".format,
) -> Iterator[tuple[str, str]]:
    """Yield the subject of each caption that is true now, and its text.

    Args:
        frame: The response of `/api/v1/frame`.
        receipts: Those of `/api/v1/receipts` and `/api/v1/suspensions/receipts`.
        command: Returns the complete command line of a command.
    """
    for request in frame["queue"]:
        text = f"{request['workload'] or 'A program'} is waiting for {size_text(request['need_bytes'])} on a GPU"
        yield "queue", f"{text}. See: {command('queue')}"
    for process in frame["processes"]:
        name, cached = process["workload"], process["cached_bytes"] or 0
        if name == TRAINING_WORKLOAD and cached >= LARGE_CACHE_BYTES:
            text = f"{name} keeps {size_text(cached)} in its cache, which a flush would release"
            yield "cache", f"{text}. Try: {command(f'flush {name}')}"
        soft = (process["quota"] or {}).get("soft_limit_bytes")
        if soft and (process["used_bytes"] or 0) > soft:
            excess = (
                f"{size_text(process['used_bytes'] - soft)} more than the soft limit of its quota ({size_text(soft)})"
            )
            yield "quota", f"{name} uses {excess}. See: {command('quota')}"
    names = {process["pid"]: process["workload"] for process in frame["processes"]}
    for verdict in frame["verdicts"]:
        if verdict["kind"] in ("leak", "fragmentation") and verdict["pid"] in names:
            yield verdict["kind"], f"{verdict['summary']}. Try: {command('why ' + names[verdict['pid']])}"
        if verdict["kind"] == "idle-holder" and names.get(verdict["pid"]) == IDLE_WORKLOAD:
            yield "idle", f"{verdict['summary']}. To move its memory to the host: {command(f'suspend {IDLE_WORKLOAD}')}"
    for report in frame["snapshot"]["reports"]:
        if report["limits"] and report["program"]["oom_recovered"]:
            text = f"{report['workload']} reached its limit, aborted requests and kept running"
            yield "limit", f"{text}. See: {command('oom list')}"
    for receipt in receipts:
        name = receipt["workload"]
        if receipt["outcome"] == "suspended" and receipt["requested_for"]:
            yield "share", f"{name} was idle, and gpumond suspended it for {receipt['requested_for']}"
        if receipt["outcome"] == "resumed" and receipt["requested_by"] == "SIGCONT":
            text = (
                f"The user of {name} is back, and gpumond resumed it after {duration_text(receipt['duration_seconds'])}"
            )
            yield "back", f"{text}. See: {command('receipts')}"
        if receipt["outcome"] == "freed" and receipt["released_bytes"]:
            requester = caller_text(receipt["requested_by"], receipt["requested_for"], user_name).replace(
                "rule:", "rule "
            )
            text = f"A flush of {name}, requested by {requester}, released {size_text(receipt['released_bytes'])}"
            yield "flush", f"{text}. See: {command('receipts')}"
    for program in frame["snapshot"]["suspended_programs"]:
        if program["state"] == "suspended":
            name, need = program["workload"], size_text(sum(each["used_bytes"] for each in program["memory"]))
            text = f"{name} is suspended. To resume, it needs {need}"
            yield "suspended", f"{text}. Try: {command(f'resume {name} --wait 2m')}"
    for alert in frame["alerts"]:
        if case := dict(alert["annotations"]).get("case"):
            labels = dict(alert["labels"])
            name = labels.get("workload", "A program")
            text = f"{name} had an out-of-memory error on GPU {labels.get('gpu')}"
            yield f"oom of {name}", f"{text}. See: {command(f'oom show {case}')}"
