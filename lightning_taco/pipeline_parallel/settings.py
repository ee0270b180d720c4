"""What is compressed between pipeline stages, and how: one dataclass that YAML, jsonargparse and Python share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_taco.config import CodecConfig, from_fields
from lightning_taco.pipeline_parallel.wire import NAMED_CODECS

DEFAULT_MIN_BYTES = 1 << 16
PIPELINE_RECIPES = ("tah_quant", "int8", "int4", "none")

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


def _recipe(name: str) -> PipelineConfig | None:
    if name == "int8":
        return PipelineConfig()
    if name == "int4":
        # Few bits are rounded without bias backward, where errors of all micro-batches add up in one gradient.
        few = CodecConfig(element="int4", levels="gaussian")
        return PipelineConfig(forward=few, backward=CodecConfig(element="int4", rounding="stochastic"))
    if name == "tah_quant":
        # The paper's: TAH-Quant forward, fixed point backward.
        return PipelineConfig(forward="tah_quant", backward="fixed_point_8")
    return None


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
    if isinstance(value, str):
        if value not in PIPELINE_RECIPES:
            known = ", ".join(map(repr, PIPELINE_RECIPES))
            raise ValueError(
                f"pipeline_compression={value!r} is not a recipe; use one of {known}, None, or a PipelineConfig."
            )
        value = _recipe(value)
    if isinstance(value, Mapping):
        value = _from_fields(value)
    if value is not None and not isinstance(value, PipelineConfig):
        raise TypeError(
            f"pipeline_compression={value!r} has type {type(value).__name__}; use a recipe name, None, or a "
            "PipelineConfig."
        )
    return None if value is None or value.is_empty else value


def _from_fields(fields: Mapping[str, Any]) -> PipelineConfig:
    codecs = {
        name: from_fields(CodecConfig, value, name) for name, value in fields.items() if isinstance(value, Mapping)
    }
    return from_fields(PipelineConfig, {**fields, **codecs}, "pipeline_compression")
