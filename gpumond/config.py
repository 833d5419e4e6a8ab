"""Configuration: flags over environment (``GPUMOND_*``) over file over defaults, checked as one.

A mistake is a ConfigError that names the place, the key, the value and what is expected.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from gpumond import units
from gpumond.errors import ConfigError
from gpumond.rules import BUILT_IN, Rule, Scope
from gpumond.subjects import VALUES
from gpumond.wire import default_socket

Seconds = Annotated[float, BeforeValidator(units.seconds)]
Level = Annotated[float, BeforeValidator(units.level)]

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class RuleConfig(_Strict):
    """A rule as it is written: see design and docs/operations.md for its meaning."""

    name: str = Field(pattern=r"^[a-z0-9_-]{1,64}$")
    scope: Scope
    value: str
    above: Level | None = None
    below: Level | None = None
    clear: Level | None = None
    for_: Seconds = Field(default=0.0, alias="for")
    keep_firing_for: Seconds = 0.0
    match: dict[str, str] = {}
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @model_validator(mode="after")
    def _consistent(self) -> RuleConfig:
        if self.value not in VALUES[self.scope]:
            raise ValueError(f"scope {self.scope} has no value {self.value!r}; it has {', '.join(VALUES[self.scope])}")
        if (self.above is None) == (self.below is None):
            raise ValueError("expected exactly one of above and below")
        if self.clear is not None:
            bound = self.above if self.above is not None else self.below
            assert bound is not None
            if (self.clear > bound) if self.above is not None else (self.clear < bound):
                raise ValueError("clear must lie on the safe side of the level")
        return self

    def rule(self) -> Rule:
        return Rule(
            self.name,
            self.scope,
            self.value,
            self.above,
            self.below,
            self.clear,
            self.for_,
            self.keep_firing_for,
            tuple(self.match.items()),
            tuple(self.labels.items()),
            tuple(self.annotations.items()),
        )


class Settings(_Strict):
    """Everything that can be set. ``check-config --help`` and docs/operations.md describe the keys."""

    source: Literal["auto", "nvml", "drm", "sim"] = "auto"
    listen: str = "127.0.0.1:9917"
    socket: Path | None = None
    socket_mode: str | None = Field(default=None, pattern=r"^0?[0-7]{3}$")
    state_dir: Path | None = None
    interval: Seconds = Field(default=1.0, ge=0.1, le=60)
    insecure: bool = False
    compat: Literal["dcgm"] | None = None
    flush_cooldown: Seconds = 30.0
    disabled_rules: tuple[str, ...] = ()
    rules: tuple[RuleConfig, ...] = ()

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError("expected HOST:PORT, as in 127.0.0.1:9917")
        return value

    @field_validator("disabled_rules")
    @classmethod
    def _known_rules(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [rule.name for rule in BUILT_IN]
        for name in names:
            if name not in known:
                raise ValueError(f"there is no built-in rule {name!r}; there are {', '.join(known)}")
        return names

    @model_validator(mode="after")
    def _safe(self) -> Settings:
        if self.host not in LOOPBACK and not self.insecure:
            raise ValueError(
                f"listen: {self.listen} is reachable from other machines, and reads need no token there; "
                "listen on 127.0.0.1 behind a proxy, or set insecure (--insecure) if the network is trusted"
            )
        names = [rule.name for rule in self.rules]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"rules: two rules are called {twice!r}")
        return self

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def agent_socket(self) -> Path:
        """Where the agents' socket goes. Raises ConfigError if there is no place for it."""
        path = self.socket or default_socket()
        if path is None:
            raise ConfigError(
                "no place for the agent socket: set XDG_RUNTIME_DIR, or give --socket DIRECTORY/agent.sock"
            )
        return Path(path)

    def active_rules(self) -> tuple[Rule, ...]:
        """The file's rules, and the built-in ones that it neither replaces nor disables."""
        own = {rule.name: rule.rule() for rule in self.rules}
        built_in = {rule.name: rule for rule in BUILT_IN if rule.name not in self.disabled_rules}
        return tuple({**built_in, **own}.values())


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings that hold. ``flags`` with value None were not given. Raises ConfigError."""
    values, where = {}, "configuration"
    if file is not None:
        values, where = _read(file), str(file)
    origin = dict.fromkeys(values, where)
    for name in Settings.model_fields:
        variable = f"GPUMOND_{name.upper()}"
        if variable in environ and name not in ("rules", "disabled_rules"):
            values[name], origin[name] = environ[variable], f"environment variable {variable}"
        if flags and flags.get(name) is not None:
            values[name], origin[name] = flags[name], f"--{name.replace('_', '-')}"
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(entry, origin, where) for entry in error.errors())) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: expected keys and values, as in `listen: 127.0.0.1:9917`")
    return content


def _explain(error: Any, origin: Mapping[str, str], where: str) -> str:
    """One line: place, key, value, expectation."""
    location = error["loc"]
    place = origin.get(str(location[0]), where) if location else where
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    if error["type"] == "extra_forbidden":
        model: type[BaseModel] = RuleConfig if len(location) > 1 else Settings
        known = [field.alias or name for name, field in model.model_fields.items()]
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        return f"{place}: {key}: unknown key; {hint}"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return f"{place}: {message}"
    shown = "" if isinstance(error["input"], dict) else f" {error['input']!r:.80}:"
    return f"{place}: {key}:{shown} {message[:1].lower()}{message[1:]}"
