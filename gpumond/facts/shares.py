"""What each share of a device's memory is, and what a flush does: the only place that defines them. No I/O.

The web UI (``python -m tools.docs.shares`` writes ``page/meanings.js``), ``gpumond top`` and the metrics use these
sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Share = Literal["live", "cached", "stranded", "overhead", "opaque", "unattributed"]

SHARES: tuple[Share, ...] = ("live", "cached", "stranded", "overhead", "opaque", "unattributed")

SHARE_MEANINGS: Mapping[str, str] = {
    "live": "Memory that the program has allocated and not freed, such as tensors (PyTorch: memory_allocated).",
    "cached": "Free memory that an allocator keeps for reuse; a flush returns it to the driver (PyTorch: free segments "
    "of the caching allocator).",
    "stranded": "Free memory that an allocator keeps and a flush can't release: fragmentation (PyTorch: "
    "inactive_split_bytes), private pools and arenas.",
    "overhead": "Memory of the process outside the pools of known allocators: CUDA context, libraries, workspaces, "
    "NCCL, CUDA graphs, memory imported from other processes, and caches of libraries without an adapter.",
    "opaque": "Memory that can't be broken down: all of a process without an agent, or with one that has reported no "
    "pool; a pool that doesn't count live bytes; what a process has taken since its agent's last report (usually less "
    "than a second ago).",
    "unattributed": "Used memory that the driver attributes to no process: left by an exited process, or managed "
    "memory (cudaMallocManaged) that no agent reports.",
    "free": "Memory that isn't in use.",
    "reserved": "Memory that the driver or the firmware keeps for itself (not PyTorch's memory_reserved).",
    "overcount": "Bytes by which the shares exceed the driver-reported usage, for example because "
    "the driver counts shared memory for each process.",
    "unmapped": "Memory that an allocator counts while its pages are released (sleep mode, suspended process); it "
    "isn't part of used memory.",
}
"""The shares of used memory in their order, then what else a bar of the web UI shows."""

HELD_MEANING = (
    "Memory that an allocator has taken from the driver: live, cached and stranded (PyTorch: memory_reserved)."
)
FLUSH_MEANING = (
    "A flush asks running programs to call their allocators' own release functions (PyTorch: "
    "torch.cuda.empty_cache()). Cached memory returns to the driver, and the programs keep running."
)
