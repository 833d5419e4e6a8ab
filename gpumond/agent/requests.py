"""Requests other than a flush: a limit, snapshots of the memory and its contents, and the end of the program.

Each is bounded in rate, size and time. A recording of the allocator's history ends by itself, also if the daemon has
disconnected.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gpumond.agent.allocators.adapters import FlushRefused, HistoryRecording, TensorsBusy, TensorTracking
from gpumond.agent.loaded_allocators import ALLOCATORS, apply_limit
from gpumond.agent.measure import snapshots
from gpumond.agent.retainers import INTERVAL_SECONDS, RetentionSearch
from gpumond.agent.settings import AgentSettings
from gpumond.facts.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_LENGTH,
    AgentRequest,
    AgentResponse,
    encode,
    printable_text,
)
from gpumond.facts.program import MAX_OOM_POOLS, AllocationSite, Dump, LiveClasses, Retainer

STEP_TIMEOUT_SECONDS = 10.0
"""Longest wait for `step`, by which a program with flush_policy ``step`` permits an interruption."""
HEAP_SEARCH_SECONDS = 0.2
"""Time limit for a search of all objects, for which the program may pause up to a quarter of a second."""
BUSY_INTERVAL_SECONDS = 1.0
"""Time until a search continues that could not read the program's tensors."""
CLASSES_INTERVAL_SECONDS = 1.0
"""Shortest time between two readings of the classes of live bytes. A request in between gets the last result."""
MAX_RECORD_SECONDS = 600.0
MAX_RETAINER_SEARCH_BLOCKS = 12_000_000
"""Most memory blocks of an interpreter that is searched: the collector takes about 20 ns for each, several times."""
MAX_SITES = 20
"""Number of sites in a response; the files have more."""

PART_BYTES = 256 << 10
"""Size of a part of a file before compression."""
MAX_ENCODED_BYTES = 48 << 10

LIMIT_REFUSED = (
    "this program doesn't allow limits set by the daemon; start it with gpumond run --allow-limit, "
    "gpumond.agent.start(allow_limit=True) or GPUMOND_ALLOW_LIMIT=1"
)


def supported_requests(allow_limit: bool, can_end: bool) -> tuple[str, ...]:
    """Return the kinds of AgentRequest that are not refused."""
    kinds = ("snapshot", "classes", "fetch", "retainers")
    return (*(("limit",) if allow_limit else ()), *kinds, *(("end",) if can_end else ()))


class HistoryRecordingRun(NamedTuple):
    request: AgentRequest
    adapter: HistoryRecording
    allocator: str
    end_at: float


class RequestHandler:
    """Carries out requests. Its methods never raise."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._snapshots, self._end_requests = snapshots.RequestedSnapshots(), EndRequests()
        self._newest_classes: tuple[AgentResponse, float] | None = None
        self._recording: HistoryRecordingRun | None = None
        self._search: tuple[RetentionSearch, float] | None = None
        self.retainers: tuple[Retainer, ...] = ()
        """The result of the newest search of the lines that keep memory."""

    def respond(self, request: AgentRequest) -> AgentResponse:
        """Carry out a request that takes no time."""
        if request.kind == "snapshot":
            dump = self._snapshots.write(self._settings.workload)
            return AgentResponse(request.id, dump.reason, dump=dump)
        if request.kind == "fetch":
            return self._file_part(request)
        if request.kind == "classes":
            return self._classes_response(request)
        if request.kind == "end":
            return AgentResponse(request.id, self._end_requests.call(self._settings.end_functions))
        if not self._settings.allow_limit:
            return AgentResponse(request.id, LIMIT_REFUSED)
        if request.limit_bytes == 0:
            return AgentResponse(
                request.id,
                "a limit of 0 bytes is ambiguous: to some allocators it means no limit; give at least 1 byte",
            )
        applied = apply_limit(request.limit_bytes, request.device_uuid, request.quota)
        refused = "; ".join(result.reason for result in applied if not result.applied)
        reason = "" if any(result.applied for result in applied) else refused or "the program uses no known allocator"
        return AgentResponse(request.id, reason[:256], applied)

    def start_search(self, request: AgentRequest) -> AgentResponse:
        """Begin a search of the lines that keep memory."""
        policy = self._settings.flush_policy
        if self._search is not None:
            return AgentResponse(request.id, "a search is already in progress")
        if policy != "allow":
            return AgentResponse(request.id, f"this program's flush_policy is {policy}: its objects aren't searched")
        if sys.getallocatedblocks() > MAX_RETAINER_SEARCH_BLOCKS:
            return AgentResponse(request.id, "the program has too many objects: a search would stop it for too long")
        adapters = [adapter for adapter in ALLOCATORS.adapters() if isinstance(adapter, TensorTracking)]
        if not adapters:
            return AgentResponse(request.id, "no allocator of this program has objects that can be searched")
        try:
            search = RetentionSearch(lambda: [tensor for adapter in adapters for tensor in adapter.tracked_tensors()])
        except TensorsBusy as busy:
            return AgentResponse(request.id, printable_text(busy))
        except Exception as error:  # a version of the library that is not understood
            return AgentResponse(request.id, printable_text(f"{type(error).__name__}: {error}"))
        self._search = search, time.monotonic() + INTERVAL_SECONDS
        return AgentResponse(request.id)

    def continue_search(self, now: float) -> None:
        """Carry out the next part of a search when it is due."""
        if self._search is None or now < self._search[1]:
            return
        search, self._search = self._search[0], None
        try:
            retainers = search.advance()
        except TensorsBusy:
            self._search = search, now + BUSY_INTERVAL_SECONDS
            return
        except Exception:  # a version of the library that is not understood
            return
        if retainers is None:
            self._search = search, now + INTERVAL_SECONDS
        else:
            self.retainers = retainers

    def start_recording(self, request: AgentRequest) -> AgentResponse | None:
        """Turn the allocator's history on; return a response only if it is refused."""
        policy = self._settings.flush_policy
        seconds = min(request.record_seconds or 0.0, MAX_RECORD_SECONDS)
        if self._recording is not None:
            return AgentResponse(request.id, "a recording is already in progress")
        if policy != "allow":
            return AgentResponse(request.id, f"this program's flush_policy is {policy}: its history isn't recorded")
        reasons = []
        for adapter in ALLOCATORS.find_adapters():
            if isinstance(adapter, HistoryRecording):
                try:
                    adapter.start_history()
                    self._recording = HistoryRecordingRun(request, adapter, adapter.name, time.monotonic() + seconds)
                    return None
                except FlushRefused as refusal:
                    reasons.append(f"{adapter.name}: {refusal}")
                except Exception as error:  # a version of the library that is not understood
                    reasons.append(f"{adapter.name}: {type(error).__name__}: {error}")
        reason = "; ".join(reasons) or "no allocator of this program can record its history (PyTorch's can)"
        return AgentResponse(request.id, printable_text(reason))

    def finish_due_recording(self, now: float) -> AgentResponse | None:
        """Turn the history off at the end of its time, and return the result."""
        recording = self._recording
        if recording is None or now < recording.end_at:
            return None
        self._recording = None
        save = partial(self._snapshots.save, self._settings.workload, allocator=recording.allocator)
        try:
            dump, sites, unrecorded = recording.adapter.finish_history(
                lambda snapshot: save(".pickle", write_file=partial(_pickle, snapshot))
            )
        except Exception as error:  # of the library
            return AgentResponse(recording.request.id, printable_text(f"{type(error).__name__}: {error}"))
        folded = save(".folded", write_file=partial(_write_folded, sites, unrecorded))
        classes, paused, reason = _read_classes() if recording.request.kind == "classes" else ((), 0.0, "")
        return _shorten(
            AgentResponse(
                recording.request.id,
                dump.reason or (reason if classes or not sites else ""),
                dump=dump,
                classes=classes,
                paused_seconds=paused,
                sites=tuple(sites[:MAX_SITES]),
                unrecorded_bytes=unrecorded,
                folded=folded,
            )
        )

    def cancel_recording(self) -> None:
        """Turn the history off without a result."""
        recording, self._recording = self._recording, None
        if recording is not None:
            try:
                recording.adapter.finish_history(lambda snapshot: Dump(None, None, 0))
            except Exception:  # the program and its libraries are about to end
                pass

    def _classes_response(self, request: AgentRequest) -> AgentResponse:
        """Read the classes, unless those of the last request are new enough."""
        now = time.monotonic()
        if self._newest_classes is not None and now - self._newest_classes[1] < CLASSES_INTERVAL_SECONDS:
            return replace(self._newest_classes[0], id=request.id, age_seconds=now - self._newest_classes[1])
        classes, paused_seconds, reason = _read_classes()
        answer = AgentResponse(request.id, reason, classes=classes, paused_seconds=paused_seconds)
        self._newest_classes = answer, time.monotonic()
        return answer

    def _file_part(self, request: AgentRequest) -> AgentResponse:
        import base64
        import zlib

        size = PART_BYTES
        try:
            while True:
                part, file_bytes = self._snapshots.read_part(request.snapshot_id or 0, request.offset, size)
                encoded = base64.b64encode(zlib.compress(part, 1)).decode("ascii")
                if len(encoded) <= MAX_ENCODED_BYTES:
                    break
                size //= 2
        except OSError as error:
            return AgentResponse(request.id, printable_text(snapshots.os_error_text(error)))
        except OverflowError as error:
            return AgentResponse(request.id, printable_text(error))
        texts = tuple(encoded[i : i + MAX_TEXT_LENGTH] for i in range(0, len(encoded), MAX_TEXT_LENGTH))
        return AgentResponse(request.id, part=texts, part_bytes=len(part), file_bytes=file_bytes)


def _read_classes() -> tuple[tuple[LiveClasses, ...], float, str]:
    """Return the classes of live bytes, the seconds for which this thread may have paused the others, and the reason
    why a class is unknown.
    """
    started, classes = time.thread_time(), list[LiveClasses]()
    for adapter in ALLOCATORS.adapters():
        if isinstance(adapter, TensorTracking):
            try:
                classes += adapter.live_classes(HEAP_SEARCH_SECONDS)
            except TensorsBusy as busy:
                return (), time.thread_time() - started, printable_text(busy)
            except Exception:  # a version of the library that is not understood
                continue
    return tuple(classes[:MAX_OOM_POOLS]), time.thread_time() - started, _why_classes_unknown(classes)


def _why_classes_unknown(classes: Sequence[LiveClasses]) -> str:
    """Return the reason why no class, or not every class is known; empty if all are."""
    if classes:
        if all(each.activations_bytes is not None for each in classes):
            return ""
        if any(each.parameters_bytes is None for each in classes):
            return (
                "the classes of live memory are unknown: the agent started after the program, which has too many "
                "objects to search"
            )
        return "other tensors and activations can't be distinguished: the program has too many objects to search"
    adapters = ALLOCATORS.adapters()
    if not any(isinstance(adapter, TensorTracking) for adapter in adapters):
        names = ", ".join(adapter.name for adapter in adapters) or "none"
        return printable_text(f"only PyTorch's live memory can be classified; this program's allocators: {names}")
    pools = [pool for pool in ALLOCATORS.read() or () if pool.inside is None]
    if any(pool.live_bytes for pool in pools if pool.allocator == "torch"):
        return "live memory can't be classified: this version of PyTorch isn't supported"
    if held := sum(pool.held_bytes for pool in pools):
        from gpumond.facts.units import size_text  # needed for this text only

        return (
            f"the program's allocators hold {size_text(held)}, and none of it is live: only live memory is classified"
        )
    return "the program's allocators hold no memory on a device, so there is nothing to classify"


def _pickle(snapshot: object, path: str) -> None:
    import pickle

    with open(path, "wb") as file:
        pickle.dump(snapshot, file)


def _write_folded(sites: Sequence[AllocationSite], unrecorded_bytes: int, path: str) -> None:
    """Write the bytes of each stack as one line, outermost call first: the input of flame graphs."""
    with open(path, "w", encoding="utf-8") as file:
        for site in sites:
            calls = (f"{call.function} ({call.file}:{call.line})".replace(";", ":") for call in reversed(site.calls))
            file.write(f"{';'.join(calls)} {site.size_bytes}\n")
        file.write(f"allocated before the recording {unrecorded_bytes}\n")


def _shorten(response: AgentResponse) -> AgentResponse:
    """Remove sites until the message is short enough."""
    while len(encode(response)) > MAX_MESSAGE_BYTES and response.sites:
        response = replace(response, sites=response.sites[: len(response.sites) // 2])
    return response


NO_END_FUNCTION = "this program has no function for requests to exit; register one with gpumond.agent.on_end_request"


class EndRequests:
    """Calls the program's functions in a thread of their own, so they may wait. At most one call at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def call(self, functions: Sequence[Callable[[], object]]) -> str:
        """Start the functions. Return the reason if nothing was started. Never raises."""
        if not functions:
            return NO_END_FUNCTION
        if self._thread is not None and self._thread.is_alive():
            return "the functions of an earlier request to exit are still running"
        thread = threading.Thread(target=_call_all, args=(tuple(functions),), name="gpumond-end", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the thread limit, or an interpreter that is about to exit
            return "no thread can be started for the function"
        self._thread = thread
        return ""


def _call_all(functions: Sequence[Callable[[], object]]) -> None:
    for function in functions:
        try:
            function()
        except BaseException:  # the program's error, or its SystemExit: a thread has no caller that could handle it
            pass
