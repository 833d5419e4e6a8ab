"""Exporters that ``bench.peers`` compares: how each is started, and which sample of its page comes from the driver."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPResponse
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bench.scrape import cpu_seconds
from tests.helpers.running import free_port, until

ROOT = Path(__file__).resolve().parents[1]
NVITOP_NAME = "nvitop-exporter"
NVITOP = f"{NVITOP_NAME}==1.7.2"
INSTALL_SECONDS = 300
STOP_SECONDS = 20
RECEIVED_BYTES = 1 << 18
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")


class Exporter(NamedTuple):
    """``command`` contains ``PORT`` and ``DIRECTORY``. The page has ``sample`` for each device, the used memory if the
    exporter reads the driver.
    """

    name: str
    command: tuple[str, ...]
    sample: re.Pattern[bytes]
    version_command: tuple[str, ...]

    def version(self) -> str:
        done = subprocess.run(self.version_command, cwd=ROOT, capture_output=True, text=True, timeout=30)
        line = next(iter((done.stdout or done.stderr).splitlines()), "unknown")
        return line.partition(" (")[0].replace(", version", "")


def library(python: str, name: str) -> tuple[str, ...]:
    """Return the command that prints the version of a package."""
    return (python, "-c", f"from importlib import metadata; print({name!r}, metadata.version({name!r}))")


def sample(name: str, label: str = "") -> re.Pattern[bytes]:
    labels = rf"\{{[^}}]*{label}[^}}]*\}}" if label else ""
    return re.compile(rf"^{name}{labels} (\S+)".encode(), re.MULTILINE)


GPUMOND = Exporter(
    "gpumond",
    (
        *(sys.executable, "-m", "gpumond", "serve", "--source", "nvml", "--listen", "127.0.0.1:PORT"),
        *("--socket", "DIRECTORY/agent.sock", "--state-dir", "DIRECTORY/state"),
    ),
    sample("gpumond_device_memory_used_bytes", "gpu"),
    (sys.executable, "-c", "import gpumond; print('gpumond', gpumond.__version__)"),
)
NODE = Exporter(
    "node_exporter",
    ("prometheus-node-exporter", "--web.listen-address=127.0.0.1:PORT"),
    sample("node_cpu_seconds_total", "mode"),
    ("prometheus-node-exporter", "--version"),
)
"""The least that an exporter costs: it doesn't read the driver."""
NVIDIA_GPU_EXPORTER = Exporter(
    "nvidia_gpu_exporter",
    ("nvidia_gpu_exporter", "--web.listen-address=127.0.0.1:PORT", "--collect.compute-apps"),
    sample("nvidia_smi_memory_used_bytes", "uuid"),
    ("nvidia_gpu_exporter", "--version"),
)
"""It runs nvidia-smi for each scrape."""


def nvitop() -> Exporter:
    """Return nvitop-exporter of this interpreter, or of an environment in build/. Raises LookupError."""
    python = sys.executable
    if find_spec("nvitop_exporter") is None:
        python = str(_environment(ROOT / "build" / "nvitop-exporter"))
    command = (python, "-m", "nvitop_exporter", "--bind-address", "127.0.0.1", "--port", "PORT")
    used = sample("gpu_memory_used_MiB", "index")
    return Exporter(NVITOP_NAME, command, used, library(python, NVITOP_NAME))


def _environment(directory: Path) -> Path:
    python = directory / "bin" / "python"
    if python.exists() and not subprocess.run([python, "-c", "import nvitop_exporter"], capture_output=True).returncode:
        return python
    venv.create(directory, clear=True, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", NVITOP]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise LookupError(f"the installation of {NVITOP} takes over {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise LookupError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return python


def installed_exporters(card: bool) -> tuple[list[Exporter], dict[str, str]]:
    """Return the exporters of this machine, and the reason for each that is absent."""
    found, absent = [GPUMOND], dict[str, str]()
    try:
        found.append(nvitop())
    except LookupError as error:
        absent[NVITOP_NAME] = str(error)
    for exporter in (NVIDIA_GPU_EXPORTER, NODE):
        if exporter is NVIDIA_GPU_EXPORTER and not card:
            absent[exporter.name] = "it runs nvidia-smi, which can't read the simulated driver"
        elif shutil.which(exporter.command[0]):
            found.append(exporter)
        else:
            absent[exporter.name] = f"{exporter.command[0]} is not in PATH"
    return found, absent


class Connection:
    """A scraper's connection, opened at the first request, and again after the exporter has closed it.

    http.client takes as long for an answer as gpumond does, so a comparison would measure the client.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def get(self, encoding: str) -> bytes:
        """Return the body of the page. Raises OSError if there is none."""
        if self._socket is None:
            host, _, port = self._address.rpartition(":")
            self._socket = socket.create_connection((host, int(port)), timeout=30)
        request = f"GET /metrics HTTP/1.1\r\nHost: {self._address}\r\nAccept-Encoding: {encoding}\r\n\r\n"
        try:
            self._socket.sendall(request.encode())
            return self._answer(self._socket)
        except OSError:
            self.close()
            raise

    def _answer(self, connection: socket.socket) -> bytes:
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            received += _receive(connection)
        head, body = bytes(received[:end]).lower(), received[end + 4 :]
        if not head.startswith((b"http/1.1 200", b"http/1.0 200")):
            raise OSError(head.decode("latin-1").splitlines()[0])
        if length := LENGTH.search(head):
            while len(body) < int(length[1]):
                body += _receive(connection)
        elif b"transfer-encoding: chunked" in head:
            while not body.endswith(b"0\r\n\r\n"):
                body += _receive(connection)
            body = _join_chunks(body)
        else:
            while piece := connection.recv(RECEIVED_BYTES):
                body += piece
        if head.startswith(b"http/1.0") or b"connection: close" in head:
            self.close()
        return bytes(body)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _receive(connection: socket.socket) -> bytes:
    piece = connection.recv(RECEIVED_BYTES)
    if not piece:
        raise ConnectionError("the exporter has closed the connection")
    return piece


def _join_chunks(chunks: bytearray) -> bytearray:
    body, position = bytearray(), 0
    while size := int(chunks[position : (begin := chunks.index(b"\r\n", position))], 16):
        body += chunks[begin + 2 : begin + 2 + size]
        position = begin + 2 + size + 2
    return body


class RunningExporter:
    """An exporter that has just been started. Its state directory is new, its socket has the same path each time."""

    def __init__(self, exporter: Exporter, directory: Path, environ: Mapping[str, str]) -> None:
        self.exporter = exporter
        directory.mkdir(mode=0o755, exist_ok=True)
        shutil.rmtree(directory / "state", ignore_errors=True)
        self.address = f"127.0.0.1:{free_port()}"
        port = self.address.partition(":")[2]
        command = [part.replace("PORT", port).replace("DIRECTORY", str(directory)) for part in exporter.command]
        self.log = directory / f"{exporter.name}.log"
        with self.log.open("wb") as log:
            self.began = time.perf_counter()
            self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ}, stdout=log, stderr=log)

    def first_data(self, devices: int) -> float:
        """Return the seconds from the start to the first page with the samples of all devices."""
        until(lambda: self._ended() or len(self.values()) >= devices, every=0.01)
        return time.perf_counter() - self.began

    def _ended(self) -> bool:
        if self.process.poll() is not None:
            raise SystemExit(f"{self.exporter.name} has ended:\n{self.log.read_text()[-2000:]}")
        return False

    def values(self) -> list[bytes]:
        """Return the samples of the page; none without a page."""
        try:
            return self.exporter.sample.findall(self.get(self.connect(), "identity"))
        except OSError:
            return []

    def connect(self) -> Connection:
        return Connection(self.address)

    @staticmethod
    def get(connection: Connection, encoding: str) -> bytes:
        return connection.get(encoding)

    def open(self, path: str) -> HTTPResponse:
        """Request another path than the page, as a browser does."""
        connection = HTTPConnection(self.address, timeout=30)
        connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status}")
        return answer

    def cpu(self) -> float:
        """Return the CPU seconds of its processes, those that have ended included."""
        return sum(measure_running(process_family(self.process.pid), cpu_seconds))

    def pss(self) -> float:
        return sum(measure_running(process_family(self.process.pid), pss))

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(exporter: Exporter, directory: Path, environ: Mapping[str, str]) -> Iterator[RunningExporter]:
    started = RunningExporter(exporter, directory, environ)
    try:
        yield started
    finally:
        started.stop()


def process_family(pid: int) -> list[int]:
    """Return the process, and all that it and its threads have started."""
    pids = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [one for child in children.read_text().split() for one in process_family(int(child))]
    return pids


def measure_running(pids: Sequence[int], measure: Callable[[int], float]) -> Iterator[float]:
    """Yield the measure of each process that has not ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            yield measure(pid)


def pss(pid: int, kind: str = "Pss") -> float:
    """Return the proportional set size in bytes; with another kind, a part of it. Raises OSError."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{kind}:"))
