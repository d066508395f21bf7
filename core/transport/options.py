"""Options that every connector between peers has."""

from __future__ import annotations

from pydantic import Field

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


__all__ = ["PeerOptions"]
