"""Live bytes of PyTorch by class: parameters, gradients, optimizer state, buffers, and other tensors.

The first four are those of the modules and optimizers in `torch_objects`, which takes some milliseconds. Other tensors
are found among the objects that Python's garbage collector tracks, if somebody waits for them. Each storage is counted
once, by its address in C++, which needs no access to its data. No tensor operation is dispatched, and no memory of a
device is allocated. Results of differentiable functions are activations, and therefore part of the rest, to which
tensors without a Python object also belong.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

from gpumond.agent.allocators.adapters import TrackedTensor
from gpumond.agent.allocators.gil import tensors_unchanged
from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
from gpumond.facts.program import LiveClasses

LIVE_CLASSES = ("parameters", "gradients", "optimizer", "buffers", "tensors")

VISIT_SECONDS = 0.03
"""Time limit for the first four classes, which an out-of-memory error waits for."""

HEAP_SEARCH_SECONDS = 0.2
"""Time limit for a search of the heap that a snapshot waits for."""

MAX_HEAP_SEARCH_BLOCKS = 4_000_000
"""Most memory blocks of an interpreter whose heap is searched: about a million objects. Their list cannot be
interrupted, and takes 80 ms.
"""
CHUNK_OBJECTS = 16_384
"""Number of objects between two readings of the clock, 0.5 to 2 ms."""
TENSORS_PER_CLOCK_READING = 64
"""Number of tensors between two readings of the clock."""
MAX_FROZEN_AT_START = 2000
"""More objects than an interpreter freezes as it starts (375 in Python 3.12, none in others), and fewer than
``gc.freeze`` does, which freezes all of them.
"""
MAX_NESTING = 4

Reference = weakref.ref[Any]
BytesByClass = Mapping[int, Sequence[int | None]]
"""Bytes of each of ``LIVE_CLASSES`` by device index; None for a class that was not visited completely."""


def measure_classes(torch: Any, device_type: str, search_seconds: float = 0.0) -> BytesByClass:
    """Visit the tensors on devices of a kind such as ``cuda``.

    ``search_seconds``: time limit for a search of the heap, which finds the other tensors; 0 for no search. A search
    pauses the other threads, and raises TensorsBusy.
    """
    visit = _Visit(device_type)
    with (
        tensors_unchanged() if search_seconds else nullcontext(),
        torch._C.DisableTorchFunctionSubclass(),  # a subclass of Tensor could run code of the program
    ):
        deadline = time.thread_time() + search_seconds
        tensors = search_heap(torch, deadline) if search_seconds else None
        if TORCH_OBJECTS.is_complete:
            visit.add_registered(time.thread_time() + VISIT_SECONDS)
            if tensors is not None:
                visit.add_next_class(_with_gradients(_existing_objects(tensors)), deadline + VISIT_SECONDS)
        return visit.bytes_by_class()


def annotate(torch: Any, device_type: str, snapshot: Mapping[str, Any]) -> None:
    """Add the class of each parameter, gradient, optimizer state and buffer to its block in a memory snapshot, and to
    the allocation in its history, as ``user_metadata``, which follows that of the program. Raises TensorsBusy.
    """
    read_address = getattr(torch._C, "_data_address", None)
    if read_address is None:
        return
    visit = _Visit(device_type, read_address)
    with tensors_unchanged(), torch._C.DisableTorchFunctionSubclass():
        if not TORCH_OBJECTS.is_complete:
            search_heap(torch, time.thread_time() + HEAP_SEARCH_SECONDS)
        if TORCH_OBJECTS.is_complete:
            visit.add_registered(time.thread_time() + VISIT_SECONDS)
    blocks = {block.get("address"): block for segment in snapshot["segments"] for block in segment["blocks"]}
    newest = (
        {each["addr"]: each for each in trace if each["action"] == "alloc"} for trace in snapshot["device_traces"]
    )
    for entries in (blocks, *newest):
        for address in entries.keys() & visit.addresses.keys():
            names = (entries[address].get("user_metadata"), visit.addresses[address])
            entries[address]["user_metadata"] = ": ".join(filter(None, names))


def search_heap(torch: Any, deadline: float = float("inf")) -> list[Reference] | None:
    """Return the tensors that the garbage collector tracks, and complete the modules and optimizers with those that are
    older than the agent; None if that would take too long, or if objects are excluded from the collector's list.
    """
    TORCH_OBJECTS.install()
    if sys.getallocatedblocks() > MAX_HEAP_SEARCH_BLOCKS or gc.get_freeze_count() > MAX_FROZEN_AT_START:
        return None
    tracked = _tracked_objects(torch, deadline)
    if tracked is None:
        return None
    optimizers, modules, tensors = tracked
    TORCH_OBJECTS.add(_existing_objects(modules), _existing_objects(optimizers))
    return tensors


def _tracked_objects(torch: Any, deadline: float) -> tuple[list[Reference], ...] | None:
    """Return the optimizers, modules and tensors that the garbage collector tracks; None if time runs out.

    The other threads are paused: they fail to build a tuple that the list of all objects refers to.
    """
    type_index = _TypeIndex(torch)
    references: tuple[list[Reference], ...] = ([], [], [])
    objects = gc.get_objects()
    for start in range(0, len(objects), CHUNK_OBJECTS):
        if time.thread_time() > deadline:
            return None
        chunk = objects[start : start + CHUNK_OBJECTS]
        for obj in compress(chunk, map(type_index.__getitem__, map(type, chunk))):
            try:
                references[type_index[type(obj)] - 1].append(weakref.ref(obj))
            except TypeError:  # a subclass without weak references
                continue
    return references


def _existing_objects(references: Iterable[Reference]) -> Iterator[Any]:
    """Yield the objects that exist, and refer to one at a time."""
    return (existing for reference in references if (existing := reference()) is not None)


def tracked_tensors(torch: Any, device_type: str) -> list[TrackedTensor]:
    """Return all tensors on devices of a kind, each with the size of its storage. Raises TensorsBusy."""
    tracked: list[TrackedTensor] = []
    storages: set[int] = set()
    with tensors_unchanged(), torch._C.DisableTorchFunctionSubclass():
        _, _, tensors = _tracked_objects(torch, float("inf")) or ((), (), ())
        for tensor in _existing_objects(tensors):
            try:
                storage = tensor.untyped_storage()
                if storage.device.type == device_type:
                    is_counted = storage._cdata in storages or _is_wrapper(tensor)
                    size = 0 if is_counted else storage.nbytes()
                    storages.add(storage._cdata)
                    tracked.append(TrackedTensor(tensor, size, not tensor.is_leaf))
            except Exception:  # a tensor without a storage
                continue
    return tracked


def classes_of_device(measured: BytesByClass, ordinal: int, allocator: str, uuid: str, live_bytes: int) -> LiveClasses:
    """Return the classes of one device, with the rest. ``live_bytes`` is the allocator's count."""
    sizes = measured.get(ordinal, measured[ANY_OTHER_DEVICE])
    remainder = live_bytes - sum(size or 0 for size in sizes)
    parameters, gradients, optimizer, buffers, tensors = sizes
    return LiveClasses(
        allocator=allocator,
        device_uuid=uuid,
        live_bytes=live_bytes,
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        buffers_bytes=buffers,
        tensors_bytes=tensors,
        activations_bytes=None if None in sizes else max(0, remainder),
        excess_bytes=max(0, -remainder),
    )


ANY_OTHER_DEVICE = -1
"""Index of a device without tensors: 0 for each class that was visited."""


class _TypeIndex(dict[type, int]):
    """Maps a type to its number among the bases plus 1, and other types to 0. Called from C for each object."""

    def __init__(self, torch: Any) -> None:
        self._bases = (torch.optim.Optimizer, torch.nn.Module, torch.Tensor)

    def __missing__(self, cls: type) -> int:
        bases = type.__getattribute__(cls, "__mro__")
        number = next((i for i, base in enumerate(self._bases, 1) if base in bases), 0)
        self[cls] = number
        return number


class _Visit:
    """One visit of all tensors. The first class that reaches a storage counts it."""

    def __init__(self, device_type: str, read_address: Callable[[Any], int] | None = None) -> None:
        self._device_type = device_type
        self._read_address = read_address
        self.addresses: dict[int, str] = {}
        """Class by the address of a storage, if addresses are read."""
        self._storages: set[int] = set()
        self._sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(LIVE_CLASSES))
        self._finished_classes = 0
        """Number of classes that were visited completely, in the order of ``LIVE_CLASSES``."""
        self._is_in_time = True
        self._slot_names = _SlotNames()

    def bytes_by_class(self) -> BytesByClass:
        unknown: list[int | None] = [None] * (len(LIVE_CLASSES) - self._finished_classes)
        visited = {ordinal: [*sizes[: self._finished_classes], *unknown] for ordinal, sizes in self._sizes.items()}
        return {**visited, ANY_OTHER_DEVICE: [0] * self._finished_classes + unknown}

    def add_registered(self, deadline: float) -> None:
        modules = [vars(module) for module in TORCH_OBJECTS.modules()]
        optimizers = [vars(optimizer) for optimizer in TORCH_OBJECTS.optimizers()]
        parameters = [*_registered_tensors(modules, "_parameters"), *_optimized_parameters(optimizers)]
        tensors_by_class = (
            parameters,
            map(_gradient, parameters),
            _optimizer_states(optimizers),
            _registered_tensors(modules, "_buffers"),
        )
        for tensors in tensors_by_class:
            self.add_next_class(tensors, deadline)

    def add_next_class(self, tensors: Iterable[Any], deadline: float) -> None:
        """Visit the next class, if the one before was finished."""
        if not self._is_in_time:
            return
        for visited, tensor in enumerate(tensors):
            if visited % TENSORS_PER_CLOCK_READING == 0 and time.thread_time() > deadline:
                self._is_in_time = False
                return
            try:
                self._add_tensor(tensor, MAX_NESTING)
            except Exception:  # a tensor without a storage, such as one of a wrapper
                continue
        self._finished_classes += 1

    def _add_tensor(self, tensor: Any, nesting: int) -> None:
        if tensor is None:
            return
        if nesting and _is_wrapper(tensor):
            for inner in (
                *vars(tensor).values(),
                *(_read_attribute(tensor, name) for name in self._slot_names[type(tensor)]),
            ):
                if hasattr(type(inner), "untyped_storage"):
                    self._add_tensor(inner, nesting - 1)
            return
        storage = tensor.untyped_storage()
        device = storage.device
        key = storage._cdata
        if device.type == self._device_type and key not in self._storages:
            self._storages.add(key)
            self._sizes[device.index or 0][self._finished_classes] += storage.nbytes()
            if self._read_address is not None:
                self.addresses[self._read_address(tensor)] = LIVE_CLASSES[self._finished_classes]


def _is_wrapper(tensor: Any) -> bool:
    """Return whether a tensor, such as FSDP's DTensor, has no memory itself: its parts have."""
    return hasattr(type(tensor), "__tensor_flatten__")


class _SlotNames(dict[type, tuple[str, ...]]):
    """Maps a type to the names of the attributes that its objects have in slots."""

    def __missing__(self, cls: type) -> tuple[str, ...]:
        slots = (vars(base).get("__slots__", ()) for base in type.__getattribute__(cls, "__mro__"))
        self[cls] = names = tuple(name for each in slots for name in ((each,) if isinstance(each, str) else each))
        return names


def _registered_tensors(modules: Iterable[Mapping[str, Any]], name: str) -> Iterator[Any]:
    """Yield the parameters or buffers that modules have registered."""
    for module in modules:
        registered = module.get(name)
        if registered is not None:  # a dictionary, or its counterpart in a module of TorchScript
            yield from list(registered.values())


def _optimized_parameters(optimizers: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for optimizer in optimizers:
        for group in optimizer.get("param_groups") or ():
            yield from _tensors_in(group.get("params"), 1)


def _gradient(tensor: Any) -> Any:
    """Return None without a gradient: reading that of the result of a differentiable function would warn."""
    return _read_attribute(tensor, "grad") if _read_attribute(tensor, "is_leaf") else None


def _with_gradients(tensors: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors that aren't results of differentiable functions, and their gradients."""
    for tensor in tensors:
        if _read_attribute(tensor, "is_leaf"):
            yield tensor
            yield _read_attribute(tensor, "grad")


def _read_attribute(tensor: Any, name: str) -> Any:
    """Return an attribute; None for a tensor without it, such as one of a transformation that has ended."""
    try:
        return getattr(tensor, name, None)
    except Exception:
        return None


def _optimizer_states(optimizers: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for optimizer in optimizers:
        yield from _tensors_in(optimizer.get("state"), MAX_NESTING)


def _tensors_in(value: Any, nesting: int) -> Iterator[Any]:
    """Yield the tensors in nested dictionaries and sequences."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value if nesting else ():
            yield from _tensors_in(item, nesting - 1)
    elif hasattr(type(value), "untyped_storage"):
        yield value
