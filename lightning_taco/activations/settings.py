"""What is stored between forward and backward, and how: settings that a YAML file, jsonargparse and Python share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_taco.config import CodecConfig, from_fields, matches_site

STORED_ELEMENTS = ("fp4", "nf4", "int4", "int5", "int6", "int8")
ELEMENT_OF_BITS: dict[int, Literal["int5", "int6", "int8"]] = {5: "int5", 6: "int6", 8: "int8"}
WeightGradient = Literal["auto", "fused", "separate"]
WEIGHT_GRADIENTS = ("auto", "fused", "separate")
READABLE_ELEMENTS, READABLE_BLOCK_SIZES = ("fp4", "nf4", "int4"), (64, 128)
"""Of messages that a matrix product can read."""
RECIPE_NAMES = ("agoq", "none")
DEFAULT_MIN_NUMEL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """Which saved tensors are stored in a few bits, and in which format.

    Args:
        element: ``"fp4"`` (E2M1, the paper's), ``"nf4"``, ``"int4"``, ``"int5"``, ``"int6"`` or ``"int8"``, all truly
            packed.
        block_size: values that share one fp32 scale: 32, 64, 128, 256 or 512. At 128 a value of 4 bits takes 4.25.
        rotation: rotate each block by a Hadamard matrix before it is rounded: less error where a block holds outliers.
        levels: ``"gaussian"`` for levels of rotated integers that lie closer near zero; else ``"uniform"``.
        rounding: ``"nearest"``, or ``"stochastic"``: gradients that are right on average, with more noise.
        min_numel: a tensor of fewer values than this is kept as it is.
        exclude: names of modules in which everything is kept as it is; shell patterns, matched against the module's
            path and each of its ancestors.
        hooked: names of modules in which *every* large floating-point tensor that autograd saves is stored so, by
            saved-tensor hooks; for modules whose parts are not known, such as a norm that is written by hand. Never
            parameters, integers, booleans, small tensors, nor anything of ``scaled_dot_product_attention``.
        weight_gradient: how a linear layer whose input is a message of 4 bits gets its weight's gradient on CUDA, in
            half precision: ``"fused"``, by a matrix product that decodes what it reads, ``"separate"``, by a launch
            that decodes and the library's product, or ``"auto"``, the faster, measured at first use, which compiles
            both and says what it keeps. Elsewhere, and for layers whose channels are not whole blocks, always as
            ``"separate"``: the default, since on H200 the other takes twice as long for every layer of LLaMA-8B.

    Raises:
        ValueError: for an impossible value; the message names it and the remedy.

    Example:
        >>> ActivationConfig(block_size=64).bits_per_value
        4.5
    """

    element: Literal["fp4", "nf4", "int4", "int5", "int6", "int8"] = "fp4"
    block_size: int = 128
    rotation: bool = False
    levels: Literal["uniform", "gaussian"] = "uniform"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    min_numel: int = DEFAULT_MIN_NUMEL
    exclude: tuple[str, ...] | list[str] = ()
    hooked: tuple[str, ...] | list[str] = ()
    weight_gradient: WeightGradient = "separate"

    def __post_init__(self) -> None:
        if self.element not in STORED_ELEMENTS:
            allowed = ", ".join(map(repr, STORED_ELEMENTS))
            raise ValueError(f"element={self.element!r} is no format of stored activations; use one of {allowed}.")
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int) or self.min_numel < 0:
            raise ValueError(f"min_numel={self.min_numel!r} is not a number of values; use an integer from 0 up.")
        for name in ("exclude", "hooked"):
            patterns = getattr(self, name)
            if isinstance(patterns, str):
                raise ValueError(f"{name}={patterns!r} is one string; use a list of patterns, [{patterns!r}].")
            if not isinstance(patterns, (list, tuple)) or not all(isinstance(each, str) for each in patterns):
                raise ValueError(f"{name}={patterns!r} is not a list of patterns; use [] for none.")
            object.__setattr__(self, name, tuple(patterns))
        _ = self.codec  # checks the rest
        self._check_weight_gradient()

    def _check_weight_gradient(self) -> None:
        if self.weight_gradient not in WEIGHT_GRADIENTS:
            allowed = ", ".join(map(repr, WEIGHT_GRADIENTS))
            raise ValueError(f"weight_gradient={self.weight_gradient!r} is not supported; use one of {allowed}.")
        if self.weight_gradient == "fused" and not self.has_readable_messages:
            raise ValueError(
                f"weight_gradient='fused' does not fit messages of {self.codec}: a matrix product reads 'fp4', 'nf4' "
                "and 'int4' in blocks of 64 or 128 without rotation. Change those, or use "
                "weight_gradient='separate'."
            )

    @property
    def codec(self) -> CodecConfig:
        """The codec of what is stored."""
        return CodecConfig(
            element=self.element,
            block_size=self.block_size,
            rotation=self.rotation,
            levels=self.levels,
            rounding=self.rounding,
        )

    @property
    def has_readable_messages(self) -> bool:
        """Whether a matrix product can read the messages without their being decoded before."""
        is_readable = self.element in READABLE_ELEMENTS and self.block_size in READABLE_BLOCK_SIZES
        return is_readable and not self.rotation

    @property
    def bits_per_value(self) -> float:
        """Bits that a stored value takes, its share of the block's scale included."""
        return self.codec.bits_per_value

    def with_bits(self, bits: int) -> ActivationConfig:
        """The same settings at 4, 5, 6 or 8 bits a code, as `pipeline_bits` hands out; 4 keeps a 4-bit element.

        Raises:
            ValueError: for another number of bits.
        """
        if bits == 4:
            return self if self.element in ("fp4", "nf4", "int4") else replace(self, element="int4")
        if bits not in ELEMENT_OF_BITS:
            raise ValueError(f"bits={bits!r} has no format of stored activations; use 4, 5, 6 or 8.")
        # Integers of 8 bits have one set of levels; none of these is read by a matrix product.
        levels = "uniform" if bits == 8 else self.levels
        way = "separate" if self.weight_gradient == "fused" else self.weight_gradient
        return replace(self, element=ELEMENT_OF_BITS[bits], levels=levels, weight_gradient=way)

    def excludes(self, module: str) -> bool:
        """Whether everything in the module of this name is kept as it is."""
        return any(matches_site(pattern, module) for pattern in self.exclude)

    def hooks(self, module: str) -> bool:
        """Whether every large tensor that is saved in the module of this name is stored in a few bits."""
        return any(matches_site(pattern, module) for pattern in self.hooked)

    def __str__(self) -> str:
        return f"{self.codec}, {self.bits_per_value:g} bits a value"


def resolve_activations(value: ActivationConfig | Mapping[str, Any] | str | None) -> ActivationConfig | None:
    """Turn what a user may pass as ``activations=`` into settings.

    Args:
        value: the settings themselves, their fields as a mapping, ``"agoq"`` for the defaults, ``"none"`` or ``None``.

    Returns:
        The settings, or ``None`` when everything is to be kept as it is.

    Raises:
        ValueError: for an unknown recipe or field.
        TypeError: for a value of another type.
    """
    if value is None or isinstance(value, ActivationConfig):
        return value
    if isinstance(value, str):
        if value not in RECIPE_NAMES:
            raise ValueError(f"activations={value!r} is not a recipe; use 'agoq', 'none', or an ActivationConfig.")
        return ActivationConfig() if value == "agoq" else None
    if isinstance(value, Mapping):
        return from_fields(ActivationConfig, value, "activations")
    raise TypeError(f"activations={value!r} has type {type(value).__name__}; use 'agoq', None, or an ActivationConfig.")
