"""A stage that raises must not leave the others waiting: it goes on with zeros, and all raise when the step ends."""

from __future__ import annotations

from dataclasses import dataclass


class StageFailedError(RuntimeError):
    """Raised on the ranks whose peer's stage has raised; the message is that of the peer."""


@dataclass
class Failure:
    """The first exception of this rank in the step that runs.

    Attributes:
        error: what was raised, ``None`` while all goes well.
        place: what was being done, in words.
    """

    error: BaseException | None = None
    place: str = ""

    def note(self, error: BaseException, place: str) -> None:
        """Remember `error`, unless there is one already, which will be its cause."""
        if self.error is None:
            self.error, self.place = error, place

    def clear(self) -> None:
        """Forget it: a new step begins."""
        self.error, self.place = None, ""
