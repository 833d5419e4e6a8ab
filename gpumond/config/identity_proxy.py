"""The proxy that signs users in, such as oauth2-proxy, and the programs that they see."""

from __future__ import annotations

import ipaddress
import pwd
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from gpumond.config.models import Strict
from gpumond.facts.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Text = Annotated[str, Field(min_length=1, max_length=256)]


class IdentityProxy(Strict):
    """Proxy whose headers `X-Forwarded-User`, `-Email` and `-Groups` state who sends a request.

    Those of all others are ignored. Users without a line in `tokens_file` see their own programs only.
    """

    addresses: tuple[str, ...] = Field(
        (), max_length=64, description="its addresses or networks on other machines, such as `10.1.0.0/28`"
    )
    user: Text | None = Field(
        None, description="the user as which it runs on this machine, by name or uid; the kernel verifies it"
    )
    namespaces: dict[Text, tuple[Text, ...]] = Field(
        {}, description="by group, patterns of the Kubernetes namespaces whose programs its members see"
    )

    @field_validator("addresses")
    @classmethod
    def _networks(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            if network_of(text).network_address.is_loopback:
                raise ValueError(f"{text}: any program on this machine has this address; set user instead")
        return texts

    @model_validator(mode="after")
    def _some(self) -> IdentityProxy:
        if not self.addresses and self.user is None:
            raise ValueError("expected addresses of the proxy or, on this machine, its user")
        return self

    def uid(self) -> int | None:
        """Return the uid of its user on this machine, None without one. Raises ConfigError."""
        if self.user is None:
            return None
        try:
            return int(self.user) if self.user.isdecimal() else pwd.getpwnam(self.user).pw_uid
        except KeyError:
            raise ConfigError(f"identity_proxy: user: this machine has no user {self.user!r:.80}") from None


def network_of(text: str) -> Network:
    """Return the network of an address or a network. Raises ValueError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise ValueError(f"{text!r:.80} isn't an IP address or network such as 10.1.0.0/28") from None
