"""Options that every connector between peers has, and those of all that meet over a network."""

from __future__ import annotations

import ipaddress
from typing import Self

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.plugin import Options


class PeerOptions(Options):
    """How far peers are trusted, and for how long."""

    peer_timeout: float = Field(
        10.0, gt=0, description="Seconds after which a peer that owes an answer is taken to be gone."
    )
    check: float = Field(
        1.0, ge=0, le=1, description="Share of the blocks whose digests are compared when they arrive; 1 is all."
    )
    quarantine_after: int = Field(
        3, gt=0, description="Damaged deliveries in a row after which a peer is not asked any more for a while."
    )
    quarantine_seconds: float = Field(60.0, gt=0, description="How long that while is.")


class NetworkOptions(PeerOptions):
    """Who may talk to whom. As it stands, only processes of this host."""

    host: str = Field(
        "127.0.0.1", description="Address that a producer listens at; consumers of other hosts need one of the network."
    )
    port: int = Field(0, ge=0, le=65535, description="Port that a producer listens at; 0 takes a free one.")
    advertise: str | None = Field(
        None, description="Address at which consumers reach the producer, where it isn't host (0.0.0.0, say)."
    )
    peers: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1/128"),
        description="Networks whose producers a consumer may ask. Handles pass through clients, so this is what keeps "
        "a client from making the engine talk to anybody else.",
    )
    secret: SecretStr = Field(
        SecretStr(""), description="Shared secret that both sides must know; empty asks for none. May be ${NAME}."
    )

    @field_validator("host", "advertise")
    @classmethod
    def _numeric(cls, value: str | None) -> str | None:
        """Names would have to be looked up while requests wait."""
        if value is not None:
            ipaddress.ip_address(value)
        return value

    @field_validator("peers")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ipaddress.ip_network(network)
        return value

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if ipaddress.ip_address(self.host).is_unspecified and self.advertise is None:
            raise ValueError(f"host {self.host} is no address that a consumer can reach; set advertise to one")
        return self


__all__ = ["NetworkOptions", "PeerOptions"]
