"""Matchers, limits and the life of silences."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from gpumond.facts.errors import ConfigError, EntryConflict, GpumondError, NoSuchEntry
from gpumond.facts.frame import Alert, Matcher, Silence
from gpumond.features.silences.silences import ENDED_SECONDS, MAX_ENDED, MAX_SILENCES, Silences, silence_table
from tests.helpers.memory_store import MemoryStore

ALERT = Alert(
    rule="leak",
    phase="firing",
    labels=(("alertname", "leak"), ("pid", "42"), ("workload", "train-7")),
    annotations=(),
    value=1.0,
    active_at=1.0,
)


class Registry:
    """Silences over a store in memory, with a clock that the test sets."""

    def __init__(self, *stored: Silence) -> None:
        self.now = 1000.0
        self.store = MemoryStore()
        for silence in stored:
            asyncio.run(silence_table(self.store).put(silence.id, silence))
        self.silences = Silences(self.store, lambda: self.now)

    def add(
        self, *matchers: str, by: str = "token", for_seconds: float = 60.0, starts_at: float | None = None
    ) -> Silence:
        parsed = [Matcher(*text.split(" ")) for text in matchers or ("rule = leak",)]  # type: ignore[arg-type]
        return asyncio.run(
            self.silences.add(parsed, for_seconds=for_seconds, starts_at=starts_at, reason="because", by=by)
        )

    def expire(self, id: str) -> None:
        asyncio.run(self.silences.expire(id, "token"))

    def silenced(self, alert: Alert = ALERT) -> bool:
        (marked,) = self.silences.mark([alert])
        assert marked.silenced_by == self.silences.silences_of(alert)
        return bool(marked.silenced_by)


@pytest.mark.parametrize(
    ("matchers", "silenced"),
    [
        (("rule = leak",), True),
        (("alertname = leak",), True),
        (("rule = leak", "workload = train-7"), True),
        (("rule = leak", "workload = train"), False),
        (("workload =~ train.*",), True),
        (("workload =~ train",), False),
        (("workload =~ rain-7",), False),
        (("workload =~ serve|train-[0-9]+",), True),
        (("rule = leak", "pid != 43"), True),
        (("rule = leak", "pid != 42"), False),
        (("rule = leak", "gpu = "), True),
        (("rule = leak", "gpu != 0"), True),
        (("rule = leak", "gpu =~ .+"), False),
        (("rule = leak", "gpu =~ .*"), True),
        (("rule = leak", "workload !~ serve.*"), True),
        (("rule = leak", "workload !~ train.*"), False),
        (("rule = leak", "gpu !~ .+"), True),
    ],
)
def test_alert_is_silenced_if_all_matchers_match(matchers: tuple[str, ...], silenced: bool):
    registry = Registry()
    registry.add(*matchers)
    assert registry.silenced() is silenced


@pytest.mark.parametrize(
    ("matchers", "complaint"),
    [
        (
            ("workload =~ (",),
            "matchers.0: workload=~(: not a regular expression (unclosed group); expected one such as",
        ),
        (("rule = leak", "workload !~ a)|(b"), "matchers.1: workload!~a)|(b: not a regular expression (unopened group"),
        (("workload =~ (?x)a#",), "not a regular expression"),
        (("workload =~ (?=a)",), "look-around"),
        (("workload =~ " + "a" * 129,), "exceeds 128 characters; use several silences"),
        (("rule =~ " + "a" * 100, "gpu =~ " + "b" * 100, "pid =~ " + "c" * 100), "exceed 256 characters"),
        (("gpu = ",), "at least one matcher must not match the empty string"),
        (("gpu =~ .*",), "at least one matcher must not match the empty string"),
        (("gpu != 0",), "at least one matcher must not match the empty string"),
    ],
)
def test_unusable_matchers_are_refused(matchers: tuple[str, ...], complaint: str):
    registry = Registry()
    with pytest.raises(ConfigError) as refused:
        registry.add(*matchers)
    assert complaint in str(refused.value)
    assert not registry.store.names("silences")


def test_expression_with_exponential_backtracking_is_matched_in_linear_time():
    registry = Registry()
    registry.add("workload =~ (a+)+b")
    assert not registry.silenced(replace(ALERT, labels=(("workload", "a" * 10_000),)))


@pytest.mark.parametrize(
    "expression",
    [
        r"\w{200}0001",
        r"(?:\w\d){40}",
        r"[\p{Lu}a-z]{40}",
        r"(?i:(a{9}){9}){9}",
        r"\w" * 60,
        r"\W{1,40}",
        r"[^\w[\w]]{40}",
        r"\pL{40,}",
    ],
)
def test_expression_that_is_expensive_to_compile_is_refused(expression: str):
    with pytest.raises(ConfigError, match=r"of memory, more than 1\.0 MiB; shorten repetitions"):
        Registry().add(f"workload =~ {expression}")


@pytest.mark.parametrize(
    "expression",
    [r"train-\w+", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", r"[]a](?:b|c)", r"[^]a]+", r"[[:alpha:]]+", r"(?i)x\(\)", r"a{2}\{"],
)
def test_common_expressions_are_cheap(expression: str):
    Registry().add(f"workload =~ {expression}")


@pytest.mark.parametrize("expression", ["[])|(x", "[^])|(x", "a[", "[a[b]", "(?x)a", r"[a\]", "(a", "\\", "(?P<n>a))"])
def test_incomplete_expression_is_refused(expression: str):
    with pytest.raises(ConfigError, match="not a regular expression"):
        Registry().add(f"workload =~ {expression}")


def fill(registry: Registry, creator: str) -> list[Silence]:
    """Create silences with an expensive expression until no more is accepted."""
    added: list[Silence] = []
    with contextlib.suppress(EntryConflict):
        while len(added) < MAX_SILENCES:
            added.append(registry.add(rf"workload =~ \w{{7}}{creator}{len(added)}", by=creator))
    return added


def test_compiled_expressions_of_all_silences_are_limited():
    registry = Registry()
    added = {creator: fill(registry, creator) for creator in "abcde"}
    assert [len(each) for each in added.values()] == [4, 4, 4, 4, 1]
    with pytest.raises(EntryConflict, match="exceed their memory limit by"):
        registry.add(r"workload =~ \w{7}", by="e")
    registry.add("workload = train", by="e")
    registry.expire(added["a"][0].id)
    registry.add(r"workload =~ \w{7}", by="e")


def test_stored_silence_that_is_expensive_is_skipped():
    expensive = replace(Registry().add("workload =~ x"), matchers=(Matcher("workload", "=~", r"\w{200}"),))
    ended = replace(expensive, id="b", ends_at=1000.0)
    registry = Registry(expensive, ended)
    (invalid,) = asyncio.run(registry.silences.load())
    assert invalid.startswith(f"{expensive.id}: matchers.0: workload=~")
    assert [silence.id for silence in registry.silences.all()] == ["b"]


def test_silence_is_pending_active_and_ended():
    registry = Registry()
    silence = registry.add(starts_at=1010.0)
    seen = []
    for registry.now in (1000.0, 1010.0, 1069.0, 1070.0):
        seen.append((registry.silences.state(silence), registry.silenced(), len(registry.silences.current())))
    assert seen == [("pending", False, 1), ("active", True, 1), ("active", True, 1), ("ended", False, 0)]


def test_start_in_the_past_is_now():
    assert Registry().add(starts_at=5.0).starts_at == 1000.0


@pytest.mark.parametrize("fields", [{"for_seconds": 367 * 86400.0}, {"starts_at": 367 * 86400.0}])
def test_silence_without_end_is_refused(fields: dict[str, float]):
    with pytest.raises(ConfigError, match="the silence must end within 366 days"):
        Registry().add(**fields)  # type: ignore[arg-type]


def test_expired_silence_ends_at_once_and_stays_listed():
    registry = Registry()
    active, pending = registry.add(), registry.add(starts_at=1500.0)
    for silence in (active, pending, active):
        registry.expire(silence.id)
    assert not registry.silenced()
    assert [(each.id, each.ends_at) for each in registry.silences.all()] == [(active.id, 1000.0), (pending.id, 1000.0)]
    assert [action for _, action, _ in registry.store.audited] == ["silence.create"] * 2 + ["silence.expire"] * 2
    with pytest.raises(NoSuchEntry):
        registry.expire("0" * 16)


def test_each_creator_has_a_limited_number_of_silences():
    registry = Registry()
    first, *_ = [registry.add(by=f"token:a@10.0.0.{place}") for place in range(MAX_SILENCES)]
    with pytest.raises(EntryConflict, match="100 silences by token:a is reached; delete one first"):
        registry.add(by="token:a")
    registry.add(by="token:b")
    registry.expire(first.id)
    registry.add(by="token:a")


def test_ended_silences_are_removed_when_they_are_too_many_or_too_old():
    registry = Registry()
    other = registry.add(by="token:b")
    registry.expire(other.id)
    for _ in range(MAX_ENDED + 20):
        registry.expire(registry.add().id)
    assert len(registry.store.names("silences")) == MAX_ENDED + 1
    assert other.id in registry.store.names("silences")
    registry.now += ENDED_SECONDS + 1
    last = registry.add()
    assert registry.store.names("silences") == [last.id]
    assert registry.silences.all() == [last]


def test_silence_that_cannot_be_stored_is_not_in_effect():
    registry = Registry()
    kept = registry.add("rule = other")
    registry.store.full = True
    for change in (lambda: registry.add(), lambda: registry.expire(kept.id)):
        with pytest.raises(GpumondError):
            change()
    assert not registry.silenced()
    assert registry.silences.current() == (kept,)


def test_stored_silences_are_loaded_and_unusable_ones_are_named():
    before = Registry()
    good = before.add()
    bad = replace(good, id="f" * 16, matchers=(Matcher("rule", "=~", "("),))
    registry = Registry(good, bad)
    (problem,) = asyncio.run(registry.silences.load())
    assert problem.startswith("ffffffffffffffff: matchers.0: rule=~(")
    assert registry.silenced()
    assert registry.silences.all() == [good]
