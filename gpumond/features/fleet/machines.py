"""Several machines: find their daemons, read their frames, and flush programs on them.

There is one daemon on each machine and no central service. ``Machines`` is the only place that maps the name of a
machine, as in the label ``instance`` of a series, to the address of its daemon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpumond.facts.errors import DiscoveryError

DEFAULT_PORT = 9917
METRICS_PATH = "/metrics"
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?")
_PREFIX = re.compile(r"[A-Za-z0-9._~/-]*")


@dataclass(frozen=True, slots=True)
class Machine:
    """One daemon. ``name`` is its label ``instance``, ``url`` its address, ``labels`` are the other labels.

    ``proven``: the list with this name and address comes from this machine, or from a server that was verified.
    """

    name: str
    url: str
    labels: tuple[tuple[str, str], ...] = ()
    proven: bool = True

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise DiscoveryError(f"{self.name!r:.80} is not a name of a machine")

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def address(self) -> str:
        """``HOST:PORT``"""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """The path before those of the API; empty without a proxy that adds one."""
        return urlsplit(self.url).path


class Machines:
    """Machines by name, in the order in which they were found, each address once."""

    def __init__(self, machines: Iterable[Machine]) -> None:
        self.all = tuple({(each.name, each.url): each for each in machines}.values())
        self._by_name: dict[str, list[Machine]] = {}
        self._by_address: dict[str, list[Machine]] = {}
        self._by_host: dict[str, list[Machine]] = {}
        for each in self.all:
            self._by_name.setdefault(each.name, []).append(each)
            self._by_address.setdefault(each.address, []).append(each)
            for host in {each.host, _parts(each.name)[0]}:
                self._by_host.setdefault(host, []).append(each)

    def address_of(self, instance: str) -> Machine:
        """Return the machine of a label ``instance``: by its name, its address or, if one of the two has no port, its
        host.

        Raises DiscoveryError for none, and for several with different addresses.
        """
        host, port = _parts(instance)
        same_host = [each for each in self._by_host.get(host, ()) if port is None or _parts(each.name)[1] is None]
        found = self._by_name.get(instance) or self._by_address.get(instance) or same_host
        if len({each.url for each in found}) > 1:
            raise DiscoveryError(f"several addresses have the name {instance}: {', '.join(each.url for each in found)}")
        if not found:
            raise DiscoveryError(f"no address of {instance} is known")
        return found[0]


def machine(
    address: str, labels: Mapping[str, str], *, scheme: str = "http", port: int | None = DEFAULT_PORT
) -> Machine:
    """Return the machine of an address such as ``HOST``, ``HOST:PORT`` or ``[IPV6]:PORT``. Raises DiscoveryError.

    The labels ``__scheme__`` and ``__metrics_path__`` have the meaning that Prometheus defines; ``scheme`` and ``port``
    are the defaults. Without the label ``instance``, the address is the name.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[2] or 1) not in range(1, 65536):
        raise DiscoveryError(f"{address!r:.80} is not an address; expected HOST or HOST:PORT")
    scheme = labels.get("__scheme__", scheme)
    if scheme not in ("http", "https"):
        raise DiscoveryError(f"{address}: __scheme__ is {scheme!r:.40}; expected http or https")
    prefix = labels.get("__metrics_path__", METRICS_PATH).removesuffix(METRICS_PATH).rstrip("/")
    if not _PREFIX.fullmatch(prefix) or (prefix and not prefix.startswith("/")):
        raise DiscoveryError(f"{address}: __metrics_path__ {prefix!r:.80} is not a path")
    default = port or {"http": 80, "https": 443}[scheme]
    own = {name: text for name, text in labels.items() if name != "instance" and not name.startswith("__")}
    url = f"{scheme}://{match[1]}:{match[2] or default}{prefix}"
    return Machine(labels.get("instance") or address, url, tuple(sorted(own.items())))


def _parts(name: str) -> tuple[str, str | None]:
    """Return host and port of a name; the port is None without one. A name of another form is its own host."""
    match = _ADDRESS.fullmatch(name)
    return (match[1].strip("[]").lower(), match[2]) if match else (name, None)
