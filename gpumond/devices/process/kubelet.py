"""Allocation of devices to pods, from the kubelet's pod-resources socket.

Queried rarely and in the background, because the kubelet answers ten requests a second for all clients together. After
an error, nothing is known until the next query. Without grpcio (the extra ``kubernetes``), no query is made.

Messages: k8s.io/kubelet/pkg/apis/podresources/v1/api.proto.

Does not cover devices of a resource claim (DRA), and plugins whose IDs are neither a UUID nor a PCI address.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpumond.facts.messages import clean

SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
LIST = "/v1.PodResourcesLister/List"
ASK_SECONDS = 10.0
DEADLINE_SECONDS = 1.0
OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_reconnect_backoff_ms", 5000),
)

_TICKS = os.sysconf("SC_CLK_TCK")


class Pod(NamedTuple):
    name: str
    namespace: str


class _Answer(NamedTuple):
    asked_at: float = float("-inf")
    pods: Mapping[str, set[Pod]] = {}


def since_boot() -> float:
    """Return seconds since boot, on the clock of a process's start_ticks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Kubelet:
    def __init__(self, path: str = f"/{SOCKET}", clock: Callable[[], float] = since_boot) -> None:
        self._path, self._clock = path, clock
        self._list: Any = None
        self._call: Any = None
        self._asked_at = float("-inf")
        self._answer = _Answer()

    def pod(self, ids: Iterable[str], start_ticks: int) -> Pod | None:
        """Return the only pod that has the device with these IDs. Never waits: the first answer is used by a later
        reading.

        An answer from before the start of the process is ignored, because the device may have belonged to another pod.
        """
        self._take()
        self._ask()
        if start_ticks / _TICKS >= self._answer.asked_at:
            return None
        pods = set[Pod]().union(*(self._answer.pods.get(name.lower(), ()) for name in ids))
        return pods.pop() if len(pods) == 1 else None

    def _take(self) -> None:
        if self._call is None or not self._call.done():
            return
        call, self._call = self._call, None
        if call.exception() is None:
            try:
                self._answer = _Answer(self._asked_at, _allocated(call.result()))
            except ValueError:
                pass  # not a response of a kubelet

    def _ask(self) -> None:
        now = self._clock()
        if self._call is not None or now - self._asked_at < ASK_SECONDS:
            return
        self._asked_at = now
        if not os.path.exists(self._path):
            return
        try:
            import grpc

            if self._list is None:
                self._list = grpc.insecure_channel(f"unix:{self._path}", OPTIONS).unary_unary(LIST)
            self._call = self._list.future(b"", timeout=DEADLINE_SECONDS)
        except ImportError:
            self._asked_at = float("inf")
        except (grpc.RpcError, RuntimeError):
            pass  # RuntimeError: no new thread can be started


def _allocated(message: bytes) -> dict[str, set[Pod]]:
    """Return pods by lower-case device ID from a ListPodResourcesResponse. Raises ValueError if it is malformed."""
    pods: dict[str, set[Pod]] = defaultdict(set)
    for resources in _at(message, 1):
        name, namespace = (b"".join(_at(resources, number)).decode() for number in (1, 2))
        for container in _at(resources, 3):
            for devices in _at(container, 2):
                for device in _at(devices, 2):
                    identity = device.decode().partition("::")[0]  # the ID of a shared device is UUID::REPLICA
                    pods[identity.lower()].add(Pod(clean(name), clean(namespace)))
    return dict(pods)


def _at(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the length-delimited fields with this number in a protobuf message; all others are skipped."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, size = key & 7, 0
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"protobuf wire type {kind}")
        if at + size > len(message):
            raise ValueError("a protobuf field ends after its message")
        if kind == 2 and key >> 3 == number:
            yield message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("an unterminated protobuf varint")
