"""What traffic counters call what became of an exchange, and why nothing was compressed, by what they have counted."""

from __future__ import annotations

from lightning_taco.collectives.traffic import TrafficCounters
from lightning_taco.dtensor.suspensions import SUSPENDED_PREFIX

COMPRESSED = "compressed"
PARAMETER_REASON = "parameter or its gradient"


def nothing_compressed_reason(traffic: TrafficCounters) -> str | None:
    """Why nothing was compressed; ``None`` if something was, or somebody has asked for it."""
    if traffic.total(outcome=COMPRESSED).num_messages:
        return None
    counts = traffic.stock_reasons()
    reasons = {why: count for why, count in counts.items() if not why.startswith(SUSPENDED_PREFIX)}
    if counts and not reasons:
        return None
    if not reasons:
        return "DTensor redistributed nothing over the tensor-parallel axis (is the model parallelised with DTensor?)"
    return ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
