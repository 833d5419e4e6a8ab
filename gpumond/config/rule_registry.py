"""Rules in effect: the built-in rules, those of the configuration file, and those created over the API.

The store keeps the last kind. The first two are read-only here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gpumond.errors import ConfigError, NoSuchRule, RuleConflict
from gpumond.rules import Rule
from gpumond.rules.config import RuleConfig, written

Origin = Literal["built-in", "file", "api"]


MAX_RULES = 500


class RuleStore(Protocol):
    async def rules(self) -> dict[str, tuple[str, dict[str, Any]]]: ...
    async def put_rule(self, name: str, body: Mapping[str, Any], actor: str, if_match: str | None = None) -> str: ...
    async def delete_rule(self, name: str, actor: str, if_match: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """One rule in the format of the configuration file. Only those of origin ``api`` can be changed over the API."""

    name: str
    origin: Origin
    etag: str
    rule: dict[str, Any] = field(hash=False)


class RuleRegistry:
    """Registry of rules. ``rules`` is the current tuple; it is replaced as a whole, never changed in place."""

    def __init__(
        self, built_in: Iterable[Rule], file: Iterable[Rule], store: RuleStore, receivers: Iterable[str] = ()
    ) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._stored: dict[str, RuleEntry] = {}
        self.loaded = False
        self.configure(built_in, file, receivers)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._rules

    def configure(self, built_in: Iterable[Rule], file: Iterable[Rule], receivers: Iterable[str] = ()) -> None:
        """Set the configuration's rules. A rule of the file takes precedence over an API rule of the same name."""
        self._receivers = tuple(receivers)
        from_file = {rule.name: _entry(rule, "file") for rule in file}
        defaults = {rule.name: _entry(rule, "built-in") for rule in built_in if rule.name not in from_file}
        self._fixed = {**defaults, **from_file}
        self._rebuild()

    async def load(self) -> list[str]:
        """Load the stored rules. Returns those that this version cannot read; they remain in the store."""
        invalid: list[str] = []
        stored: dict[str, RuleEntry] = {}
        for name, (etag, body) in (await self._store.rules()).items():
            try:
                RuleConfig.model_validate(body)
            except ValueError as error:
                invalid.append(f"{name}: {' '.join(str(error).split())}")
            else:
                stored[name] = RuleEntry(name, "api", etag, body)
        self._stored, self.loaded = stored, True
        self._rebuild()
        return invalid

    def entries(self) -> list[RuleEntry]:
        return list(self._entries.values())

    def get(self, name: str) -> RuleEntry:
        """Return the rule. Raises NoSuchRule."""
        if name not in self._entries:
            raise NoSuchRule(f"no rule has the name {name}")
        return self._entries[name]

    async def put(self, config: RuleConfig, actor: str, if_match: str | None = None, new: bool = False) -> RuleEntry:
        """Create or replace a rule. Raises RuleConflict (also if ``new`` and the rule exists), RuleChanged,
        ConfigError."""
        name, body = config.name, written(config.rule())
        for receiver in config.receivers:
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
            self._stored = {**self._stored, name: RuleEntry(name, "api", etag, body)}
            self._rebuild()
            return self._stored[name]

    async def delete(self, name: str, actor: str, if_match: str | None = None) -> None:
        """Delete a rule. Raises NoSuchRule, RuleConflict, RuleChanged."""
        async with self._lock:
            self._check_writable(name)
            await self._store.delete_rule(name, actor, if_match)
            self._stored = {other: entry for other, entry in self._stored.items() if other != name}
            self._rebuild()

    def _check_writable(self, name: str) -> None:
        fixed = self._fixed.get(name)
        if fixed is None:
            return
        if fixed.origin == "file":
            raise RuleConflict(f"{name} is defined in the configuration file; change it there, then POST /-/reload")
        raise RuleConflict(
            f"{name} is built in; define a rule of that name in the configuration file to replace it, or add it to "
            "disabled_rules, then POST /-/reload"
        )

    def _rebuild(self) -> None:
        stored = {name: entry for name, entry in self._stored.items() if name not in self._fixed}
        self._entries = {**self._fixed, **stored}
        self._rules = tuple(RuleConfig.model_validate(entry.rule).rule() for entry in self._entries.values())


def _entry(rule: Rule, origin: Origin) -> RuleEntry:
    body = written(rule)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return RuleEntry(rule.name, origin, hashlib.sha256(text.encode()).hexdigest()[:16], body)
