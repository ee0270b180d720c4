"""How long something that failed is held back, and for how much longer when it fails again."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Hold:
    """What is held back.

    Attributes:
        reason: why, in a few words.
        num_steps: for how many steps.
        until: the last of them, in which it may be tried.
    """

    reason: str
    num_steps: int
    until: int


class Hysteresis(Generic[Key]):
    """What is held back now, with times that double at each relapse.

    A relapse is a failed trial, or a new failure no more steps after the release than the last hold had. After a
    longer time without failure the next hold is as short as the first.

    >>> holds = Hysteresis()
    >>> holds.hold("a", "it failed", step=10, num_steps=100).until
    110
    >>> holds.due(109), holds.due(110)
    ([], ['a'])
    >>> holds.extend("a", step=110).until
    310
    """

    def __init__(self) -> None:
        self.holds: dict[Key, Hold] = {}
        self._released: dict[Key, tuple[int, int]] = {}  # at which step, after how many

    def hold(self, key: Key, reason: str, step: int, num_steps: int) -> Hold:
        """Hold `key` back for the `num_steps` steps after `step`, or for twice the last time at a relapse."""
        released_at, last = self._released.pop(key, (0, 0))
        if last and step - released_at <= last:
            num_steps = 2 * last
        self.holds[key] = Hold(reason, num_steps, step + num_steps)
        return self.holds[key]

    def due(self, step: int) -> list[Key]:
        """What is to be tried in `step`."""
        return [key for key, hold in self.holds.items() if hold.until <= step]

    def extend(self, key: Key, step: int) -> Hold:
        """The trial in `step` has failed: hold `key` back for twice the time."""
        hold = self.holds[key]
        self.holds[key] = Hold(hold.reason, 2 * hold.num_steps, step + 2 * hold.num_steps)
        return self.holds[key]

    def release(self, key: Key, step: int) -> None:
        """Hold `key` back no longer than to the end of `step`."""
        self._released[key] = (step, self.holds.pop(key).num_steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values; keys that are tuples as lists."""
        return {
            "holds": [[_plain(key), hold.reason, hold.num_steps, hold.until] for key, hold in self.holds.items()],
            "released": [[_plain(key), step, num_steps] for key, (step, num_steps) in self._released.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.holds = {_key(key): Hold(*values) for key, *values in state["holds"]}
        self._released = {_key(key): (step, num_steps) for key, step, num_steps in state["released"]}


def _plain(key: Any) -> Any:
    return list(key) if isinstance(key, tuple) else key


def _key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
