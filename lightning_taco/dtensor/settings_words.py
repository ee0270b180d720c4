"""The settings of a session in words, to be compared: of a checkpoint with those given, of one step with the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lightning_taco.config import CompressionConfig

CODEC_SETTINGS = ("forward", "backward", "exclude", "recipes")


def settings_in_words(config: CompressionConfig, element: Literal["e4m3", "int8"]) -> dict[str, str]:
    """Each of the settings as text, to be compared: codecs with ``element="auto"`` resolved to `element`."""
    codecs = {"forward": config.forward, "backward": config.backward}
    words = {name: "as it is" if codec is None else str(codec.resolved(element)) for name, codec in codecs.items()}
    others = ("min_bytes", "exclude", "recipes", "during_validation")
    return words | {name: str(getattr(config, name)) for name in others}


def settings_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Where two `settings_in_words` differ, with both; ``None`` where they do not."""
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    return "; ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names) or None
