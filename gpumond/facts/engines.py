"""Serving engines, as the daemon reads them over HTTP: models, requests, KV cache, sleep. Unknown is None."""

from __future__ import annotations

from dataclasses import dataclass

from gpumond.facts.program import HasProcessKey

NOT_READ = "not read yet"
"""The problem of an engine before its first read."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """A model that the engine has loaded. ``size_bytes``: its device memory, as the engine reports it.

    ``pinned``: the engine was asked to keep it loaded indefinitely. ``context_length``: in tokens. ``aliases``: its
    other names.
    """

    name: str
    size_bytes: int | None = None
    pinned: bool = False
    context_length: int | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """Answer of an engine to one harmless read.

    ``held_bytes``: its device memory, as it states it itself, ``kv_cache_bytes``: that of its KV cache.
    ``kv_cache_used_ratio``: the part of the KV cache that requests use. ``paused``: it accepts no requests, or keeps
    them waiting. ``work``: counters that change with each request, and with nothing else. ``obstacle``: the reason why
    nothing may be released now, such as a model that is being loaded; empty without one. ``no_counts_reason``: the
    reason why the running requests are unknown, if it is known.
    """

    models: tuple[EngineModel, ...] = ()
    running: int | None = None
    waiting: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_used_ratio: float | None = None
    sleeping: bool | None = None
    paused: bool | None = None
    held_bytes: int | None = None
    work: tuple[float | str, ...] | None = None
    obstacle: str = ""
    no_counts_reason: str = ""

    @property
    def requests(self) -> int | None:
        """Running and waiting requests; None if the running ones are unknown and none is known to wait."""
        return self.waiting or None if self.running is None else self.running + (self.waiting or 0)

    @property
    def serves(self) -> bool:
        """True unless it is known that it cannot process a request now."""
        return not (self.sleeping or self.paused or self.obstacle)


@dataclass(frozen=True, slots=True)
class EngineProcess(HasProcessKey):
    pid: int
    start_ticks: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One configured serving engine: its newest state and its processes.

    ``up`` is False while it doesn't respond; ``problem`` is then the reason, and all values are unknown. ``processes``
    are the engine's processes that the driver lists; ``processes_problem`` shows why they are unknown. ``uid`` is the
    user of its listener. ``methods``: how gpumond may release its memory, empty if the configuration allows none.
    ``idle_seconds``: observed time without a request and without work of its processes on a device; None if neither the
    engine nor the driver reports it. ``out_of_service_seconds`` and ``out_of_service_reason``: for how long gpumond has
    tried to return it to service, and why it isn't serving yet; otherwise None and empty. ``pinned_uid``: the user to
    whom its secrets are sent, if the configuration names none.
    """

    name: str
    kind: str
    up: bool
    problem: str = ""
    age_seconds: float | None = None
    models: tuple[EngineModel, ...] = ()
    running: int | None = None
    waiting: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_used_ratio: float | None = None
    sleeping: bool | None = None
    paused: bool | None = None
    held_bytes: int | None = None
    idle_seconds: float | None = None
    processes: tuple[EngineProcess, ...] = ()
    processes_problem: str = ""
    uid: int | None = None
    pinned_uid: int | None = None
    methods: tuple[str, ...] = ()
    out_of_service_seconds: float | None = None
    out_of_service_reason: str = ""
