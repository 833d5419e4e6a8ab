"""Rules in the daemon: they conclude the alerts of each frame, and keep an hour of frames for previews."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from time import time

from gpumond.config.settings import Settings
from gpumond.facts.alerts import Rule, resume
from gpumond.facts.errors import StoreUnavailable
from gpumond.features.rules.evaluation import RuleState, awaited, evaluate
from gpumond.features.rules.preview import Preview, PreviewWindow, preview
from gpumond.features.rules.registry import RuleRegistry
from gpumond.kernel import Kernel, Part, Rules, Tick


class RulesPart(Part):
    table = "rules"

    def __init__(self, kernel: Kernel) -> None:
        settings = kernel.settings
        self._store = kernel.store
        self._state = RuleState()
        self._window = PreviewWindow()
        self.registry = RuleRegistry(
            settings.built_in_rules(), settings.rules, kernel.store, settings.receiver_names(), settings.rule_overrides
        )
        self._resumed = False
        kernel.provide(Rules, self.registry)
        kernel.provide(RuleRegistry, self.registry)
        kernel.provide(RulesPart, self)

    @property
    def loaded(self) -> bool:
        return self.registry.loaded

    async def load(self) -> Sequence[str]:
        """Load the rules that were created over the API and, at the start, the alerts of the previous daemon."""
        if not self._resumed:
            self._resumed = True
            try:
                activities = resume(*await self._store.kept(), time())
                self._state = RuleState(activities, awaited(activities))
            except StoreUnavailable:
                pass  # the store has logged it
        return await self.registry.load()

    def conclude(self, tick: Tick) -> Tick:
        self._state, evaluated = evaluate(self._state, self.registry.rules, tick.frame, tick.window)
        return replace(
            tick,
            frame=replace(tick.frame, alerts=evaluated.alerts),
            raised=evaluated.raised,
            resolved=evaluated.resolved,
            activities=self._state.activities,
        )

    def act(self, tick: Tick) -> None:
        self._window.add(tick.frame)

    async def preview(self, rule: Rule) -> Preview:
        """Evaluate a rule on the last hour, in a thread: a visitor may request it."""
        return await asyncio.to_thread(preview, rule, self._window.moments())

    async def configure(self, settings: Settings) -> None:
        self.registry.configure(
            settings.built_in_rules(), settings.rules, settings.receiver_names(), settings.rule_overrides
        )
