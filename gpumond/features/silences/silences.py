"""Silences: their registry, and the alerts of each frame that each one matches."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from operator import attrgetter
from typing import Annotated, NamedTuple

from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import SchemaError

from gpumond.core import Core, Part, SilenceService, Tick
from gpumond.facts.alerts import Labels
from gpumond.facts.errors import ConfigError, EntryConflict, NoSuchEntry
from gpumond.facts.frame import Alert, Matcher, Silence, SilenceState
from gpumond.facts.units import DAY_SECONDS, size_text
from gpumond.host.peer import rate_limit_name
from gpumond.store.table import AuditActions, Table, Transactions

MAX_SILENCES = 100
"""Silences of one creator that have not ended."""
MAX_SECONDS = 366 * DAY_SECONDS
"""Latest end of a silence, from now."""
MAX_TOTAL_EXPRESSION_CHARACTERS = 256
"""Characters of all regular expressions of a silence."""
MAX_COMPILED_OF_CREATOR, MAX_COMPILED_IN_TOTAL = 4 << 20, 16 << 20
"""Bytes of the compiled regular expressions of the silences that have not ended."""
MAX_ENDED, ENDED_SECONDS = 100, 5 * DAY_SECONDS
"""Ended silences of one creator that are listed, and for how long."""
MAX_CACHED_ALERTS = 20_000
"""Alerts whose silences are remembered."""


class CompiledMatchers(NamedTuple):
    """Test of the labels of an alert, and the bytes of its compiled regular expressions."""

    matches: Callable[[Mapping[str, str]], bool]
    compiled_bytes: int = 0


def silence_table(store: Transactions) -> Table[Silence]:
    """Return the store's table of silences. The only change of a silence is its end."""
    actions = AuditActions(create="silence.create", replace="silence.expire")
    return Table(store, "silences", Silence, key="id", is_valid=_has_times, actions=actions)


def _has_times(silence: Silence) -> bool:
    return all(map(isfinite, (silence.starts_at, silence.ends_at, silence.created_at)))


def _creator_of(silence: Silence) -> str:
    return rate_limit_name(silence.created_by)


class Silences(SilenceService):
    """Registry of silences. ``clock`` returns Unix seconds."""

    def __init__(self, store: Transactions, clock: Callable[[], float] = time.time) -> None:
        self._table, self._clock = silence_table(store), clock
        self._lock = asyncio.Lock()
        self._silences: dict[str, Silence] = {}
        self._matchers: dict[str, CompiledMatchers] = {}
        self._matching_silences: dict[Labels, tuple[Silence, ...]] = {}
        self.loaded = False

    async def load(self) -> list[str]:
        """Load the stored silences. Returns those that this version cannot use; they remain in the store."""
        invalid: list[str] = []
        self._matchers, self._silences = {}, {}
        for row in await self._table.rows():
            silence = row.value
            try:
                if silence.state(self._clock()) != "ended":
                    self._matchers[silence.id] = self._compile(silence.matchers, _creator_of(silence))
            except (ConfigError, EntryConflict) as error:
                invalid.append(f"{silence.id}: {error}")
            else:
                self._silences[silence.id] = silence
        self._set_silences(self._silences)
        self.loaded = True
        return invalid

    def all(self) -> list[Silence]:
        """Return the silences that have not ended or ended recently, the oldest first."""
        since = self._clock() - ENDED_SECONDS
        recent = (silence for silence in self._silences.values() if silence.ends_at >= since)
        return sorted(recent, key=lambda silence: silence.created_at)

    def current(self) -> tuple[Silence, ...]:
        """Return the silences that have not ended."""
        now = self._clock()
        return tuple(
            each for each in self._silences.values() if each.state(now) != "ended" and each.id in self._matchers
        )

    def state(self, silence: Silence) -> SilenceState:
        return silence.state(self._clock())

    def get(self, id: str) -> Silence:
        """Return the silence. Raises NoSuchEntry."""
        if id not in self._silences:
            raise NoSuchEntry(f"no silence has the ID {id!r:.80}; to list the silences: gpumond silence list")
        return self._silences[id]

    async def add(
        self,
        matchers: Sequence[Matcher],
        *,
        starts_at: float | None = None,
        ends_at: float | None = None,
        for_seconds: float | None = None,
        author: str = "",
        reason: str,
        by: str,
    ) -> Silence:
        """Create a silence that ends at ``ends_at``, or ``for_seconds`` after its start.

        Raises ConfigError, EntryConflict, StoreUnavailable.
        """
        now = self._clock()
        starts_at = max(now, starts_at or now)
        end = ends_at if ends_at is not None else starts_at + (for_seconds or 0.0)
        if end <= starts_at:
            raise ConfigError("ends_at must be after now and after starts_at")
        if end > now + MAX_SECONDS:
            raise ConfigError(f"the silence must end within {MAX_SECONDS / DAY_SECONDS:g} days from now")
        silence = Silence(
            id=secrets.token_hex(8),
            matchers=tuple(matchers),
            starts_at=starts_at,
            ends_at=end,
            author=author or by,
            reason=reason,
            created_at=now,
            created_by=by,
        )
        async with self._lock:
            creator = _creator_of(silence)
            if sum(_creator_of(each) == creator for each in self.current()) >= MAX_SILENCES:
                raise EntryConflict(f"the limit of {MAX_SILENCES} silences by {creator} is reached; delete one first")
            await self._store_silence(silence, by, self._compile(matchers, creator))
        return silence

    async def expire(self, id: str, by: str) -> None:
        """End a silence now; an ended one is unchanged. Raises NoSuchEntry, StoreUnavailable."""
        async with self._lock:
            silence, now = self.get(id), self._clock()
            if silence.state(now) != "ended":
                ended = replace(silence, starts_at=min(silence.starts_at, now), ends_at=now)
                await self._store_silence(ended, by)

    def silences_of(self, alert: Alert) -> tuple[str, ...]:
        """Return the ids of the active silences that match an alert."""
        if not self._silences:
            return ()
        now = self._clock()
        return tuple(silence.id for silence in self._matching(alert) if silence.state(now) == "active")

    def count(self, silence: Silence, alerts: Iterable[Alert]) -> int:
        """Return the number of alerts that a silence that has not ended matches."""
        return sum(silence in self._matching(alert) for alert in alerts)

    def mark(self, alerts: Iterable[Alert]) -> tuple[Alert, ...]:
        """Return the alerts, the silenced ones with the ids of their silences."""
        marked = []
        for alert in alerts:
            ids = self.silences_of(alert)
            marked.append(replace(alert, silenced_by=ids) if ids else alert)
        return tuple(marked)

    def _matching(self, alert: Alert) -> tuple[Silence, ...]:
        matching = self._matching_silences.get(alert.labels)
        if matching is None:
            labels = {**dict(alert.labels), "rule": alert.rule}
            matching = tuple(silence for silence in self.current() if self._matchers[silence.id].matches(labels))
            if len(self._matching_silences) >= MAX_CACHED_ALERTS:
                self._matching_silences.clear()
            self._matching_silences[alert.labels] = matching
        return matching

    def _compile(self, matchers: Sequence[Matcher], creator: str) -> CompiledMatchers:
        """Return the test of a new silence. Raises ConfigError, EntryConflict."""
        used_bytes = dict.fromkeys((creator, ""), 0)
        for silence in self.current():
            for name in {_creator_of(silence), ""} & used_bytes.keys():
                used_bytes[name] += self._matchers[silence.id].compiled_bytes
        available_bytes = min(MAX_COMPILED_OF_CREATOR - used_bytes[creator], MAX_COMPILED_IN_TOTAL - used_bytes[""])
        size = _compiled_bytes(matchers)
        if size > available_bytes:
            raise EntryConflict(
                f"the silences' regular expressions exceed their memory limit by {size_text(size - available_bytes)}; "
                "shorten repetitions, or delete a silence with a regular expression"
            )
        return _compiled_matchers(matchers, size)

    async def _store_silence(self, silence: Silence, by: str, compiled: CompiledMatchers | None = None) -> None:
        removed = set(self._surplus_ids(_creator_of(silence)))
        await self._table.put(silence.id, silence, by, removed=sorted(removed))
        if compiled is not None:
            self._matchers[silence.id] = compiled
        self._set_silences(
            {id: each for id, each in self._silences.items() if id not in removed} | {silence.id: silence}
        )

    def _surplus_ids(self, creator: str) -> Iterator[str]:
        """Yield the ended silences that are too old, and the oldest of a creator who has too many."""
        now = self._clock()
        ended = sorted(
            (each for each in self._silences.values() if each.state(now) == "ended"), key=attrgetter("ends_at")
        )
        of_creator = [each for each in ended if _creator_of(each) == creator]
        yield from (each.id for each in ended if each.ends_at < now - ENDED_SECONDS)
        yield from (each.id for each in of_creator[: max(0, len(of_creator) - MAX_ENDED + 1)])

    def _set_silences(self, silences: dict[str, Silence]) -> None:
        self._silences, self._matching_silences = silences, {}
        current = {silence.id for silence in self.current()}  # the memory of an ended one is free for others
        self._matchers = {id: compiled for id, compiled in self._matchers.items() if id in current}


def _compiled_bytes(matchers: Sequence[Matcher]) -> int:
    """Return the memory of the compiled regular expressions. Raises ConfigError."""
    total = 0
    for number, matcher in enumerate(matchers):
        if "~" in matcher.operator:
            with _naming_matcher(number, matcher):
                total += compiled_bytes(matcher.value)
    return total


def _compiled_matchers(matchers: Sequence[Matcher], compiled_bytes: int) -> CompiledMatchers:
    """Return the test of the labels of an alert. Raises ConfigError."""
    tests = [_matcher_test(number, matcher) for number, matcher in enumerate(matchers)]
    if sum(len(each.value) for each in matchers if "~" in each.operator) > MAX_TOTAL_EXPRESSION_CHARACTERS:
        raise ConfigError(
            f"matchers: the regular expressions exceed {MAX_TOTAL_EXPRESSION_CHARACTERS} characters; use several "
            "silences"
        )
    if all(test({}) for test in tests):
        raise ConfigError("matchers: at least one matcher must not match the empty string, for example rule=leak")
    return CompiledMatchers(lambda labels: all(test(labels) for test in tests), compiled_bytes)


def _matcher_test(number: int, matcher: Matcher) -> Callable[[Mapping[str, str]], bool]:
    name, value = matcher.name, matcher.value
    if matcher.operator == "=":
        return lambda labels: labels.get(name, "") == value
    if matcher.operator == "!=":
        return lambda labels: labels.get(name, "") != value
    with _naming_matcher(number, matcher):
        expression = compile_pattern(value)
    if matcher.operator == "=~":
        return lambda labels: expression(labels.get(name, ""))
    return lambda labels: not expression(labels.get(name, ""))


@contextmanager
def _naming_matcher(number: int, matcher: Matcher) -> Iterator[None]:
    """Name the matcher in a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"matchers.{number}: {matcher!s:.200}: {error}") from None


MAX_EXPRESSION_CHARACTERS = 128
"""Characters of a regular expression."""
MAX_COMPILED_BYTES = 1 << 20
"""Memory of one compiled expression, as `compiled_bytes` estimates it."""

_CHARACTER_BYTES, _CLASS_BYTES, _DIGITS_BYTES, _LETTERS_BYTES = 2 << 10, 8 << 10, 20 << 10, 128 << 10
r"""Bytes of the compiled form of a character, a class such as [a-z], \d, and \w, which has 140,000 characters"""
_ESCAPE = r"\\(?:[xuUpP]\{[^}]*\}|[pP].|.)"
_INNER = rf"\[\^?\]?(?:{_ESCAPE}|[^\]\\])*\]"
_TOKEN = re.compile(
    rf"(?P<flags>\(\?[imsu-]+\))|(?P<open>\((?:\?(?:[imsu-]*:|P?<\w+>))?)(?!\?)|(?P<close>\))"
    r"|\{(?P<least>\d+)(?P<range>,(?P<most>\d*))?\}|(?P<other>[*+?|^$])"
    rf"|(?P<class>\[\^?\]?(?:{_ESCAPE}|{_INNER}|[^\]\\\[])*\]|\.)|(?P<character>{_ESCAPE}|[^(\[\\])",
    re.DOTALL,
)


def compile_pattern(text: str) -> Callable[[str], bool]:
    """Return a function that tests whether an expression matches the whole of a text. Raises ConfigError."""
    compiled_bytes(text)
    try:
        adapter = TypeAdapter(Annotated[str, StringConstraints(pattern=rf"\A(?s:{text})\z")])
    except SchemaError as error:
        raise _invalid_expression(re.sub(r"(?s).*error: ", "", str(error))[:200]) from None

    def matches(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except ValidationError:
            return False
        return True

    return matches


def compiled_bytes(text: str) -> int:
    """Return an upper estimate of the memory of a compiled expression, from its classes and counted repetitions.

    Raises ConfigError if it is too long or too expensive, or isn't a complete expression: "a)|(b" would be valid within
    a group only.
    """
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise ConfigError(
            f"the regular expression exceeds {MAX_EXPRESSION_CHARACTERS} characters; use several silences"
        )
    groups: list[int] = []
    total = element_bytes = end = 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            what = "an unclosed or nested class, a look-around, or a flag other than i, m, s and u"
            raise _invalid_expression(f"{text[end : end + 8]!r} is {what}")
        end = token.end()
        if token["open"]:
            groups.append(total)
            total = element_bytes = 0
        elif token["close"]:
            if not groups:
                raise _invalid_expression("unopened group")
            element_bytes = total + _CHARACTER_BYTES
            total = groups.pop() + element_bytes
        elif token["least"]:
            times = max(1, int(token["most"] or token["least"]) + (token["range"] == ","))
            total += element_bytes * (times - 1)
            element_bytes *= times
        elif token["class"] or token["character"]:
            element_bytes = _token_bytes(token[0], _CLASS_BYTES if token["class"] else _CHARACTER_BYTES)
            total += element_bytes
    if groups:
        raise _invalid_expression("unclosed group")
    if total > MAX_COMPILED_BYTES:
        raise ConfigError(
            f"the regular expression needs {size_text(total)} of memory, more than {size_text(MAX_COMPILED_BYTES)}; "
            r"shorten repetitions such as {200}, and write [a-z0-9_] instead of \w"
        )
    return total


def _token_bytes(part: str, base_bytes: int) -> int:
    kinds = re.findall(r"\\(.)", part, re.DOTALL)
    return base_bytes + sum(
        _LETTERS_BYTES if kind in "wWpP" else _DIGITS_BYTES if kind in "dDsS" else 0 for kind in kinds
    )


def _invalid_expression(reason: str) -> ConfigError:
    return ConfigError(f"not a regular expression ({reason}); expected one such as train.*")


class SilencesPart(Silences, Part):
    table = "silences"

    def __init__(self, core: Core) -> None:
        super().__init__(core.store, core.clock.wall)
        self._telemetry = core.telemetry
        core.provide(Silences, self)
        core.provide(SilenceService, self)

    def conclude(self, tick: Tick) -> Tick:
        frame = tick.frame
        return replace(tick, frame=replace(frame, alerts=self.mark(frame.alerts), silences=self.current()))

    def act(self, tick: Tick) -> None:
        self._telemetry.count_silences(map(self.state, self.current()))
