"""What callbacks did to the compression of a run, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Event:
    """One change that a callback made, the same on all ranks.

    Attributes:
        step: training step, as loggers count them, from which on it holds.
        source: who made it: ``"guard"`` or ``"schedule"``.
        action: ``"suspend"`` (send as it is), ``"resume"`` (compress again) or ``"switch"`` (other codecs).
        site: module path with direction and kind of exchange, as in the tags of `CompressionMonitor`; ``""`` for all.
        reason: what happened, in a sentence.
    """

    step: int
    source: str
    action: str
    site: str
    reason: str

    def __str__(self) -> str:
        return (
            f"lightning_taco: step {self.step}: {self.source}: {self.action} {self.site or 'all sites'}: {self.reason}"
        )


@runtime_checkable
class EventLogger(Protocol):
    """A logger that keeps events beside numbers."""

    def log_event(self, event: Event) -> None:
        """Keep `event`; called on every rank."""
        ...
