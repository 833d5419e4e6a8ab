"""CuPy's real memory pools on a machine without a device.

This module is imported before CuPy and replaces the driver functions that the pools call. CuPy's compiled modules call
each other through tables of C functions (``__pyx_capi__``), which are replaced here.
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
"""Bytes of each address that the pools have allocated from the driver."""

IN_DEFAULT_POOL: dict[int, int] = {}
"""Stream-ordered blocks, one after another in the default pool of the first device; the driver counts these."""

_addresses = itertools.count(1 << 40, 1 << 36)
_device = [0]
_driver = ctypes.CDLL("libcuda.so.1")
_kept: list[object] = []  # keeps the objects that C code refers to
_end_of_pool = [1 << 44]


def _malloc(size: int, _: int) -> int:
    address = next(_addresses)
    HELD[address] = size
    return address


def _free(address: int, _: int) -> None:
    del HELD[address]


def _malloc_async(size: int, *_: int) -> int:
    address = _end_of_pool[0]
    _end_of_pool[0] += -(-size // 512) * 512
    IN_DEFAULT_POOL[address] = size
    _count()
    return address


def _free_async(address: int, *_: int) -> None:
    del IN_DEFAULT_POOL[address]
    _count()


def _count() -> None:
    reserved = _end_of_pool[0] - (1 << 44)
    _driver.fake_pool(0, *map(ctypes.c_uint64, (reserved, sum(IN_DEFAULT_POOL.values()), 0)))


def _answer(name: str, result: Any, arguments: tuple[Any, ...], function: Callable[..., object]) -> None:
    """Replace a C function of these C types; Cython adds an integer of its own to each call."""
    python, table = ctypes.pythonapi, runtime.__pyx_capi__
    python.PyCapsule_GetName.restype, python.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    signature = python.PyCapsule_GetName(table[name])
    call = ctypes.PYFUNCTYPE(result, *arguments, ctypes.c_int)(function)
    _kept.extend((table[name], signature, call))
    table[name] = python.PyCapsule_New(ctypes.cast(call, ctypes.c_void_p), signature, None)


def _end() -> None:
    """Replace the functions at exit: memory is freed after the interpreter has ended and can call no Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


atexit.register(_end)
_answer("getDevice", ctypes.c_int, (), lambda _: _device[0])
_answer("getDeviceCount", ctypes.c_int, (), lambda _: DEVICES)
_answer("malloc", ctypes.c_ssize_t, (ctypes.c_size_t,), _malloc)
_answer("free", ctypes.py_object, (ctypes.c_ssize_t,), _free)
_answer("deviceGetAttribute", ctypes.c_int, (ctypes.c_int, ctypes.c_int), lambda *_: 1)
_answer("mallocAsync", ctypes.c_ssize_t, (ctypes.c_size_t, ctypes.c_ssize_t), _malloc_async)
_answer("freeAsync", ctypes.py_object, (ctypes.c_ssize_t, ctypes.c_ssize_t), _free_async)
runtime.getDevice = lambda: _device[0]
runtime.setDevice = lambda device: _device.__setitem__(0, device)
