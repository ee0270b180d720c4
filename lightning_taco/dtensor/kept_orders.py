"""The channel orders of a session, through changes of its settings and through checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_taco.dtensor.channel_order import ChannelOrders
from lightning_taco.dtensor.settings_words import CODEC_SETTINGS

Words = Mapping[str, str]


class KeptOrders:
    """The orders of the current settings, and those of a checkpoint whose settings are not in force yet.

    Args:
        make: orders for the current settings, not calibrated yet; ``None`` when no codec of theirs asks for them.

    Attributes:
        current: of the current settings, or ``None``.
    """

    def __init__(self, make: Callable[[], ChannelOrders | None]) -> None:
        self._make = make
        self.current = make()
        self._saved: tuple[Words, Mapping[str, Any]] | None = None

    def follow(self, before: Words, now: Words) -> None:
        """Look for orders anew where codecs have changed, unless a checkpoint had those of the settings `now`.

        Args:
            before: the settings in words.
            now: the same, of those that are in force from here on.
        """
        if any(before[name] != now[name] for name in CODEC_SETTINGS):
            self.current = self._make()
        if self._saved is not None and self._saved[0] == now and self.current is not None:
            self.current.load_state_dict(self._saved[1])
            self._saved = None

    def state_dict(self) -> dict[str, Any] | None:
        """Of the current orders; all ranks call it, since those that are still being calibrated are gathered."""
        return None if self.current is None else self.current.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], opened_with: Words, current: Words) -> None:
        """Take over the orders of a checkpoint.

        Args:
            state: what `state_dict` has given.
            opened_with: the settings, in words, with which the checkpoint's session was opened.
            current: those that were in force when it was written.
        """
        if current != opened_with:
            self._saved = (current, state)  # of settings that a schedule will switch to again
        elif self.current is not None:
            self.current.load_state_dict(state)
