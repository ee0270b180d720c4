"""Which exchanges of a session go as they are for a while, who asked for it and why."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_taco.collectives.traffic import Direction, Kind
from lightning_taco.dtensor.exchange import SiteKey

SUSPENDED_PREFIX = "suspended by "


class Suspensions:
    """What several owners (a guard, a schedule) want sent as it is: what any of them wants is suspended.

    What they say holds from the next `start_step` on, so that forward, recomputation and backward of a step agree.
    Cost: nothing without suspensions; a dictionary look-up an exchange with them.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, dict[SiteKey | None, str]] = {}
        self._outcomes: dict[SiteKey | None, str] = {}
        self._has_changed = False

    def want(self, owner: str, reasons: Mapping[SiteKey | None, str]) -> None:
        """Replace all that `owner` has wanted before by `reasons`; ``None`` is the key of all sites."""
        self._wanted[owner] = {key and SiteKey(*key): reason for key, reason in reasons.items()}
        self._has_changed = True

    def start_step(self) -> None:
        """Put to use what the owners want now."""
        if not self._has_changed:
            return
        self._has_changed = False
        texts: dict[SiteKey | None, list[str]] = {}
        for owner in sorted(self._wanted):
            for key, reason in self._wanted[owner].items():
                texts.setdefault(key, []).append(f"{SUSPENDED_PREFIX}{owner}: {reason}")
        self._outcomes = {key: "; ".join(parts) for key, parts in texts.items()}

    def outcome(self, site: str, direction: Direction, kind: Kind) -> str | None:
        """Who suspended this exchange and why, as traffic counters show it; ``None`` where it is compressed."""
        outcomes = self._outcomes
        if not outcomes:
            return None
        return outcomes.get(None) or outcomes.get(SiteKey(site, direction, kind))

    @property
    def are_all_suspended(self) -> bool:
        """Whether nothing is compressed in this step."""
        return None in self._outcomes
