"""What stands in for a tensor between forward and backward: its message, the tensor itself, or how to recompute it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_taco import _compat
from lightning_taco.codec import MessageLayout, decode, encode
from lightning_taco.config import CodecConfig


class Source(Protocol):
    """Where a tensor's values come from in backward."""

    num_users: int
    """Saved tensors that still stand for it, as far as is known."""

    def value(self) -> Tensor:
        """The values, contiguous, in the shape that they had; of a wrapper such as a DTensor, those of this rank."""
        ...


class Quantized:
    """A tensor as one message: codes, then an fp32 scale a block.

    Args:
        tensor: floating point, plain.
        codec: of the message.
        seed: of stochastic rounding.
        is_pending: leave the message to be written by a kernel that reads the tensor anyway.

    Cost: reads the tensor once, writes the message.
    """

    def __init__(self, tensor: Tensor, codec: CodecConfig, seed: int = 0, *, is_pending: bool = False) -> None:
        self.num_users = 0
        self.shape, self.dtype, self.codec = tensor.shape, tensor.dtype, codec
        self.seed, self.is_pending = seed, is_pending
        if is_pending:
            num_bytes = MessageLayout.of(tensor.numel(), codec).message_bytes
            self.message = torch.empty(1, num_bytes, dtype=torch.uint8, device=tensor.device)
        else:
            self.message = encode(tensor.reshape(1, -1), codec, seed=seed)

    @property
    def num_bytes(self) -> int:
        """Bytes that are stored."""
        return self.message.numel()

    def value(self) -> Tensor:
        """Decode the message."""
        return decode(self.message, self.codec, self.shape.numel(), self.dtype).view(self.shape)


class Kept:
    """A tensor that is kept as it is, because something else keeps it anyway."""

    def __init__(self, tensor: Tensor) -> None:
        self.num_users = 0
        self.tensor = tensor

    def value(self) -> Tensor:
        """The tensor."""
        return self.tensor


class Recomputed:
    """A tensor that is computed again from others that are stored.

    Args:
        function: of the values of `sources`; runs without autograd, and in the autocast of now.
        sources: what it is computed from.
    """

    def __init__(self, function: Callable[..., Tensor], sources: Sequence[Source], device: torch.device) -> None:
        self.num_users = 0
        self.function, self.sources = function, tuple(sources)
        self.autocast = AutocastState.of(device)

    def value(self) -> Tensor:
        """Run the function."""
        with torch.no_grad(), self.autocast.restored():
            return self.function(*(source.value() for source in self.sources)).contiguous()


class AutocastState(NamedTuple):
    """Autocast as it was in the forward, to be put back in a backward, where it is off."""

    device_type: str
    is_enabled: bool
    dtype: torch.dtype

    @staticmethod
    def of(device: torch.device) -> AutocastState:
        """The state of now, for operations on `device`."""
        kind = device.type
        return AutocastState(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def restored(self) -> torch.autocast:
        """A context in which it holds again, without the cache of cast weights, which may not see other grad modes."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.is_enabled, cache_enabled=False)


class TensorKey(NamedTuple):
    """Which values in memory a tensor shows: equal for views that show all the same ones in the same order."""

    storage: int
    offset: int
    layout: tuple[Any, ...]
    dtype: torch.dtype
    version: int

    @staticmethod
    def of(tensor: Tensor, storage: StorageWeakRef) -> TensorKey:
        """The key of a plain tensor."""
        is_flat = tensor.is_contiguous()
        layout = (tensor.numel(),) if is_flat else (tuple(tensor.shape), tensor.stride())
        return TensorKey(storage.cdata, int(tensor.storage_offset()), layout, tensor.dtype, tensor._version)


@dataclass(frozen=True)
class Wrapper:
    """What is around the one plain tensor in a DTensor or another wrapper of that kind."""

    kind: Any
    name: str
    others: dict[str, Any]
    """What it holds beside the tensor: newer DTensors list their mesh."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def around(self, tensor: Tensor) -> Tensor:
        """The wrapper, around `tensor` instead."""
        parts = {self.name: tensor, **self.others}
        return self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)


def unwrapped(tensor: Tensor) -> tuple[Tensor | None, Wrapper | None]:
    """The plain tensor in `tensor`, and what was around it; ``None`` for a wrapper of none or several."""
    tensor = _compat.waited(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return (tensor, None) if type(tensor) in (Tensor, torch.nn.Parameter) else (None, None)
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    tensors = [name for name, part in parts.items() if isinstance(part, Tensor)]
    if len(tensors) != 1:
        return None, None
    inner = _compat.waited(parts.pop(tensors[0]))
    wrapper = Wrapper(type(tensor), tensors[0], parts, context, tensor.shape, tensor.stride())
    return (inner, wrapper) if type(inner) is Tensor else (None, None)


class VersionWatch:
    """Notices when a tensor is changed in place, without keeping its memory.

    It is a view that shares the tensor's version counter and has been given other, empty memory. A wrapper counts for
    itself, and is looked at as long as it lives.

    Args:
        tensor: that is saved.
        local: the plain tensor in it.
    """

    def __init__(self, tensor: Tensor, local: Tensor) -> None:
        self.version = tensor._version
        self._wrapper = None if tensor is local else weakref.ref(tensor)
        self._counter = local.detach()
        self._counter.data = torch.empty(0, dtype=local.dtype, device=local.device)

    def check(self, shape: torch.Size) -> None:
        """Raise what autograd raises.

        Raises:
            RuntimeError: the tensor has been changed since.
        """
        watched = self._counter if self._wrapper is None else self._wrapper()
        found = self.version if watched is None else watched._version
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(shape)} is at version {found}; expected version {self.version} instead. "
                "Replace the operation by one that makes a new tensor."
            )
