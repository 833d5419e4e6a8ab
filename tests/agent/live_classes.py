"""Classes of live bytes, on tensors of the real PyTorch in host memory, and through the adapter on a stand-in.

test_live_classes.py runs these tests in a process of their own: agents of other tests would find PyTorch.
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from gpumond.agent.adapters import torch_classes
from gpumond.agent.adapters.torch_classes import CLASSES, ClassBytes
from gpumond.model.program import LiveClasses

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # NumPy is missing
    import torch

LONG = 600.0
"""Seconds that suffice on any machine."""


def measured(seconds: float = LONG) -> dict[str, int]:
    gc.collect()
    found = torch_classes.measure(torch, "cpu", seconds)
    assert found is not None
    return dict(zip(CLASSES, found.devices.get(0, [0] * len(CLASSES)), strict=True))


def growth(before: dict[str, int]) -> dict[str, int]:
    return {name: size - before[name] for name, size in measured().items() if size != before[name]}


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


def test_sample_states_that_it_is_one():
    kept = [torch.zeros(100) for _ in range(20_000)]
    objects, complete = torch_classes._torch_objects(torch, gc.get_objects(), math.inf)
    assert complete
    assert torch_classes._Visit("cpu", 0.0).classify(objects, complete).exactness == "sampled"
    assert torch_classes._Visit("cpu", math.inf).classify(objects, complete).exactness == "exact"
    assert kept


def test_frozen_objects_are_not_visited_and_it_is_stated():
    kept = torch.zeros(100)
    gc.freeze()
    try:
        found = torch_classes.measure(torch, "cpu", LONG)
        assert found is not None
        assert found.exactness == "sampled"
    finally:
        gc.unfreeze()
    assert kept is not None


def total(classes: LiveClasses) -> int:
    return (
        classes.parameters_bytes
        + classes.gradients_bytes
        + classes.optimizer_bytes
        + classes.buffers_bytes
        + classes.tensors_bytes
        + classes.activations_bytes
    )


@pytest.mark.parametrize(
    ("own", "exactness", "live", "tensors", "activations", "excess"),
    [
        ((10, 10, 20, 1, 5), "exact", 100, 5, 54, 0),
        ((10, 10, 20, 1, 5), "exact", 40, 5, 0, 6),  # some belong to another allocator
        ((10, 10, 20, 1, 500), "sampled", 100, 59, 0, 0),  # an estimate is limited by the count
        ((90, 30, 0, 0, 500), "sampled", 100, 0, 0, 20),
    ],
)
def test_classes_sum_to_the_live_bytes_of_the_allocator(
    own: Sequence[int], exactness: Any, live: int, tensors: int, activations: int, excess: int
):
    found = ClassBytes({0: own}, exactness)
    classes = torch_classes.live_classes(found, 0, "torch", "GPU-0", live)
    assert (classes.tensors_bytes, classes.activations_bytes, classes.excess_bytes) == (tensors, activations, excess)
    assert total(classes) == classes.live_bytes + classes.excess_bytes
    nothing = torch_classes.live_classes(found, 1, "torch", "GPU-1", live)
    assert (total(nothing), nothing.activations_bytes) == (live, live)


def test_list_of_too_many_objects_is_not_begun_and_nothing_is_stated():
    listing = torch_classes._Listing()
    assert listing.objects(0.0) is None
    assert listing.objects(LONG)
    assert sys.getallocatedblocks() * listing._seconds_per_block < LONG
    assert torch_classes.measure(torch, "cpu", 0.0) is None


def test_search_that_ends_before_a_module_is_found_states_nothing(monkeypatch: pytest.MonkeyPatch):
    kept = torch.zeros(100)
    monkeypatch.setattr(torch_classes, "CHUNK", 1)
    monkeypatch.setattr(torch_classes._LISTING, "objects", lambda seconds: [kept, kept])
    assert torch_classes.measure(torch, "cpu", 0.0) is None
    found = torch_classes.measure(torch, "cpu", LONG)
    assert found is not None
    assert found.exactness == "exact"


def test_slow_list_does_not_prevent_all_others():
    listing = torch_classes._Listing()
    listing._seconds_per_block = 1.5 * LONG / sys.getallocatedblocks()
    found = [listing.objects(LONG) for _ in range(5)]
    assert found[0] is None
    assert found[-1]
