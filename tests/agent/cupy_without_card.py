"""CuPy's real memory pools on a machine without a card: imported before CuPy, it answers the calls that they make.

CuPy's compiled modules call one another through tables of C functions (``__pyx_capi__``), which are filled in here.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import cupy_backends.cuda.api.runtime as runtime

DEVICES = 2
HELD: dict[int, int] = {}
"""Address -> bytes of what the pools have taken from the driver."""

_addresses = itertools.count(1 << 40, 1 << 36)
_device = [0]
_kept: list[object] = [ctypes.CDLL("libcuda.so.1")]  # the stand-in, and what C code points to


def _malloc(size: int, _: int) -> int:
    address = next(_addresses)
    HELD[address] = size
    return address


def _free(address: int, _: int) -> None:
    del HELD[address]


def _answer(name: str, result: Any, arguments: tuple[Any, ...], function: Callable[..., object]) -> None:
    """``arguments`` and ``result`` are C types; Cython adds an integer of its own to each call."""
    python, table = ctypes.pythonapi, runtime.__pyx_capi__
    python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    signature = python.PyCapsule_GetName(table[name])
    call = ctypes.PYFUNCTYPE(result, *arguments, ctypes.c_int)(function)
    _kept.extend((table[name], signature, call))
    table[name] = python.PyCapsule_New(ctypes.cast(call, ctypes.c_void_p), signature, None)


def _end() -> None:
    """Memory is freed when Python is down already, and could call nothing here."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


atexit.register(_end)
_answer("getDevice", ctypes.c_int, (), lambda _: _device[0])
_answer("getDeviceCount", ctypes.c_int, (), lambda _: DEVICES)
_answer("malloc", ctypes.c_ssize_t, (ctypes.c_size_t,), _malloc)
_answer("free", ctypes.py_object, (ctypes.c_ssize_t,), _free)
runtime.getDevice = lambda: _device[0]
runtime.setDevice = lambda device: _device.__setitem__(0, device)
