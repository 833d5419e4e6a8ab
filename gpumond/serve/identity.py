"""Identities of users whom a declared proxy has signed in, and what they see: their own programs. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from starlette.exceptions import HTTPException

from gpumond.config.tokens import IdentityProxy, parse_network
from gpumond.facts.frame import Alert, Frame, Ledger, LedgerLine
from gpumond.facts.program import ProcessKey
from gpumond.facts.snapshot import DeviceReading, Snapshot
from gpumond.serve.limits import parse_address

USER_HEADER, EMAIL_HEADER, GROUPS_HEADER = b"x-forwarded-user", b"x-forwarded-email", b"x-forwarded-groups"
MAX_HEADER_LENGTH, MAX_GROUPS = 256, 256
OTHERS = "(others)"
"""Workload of the line that contains the memory of all programs which a user does not see."""
FRAME_ROUTE_NAMES = (
    "frame",
    "snapshot",
    "devices",
    "processes",
    "agents",
    "engines",
    "ledger",
    "verdicts",
    "alerts",
    "live",
)
"""Routes below /api/v1 that contain nothing but a frame, which is limited to the user's programs."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request, as the proxy states it. Empty: not stated."""

    user: str
    email: str = ""
    groups: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.user or self.email

    @property
    def subjects(self) -> frozenset[str]:
        """The identity's subjects in ``tokens_file``."""
        stated = [("user", self.user), ("email", self.email), *(("group", group) for group in self.groups)]
        return frozenset(f"{kind}:{text}" for kind, text in stated if text)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user who sees the programs that run as ``user``, and those in Kubernetes namespaces that a pattern matches."""

    user: str
    namespaces: frozenset[str]

    def owns(self, user: str, namespace: str) -> bool:
        if self.user and user == self.user:
            return True
        return bool(namespace) and any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)


class IdentityHeaders:
    """Reads the identity of a request from the declared proxy. ``uid``: the uid of the proxy on this machine."""

    def __init__(self, proxy: IdentityProxy, uid: int | None) -> None:
        self._uid, self._namespaces = uid, proxy.namespaces
        self._networks = [parse_network(text) for text in proxy.addresses]

    def _is_proxy(self, scope: Mapping[str, Any]) -> bool:
        state, client = scope.get("state") or {}, scope.get("client")
        if state.get("uid") is not None:
            return False  # a Unix socket, whose peer the kernel identifies
        address = parse_address(str(client[0])) if client else None
        if address is None or address.is_loopback:
            return self._uid is not None and state.get("user") == f"uid:{self._uid}"
        return any(address in network for network in self._networks)

    def identity(self, scope: Mapping[str, Any]) -> Identity | None:
        """Return who sends a request; None if it does not come from the proxy.

        Raises 400 for a header that is repeated or no plain text, and 401 without a user and an e-mail address.
        """
        if not self._is_proxy(scope):
            return None
        headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
        user, email, groups = (_single_header(headers, name) for name in (USER_HEADER, EMAIL_HEADER, GROUPS_HEADER))
        if not user and not email:
            raise HTTPException(401, "the proxy sent no user: X-Forwarded-User and X-Forwarded-Email are missing")
        names = tuple(dict.fromkeys(filter(None, (each.strip() for each in groups.split(",")))))
        if len(names) > MAX_GROUPS:
            raise HTTPException(400, f"X-Forwarded-Groups has more than {MAX_GROUPS} groups")
        return Identity(user, email, names)

    def tenant(self, identity: Identity) -> Tenant:
        """Return what an identity without scopes sees."""
        patterns = (pattern for group in identity.groups for pattern in self._namespaces.get(group, ()))
        return Tenant(identity.user, frozenset(patterns))


def _single_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """Return the value of a header, empty without one. Raises 400."""
    values = [value.decode("latin-1").strip() for key, value in headers if key == name]
    text = values[0] if values else ""
    max_length = MAX_HEADER_LENGTH if name != GROUPS_HEADER else MAX_HEADER_LENGTH * MAX_GROUPS
    if len(values) > 1 or len(text) > max_length or not (text.isascii() and text.isprintable()):
        raise HTTPException(
            400, f"send at most one {name.decode()} header, of at most {max_length} printable ASCII characters"
        )
    return text


T = TypeVar("T")


def tenant_frame(frame: Frame, tenant: Tenant) -> Frame:
    """Return the frame with a tenant's programs only.

    Devices and totals are complete: on each device, the memory of all other programs is one line, ``OTHERS``. Alerts on
    a device remain without their texts, which may name programs.
    """
    snapshot = frame.snapshot
    keys = {key for key, owner in snapshot.owners.items() if tenant.owns(owner.user, owner.pod_namespace)}

    def own_values(values: Iterable[T], key: Callable[[T], ProcessKey | None]) -> tuple[T, ...]:
        return tuple(each for each in values if key(each) in keys)

    tenant_snapshot = replace(
        snapshot,
        devices=tuple(_device(device, keys) for device in snapshot.devices),
        reports=own_values(snapshot.reports, lambda each: each.key),
        faults=tuple(replace(fault, detail="") for fault in snapshot.faults),
        ends=own_values(snapshot.ends, lambda each: each.key),
        excesses=own_values(snapshot.excesses, lambda each: each.key),
        engines=tuple(
            each for each in snapshot.engines if each.processes and {process.key for process in each.processes} <= keys
        ),
        quotas=own_values(snapshot.quotas, lambda each: each.key),
        suspensions=own_values(snapshot.suspensions, lambda each: each.process),
        overheads=own_values(snapshot.overheads, lambda each: each.process),
        suspended_programs=own_values(snapshot.suspended_programs, lambda each: each.key),
    )
    return Frame(
        snapshot=tenant_snapshot,
        ledger=Ledger(tuple(_lines(frame.ledger, keys, snapshot)), frame.ledger.overcounts),
        verdicts=own_values(frame.verdicts, lambda each: each.process),
        alerts=tuple(_alerts(frame.alerts, keys)),
    )


def _device(device: DeviceReading, keys: Collection[ProcessKey]) -> DeviceReading:
    if device.processes is None:
        return device
    return replace(device, processes=tuple(each for each in device.processes if each.key in keys))


def _lines(ledger: Ledger, keys: Collection[ProcessKey], snapshot: Snapshot) -> Iterable[LedgerLine]:
    others: dict[str, int] = {}
    for line in ledger.lines:
        if line.process in keys or line.share == "unattributed":
            yield line
        else:
            others[line.device_uuid] = others.get(line.device_uuid, 0) + line.used_bytes
    for uuid, used in others.items():
        yield LedgerLine(device_uuid=uuid, share="opaque", used_bytes=used, workload=OTHERS)


def _alerts(alerts: Iterable[Alert], keys: Collection[ProcessKey]) -> Iterable[Alert]:
    for alert in alerts:
        if alert.process in keys:
            yield alert
        elif alert.process is None and not {"pid", "workload", "uid", "engine"} & {name for name, _ in alert.labels}:
            yield replace(alert, annotations=(), silenced_by=())
