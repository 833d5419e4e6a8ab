"""Interface of adapters: `AllocatorAdapter` or a capability declares every public member."""

from __future__ import annotations

from importlib import import_module

import pytest

from gpumond.agent.allocators import adapters
from gpumond.agent.allocators.adapters import ADAPTERS, AllocatorAdapter

CAPABILITIES = [
    value
    for value in vars(adapters).values()
    if getattr(value, "_is_runtime_protocol", False) and value.__module__ == adapters.__name__
]


def members(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *protocol.__annotations__} if not name.startswith("_")}


def adapter_class(module: str) -> type:
    classes = vars(import_module(module)).values()
    (own,) = (
        value
        for value in classes
        if isinstance(value, type) and value.__module__ == module and AllocatorAdapter in value.__mro__
        if "name" in vars(value)
    )
    return own


@pytest.mark.parametrize("module", [spec.module for spec in ADAPTERS])
def test_adapters_declare_each_public_member(module: str) -> None:
    adapter = adapter_class(module)
    capabilities = [base for base in CAPABILITIES if base in adapter.__mro__]
    own = {name for name in vars(adapter) if not name.startswith("_")}
    declared = set().union(*map(members, capabilities))
    assert declared <= own
    assert own <= declared | members(AllocatorAdapter)
    assert own >= {"name", "read"}


def test_capabilities_of_adapters_are_found() -> None:
    assert len(CAPABILITIES) == 2
