"""Configuration: flags override the environment (``GPUMOND_*``), which overrides the file and the defaults.

A mistake raises ConfigError with the place, the key, the value and what is expected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from gpumond.alerting.receivers import ReceiverType
from gpumond.alerting.receivers.alertmanager import Alertmanager
from gpumond.alerting.receivers.log import Log
from gpumond.alerting.receivers.webhook import Webhook
from gpumond.config.engines import AuthConfig, EngineConfig, ReleaseConfig, RequestConfig, StateConfig
from gpumond.config.explain import explain
from gpumond.config.quotas import QuotaConfig, QuotaMatch
from gpumond.config.web import Web, read_web
from gpumond.engine.rooms import Lending
from gpumond.engines.spec import Declaration
from gpumond.errors import ConfigError
from gpumond.host.files import read_text
from gpumond.host.logs import LogFormat, LogLevel
from gpumond.protocol.sockets import default_socket
from gpumond.rules import Rule
from gpumond.rules.built_in import BUILT_IN
from gpumond.rules.config import ActionConfig, FlushConfig, OverrideConfig, RuleConfig, Seconds, Strict
from gpumond.rules.overrides import Overrides, overridden
from gpumond.sources import SOURCES

RELOADED = (
    "interval",
    "compat",
    "flush_cooldown",
    "retention",
    "disabled_rules",
    "rule_overrides",
    "rules",
    "receivers",
    "engines",
    "quotas",
    "lending",
    "allow_end_requests",
    "hook_dry_run",
)
"""Settings that a reload changes; the others require a restart."""

ONLY_IN_FILE = ("disabled_rules", "rule_overrides", "rules", "receivers", "engines", "quotas")
"""Settings that have neither a flag nor an environment variable."""

HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


Receiver = Log | Webhook | Alertmanager
"""All types of receivers."""

RECEIVER_TYPES: Mapping[str, type[ReceiverType]] = {
    each.model_fields["type"].default: each for each in get_args(Receiver)
}

Compat = Literal["dcgm", "dcgm-4.9", "dcgm-4.8", "dcgm-4.7"]
"""Versions of dcgm-exporter whose names `/metrics` can have."""


Models = Mapping[str, type[BaseModel]]
PARTS: Mapping[str, tuple[type[BaseModel], Models]] = {
    "rules": (RuleConfig, {"action": ActionConfig, "flush": FlushConfig}),
    "rule_overrides": (OverrideConfig, {}),
    "quotas": (QuotaConfig, {"match": QuotaMatch}),
    "engines": (
        EngineConfig,
        {
            "auth": AuthConfig,
            "state": StateConfig,
            "release": ReleaseConfig,
            "wake": RequestConfig,
            "RequestConfig": RequestConfig,
        },
    ),
}
"""Models of the entries of settings, and of the keys within their entries."""


def known_source(name: str) -> str:
    """Return the name. Raises ValueError."""
    known = ("auto", *(spec.name for spec in SOURCES))
    if name not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return name


class Settings(Strict):
    """All settings. docs/reference/configuration.md is generated from their descriptions."""

    source: Annotated[str, AfterValidator(known_source)] = Field(
        "auto",
        description="the [source](plugins.md#sources-of-devices) of device readings; `auto` selects the drivers that "
        "are present at the start, `every` also uses drivers that are loaded later",
    )
    listen: str = Field(
        "127.0.0.1:9917",
        description="address and port of metrics, API and page; an address other than loopback requires a "
        "`web_config` with TLS, or `insecure`",
    )
    socket: Path | None = Field(
        None, description="Unix socket of the agents; the default depends on the [user](#sockets-and-directories)"
    )
    socket_mode: str | None = Field(
        None,
        pattern=r"^0?[0-7]{3}$",
        description="mode of the agents' socket in octal, in quotes; by default `0666` below `/run/gpumond`, "
        "else `0600`",
    )
    runtime_dir: Path | None = Field(
        None, description="directory of the token and `api.sock`; by default the directory of `socket`"
    )
    state_dir: Path | None = Field(
        None,
        description="directory of the [store](store.md); by default `/var/lib/gpumond` for root, else "
        "`gpumond` in `$XDG_STATE_HOME` (`~/.local/state`)",
    )
    interval: Seconds = Field(1.0, ge=0.1, le=60, description="time between two ticks (readings and evaluations)")
    insecure: bool = Field(False, description="permits an address other than loopback without TLS and authentication")
    hosts: tuple[str, ...] = Field(
        (), description="[host names](../how-to/access.md#host-names) that the daemon accepts in addition to its own"
    )
    web_config: Path | None = Field(
        None,
        description="file with TLS settings and users, in the format of [Prometheus' "
        "exporters](../how-to/access.md#from-other-machines)",
    )
    tokens_file: Path | None = Field(
        None, description="file with [tokens](../how-to/access.md#tokens) and their scopes"
    )
    token_review_audience: str | None = Field(
        None,
        pattern=r"^[!-~]{1,256}$",
        description="audience of the [service-account tokens](../how-to/access.md#kubernetes-service-accounts) "
        "of Kubernetes that the daemon accepts; the API server verifies them by TokenReview",
    )
    token_review_directory: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="directory with `token` and `ca.crt`, with which the daemon connects to the API server",
    )
    log_format: LogFormat = Field("text", description="format of the log on standard error")
    log_level: LogLevel = Field("info", description="least severe level of the log")
    compat: Compat | None = Field(
        None,
        description="adds metrics with [DCGM's names](metrics.md#dcgms-names) to `/metrics`; by default they are "
        "exported only with `?compat=…`. `dcgm` is the newest version",
    )
    flush_cooldown: Seconds = Field(
        30.0,
        description="minimum time between two flushes of a program by rules; for users it is 5 s, or this value "
        "if it is less",
    )
    retention: Seconds = Field(
        90 * 86400.0, ge=86400, description="age limit of the audit, receipts and resolved alerts"
    )
    disabled_rules: tuple[str, ...] = Field(
        (), description="names of [built-in rules](rules.md#built-in-rules) that are not evaluated"
    )
    rule_overrides: dict[str, OverrideConfig] = Field(
        {},
        description="[overrides](../how-to/override-rules.md) of single fields of built-in rules: `level`, `for`, "
        "`severity`, `enabled`, by the name of the rule",
    )
    rules: tuple[RuleConfig, ...] = Field(
        (), description="[rules](rules.md#write-a-rule); a rule with the name of a built-in rule replaces it"
    )
    receivers: tuple[Annotated[Receiver, Field(discriminator="type")], ...] = Field(
        (Log(name="log"),), description="[receivers](../how-to/notifications.md) of alerts"
    )
    engines: tuple[EngineConfig, ...] = Field(
        (), description="[serving engines](../how-to/engines/index.md) whose state is read and that can be flushed"
    )

    quotas: tuple[QuotaConfig, ...] = Field((), description="[quotas](../how-to/quotas.md) of processes")
    lending: Lending = Field(
        "user",
        description="programs that the daemon flushes when another one [needs memory](../how-to/quotas.md#lending): "
        "those of the same `user`, `all`, or none (`off`)",
    )
    allow_end_requests: bool = Field(
        False,
        description="permits the key `request_end` of [actions](../how-to/actions.md#end-idle-programs) to ask "
        "programs to end",
    )
    hook_dry_run: bool = Field(
        False,
        description="[alerts of Alertmanager](../how-to/flush-from-alertmanager.md) plan flushes and execute none",
    )

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        if value.startswith(":"):
            value = f"0.0.0.0{value}"  # the form of Prometheus' exporters
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError("expected HOST:PORT, as in 127.0.0.1:9917")
        return value

    @field_validator("hosts", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        for name in names if isinstance(names, (list, tuple)) else ():
            if not isinstance(name, str) or not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.80} is not a host name or address; expected one without scheme and port")
        return names

    @field_validator("disabled_rules", "rule_overrides")
    @classmethod
    def _known_rules(cls, names: Collection[str]) -> Collection[str]:
        known = [rule.name for rule in BUILT_IN]
        for name in names:
            if name not in known:
                raise ValueError(f"unknown built-in rule {name!r}; expected some of {', '.join(known)}")
        return names

    @model_validator(mode="after")
    def _safe(self) -> Settings:
        if not self.loopback and not self.insecure and self.web_config is None:
            raise ValueError(
                f"listen: {self.listen} is reachable from other machines and requires TLS and authentication: "
                "give a web_config, listen on 127.0.0.1, or set insecure (--insecure) if the network is trusted"
            )
        names, receivers = [rule.name for rule in self.rules], [receiver.name for receiver in self.receivers]
        engines, quotas = [engine.name for engine in self.engines], [quota.name for quota in self.quotas]
        lists = {"rules": names, "receivers": receivers, "engines": engines, "quotas": quotas}
        for setting, own in lists.items():
            duplicate = next((name for name in own if own.count(name) > 1), None)
            if duplicate is not None:
                raise ValueError(f"{setting}: the name {duplicate!r} is used twice")
        for name in self.rule_overrides:
            if name in names or name in self.disabled_rules:
                other = "rules" if name in names else "disabled_rules"
                raise ValueError(f"rule_overrides: {name} is also in {other}; remove it from one of them")
        for rule in self.rules:
            for name in rule.receivers:
                if name not in receivers:
                    raise ValueError(
                        f"rules: {rule.name}: unknown receiver {name!r}; the receivers are {', '.join(receivers)}"
                    )
        return self

    def web(self) -> Web:
        """Return the web configuration. Raises ConfigError if it is invalid, or insufficient for the address."""
        web = Web() if self.web_config is None else read_web(self.web_config)
        if web.tls is None and not self.loopback and not self.insecure:
            raise ConfigError(
                f"web_config {self.web_config}: {self.listen} is reachable from other machines; without "
                "tls_server_config, tokens and passwords are sent in clear text; add it, or set insecure (--insecure)"
            )
        return web

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def agent_socket(self) -> Path:
        """Return the path of the agent socket. Raises ConfigError if no directory is available."""
        path = self.socket or default_socket()
        if path is None:
            raise ConfigError(
                "no directory for the agent socket: set XDG_RUNTIME_DIR, or pass --socket DIRECTORY/agent.sock"
            )
        return Path(path)

    def runtime_directory(self) -> Path:
        """Return the directory of the API socket and the daemon's token: ``runtime_dir``, else the agent socket's."""
        return self.runtime_dir or self.agent_socket().parent

    def agent_socket_mode(self) -> int:
        """Return the socket's mode: a machine-wide socket is open to all users, any other only to its owner."""
        if self.socket_mode is not None:
            return int(self.socket_mode, 8)
        return 0o666 if self.agent_socket().parent.as_posix().startswith("/run/gpumond") else 0o600

    def store_file(self) -> Path:
        """Return the database path: under ``state_dir``, else /var/lib for root, else the XDG state directory."""
        if self.state_dir is not None:
            return self.state_dir / "gpumond.db"
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return (Path("/var/lib") if os.geteuid() == 0 else Path(home)) / "gpumond" / "gpumond.db"

    def active_rules(self) -> tuple[Rule, ...]:
        """Return the file's rules, and the built-in rules that it neither replaces nor disables, with its overrides."""
        own = {rule.name: rule for rule in self.own_rules()}
        overrides = self.overrides()
        built_in = {
            rule.name: overridden(rule, overrides.get(rule.name, {}))
            for rule in self.built_in_rules()
            if overrides.get(rule.name, {}).get("enabled", True)
        }
        return tuple({**built_in, **own}.values())

    def overrides(self) -> Overrides:
        return {name: override.fields() for name, override in self.rule_overrides.items()}

    def built_in_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in BUILT_IN if rule.name not in self.disabled_rules)

    def receiver_names(self) -> tuple[str, ...]:
        """Return the names of the receivers."""
        return tuple(receiver.name for receiver in self.receivers)

    def own_rules(self) -> tuple[Rule, ...]:
        return tuple(rule.rule() for rule in self.rules)

    def declared_engines(self) -> tuple[Declaration, ...]:
        return tuple(engine.declaration() for engine in self.engines)

    def differs(self, other: Settings) -> list[str]:
        """Return the names of the settings that differ from ``other`` and require a restart."""
        fixed = (name for name in type(self).model_fields if name not in RELOADED)
        return [name for name in fixed if getattr(self, name) != getattr(other, name)]


def load(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Settings:
    """Return the settings. A flag that is None or a variable that is empty is not set. Raises ConfigError."""
    values, where = {}, "configuration"
    if file is not None:
        values, where = read_yaml(file), str(file)
    origin = dict.fromkeys(values, where)
    for name in Settings.model_fields:
        variable = f"GPUMOND_{name.upper()}"
        if environ.get(variable) and name not in ONLY_IN_FILE:
            values[name], origin[name] = environ[variable], f"environment variable {variable}"
        if flags and flags.get(name) is not None:
            values[name], origin[name] = flags[name], f"--{name.replace('_', '-')}"
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = (explain(entry, origin, where, _model, RECEIVER_TYPES) for entry in error.errors())
        raise ConfigError("\n".join(problems)) from None
    except (RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {error}") from None


def read_yaml(file: Path) -> dict[str, Any]:
    import yaml  # most daemons have no file

    try:
        content = yaml.safe_load(read_text(file))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: lists or keys are nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{file}: expected keys and values, as in `listen: 127.0.0.1:9917`")
    return content


def _model(location: Sequence[object]) -> type[BaseModel]:
    """Return the model that defines the key at ``location``."""
    if location[0] == "receivers" and len(location) > 3:
        return RECEIVER_TYPES[str(location[2])]
    if location[0] not in PARTS or len(location) < 3:
        return Settings
    default, parts = PARTS[str(location[0])]
    return parts.get(str(location[-2]), default)
