"""Silences: alerts that are shown and not sent, with Alertmanager's semantics. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Operator = Literal["=", "!=", "=~", "!~"]
State = Literal["pending", "active", "ended"]

OPERATORS: tuple[Operator, ...] = get_args(Operator)


@dataclass(frozen=True, slots=True)
class Matcher:
    """A condition on one label of an alert. A label that the alert does not have is an empty text.

    With `=~` and `!~`, `value` is a regular expression, which matches the whole text.
    """

    name: str
    operator: Operator
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Alerts that all ``matchers`` match are not sent from ``starts_at`` until ``ends_at`` (unix seconds).

    ``author`` is the name that was given, ``created_by`` the authenticated caller.
    """

    id: str
    matchers: tuple[Matcher, ...]
    starts_at: float
    ends_at: float
    author: str
    reason: str
    created_at: float
    created_by: str

    def state(self, now: float) -> State:
        return "pending" if now < self.starts_at else "active" if now < self.ends_at else "ended"
