"""Search of the lines that keep memory: tensors that were created in one interval and still exist after the next.

Temporary tensors of a step do not survive an interval, and parameters are older than the search. The search has three
moments, between which it keeps weak references only.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

from gpumond.agent.allocators.adapters import MAX_FILE, MAX_FUNCTION, TrackedTensor
from gpumond.agent.allocators.gil import gil_held
from gpumond.agent.measure.stacks import AGENT_DIRECTORY, MAX_DEPTH
from gpumond.facts.messages import printable_text
from gpumond.facts.program import Retainer

INTERVAL_SECONDS = 20.0
MAX_TENSORS = 50_000
"""Most tensors of a search; the oldest are left out."""
MAX_GROUPS, TENSORS_PER_GROUP = 8, 4
"""Number of groups of equal tensors, and of tensors of each, whose referrers are searched."""
MAX_SEARCHED_OBJECTS = 32
"""Number of tensors with a graph whose referrers are searched."""
MAX_RETAINERS = 3


MAX_LEVELS = 7
"""Number of objects of one level whose referrers are searched: the collector compares each with every reference."""
MAX_REFERRERS = 2000
MAX_EXTRA_CALLS = 16
"""Number of further calls of the collector."""
RESIZED_AT = frozenset(accumulate(range(20), lambda length, _: (length + 10) * 5 // 4, initial=10))
"""Lengths at which CPython resizes the tuple that ``tuple(iterable)`` builds if the final length is unknown."""
MAX_SOURCE_BYTES = 1 << 20
MAX_LINES = 400
"""Number of lines of a function that are searched for the line where a variable grows."""
CO_OPTIMIZED = 0x1
"""Flag of code whose variables are not in a dictionary of their own."""
VARIABLE_READERS = frozenset(("locals", "vars", "dir", "eval", "exec"))
GROWTH_PATTERN = (
    r"(?:\.(?:append|appendleft|add|extend|insert|update|setdefault|put)\s*\(|\s*\[[^\]]*\]\s*=(?!=)|\s*\+=)"
)
ASSIGNMENT_PATTERN = r"\s*(?::[^=]+)?=(?!=)"


class Location(NamedTuple):
    """A variable or attribute that refers to an object, and the line where it grows or is set."""

    file: str
    line: int
    function: str
    name: str


class RetainedTotal:
    """What one location keeps."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.tensors = 0.0
        self.has_graph = False


ReadTensors = Callable[[], Sequence[TrackedTensor]]


class RetentionSearch:
    """``read`` returns all tensors on the devices."""

    def __init__(self, read: ReadTensors) -> None:
        self._read = read
        self._old_tensors = self._references()
        self._new_tensors: list[weakref.ref[Any]] | None = None

    def advance(self) -> tuple[Retainer, ...] | None:
        """Continue after an interval. Return the result the second time, largest first. Raises TensorsBusy."""
        if self._new_tensors is None:
            old_ids = {id(tensor) for reference in self._old_tensors if (tensor := reference()) is not None}
            self._new_tensors = [reference for reference in self._references() if id(reference()) not in old_ids]
            self._old_tensors = []
            return None
        tensors = self._read()[:MAX_TENSORS]
        new_ids = {id(tensor) for reference in self._new_tensors if (tensor := reference()) is not None}
        self._new_tensors = []
        retained, graphs = [], []
        for tracked in tensors:
            if id(tracked.tensor) in new_ids:
                retained.append(tracked)
            elif tracked.has_graph:
                graphs.append(tracked)
        return _retainers(retained, graphs)

    def _references(self) -> list[weakref.ref[Any]]:
        references = []
        for tracked in self._read()[:MAX_TENSORS]:
            try:
                references.append(weakref.ref(tracked.tensor))
            except TypeError:  # a subclass without weak references
                continue
        return references


def _retainers(retained: Sequence[TrackedTensor], graph_tensors: Sequence[TrackedTensor]) -> tuple[Retainer, ...]:
    """Return the lines that keep most. ``graph_tensors`` are other tensors that keep the graph that computed them."""
    groups: defaultdict[tuple[int, bool], list[TrackedTensor]] = defaultdict(list)
    for tracked in retained:
        groups[tracked.size_bytes, tracked.has_graph].append(tracked)
    by_size = sorted(groups.values(), key=lambda group: -(sum(tracked.size_bytes for tracked in group) + len(group)))
    samples = [(group, tracked) for group in by_size[:MAX_GROUPS] for tracked in group[:TENSORS_PER_GROUP]]
    objects = [tracked.tensor for _, tracked in samples]
    totals: dict[Location, RetainedTotal] = {}
    unlocated = RetainedTotal()
    for (group, _), location in zip(samples, retaining_locations(objects), strict=True):
        sampled = min(TENSORS_PER_GROUP, len(group))
        total = unlocated if location is None else totals.setdefault(location, RetainedTotal())
        total.size_bytes += sum(tracked.size_bytes for tracked in group) // sampled
        total.tensors += len(group) / sampled
        total.has_graph |= group[0].has_graph
    graph_totals = [total for total in totals.values() if total.has_graph]
    if unlocated.size_bytes and not graph_totals:
        graph_totals = _graph_totals(graph_tensors, totals)
    for total in graph_totals:  # autograd refers to the others
        total.size_bytes += unlocated.size_bytes // len(graph_totals)
        total.tensors += unlocated.tensors / len(graph_totals)
    ordered = sorted(totals.items(), key=lambda entry: -entry[1].size_bytes)
    return tuple(
        _retainer(location, total.size_bytes, round(total.tensors)) for location, total in ordered[:MAX_RETAINERS]
    )


def _graph_totals(graph_tensors: Sequence[TrackedTensor], totals: dict[Location, RetainedTotal]) -> list[RetainedTotal]:
    """Add the locations of tensors from which the graph that keeps the others can be reached."""
    objects = [tracked.tensor for tracked in graph_tensors[:MAX_SEARCHED_OBJECTS]]
    found_locations = {location for location in retaining_locations(objects) if location is not None}
    return [totals.setdefault(location, RetainedTotal()) for location in found_locations]


def _retainer(location: Location, size_bytes: int, tensors: int) -> Retainer:
    return Retainer(
        file=printable_text(location.file[-MAX_FILE:]),
        line=location.line,
        function=printable_text(location.function[-MAX_FUNCTION:]),
        name=printable_text(location.name[-MAX_FUNCTION:]),
        size_bytes=size_bytes,
        tensors=tensors,
    )


class SearchBudget:
    """The number of further calls of the collector for dictionaries and closures."""

    def __init__(self, calls: int) -> None:
        self._remaining_calls = calls

    def referrers(self, target: Any) -> list[Any]:
        if not self._remaining_calls:
            return []
        self._remaining_calls -= 1
        return finished_referrers(target)


def finished_referrers(*targets: Any) -> list[Any]:
    """Return the objects that refer to a target, except tuples that another thread is building.

    ``tuple(iterable)`` resizes its result at the end or when it's full, and fails with SystemError if it's referred to.
    """
    with gil_held():
        referrers = gc.get_referrers(*targets)
        finished = [each for each in referrers if each is not targets and not _is_being_built(each)]
        del referrers
    return finished


def _is_being_built(referrer: Any) -> bool:
    if type(referrer) is not tuple:
        return False
    items = len(gc.get_referents(referrer))
    return items < len(referrer) or items in RESIZED_AT


Level = dict[int, tuple[Any, set[int]]]
"""Objects by their id, each with the numbers of the searched objects that it keeps."""


def retaining_locations(objects: Sequence[Any]) -> list[Location | None]:
    """Return for each object the nearest variable, attribute or closure that keeps it; None if there is none."""
    locations: list[Location | None] = [None] * len(objects)
    variables, search_budget = _running_variables(), SearchBudget(MAX_EXTRA_CALLS)
    level: Level = {}
    for index, tensor in enumerate(objects):
        level.setdefault(id(tensor), (tensor, set()))[1].add(index)
    ignored, visited = {id(level), id(objects)}, set[int]()
    for _ in range(MAX_LEVELS):
        # Variables of running functions are not among the referrers that the collector knows.
        for key in level.keys() & variables.keys():
            _assign_location(locations, level[key][1], _variable_location(*variables[key]))
        level = {key: entry for key, entry in level.items() if any(locations[index] is None for index in entry[1])}
        visited.update(level)
        if not level:
            break
        level = _next_level(level, visited, locations, ignored, search_budget)
    return locations


def _assign_location(locations: list[Location | None], indexes: set[int], location: Location) -> None:
    for index in indexes:
        locations[index] = locations[index] or location


def _next_level(
    level: Level, visited: set[int], locations: list[Location | None], ignored: set[int], search_budget: SearchBudget
) -> Level:
    """Return the objects that refer to those of a level. Named ones set the location of the objects that they keep."""
    next_level: Level = {}
    targets = [target for target, _ in islice(level.values(), MAX_SEARCHED_OBJECTS)]
    entries = [id(entry) for entry in level.values()]
    excluded = {id(targets), id(level), id(sys._getframe()), id(sys._getframe(1)), *entries, *ignored, *visited}
    for referrer in finished_referrers(*targets)[:MAX_REFERRERS]:
        if id(referrer) in excluded or (
            type(referrer) is FrameType and referrer.f_code.co_filename.startswith(AGENT_DIRECTORY)
        ):
            continue
        indexes: set[int] = set()
        for target in gc.get_referents(referrer):
            if id(target) in level:
                indexes |= level[id(target)][1]
                location = _find_location(referrer, target, search_budget)
                if location is not None:
                    _assign_location(locations, level[id(target)][1], location)
        unresolved = {index for index in indexes if locations[index] is None}
        if unresolved:
            next_level.setdefault(id(referrer), (referrer, set()))[1].update(unresolved)
    return next_level


def _find_location(referrer: Any, target: Any, search_budget: SearchBudget) -> Location | None:
    """Return the location that a referrer names, None for a container."""
    kind = type(referrer)
    if kind is FrameType:
        return _variable_location(referrer.f_code, referrer.f_lineno or 0, _variable_name(referrer, target))
    if kind is GeneratorType or kind.__name__ in ("coroutine", "async_generator"):
        frames = (getattr(referrer, f"{prefix}_frame", None) for prefix in ("gi", "cr", "ag"))
        frame = next(filter(None, frames), None)
        if frame is None:
            return None
        return _variable_location(
            frame.f_code, frame.f_code.co_firstlineno, dict(_variables_of(frame)).get(id(target), "")
        )
    if kind is FunctionType:
        return None
    if kind is CellType:
        return _closure_location(referrer, search_budget)
    if kind is dict:
        return _dictionary_location(referrer, target, search_budget)
    wrapped = getattr(kind, "__name__", "") == "_lru_cache_wrapper" and getattr(referrer, "__wrapped__", None)
    if type(wrapped) is FunctionType:
        return _variable_location(wrapped.__code__, wrapped.__code__.co_firstlineno, "its cache")
    return _instance_location(referrer, target)


def _closure_location(cell: CellType, search_budget: SearchBudget) -> Location | None:
    """Return the variable of a closure, in the function that refers to it."""
    for closure in search_budget.referrers(cell):
        for function in search_budget.referrers(closure) if type(closure) is tuple else ():
            if type(function) is FunctionType and function.__closure__ is closure:
                code = function.__code__
                names = {
                    id(each): name for name, each in zip(code.co_freevars, function.__closure__ or (), strict=False)
                }
                return _variable_location(code, code.co_firstlineno, names.get(id(cell), ""))
    return None


def _dictionary_location(holder: dict[Any, Any], target: Any, search_budget: SearchBudget) -> Location | None:
    """Return a module's variable or an object's attribute; None for other dictionaries."""
    name = _name_of(holder, target)
    if name is None:
        return None
    file, module = holder.get("__file__"), holder.get("__name__")
    if type(module) is str and "__builtins__" in holder:
        source = file if type(file) is str else f"<{module}>"
        return Location(source, _line_of_growth(source, re.escape(name), 1, None) or 1, "<module>", name)
    if name.isidentifier():
        for obj in search_budget.referrers(holder):
            if _dictionary(obj) is holder:
                return attribute_location(type(obj), name)
    return None


def _instance_location(obj: Any, target: Any) -> Location | None:
    cls = type(obj)
    attributes = None if cls.__module__ == "builtins" else _dictionary(obj)
    name = None if attributes is None or attributes is target else _name_of(attributes, target)
    return None if name is None else attribute_location(cls, name)


def _dictionary(obj: Any) -> dict[Any, Any] | None:
    """Return the attributes of an object that is neither a class nor a module, without running its code."""
    if isinstance(obj, (type, ModuleType)):
        return None
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except Exception:
        return None
    return attributes if type(attributes) is dict else None


def attribute_location(cls: type, name: str) -> Location | None:
    """Return the line of a class, or of one that it derives from, at which an attribute grows, else is set."""
    codes = [
        code
        for base in type.__getattribute__(cls, "__mro__")
        for function in list(vars(base).values())
        if type(code := getattr(getattr(function, "__func__", function), "__code__", None)) is CodeType
    ]
    pattern, qualified_name = rf"\w+\.{re.escape(name)}", f"{cls.__name__}.{name}"
    for suffix in (GROWTH_PATTERN, ASSIGNMENT_PATTERN):
        for code in codes:
            line = _first_match(code.co_filename, pattern + suffix, code.co_firstlineno, _last_line(code))
            if line is not None:
                return Location(code.co_filename, line, getattr(code, "co_qualname", code.co_name), qualified_name)
    return Location(codes[0].co_filename, codes[0].co_firstlineno, cls.__name__, qualified_name) if codes else None


def _name_of(holder: dict[Any, Any], target: Any) -> str | None:
    for key, value in list(holder.items()):
        if value is target and type(key) is str:
            return key
    return None


def _variable_name(frame: FrameType, target: Any) -> str:
    """Return the name of a variable of a frame that does not run, which is safe to read."""
    try:
        return _name_of(dict(frame.f_locals), target) or ""
    except Exception:
        return ""


def _variable_location(code: CodeType, line: int, name: str) -> Location:
    """Return the location of a function's variable. ``line`` is used if the source does not show where it grows."""
    function = getattr(code, "co_qualname", code.co_name)
    line_of_growth = (
        _line_of_growth(code.co_filename, re.escape(name), code.co_firstlineno, _last_line(code)) if name else None
    )
    return Location(code.co_filename, line if line_of_growth is None else line_of_growth, function, name)


def _last_line(code: CodeType) -> int:
    """Return the last line of a function."""
    lines = [line for _, _, line in islice(code.co_lines(), 10 * MAX_LINES) if line is not None]
    return max(lines, default=code.co_firstlineno)


def _line_of_growth(file: str, pattern: str, first_line: int, last_line: int | None) -> int | None:
    """Return the first line of a part of a file where a variable grows, else where it is set, best from itself."""
    from_itself = rf"{ASSIGNMENT_PATTERN}.*(?<![\w.]){pattern}(?!\w)"
    lines = (
        _first_match(file, pattern + suffix, first_line, last_line)
        for suffix in (GROWTH_PATTERN, from_itself, ASSIGNMENT_PATTERN)
    )
    return next((line for line in lines if line is not None), None)


def _first_match(file: str, pattern: str, first_line: int, last_line: int | None) -> int | None:
    searched = re.compile(rf"(?<![\w.]){pattern}")
    part = enumerate(_lines(file)[first_line - 1 : last_line], first_line)
    return next((line_number for line_number, text in part if searched.search(text)), None)


def _lines(file: str) -> list[str]:
    try:
        if not os.path.isfile(file) or os.path.getsize(file) > MAX_SOURCE_BYTES:
            return []
        with open(file, encoding="utf-8", errors="replace") as source:
            return source.read().splitlines()
    except OSError:
        return []


def _running_variables() -> dict[int, tuple[CodeType, int, str]]:
    """Return the variables of all running functions, by the identity of their values: code, present line and name.

    Before Python 3.13, reading the variables of a running function creates a dictionary that refers to their values
    until the function ends; it is emptied at once. Functions are left out that read this dictionary themselves, or that
    a debugger traces.
    """
    variables: dict[int, tuple[CodeType, int, str]] = {}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    for innermost in frames.values():
        frame: FrameType | None = innermost
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
            for key, name in _variables_of(frame):
                variables.setdefault(key, (frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno, name))
            frame = frame.f_back
    return variables


def _variables_of(frame: FrameType) -> Iterator[tuple[int, str]]:
    code = frame.f_code
    if not code.co_flags & CO_OPTIMIZED or code.co_filename.startswith(AGENT_DIRECTORY) or not _is_program_code(code):
        return
    clears_variables = sys.version_info < (3, 13)
    if clears_variables and (frame.f_trace is not None or VARIABLE_READERS.intersection(code.co_names)):
        return
    variables: Any = frame.f_locals
    try:
        yield from [(id(value), name) for name, value in variables.items() if gc.is_tracked(value)]
    finally:
        if clears_variables:
            variables.clear()


def _is_program_code(code: CodeType) -> bool:
    """Return whether code is a program's own, and not of a library; the demo's programs are installed as one."""
    name = code.co_filename
    libraries = ("/site-packages/", "/dist-packages/", "/lib/python3")
    return name.endswith("/gpumond/sim/programs.py") or not any(part in name for part in libraries)
