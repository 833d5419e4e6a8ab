"""Options of scenarios, parsed from text or numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumond.errors import ConfigError
from gpumond.model.units import level, seconds

Unit = Literal["size", "duration", "share", "number", "word"]


@dataclass(frozen=True, slots=True)
class Option:
    """An option with bounds. ``drawn`` describes the value that is used if the option is not given."""

    name: str
    unit: Unit
    drawn: str
    meaning: str
    least: float = 0.0
    most: float = float("inf")
    words: tuple[str, ...] = ()

    def value(self, given: float | str) -> float | str:
        """Return the checked value in base units. Raises ConfigError."""
        try:
            return self._parsed(given)
        except ValueError as error:
            raise ConfigError(f"option --{self.name} {given!r}: {error}") from None

    def _parsed(self, given: float | str) -> float | str:
        if self.unit == "word":
            if given not in self.words:
                raise ValueError(f"expected one of {', '.join(self.words)}")
            return given
        value = seconds(given) if self.unit == "duration" else level(given)
        if not self.least <= value <= self.most:
            raise ValueError(f"expected {self._range()}")
        return value

    def _range(self) -> str:
        example = {"size": "32MiB", "duration": "20m", "share": "80%", "number": "4", "word": ""}[self.unit]
        bounds = f"at least {self.least:g}" + ("" if self.most == float("inf") else f" and at most {self.most:g}")
        return f"a {self.unit} of {bounds}, such as {example}"
