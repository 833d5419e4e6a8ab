"""The configuration file's models, which check it; docs/reference/configuration.md is generated from them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from gpumond.config.identity_proxy import IdentityProxy
from gpumond.config.models import Seconds, Strict
from gpumond.config.settings import LOOPBACK, Settings, host_of
from gpumond.devices import SOURCES
from gpumond.facts.quota import ReclaimPolicy
from gpumond.features.alerts.receivers import ReceiverType
from gpumond.features.alerts.receivers.alertmanager import Alertmanager
from gpumond.features.alerts.receivers.log import Log
from gpumond.features.alerts.receivers.webhook import Webhook
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.quotas.settings import QuotaConfig
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.features.rules.settings import OverrideConfig, RuleConfig
from gpumond.host.logs import LogFormat, LogLevel
from gpumond.metrics.dcgm import Compat

HOST_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")

ONLY_IN_FILE = ("disabled_rules", "rule_overrides", "rules", "receivers", "engines", "quotas", "identity_proxy")
"""Settings that have neither a flag nor an environment variable."""


ReceiverConfig = Log | Webhook | Alertmanager
"""All types of receivers."""

RECEIVER_TYPES: Mapping[str, type[ReceiverType]] = {
    each.model_fields["type"].default: each for each in get_args(ReceiverConfig)
}


def known_source(name: str) -> str:
    """Return the name. Raises ValueError."""
    known = ("auto", *(spec.name for spec in SOURCES))
    if name not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return name


class SettingsConfig(Strict):
    """All settings. docs/reference/configuration.md is generated from their descriptions."""

    source: Annotated[str, AfterValidator(known_source)] = Field(
        "auto",
        description="the [source](plugins.md#device-sources) of device readings; `auto` selects the drivers that "
        "are present at the start, `all` also uses drivers that are loaded later",
    )
    listen: str = Field(
        "127.0.0.1:9917",
        description="address and port of metrics, API and web UI; an address other than loopback requires a "
        "`web_config` with TLS, or `insecure`",
    )
    socket: Path | None = Field(
        None, description="the agents' Unix socket; the default depends on the [user](#sockets-and-directories)"
    )
    socket_mode: str | None = Field(
        None,
        pattern=r"^0?[0-7]{3}$",
        description="the agents' socket mode in octal, in quotes; by default `0666` below `/run/gpumond`, else `0600`",
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
    insecure: bool = Field(False, description="allows an address other than loopback without TLS and authentication")
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
        "tokens](../how-to/access.md#kubernetes-service-accounts) that the daemon accepts; the API server verifies "
        "them by TokenReview",
    )
    token_review_directory: Path = Field(
        Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="directory with `token` and `ca.crt`, with which the daemon connects to the API server",
    )
    identity_proxy: IdentityProxy | None = Field(
        None, description="the [proxy](../how-to/single-sign-on.md) that signs users in, and whose headers count"
    )
    log_format: LogFormat = Field("text", description="log format on standard error")
    log_level: LogLevel = Field("info", description="lowest level that is logged")
    compat: Compat | None = Field(
        None,
        description="adds metrics with [DCGM's names](metrics.md#dcgms-names) to `/metrics`; by default they are "
        "exported only with `?compat=…`. `dcgm` is the newest version",
    )
    flush_cooldown: Seconds = Field(
        30.0,
        description="minimum time between two flushes of a program by rules; users wait 5 s, or this time if it is "
        "shorter",
    )
    retention: Seconds = Field(
        90 * 86400.0, ge=86400, description="how long the audit log, receipts and resolved alerts are kept"
    )
    disabled_rules: tuple[str, ...] = Field(
        (), description="names of [built-in rules](rules.md#built-in-rules) that are not evaluated"
    )
    rule_overrides: dict[str, OverrideConfig] = Field(
        {},
        description="[overrides](../how-to/rules.md#override-a-built-in-rule) of single fields of built-in rules: "
        "`threshold`, `for`, `severity`, `enabled`, by rule name",
    )
    rules: tuple[RuleConfig, ...] = Field(
        (), description="[rules](rules.md#write-a-rule); one with a built-in rule's name replaces it"
    )
    receivers: tuple[Annotated[ReceiverConfig, Field(discriminator="type")], ...] = Field(
        (Log(name="log"),), description="[receivers](../how-to/notifications.md) of alerts"
    )
    engines: tuple[EngineConfig, ...] = Field(
        (), description="[serving engines](../how-to/engines/index.md) that gpumond monitors and can flush"
    )

    quotas: tuple[QuotaConfig, ...] = Field((), description="[quotas](../how-to/quotas.md) of processes")
    reclaim: ReclaimPolicy = Field(
        "user",
        description="programs that the daemon flushes when another one "
        "[needs memory](../how-to/wait-for-memory.md#whose-caches-are-flushed): "
        "those of the same `user`, `all`, or none (`off`)",
    )
    allow_end_requests: bool = Field(
        False,
        description="allows [actions](../how-to/rules.md#end-idle-programs) with the key `request_end` to ask "
        "programs to end",
    )
    allow_suspend: bool = Field(
        False, description="allows gpumond to [suspend](../how-to/suspend.md) programs that agree (experimental)"
    )
    suspend_idle: Seconds = Field(
        600.0,
        description="how long a program must have been idle before it is suspended by a rule, or because another "
        "program needs memory",
    )
    alertmanager_dry_run: bool = Field(
        False,
        description="[alerts from Alertmanager](../how-to/flush-from-alertmanager.md) only plan flushes",
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
                raise ValueError(f"{name!r:.80} isn't a host name or address; expected one without scheme and port")
        return names

    @field_validator("disabled_rules", "rule_overrides")
    @classmethod
    def _known_rules(cls, names: Collection[str]) -> Collection[str]:
        known = [rule.name for rule in BUILT_IN]
        for name in names:
            if name not in known:
                raise ValueError(f"unknown built-in rule {name!r}; expected one or more of {', '.join(known)}")
        return names

    @model_validator(mode="after")
    def _safe(self) -> SettingsConfig:
        if host_of(self.listen) not in LOOPBACK and not self.insecure and self.web_config is None:
            raise ValueError(
                f"listen: {self.listen} is reachable from other machines and requires TLS and authentication: "
                "set web_config, listen on 127.0.0.1, or set insecure (--insecure) if you trust the network"
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

    def settings(self) -> Settings:
        plain = {name: getattr(self, name) for name in type(self).model_fields}
        built = {
            "rule_overrides": {name: override.fields() for name, override in self.rule_overrides.items()},
            "rules": tuple(rule.rule() for rule in self.rules),
            "quotas": tuple(quota.quota() for quota in self.quotas),
        }
        return Settings(**plain | built)
