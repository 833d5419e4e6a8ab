"""Time and memory of `gpumond fleet status` for many machines.

python -m bench.fleet_status [--machines 5000] [--programs 1] [--save]

One process serves the frames of all machines below the path of each, over a new connection for each, on the cores of
the command. Every machine has 8 devices with ``--programs`` programs each, all with an agent. A last run has three
more: one fails, one answers with a frame of a wrong type, one never answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.result import publish
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.values import make_device, make_pool, make_process, make_report

DEVICES = 8
REPEATS = 3
FAILING, LYING, SILENT = "/failing/", "/lying/", "/silent/"


def frame(programs: int) -> bytes:
    """Return the frame of one machine."""
    devices, reports = [], []
    for index in range(DEVICES):
        uuid, pids = f"GPU-{index}", range(1000 + index * programs, 1000 + (index + 1) * programs)
        size = 60 * GIB // max(1, programs)
        processes = tuple(make_process(pid, size) for pid in pids)
        devices.append(make_device(uuid, index=index, name="H200", used_bytes=60 * GIB, processes=processes))
        reports += [make_report(pid, (make_pool(uuid, live=size // 2, cached=size // 4),)) for pid in pids]
    return json.dumps(make_frame(*devices, reports=tuple(reports)), separators=(",", ":")).encode()


async def serve(programs: int) -> None:
    """Serve until stdin closes, after a line with the port."""
    whole = frame(programs)
    lie = whole.replace(b'"used_bytes":', b'"used_bytes":"much","used":', 1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
        if path.startswith(SILENT):
            await reader.read()
        status, body = ("503 Busy", b"{}") if path.startswith(FAILING) else ("200 OK", whole)
        body = lie if path.startswith(LYING) else body
        fields = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{fields}Connection: close\r\n\r\n".encode() + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)


def targets(file: Path, port: int, machines: int) -> None:
    groups = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {"instance": name, "__metrics_path__": f"/{name}/metrics"},
        }
        for name in ("failing", "lying", "silent", *(f"node{number}" for number in range(machines)))
    ]
    file.write_text(json.dumps(groups))


class Run(NamedTuple):
    """Elapsed seconds, processor seconds, peak resident memory and output of the command."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    shown: str


def run(file: Path, *options: str) -> Run:
    command = [sys.executable, "-m", "gpumond", "fleet", "status", "--targets", os.fspath(file), *options]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        shown = process.stdout.read()
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    seconds = time.perf_counter() - began
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, shown)


def measure(machines: int, programs: int) -> dict[str, object]:
    command = [sys.executable, "-m", "bench.fleet_status", "--serve", "--programs", str(programs)]
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdin
        assert server.stdout
        file = Path(directory, "targets.json")
        targets(file, port := int(server.stdout.readline()), machines)
        healthy = [run(file, "--machine", "node*") for _ in range(REPEATS)]
        last = run(file)
        lines = [
            line.replace(str(port), "PORT") for line in last.shown.splitlines() if line.startswith("unavailable: ")
        ]
        server.stdin.close()
    return {
        "machines": machines,
        "programs_of_a_device": programs,
        "bytes_of_a_frame": len(frame(programs)),
        "seconds": round(statistics.median(each.seconds for each in healthy), 2),
        "cpu_seconds": round(statistics.median(each.cpu_seconds for each in healthy), 2),
        "peak_mib": round(max(each.peak_mib for each in healthy), 1),
        "load_average": os.getloadavg()[0],
        "with_failing_lying_and_silent_machine": {
            "seconds": round(last.seconds, 2),
            "cpu_seconds": round(last.cpu_seconds, 2),
            "peak_mib": round(last.peak_mib, 1),
            "lines": lines,
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=5000)
    parser.add_argument("--programs", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="store the figures in bench/results")
    chosen = parser.parse_args(arguments)
    if chosen.serve:
        asyncio.run(serve(chosen.programs))
    else:
        publish("fleet_status", measure(chosen.machines, chosen.programs))


if __name__ == "__main__":
    main()
