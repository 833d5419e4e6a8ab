"""Rules in effect: the built-in rules, those of the configuration file, and those created through the API.

The store keeps the last kind. The first two are read-only here, but individual fields of a built-in rule can be
overridden in the file and through the API; the store keeps the latter. An hour of frames is kept for previews.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import time
from types import MappingProxyType
from typing import Any

from gpumond.config.settings import Settings
from gpumond.core import Core, Part, RuleService, Tick
from gpumond.facts.alerts import Rule, from_stored, overridable_fields, with_overrides
from gpumond.facts.errors import ConfigError, EntryChanged, EntryConflict, NoSuchEntry, StoreUnavailable
from gpumond.features.rules.evaluation import Preview, PreviewMoments, RuleState, awaited_alerts, evaluate, preview
from gpumond.features.rules.settings import OverrideConfig, RuleConfig, rule_body
from gpumond.host.machine import has_ended
from gpumond.store.table import AuditActions, Origin, Registry, RegistryItem, Table, Transactions, etag_of

MAX_RULES = 500


def rule_table(store: Transactions) -> Table[dict[str, Any]]:
    """Return the store's table of rules, each in the format of the configuration file."""
    return Table(
        store, "rules", dict[str, Any], etag=True, actions=AuditActions("rule.create", "rule.replace", "rule.delete")
    )


def override_table(store: Transactions) -> Table[dict[str, Any]]:
    """Return the store's table of the replaced fields of each overridden rule."""
    actions = AuditActions("rule.override", "rule.override", "rule.restore")
    return Table(store, "rule_overrides", dict[str, Any], actions=actions)


@dataclass(frozen=True, slots=True)
class OverriddenField:
    """A field of a built-in rule that the file or the API replaces; ``default`` is the rule's own value."""

    origin: Origin
    value: float | str | bool
    default: float | str | bool


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule in the format of the configuration file. Only those of origin ``api`` can be changed through the API.

    ``overrides``: the replaced fields of a built-in rule. A rule that isn't ``enabled`` isn't evaluated.
    """

    name: str
    origin: Origin
    etag: str
    rule: dict[str, Any] = field(hash=False)
    enabled: bool = True
    overrides: dict[str, OverriddenField] = field(default_factory=dict, hash=False)


class RuleRegistry(Registry[Rule, RuleEntry], RuleService):
    """Registry of rules. ``rules`` is the current tuple; it is replaced as a whole, never changed in place."""

    noun, max_values = "rule", MAX_RULES

    def __init__(self, settings: Settings, store: Transactions) -> None:
        super().__init__(rule_table(store))
        self._overrides = override_table(store)
        self._stored_overrides: dict[str, dict[str, Any]] = {}
        self.configure(settings)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._rules

    def configure(self, settings: Settings) -> None:
        """Set the configuration's rules and overrides. They take precedence over those of the API."""
        self._receivers, self._file_overrides = settings.receiver_names(), settings.rule_overrides
        self._file_items = {rule.name: _registry_item(rule, "file") for rule in settings.rules}
        self._built_in = {rule.name: rule for rule in settings.built_in_rules() if rule.name not in self._file_items}
        self._rebuild()

    async def load(self) -> list[str]:
        """Load the stored rules and overrides.

        Returns those that this version cannot read; they remain in the store.
        """
        invalid: list[str] = []
        overrides: dict[str, dict[str, Any]] = {}
        for row in await self._overrides.rows():
            try:
                overrides[row.name] = OverrideConfig.model_validate(row.value).fields()
            except ValueError as error:
                invalid.append(f"override of {row.name}: {' '.join(str(error).split())}")
        self._stored_overrides = overrides
        return invalid + await super().load()

    async def put(self, rule: Rule, actor: str, if_match: str | None = None, must_be_new: bool = False) -> RuleEntry:
        """Create or replace a rule. Raises ConfigError, and what `Registry.put` raises."""
        for receiver in rule.receivers:
            if receiver not in self._receivers:
                known = ", ".join(self._receivers) or "none"
                raise ConfigError(f"unknown receiver {receiver!r}; the configured receivers are {known}")
        return await super().put(rule, actor, if_match, must_be_new)

    async def override(self, name: str, fields: dict[str, Any], actor: str, if_match: str | None = None) -> RuleEntry:
        """Replace fields of a built-in rule, instead of those that were replaced before.

        Raises NoSuchEntry, EntryConflict, EntryChanged.
        """
        async with self._lock:
            entry = self.get(name)
            if entry.origin != "built-in":
                place = "in the configuration file" if entry.origin == "file" else f"with PUT /api/v1/rules/{name}"
                raise EntryConflict(f"{name} isn't a built-in rule; change it {place}")
            if in_file := [field for field in fields if field in self._file_overrides.get(name, {})]:
                raise EntryConflict(
                    f"{name}: the configuration file overrides {', '.join(in_file)}; change it there, then "
                    "POST /-/reload"
                )
            _require_etag(entry, if_match)
            await self._overrides.put(name, fields, actor)
            self._stored_overrides = {**self._stored_overrides, name: fields}
            self._rebuild()
            return self._items[name].entry

    async def restore(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete the override of a rule through the API. Raises NoSuchEntry, EntryChanged."""
        async with self._lock:
            if name not in self._stored_overrides:
                self.get(name)  # raises if no rule has this name
                raise NoSuchEntry(f"{name} isn't overridden through the API")
            if name in self._items:
                _require_etag(self.get(name), if_match)
            await self._overrides.delete(name, actor)
            self._stored_overrides = {
                other: fields for other, fields in self._stored_overrides.items() if other != name
            }
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        if name in self._built_in:
            raise EntryConflict(
                f"{name} is built in; PUT /api/v1/rules/{name}/override replaces its threshold, for or severity, or "
                "disables it; define a rule of that name in the configuration file to replace it, or add it to "
                "disabled_rules, then POST /-/reload"
            )
        super()._check_writable(name)

    def _value(self, body: Mapping[str, Any]) -> Rule:
        return RuleConfig.model_validate(body).rule()

    def _body(self, rule: Rule) -> dict[str, Any]:
        return rule_body(rule)

    def _entry(self, name: str, etag: str, body: dict[str, Any]) -> RuleEntry:
        return RuleEntry(name, "api", etag, body)

    def _rebuild(self) -> None:
        self._fixed = {name: self._with_overrides(rule) for name, rule in self._built_in.items()} | self._file_items
        super()._rebuild()
        self._rules = tuple(each.value for each in self._items.values() if each.entry.enabled)

    def _with_overrides(self, rule: Rule) -> RegistryItem[Rule, RuleEntry]:
        """Return the entry of a built-in rule with its overrides, field by field; those of the file take precedence."""
        own_values = overridable_fields(rule)
        origins: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
            ("api", self._stored_overrides.get(rule.name, {})),
            ("file", self._file_overrides.get(rule.name, {})),
        )
        overrides = {
            name: OverriddenField(origin, value, own_values[name])
            for origin, fields in origins
            for name, value in fields.items()
        }
        fields = {name: each.value for name, each in overrides.items()}
        return _registry_item(with_overrides(rule, fields), "built-in", bool(fields.get("enabled", True)), overrides)


def _require_etag(entry: RuleEntry, if_match: str | None) -> None:
    if if_match is not None and if_match != entry.etag:
        raise EntryChanged(f"rule {entry.name} has changed: its ETag is {entry.etag}")


def _registry_item(
    rule: Rule,
    origin: Origin,
    enabled: bool = True,
    overrides: Mapping[str, OverriddenField] = MappingProxyType({}),
) -> RegistryItem[Rule, RuleEntry]:
    body = rule_body(rule)
    hashed = [body, {name: asdict(each) for name, each in overrides.items()}] if overrides else body
    return RegistryItem(rule, RuleEntry(rule.name, origin, etag_of(hashed), body, enabled, dict(overrides)))


class RulesPart(Part):
    table = "rules"

    def __init__(self, core: Core) -> None:
        self._store = core.store
        self._state = RuleState()
        self._moments = PreviewMoments()
        self.registry = RuleRegistry(core.settings, core.store)
        self.loaded = self._is_resumed = False
        core.provide(RuleService, self.registry)
        core.provide(RuleRegistry, self.registry)
        core.provide(RulesPart, self)

    async def load(self) -> Sequence[str]:
        """Load the rules that were created through the API and, at the start, the alerts of the previous daemon."""
        if not self._is_resumed:
            self._is_resumed = True
            try:
                alert_states = from_stored(*await self._store.stored_alerts(), time())
                self._state = RuleState(alert_states, awaited_alerts(alert_states, has_ended))
            except StoreUnavailable:
                pass  # the store has logged it
        invalid = await self.registry.load()
        self.loaded = True
        return invalid

    def conclude(self, tick: Tick) -> Tick:
        self._state, evaluated = evaluate(self._state, self.registry.rules, tick.frame, tick.window)
        return replace(
            tick,
            frame=replace(tick.frame, alerts=evaluated.alerts),
            raised=evaluated.raised,
            resolved=evaluated.resolved,
            alert_states=self._state.alert_states,
        )

    def act(self, tick: Tick) -> None:
        self._moments.add(tick.frame)

    async def preview(self, rule: Rule) -> Preview:
        """Evaluate a rule on the last hour, in a thread: a visitor may request it."""
        return await asyncio.to_thread(preview, rule, self._moments.moments())

    async def configure(self, settings: Settings) -> None:
        self.registry.configure(settings)
