"""libnvidia-ml through pynvml, asked one question at a time.

Covers: what each return code means, functions that the library or its binding lack, process lists of any length.
Does not cover: what to ask (nvml.py, nvml_sensors.py, nvml_events.py).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml

from gpumond.errors import FaultKind, ReturnCode, SourceUnavailable
from gpumond.model.remedies import remedy
from gpumond.protocol.messages import clean
from gpumond.sources import ReadProgress
from gpumond.sources.inventory import DeviceLost, EnumerationFailed, Unsupported
from gpumond.sources.nvml.loading import load_error, not_loadable

KINDS: dict[int, ReturnCode] = {
    getattr(pynvml, name): ReturnCode(name.removeprefix("NVML_ERROR_").lower())
    for name in dir(pynvml)
    if name.startswith("NVML_ERROR_")
}
"""The fault kind of every return code."""

_CAUSES = {
    "library_not_found": "libnvidia-ml.so.1 was not found",
    "driver_not_loaded": "the NVIDIA kernel module is not loaded",
    "uninitialized": "the NVIDIA driver was unloaded",
    "no_permission": "no permission to use the NVIDIA driver",
    "device_access_lost": "the kernel refuses access to /dev/nvidiactl, as the container's device rules are gone "
    "(systemctl daemon-reload does that)",
}

LONGEST_LIST = 4096
"""More processes than contexts fit on any device, as each takes tens of MiB: a longer list is none."""

_FATAL = {"library_not_found", "driver_not_loaded", "uninitialized", "lib_rm_version_mismatch", "device_access_lost"}
_LOST = {"gpu_is_lost", "gpu_not_found"}
_SUPERSEDED = {"function_not_found", "argument_version_mismatch", "deprecated"}
_INSUFFICIENT_SIZE: int = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
_LISTED = struct.Struct("@IQII")
"""nvmlProcessInfo_v2_t: pid, bytes, GPU instance, compute instance."""

Functions = tuple[Callable[..., Any], ...]


def functions(*names: str) -> Functions:
    """The binding's functions for one question, best first; older bindings lack some."""
    return tuple(getattr(pynvml, name) for name in names if hasattr(pynvml, name))


def undecoded(name: str) -> Functions:
    """The binding's wrapper decodes text strictly; what it wraps does not decode."""
    function = getattr(pynvml, name)
    return (getattr(function, "__wrapped__", function),)


def _lister(name: str) -> Callable[..., list[tuple[int, int, int, int]]]:
    """One of the binding's process lists, asked for at once and into the same memory each time.

    The binding asks for the length first, then for the list, and makes an object of every entry: a list that
    grew in between fails, two calls instead of one, and 2 microseconds an entry instead of 0.1.
    """

    def ask(handle: Any, entries: bytearray) -> list[tuple[int, int, int, int]]:
        function = pynvml._nvmlGetFunctionPointer(name)
        count = ctypes.c_uint(LONGEST_LIST)
        code = function(handle, ctypes.byref(count), (ctypes.c_char * len(entries)).from_buffer(entries))
        if code == 0 and count.value > LONGEST_LIST:
            code = _INSUFFICIENT_SIZE
        if code:
            raise pynvml.NVMLError(code)
        return list(_LISTED.iter_unpack(memoryview(entries)[: count.value * _LISTED.size]))

    return ask


PROCESS_LISTS: tuple[tuple[str, Functions], ...] = tuple(
    (kind, tuple(_lister(f"nvmlDeviceGet{word}RunningProcesses_{version}") for version in ("v3", "v2")))
    for kind, word in (("compute", "Compute"), ("graphics", "Graphics"), ("mps", "MPSCompute"))
)


class Library:
    """A failure is a Refusal or, where nothing works any more, SourceUnavailable."""

    def __init__(self, proc: str = "/proc", open_node: Callable[[str, int], int] = os.open) -> None:
        self._proc = proc
        self._open_node = open_node
        self.course = ReadProgress()
        self._entries = bytearray(LONGEST_LIST * _LISTED.size)
        self._initialized = False

    def at(self, index: int) -> None:
        """Which device is asked from now on, for whoever watches."""
        self.course.at(index)

    def open(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            kind = self._kind_of(error)
            # The binding reports each of the loader's errors as a library that was not found.
            if kind == "library_not_found" and (reason := load_error()):
                raise not_loadable(reason) from error
            raise self._unavailable(kind) from error
        self._initialized = True

    def close(self) -> None:
        if self._initialized:
            self._initialized = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError:
                pass  # the driver is gone already

    def version(self, name: str) -> str | None:
        try:
            return _text(undecoded(name)[0]())
        except pynvml.NVMLError:
            return None

    def cuda_version(self) -> str | None:
        """The newest CUDA version that the driver serves."""
        try:
            number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        except pynvml.NVMLError:
            return None
        return f"{number // 1000}.{number % 1000 // 10}"

    def count(self) -> int:
        return int(self.query(functions("nvmlDeviceGetCount")))

    def handle(self, index: int) -> Any:
        return self.query(functions("nvmlDeviceGetHandleByIndex"), index)

    def uuid(self, handle: Any) -> str:
        return _text(self.query(undecoded("nvmlDeviceGetUUID"), handle))

    def name(self, handle: Any) -> str:
        return _text(self.query(undecoded("nvmlDeviceGetName"), handle))

    def pci_bus_id(self, handle: Any) -> str:
        # The binding decodes the text when the field is read, so that has to be part of the query.
        return _text(self.query((lambda handle: pynvml.nvmlDeviceGetPciInfo_v3(handle).busId,), handle))

    def gpu_instance_id(self, handle: Any) -> int | None:
        try:
            return int(self.query(functions("nvmlDeviceGetGpuInstanceId"), handle))
        except (EnumerationFailed, Unsupported):
            return None

    def instances(self, handle: Any) -> Iterator[Any]:
        mode, _pending = self.query(functions("nvmlDeviceGetMigMode"), handle)
        if mode != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for position in range(self.query(functions("nvmlDeviceGetMaxMigDeviceCount"), handle)):
            try:
                yield self.query(functions("nvmlDeviceGetMigDeviceHandleByIndex"), handle, position)
            except EnumerationFailed as failure:
                if failure.kind != "not_found":
                    raise

    def listing(self, lister: Functions, handle: Any) -> list[tuple[int, int, int, int]]:
        """Entries of one of PROCESS_LISTS: pid, bytes, GPU instance, compute instance."""
        entries: list[tuple[int, int, int, int]] = self.query(lister, handle, self._entries)
        return entries

    def query(self, functions: Functions, *arguments: Any) -> Any:
        """The answer of the first function that both binding and library have."""
        for function in functions:
            try:
                return function(*arguments)
            except pynvml.NVMLError as error:
                kind = self._kind_of(error)
                if kind in _SUPERSEDED:
                    continue
                if kind in _FATAL:
                    raise self._unavailable(kind) from error
                if kind in _LOST:
                    raise DeviceLost(kind) from error
                raise (Unsupported if kind == "not_supported" else EnumerationFailed)(kind) from error
            except Exception as error:
                # Whatever the binding makes of a broken answer (undecodable text, say) costs this answer only.
                raise EnumerationFailed("unreadable", f"{type(error).__name__}: {error}") from error
        raise Unsupported(ReturnCode("function_not_found"))

    def _kind_of(self, error: pynvml.NVMLError) -> FaultKind | ReturnCode:
        kind = KINDS.get(error.value, ReturnCode(f"error_{error.value}"))
        return "device_access_lost" if kind in ("unknown", "no_permission") and self._access_lost() else kind

    def _access_lost(self) -> bool:
        """EPERM (not EACCES) is what the kernel answers once a container's device rules are gone."""
        try:
            os.close(self._open_node("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return error.errno == errno.EPERM
        return False

    def _unavailable(self, kind: FaultKind | ReturnCode) -> SourceUnavailable:
        if kind != "lib_rm_version_mismatch":
            cause = _CAUSES.get(kind, f"NVML does not start ({kind.replace('_', ' ')})")
            return SourceUnavailable(kind, f"{cause}: {remedy(kind)}")
        try:
            module = Path(self._proc, "driver/nvidia/version").read_text(errors="replace")
        except OSError:
            module = ""
        number = re.search(r"\d+\.\d+(\.\d+)?", module)
        return SourceUnavailable(
            kind,
            f"the loaded kernel module is {number.group() if number else 'unknown'}, the NVML library "
            f"{self.version('nvmlSystemGetNVMLVersion') or 'unknown'}, as the driver was upgraded under a running "
            f"system: {remedy(kind)}",
        )


def _text(value: bytes | str) -> str:
    return clean(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)
