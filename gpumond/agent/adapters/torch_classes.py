"""Live bytes of PyTorch by class: parameters, gradients, optimizer state, buffers, and other tensors.

Tensors are found among the objects that Python's garbage collector tracks, within a time limit. Each storage is counted
once, by its address in C++, which needs no access to its data. No tensor operation is dispatched, and no memory of a
device is allocated. Results of differentiable functions are activations, and therefore part of the rest, to which
tensors without a Python object also belong.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

from gpumond.agent.retention import Tracked
from gpumond.model.program import Exactness, LiveClasses

CLASSES = ("parameters", "gradients", "optimizer", "buffers", "tensors")
PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, TENSORS = range(5)

SEARCH_PART = 0.7
"""Part of the time limit for the search of tensors; the rest is for their visit."""

LISTING_SECONDS = 20e-9
"""First estimate of the time that the list of all objects takes, for each memory block of the interpreter."""

REPEATED_ESTIMATE = 0.8
"""Factor of that estimate after each refusal: one slow list does not prevent all others."""

CHUNK = 16_384
"""Number of objects between two readings of the clock, 0.5 to 2 ms."""
CLOCK = 64
"""Number of tensors between two readings of the clock."""
FROZEN_AT_START = 2000
"""More objects than an interpreter freezes as it starts (375 in Python 3.12, none in others), and fewer than
``gc.freeze`` does, which freezes all of them.
"""
STRIDES = 16
"""A sample visits every 16th tensor, then the tensors next to those, and so on."""
MAX_NESTING = 4


class ClassBytes(NamedTuple):
    """Bytes of each of ``CLASSES`` by device index, and whether every tensor was visited."""

    devices: Mapping[int, Sequence[int]]
    exactness: Exactness


def measure(torch: Any, kind: str, seconds: float) -> ClassBytes | None:
    """Visit the tensors on devices of a kind such as ``cuda``, within a time limit; None if it ends before the list
    of all objects, or before a module is found."""
    started = time.perf_counter()
    deadline = started + seconds
    tracked = _LISTING.objects(SEARCH_PART * seconds)
    if tracked is None:
        return None
    objects, searched = _torch_objects(torch, tracked, started + SEARCH_PART * seconds)
    del tracked
    if not searched and not (objects.modules or objects.parameters):
        return None
    complete = searched and gc.get_freeze_count() <= FROZEN_AT_START  # frozen objects are not listed
    with torch._C.DisableTorchFunctionSubclass():  # a subclass of Tensor could run code of the program
        return _Visit(kind, deadline).classify(objects, complete)


def tracked(torch: Any, kind: str) -> list[Tracked]:
    """Return all tensors on devices of a kind, each with the size of its storage, newest last as far as known."""
    objects, _ = _torch_objects(torch, gc.get_objects(), float("inf"))
    found: list[Tracked] = []
    storages: set[int] = set()
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in (*objects.tensors, *objects.parameters):
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == kind:
                    size = 0 if storage._cdata in storages else storage.nbytes()
                    storages.add(storage._cdata)
                    found.append(Tracked(tensor, size, not tensor.is_leaf))
            except Exception:  # a tensor without a storage
                continue
    return found


def live_classes(found: ClassBytes, ordinal: int, allocator: str, device_uuid: str, live_bytes: int) -> LiveClasses:
    """Return the classes of one device, with the rest. ``live_bytes`` is the allocator's count."""
    own = list(found.devices.get(ordinal, (0,) * len(CLASSES)))
    if found.exactness == "sampled":
        own[TENSORS] = max(0, min(own[TENSORS], live_bytes - sum(own[:TENSORS])))
    rest = live_bytes - sum(own)
    return LiveClasses(
        allocator=allocator,
        device_uuid=device_uuid,
        live_bytes=live_bytes,
        parameters_bytes=own[PARAMETERS],
        gradients_bytes=own[GRADIENTS],
        optimizer_bytes=own[OPTIMIZER],
        buffers_bytes=own[BUFFERS],
        tensors_bytes=own[TENSORS],
        activations_bytes=max(0, rest),
        excess_bytes=max(0, -rest),
        exactness=found.exactness,
    )


class TorchObjects(NamedTuple):
    optimizers: list[Any]
    modules: list[Any]
    parameters: list[Any]
    tensors: list[Any]


class _Kinds(dict[type, int]):
    """Maps a type to its number in `TorchObjects` plus 1, and other types to 0. Called from C for each object."""

    def __init__(self, torch: Any) -> None:
        nn = torch.nn
        self._bases = (torch.optim.Optimizer, nn.Module, nn.Parameter, torch.Tensor)

    def __missing__(self, kind: type) -> int:
        bases = type.__getattribute__(kind, "__mro__")
        number = next((i for i, base in enumerate(self._bases, 1) if base in bases), 0)
        self[kind] = number
        return number


class _Listing:
    """The list of tracked objects, which cannot be interrupted. Its duration is estimated from the previous one."""

    def __init__(self) -> None:
        self._seconds_per_block = LISTING_SECONDS

    def objects(self, seconds: float) -> list[Any] | None:
        """Return the objects; None if the list would take too long."""
        blocks = sys.getallocatedblocks()
        if blocks * self._seconds_per_block > seconds:
            self._seconds_per_block *= REPEATED_ESTIMATE
            return None
        started = time.thread_time()  # without the time in which other programs run
        objects = gc.get_objects()
        self._seconds_per_block = (time.thread_time() - started) / max(1, blocks)
        return objects


_LISTING = _Listing()


def _torch_objects(torch: Any, tracked: list[Any], deadline: float) -> tuple[TorchObjects, bool]:
    """Return the tracked objects of the library, and whether all were searched."""
    kinds = _Kinds(torch)
    found: list[Any] = []
    complete = True
    # The list begins with the young objects, then has the old ones from the oldest on: those of imported modules.
    starts = [0, *reversed(range(CHUNK, len(tracked), CHUNK))]
    for number, start in enumerate(starts, 1):
        chunk = tracked[start : start + CHUNK]
        found += compress(chunk, map(kinds.__getitem__, map(type, chunk)))
        if time.perf_counter() > deadline:
            complete = number == len(starts)
            break
    by_kind = TorchObjects([], [], [], [])
    for one in found:
        by_kind[kinds[type(one)] - 1].append(one)
    return by_kind, complete


class _Visit:
    """One visit of all tensors. The first class that reaches a storage counts it."""

    def __init__(self, kind: str, deadline: float) -> None:
        self._kind, self._deadline = kind, deadline
        self._storages: set[int] = set()
        self._devices: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(CLASSES))
        self._visited = 0
        self._in_time = True

    def classify(self, objects: TorchObjects, complete: bool) -> ClassBytes:
        modules = [vars(module) for module in objects.modules]
        registered = [*_values(modules, "_parameters"), *objects.parameters]
        self._add_all(registered, PARAMETERS)
        self._add_all(_gradients((*registered, *objects.tensors)), GRADIENTS)
        self._add_all(_states(map(vars, objects.optimizers)), OPTIMIZER)
        self._add_all(_values(modules, "_buffers"), BUFFERS)
        others = [one for stride in range(STRIDES) for one in objects.tensors[stride::STRIDES]]
        self._visited = 0
        self._add_all(_leaves(others), TENSORS)
        if not self._in_time and self._visited:
            for classes in self._devices.values():
                classes[TENSORS] = classes[TENSORS] * len(others) // self._visited
        return ClassBytes(self._devices, "exact" if complete and self._in_time else "sampled")

    def _add_all(self, tensors: Iterable[Any], number: int) -> None:
        for tensor in tensors:
            self._visited += 1
            if self._visited % CLOCK == 0 and time.perf_counter() > self._deadline:
                self._in_time = False
                return
            try:
                self._add(tensor, number)
            except Exception:  # a tensor without a storage, such as one of a wrapper
                continue

    def _add(self, tensor: Any, number: int) -> None:
        if tensor is None:
            return
        local = getattr(tensor, "_local_tensor", None)  # the shard of a DTensor
        if local is not None:
            self._add(local, number)
            return
        storage = tensor.untyped_storage()
        device = storage.device
        key = storage._cdata
        if device.type == self._kind and key not in self._storages:
            self._storages.add(key)
            self._devices[device.index or 0][number] += storage.nbytes()


def _values(modules: Iterable[Mapping[str, Any]], name: str) -> Iterator[Any]:
    """Yield the parameters or buffers that modules have registered."""
    for module in modules:
        registered = module.get(name)
        if isinstance(registered, dict):
            yield from list(registered.values())


def _leaves(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield None in place of the results of differentiable functions."""
    for tensor in tensors:
        yield tensor if _read(tensor, "is_leaf") else None


def _gradients(tensors: Iterable[Any]) -> Iterator[Any]:
    for tensor in _leaves(tensors):
        yield _read(tensor, "grad")  # reading the gradient of another one warns


def _read(tensor: Any, name: str) -> Any:
    """Return an attribute; None for a tensor without it, such as one of a transformation that has ended."""
    try:
        return getattr(tensor, name, None)
    except Exception:
        return None


def _states(optimizers: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for optimizer in optimizers:
        yield from _tensors_in(optimizer.get("state"), MAX_NESTING)


def _tensors_in(value: Any, nesting: int) -> Iterator[Any]:
    """Yield the tensors in nested dictionaries and sequences."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value if nesting else ():
            yield from _tensors_in(one, nesting - 1)
    elif hasattr(type(value), "untyped_storage"):
        yield value
