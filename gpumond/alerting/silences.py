"""Registry of silences, and the alerts that each one matches."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gpumond.errors import ConfigError, NoSuchSilence, TooManySilences
from gpumond.model.cooperative import Steps
from gpumond.model.frame import Alert
from gpumond.model.persisted import Labels
from gpumond.model.silences import Matcher, Silence, State
from gpumond.model.units import DAY_SECONDS

MAX_SILENCES = 100
"""Silences of one creator that have not ended."""
MAX_SECONDS = 366 * DAY_SECONDS
"""Latest end of a silence, from now."""
MAX_EXPRESSIONS = 256
"""Characters of all regular expressions of a silence."""
KEEP_ENDED, KEEP_ENDED_SECONDS = 100, 5 * DAY_SECONDS
"""Ended silences of one creator that are listed, and for how long."""
MAX_KNOWN = 20_000
"""Alerts whose silences are remembered."""

Test = Callable[[Mapping[str, str]], bool]


class SilenceStore(Protocol):
    """The methods of the store that the registry calls; each raises StoreUnavailable."""

    async def silences(self) -> list[Silence]: ...
    async def put_silence(self, silence: Silence, removed: Sequence[str], actor: str, action: str) -> None: ...


class Silences:
    """Registry of silences. ``clock`` returns unix seconds."""

    def __init__(self, store: SilenceStore, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._lock = asyncio.Lock()
        self._silences: dict[str, Silence] = {}
        self._tests: dict[str, Test] = {}
        self._known: dict[Labels, tuple[Silence, ...]] = {}
        self.loaded = False

    async def load(self) -> list[str]:
        """Load the stored silences. Returns those that this version cannot use; they remain in the store."""
        invalid, tests = [], {}
        stored = {silence.id: silence for silence in await self._store.silences()}
        for silence in stored.values():
            try:
                tests[silence.id] = _test(silence.matchers)
            except ConfigError as error:
                invalid.append(f"{silence.id}: {error}")
        self._tests = tests
        self._use({id: silence for id, silence in stored.items() if id in tests})
        self.loaded = True
        return invalid

    def all(self) -> list[Silence]:
        """Return the silences that have not ended or ended recently, the oldest first."""
        since = self._clock() - KEEP_ENDED_SECONDS
        recent = (silence for silence in self._silences.values() if silence.ends_at >= since)
        return sorted(recent, key=lambda silence: silence.created_at)

    def current(self) -> tuple[Silence, ...]:
        """Return the silences that have not ended."""
        now = self._clock()
        return tuple(silence for silence in self._silences.values() if silence.state(now) != "ended")

    def state(self, silence: Silence) -> State:
        return silence.state(self._clock())

    def get(self, id: str) -> Silence:
        """Return the silence. Raises NoSuchSilence."""
        if id not in self._silences:
            raise NoSuchSilence(f"no silence has the id {id!r:.80}; GET /api/v1/silences lists them")
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

        Raises ConfigError, TooManySilences, StoreUnavailable.
        """
        test, now = _test(matchers), self._clock()
        starts_at = max(now, starts_at or now)
        end = ends_at if ends_at is not None else starts_at + (for_seconds or 0.0)
        if end <= starts_at:
            raise ConfigError("ends_at: expected a time after now and after starts_at")
        if end > now + MAX_SECONDS:
            raise ConfigError(f"the silence ends too late; expected an end within {MAX_SECONDS / DAY_SECONDS:g} days")
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
            if sum(each.created_by == by for each in self.current()) >= MAX_SILENCES:
                raise TooManySilences(f"the limit of {MAX_SILENCES} silences by {by} is reached; delete one first")
            await self._put(silence, by, "silence.create", test)
        return silence

    async def expire(self, id: str, by: str) -> None:
        """End a silence now; an ended one is unchanged. Raises NoSuchSilence, StoreUnavailable."""
        async with self._lock:
            silence, now = self.get(id), self._clock()
            if silence.state(now) != "ended":
                over = replace(silence, starts_at=min(silence.starts_at, now), ends_at=now)
                await self._put(over, by, "silence.expire", self._tests[id])

    def silencing(self, alert: Alert) -> tuple[str, ...]:
        """Return the ids of the active silences that match an alert."""
        if not self._silences:
            return ()
        now = self._clock()
        return tuple(silence.id for silence in self._matching(alert) if silence.state(now) == "active")

    def marking(self, alerts: Iterable[Alert]) -> Steps[tuple[Alert, ...]]:
        """Return the alerts, the silenced ones with the ids of their silences."""
        marked = []
        for alert in alerts:
            ids = self.silencing(alert)
            marked.append(replace(alert, silenced_by=ids) if ids else alert)
            if self._silences:
                yield
        return tuple(marked)

    def _matching(self, alert: Alert) -> tuple[Silence, ...]:
        found = self._known.get(alert.labels)
        if found is None:
            labels = {**dict(alert.labels), "rule": alert.rule}
            found = tuple(silence for silence in self.current() if self._tests[silence.id](labels))
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[alert.labels] = found
        return found

    async def _put(self, silence: Silence, by: str, action: str, test: Test) -> None:
        removed = set(self._excess(silence.created_by))
        await self._store.put_silence(silence, sorted(removed), by, action)
        self._tests[silence.id] = test
        self._use({id: each for id, each in self._silences.items() if id not in removed} | {silence.id: silence})

    def _excess(self, creator: str) -> Iterator[str]:
        """Yield the ended silences that are too old, and the oldest of a creator who has too many."""
        now = self._clock()
        ended = sorted((each for each in self._silences.values() if each.state(now) == "ended"), key=_end)
        own = [each for each in ended if each.created_by == creator]
        yield from (each.id for each in ended if each.ends_at < now - KEEP_ENDED_SECONDS)
        yield from (each.id for each in own[: max(0, len(own) - KEEP_ENDED + 1)])

    def _use(self, silences: dict[str, Silence]) -> None:
        self._silences, self._known = silences, {}
        self._tests = {id: test for id, test in self._tests.items() if id in silences}


def _end(silence: Silence) -> float:
    return silence.ends_at


def _test(matchers: Sequence[Matcher]) -> Test:
    """Return a function that tests the labels of an alert. Raises ConfigError."""
    tests = [_matcher_test(number, matcher) for number, matcher in enumerate(matchers)]
    if sum(len(each.value) for each in matchers if "~" in each.operator) > MAX_EXPRESSIONS:
        raise ConfigError(
            f"matchers: the regular expressions exceed {MAX_EXPRESSIONS} characters; use several silences"
        )
    if all(test({}) for test in tests):
        raise ConfigError(
            "matchers: all of them match an empty text; expected at least one that does not, for example rule=leak"
        )
    return lambda labels: all(test(labels) for test in tests)


def _matcher_test(number: int, matcher: Matcher) -> Test:
    name, value = matcher.name, matcher.value
    if matcher.operator == "=":
        return lambda labels: labels.get(name, "") == value
    if matcher.operator == "!=":
        return lambda labels: labels.get(name, "") != value
    from gpumond.alerting.expressions import compiled  # it imports pydantic, and most daemons have no expression

    try:
        expression = compiled(value)
    except ConfigError as error:
        raise ConfigError(f"matchers.{number}: {matcher!s:.200}: {error}") from None
    if matcher.operator == "=~":
        return lambda labels: expression(labels.get(name, ""))
    return lambda labels: not expression(labels.get(name, ""))
