"""What a study compares: codecs of this package, through the real encoder and the real collectives, and baselines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.codec import MessageLayout, decode, encode
from lightning_taco.config import GAUSSIAN_ELEMENTS, CodecConfig
from lightning_taco.dtensor.exact import exact_exchange
from lightning_taco.dtensor.exchange import Exchange
from lightning_taco.study.baselines import BASELINES, Baseline, Reconstruction
from lightning_taco.study.settings import StudySettings

Family = Literal["integer, rotated", "integer, Gaussian levels", "integer, not rotated", "FP8", "baseline"]
FAMILIES: tuple[Family, ...] = (
    "integer, rotated",
    "integer, Gaussian levels",
    "integer, not rotated",
    "FP8",
    "baseline",
)
# "fp4" and "nf4" are for what is stored: at equal bytes the rotated integers with Gaussian levels are closer.
STUDIED_ELEMENTS = ("e4m3", "e5m2", "int8", "int6", "int5", "int4", "int3")
# A baseline that is a codec of this package as well goes by both names.
ALSO_KNOWN_AS = {CodecConfig(element="int8", rotation=False): "INT8 per block"}


class Candidate(Protocol):
    """Something that a study measures."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def family(self) -> Family:
        """What plots group it with."""
        ...

    def quantize(self, values: Tensor, seed: int) -> Reconstruction:
        """One quantisation of this rank's part, fp32 of any shape."""
        ...

    def exchange(self, exchange: Exchange, group: dist.ProcessGroup, seed: int, decoded: Tensor) -> Tensor:
        """What a rank holds after `exchange`, of an fp32 tensor whose quantisation is `decoded`; all ranks call it."""
        ...


@dataclass(frozen=True)
class CodecCandidate:
    """A codec of this package, its element resolved."""

    codec: CodecConfig

    @property
    def name(self) -> str:
        """The codec in words."""
        other_name = ALSO_KNOWN_AS.get(self.codec)
        return f"{self.codec} ({other_name})" if other_name else str(self.codec)

    @property
    def family(self) -> Family:
        """By format, levels and rotation."""
        if self.codec.element in ("e4m3", "e5m2"):
            return "FP8"
        if self.codec.levels == "gaussian":
            return "integer, Gaussian levels"
        return "integer, rotated" if self.codec.rotation else "integer, not rotated"

    def quantize(self, values: Tensor, seed: int) -> Reconstruction:
        """Encode and decode `values` as one message."""
        flat = values.reshape(1, -1)
        decoded = decode(encode(flat, self.codec, seed=seed), self.codec, flat.shape[1], torch.float32)
        num_bits = 8 * MessageLayout.of(flat.shape[1], self.codec).message_bytes
        return Reconstruction(decoded.view(values.shape), num_bits)

    def exchange(self, exchange: Exchange, group: dist.ProcessGroup, seed: int, decoded: Tensor) -> Tensor:
        """The exchange as it runs in training, its result not yet rounded to the model's dtype."""
        return exchange.run(self.codec, group, seed)


@dataclass(frozen=True)
class BaselineCandidate:
    """A method of `study.baselines`, whose exchange is played through with exact collectives."""

    name: str
    reconstruct: Baseline

    @property
    def family(self) -> Family:
        """All baselines are one."""
        return "baseline"

    def quantize(self, values: Tensor, seed: int) -> Reconstruction:
        """One quantisation; none of them draws random numbers."""
        return self.reconstruct(values)

    def exchange(self, exchange: Exchange, group: dist.ProcessGroup, seed: int, decoded: Tensor) -> Tensor:
        """Exact exchange of what was quantised; an all-reduce over more than two ranks quantises the sum once more."""
        result = exact_exchange(replace(exchange, tensor=decoded), group)
        if exchange.kind == "all_reduce" and group.size() > 2:
            result = self.reconstruct(result).values
        return result


def candidates_of(settings: StudySettings, element: Literal["e4m3", "int8"]) -> tuple[Candidate, ...]:
    """All that `settings` compare.

    Args:
        settings: the study's.
        element: what ``element="auto"`` means.
    """
    codecs = built_in_codecs() if settings.candidates is None else settings.candidates
    # Two codecs may become the same when "auto" is resolved.
    resolved = dict.fromkeys(codec.resolved(element) for codec in codecs)
    found: list[Candidate] = [CodecCandidate(codec) for codec in resolved]
    if settings.baselines:
        found += [BaselineCandidate(name, reconstruct) for name, reconstruct in BASELINES.items()]
    return tuple(found)


def built_in_codecs() -> list[CodecConfig]:
    """Each element rotated and not, and those variants of it that may be worth their cost."""

    def codecs(*elements: str, **fields: Any) -> list[CodecConfig]:
        return [CodecConfig(element=element, **fields) for element in elements]  # type: ignore[arg-type]

    return [
        *codecs(*STUDIED_ELEMENTS),
        *codecs(*STUDIED_ELEMENTS, rotation=False),
        *codecs(*GAUSSIAN_ELEMENTS, levels="gaussian"),
        *codecs("int4", "int3", rounding="stochastic"),
        *codecs("e4m3", scale_mode="dual"),
        *codecs("e4m3", "int8", "int6", "int4", scale_mode="fine"),
        *codecs("e4m3", "int8", "int4", block_size=32),
        *codecs("e4m3", "int8", "int4", block_size=512),
    ]
