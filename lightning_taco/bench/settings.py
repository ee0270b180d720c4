"""What is timed: the options of ``lightning-taco bench``, checked before any process is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_taco.collectives.algorithms import MEASURED_KINDS, MeasuredKind
from lightning_taco.config import ELEMENTS, RECIPES, TRANSPORTS, CodecConfig

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
CODEC_NAMES = tuple(name for name, recipe in RECIPES.items() if recipe is not None) + tuple(
    name for name in ELEMENTS if name not in RECIPES and name != "auto"
)
CUDA_SIZES = ("64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB", "256MiB")
CPU_SIZES = ("16KiB", "64KiB", "256KiB", "1MiB", "4MiB")
DeviceChoice = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is timed, and where the figures go.

    Args:
        codecs: names of recipes, all codecs of which are timed, or of elements; of tensor-parallel exchanges.
        sizes: of the whole tensor before compression, such as ``"1MiB"``; ``None`` for a ladder that fits the device.
        rounds: in which exchanges take turns; the median counts.
        kinds: of exchanges; data-parallel ones, of gradients and weights, have the codecs of ``"sdp4bit"``.
        output: the file of the figures; ``None`` for the one that ``min_bytes="auto"`` reads.
        plot: a page with a plot of the speed-ups; ``None`` for none.
        device: ``"auto"``: CUDA where each rank has a GPU of its own.
        transport: ``"auto"`` times exchanges through mapped memory too, as `CompressionConfig.transport` has it.
        num_ranks: processes to start; ``None``: one for each GPU, or two on CPU. Under torchrun it is torchrun's.

    Raises:
        ValueError: for a value that is impossible; the message says which are possible.
    """

    codecs: Sequence[str] = ("default", "balanced", "taco")
    sizes: Sequence[str] | None = None
    rounds: int = 15
    kinds: Sequence[MeasuredKind] = MEASURED_KINDS
    output: Path | None = None
    plot: Path | None = None
    device: DeviceChoice = "auto"
    transport: Literal["process_group", "auto"] = "process_group"
    num_ranks: int | None = None

    def __post_init__(self) -> None:
        _require_listed("codecs", self.codecs, CODEC_NAMES)
        _require_listed("kinds", self.kinds, MEASURED_KINDS)
        for size in self.sizes or ():
            parse_bytes(size)
        if self.sizes is not None and not self.sizes:
            raise ValueError("sizes is empty; give at least one, such as 1MiB.")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is unknown; use one of {', '.join(TRANSPORTS)}.")
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds} is below 1; give the number of rounds, such as 15.")
        if self.num_ranks is not None and self.num_ranks < 2:
            raise ValueError(f"num_ranks={self.num_ranks}: it takes two ranks to exchange anything; give 2 or more.")
        for name in ("output", "plot"):
            path = getattr(self, name)
            if path is not None and path.is_dir():
                raise ValueError(f"{name}={path} is a folder; give the name of a file.")

    def codec_configs(self) -> tuple[CodecConfig, ...]:
        """The codecs, each once; E4M3 where a recipe leaves the element open."""
        return tuple(dict.fromkeys(codec for name in self.codecs for codec in _codecs_of(name)))

    def num_bytes(self, device_type: str) -> tuple[int, ...]:
        """The sizes in bytes, ascending, each once."""
        sizes = self.sizes or (CUDA_SIZES if device_type == "cuda" else CPU_SIZES)
        return tuple(sorted({parse_bytes(size) for size in sizes}))


def parse_bytes(text: str) -> int:
    """A number of bytes with a binary unit, or without one.

    >>> parse_bytes("64KiB"), parse_bytes("1.5 MiB"), parse_bytes("4096")
    (65536, 1572864, 4096)

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match.group(2).upper()) if match else None
    num_bytes = int(float(match.group(1)) * unit) if match and unit else 0
    if num_bytes < 1:
        raise ValueError(f"{text!r} is not a size; give bytes, or a number with KiB, MiB or GiB, such as 64KiB.")
    return num_bytes


def _codecs_of(name: str) -> tuple[CodecConfig, ...]:
    recipe = RECIPES.get(name)
    found = recipe.codecs if recipe is not None else (CodecConfig(element=name),)  # type: ignore[arg-type]
    return tuple(codec.resolved("e4m3") for codec in found)


def _require_listed(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    if not values:
        raise ValueError(f"{name} is empty; give at least one of {', '.join(allowed)}.")
    for value in values:
        if value not in allowed:
            raise ValueError(f"{name}: {value!r} is unknown; use one or more of {', '.join(allowed)}.")
