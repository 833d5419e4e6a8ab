"""`gpumond fleet` with 2,000 machines: the seconds and the memory of `status` and of the plan of `flush`.

Fakes in other processes answer with the frame of a machine with 8 devices and 32 programs.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.result import publish
from tests.helpers.agents import GIB
from tests.helpers.frames import make_frame
from tests.helpers.values import make_device, make_pool, make_process, make_report

MACHINES, DEVICES, PROGRAMS, RUNS = 2000, 8, 4, 3


def frame() -> bytes:
    """Return the answer of a daemon: a program on each device has 4 GiB cached."""
    pids = [[100 + device * PROGRAMS + number for number in range(PROGRAMS)] for device in range(DEVICES)]
    devices = [
        make_device(
            f"GPU-{number:08x}-1111-2222-3333-444455556666",
            index=number,
            used_bytes=64 * GIB,
            processes=tuple(make_process(pid, 16 * GIB, user="ada") for pid in own),
        )
        for number, own in enumerate(pids)
    ]
    reports = tuple(
        make_report(pid, (make_pool(devices[number].uuid, live=10 * GIB, cached=4 * GIB),), workload=f"train-{number}")
        for number, own in enumerate(pids)
        for pid in own
    )
    return json.dumps(make_frame(*devices, reports=reports)).encode()


def serve(answer: bytes, port: Any) -> None:
    """Answer every request with 200 and the frame."""
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n".encode()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(one, "127.0.0.1", 0, backlog=1024)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def measured(*arguments: str) -> tuple[float, float, str]:
    """Return the seconds and the memory (MiB) of a command, and its output."""
    program = (
        "import resource, sys; from gpumond.commands.main import main; main(sys.argv[1:]); sys.stdout.flush(); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, "fleet", *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - began
    return seconds, int(done.stderr.split()[-1]) / 1024, done.stdout


def main() -> None:
    answer, (here, there) = frame(), multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=serve, args=(answer, there), daemon=True)
    server.start()
    figures: dict[str, object] = {"machines": MACHINES, "frame_bytes": len(answer)}
    with tempfile.TemporaryDirectory() as directory:
        address = f"127.0.0.1:{here.recv()}"
        groups = [{"targets": [address], "labels": {"instance": f"gpu-{number}"}} for number in range(MACHINES)]
        file = Path(directory) / "targets.json"
        file.write_text(json.dumps(groups))
        for name, arguments in (
            ("status", ("status", "--json")),
            ("plan", ("flush", "--workload", "train-0", "--dry-run", "--json")),
        ):
            runs = [measured(*arguments, "--targets", str(file), "--timeout", "30") for _ in range(RUNS)]
            found = json.loads(runs[0][2])
            assert len(found if name == "status" else found["plan"]) == MACHINES * (1 if name == "status" else PROGRAMS)
            figures[name] = {
                "seconds": sorted(round(run[0], 2) for run in runs)[RUNS // 2],
                "mib": round(max(run[1] for run in runs)),
            }
    server.terminate()
    publish("fleet", figures)


if __name__ == "__main__":
    main()
