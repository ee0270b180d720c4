"""How much memory a forward leaves behind for its backward, with stock autograd and stored in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from lightning_taco import _compat
from lightning_taco.activations.apply import StoredActivations
from lightning_taco.activations.ledger import Ledger
from lightning_taco.activations.storage import unwrapped
from lightning_taco.activations.store import ActivationStore, Observer

KIND_OF_FUNCTION = {
    "rms_norm": "norm",
    "layer_norm": "norm",
    "gelu": "activation",
    "silu": "activation",
    "mul": "activation",
    "relu": "activation",
    "linear": "linear",
    "scaled_dot_product_attention": "attention",
}


@dataclass(frozen=True)
class MemoryReport:
    """What one forward left for its backward, before and after.

    Attributes:
        ledger: every saved tensor but parameters, by module and kind; each storage counted once, with all its bytes.
        allocator_stock_bytes: growth of what the CUDA allocator was asked for and still holds over a stock forward,
            results included; ``None`` elsewhere.
        allocator_stored_bytes: the same, stored in few bits.
    """

    ledger: Ledger
    allocator_stock_bytes: int | None
    allocator_stored_bytes: int | None

    @property
    def saved_share(self) -> float:
        """The part of the stock bytes that is saved, by the allocator where there is one."""
        total = self.ledger.total
        stock, stored = total.stock_bytes, total.stored_bytes
        if self.allocator_stock_bytes is not None and self.allocator_stored_bytes is not None:
            stock, stored = self.allocator_stock_bytes, self.allocator_stored_bytes
        return 1 - stored / stock if stock else 0.0


def measure_stored(handle: StoredActivations, forward: Callable[[], Tensor]) -> MemoryReport:
    """Run `forward` as stock torch and as `handle` has it, and count what each leaves for the backward.

    Args:
        handle: the model's.
        forward: runs the model on one batch and returns a tensor, without a backward. What it changes (random numbers,
            buffers) it changes each time: it runs twice, and on CUDA twice more before that.

    Returns:
        Both counts.
    """
    if torch.cuda.is_initialized():  # workspaces of libraries and tables of kernels stay, and are not the model's
        for scope in (handle.stock_scope(), handle.scope()):
            _run(forward, scope, _Counter(handle.store))
    stock, stored = _Counter(handle.store), _Counter(handle.store)
    allocator_stock = _run(forward, handle.stock_scope(), stock)
    allocator_stored = _run(forward, handle.scope(), stored)
    merged = Ledger()
    for (module, kind), num_bytes in stock.rows.items():
        merged.add(module, kind, num_bytes, 0)
    for (module, kind), num_bytes in stored.rows.items():
        merged.add(module, kind, 0, num_bytes)
    for (module, kind), row in handle.ledger.rows.items():
        if kind != "kept":  # it has been seen where it is kept
            merged.add(module, kind, 0, row.stored_bytes)
    return MemoryReport(merged, allocator_stock, allocator_stored)


class _Counter(Observer):
    """Saved-tensor hooks, and the name of the function that saves."""

    def __init__(self, store: ActivationStore) -> None:
        self.store = store
        self.function = ""
        self.rows: dict[tuple[str, str], int] = {}
        self._seen: dict[int, StorageWeakRef] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count the tensor's storage, unless it is a parameter's."""
        local, _ = unwrapped(tensor)
        if local is not None and not _compat.is_parameter(tensor):
            storage = StorageWeakRef(local.untyped_storage())
            if storage.cdata not in self._seen:
                self._seen[storage.cdata] = storage
                key = (self.store.module, KIND_OF_FUNCTION.get(self.function, "other"))
                self.rows[key] = self.rows.get(key, 0) + local.untyped_storage().nbytes()
        return tensor.detach()

    def unpack(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor


class _Names(TorchFunctionMode):
    """Tells a counter which of torch's functions runs."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        previous, self.counter.function = self.counter.function, getattr(func, "__name__", "")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.counter.function = previous


def _run(forward: Callable[[], Tensor], scope: AbstractContextManager[None], counter: _Counter) -> int | None:
    """Growth of the allocator over `forward`, in bytes."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    before = 0 if device is None else _requested_bytes(device)
    hooks = torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack)
    with torch.enable_grad(), hooks, _Names(counter), scope:
        output = forward()
    after = None if device is None else _requested_bytes(device) - before
    del output
    return after


def _requested_bytes(device: int) -> int:
    """Not what is allocated: a tensor may lie in a free block of up to a megabyte more, by what was there before."""
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.current"])
