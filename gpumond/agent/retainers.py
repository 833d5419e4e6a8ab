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
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

from gpumond.agent.allocators.adapters import TrackedTensor
from gpumond.agent.measure.stacks import MAX_DEPTH, OWN
from gpumond.facts.messages import printable_text
from gpumond.facts.program import Retainer

INTERVAL_SECONDS = 20.0
MAX_TENSORS = 50_000
"""Most tensors of a search; the oldest are left out."""
GROUPS, EACH = 8, 4
"""Number of groups of equal tensors, and of tensors of each, whose referrers are searched."""
MAX_OBJECTS = 32
"""Number of tensors with a graph whose referrers are searched."""
MAX_RETAINERS = 3
MAX_FILE, MAX_NAME = 160, 80


MAX_LEVELS = 7
"""Number of objects of one level whose referrers are searched: the collector compares each with every reference."""
MAX_REFERRERS = 2000
MAX_EXTRA = 16
"""Number of further calls of the collector."""
MAX_SOURCE_BYTES = 1 << 20
MAX_LINES = 400
"""Number of lines of a function that are searched for the line where a variable grows."""
OPTIMIZED = 0x1
"""Flag of code whose variables are not in a dictionary of their own."""
READS_VARIABLES = frozenset(("locals", "vars", "dir", "eval", "exec"))
GROWS = r"(?:\.(?:append|appendleft|add|extend|insert|update|setdefault|put)\s*\(|\s*\[[^\]]*\]\s*=(?!=)|\s*\+=)"
SET = r"\s*(?::[^=]+)?=(?!=)"


class Place(NamedTuple):
    """A variable or attribute that refers to an object, and the line where it grows or is set."""

    file: str
    line: int
    function: str
    name: str


class RetainedTotal:
    """What one place keeps."""

    def __init__(self) -> None:
        self.size = 0
        self.tensors = 0.0
        self.has_graph = False


Read = Callable[[], Sequence[TrackedTensor]]


class RetentionSearch:
    """``read`` returns all tensors on the devices."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._old = self._references()
        self._new: list[weakref.ref[Any]] | None = None

    def advance(self) -> tuple[Retainer, ...] | None:
        """Continue after an interval. Return the result the second time, largest first."""
        if self._new is None:
            old = {id(tensor) for reference in self._old if (tensor := reference()) is not None}
            self._new = [reference for reference in self._references() if id(reference()) not in old]
            self._old = []
            return None
        new = {id(tensor) for reference in self._new if (tensor := reference()) is not None}
        self._new = []
        kept, graphs = [], []
        for one in self._read()[:MAX_TENSORS]:
            if id(one.tensor) in new:
                kept.append(one)
            elif one.has_graph:
                graphs.append(one)
        return _retainers(kept, graphs)

    def _references(self) -> list[weakref.ref[Any]]:
        found = []
        for one in self._read()[:MAX_TENSORS]:
            try:
                found.append(weakref.ref(one.tensor))
            except TypeError:  # a subclass without weak references
                continue
        return found


def _retainers(kept: Sequence[TrackedTensor], graphs: Sequence[TrackedTensor]) -> tuple[Retainer, ...]:
    """Return the lines that keep most. ``graphs`` are other tensors that keep the graph that computed them."""
    groups: defaultdict[tuple[int, bool], list[TrackedTensor]] = defaultdict(list)
    for one in kept:
        groups[one.size_bytes, one.has_graph].append(one)
    largest = sorted(groups.values(), key=lambda group: -(sum(one.size_bytes for one in group) + len(group)))[:GROUPS]
    samples = [(group, one) for group in largest for one in group[:EACH]]
    objects = [one.tensor for _, one in samples]
    totals: dict[Place, RetainedTotal] = {}
    unheld = RetainedTotal()
    for (group, _), place in zip(samples, places(objects), strict=True):
        part = min(EACH, len(group))
        total = unheld if place is None else totals.setdefault(place, RetainedTotal())
        total.size += sum(one.size_bytes for one in group) // part
        total.tensors += len(group) / part
        total.has_graph |= group[0].has_graph
    holders = [total for total in totals.values() if total.has_graph]
    if unheld.size and not holders:
        holders = _holders_of_graphs(graphs, totals)
    for total in holders:  # autograd refers to the others
        total.size += unheld.size // len(holders)
        total.tensors += unheld.tensors / len(holders)
    ordered = sorted(totals.items(), key=lambda entry: -entry[1].size)
    return tuple(_retainer(place, total.size, round(total.tensors)) for place, total in ordered[:MAX_RETAINERS])


def _holders_of_graphs(graphs: Sequence[TrackedTensor], totals: dict[Place, RetainedTotal]) -> list[RetainedTotal]:
    """Add the places of tensors from which the graph that keeps the others can be reached."""
    objects = [one.tensor for one in graphs[:MAX_OBJECTS]]
    found = {place for place in places(objects) if place is not None}
    return [totals.setdefault(place, RetainedTotal()) for place in found]


def _retainer(place: Place, size: int, tensors: int) -> Retainer:
    return Retainer(
        file=printable_text(place.file[-MAX_FILE:]),
        line=place.line,
        function=printable_text(place.function[-MAX_NAME:]),
        name=printable_text(place.name[-MAX_NAME:]),
        size_bytes=size,
        tensors=tensors,
    )


class SearchBudget:
    """The number of further calls of the collector for dictionaries and closures."""

    def __init__(self, calls: int) -> None:
        self._left = calls

    def referrers(self, target: Any) -> list[Any]:
        if not self._left:
            return []
        self._left -= 1
        return gc.get_referrers(target)


Level = dict[int, tuple[Any, set[int]]]
"""Objects by their id, each with the numbers of the searched objects that it keeps."""


def places(objects: Sequence[Any]) -> list[Place | None]:
    """Return for each object the nearest variable, attribute or closure that keeps it; None if there is none."""
    found: list[Place | None] = [None] * len(objects)
    variables, budget = _running_variables(), SearchBudget(MAX_EXTRA)
    level: Level = {}
    for number, tensor in enumerate(objects):
        level.setdefault(id(tensor), (tensor, set()))[1].add(number)
    ignored, visited = {id(level), id(objects)}, set[int]()
    for _ in range(MAX_LEVELS):
        # Variables of running functions are not among the referrers that the collector knows.
        for key in level.keys() & variables.keys():
            _assign_place(found, level[key][1], _of_code(*variables[key]))
        level = {key: entry for key, entry in level.items() if any(found[number] is None for number in entry[1])}
        visited.update(level)
        if not level:
            break
        level = _next_level(level, visited, found, ignored, budget)
    return found


def _assign_place(found: list[Place | None], numbers: set[int], place: Place) -> None:
    for number in numbers:
        found[number] = found[number] or place


def _next_level(
    level: Level, visited: set[int], found: list[Place | None], ignored: set[int], budget: SearchBudget
) -> Level:
    """Return the objects that refer to those of a level. Named ones set the place of the objects that they keep."""
    following: Level = {}
    targets = [target for target, _ in islice(level.values(), MAX_OBJECTS)]
    entries = [id(entry) for entry in level.values()]
    ours = {id(targets), id(level), id(sys._getframe()), id(sys._getframe(1)), *entries, *ignored, *visited}
    for referrer in gc.get_referrers(*targets)[:MAX_REFERRERS]:
        if id(referrer) in ours or (type(referrer) is FrameType and referrer.f_code.co_filename.startswith(OWN)):
            continue
        numbers: set[int] = set()
        for target in gc.get_referents(referrer):
            if id(target) in level:
                numbers |= level[id(target)][1]
                place = _place(referrer, target, budget)
                if place is not None:
                    _assign_place(found, level[id(target)][1], place)
        left = {number for number in numbers if found[number] is None}
        if left:
            following.setdefault(id(referrer), (referrer, set()))[1].update(left)
    return following


def _place(referrer: Any, target: Any, budget: SearchBudget) -> Place | None:
    """Return the place that a referrer names, None for a container."""
    kind = type(referrer)
    if kind is FrameType:
        return _of_code(referrer.f_code, referrer.f_lineno or 0, _variable_name(referrer, target))
    if kind is GeneratorType or kind.__name__ in ("coroutine", "async_generator"):
        frames = (getattr(referrer, f"{prefix}_frame", None) for prefix in ("gi", "cr", "ag"))
        frame = next(filter(None, frames), None)
        if frame is None:
            return None
        return _of_code(frame.f_code, frame.f_code.co_firstlineno, dict(_variables_of(frame)).get(id(target), ""))
    if kind is FunctionType:
        return None
    if kind is CellType:
        return _of_cell(referrer, budget)
    if kind is dict:
        return _of_dict(referrer, target, budget)
    wrapped = getattr(kind, "__name__", "") == "_lru_cache_wrapper" and getattr(referrer, "__wrapped__", None)
    if type(wrapped) is FunctionType:
        return _of_code(wrapped.__code__, wrapped.__code__.co_firstlineno, "its cache")
    return _of_attribute(referrer, target)


def _of_cell(cell: CellType, budget: SearchBudget) -> Place | None:
    """Return the variable of a closure, in the function that refers to it."""
    for closure in budget.referrers(cell):
        for owner in budget.referrers(closure) if type(closure) is tuple else ():
            if type(owner) is FunctionType and owner.__closure__ is closure:
                names = owner.__code__.co_freevars
                name = next((n for n, each in zip(names, owner.__closure__ or (), strict=False) if each is cell), "")
                return _of_code(owner.__code__, owner.__code__.co_firstlineno, name)
    return None


def _of_dict(holder: dict[Any, Any], target: Any, budget: SearchBudget) -> Place | None:
    """Return a module's variable or an object's attribute; None for other dictionaries."""
    name = _name_of(holder, target)
    if name is None:
        return None
    file, module = holder.get("__file__"), holder.get("__name__")
    if type(module) is str and "__builtins__" in holder:
        source = file if type(file) is str else f"<{module}>"
        return Place(source, _line_of_growth(source, re.escape(name), 1, None) or 1, "<module>", name)
    if name.isidentifier():
        for owner in budget.referrers(holder):
            if _dictionary(owner) is holder:
                return attribute_place(type(owner), name)
    return None


def _of_attribute(owner: Any, target: Any) -> Place | None:
    kind = type(owner)
    attributes = None if kind.__module__ == "builtins" else _dictionary(owner)
    name = None if attributes is None or attributes is target else _name_of(attributes, target)
    return None if name is None else attribute_place(kind, name)


def _dictionary(owner: Any) -> dict[Any, Any] | None:
    """Return the attributes of an object that is neither a class nor a module, without running its code."""
    if isinstance(owner, (type, ModuleType)):
        return None
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except Exception:
        return None
    return attributes if type(attributes) is dict else None


def attribute_place(kind: type, name: str) -> Place | None:
    """Return the line of a class, or of one that it derives from, at which an attribute grows, else is set."""
    codes = [
        code
        for base in type.__getattribute__(kind, "__mro__")
        for function in list(vars(base).values())
        if type(code := getattr(getattr(function, "__func__", function), "__code__", None)) is CodeType
    ]
    pattern, shown = rf"\w+\.{re.escape(name)}", f"{kind.__name__}.{name}"
    for suffix in (GROWS, SET):
        for code in codes:
            line = _first_match(code.co_filename, pattern + suffix, code.co_firstlineno, _last_line(code))
            if line is not None:
                return Place(code.co_filename, line, getattr(code, "co_qualname", code.co_name), shown)
    return Place(codes[0].co_filename, codes[0].co_firstlineno, kind.__name__, shown) if codes else None


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


def _of_code(code: CodeType, line: int, name: str) -> Place:
    """Return the place of a function's variable. ``line`` is used if the source does not show where it grows."""
    function = getattr(code, "co_qualname", code.co_name)
    found = _line_of_growth(code.co_filename, re.escape(name), code.co_firstlineno, _last_line(code)) if name else None
    return Place(code.co_filename, line if found is None else found, function, name)


def _last_line(code: CodeType) -> int:
    """Return the last line of a function."""
    lines = [line for _, _, line in islice(code.co_lines(), 10 * MAX_LINES) if line is not None]
    return max(lines, default=code.co_firstlineno)


def _line_of_growth(file: str, pattern: str, first: int, last: int | None) -> int | None:
    """Return the first line of a part of a file where a variable grows, else where it is set, best from itself."""
    own = rf"{SET}.*(?<![\w.]){pattern}(?!\w)"
    lines = (_first_match(file, pattern + suffix, first, last) for suffix in (GROWS, own, SET))
    return next((line for line in lines if line is not None), None)


def _first_match(file: str, pattern: str, first: int, last: int | None) -> int | None:
    searched = re.compile(rf"(?<![\w.]){pattern}")
    part = enumerate(_lines(file)[first - 1 : last], first)
    return next((number for number, line in part if searched.search(line)), None)


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
    found: dict[int, tuple[CodeType, int, str]] = {}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    for innermost in frames.values():
        frame: FrameType | None = innermost
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
            for key, name in _variables_of(frame):
                found.setdefault(key, (frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno, name))
            frame = frame.f_back
    return found


def _variables_of(frame: FrameType) -> Iterator[tuple[int, str]]:
    code = frame.f_code
    if not code.co_flags & OPTIMIZED or code.co_filename.startswith(OWN) or not _is_program(code):
        return
    fast = sys.version_info < (3, 13)
    if fast and (frame.f_trace is not None or READS_VARIABLES.intersection(code.co_names)):
        return
    variables: Any = frame.f_locals
    try:
        yield from [(id(value), name) for name, value in variables.items() if gc.is_tracked(value)]
    finally:
        if fast:
            variables.clear()


def _is_program(code: CodeType) -> bool:
    """Return whether code is a program's own, and not of a library; the demo's programs are installed as one."""
    name = code.co_filename
    libraries = ("/site-packages/", "/dist-packages/", "/lib/python3")
    return name.endswith("/gpumond/sim/programs.py") or not any(part in name for part in libraries)
