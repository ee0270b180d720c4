"""What `lightning-taco study` observes and compares."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_taco.config import CodecConfig


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What a study observes, compares and writes.

    Args:
        num_steps: observe the messages of this many optimizer steps, the last ones of the training.
        max_messages: look at this many messages of each kind of exchange of a module and direction; later ones are
            only counted.
        candidates: codecs to compare, instead of the built-in list of about thirty.
        baselines: also compare methods that are no codecs of this package, such as FP8 with one scale a tensor.
        folder: where results are written; by default ``study`` in the folder of the Trainer's logger.

    Raises:
        ValueError: for an impossible value; the message names it and the remedy.
    """

    num_steps: int = 2
    max_messages: int = 4
    candidates: list[CodecConfig] | None = None
    baselines: bool = True
    folder: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_steps", "max_messages"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is not a number from 1 up; use {name}=2, for example.")
        if self.candidates is not None:
            self._check_candidates(self.candidates)

    def _check_candidates(self, candidates: list[CodecConfig]) -> None:
        if not candidates and not self.baselines:
            raise ValueError("candidates=[] and baselines=False leave nothing to compare; name one codec at least.")
        for codec in candidates:
            if not isinstance(codec, CodecConfig):
                raise ValueError(f"candidates holds {codec!r}, which is no codec; use CodecConfig(...).")
            if candidates.count(codec) > 1:
                raise ValueError(f"candidates names '{codec}' twice; leave one out.")
            if codec.reshape != "natural":
                raise ValueError(
                    f"candidates holds a codec with reshape={codec.reshape!r}, whose order of channels exists only in "
                    "the run that learns it; use reshape='natural'."
                )


DEFAULT_SETTINGS = StudySettings()
