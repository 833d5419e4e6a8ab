"""Configuration: flags override the environment (``GPUMOND_*``), which overrides the file and the defaults.

`SettingsConfig` checks the values, `loading` reads the file. docs/reference/configuration.md is generated from it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, field_validator, model_validator

from gpumond.config.models import Seconds, StrictModel
from gpumond.config.tokens import IdentityProxy
from gpumond.config.web_file import WebSettings, read_web
from gpumond.devices import SOURCES
from gpumond.facts.alerts import Overrides, Rule, with_overrides
from gpumond.facts.errors import ConfigError, did_you_mean
from gpumond.facts.messages import AGENT_SOCKET, default_socket
from gpumond.facts.quota import Quota, ReclaimPolicy
from gpumond.features.alerts.receivers import LOG_ONLY, RECEIVER_TYPES as RECEIVER_TYPES, ReceiverConfig
from gpumond.features.alerts.receivers.base import ReceiverType
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.settings import OverrideConfig, RuleConfig
from gpumond.host.logs import LogFormat, LogLevel
from gpumond.metrics.dcgm import Compat

RELOADABLE = (
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
    "reclaim",
    "allow_end_requests",
    "allow_suspend",
    "suspend_after_idle",
    "alertmanager_dry_run",
)
"""Settings that a reload changes; the others require a restart."""

LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, which `SettingsConfig` describes and checks. Values of this class are not checked."""

    source: str = "auto"
    listen: str = "127.0.0.1:9917"
    socket: Path | None = None
    socket_mode: str | None = None
    runtime_dir: Path | None = None
    state_dir: Path | None = None
    interval: float = 1.0
    insecure: bool = False
    hosts: tuple[str, ...] = ()
    web_config: Path | None = None
    tokens_file: Path | None = None
    token_review_audience: str | None = None
    token_review_directory: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    identity_proxy: IdentityProxy | None = None
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    compat: Compat | None = None
    flush_cooldown: float = 30.0
    retention: float = 90 * 86400.0
    disabled_rules: tuple[str, ...] = ()
    rule_overrides: Overrides = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    receivers: tuple[ReceiverType, ...] = LOG_ONLY
    engines: tuple[EngineConfig, ...] = ()
    quotas: tuple[Quota, ...] = ()
    reclaim: ReclaimPolicy = "user"
    allow_end_requests: bool = False
    allow_suspend: bool = False
    suspend_after_idle: float = 600.0
    alertmanager_dry_run: bool = False

    def web(self) -> WebSettings:
        """Return the web configuration. Raises ConfigError if it is invalid, or insufficient for the address."""
        web = WebSettings() if self.web_config is None else read_web(self.web_config)
        if web.tls is None and not self.is_loopback and not self.insecure:
            raise ConfigError(
                f"web_config {self.web_config}: {self.listen} is reachable from other machines; without "
                "tls_server_config, tokens and passwords are sent in clear text; add it, or set insecure (--insecure)"
            )
        return web

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK_HOSTS

    @property
    def host(self) -> str:
        return host_of(self.listen)

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    def agent_socket(self) -> Path:
        """Return the path of the agent socket: ``socket``, else in ``runtime_dir``, else the default path.

        Raises ConfigError if no directory is available.
        """
        path = self.socket or (self.runtime_dir / AGENT_SOCKET if self.runtime_dir else default_socket())
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
        configured = {rule.name: rule for rule in self.rules}
        built_in = {
            rule.name: with_overrides(rule, changed)
            for rule in self.built_in_rules()
            if (changed := self.rule_overrides.get(rule.name, {})).get("enabled", True)
        }
        return tuple({**built_in, **configured}.values())

    def built_in_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in BUILT_IN if rule.name not in self.disabled_rules)

    def receiver_names(self) -> tuple[str, ...]:
        return tuple(receiver.name for receiver in self.receivers)

    def changes_requiring_restart(self, other: Settings) -> list[str]:
        """Return the names of the settings that differ from ``other`` and require a restart."""
        names = (each.name for each in fields(self) if each.name not in RELOADABLE)
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def host_of(listen: str) -> str:
    """Return the host of HOST:PORT, an IPv6 address without brackets."""
    return listen.rpartition(":")[0].strip("[]")


MACHINE_SETTINGS = ("listen", "hosts", "socket", "runtime_dir", "state_dir")
"""Settings that differ between machines with the same configuration: addresses and directories."""
HASH_DIGITS = 12
ANY_ADAPTER: TypeAdapter[Any] = TypeAdapter(Any)


def hash_of_settings(settings: Settings) -> str:
    """Return a hash by which the settings of several machines are compared, without those of one machine."""
    values = ANY_ADAPTER.dump_python(settings, mode="json")
    return _hash({name: value for name, value in values.items() if name not in MACHINE_SETTINGS})


def hash_of_rules(rules: Iterable[Rule]) -> str:
    """Return a hash by which the rules of several machines are compared, in whatever order."""
    return _hash(
        sorted((ANY_ADAPTER.dump_python(rule, mode="json") for rule in rules), key=lambda rule: str(rule["name"]))
    )


def _hash(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:HASH_DIGITS]


HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")

ONLY_IN_FILE = ("disabled_rules", "rule_overrides", "rules", "receivers", "engines", "quotas", "identity_proxy")
"""Settings that have neither a flag nor an environment variable."""


def require_source(name: str) -> str:
    """Return the name. Raises ValueError."""
    names = ("auto", *(spec.name for spec in SOURCES))
    if name not in names:
        raise ValueError(f"expected one of {', '.join(names)}")
    return name


class SettingsConfig(StrictModel):
    """All settings. docs/reference/configuration.md is generated from their descriptions."""

    source: Annotated[str, AfterValidator(require_source)] = Field(
        "auto",
        description="the [source](plugins.md#device-sources) of device readings: `nvml`, `drm`, `sim` or `all`; "
        "`auto` uses the drivers that are present at startup",
    )
    listen: str = Field(
        "127.0.0.1:9917",
        description="address and port of metrics, API and web UI; non-loopback addresses require a `web_config` "
        "with TLS, or `insecure`",
    )
    socket: Path | None = Field(
        None, description="the agents' Unix socket; the default depends on the [user](#sockets-and-directories)"
    )
    socket_mode: str | None = Field(
        None,
        description="octal mode of the agents' socket, in quotes; by default `0666` in `/run/gpumond`, else `0600`",
    )
    runtime_dir: Path | None = Field(
        None,
        description="directory of the daemon's own [token](#sockets-and-directories) and `api.sock`; by default "
        "the directory of `socket`",
    )
    state_dir: Path | None = Field(
        None,
        description="directory of the [store](store.md); by default `/var/lib/gpumond` for root, else "
        "`$XDG_STATE_HOME/gpumond` or `~/.local/state/gpumond`",
    )
    interval: Seconds = Field(1.0, ge=0.1, le=60, description="time between two [ticks](terms.md#diagnosis)")
    insecure: bool = Field(
        False,
        description="allows non-loopback addresses without TLS; anyone who can reach them can then read all data, "
        "unless `web_config` defines users",
    )
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
        description="audience of the Kubernetes [service-account "
        "tokens](../how-to/machine-identities.md#kubernetes-service-accounts) that the daemon accepts",
    )
    token_review_directory: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="directory with the daemon's `token` and `ca.crt` for the Kubernetes API server",
    )
    identity_proxy: IdentityProxy | None = Field(
        None,
        description="the [proxy](../how-to/single-sign-on.md) whose identity headers the daemon accepts",
    )
    log_format: LogFormat = Field("text", description="log format on standard error")
    log_level: LogLevel = Field("info", description="lowest level that is logged")
    compat: Compat | None = Field(
        None,
        description="adds metrics with [DCGM's names](metrics.md#dcgms-names) to `/metrics`; `dcgm` is the latest of "
        "these versions",
    )
    flush_cooldown: Seconds = Field(
        30.0,
        description="how long rules wait after a program's flush before they flush it again; a user's flush is "
        "refused for 5 s (or `flush_cooldown`, if that is shorter) unless forced",
    )
    retention: Seconds = Field(
        90 * 86400.0, ge=86400, description="how long the audit log, receipts and resolved alerts are kept"
    )
    disabled_rules: tuple[str, ...] = Field(
        (), description="names of [built-in rules](rules.md#built-in-rules) that aren't evaluated"
    )
    rule_overrides: dict[str, OverrideConfig] = Field(
        {},
        description="[overrides](../how-to/rules.md#override-a-built-in-rule) of built-in rules' fields, by rule name",
    )
    rules: tuple[RuleConfig, ...] = Field(
        (), description="your [rules](rules.md#write-a-rule); a rule with a built-in rule's name replaces that rule"
    )
    receivers: tuple[Annotated[ReceiverConfig, Field(discriminator="type")], ...] = Field(
        LOG_ONLY, description="[receivers](../how-to/notifications.md) of alerts"
    )
    engines: tuple[EngineConfig, ...] = Field(
        (), description="[serving engines](../how-to/engines/index.md) that gpumond monitors and can flush"
    )

    quotas: tuple[QuotaConfig, ...] = Field(
        (), description="[quotas](../how-to/quotas.md): limits and reserves for programs"
    )
    reclaim: ReclaimPolicy = Field(
        "user",
        description="whose programs the daemon flushes when a program "
        "[needs memory](../how-to/wait-for-memory.md#whose-caches-are-flushed): the same user's (`user`), all users' "
        "(`all`) or nobody's (`off`)",
    )
    allow_end_requests: bool = Field(
        False,
        description="lets rules with the `request_end` key [ask programs to "
        "exit](../how-to/rules.md#ask-idle-programs-to-exit)",
    )
    allow_suspend: bool = Field(
        False, description="lets gpumond [suspend](../how-to/suspend.md) programs that allow it (experimental)"
    )
    suspend_after_idle: Seconds = Field(
        600.0,
        description="how long a program must be idle before a rule or a request for memory suspends it; `gpumond "
        "suspend` doesn't wait",
    )
    alertmanager_dry_run: bool = Field(
        False,
        description="if true, gpumond plans the flushes that "
        "[Alertmanager](../how-to/flush-from-alertmanager.md) requests, but doesn't "
        "run them",
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

    @field_validator("socket_mode", mode="before")
    @classmethod
    def _mode(cls, value: object) -> object:
        if value is not None and not (isinstance(value, str) and re.fullmatch("0?[0-7]{3}", value)):
            raise ValueError("expected an octal mode in quotes, such as '0660'")  # YAML reads 0660 as the number 432
        return value

    @field_validator("reclaim", mode="before")
    @classmethod
    def _policy(cls, value: object) -> object:
        return "off" if value is False else value  # as YAML reads off without quotes

    @field_validator("hosts", mode="before")
    @classmethod
    def _names(cls, value: object) -> object:
        names = value.replace(",", " ").split() if isinstance(value, str) else value
        for name in names if isinstance(names, (list, tuple)) else ():
            if not isinstance(name, str) or not HOST_NAME.fullmatch(name):
                raise ValueError(f"{name!r:.80} isn't a host name or address; expected one without scheme and port")
        return names

    @field_validator("disabled_rules", "rule_overrides")
    @classmethod
    def _known_rules(cls, names: Collection[str]) -> Collection[str]:
        rule_names = [rule.name for rule in BUILT_IN]
        for name in names:
            if name not in rule_names:
                hint = did_you_mean(name, rule_names) or f"; expected one or more of {', '.join(rule_names)}"
                raise ValueError(f"unknown built-in rule {name!r}{hint}")
        return names

    @model_validator(mode="after")
    def _check_listen_and_names(self) -> SettingsConfig:
        if host_of(self.listen) not in LOOPBACK_HOSTS and not self.insecure and self.web_config is None:
            raise ValueError(
                f"listen: {self.listen} is reachable from other machines, so it requires TLS and authentication; "
                "set web_config, listen on 127.0.0.1, or set insecure (--insecure) if you trust the network"
            )
        names, receivers = [rule.name for rule in self.rules], [receiver.name for receiver in self.receivers]
        engines, quotas = [engine.name for engine in self.engines], [quota.name for quota in self.quotas]
        lists = {"rules": names, "receivers": receivers, "engines": engines, "quotas": quotas}
        for setting, names_in_list in lists.items():
            duplicate = next((name for name in names_in_list if names_in_list.count(name) > 1), None)
            if duplicate is not None:
                raise ValueError(f"{setting}: the name {duplicate!r} is used twice")
        for name in self.rule_overrides:
            if name in names or name in self.disabled_rules:
                other = "rules" if name in names else "disabled_rules"
                raise ValueError(f"rule_overrides: {name} is also in {other}; remove it from one of them")
        for rule in BUILT_IN:
            if override := self.rule_overrides.get(rule.name):
                try:
                    override.check(rule)
                except ValueError as error:
                    raise ValueError(f"rule_overrides: {rule.name}: {error}") from None
        for rule_config in self.rules:
            for name in rule_config.receivers:
                if name not in receivers:
                    raise ValueError(
                        f"rules: {rule_config.name}: unknown receiver {name!r}; known receivers: {', '.join(receivers)}"
                    )
        return self

    def settings(self) -> Settings:
        values = {name: getattr(self, name) for name in type(self).model_fields}
        converted = {
            "rule_overrides": {name: override.fields() for name, override in self.rule_overrides.items()},
            "rules": tuple(rule.rule() for rule in self.rules),
            "quotas": tuple(quota.quota() for quota in self.quotas),
        }
        return Settings(**values | converted)
