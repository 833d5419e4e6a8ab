"""Rules in effect: the built-in rules, those of the configuration file, and those created over the API.

The store keeps the last kind. The first two are read-only here, but single fields of a built-in rule can be overridden
in the file and over the API; the store keeps the latter.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from gpumond.facts.errors import ConfigError, NoSuchRule, RuleChanged, RuleConflict
from gpumond.facts.rule import Overrides, Rule, overridden, own_fields
from gpumond.features.rules.settings import written
from gpumond.kernel import Rules

Origin = Literal["built-in", "file", "api"]


MAX_RULES = 500
NO_OVERRIDES: Overrides = MappingProxyType({})


class RuleStore(Protocol):
    async def rules(self) -> dict[str, tuple[str, dict[str, Any]]]: ...
    async def put_rule(self, name: str, body: Mapping[str, Any], actor: str, if_match: str | None = None) -> str: ...
    async def delete_rule(self, name: str, actor: str, if_match: str | None = None) -> None: ...
    async def overrides(self) -> dict[str, dict[str, Any]]: ...
    async def put_override(self, name: str, fields: Mapping[str, Any], actor: str) -> None: ...
    async def delete_override(self, name: str, actor: str) -> None: ...


@dataclass(frozen=True, slots=True)
class OverriddenField:
    """A field of a built-in rule that the file or the API replaces; ``default`` is the rule's own value."""

    origin: Origin
    value: float | str | bool
    default: float | str | bool


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule in the format of the configuration file. Only those of origin ``api`` can be changed over the API.

    ``overrides``: the replaced fields of a built-in rule. A rule that is not ``enabled`` is not evaluated.
    """

    name: str
    origin: Origin
    etag: str
    rule: dict[str, Any] = field(hash=False)
    enabled: bool = True
    overrides: dict[str, OverriddenField] = field(default_factory=dict, hash=False)


class Registered(NamedTuple):
    entry: RuleEntry
    rule: Rule


class RuleRegistry(Rules):
    """Registry of rules. ``rules`` is the current tuple; it is replaced as a whole, never changed in place."""

    def __init__(
        self,
        built_in: Iterable[Rule],
        file: Iterable[Rule],
        store: RuleStore,
        receivers: Iterable[str] = (),
        overrides: Overrides = NO_OVERRIDES,
    ) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._stored: dict[str, Registered] = {}
        self._stored_overrides: dict[str, dict[str, Any]] = {}
        self.loaded = False
        self.configure(built_in, file, receivers, overrides)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._rules

    def configure(
        self,
        built_in: Iterable[Rule],
        file: Iterable[Rule],
        receivers: Iterable[str] = (),
        overrides: Overrides = NO_OVERRIDES,
    ) -> None:
        """Set the configuration's rules and overrides. They take precedence over those of the API."""
        self._receivers, self._file_overrides = tuple(receivers), overrides
        self._file = {rule.name: _registered(rule, "file") for rule in file}
        self._built_in = {rule.name: rule for rule in built_in if rule.name not in self._file}
        self._rebuild()

    async def load(self) -> list[str]:
        """Load the stored rules and overrides.

        Returns those that this version cannot read; they remain in the store.
        """
        invalid: list[str] = []
        overrides: dict[str, dict[str, Any]] = {}
        for name, body in (await self._store.overrides()).items():
            try:
                overrides[name] = _checked_override(body)
            except ValueError as error:
                invalid.append(f"override of {name}: {' '.join(str(error).split())}")
        stored: dict[str, Registered] = {}
        for name, (etag, body) in (await self._store.rules()).items():
            try:
                rule = _checked(body)
            except ValueError as error:
                invalid.append(f"{name}: {' '.join(str(error).split())}")
            else:
                stored[name] = Registered(RuleEntry(name, "api", etag, body), rule)
        self._stored, self._stored_overrides, self.loaded = stored, overrides, True
        self._rebuild()
        return invalid

    def entries(self) -> list[RuleEntry]:
        return [each.entry for each in self._registered.values()]

    def get(self, name: str) -> RuleEntry:
        """Return the rule. Raises NoSuchRule."""
        if name not in self._registered:
            raise NoSuchRule(f"no rule has the name {name}")
        return self._registered[name].entry

    async def put(self, rule: Rule, actor: str, if_match: str | None = None, new: bool = False) -> RuleEntry:
        """Create or replace a rule. Raises RuleConflict (also if ``new`` and the rule exists), RuleChanged,
        ConfigError."""
        name, body = rule.name, written(rule)
        for receiver in rule.receivers:
            if receiver not in self._receivers:
                known = ", ".join(self._receivers) or "none"
                raise ConfigError(f"unknown receiver {receiver!r}; the configured receivers are {known}")
        async with self._lock:
            self._check_writable(name)
            if new and name in self._stored:
                raise RuleConflict(f"the rule {name} already exists; use PUT to replace it")
            if name not in self._stored and len(self._stored) >= MAX_RULES:
                raise RuleConflict(f"the limit of {MAX_RULES} rules is reached; delete one first")
            etag = await self._store.put_rule(name, body, actor, if_match)
            entry = RuleEntry(name, "api", etag, body)
            self._stored = {**self._stored, name: Registered(entry, rule)}
            self._rebuild()
            return entry

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a rule. Raises NoSuchRule, RuleConflict, RuleChanged."""
        async with self._lock:
            self._check_writable(name)
            await self._store.delete_rule(name, actor, if_match)
            self._stored = {other: each for other, each in self._stored.items() if other != name}
            self._rebuild()

    async def override(self, name: str, fields: dict[str, Any], actor: str, if_match: str | None = None) -> RuleEntry:
        """Replace fields of a built-in rule, instead of those that were replaced before.

        Raises NoSuchRule, RuleConflict, RuleChanged.
        """
        async with self._lock:
            entry = self.get(name)
            if entry.origin != "built-in":
                place = "in the configuration file" if entry.origin == "file" else f"with PUT /api/v1/rules/{name}"
                raise RuleConflict(f"{name} is not a built-in rule; change it {place}")
            if taken := [field for field in fields if field in self._file_overrides.get(name, {})]:
                raise RuleConflict(
                    f"{name}: the configuration file overrides {', '.join(taken)}; change it there, then POST /-/reload"
                )
            _require(entry, if_match)
            await self._store.put_override(name, fields, actor)
            self._stored_overrides = {**self._stored_overrides, name: fields}
            self._rebuild()
            return self._registered[name].entry

    async def restore(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete the override of a rule over the API. Raises NoSuchRule, RuleChanged."""
        async with self._lock:
            if name not in self._stored_overrides:
                raise NoSuchRule(f"{name} is not overridden over the API")
            if name in self._registered:
                _require(self.get(name), if_match)
            await self._store.delete_override(name, actor)
            self._stored_overrides = {other: own for other, own in self._stored_overrides.items() if other != name}
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        fixed = self._fixed.get(name)
        if fixed is None:
            return
        if fixed.entry.origin == "file":
            raise RuleConflict(f"{name} is defined in the configuration file; change it there, then POST /-/reload")
        raise RuleConflict(
            f"{name} is built in; PUT /api/v1/rules/{name}/override replaces its level, for or severity, or disables "
            "it; define a rule of that name in the configuration file to replace it, or add it to disabled_rules, then "
            "POST /-/reload"
        )

    def _rebuild(self) -> None:
        built_in = {name: self._overridden(rule) for name, rule in self._built_in.items()}
        self._fixed = {**built_in, **self._file}
        stored = {name: each for name, each in self._stored.items() if name not in self._fixed}
        self._registered = {**self._fixed, **stored}
        self._rules = tuple(each.rule for each in self._registered.values() if each.entry.enabled)

    def _overridden(self, rule: Rule) -> Registered:
        """Return the entry of a built-in rule with its overrides, field by field; those of the file take precedence."""
        own = own_fields(rule)
        origins: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
            ("api", self._stored_overrides.get(rule.name, {})),
            ("file", self._file_overrides.get(rule.name, {})),
        )
        overrides = {
            name: OverriddenField(origin, value, own[name])
            for origin, fields in origins
            for name, value in fields.items()
        }
        fields = {name: each.value for name, each in overrides.items()}
        return _registered(overridden(rule, fields), "built-in", bool(fields.get("enabled", True)), overrides)


def _require(entry: RuleEntry, if_match: str | None) -> None:
    if if_match is not None and if_match != entry.etag:
        raise RuleChanged(f"rule {entry.name} has changed: its ETag is {entry.etag}")


def _checked(body: Mapping[str, Any]) -> Rule:
    """Return a stored rule. Raises ValueError if this version cannot read it."""
    from gpumond.features.rules.settings import RuleConfig  # it imports pydantic, and most stores contain no rule

    return RuleConfig.model_validate(body).rule()


def _checked_override(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored fields of an override, as `_checked` does."""
    from gpumond.features.rules.settings import OverrideConfig

    return OverrideConfig.model_validate(body).fields()


def _registered(
    rule: Rule,
    origin: Origin,
    enabled: bool = True,
    overrides: Mapping[str, OverriddenField] = MappingProxyType({}),
) -> Registered:
    body = written(rule)
    described = [body, {name: asdict(each) for name, each in overrides.items()}] if overrides else body
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    etag = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Registered(RuleEntry(rule.name, origin, etag, body, enabled, dict(overrides)), rule)
