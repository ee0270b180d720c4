"""Which saved tensors are quantised, which are recomputed, and which stay: the hooks that autograd calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_taco import _compat
from lightning_taco.activations.ledger import Ledger
from lightning_taco.activations.settings import ActivationConfig
from lightning_taco.activations.storage import (
    Kept,
    Quantized,
    Source,
    TensorKey,
    VersionWatch,
    Wrapper,
    unwrapped,
)
from lightning_taco.codec import VALUE_DTYPES

SEEDS_PER_FORWARD = 1 << 24


class Packed:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("shape", "source", "watch", "wrapper")

    def __init__(self, source: Source, shape: torch.Size, wrapper: Wrapper | None, watch: VersionWatch) -> None:
        self.source, self.shape, self.wrapper, self.watch = source, shape, wrapper, watch


class ActivationStore:
    """The saved tensors of one model, while its forward runs and until its backward has used them.

    Args:
        config: what is stored how.

    Attributes:
        ledger: what the last forward stored.
        num_forwards: forwards so far; with the place in it the seed of stochastic rounding.
    """

    def __init__(self, config: ActivationConfig) -> None:
        self.config = config
        self.codec = config.codec
        self.ledger = Ledger()
        self.num_forwards = 0
        self.modules: list[str] = []
        self.num_excluded = 0
        self._kind = "other"
        self._only: int | None = None
        self._num_quantized = 0
        # Values in memory -> what stands for them. Weak where autograd alone decides how long, and cleared after a
        # forward, so that nothing here outlives it.
        self._known: dict[TensorKey, tuple[StorageWeakRef, weakref.ref[Any]]] = {}
        self._recipes: dict[TensorKey, tuple[StorageWeakRef, Source]] = {}
        self._seen: dict[TensorKey, StorageWeakRef] = {}
        self._decoded: tuple[Source, Tensor] | None = None
        self._held: tuple[Source, Tensor] | None = None

    @property
    def module(self) -> str:
        """The module whose forward runs now."""
        return self.modules[-1] if self.modules else ""

    @property
    def is_active(self) -> bool:
        """Whether operations of now have their saved tensors stored: not without gradients, in excluded modules, in
        a repeated forward, or inside hooks of somebody else, such as activation checkpointing or CPU offload."""
        if not torch.is_grad_enabled() or self.num_excluded or _compat.in_backward():
            return False
        return all(isinstance(getattr(hook, "__self__", None), _OWN) for hook in _compat.saved_tensor_hooks())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward."""
        self.num_forwards += 1
        self.ledger.clear()
        self.clear()
        try:
            yield
        finally:
            self.clear()

    @contextmanager
    def hooks(self, kind: str, only: Tensor | None = None) -> Iterator[None]:
        """Have what the operations inside save packed, and counted as `kind`; of a plain tensor `only` that one."""
        previous = self._kind, self._only
        self._kind, self._only = kind, None if only is None else only.untyped_storage()._cdata
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._kind, self._only = previous

    @contextmanager
    def no_hooks(self) -> Iterator[None]:
        """Within `hooks`: have what the operations inside save kept as it is."""
        hooks = _compat.saved_tensor_hooks()
        if not hooks or getattr(hooks[0], "__self__", None) is not self:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self.keep, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Any:
        """What is held instead of `tensor`."""
        local, wrapper = unwrapped(tensor)
        if local is None or not self._is_stored(tensor, local):
            return self._as_it_is(tensor, local)
        source = self._stored(local)
        source.num_users += 1
        return Packed(source, local.shape, wrapper, VersionWatch(tensor, local))

    def message_of(self, tensor: Tensor, *, may_be_pending: bool = False) -> Quantized | None:
        """What stands for a plain `tensor` whose message is read as it is; ``None`` if it is kept, recomputed or no
        plain tensor. If there is none yet it is made, or is pending and the caller has it written at once."""
        if type(tensor) is not Tensor or not tensor.is_contiguous() or not self._is_stored(tensor, tensor):
            return None
        source = self._stored(tensor, is_pending=may_be_pending)
        return source if isinstance(source, Quantized) else None

    def _stored(self, local: Tensor, **options: bool) -> Source:
        """What stands for `local`: found, or made now; and counted."""
        key, storage = self._key(local)
        source = self._find(key)
        stored_bytes, kind = 0, self._kind
        if source is None:
            source = Quantized(local.detach(), self.codec, self._next_seed(), **options)
            stored_bytes = source.num_bytes
            self._known[key] = (storage, weakref.ref(source))
        elif isinstance(source, Kept):
            stored_bytes, kind = local.numel() * local.element_size(), "kept"
        self._count(key, storage, local, stored_bytes, kind)
        return source

    def keep(self, tensor: Tensor) -> Any:
        """As `pack`, for what is not to be quantised."""
        return self._as_it_is(tensor, unwrapped(tensor)[0])

    def unpack(self, packed: Any) -> Tensor:
        """The tensor back, as near as its message has it.

        Raises:
            RuntimeError: it has been changed in place since, as autograd says it.
        """
        if not isinstance(packed, Packed):
            tensor, watch = packed
            if watch is not None:
                watch.check(tensor.shape)
            return tensor
        packed.watch.check(packed.shape)
        value = self.value(packed.source).view(packed.shape)
        return value if packed.wrapper is None else packed.wrapper.around(value)

    def value(self, source: Source) -> Tensor:
        """The source's values; those of one source at a time are held until its last user has had them."""
        found = next((each[1] for each in (self._decoded, self._held) if each is not None and each[0] is source), None)
        value = source.value() if found is None else found
        self.let_go(source)
        self._decoded = (source, value) if source.num_users > 0 else None
        return value

    def hold(self, source: Source, value: Tensor) -> None:
        """Keep what was decoded to compute something else, if `source` has a user left, until the next of its kind."""
        self._held = (source, value) if source.num_users > 0 else None

    def is_decoded(self, source: Source) -> bool:
        """Whether its values are held now."""
        return any(each is not None and each[0] is source for each in (self._decoded, self._held))

    def let_go(self, source: Source) -> None:
        """Note that one user of `source` has had its values, or does not need them."""
        source.num_users -= 1
        if source.num_users > 0:
            return
        if self._decoded is not None and self._decoded[0] is source:
            self._decoded = None
        if self._held is not None and self._held[0] is source:
            self._held = None

    def source_of(self, tensor: Tensor) -> Source | None:
        """What stands for `tensor` already, if anything does."""
        local, _ = unwrapped(tensor)
        return None if local is None else self._find(self._key(local)[0])

    def can_be_recomputed(self, tensor: Tensor, source: Source) -> None:
        """Let `source` stand for `tensor`, should autograd save it."""
        local, _ = unwrapped(tensor)
        if local is not None and local.numel():
            key, storage = self._key(local)
            self._recipes[key] = (storage, source)

    def is_kept_anyway(self, tensor: Tensor) -> None:
        """Note that something else keeps `tensor`, so that a copy in few bits would only add to it."""
        local, _ = unwrapped(tensor)
        if local is not None:
            # As it lies in memory: heads that are transposed are what a layer behind them reads as one row a token.
            dims = sorted(range(local.dim()), key=local.stride, reverse=True)
            in_memory = local.detach().permute(dims)
            self.can_be_recomputed(in_memory, Kept(in_memory))

    def count_recomputed(self, tensor: Tensor) -> None:
        """Count a tensor that stock autograd would have saved, and that nothing here needs."""
        local, _ = unwrapped(tensor)
        if local is not None:
            self._count(*self._key(local), local, 0, self._kind)

    def _is_stored(self, tensor: Tensor, local: Tensor) -> bool:
        if self._only is not None and local.untyped_storage()._cdata != self._only:
            return False
        if local.dtype not in VALUE_DTYPES or local.numel() < max(1, self.config.min_numel):
            return False
        is_statistic = local.dim() > 1 and local.shape[-1] == 1  # one value a token, such as a norm's
        return not is_statistic and not _compat.is_parameter(tensor)

    def _as_it_is(self, tensor: Tensor, local: Tensor | None) -> tuple[Tensor, VersionWatch | None]:
        # Detached, since an operation's own output would hold the node that holds it.
        return tensor.detach(), None if local is None else VersionWatch(tensor, local)

    def _find(self, key: TensorKey) -> Source | None:
        storage, source = self._recipes.get(key, (None, None))
        if storage is None:
            storage, reference = self._known.get(key, (None, None))
            source = None if reference is None else reference()
        return None if storage is None or storage.expired() else source

    def _key(self, local: Tensor) -> tuple[TensorKey, StorageWeakRef]:
        storage = StorageWeakRef(local.untyped_storage())
        return TensorKey.of(local, storage), storage

    def _count(self, key: TensorKey, storage: StorageWeakRef, local: Tensor, stored_bytes: int, kind: str) -> None:
        is_new = key not in self._seen
        self._seen[key] = storage  # as long as it is held here, no other storage has its address
        if is_new or stored_bytes:
            stock_bytes = local.numel() * local.element_size() if is_new else 0
            self.ledger.add(self.module, kind, stock_bytes, stored_bytes)

    def _next_seed(self) -> int:
        self._num_quantized += 1
        return (self.num_forwards * SEEDS_PER_FORWARD + self._num_quantized) % (1 << 62)

    def clear(self) -> None:
        """Forget the last forward; what autograd holds of it stays good."""
        self._known.clear()
        self._recipes.clear()
        self._seen.clear()
        self.modules.clear()
        self.num_excluded = self._num_quantized = 0
        self._decoded = self._held = None


class Observer:
    """Saved-tensor hooks that only look, so that ours may run inside of them."""


_OWN = (ActivationStore, Observer)
