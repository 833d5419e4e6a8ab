"""Which free chunks of a CuPy memory pool a flush returns: the whole ones.

``free_all_blocks`` gives back each free chunk that is not a piece of a larger one: neither ``prev`` nor ``next`` is set
(cupy/cuda/memory.pyx: ``_compact_index`` until CuPy 13, ``_Arena.free_all`` since). No public call tells which these
are. Until 13 the pool refers to its chunks as Python objects, which the garbage collector's traversal shows; since 14
a debugging method of the pool lists them. Either way the walk is believed only if it comes to the pool's own count.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

MAX_CHUNKS = 50_000
"""More would hold the pool's lock, and the GIL, for more than some milliseconds."""
TRIES = 3


def whole_bytes(pool: Any, ordinal: int) -> int | None:
    """Bytes of the whole free chunks on this device, which is the current one.

    None if the pool does not show them, has too many, or changes all the while. Keeps no chunk: a chunk that somebody
    refers to is not freed.
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
    except Exception:  # another version's pool, or one that changes under our hands
        return None
    return None


def _of_device(pool: Any, ordinal: int) -> Any:
    """The device's own part of the pool: in a dict until CuPy 13, in a tuple since."""
    parts = next(held for held in gc.get_referents(pool) if isinstance(held, (dict, tuple)))
    return parts[ordinal]


def _free_chunks(pool: Any) -> Iterator[Any]:
    """Of all arenas; there is one a stream."""
    for held in gc.get_referents(pool):
        for stream, arena in tuple(held.items()) if isinstance(held, dict) else ():
            if isinstance(arena, weakref.ref):
                yield from (chunk for _, chunk in _listed(pool, stream))
            elif type(arena).__name__ == "_Arena":
                (bins,) = gc.get_referents(arena)
                yield from (chunk for free in tuple(bins) if free for chunk in tuple(free))


def _listed(pool: Any, stream: int) -> list[tuple[object, Any]]:
    """What an arena of CuPy 14 lists while it holds its lock.

    Before Python 3.12 a new list may set off a collection then and there, and with it a finaliser that wants the lock.
    """
    pause = sys.version_info < (3, 12) and gc.isenabled()
    if pause:
        gc.disable()
    try:
        return pool._debug_arena_get_index(stream)  # type: ignore[no-any-return]
    finally:
        if pause:
            gc.enable()
