"""Configuration: flags override the environment (``GPUMOND_*``), which overrides the file and the defaults.

`schema` checks the values, `loading` reads the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from gpumond.config.identity_proxy import IdentityProxy
from gpumond.config.web_file import Web, read_web
from gpumond.facts.alerts import Overrides, Rule, overridden
from gpumond.facts.errors import ConfigError
from gpumond.facts.messages import default_socket
from gpumond.facts.quota import Quota, ReclaimPolicy
from gpumond.features.alerts.receivers import ReceiverType
from gpumond.features.alerts.receivers.log import Log
from gpumond.features.engines.settings import EngineConfig
from gpumond.features.rules.built_in import BUILT_IN
from gpumond.host.logs import LogFormat, LogLevel
from gpumond.metrics.dcgm import Compat

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
    "reclaim",
    "allow_end_requests",
    "allow_suspend",
    "suspend_idle",
    "alertmanager_dry_run",
)
"""Settings that a reload changes; the others require a restart."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, which `schema.SettingsConfig` describes and checks. Values of this class are not checked."""

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
    receivers: tuple[ReceiverType, ...] = (Log(name="log"),)
    engines: tuple[EngineConfig, ...] = ()
    quotas: tuple[Quota, ...] = ()
    reclaim: ReclaimPolicy = "user"
    allow_end_requests: bool = False
    allow_suspend: bool = False
    suspend_idle: float = 600.0
    alertmanager_dry_run: bool = False

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
        return host_of(self.listen)

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
        own = {rule.name: rule for rule in self.rules}
        built_in = {
            rule.name: overridden(rule, changed)
            for rule in self.built_in_rules()
            if (changed := self.rule_overrides.get(rule.name, {})).get("enabled", True)
        }
        return tuple({**built_in, **own}.values())

    def built_in_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in BUILT_IN if rule.name not in self.disabled_rules)

    def receiver_names(self) -> tuple[str, ...]:
        """Return the names of the receivers."""
        return tuple(receiver.name for receiver in self.receivers)

    def differs(self, other: Settings) -> list[str]:
        """Return the names of the settings that differ from ``other`` and require a restart."""
        fixed = (each.name for each in fields(self) if each.name not in RELOADED)
        return [name for name in fixed if getattr(self, name) != getattr(other, name)]


def host_of(listen: str) -> str:
    """Return the host of HOST:PORT, an IPv6 address without brackets."""
    return listen.rpartition(":")[0].strip("[]")


OF_ONE_MACHINE = ("listen", "hosts", "socket", "runtime_dir", "state_dir")
"""Settings that differ between machines with the same configuration: addresses and directories."""
DIGITS = 12
ANY: TypeAdapter[Any] = TypeAdapter(Any)


def hash_of_settings(settings: Settings) -> str:
    """Return a hash by which the settings of several machines are compared, without those of one machine."""
    values = ANY.dump_python(settings, mode="json")
    return _hash({name: value for name, value in values.items() if name not in OF_ONE_MACHINE})


def hash_of_rules(rules: Iterable[Rule]) -> str:
    """Return a hash by which the rules of several machines are compared, in whatever order."""
    return _hash(sorted((ANY.dump_python(rule, mode="json") for rule in rules), key=lambda rule: str(rule["name"])))


def _hash(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]
