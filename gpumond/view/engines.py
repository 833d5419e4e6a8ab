"""Serving engines of a frame: the use of their KV cache in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpumond.facts.program import ProcessKey
from gpumond.facts.units import human

Engine = Mapping[str, Any]


def engines_by_process(frame: Mapping[str, Any]) -> dict[ProcessKey, Engine]:
    return {
        ProcessKey(process["pid"], process["start_ticks"]): engine
        for engine in frame["snapshot"].get("engines", ())
        for process in engine["processes"]
    }


def kv_cache_bytes(engine: Engine, of_bytes: int | None) -> int | None:
    """Return the size of the engine's KV cache; None if it is unknown, or cannot be a part of ``of_bytes``."""
    stated = engine.get("kv_cache_bytes")
    return stated if stated and not engine["asleep"] and stated <= (of_bytes or 0) else None


def holder(process: Mapping[str, Any]) -> str:
    """Return the share that contains the KV cache: without an agent all memory of a process is opaque."""
    return "opaque" if process["live_bytes"] is None else "live"


def kv_cache_sentences(frame: Mapping[str, Any]) -> dict[tuple[str, ProcessKey], str]:
    """Return, by device and process, which part of its memory is KV cache and is in use, as far as it is known.

    The size is that of the whole engine, so it is stated only if one process on one device holds it.
    """
    engines = engines_by_process(frame)
    places = [(each, ProcessKey(each["pid"], each["start_ticks"])) for each in frame["processes"]]
    parts = Counter(engines[key]["name"] for _, key in places if key in engines)
    found: dict[tuple[str, ProcessKey], str] = {}
    for process, key in places:
        engine = engines.get(key)
        if engine is None or engine["asleep"] or engine["kv_cache_used_ratio"] is None:
            continue
        alone, share = parts[engine["name"]] == 1, process[f"{holder(process)}_bytes"]
        stated = kv_cache_bytes(engine, share) if alone else None
        size = "" if stated is None else f"{human(stated)}, "
        found[process["device_uuid"], key] = f"of which KV cache {size}{engine['kv_cache_used_ratio']:.0%} in use"
    return found
