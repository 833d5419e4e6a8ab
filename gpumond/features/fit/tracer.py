"""Runs a PyTorch program under fake tensors, and records its allocations on CUDA devices. Needs no device.

    python -m gpumond.features.fit.tracer OUT SIZE SCRIPT [ARGUMENT...]
    python -m gpumond.features.fit.tracer OUT SIZE -m MODULE [ARGUMENT...]

It executes the program until its optimizer has made ``STEPS`` steps, or to its end, and writes a JSON object to OUT:
the trace, the class of each storage, and what was assumed. SIZE: the bytes of the device that the program finds. It
uses only the standard library and the program's own PyTorch. Data and small tensors on the host have values. Others
have none: one that the program reads (``item()``) is 1.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any

STEPS = 2
ALLOCATE, FREE, STEP = "a", "f", "s"
"""Kinds of entries of a trace: ``[kind, storage, bytes]``; of a step, its number and 0."""
MAX_KNOWN_VALUES = 1 << 16
"""Size of a tensor on the host up to which it has its values: programs decide by indices, lengths, and orders."""
READ_VALUES_ASSUMPTION = "a value read from a tensor (item, numpy) is 1"


class EnoughSteps(BaseException):
    """The program has made enough steps."""


class Trace:
    """Allocations on CUDA devices in their order, and the class of each storage. ``matmul``: cuBLAS was needed.

    Without a CUDA device, PyTorch cannot differentiate fake tensors on one. Tensors are then on the CPU, and the trace
    knows those that would be on the device: ``placing`` is True during a call that creates such ones, False during one
    that moves a tensor to the CPU, and None during others, whose results are where their arguments are.
    ``dispatching``: an operator is computed, for which all tensors are on the CPU.
    """

    def __init__(self, emulated: bool = False) -> None:
        self.entries: list[tuple[str, int, int]] = []
        self.classes: dict[int, str] = {}
        self.steps = 0
        self.matmul = False
        self.emulated = emulated
        self.placing: bool | None = None
        self.dispatching = False
        self.assumptions: set[str] = set()
        self.samples: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._storage_ids: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def on_device(self, tensor: Any) -> bool:
        if not self.emulated:
            return bool(tensor.device.type == "cuda")
        return tensor.untyped_storage() in self._storage_ids

    def add(self, tensor: Any, placed: bool) -> None:
        """Note the storage of a result, once. ``placed``: an argument of the call is on the device."""
        if not self.emulated:
            placed = tensor.device.type == "cuda"
        elif self.placing is not None:
            placed = self.placing
        storage = tensor.untyped_storage()
        if not placed or storage in self._storage_ids:
            return
        storage_id = self._storage_ids[storage] = len(self.entries)
        size = storage.nbytes()
        self.entries.append((ALLOCATE, storage_id, size))
        weakref.finalize(storage, self.entries.append, (FREE, storage_id, size))

    def sample(self, tensor: Any) -> Any:
        """Return the value that the program reads from a tensor whose values are unknown."""
        return 1.0 if tensor.dtype.is_floating_point else self.samples.get(tensor.untyped_storage(), 1)

    def add_workspace(self, size_bytes: int) -> None:
        """Note memory that a kernel uses for itself."""
        storage_id = len(self.entries)
        self.entries += [(ALLOCATE, storage_id, size_bytes), (FREE, storage_id, size_bytes)]

    def mark(self, tensor: Any, name: str) -> None:
        if tensor is not None:
            storage_id = self._storage_ids.get(tensor.untyped_storage())
            if storage_id is not None:
                self.classes[storage_id] = name

    def step(self, optimizer: Any) -> None:
        """Mark parameters, gradients and the optimizer's state, and end the program after the last step.

        Raises EnoughSteps.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.mark(parameter, "parameters")
                self.mark(parameter.grad, "gradients")
        for state in optimizer.state.values():
            for value in state.values():
                if hasattr(value, "untyped_storage"):
                    self.mark(value, "optimizer")
        self.steps += 1
        self.entries.append((STEP, self.steps, 0))
        if self.steps >= STEPS:
            raise EnoughSteps

    def result(self, reason: str = "") -> dict[str, Any]:
        return {
            "entries": self.entries,
            "classes": self.classes,
            "steps": self.steps,
            "matmul": self.matmul,
            "assumptions": sorted(self.assumptions),
            "reason": reason,
        }


def value_of(tensor: Any) -> Any:
    """Return a tensor with the values of this one, None if they are unknown."""
    return tensor if not hasattr(tensor, "fake_mode") else getattr(tensor, "known_value", None)


def tracking_mode(torch: Any, trace: Trace) -> Any:
    """Return the dispatch mode that notes the results of all operators."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only

    aten = torch.ops.aten
    reads = {aten._local_scalar_dense.default, aten.item.default}
    comparisons = {aten.equal.default, aten.allclose.default}
    products = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm}
    convolution = aten.convolution
    convolutions = {convolution, aten.convolution_backward}

    def is_fake(tensor: Any) -> bool:
        return isinstance(tensor, torch._subclasses.FakeTensor)

    def is_on_host(tensors: Sequence[Any], device: Any) -> bool:
        """Return whether a call is one of the host alone: all its tensors have values, and its result is there."""
        return not (trace.placing or (device is not None and device.type != "cpu") or any(map(is_fake, tensors)))

    def map_values(function: Callable[[Any], Any], args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        on_cpu = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
        return tree_map_only(torch.Tensor, function, args), tree_map_only(torch.Tensor, function, on_cpu)

    def compute_values(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the results of an operator whose tensors have known values; none where it needs the device."""
        args, kwargs = map_values(value_of, args, kwargs)
        try:
            with unset_fake_temporarily():
                return [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        except Exception:
            return []

    def sample_value(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return an element of a result whose values are unknown. With it a program decides: whether a loss is finite,
        whether a sequence has ended.
        """

        def element(each: Any) -> Any:
            value = value_of(each)
            return torch.tensor(trace.sample(each), dtype=each.dtype) if value is None else value.flatten()[0]

        try:
            with unset_fake_temporarily():
                args, kwargs = map_values(element, args, kwargs)
                return func(*args, **kwargs).item()
        except Exception:  # the operator needs the shape: it selects or arranges
            return next((trace.sample(each) for each in tree_leaves(args) if isinstance(each, torch.Tensor)), 1)

    def is_mask(index: Any) -> bool:
        return index is not None and index.dtype is torch.bool

    def indices_of_all(mask: Any) -> list[Any]:
        """Return the indices of a mask's elements."""
        trace.assumptions.add("boolean indexing selects every element")
        return list(mask.new_empty((mask.dim(), mask.numel()), dtype=torch.int64).unbind())

    class TrackingMode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is aten._pin_memory.default:
                return args[0]
            kwargs = {**(kwargs or {})}
            kwargs.pop("pin_memory", None)
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            is_host_call = is_on_host(tensors, kwargs.get("device"))
            if is_host_call and tensors:
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            if func in reads:
                value = value_of(args[0])
                if value is not None:
                    with unset_fake_temporarily():
                        return value.item()
                trace.assumptions.add(READ_VALUES_ASSUMPTION)
                return trace.sample(args[0])
            if func in comparisons:
                return True
            if func is aten.masked_select.default:
                func, args = aten.index.Tensor, (args[0], [args[1].expand_as(args[0])])
            if func is aten.index.Tensor and any(map(is_mask, args[1])):
                indices: list[Any] = []
                with self:
                    for each in args[1]:
                        indices += indices_of_all(each) if is_mask(each) else [each]
                    return func(args[0], indices)
            if func is aten.nonzero.default:
                with self:
                    return torch.stack(indices_of_all(args[0]), 1)
            must_decompose = torch.is_inference_mode_enabled() and func is not torch.ops.prim.device.default
            if must_decompose:  # otherwise autograd has decomposed it
                with self:
                    result = func.decompose(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            are_values_known = all(value_of(each) is not None for each in tensors)
            outer, trace.dispatching = trace.dispatching, True
            try:
                result = func(*args, **kwargs)
            finally:
                trace.dispatching = outer
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            values: list[Any] = []
            if are_values_known and (results or tensors) and sum(each.numel() for each in results) <= MAX_KNOWN_VALUES:
                values = compute_values(func, args, kwargs)
                if is_host_call and values:
                    return values[0] if isinstance(result, torch.Tensor) else type(result)(values)
            elif func._schema.is_mutable:
                for each in tensors:
                    each.known_value = None
            trace.matmul |= func.overloadpacket in products
            is_on_device = trace.emulated and any(map(trace.on_device, tensors))
            for each, value in zip_longest(results, values):
                trace.add(each, is_on_device)
                each.known_value = value
                if not each.dtype.is_floating_point:
                    trace.samples[each.untyped_storage()] = sample_value(func, args, kwargs)
            if func.overloadpacket in convolutions:
                trace.add_workspace(convolution_workspace(torch, func.overloadpacket is convolution, result, args))
            return result

    return TrackingMode()


def convolution_workspace(torch: Any, is_forward: bool, result: Any, args: Sequence[Any]) -> int:
    """Return the workspace of cuDNN: its kernels for tensor cores read and write copies with the channels last.

    So it does on an H100 with PyTorch 2.11, apart from some images with few channels. A convolution of single pixels
    needs no copies.
    """
    if is_forward:
        image, weight, *_, groups = args
        output = result
    else:
        output, image, weight, *_, groups, _ = args
    is_pointwise = all(size == 1 for size in weight.shape[2:])
    if image.dim() != 4 or is_pointwise or groups != 1 or image.is_contiguous(memory_format=torch.channels_last):
        return 0
    return sum(each.numel() * each.element_size() for each in (image, weight, output))


def device_mode(torch: Any, trace: Trace) -> Any:
    """Return the function mode that keeps tensors on the CPU, and tells the trace and the program where they are."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors
    from torch.utils._pytree import tree_map_only

    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    is_cuda = torch.Tensor.is_cuda.__get__
    fake = torch._subclasses.FakeTensor
    device_of = fake.device.fget
    fake.device = property(lambda self: device_of(self) if trace.dispatching or not trace.on_device(self) else gpu)
    float32 = frozenset(FLOAT32_OPERATORS.split())
    moves = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}
    constructors = _device_constructors()
    default: Any = None

    def set_default_device(device: Any) -> None:
        nonlocal default
        default = None if device is None else torch.device(device)

    torch.set_default_device, torch.get_default_device = set_default_device, lambda: default or cpu
    generator, load = torch.Generator, torch.load
    torch.Generator = type("Generator", (generator,), {"__new__": lambda cls, device="cpu": generator.__new__(cls)})

    def load_from_file(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = load(file, "cpu", *args, **kwargs)
        locations = map_location.values() if isinstance(map_location, dict) else [map_location]
        placed = any(type(location) is int or device_kind(location) == "cuda" for location in locations)
        return tree_map_only(torch.Tensor, lambda each: each.to(gpu), result) if placed else result

    torch.load = load_from_file

    def is_half(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)

    def device_kind(value: Any) -> str:
        """Return the kind of device that an argument names, empty for another argument."""
        if isinstance(value, torch.device):
            return str(value.type)
        return value.partition(":")[0] if isinstance(value, str) and value.startswith(("cuda", "cpu")) else ""

    class EmulatedDevice(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.device:
                return func("cuda", *args) if args and isinstance(args[0], int) else func(*args, **kwargs)
            if func == is_cuda:
                return trace.on_device(args[0])
            if func is torch.Tensor.get_device:
                return 0 if trace.on_device(args[0]) else -1
            if func is torch.Tensor.record_stream:
                return None
            if isinstance(kwargs.get("device"), int):
                kwargs["device"] = gpu
            elif default is not None and func in constructors and kwargs.get("device") is None:
                kwargs["device"] = default
            if func is torch.Tensor.to and len(args) > 1:
                target, *rest = args[1:]
                if isinstance(target, torch.Tensor):
                    target, rest = gpu if trace.on_device(target) else cpu, [target.dtype, *rest]
                args = (args[0], gpu if isinstance(target, int) else target, *rest)
            if func is torch.Tensor.backward:
                gradient = kwargs.pop("gradient", None)
                with self:  # checkpointed functions run again in the backward pass
                    return torch.autograd.backward(args[0], *(args[1:] or (gradient,)), **kwargs)
            if torch.is_autocast_enabled("cpu") and getattr(func, "__name__", "").strip("_") in float32:
                args = [value.float() if is_half(value) else value for value in args]
            kinds = {*map(device_kind, args[1:] if func in moves else args), device_kind(kwargs.get("device"))} - {""}
            if func is torch.Tensor.cuda:
                kinds, func, args = {"cuda"}, torch.Tensor.to, (args[0], cpu)
            elif func is torch.Tensor.cpu:
                kinds = {"cpu"}
            if func is torch._C._nn._parse_to:  # it only reads the arguments of Module.to
                return func(*(gpu if type(value) is int else value for value in args), **kwargs)
            if not kinds:
                return func(*args, **kwargs)
            before, trace.placing = trace.placing, "cuda" in kinds
            try:
                args = [cpu if device_kind(value) == "cuda" else value for value in args]
                if device_kind(kwargs.get("device")) == "cuda":
                    kwargs["device"] = cpu
                result = func(*args, **kwargs)
                if func in moves and trace.on_device(result) is not trace.placing:
                    result = result.clone()  # PyTorch has returned the same tensor
                return result
            finally:
                trace.placing = before

    return EmulatedDevice()


def emulate_cuda_choices(torch: Any, trace: Trace) -> None:
    """Make the choices that PyTorch makes for CUDA tensors: optimizers on lists of tensors, autocast to float16."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.optim") and hasattr(module, DEFAULT_KERNELS):
            setattr(
                module, DEFAULT_KERNELS, lambda params, differentiable, use_fused=False: (False, not differentiable)
            )

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    torch.nn.functional.dropout = dropout  # on a CUDA device, its mask has one byte for each value
    emulate_attention(torch, trace)
    # Whether gradients overflow is a value on the device: they do not.
    torch.amp.GradScaler._maybe_opt_step = lambda self, optimizer, state, *args, **kwargs: optimizer.step(
        *args, **kwargs
    )
    original = torch.autocast.__init__

    def initialize(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enabled", args[0] if args else True):
            trace.assumptions.add("autocast is emulated without a GPU: the peak can be too high")
        half = torch.float16 if device_type == "cuda" and dtype is None else dtype
        original(self, "cpu" if device_type == "cuda" else device_type, half, *args, **kwargs)

    torch.autocast.__init__ = initialize


def emulate_attention(torch: Any, trace: Trace) -> None:
    """Choose the attention kernels of a CUDA device. Only the last keeps a weight for each pair of positions: the one
    for keys of several queries in 32 bits.
    """
    aten, original = torch.ops.aten, torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.dim() != 4 or not trace.on_device(query):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
        if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if enable_gqa:
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
            )[0]
        if attn_mask is not None:
            if attn_mask.dtype is torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:-1], key.size(-2))
        needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]

    torch.nn.functional.scaled_dot_product_attention = attention


FLOAT32_OPERATORS = """
binary_cross_entropy_with_logits cosine_similarity cross_entropy cumprod cumsum exp group_norm kl_div l1_loss layer_norm
log log10 log1p log2 log_softmax mse_loss nll_loss norm normalize pow prod reciprocal rsqrt smooth_l1_loss softmax
softplus sum
"""
"""Operators that autocast computes in 32 bits on CUDA devices, from PyTorch's list."""
DEFAULT_KERNELS = "_default_to_fused_or_foreach"
"""The function of torch.optim that chooses between an optimizer's implementations."""


class Stream:
    """A stream or an event on which nothing waits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 1.0

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def emulate_cuda(torch: Any, size_bytes: int) -> None:
    """Let the program find one CUDA device, of which nothing is used."""
    properties = type("Properties", (), {"total_memory": size_bytes, "major": 9, "minor": 0, "name": "fake device"})()
    properties.multi_processor_count = 132
    constants = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "fake device",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "memory_stats": {},
        "memory_summary": "",
        "mem_get_info": (size_bytes, size_bytes),
        "get_rng_state": torch.get_rng_state(),
        "get_rng_state_all": [torch.get_rng_state()],
        "is_current_stream_capturing": False,
    }
    without_effect = """_lazy_init init set_device set_stream synchronize empty_cache ipc_collect manual_seed
    manual_seed_all seed seed_all set_rng_state set_rng_state_all reset_peak_memory_stats
    reset_accumulated_memory_stats set_per_process_memory_fraction"""
    replace_functions(torch.cuda, constants | dict.fromkeys(without_effect.split()))
    replace_functions(torch.cuda.memory, dict.fromkeys(("_record_memory_history", "_dump_snapshot")))
    replace_functions(torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark")))
    torch.cuda.Stream = torch.cuda.ExternalStream = torch.cuda.Event = Stream
    for name in ("stream", "current_stream", "default_stream", "device"):
        setattr(torch.cuda, name, Stream)
    if hasattr(torch, "accelerator"):
        answers = {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": 1}
        answers |= dict.fromkeys(("current_device_index", "current_device_idx"), 0)
        answers |= dict.fromkeys(("synchronize", "set_device_index", "set_device_idx", "set_stream", "empty_cache"))
        replace_functions(torch.accelerator, answers | {"current_stream": Stream()})


def replace_functions(module: Any, answers: Mapping[str, Any]) -> None:
    """Replace functions with ones that return these values."""
    for name, value in answers.items():
        setattr(module, name, lambda *args, value=value, **kwargs: value)


def emulate_host(torch: Any, trace: Trace) -> None:
    """Let the program read values into NumPy, and save none: a checkpoint would hold fake values."""
    from torch.utils._python_dispatch import _disable_current_modes

    def array(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = value_of(self)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if value is not None:
                return value.detach().numpy()
            trace.assumptions.add(READ_VALUES_ASSUMPTION)
            return torch.ones(tuple(self.shape), dtype=self.dtype).numpy()

    torch._subclasses.FakeTensor.numpy = array
    torch.save = lambda *args, **kwargs: None


def replace_parameters(torch: Any) -> None:
    """Move modules to a device by new parameters: fake ones cannot be changed in place. Shared ones stay shared."""
    module = torch.nn.Module
    moved: dict[int, tuple[Any, Any]] = {}

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(fn)
        for key, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    applied = moved[id(parameter)][1] if id(parameter) in moved else fn(parameter)
                if applied is not parameter:
                    if id(parameter) not in moved:
                        applied = torch.nn.Parameter(applied, parameter.requires_grad)
                        moved[id(parameter)] = parameter, applied
                    self._parameters[key] = applied
        for key, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[key] = fn(buffer)
        return self

    module._apply = apply


def emulate_distributed(torch: Any) -> None:
    """Let a program of one rank initialize its process group."""
    distributed = torch.distributed
    if not distributed.is_available():
        return
    original = distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        original(backend="fake", rank=0, world_size=1, store=FakeStore())

    distributed.init_process_group = init_process_group


def replicate_locally(torch: Any, trace: Trace) -> None:
    """Replace ``DistributedDataParallel``, whose reducer reads values, with a module with the memory of its buckets."""

    def flat_buckets(tensors: Sequence[Any], limit_bytes: float) -> list[Any]:
        """Return flat tensors that hold these, each of at least the limit except the last."""
        buckets, values = [], 0
        for count, tensor in enumerate(tensors, 1):
            values += tensor.numel()
            if count == len(tensors) or values * tensor.element_size() >= limit_bytes:
                buckets.append(tensor.new_empty(values))
                values = 0
        return buckets

    class DistributedDataParallel(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, module: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.module, self.require_backward_grad_sync = module, True
            parameters = [each.detach() for each in module.parameters() if each.requires_grad]
            self.sent = flat_buckets(parameters, 250 * 2**20)  # the collective keeps what it has sent until a later one
            view = kwargs.get("gradient_as_bucket_view")  # then the gradients are the buckets
            self.buckets = [] if view else flat_buckets(parameters[::-1], (kwargs.get("bucket_cap_mb") or 25) * 2**20)
            for each in self.buckets:
                trace.mark(each, "gradients")

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if trace.steps:
                self.sent = []
            return self.module(*args, **kwargs)

        def no_sync(self) -> Any:
            return nullcontext()

    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
    torch.nn.parallel.distributed.DistributedDataParallel = DistributedDataParallel


def use_single_process_loaders(torch: Any) -> None:
    """Load batches in this process: a worker cannot return a fake tensor."""
    loader = torch.utils.data.DataLoader
    original = loader.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            kwargs.pop(name, None)
        original(self, *args, **kwargs | {"num_workers": 0, "pin_memory": False})

    loader.__init__ = initialize


def run(arguments: Sequence[str], size_bytes: int) -> dict[str, Any]:
    """Run the program and return its trace; ``reason`` states why it could not be traced."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.optim.optimizer import register_optimizer_step_post_hook
    except ImportError as error:
        return Trace().result(f"PyTorch isn't installed for the program's Python, or is too old ({error})")
    trace = Trace(emulated=not torch.cuda.is_available())
    emulate_cuda(torch, size_bytes)
    emulate_host(torch, trace)
    if trace.emulated:
        emulate_cuda_choices(torch, trace)
    emulate_distributed(torch)
    replicate_locally(torch, trace)
    use_single_process_loaders(torch)
    replace_parameters(torch)
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: trace.step(optimizer))
    module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if module else arguments)
    if not module:
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), tracking_mode(torch, trace):
            device = device_mode(torch, trace) if trace.emulated else nullcontext()
            with device:
                if module:
                    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
                else:
                    runpy.run_path(arguments[0], run_name="__main__")
    except EnoughSteps:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            return trace.result(f"the program exited with status {end.code!r:.80}")
    except BaseException as error:
        return trace.result(f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' …')}")
    if all(kind != ALLOCATE for kind, _, _ in trace.entries):
        return trace.result("the program allocated nothing on a CUDA device")
    return trace.result()


def main() -> int:
    out, size, *arguments = sys.argv[1:]
    result = run(arguments, int(size))
    Path(out).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    os._exit(main())  # without the exit handlers of the program, which would see fake tensors
