"""Classes of live bytes, on tensors of the real PyTorch in host memory, and through the adapter on a fake.

test_live_classes.py runs these tests in a process of their own: agents of other tests would find PyTorch.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpumond.agent.allocators import torch_live_classes
from gpumond.agent.allocators.torch_live_classes import ANY_OTHER_DEVICE, LIVE_CLASSES
from gpumond.agent.allocators.torch_objects import TORCH_OBJECTS
from gpumond.facts.program import LiveClasses

TORCH_OBJECTS.install()  # as gpumond.agent.start() does

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # NumPy is missing
    import torch

LONG = 600.0
"""Seconds that suffice on any machine."""
Sizes = dict[str, int | None]


def measured(search_seconds: float = LONG) -> Sizes:
    if search_seconds:
        gc.collect()
    found = torch_live_classes.measure_classes(torch, "cpu", search_seconds)
    return dict(zip(LIVE_CLASSES, found.get(0, found[ANY_OTHER_DEVICE]), strict=True))


def growth(before: Sizes) -> dict[str, int]:
    grown = {name: (size or 0) - (before[name] or 0) for name, size in measured().items()}
    return {name: size for name, size in grown.items() if size}


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the storages of tensors, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def states(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class Sums:
    """The program's own sums of its model and its optimizer. The model before it is in no class anymore."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, before: Sizes) -> None:
        self._model, self._optimizer, self._before = model, optimizer, before

    def check(self) -> None:
        found = measured(0.0)
        assert found.pop("tensors") is None
        updated = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        parameters = [*self._model.parameters(), *updated]
        assert {name: (size or 0) - (self._before[name] or 0) for name, size in found.items()} == {
            "parameters": bytes_of(parameters),
            "gradients": bytes_of(parameter.grad for parameter in parameters),
            "optimizer": bytes_of(states(self._optimizer)),
            "buffers": bytes_of(self._model.buffers()),
        }


def layers() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters()), torch.ones(4, 64)


class Encoder(torch.nn.Module):
    """As BERT is: its output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)  # copies of the layer
        self.output = torch.nn.Linear(32, 100, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(16))
        self.scales = torch.nn.ParameterList([torch.ones(32), torch.ones(32)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.output(self.encoder(self.embedding(tokens) * self.scales[0]))
        return result


def encoder() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = Encoder()
    return model, torch.optim.AdamW(model.parameters(), foreach=True), torch.zeros(2, 16, dtype=torch.long)


def convolutions() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    blocks = [torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU()) for _ in range(5)]
    model = torch.nn.Sequential(*blocks).to(memory_format=torch.channels_last)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.ones(2, 3, 32, 32)


def adagrad() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Its state exists before the first step."""
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.Adagrad(model.parameters()), torch.ones(4, 64)


def compiled() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model, optimizer, batch = layers()
    return torch.compile(model, backend="eager"), optimizer, batch  # type: ignore[return-value]


@pytest.mark.parametrize("program", [layers, encoder, convolutions, adagrad, compiled])
def test_registered_classes_equal_the_sums_of_the_program_at_any_moment(program: Callable[[], Any]):
    imported = [[{}, [], ()] for _ in range(250_000)]  # as many objects as after many imports
    gc.collect()
    before = measured(0.0)
    model, optimizer, batch = program()
    sums = Sums(model, optimizer, before)
    sums.check()
    for _ in range(2):
        loss = model(batch).sum()
        sums.check()
        loss.backward()
        sums.check()
        optimizer.step()
        sums.check()
    optimizer.zero_grad(set_to_none=False)
    sums.check()
    optimizer.zero_grad(set_to_none=True)
    sums.check()
    loaded = type(optimizer)(model.parameters(), lr=0.1)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del optimizer, sums
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, assign=True)
    Sums(model, loaded, before).check()
    model.double()
    Sums(model, loaded, before).check()
    del model, loaded, loss, batch
    torch._dynamo.reset() if "torch._dynamo" in sys.modules else None
    gc.collect()
    assert measured(0.0) == before
    assert imported


@pytest.mark.parametrize("way", ["copied", "unpickled", "loaded", "scripted"])
def test_modules_that_no_constructor_made_are_known(way: str, tmp_path: Path):
    original = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.BatchNorm1d(10))
    before = measured(0.0)
    if way == "copied":
        copied = copy.deepcopy(original)
    elif way == "unpickled":
        copied = pickle.loads(pickle.dumps(original))  # noqa: S301
    elif way == "loaded":
        torch.save(original, tmp_path / "model")
        copied = torch.load(tmp_path / "model", weights_only=False)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated
            torch.jit.script(original).save(tmp_path / "model")
            copied = torch.jit.load(tmp_path / "model")
    found = {name: size for name, size in growth({**before, "tensors": None}).items() if name != "tensors"}
    assert found == {"parameters": 4 * 130, "buffers": 4 * 20 + 8}
    assert copied


def test_free_parameters_of_an_optimizer_are_parameters():
    before = measured(0.0)
    weight = torch.ones(100, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    found = measured(0.0)
    assert [(found[name] or 0) - (before[name] or 0) for name in LIVE_CLASSES[:3]] == [400, 400, 400]


class Wrapped(torch.Tensor):
    """As DTensor: the tensor has no memory, and its parts have. The second one is in a slot."""

    __slots__ = ("local",)

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, (1000,), dtype=inner.dtype)
        made.inner, made.local = inner, inner + 1
        return made

    def __tensor_flatten__(self) -> Any:
        raise AssertionError("code of the program was called")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Wrapped(func(*(arg.inner if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {})))


def test_wrapper_counts_with_the_bytes_of_its_parts():
    before = measured(0.0)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(Wrapped(torch.zeros(10)))
    assert (measured(0.0)["parameters"] or 0) - (before["parameters"] or 0) == 80
    wrapper = [size for tensor, size, _ in torch_live_classes.tracked_tensors(torch, "cpu") if tensor is module.weight]
    assert wrapper == [0], "its parts are listed, too"


def test_modules_can_be_created_inside_compiled_code():
    """torch.compile cannot trace weak references."""

    class Scaling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(3))
            self.inner = torch.nn.Sequential(torch.nn.ReLU())

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(values) * self.factor
            return result

    compiled = torch.compile(lambda values: Scaling()(values), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2


def test_modules_are_referred_to_weakly():
    before = len(TORCH_OBJECTS.modules())
    modules = [torch.nn.Linear(1, 1) for _ in range(100)]
    assert len(TORCH_OBJECTS.modules()) == before + 100
    del modules
    gc.collect()
    assert len(TORCH_OBJECTS.modules()) == before


def test_training_with_adam_is_exact_to_the_byte():
    before = measured()
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10))
    size = 4 * (64 * 32 + 32 + 32 + 32 + 32 * 10 + 10)
    buffers = 4 * 32 * 2 + 8
    assert growth(before) == {"parameters": size, "buffers": buffers}
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    steps = 4 * 6
    assert growth(before) == {
        "parameters": size,
        "gradients": size,
        "optimizer": 2 * size + steps,
        "buffers": buffers,
    }
    optimizer.zero_grad(set_to_none=True)
    assert growth(before) == {"parameters": size, "optimizer": 2 * size + steps, "buffers": buffers}


def test_blocks_of_a_snapshot_and_their_allocations_name_the_class():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    moment = optimizer.state[model.weight]["exp_avg"]
    own = {"weight": model.weight, "grad": model.weight.grad, "moment": moment, "other": torch.ones(64)}
    addresses = {name: tensor.untyped_storage().data_ptr() for name, tensor in own.items()}
    blocks = [{"address": address} for address in addresses.values()]
    torch_live_classes.annotate(torch, "cpu", {"segments": [{"blocks": blocks}], "device_traces": []})
    assert [block.get("user_metadata") for block in blocks] == ["parameters", "gradients", "optimizer", None]
    scope = {"action": "alloc", "addr": addresses["moment"], "user_metadata": "epoch/update"}
    before = {"action": "alloc", "addr": addresses["moment"]}
    snapshot = {"segments": [{"blocks": [{"size": 512}]}], "device_traces": [[before, scope]]}
    torch_live_classes.annotate(torch, "cpu", snapshot)
    assert (scope["user_metadata"], before.get("user_metadata")) == ("epoch/update: optimizer", None)


def test_views_share_their_storage():
    before = measured()
    whole = torch.zeros(1000)
    views = [whole[i : i + 500] for i in range(20)] + [whole.view(10, 100), whole.detach()]
    tied = torch.nn.Linear(10, 10, bias=False)
    other = torch.nn.Linear(10, 10, bias=False)
    other.weight = tied.weight
    assert growth(before) == {"tensors": 4000, "parameters": 400}
    assert views


def test_results_of_differentiable_functions_are_in_no_class():
    before = measured()
    weight = torch.ones(1000, requires_grad=True)
    result = (weight.exp().sin().cos()).sum()  # keeps the arguments of each function
    assert growth(before) == {"tensors": 4000}
    assert result is not None


def test_subclasses_run_no_code_of_the_program():
    calls = []

    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return super().__torch_function__(*args, **kwargs)

    kept = torch.ones(1000).as_subclass(Mine)
    calls.clear()
    before = measured()
    assert before["tensors"] >= 4000
    assert calls == []
    assert kept is not None


@pytest.mark.parametrize("device", ["meta"])
def test_tensors_of_other_devices_do_not_count(device: str):
    before = measured()
    kept = [torch.zeros(1000, device=device), torch.nn.Linear(10, 10, device=device)]
    assert growth(before) == {}
    assert kept


def test_frozen_objects_are_not_searched_and_their_class_is_unknown():
    kept = torch.zeros(100)
    gc.freeze()
    try:
        found = measured()
    finally:
        gc.unfreeze()
    assert found["tensors"] is None
    assert None not in [found[name] for name in LIVE_CLASSES[:4]]
    assert kept is not None


def test_class_that_is_not_finished_in_time_is_unknown():
    kept = torch.nn.Linear(10, 10)
    visit = torch_live_classes._Visit("cpu")
    visit.add_registered(time.thread_time())
    assert visit.bytes_by_class()[ANY_OTHER_DEVICE] == [None] * 5
    assert torch_live_classes.search_heap(torch, time.thread_time()) is None
    assert kept


@pytest.mark.parametrize(
    ("sizes", "live", "activations", "excess", "unknown"),
    [
        ((10, 10, 20, 1, 5), 100, 54, 0, 0),
        ((10, 10, 20, 1, 5), 40, 0, 6, 0),  # some belong to another allocator
        ((10, 10, 20, 1, None), 100, None, 0, 59),
        ((10, 10, 20, 1, None), 40, None, 1, 0),
        ((10, None, None, None, None), 100, None, 0, 90),
        ((None, None, None, None, None), 100, None, 0, 100),
    ],
)
def test_unknown_classes_are_not_added_to_others(
    sizes: Sequence[int | None], live: int, activations: int | None, excess: int, unknown: int
):
    found = {0: sizes, ANY_OTHER_DEVICE: [None if size is None else 0 for size in sizes]}
    classes = torch_live_classes.classes_of_device(found, 0, "torch", "GPU-0", live)
    assert (classes.activations_bytes, classes.excess_bytes, classes.unknown_bytes) == (activations, excess, unknown)
    assert total(classes) + unknown == live + excess
    nothing = torch_live_classes.classes_of_device(found, 1, "torch", "GPU-1", live)
    assert total(nothing) + nothing.unknown_bytes == live


def total(classes: LiveClasses) -> int:
    sizes = (
        classes.parameters_bytes,
        classes.gradients_bytes,
        classes.optimizer_bytes,
        classes.buffers_bytes,
        classes.tensors_bytes,
        classes.activations_bytes,
    )
    return sum(size or 0 for size in sizes)
