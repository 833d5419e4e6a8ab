from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpumond.devices.process.metadata import LIST_METHOD, Kubelet, Pod, ProcessMetadata
from gpumond.facts.snapshot import DeviceReading, Reading
from tests.helpers.agents import GIB
from tests.helpers.running import until
from tests.helpers.trees import ProcTree
from tests.helpers.values import make_device, make_process

A, B = "a1" * 32, "b2" * 32
UID, OTHER_UID = "2c48913c-b29f-11e7-9350-020968147796", "3d48913c-b29f-11e7-9350-020968147796"


def field(number: int, value: bytes | str) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    more = []
    while value > 0x7F:
        more.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*more, value])


def resources(pod: str, *ids: str, namespace: str = "research") -> bytes:
    """Return a pod with one container, including fields that gpumond does not read (topology, cpu_ids, memory)."""
    devices = field(1, "nvidia.com/gpu") + b"".join(field(2, name) for name in ids) + field(3, field(1, b"\x08\x01"))
    container = field(1, "main") + field(2, devices) + b"\x18\x96\x01" + field(4, "m" * 300)
    return field(1, field(1, pod) + field(2, namespace) + field(3, container))


class Server:
    """Kubelet on a Unix socket, and the clock of its client."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "kubelet.sock")
        self.response: bytes | grpc.StatusCode = b""
        self.asked: list[bytes] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.now = 1000.0
        self.server: Any = None

    def start(self) -> None:
        service, _, method = LIST_METHOD[1:].partition("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(self._list)}
        self.server = grpc.server(ThreadPoolExecutor(4))
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.server.add_insecure_port(f"unix:{self.path}")
        self.server.start()

    def stop(self) -> None:
        self.may_answer.set()
        if self.server:
            self.server.stop(None).wait()

    def kubelet(self) -> Kubelet:
        return Kubelet(self.path, clock=lambda: self.now)

    def _list(self, request: bytes, context: Any) -> bytes:
        self.asked.append(request)
        self.may_answer.wait()
        if isinstance(self.response, grpc.StatusCode):
            context.abort(self.response, "not now")
        return self.response


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stop()


def found(kubelet: Kubelet, identity: str = "GPU-a") -> Pod:
    return until(lambda: kubelet.pod((identity,), 100))


@pytest.mark.parametrize(
    ("listed", "asked"),
    [("GPU-A", "GPU-a"), ("MIG-a/1/0", "MIG-a/1/0"), ("0000:03:00.0", "0000:03:00.0"), ("GPU-a::3", "GPU-a")],
)
def test_pod_of_a_device_is_found(server: Server, listed: str, asked: str):
    server.response = resources("other", "GPU-x") + resources("llama-0", "GPU-y", listed)
    server.start()
    assert found(server.kubelet(), asked) == Pod("llama-0", "research")
    assert server.asked == [b""]


def test_kubelet_is_queried_once_in_ten_seconds(server: Server):
    server.response = resources("llama-0", "GPU-a")
    server.start()
    kubelet = server.kubelet()
    found(kubelet)
    server.response = resources("llama-1", "GPU-a")
    for server.now in (1003.0, 1006.0, 1009.9):
        assert kubelet.pod(("GPU-a",), 100) == Pod("llama-0", "research")
    assert len(server.asked) == 1
    server.now = 1010.0
    until(lambda: kubelet.pod(("GPU-a",), 100) == Pod("llama-1", "research"))
    assert len(server.asked) == 2


def test_reading_does_not_wait_for_the_answer(server: Server):
    server.may_answer.clear()
    server.response = resources("llama-0", "GPU-a")
    server.start()
    kubelet = server.kubelet()
    assert kubelet.pod(("GPU-a",), 100) is None
    until(lambda: server.asked)
    server.now += 60.0
    assert kubelet.pod(("GPU-a",), 100) is None
    server.may_answer.set()
    found(kubelet)


def test_device_of_several_pods_has_no_owner(server: Server):
    server.response = (
        resources("llama-0", "GPU-a::0") + resources("llama-1", "GPU-a::1") + resources("whisper", "GPU-b")
    )
    server.start()
    kubelet = server.kubelet()
    found(kubelet, "GPU-b")
    assert kubelet.pod(("GPU-a",), 100) is None


def test_answer_from_before_the_process_started_does_not_count(server: Server):
    server.response = resources("llama-0", "GPU-a")
    server.start()
    kubelet = server.kubelet()
    found(kubelet)
    assert kubelet.pod(("GPU-a",), 10**9) is None


@pytest.mark.parametrize(
    "response",
    [
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAVAILABLE,
        b"\xff" * 30,
        field(1, field(1, b"\xff\xfe") + field(3, field(2, field(2, "GPU-a")))),
        resources("llama-0", "GPU-a")[:-5],
    ],
)
def test_kubelet_error_makes_one_answer_unknown(server: Server, response: Any):
    """The last valid answer remains until the next one."""
    server.response = resources("llama-0", "GPU-a")
    server.start()
    kubelet = server.kubelet()
    found(kubelet)
    server.response, server.now = response, 1010.0
    assert kubelet.pod(("GPU-a",), 100) == Pod("llama-0", "research")
    until(lambda: len(server.asked) == 2)
    server.response = resources("llama-1", "GPU-a")

    def renamed() -> bool:
        server.now += 10.0
        pod = kubelet.pod(("GPU-a",), 100)
        assert pod in (Pod("llama-0", "research"), Pod("llama-1", "research"))
        return pod == Pod("llama-1", "research")

    until(renamed)


def test_kubelet_that_starts_later_is_found(server: Server):
    kubelet = server.kubelet()
    assert kubelet.pod(("GPU-a",), 100) is None
    Path(server.path).touch()  # left by a killed kubelet
    server.now += 10.0
    assert kubelet.pod(("GPU-a",), 100) is None
    Path(server.path).unlink()
    server.response = resources("llama-0", "GPU-a")
    server.start()

    def later() -> Pod | None:
        server.now += 10.0
        return kubelet.pod(("GPU-a",), 100)

    assert until(later) == Pod("llama-0", "research")


def test_kubelet_is_not_queried_without_grpcio(tmp_path: Path):
    (tmp_path / "kubelet.sock").touch()
    program = (
        "import sys; sys.modules['grpc'] = None\n"
        "from gpumond.devices.process.metadata import Kubelet\n"
        "kubelet = Kubelet(sys.argv[1])\n"
        "print([kubelet.pod(('GPU-a',), 100) for _ in range(2)])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "kubelet.sock")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[None, None]\n"


class Host:
    def __init__(self, root: Path, kubelet: Kubelet) -> None:
        self.proc = ProcTree(root / "proc")
        self.kubelet = kubelet
        places = {name: str(root / name) for name in ("proc", "sys", "dev")}
        self.owners = ProcessMetadata(**places, root=str(root), is_private=False, kubelet=self.kubelet)

    def add(self, pid: int, container: str, uid: str | None) -> None:
        cgroup = f"/kubepods/burstable/pod{uid}/{container}" if uid else f"/docker/{container}"
        self.proc.add(pid, start_ticks=100, cgroup=f"0::{cgroup}\n")

    def pods(self, *pids: int, **fields: Any) -> list[tuple[str | None, str | None]]:
        device: DeviceReading = make_device(used_bytes=GIB, processes=tuple(map(make_process, pids)), **fields)
        (completed,) = self.owners.complete(Reading(devices=(device,))).devices
        return [(process.pod_name, process.pod_namespace) for process in completed.processes or ()]


OTHER_PROCESS = (None, None)


@pytest.fixture
def host(tmp_path: Path, server: Server) -> Host:
    server.response = resources("llama-0", "GPU-a", "0000:03:00.0")
    server.start()
    return Host(tmp_path, server.kubelet())


def test_process_without_a_pod_name_in_files_gets_that_of_the_pod_of_its_device(host: Host):
    host.add(7, A, UID)
    host.add(8, B, None)
    until(lambda: host.pods(7) != [OTHER_PROCESS])
    assert host.pods(7, 8) == [("llama-0", "research"), OTHER_PROCESS]
    assert host.pods(7, uuid="AMD-1", pci_bus_id="0000:03:00.0") == [("llama-0", "research")]
    assert host.pods(7, uuid="GPU-b") == [OTHER_PROCESS]


def test_pods_sharing_a_device_are_not_distinguished(host: Host):
    """The other pod has access by privilege; the kubelet does not distinguish them."""
    host.add(7, A, UID)
    host.add(8, B, OTHER_UID)
    found(host.kubelet)
    assert host.pods(7, 8) == [OTHER_PROCESS, OTHER_PROCESS]


def test_kubelet_is_not_queried_if_files_name_the_pod_or_there_is_none(tmp_path: Path):
    def clock() -> float:
        raise AssertionError("it was asked")

    host = Host(tmp_path, Kubelet(str(tmp_path / "kubelet.sock"), clock))
    (tmp_path / f"var/log/pods/research_named-by-file_{UID}").mkdir(parents=True)
    host.add(7, A, UID)
    host.add(8, B, None)
    assert host.pods(7, 8) == [("named-by-file", "research"), OTHER_PROCESS]
