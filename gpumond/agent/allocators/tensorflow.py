"""TensorFlow (2.x): GPU memory statistics of its eager context.

Its best-fit allocator (BFC, the default) reports the bytes in use but not those that it holds, and keeps all memory
until the process ends. With TF_GPU_ALLOCATOR=cuda_malloc_async the bytes are in the device's default memory pool, which
`mempools` counts and trims.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpumond.agent.allocators import cuda
from gpumond.agent.allocators.mempools import KeepingAdapter, allocator_counting_default_pool, kept_pool
from gpumond.facts.pools import PoolUsage


class TensorFlowAdapter(KeepingAdapter):
    name = "tensorflow"

    def read(self, exact: bool = False) -> Sequence[PoolUsage]:
        """Read only an initialized context: the function of tf.config would initialize it and take all memory."""
        context, pywrap = _context(), sys.modules.get("tensorflow.python._pywrap_tfe")
        if context is None or pywrap is None:
            return ()
        live: defaultdict[int, int] = defaultdict(int)
        peaks: defaultdict[int, int] = defaultdict(int)
        for name, ordinal in _gpus(context):
            if cuda.has_context(ordinal):
                info = pywrap.TFE_GetMemoryInfo(context._context_handle, name)
                live[ordinal] += info["current"]
                peaks[ordinal] += info["peak"]
        return tuple(self._usages(live, peaks))

    def _usages(self, live: Mapping[int, int], peaks: Mapping[int, int]) -> Iterator[PoolUsage]:
        uses_default_pool = os.environ.get("TF_GPU_ALLOCATOR", "") == "cuda_malloc_async"
        for ordinal, current in live.items():
            uuid = cuda.device_uuid(ordinal)
            if uuid is not None:
                inside = allocator_counting_default_pool(ordinal, current) if uses_default_pool else None
                yield kept_pool("tensorflow", uuid, current, None, peaks[ordinal], inside)


def adapter() -> TensorFlowAdapter:
    return TensorFlowAdapter()


def _context() -> Any:
    """Return the eager context with its devices; None until the program has initialized it."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = module.context_safe() if module is not None else None
    return context if context is not None and context._initialized else None


def _gpus(context: Any) -> Sequence[tuple[str, int]]:
    """Return name and CUDA ordinal of each GPU in TensorFlow's division; empty if TensorFlow skips some.

    The number of a physical GPU is its CUDA ordinal. The program can hide GPUs, or divide one into several. TensorFlow
    skips a GPU that is too small without notice, and the numbers are then unknown.
    """
    server = context._server_def or context._collective_ops_server_def
    device_prefix = f"/job:{server.job_name}/replica:0/task:{server.task_index}" if server else ""
    names = [gpu.name for gpu in context._logical_devices if gpu.name.startswith(f"{device_prefix}/device:GPU:")]
    ordinals = [
        int(physical.name.rpartition(":")[2])
        for physical in context._physical_devices
        if physical.device_type == "GPU" and physical in context._visible_device_list
        for _ in context._virtual_device_map.get(physical) or (None,)
    ]
    return list(zip(names, ordinals, strict=True)) if len(names) == len(ordinals) else ()
