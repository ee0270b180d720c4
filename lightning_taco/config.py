"""What is compressed and how: one frozen, keyword-only dataclass that a YAML file, jsonargparse and Python share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

BLOCK_SIZES = (32, 64, 128, 256, 512)
PLAIN_BLOCK_SIZE = 2048
"""The one block size more that values have which are not rotated: SDP4Bit's of weight differences."""
ELEMENTS = ("auto", "e4m3", "e5m2", "int8", "int7", "int6", "int5", "int4", "int3", "fp4", "nf4")
SCALE_MODES = ("merged", "dual", "fine")
LEVELS = ("uniform", "gaussian")
ROUNDINGS = ("nearest", "stochastic")
RESHAPES = ("natural", "calibrated")
BITS_PER_CODE = {"e4m3": 8, "e5m2": 8, "int8": 8, "int7": 7, "int6": 6, "int5": 5, "int4": 4, "int3": 3}
BITS_PER_CODE |= {"fp4": 4, "nf4": 4}
GAUSSIAN_ELEMENTS = ("int6", "int5", "int4", "int3")
TRANSPORTS = ("process_group", "auto")
SUB_BLOCK_SIZE = 32
"""Values that share one of the one-byte scales of ``scale_mode="fine"``."""
DEFAULT_MIN_BYTES = 1 << 20
RECIPE_NAMES = ("default", "taco", "int8", "balanced", "smallest", "none")


def require_one_of(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Refuse a setting that is none of `allowed`, all of one type; the message lists them."""
    if not isinstance(value, type(allowed[0])) or isinstance(value, bool) or value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; use one of {_listed(allowed)}.")


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(repr(value) for value in values)


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """How one tensor becomes a message.

    Args:
        element: format of one code: ``"int8"``, ``"int7"``, ``"int6"``, ``"int5"``, ``"int4"``, ``"int3"`` (packed),
            ``"e4m3"`` or ``"e5m2"`` (FP8 with 3 or 2 bits of mantissa), ``"fp4"`` (E2M1) or ``"nf4"`` (16 levels at the
            quantiles of a Gaussian), or ``"auto"``: E4M3 on CPU and from compute capability 8.9 on, INT8 on older GPUs.
        block_size: values that share a scale and are rotated together; 32, 64, 128, 256 or 512; without a rotation
            2048 too.
        scale_mode: ``"merged"`` sends one fp32 scale a block, ``"dual"`` the TACO paper's two (before and after the
            rotation); both decode to the same values up to rounding ties. ``"fine"`` first brings each 32 values of a
            block to the same energy, by a factor that travels in one byte: small values beside large ones then keep
            their relative error.
        rotation: whether a block is rotated by a Hadamard matrix before it is quantised.
        levels: where the codes of a packed integer lie: ``"uniform"``, evenly; ``"gaussian"``, closer together near
            zero, as fits what a rotation leaves, and with one level more: 1.4 dB (6 bits) to 3.2 dB (3 bits) less error
            at the same bytes.
        rounding: ``"nearest"``, or ``"stochastic"``: up or down with probabilities that make the error zero on average,
            from a counter-based generator that gives the same bits on CPU and GPU.
        reshape: ``"natural"`` leaves values in their order; ``"calibrated"`` sorts the channels (the last dim) of each
            site by their size, as seen in the first steps, so that like meets like in a block.

    Raises:
        ValueError: for a value that is not one of the above; the message says which are.
    """

    element: Literal["auto", "e4m3", "e5m2", "int8", "int7", "int6", "int5", "int4", "int3", "fp4", "nf4"] = "int8"
    block_size: int = 128
    scale_mode: Literal["merged", "dual", "fine"] = "merged"
    rotation: bool = True
    levels: Literal["uniform", "gaussian"] = "uniform"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    reshape: Literal["natural", "calibrated"] = "natural"

    def __post_init__(self) -> None:
        require_one_of("element", self.element, ELEMENTS)
        require_one_of("block_size", self.block_size, (*BLOCK_SIZES, PLAIN_BLOCK_SIZE))
        require_one_of("scale_mode", self.scale_mode, SCALE_MODES)
        require_one_of("levels", self.levels, LEVELS)
        require_one_of("rounding", self.rounding, ROUNDINGS)
        require_one_of("reshape", self.reshape, RESHAPES)
        if not isinstance(self.rotation, bool):
            raise ValueError(f"rotation={self.rotation!r} is not a boolean; use True or False.")
        if self.block_size == PLAIN_BLOCK_SIZE and self.rotation:
            raise ValueError(
                f"block_size={self.block_size} is for values that are not rotated, but rotation=True was given; use "
                "rotation=False, or a block_size of 512 or less."
            )
        if self.scale_mode == "dual" and not self.rotation:
            raise ValueError(
                "scale_mode='dual' puts one scale before and one after the rotation, but rotation=False was given; "
                "use rotation=True, or scale_mode='merged'."
            )
        if self.scale_mode == "fine" and (not self.rotation or self.block_size <= SUB_BLOCK_SIZE):
            raise ValueError(
                f"scale_mode='fine' brings {SUB_BLOCK_SIZE} values each to one energy within a larger rotation, but "
                f"rotation={self.rotation} and block_size={self.block_size} were given; use rotation=True and a "
                f"block_size of 64 or more, or scale_mode='merged'."
            )
        if self.levels == "gaussian" and (not self.rotation or self.element not in GAUSSIAN_ELEMENTS):
            raise ValueError(
                f"levels='gaussian' fits rotated integers of 3 to 6 bits, but element={self.element!r} and "
                f"rotation={self.rotation} were given; use one of {_listed(GAUSSIAN_ELEMENTS)} with rotation=True, or "
                "levels='uniform'."
            )

    def resolved(self, element: Literal["e4m3", "int8"]) -> CodecConfig:
        """The same codec with ``element="auto"`` replaced by `element`."""
        return replace(self, element=element) if self.element == "auto" else self

    @property
    def bits_per_value(self) -> float:
        """Bits that one value takes on the wire, its share of the scales included (8.25 at block 128, merged)."""
        element = "e4m3" if self.element == "auto" else self.element
        scale_bits = {"merged": 32, "dual": 64, "fine": 32 + 8 * self.block_size // SUB_BLOCK_SIZE}[self.scale_mode]
        return BITS_PER_CODE[element] + scale_bits / self.block_size

    def __str__(self) -> str:
        parts = [self.element, f"block {self.block_size}"]
        parts.append("Hadamard" if self.rotation else "no rotation")
        if self.scale_mode == "dual":
            parts.append("dual scale")
        if self.scale_mode == "fine":
            parts.append("fine scale")
        if self.levels == "gaussian":
            parts.append("Gaussian levels")
        if self.rounding == "stochastic":
            parts.append("stochastic rounding")
        if self.reshape == "calibrated":
            parts.append("calibrated channel order")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class CompressionConfig:
    """What a strategy compresses.

    Args:
        forward: codec for exchanges of the forward pass, or ``None`` to send them as they are.
        backward: codec for exchanges of the backward pass, or ``None`` to send them as they are.
        min_bytes: a tensor of fewer bytes than this, before compression, is sent as it is. ``"auto"``: the size from
            which on compressing is faster, measured on the tensor-parallel group when the run starts, for each kind of
            exchange and each codec; see the README.
        exclude: module names whose exchanges are sent as they are; shell patterns, matched against the whole module
            path and against each of its ancestors (``"layers.0.*"``, ``"*lm_head"``).
        recipes: pattern of a module name to the name of the recipe that its exchanges use instead of `forward` and
            `backward`; the first pattern that matches wins.
        during_validation: also compress while validating, testing and predicting.
        transport: ``"process_group"``: over NCCL or gloo. ``"auto"``: GPUs of one host that can map each other's memory
            read messages there, which saves copies and launches over NVLink; else over the process group, which a line
            at the start says with the reason.
        asynchronous: on CUDA, hand back what DTensor asks for with ``async_op=True``, as torch's parallel styles do for
            their outputs, while it is on its way on a stream of its own; it is waited for when it is used. It takes
            the host 0.2 ms more for each exchange, as it does without compression, so it is for models that compute
            something else before they use the result. Otherwise such an exchange is in the order of the current
            stream; the host never waits.

    Raises:
        ValueError: for an impossible value; the message names it and the remedy.
    """

    forward: CodecConfig | None = field(default_factory=CodecConfig)
    backward: CodecConfig | None = field(default_factory=CodecConfig)
    min_bytes: int | Literal["auto"] = DEFAULT_MIN_BYTES
    exclude: tuple[str, ...] | list[str] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)
    during_validation: bool = False
    transport: Literal["process_group", "auto"] = "process_group"
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is unknown; use one of {_listed(TRANSPORTS)}.")
        for name in ("forward", "backward"):
            codec = getattr(self, name)
            if codec is not None and not isinstance(codec, CodecConfig):
                raise ValueError(f"{name}={codec!r} is neither a CodecConfig nor None; use {name}=CodecConfig(...).")
        is_size = isinstance(self.min_bytes, int) and not isinstance(self.min_bytes, bool) and self.min_bytes >= 0
        if not is_size and self.min_bytes != "auto":
            raise ValueError(
                f"min_bytes={self.min_bytes!r} is not a number of bytes; use an integer from 0 up, or 'auto'."
            )
        for name in ("during_validation", "asynchronous"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a boolean; use True or False.")
        if isinstance(self.exclude, str):
            raise ValueError(f"exclude={self.exclude!r} is one string; use a list of patterns, [{self.exclude!r}].")
        if not isinstance(self.exclude, (list, tuple)) or not all(isinstance(each, str) for each in self.exclude):
            raise ValueError(f"exclude={self.exclude!r} is not a list of patterns; use [] for none.")
        if not isinstance(self.recipes, Mapping):
            raise ValueError(f"recipes={self.recipes!r} is not a mapping of patterns to recipes; use {{}} for none.")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        object.__setattr__(self, "recipes", dict(self.recipes))
        for pattern, recipe in self.recipes.items():
            if recipe not in RECIPE_NAMES:
                raise ValueError(f"recipes[{pattern!r}]={recipe!r} is unknown; use one of {_listed(RECIPE_NAMES)}.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompressionConfig) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        # Of `recipes` the order counts too: the first pattern that matches wins.
        rules = (tuple(self.exclude), tuple(self.recipes.items()))
        ways = (self.during_validation, self.transport, self.asynchronous)
        return (self.forward, self.backward, self.min_bytes, rules, *ways)

    def codec_for(self, site: str, direction: Literal["forward", "backward"]) -> CodecConfig | None:
        """The codec for exchanges of module `site` in `direction`; ``None`` where they go as they are.

        Cost: pattern matching; callers keep the answer per site.
        """
        if any(matches_site(pattern, site) for pattern in self.exclude):
            return None
        for pattern, recipe in self.recipes.items():
            if matches_site(pattern, site):
                chosen = RECIPES[recipe]
                return getattr(chosen, direction) if chosen is not None else None
        return getattr(self, direction)

    @cached_property
    def codecs(self) -> tuple[CodecConfig, ...]:
        """Every codec that these settings may use."""
        settings = [self, *(RECIPES[name] for name in self.recipes.values())]
        candidates = [codec for each in settings if each is not None for codec in (each.forward, each.backward)]
        return tuple(codec for codec in candidates if codec is not None)

    @property
    def is_empty(self) -> bool:
        """Whether nothing could ever be compressed under these settings."""
        return not self.codecs

    @property
    def measures_break_even(self) -> bool:
        """Whether the smallest size that is compressed is measured when the run starts."""
        return self.min_bytes == "auto"

    @property
    def goes_by_module_name(self) -> bool:
        """Whether what is compressed depends on the module."""
        return bool(self.exclude or self.recipes)

    @property
    def uses_auto_element(self) -> bool:
        """Whether ranks must agree on what ``element="auto"`` means."""
        return any(codec.element == "auto" for codec in self.codecs)


def matches_site(pattern: str, site: str) -> bool:
    """Whether `pattern` matches the module path `site` or an ancestor of it.

    >>> matches_site("*.mlp", "blocks.3.mlp.down"), matches_site("blocks.3", "blocks.31.mlp")
    (True, False)
    """
    parts = site.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def _codec_pair(**codec: Any) -> CompressionConfig:
    return CompressionConfig(forward=CodecConfig(**codec), backward=CodecConfig(**codec))


RECIPES: dict[str, CompressionConfig | None] = {
    "default": CompressionConfig(),
    # The paper's codec: E4M3 with adaptive scale-Hadamard and dual scale, block 128.
    "taco": _codec_pair(element="e4m3", scale_mode="dual"),
    # Today's default by name: the same bytes as E4M3 with a quarter of its relative L2 error, on any GPU.
    "int8": _codec_pair(element="int8"),
    # The loss of E4M3 at five eighths of its bytes: the backward bears 4 bits, the forward does not. Its rounding has
    # no bias: beside a channel that dominates, others would be lost to the nearest code.
    "balanced": CompressionConfig(
        forward=CodecConfig(element="int6", levels="gaussian"),
        backward=CodecConfig(element="int4", levels="gaussian", rounding="stochastic"),
    ),
    # The fewest bits whose loss held: a quarter of bf16's bytes.
    "smallest": CompressionConfig(
        forward=CodecConfig(element="int5", levels="gaussian"),
        backward=CodecConfig(element="int3", levels="gaussian", rounding="stochastic"),
    ),
    "none": None,
}


def resolve_compression(
    value: CompressionConfig | Mapping[str, Any] | str | None,
) -> CompressionConfig | None:
    """Turn what a user may pass as ``compression=`` into settings.

    Args:
        value: the settings themselves, their fields as a mapping, the name of a recipe, or ``None`` for off.

    Returns:
        The settings, or ``None`` when nothing is to be compressed.

    Raises:
        ValueError: for an unknown recipe or field.
        TypeError: for a value of another type.
    """
    if value is None or isinstance(value, CompressionConfig):
        return value
    if isinstance(value, str):
        if value not in RECIPES:
            raise ValueError(
                f"compression={value!r} is not a recipe; use one of {_listed(RECIPE_NAMES)}, None, or a "
                "CompressionConfig."
            )
        return RECIPES[value]
    if isinstance(value, Mapping):
        fields = dict(value)
        for name in ("forward", "backward"):
            if isinstance(fields.get(name), Mapping):
                fields[name] = from_fields(CodecConfig, fields[name], name)
        return from_fields(CompressionConfig, fields, "compression")
    raise TypeError(
        f"compression={value!r} has type {type(value).__name__}; use a recipe name, None, or a CompressionConfig."
    )


def from_fields(cls: type[Any], fields: Mapping[str, Any], what: str) -> Any:
    """A dataclass from a mapping; a field that it does not have is a ``ValueError`` with `what` and all fields."""
    unknown = [name for name in fields if name not in cls.__dataclass_fields__]
    if unknown:
        known = _listed(tuple(cls.__dataclass_fields__))
        raise ValueError(f"{what} has no field {unknown[0]!r}; it has {known}.")
    return cls(**fields)


def resolve_settings(value: Any, cls: type[Any], recipes: Mapping[str, Any], what: str) -> Any:
    """Turn what a user may pass for an axis's settings into an object of `cls`, or ``None`` when nothing is to be done.

    Args:
        value: settings, their fields as a mapping (codecs as mappings too), the name of a recipe, or ``None`` for off.
        cls: of the settings; has ``is_empty``.
        recipes: by name; ``None`` for off.
        what: the argument that the user gave.

    Raises:
        ValueError: for an unknown recipe or field.
        TypeError: for a value of another type.
    """
    if isinstance(value, str):
        if value not in recipes:
            known = ", ".join(map(repr, recipes))
            raise ValueError(f"{what}={value!r} is not a recipe; use one of {known}, None, or a {cls.__name__}.")
        value = recipes[value]
    if isinstance(value, Mapping):
        codecs = {
            name: from_fields(CodecConfig, each, name) for name, each in value.items() if isinstance(each, Mapping)
        }
        value = from_fields(cls, {**value, **codecs}, what)
    if value is not None and not isinstance(value, cls):
        raise TypeError(
            f"{what}={value!r} has type {type(value).__name__}; use a recipe name, None, or a {cls.__name__}."
        )
    return None if value is None or value.is_empty else value
