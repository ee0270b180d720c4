"""What is compressed between pipeline stages, and how: one dataclass that YAML, jsonargparse and Python share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_taco.config import CodecConfig, resolve_settings
from lightning_taco.pipeline_parallel.wire import NAMED_CODECS

DEFAULT_MIN_BYTES = 1 << 16

NamedCodec = Literal["tah_quant", "fixed_point_8", "fixed_point_7", "fixed_point_6"]
TransferChoice = CodecConfig | NamedCodec | None


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How activations travel to the next pipeline stage, and their gradients back.

    Args:
        forward: codec of activations: a `CodecConfig`, the name of a codec for transfers (``"tah_quant"``,
            ``"fixed_point_8"``, ``"fixed_point_7"``, ``"fixed_point_6"``), or ``None``: as they are.
        backward: the same of their gradients.
        min_bytes: a tensor of fewer bytes than this, before compression, is sent as it is.
        during_validation: compress in validation, test and prediction too.
        seed: of stochastic rounding; the same seed gives the same bits.

    Raises:
        ValueError: for an impossible value; the message names it and the remedy.
    """

    forward: TransferChoice = field(default_factory=CodecConfig)
    backward: TransferChoice = field(default_factory=CodecConfig)
    min_bytes: int = DEFAULT_MIN_BYTES
    during_validation: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            _require_transfer_codec(name, getattr(self, name))
        if not _is_integer(self.min_bytes) or self.min_bytes < 0:
            raise ValueError(f"min_bytes={self.min_bytes!r} is not a number of bytes; use an integer from 0 up.")
        if not isinstance(self.during_validation, bool):
            raise ValueError(f"during_validation={self.during_validation!r} is not a boolean; use True or False.")
        if not _is_integer(self.seed) or not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed={self.seed!r} is out of range; give an integer from 0 to 2^31 - 1.")

    @property
    def is_empty(self) -> bool:
        """Whether nothing could ever be compressed under these settings."""
        return self.forward is None and self.backward is None


def _require_transfer_codec(name: str, codec: object) -> None:
    if codec is None:
        return
    if isinstance(codec, str):
        if codec not in NAMED_CODECS:
            known = ", ".join(map(repr, NAMED_CODECS))
            raise ValueError(
                f"{name}={codec!r} is not the name of a codec for transfers between stages ({known}); use a "
                "CodecConfig, or None to send tensors as they are."
            )
        return
    if not isinstance(codec, CodecConfig):
        raise ValueError(f"{name}={codec!r} is neither a CodecConfig, a name nor None; use {name}=CodecConfig(...).")
    if codec.element == "auto":
        raise ValueError(
            f"{name}.element='auto' would have to be agreed between the two sides of a transfer; name one, such as "
            "'int8' or 'e4m3'."
        )
    if codec.reshape != "natural":
        raise ValueError(
            f"{name} has reshape={codec.reshape!r}, whose channel orders belong to exchanges of tensor parallelism; "
            "transfers between stages need reshape='natural'."
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


PIPELINE_RECIPES: dict[str, PipelineConfig | None] = {
    # The paper's: TAH-Quant forward, fixed point backward.
    "tah_quant": PipelineConfig(forward="tah_quant", backward="fixed_point_8"),
    "int8": PipelineConfig(),
    # Few bits are rounded without bias backward, where errors of all micro-batches add up in one gradient.
    "int4": PipelineConfig(
        forward=CodecConfig(element="int4", levels="gaussian"),
        backward=CodecConfig(element="int4", rounding="stochastic"),
    ),
    "none": None,
}


def resolve_pipeline(value: PipelineConfig | Mapping[str, Any] | str | None) -> PipelineConfig | None:
    """Turn what a user may pass as ``pipeline_compression=`` into settings.

    Args:
        value: the settings themselves, their fields as a mapping, the name of a recipe, or ``None`` for off.

    Returns:
        The settings, or ``None`` when nothing is to be compressed.

    Raises:
        ValueError: for an unknown recipe or field.
        TypeError: for a value of another type.
    """
    return resolve_settings(value, PipelineConfig, PIPELINE_RECIPES, "pipeline_compression")
