"""Free chunks of a CuPy memory pool that a flush returns: the whole ones.

``free_all_blocks`` returns each free chunk that is not a piece of a larger one: neither ``prev`` nor ``next`` is set
(cupy/cuda/memory.pyx: ``_compact_index`` until CuPy 13, ``_Arena.free_all`` since). No public call lists these chunks.
Until 13 the pool refers to its chunks as Python objects, which the garbage collector's traversal finds; since 14 a
debugging method of the pool lists them. The result is used only if it agrees with the pool's own count.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

MAX_CHUNKS = 50_000
"""Largest number of chunks that are visited: more would hold the pool's lock and the GIL for many milliseconds."""
TRIES = 3


def whole_bytes(pool: Any, ordinal: int) -> int | None:
    """Return the bytes of the whole free chunks on this device, which must be the current one.

    None if the pool does not show its chunks, has too many, or keeps changing. Keeps no reference to a chunk: a chunk
    with a reference is not freed.
    """
    try:
        for _ in range(TRIES):
            if pool.n_free_blocks() > MAX_CHUNKS:
                return None
            whole = pieces = 0
            for chunk in _free_chunks(_of_device(pool, ordinal)):
                if chunk.prev is None and chunk.next is None:
                    whole += chunk.size
                else:
                    pieces += chunk.size
            if whole + pieces == pool.total_bytes() - pool.used_bytes():
                return whole
    except Exception:  # the pool of another version, or a concurrent change
        return None
    return None


def _of_device(pool: Any, ordinal: int) -> Any:
    """Return the part of the pool for one device: an item of a dict until CuPy 13, of a tuple since."""
    parts = next(held for held in gc.get_referents(pool) if isinstance(held, (dict, tuple)))
    return parts[ordinal]


def _free_chunks(pool: Any) -> Iterator[Any]:
    """Yield the free chunks of all arenas; there is one arena for each stream."""
    for held in gc.get_referents(pool):
        for stream, arena in tuple(held.items()) if isinstance(held, dict) else ():
            if isinstance(arena, weakref.ref):
                yield from (chunk for _, chunk in _listed(pool, stream))
            elif type(arena).__name__ == "_Arena":
                (bins,) = gc.get_referents(arena)
                yield from (chunk for free in tuple(bins) if free for chunk in tuple(free))


def _listed(pool: Any, stream: int) -> list[tuple[object, Any]]:
    """Return the chunks that an arena of CuPy 14 lists while it holds its lock.

    Before Python 3.12 a new list may start a garbage collection at once, and with it a finalizer that needs the lock.
    """
    pause = sys.version_info < (3, 12) and gc.isenabled()
    if pause:
        gc.disable()
    try:
        return pool._debug_arena_get_index(stream)  # type: ignore[no-any-return]
    finally:
        if pause:
            gc.enable()
