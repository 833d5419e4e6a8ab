"""HTTP servers with the answers that a test defines, and daemons on fake devices with programs."""

from __future__ import annotations

import io
import json
import os
import ssl
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from gpumond.commands.main import main
from tests.fakenvml import GIB, Device, FakeDriver, Process
from tests.helpers import forks
from tests.helpers.running import RunningDaemon, until

Answer = tuple[int, Any] | None
"""Status and JSON; None is never sent."""


def receipt(outcome: str, **fields: Any) -> dict[str, Any]:
    """Return the JSON of a receipt."""
    nothing = dict.fromkeys(("device_uuid", "allocator", "expected", "driver_released_bytes", "before", "after"))
    texts = {"workload": "train", "outcome": outcome, "reason": "", "requested_by": "token"}
    times = {"started_at": 1.0, "duration_seconds": 0.1}
    return {"pid": 1, "released_bytes": 5, "steps": [], "raced": False, **nothing, **texts, **times, **fields}


class Stub:
    """``requests``: path, Authorization and body of each request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[tuple[str, str | None, str]] = []
        self.over = threading.Event()


@contextmanager
def stub(
    answer: Callable[[str, str], Answer], certificate: Path | None = None, clients: Path | None = None
) -> Iterator[Stub]:
    """Serve ``answer(path, body)`` on a port of this machine; with a certificate and the key with its name, over TLS.

    ``clients``: the authority of the certificates that clients must have.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

        def _answer(self, body: str) -> None:
            served.requests.append((self.path, self.headers["Authorization"], body))
            found = answer(self.path.partition("?")[0], body)
            if found is None:
                served.over.wait(60)
                return
            sent = json.dumps(found[1]).encode()
            self.send_response(found[0])
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that does not accept the certificate

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            if clients is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(clients)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        served = Stub(f"127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield served
        finally:
            served.over.set()
            server.shutdown()


@contextmanager
def prometheus_stub(vectors: Mapping[str, list[tuple[dict[str, str], float, float]]]) -> Iterator[str]:
    """Serve results of queries: labels, time and value of each series. Yields the URL."""

    def answer(path: str, body: str) -> Answer:
        if path != "/api/v1/query":
            return 404, {"status": "error", "error": "not found"}
        (expression,) = parse_qs(body)["query"]
        if expression not in vectors:
            return 400, {"status": "error", "error": "parse error"}
        result = [{"metric": labels, "value": [at, str(value)]} for labels, at, value in vectors[expression]]
        return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}

    with stub(answer) as served:
        yield f"http://{served.address}"


class SimulatedMachine:
    """A daemon, a device, and a program for each of ``programs``: workload and options of ``tests.helpers.agents``.

    The device also lists a process without an agent: that of the test.
    """

    def __init__(self, directory: Path, library: Path, name: str, programs: Mapping[str, Mapping[str, Any]]) -> None:
        self.name = name
        self._directory = directory
        directory.mkdir()
        uuid = f"GPU-{zlib.crc32(name.encode()):08x}-1111-2222-3333-444455556666"
        self.driver = FakeDriver(directory, library, [Device(uuid=uuid)])
        environ = {**self.driver.env, "GPUMOND_FLUSH_COOLDOWN": "0"}
        self.daemon = RunningDaemon(directory / "daemon", "--source", "nvml", "--interval", "0.2s", environ=environ)
        self.address = self.daemon.url.removeprefix("http://")
        self._options = {
            workload: {"device_uuid": uuid, "workload": workload, "cached_bytes": 3 * GIB, "answer": "release", **own}
            for workload, own in programs.items()
        }
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self._earlier: list[Any] = []
        try:
            until(lambda: self.daemon.request("/-/ready")[0] == 200)
            self.restore()
        except BaseException:
            self.stop()
            raise

    def restore(self) -> None:
        """Start the programs that do not run, and give the others the options that they had at their start.

        ``flushed`` does not return the receipts until now.
        """
        for workload, options in self._options.items():
            program = self.programs.get(workload)
            if program is not None and program.poll() is None:
                self.change(workload, **options)
            else:
                self.start(workload)
        self.listed()
        self._earlier = self.daemon.get("receipts")

    def start(self, workload: str) -> subprocess.Popen[bytes]:
        """Start a program, instead of one that has ended. ``listed`` makes the device list it."""
        if workload in self.programs:
            self.programs[workload].kill()
            self.programs[workload].communicate()
        options = json.dumps(self._options[workload])
        command = [sys.executable, "-m", "tests.helpers.agents", str(self.daemon.socket), options]
        self.programs[workload] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        return self.programs[workload]

    def listed(self) -> None:
        """Wait until the daemon shows all programs, on the device and with their agents."""
        pids = [os.getpid(), *(program.pid for program in self.programs.values())]
        self.driver.devices[0].processes = [Process(pid, 4 * GIB) for pid in pids]
        self.driver.devices[0].used_bytes = (1 + 4 * len(pids)) * GIB
        self.driver.write()
        until(lambda: self._restored(pids), 60)

    def change(self, workload: str, /, **options: Any) -> None:
        """Replace options of a program."""
        control = self.programs[workload].stdin
        assert control is not None
        control.write(json.dumps(options).encode() + b"\n")
        control.flush()

    def _restored(self, pids: list[int]) -> bool:
        cached = {each["workload"]: each["pools"][0]["reclaimable"]["likely"] for each in self.daemon.get("agents")}
        expected = {workload: options["cached_bytes"] for workload, options in self._options.items()}
        return cached == expected and {each["pid"] for each in self.daemon.get("processes")} == set(pids)

    @property
    def agents(self) -> set[str]:
        return {report["workload"] for report in self.daemon.get("agents")}

    @property
    def token(self) -> str:
        return (self._directory / "daemon" / "token").read_text().strip()

    def flushed(self) -> list[str]:
        """Return the workload of each receipt since the programs were restored."""
        return [each["workload"] for each in self.daemon.get("receipts") if each not in self._earlier]

    def stop(self) -> None:
        for program in self.programs.values():
            program.kill()
            program.communicate()
        self.daemon.stop()


@contextmanager
def simulated(
    directory: Path, library: Path, machines: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> Iterator[list[SimulatedMachine]]:
    """Start machines with these names and programs."""
    with ExitStack() as started:
        result = []
        for name, programs in machines.items():
            result.append(SimulatedMachine(directory / name, library, name, programs))
            started.callback(result[-1].stop)
        yield result


def write_targets(file: Path, addresses: Mapping[str, str], **labels: Mapping[str, str]) -> Path:
    """Write a file_sd file with the addresses by name. ``labels``: further labels of a machine, by its name."""
    groups = [
        {"targets": [address], "labels": {"instance": name, **labels.get(name, {})}}
        for name, address in addresses.items()
    ]
    file.write_text(json.dumps(groups))
    return file


def fleet(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gpumond fleet` in this process, without a token of the environment."""
    before, input_before, output, errors = dict(os.environ), sys.stdin, io.StringIO(), io.StringIO()
    for name in before:
        if name.startswith("GPUMOND_"):
            del os.environ[name]
    os.environ.update(environ)
    sys.stdin = io.StringIO(stdin)
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            code = main(["fleet", *arguments])
    except SystemExit as ended:  # of argparse
        code = int(ended.code or 0)
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.stdin = input_before
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


class Confirming:
    """`gpumond fleet flush` that has printed its plan and waits for the confirmation."""

    def __init__(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        others = {name: text for name, text in os.environ.items() if not name.startswith("GPUMOND_")}
        own = {**others, **(environ or {})}
        command = [sys.executable, "-m", "gpumond", "fleet", "flush", *arguments]
        pipe = subprocess.PIPE
        self.process = forks.start(command, env=own, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        while "would release" not in (line := self.process.stdout.readline()):
            assert line, self.process.stderr

    def answer(self, text: str) -> tuple[int, str, str]:
        shown, errors = self.process.communicate(text, timeout=60)
        return self.process.returncode, shown, errors
