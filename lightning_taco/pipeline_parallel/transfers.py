"""What crosses from one stage to the next: tensors of agreed shapes, each as itself or as a message of agreed size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_taco.collectives.traffic import Direction, TrafficCounters, TrafficKey
from lightning_taco.pipeline_parallel.errors import TransferErrors
from lightning_taco.pipeline_parallel.settings import PipelineConfig
from lightning_taco.pipeline_parallel.wire import TransferCodec, can_encode, transfer_codec

COMPRESSED = "compressed"
STEPS_OF_SEED = 1 << 30


class TensorSpec(NamedTuple):
    """What both sides of a transfer know of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @property
    def num_bytes(self) -> int:
        """Of the tensor as it is."""
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class Moment(NamedTuple):
    """When a transfer happens, for its random numbers: a training step and a micro-batch of it."""

    step: int
    microbatch: int


class Way(NamedTuple):
    """How one tensor travels in one direction."""

    spec: TensorSpec
    codec: TransferCodec | None
    outcome: str
    message_bytes: int


@dataclass
class Counts:
    """What crossed the borders of this rank's stages.

    Attributes:
        sent: by this rank.
        received: by this rank, from its neighbours.
        errors: of what was sent compressed, while they are sampled; else ``None``.
    """

    sent: TrafficCounters
    received: TrafficCounters
    errors: TransferErrors | None = None


class Border:
    """Between `stage` and the next one.

    Args:
        stage: the number of the one before the border.
        place: what the sites of the border are called, such as ``stage_0_to_1/model.blocks.3``.
        specs: of what `stage` returns.
        config: what is compressed; ``None`` for nothing.
        counts: where every message is counted.
        replica: of this rank along the data-parallel axis: replicas round with other random numbers.
        reason: why nothing is compressed, where `config` is ``None``, as the counters say it.
    """

    def __init__(
        self,
        stage: int,
        place: str,
        specs: Sequence[TensorSpec],
        config: PipelineConfig | None,
        counts: Counts,
        replica: int = 0,
        reason: str = "compression is off",
    ) -> None:
        self.stage, self.place, self.specs = stage, place, tuple(specs)
        self._counts, self._replica = counts, replica
        self._seed = 0 if config is None else config.seed
        forward = tuple(_way(spec, config, "forward", reason) for spec in specs)
        # Only what takes part in backward comes back.
        backward = tuple(_way(spec, config, "backward", reason) if spec.requires_grad else None for spec in specs)
        self.ways: dict[Direction, tuple[Way | None, ...]] = {"forward": forward, "backward": backward}

    def pack(
        self, tensors: Sequence[Tensor | None], direction: Direction, moment: Moment, device: torch.device
    ) -> list[Tensor]:
        """The messages of `tensors`: ``uint8``, one for each that travels and is not empty; zeros for ``None``.

        Raises:
            ValueError: for tensors other than were agreed, before anything of them is sent.
        """
        self._check(tensors, direction)
        messages = []
        for place, way in enumerate(self.ways[direction]):
            if way is None or not way.message_bytes:
                continue
            tensor = tensors[place]
            if tensor is None:
                tensor = torch.zeros(way.spec.shape, dtype=way.spec.dtype, device=device)
            self._count(self._counts.sent, way, direction)
            messages.append(self._message(tensor.detach(), way, direction, place, moment))
        return messages

    def buffers(self, direction: Direction, device: torch.device) -> list[Tensor]:
        """Memory for the messages that the other side packs."""
        return [
            torch.empty(way.message_bytes, dtype=torch.uint8, device=device)
            for way in self.ways[direction]
            if way is not None and way.message_bytes
        ]

    def unpack(self, messages: Sequence[Tensor], direction: Direction, device: torch.device) -> list[Tensor | None]:
        """The tensors that the other side has packed."""
        remaining = iter(messages)
        tensors: list[Tensor | None] = []
        for way in self.ways[direction]:
            if way is None:
                tensors.append(None)
            elif not way.message_bytes:
                tensors.append(torch.empty(way.spec.shape, dtype=way.spec.dtype, device=device))
            else:
                self._count(self._counts.received, way, direction)
                tensors.append(_tensor(next(remaining), way))
        return tensors

    def stand_ins(self, device: torch.device) -> tuple[Tensor, ...]:
        """Zeros in place of what a stage that failed would have returned."""
        return tuple(
            torch.zeros(spec.shape, dtype=spec.dtype, device=device, requires_grad=spec.requires_grad)
            for spec in self.specs
        )

    def _check(self, tensors: Sequence[Tensor | None], direction: Direction) -> None:
        given = [None if tensor is None else TensorSpec(tensor.shape, tensor.dtype, False) for tensor in tensors]
        needed = [None if way is None else way.spec for way in self.ways[direction]]
        fits = len(given) == len(needed) and all(
            one is None or other is None or one[:2] == other[:2] for one, other in zip(given, needed, strict=True)
        )
        if not fits:
            raise ValueError(
                f"Pipeline stage {self.stage if direction == 'forward' else self.stage + 1} gives "
                f"{_listed(given)}, but {_listed(needed)} was agreed for this {direction} transfer ({self.place}). "
                "The shapes that a stage returns may depend on the shapes of the batch, not on its values, and the "
                "same for each micro-batch of a batch."
            )

    def _message(self, tensor: Tensor, way: Way, direction: Direction, place: int, moment: Moment) -> Tensor:
        tensor = tensor.contiguous()
        if way.codec is None:
            return tensor.reshape(-1).view(torch.uint8)
        message = way.codec.encode(tensor, seed=self.seed(direction, place, moment))
        if self._counts.errors is not None:
            self._counts.errors.observe(f"{direction}/{self.place}", tensor, message, way.codec)
        return message

    def seed(self, direction: Direction, place: int, moment: Moment) -> int:
        """Of stochastic rounding: another for each step, micro-batch, tensor and replica; the same on all ranks of a
        tensor-parallel group, which may hold the same values."""
        what = f"{self._seed}/{self.stage}/{direction}/{place}/{self._replica}/{moment.microbatch}"
        return zlib.crc32(what.encode()) << 30 | moment.step % STEPS_OF_SEED

    def _count(self, counters: TrafficCounters, way: Way, direction: Direction) -> None:
        key = TrafficKey(self.place, direction, "send", way.outcome)
        counters.record(key, way.spec.num_bytes, way.message_bytes)


def _way(spec: TensorSpec, config: PipelineConfig | None, direction: Direction, reason: str) -> Way:
    choice = None if config is None else getattr(config, direction)
    codec, outcome = None, COMPRESSED
    if config is None or choice is None:
        outcome = reason if config is None else f"as it is in {direction}"
    elif not can_encode(spec.dtype):
        outcome = f"dtype {str(spec.dtype).removeprefix('torch.')}"
    elif spec.num_bytes < config.min_bytes:
        outcome = f"smaller than min_bytes={config.min_bytes}"
    else:
        codec = transfer_codec(choice)
    num_bytes = spec.num_bytes
    if codec is not None and num_bytes:
        num_bytes = codec.message_bytes(spec.shape, spec.dtype)
    return Way(spec, codec, outcome, num_bytes)


def _tensor(message: Tensor, way: Way) -> Tensor:
    if way.codec is None:
        return message.view(way.spec.dtype).view(way.spec.shape)
    return way.codec.decode(message, way.spec.shape, way.spec.dtype)


def _listed(specs: Sequence[TensorSpec | None]) -> str:
    return ", ".join("nothing" if spec is None else str(spec) for spec in specs) or "nothing"
