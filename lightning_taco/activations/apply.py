"""Turning it on for a model, and off again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_taco import _compat
from lightning_taco.activations.intercept import Interception
from lightning_taco.activations.ledger import Ledger
from lightning_taco.activations.settings import ActivationConfig, resolve_activations
from lightning_taco.activations.store import ActivationStore


class StoredActivations:
    """A model whose saved tensors are stored in few bits, until `remove`. Made by `store_in_few_bits`.

    Attributes:
        model: the model.
        config: the settings.
        store: what it has stored; ``store.ledger`` counts the last forward.
    """

    def __init__(self, model: nn.Module, config: ActivationConfig) -> None:
        self.model, self.config = model, config
        self.store = ActivationStore(config)
        self._handles: list[RemovableHandle] = []
        self._depth = 0
        self._open: list[AbstractContextManager[None]] = []
        _check_not_compiled(model, config)
        for name, module in model.named_modules():
            self._watch(module, name)
        self._enter_with(model)

    @property
    def ledger(self) -> Ledger:
        """What the last forward in training stored, by module and kind."""
        return self.store.ledger

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Around a forward that is not a call of the model itself, such as a ``training_step``."""
        if self._depth or not torch.is_grad_enabled() or _compat.in_backward():
            yield
            return
        self._depth += 1
        try:
            with self.store.forward(), Interception(self.store):
                yield
        finally:
            self._depth -= 1

    @contextmanager
    def stock_scope(self) -> Iterator[None]:
        """Around a forward in which everything is kept as stock autograd does, and only the modules are watched."""
        self._depth += 1
        try:
            with self.store.forward():
                yield
        finally:
            self._depth -= 1

    def remove(self) -> None:
        """Take every hook off the model. What has been stored stays good for its backward."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close_all()

    def forget(self) -> None:
        """Let go of what a forward or a backward that was ended by an exception has left in memory."""
        self._close_all()
        self.store.clear()

    def _watch(self, module: nn.Module, name: str) -> None:
        """Let the store know whose forward runs, what is excluded, and where every saved tensor is to be stored."""
        excluded, hooked, store = self.config.excludes(name), self.config.hooks(name), self.store
        opened: list[AbstractContextManager[None]] = []

        def before(*_: Any) -> None:
            if not self._depth:
                return
            store.modules.append(name)
            store.num_excluded += excluded
            if hooked and store.is_active:
                opened.append(store.hooks("hooked"))
                opened[-1].__enter__()

        def after(*_: Any) -> None:
            if not self._depth or not store.modules:
                return
            if opened:
                opened.pop().__exit__(None, None, None)
            store.modules.pop()
            store.num_excluded -= excluded

        self._handles.append(_compat.register_first(module, before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def _enter_with(self, model: nn.Module) -> None:
        def before(*_: Any) -> None:
            scope = self.scope()
            scope.__enter__()
            self._open.append(scope)

        def after(*_: Any) -> None:
            if self._open:
                self._open.pop().__exit__(None, None, None)

        self._handles.append(_compat.register_first(model, before))
        self._handles.append(model.register_forward_hook(after, always_call=True))

    def _close_all(self) -> None:
        while self._open:  # of forwards that a KeyboardInterrupt ended: torch runs no hook for it
            self._open.pop().__exit__(None, None, None)


def store_in_few_bits(
    model: nn.Module, config: ActivationConfig | Mapping[str, Any] | str = "agoq"
) -> StoredActivations:
    """Store what `model` keeps for its backward in 4 bits a value, and recompute the rest.

    Inputs of RMSNorm, LayerNorm, SiLU, GELU and Linear are stored as messages of the codec, once each, however many
    read them; what follows from one that is stored (a norm's output, the product of a SwiGLU) is not stored at all.
    Query, key and value of ``scaled_dot_product_attention``, and whatever else torch saves, stay as they are. The
    forward's values are those of stock torch, bit for bit.

    Args:
        model: any module; parts of it may be DTensors or sharded by FSDP2, and other parts be checkpointed: what is
            inside activation checkpointing or other saved-tensor hooks is left to them.
        config: ``"agoq"`` for the defaults, an `ActivationConfig`, or its fields as a mapping.

    Returns:
        A handle, whose `remove` undoes it, and whose `ledger` counts what is stored.

    Raises:
        ValueError: for impossible settings, or ``"none"``.
        RuntimeError: for a model that is compiled, or compiled later.

    Cost: one launch to encode and one to decode each stored tensor; one more run of each norm and activation in
    backward.

    Source: AGoQ, arXiv 2605.00539, LAAQ. It stores the input of the attention's output projection too; torch's
    attention keeps that tensor anyway where it can, and then it is shared instead.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> handle = store_in_few_bits(model, {"min_numel": 0})
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> handle.ledger.total.ratio > 7
        True
        >>> handle.remove()
    """
    resolved = resolve_activations(config)
    if resolved is None:
        raise ValueError(f"config={config!r} stores nothing in few bits; use 'agoq' or an ActivationConfig.")
    return StoredActivations(model, resolved)


def _check_not_compiled(model: nn.Module, config: ActivationConfig) -> None:
    for name, module in model.named_modules():
        is_compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if is_compiled and not config.excludes(name):
            raise RuntimeError(
                f"module {name!r} is compiled, but what is kept for backward is decided inside the graph, so its "
                "activations cannot be stored in few bits. Leave it uncompiled, or name it in exclude."
            )
