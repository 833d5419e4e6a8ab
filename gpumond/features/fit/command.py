"""``gpumond fit``: the memory that a PyTorch program needs, from one step under fake tensors."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import gpumond
from gpumond.cli import client
from gpumond.cli.arguments import DONE, FAILED, add_option, print_error
from gpumond.cli.progress import QUIET_SECONDS, Progress
from gpumond.devices import detect_sources
from gpumond.devices.child.supervisor import probe
from gpumond.facts.errors import ConfigError, DaemonError, GpumondError, SourceUnavailable
from gpumond.facts.frame import find_device_uuid
from gpumond.facts.messages import to_json
from gpumond.facts.program import CLASS_NAMES
from gpumond.facts.snapshot import DeviceReading
from gpumond.facts.units import GIB, MIB, size_text
from gpumond.features.fit.tracer import ALLOCATE, STEP
from gpumond.sim.allocator import CachingAllocator
from gpumond.sim.device import DeviceSpec, OutOfMemory, create
from gpumond.view.text import table

MARGIN_FACTOR = 1.05
"""Factor for what the simulation leaves out, such as the workspaces of cuDNN."""
MAX_RUN_SECONDS = 600.0
ASSUMED_BYTES = 80 * GIB
"""Size of the device that the program sees if neither a daemon nor the driver states one."""
ASSUMED_DEVICE = f"a GPU of {size_text(ASSUMED_BYTES)}, because neither the daemon nor the driver reports one"
BATCH_PLACEHOLDER = "{batch}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--batch LOW..HIGH",
        f"find the largest batch that fits; write {BATCH_PLACEHOLDER} in the command where the batch size goes",
    )
    add_option(parser, "--device GPU", "with --batch: which GPU (default: the largest)")
    client.add_arguments(parser)
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- python SCRIPT...",
        help="your PyTorch program, with its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command or "python" not in os.path.basename(command[0]):
        raise ConfigError(
            "expected a Python program, as in `gpumond fit -- python train.py`; instead of torchrun or accelerate "
            "launch, pass the script that they start"
        )
    _, program = split_interpreter(command)
    if not program or program[0] == "-c":
        raise ConfigError("expected a script or -m MODULE after the interpreter, as in python train.py")
    if program[0] != "-m" and not os.path.exists(program[0]):
        raise ConfigError(f"the script {program[0]} doesn't exist")
    devices, context_bytes = _devices_and_context(arguments.url)
    if arguments.batch is not None:
        return _largest_batch(arguments, command, devices, context_bytes)
    size_bytes, assumed = _largest_size(devices)
    trace = dict(trace_program(command, size_bytes))
    if trace["reason"]:
        print_error(f"gpumond: no estimate: {trace['reason']}")
        return FAILED
    trace["assumptions"] = [*assumed, *trace["assumptions"]]
    need = replay(trace)
    fits = list(_device_fits(devices, need, context_bytes))
    if arguments.json:
        trace_json = {"steps": trace["steps"], "assumptions": trace["assumptions"]}
        print(json.dumps({**asdict(need), "context_bytes": context_bytes, "trace": trace_json, "devices": fits}))
    else:
        print(_estimate_text(need, trace, context_bytes, fits))
    return DONE


def split_interpreter(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the interpreter with its own options, and the program with its arguments."""
    interpreter, program = [command[0]], [*command[1:]]
    while program and program[0].startswith("-") and program[0] not in ("-m", "-c"):
        interpreter.append(program.pop(0))
        if interpreter[-1] in ("-X", "-W") and program:
            interpreter.append(program.pop(0))
    return interpreter, program


def trace_program(command: Sequence[str], size_bytes: int) -> Mapping[str, Any]:
    """Return the trace of a program; its ``reason`` states why there is none. Its output goes to standard error."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "trace"
        paths = [os.path.dirname(os.path.dirname(os.path.abspath(gpumond.__file__))), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCHDYNAMO_DISABLE": "1",
            "GPUMOND_AGENT": "",
        }
        interpreter, program = split_interpreter(command)
        tracer = [*interpreter, "-m", "gpumond.features.fit.tracer", os.fspath(out), str(size_bytes), *program]
        try:
            status = _run_with_progress(tracer, environ)
        except subprocess.TimeoutExpired:
            return {"reason": f"the program's optimizer didn't complete two steps in {MAX_RUN_SECONDS:.0f} s"}
        except OSError as error:
            return {"reason": f"{command[0]}: {error.strerror}"}
        if not out.exists():
            return {"reason": f"the program exited with status {status} before its trace was complete"}
        trace: Mapping[str, Any] = json.loads(out.read_text())
        return trace


def _run_with_progress(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command, and show for how long. Raises OSError, or TimeoutExpired after ``MAX_RUN_SECONDS``."""
    start, progress = time.monotonic(), Progress()
    with subprocess.Popen(command, env=environ, stdout=sys.stderr, stdin=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    return process.wait(QUIET_SECONDS)
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - start
                    if elapsed > MAX_RUN_SECONDS:
                        raise
                    progress.show(f"waiting for the program's optimizer to complete two steps ({elapsed:.0f} s so far)")
        finally:
            progress.end()
            process.kill()


def needed_bytes(need: Need, context_bytes: int | None) -> int:
    """Return the bytes that a device must have free: held bytes with a margin, and the context."""
    return int(need.held_bytes * MARGIN_FACTOR) + (context_bytes or 0)


def _devices_and_context(url: str) -> tuple[list[Mapping[str, Any]], int | None]:
    """Return the devices, each with its reclaimable bytes, and the context of a program there.

    Without a daemon, the driver is read once, and neither reclaimable bytes nor the context are known.
    """
    try:
        snapshot = client.get(url, "/api/v1/snapshot")
    except DaemonError:
        return [{**each, "reclaimable_bytes": 0} for each in json.loads(to_json(_read_driver()))], None
    reclaimable: dict[str, int] = {}
    for report in snapshot["reports"]:
        for pool in report["pools"] if report["flush_policy"] != "never" else ():
            uuid = pool["device_uuid"]
            reclaimable[uuid] = reclaimable.get(uuid, 0) + pool["reclaimable"]["likely"]
    contexts = [size for each in snapshot["overheads"] for name, size in each["parts"] if name == "context"]
    devices: list[Mapping[str, Any]] = [
        {**each, "reclaimable_bytes": reclaimable.get(each["uuid"], 0)} for each in snapshot["devices"]
    ]
    return devices, int(median(contexts)) if contexts else None


def _read_driver() -> Sequence[DeviceReading]:
    logging.disable()  # what the probe would log isn't part of the estimate
    with suppress(SourceUnavailable, ImportError):
        readings = [asyncio.run(probe(source.name))[1] for source in detect_sources()]
        return [device for reading in readings if reading for device in reading.devices]
    return ()


def _largest_size(devices: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Return the size of the largest device, and what was assumed for it."""
    size = max((each["size_bytes"] or 0 for each in devices), default=0)
    return (size, []) if size else (ASSUMED_BYTES, [ASSUMED_DEVICE])


def _device_fits(
    devices: Sequence[Mapping[str, Any]], need: Need, context_bytes: int | None
) -> Iterator[dict[str, Any]]:
    needed = needed_bytes(need, context_bytes)
    for device in devices:
        free, size = device["free_bytes"], device["size_bytes"]
        if free is None and size is not None and device["used_bytes"] is not None:
            free = size - device["used_bytes"]
        if size is None or free is None:
            fits = "unknown"
        elif needed > size:
            fits = "never"
        elif needed <= free:
            fits = "now"
        else:
            fits = "after a flush" if needed <= free + device["reclaimable_bytes"] else "after other programs exit"
        yield {"index": device["index"], "name": device["name"], "free_bytes": free, "fits": fits}


def _estimate_text(
    need: Need, trace: Mapping[str, Any], context_bytes: int | None, fits: Sequence[Mapping[str, Any]]
) -> str:
    context_text = (
        "unknown until a program has run on this machine with gpumond run"
        if context_bytes is None
        else size_text(context_bytes)
    )
    lines = [
        f"peak: {size_text(need.live_bytes)} live, {size_text(need.held_bytes)} held, in step {need.step}; "
        f"CUDA context: {context_text}",
        f"estimate for a GPU, with a margin of {MARGIN_FACTOR - 1:.0%}: {size_text(needed_bytes(need, context_bytes))}",
    ]
    if trace["steps"]:  # only an optimizer's step shows what its classes are
        rows = [[CLASS_LABELS[name], size_text(need.classes.get(name, 0))] for name in (*CLASSES, OTHER_CLASS)]
        lines.append(table(("CLASS", ">BYTES"), rows))
    lines += [f"assumed: {each}" for each in trace["assumptions"]]
    if not trace["steps"]:
        lines.append("assumed: the program doesn't train; it ran until it exited")
    if fits:
        rows = [[str(each["index"]), each["name"], size_text(each["free_bytes"] or 0), each["fits"]] for each in fits]
        lines.append(table((">GPU", "NAME", ">FREE", "FITS"), rows))
    return "\n".join(lines)


def _largest_batch(
    arguments: argparse.Namespace,
    command: Sequence[str],
    devices: Sequence[Mapping[str, Any]],
    context_bytes: int | None,
) -> int:
    low, high = _parse_range(arguments.batch)
    if not any(BATCH_PLACEHOLDER in word for word in command):
        raise ConfigError(
            f"--batch: write {BATCH_PLACEHOLDER} in the command where the batch size goes, as in "
            f"--batch-size {BATCH_PLACEHOLDER}"
        )
    if arguments.device is not None:
        fields = ("uuid", "index", "pci_bus_id", "parent_uuid")
        readings = [DeviceReading(**{field: each[field] for field in fields}) for each in devices]
        uuid = find_device_uuid(arguments.device, readings)
        devices = [each for each in devices if each["uuid"] == uuid]
    size_bytes, assumed = _largest_size(devices)
    for each in assumed:
        print_error(f"gpumond: assumed: {each}")
    best: tuple[int, int] | None = None
    while low <= high:
        batch = (low + high + 1) // 2
        trace = trace_program([word.replace(BATCH_PLACEHOLDER, str(batch)) for word in command], size_bytes)
        if trace["reason"]:
            print_error(f"gpumond: no estimate for a batch of {batch}: {trace['reason']}")
            return FAILED
        needed = needed_bytes(replay(trace), context_bytes)
        print_error(f"gpumond: a batch of {batch} needs {size_text(needed)}")
        if needed <= size_bytes:
            best, low = (batch, needed), batch + 1
        else:
            high = batch - 1
    if arguments.json:
        print(
            json.dumps(
                {"batch": best[0] if best else None, "need_bytes": best[1] if best else None, "size_bytes": size_bytes}
            )
        )
    elif best is None:
        print(f"no batch of {arguments.batch} fits into {size_text(size_bytes)}")
    else:
        print(f"largest batch: {best[0]}, which needs {size_text(best[1])} of {size_text(size_bytes)}")
    return DONE if best else FAILED


def _parse_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--batch {text!r:.40}: expected a range such as 1..64")
    return int(match[1]), int(match[2])


CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""Workspace of cuBLAS on Hopper, in PyTorch's pool: one for the program's thread, one for that of backward passes."""
MAX_SIZE_BYTES = 1 << 50
CLASSES = ("parameters", "gradients", "optimizer")
OTHER_CLASS = "activations and others"
CLASS_LABELS = {**CLASS_NAMES, OTHER_CLASS: CLASS_NAMES["activations"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of a program at its peaks: ``live_bytes`` handed out, ``held_bytes`` taken from the device.

    ``classes`` are those of the live bytes, and ``step`` the number of the step in which they were highest.
    """

    live_bytes: int
    held_bytes: int
    classes: Mapping[str, int]
    step: int


class DoesNotFit(GpumondError):
    """The trace does not fit into the given size."""


def replay(trace: Mapping[str, Any], size_bytes: int = MAX_SIZE_BYTES) -> Need:
    """Return what a trace needs on a device of this size. Raises DoesNotFit."""
    classes: Mapping[str, str] = {str(number): name for number, name in trace["classes"].items()}
    entries: Sequence[tuple[str, int, int]] = trace["entries"]
    with tempfile.TemporaryDirectory() as directory:
        device = create(Path(directory) / "device", DeviceSpec("GPU-fit", 0, "fit", size_bytes, context_bytes=0))
        allocator = CachingAllocator(device)
        try:
            for _ in range(2 if trace["matmul"] else 0):
                allocator.malloc(CUBLAS_WORKSPACE_BYTES)
            return _need_of(allocator, entries, classes)
        except OutOfMemory as error:
            raise DoesNotFit(str(error)) from None
        finally:
            allocator.close()


def _need_of(allocator: CachingAllocator, entries: Sequence[tuple[str, int, int]], classes: Mapping[str, str]) -> Need:
    addresses: dict[int, int] = {}
    totals: Counter[str] = Counter()
    classes_at_peak: Mapping[str, int] = {}
    peak_live, peak_held, step, step_of_peak = 0, 0, 1, 1
    for kind, number, size in entries:
        name = classes.get(str(number), OTHER_CLASS)
        if kind == STEP:
            step = number + 1
        elif not size:
            continue  # PyTorch allocates nothing
        elif kind == ALLOCATE:
            addresses[number] = allocator.malloc(size)
            totals[name] += size
            peak_held = max(peak_held, allocator.held_bytes)
            if allocator.live_bytes > peak_live:
                other_bytes = allocator.live_bytes - sum(totals[name] for name in CLASSES)
                peak_live, step_of_peak = allocator.live_bytes, step
                classes_at_peak = {**totals, OTHER_CLASS: other_bytes}
        else:
            allocator.free(addresses.pop(number))
            totals[name] -= size
    return Need(live_bytes=peak_live, held_bytes=peak_held, classes=classes_at_peak, step=step_of_peak)
