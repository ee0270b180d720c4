"""Which module an exchange belongs to, in forward, in backward, and in a forward that is computed again.

Module hooks keep a stack of names while the module runs. In backward, a hook on the gradient of a module's output opens
the name and one on the gradient of its input closes it: what DTensor redistributes between the two belongs to it.
A forward that activation checkpointing repeats inside backward runs the modules again, so its exchanges are forward
ones, with the same name and so the same codec as the first time.

Autograd runs CUDA's backward in a thread of its own, so each thread has its stacks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_taco import _compat
from lightning_taco.collectives.traffic import Direction

NOTED_SITE = "_lightning_taco_site"
WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


class Site(NamedTuple):
    """Where an exchange happens: module path (``""`` outside any module), direction, and whether it is a recompute."""

    name: str
    direction: Direction
    is_recompute: bool


class _Stacks(threading.local):
    """One thread's open modules."""

    def __init__(self) -> None:
        self.generation = 0
        self.forward: list[str] = []
        self.backward: list[str] = []


class ModuleSites:
    """Hooks on the modules of one model that know which of them is running.

    Only modules that can exchange something are followed (those with DTensor parameters or with hooks, such as the
    parallel styles' own) and the modules around them.
    Cost: about 8 us a followed module and step, on the host.
    """

    def __init__(self) -> None:
        self._stacks = _Stacks()
        self._generation = 0
        self._handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> list[str]:
        """Follow `module` until `detach`; returns the names followed."""
        names = _names_to_follow(module)
        for name, child in module.named_modules():
            if name in names:
                self._follow(_clean(name), child)
        return [_clean(name) for name in names]

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def start_step(self) -> None:
        """Forget names that an interrupted pass, or an input without gradient, left open."""
        self._generation += 1

    def current(self) -> Site:
        """The site of an exchange that happens now, in this thread."""
        stacks = self._fresh_stacks()
        if not _compat.in_backward():
            name = stacks.forward[-1] if stacks.forward else ""
            _note_checkpointed(name)
            return Site(name, "forward", False)
        if stacks.forward:
            return Site(stacks.forward[-1], "forward", True)
        name = stacks.backward[-1] if stacks.backward else ""
        if _compat.in_checkpoint_recompute():
            return Site(_noted_checkpointed(name), "forward", True)
        return Site(name, "backward", False)

    def _fresh_stacks(self) -> _Stacks:
        stacks = self._stacks
        if stacks.generation != self._generation:
            stacks.generation = self._generation
            stacks.forward.clear()
            stacks.backward.clear()
        return stacks

    def _follow(self, name: str, module: nn.Module) -> None:
        def open_backward(_: Tensor) -> None:
            backward = self._fresh_stacks().backward
            position = len(backward)
            # A module that returns its last child's output shares that tensor, and the child's hook ran first.
            while position and backward[position - 1].startswith(f"{name}."):
                position -= 1
            backward.insert(position, name)

        def close_backward(_: Tensor) -> None:
            backward = self._fresh_stacks().backward
            if name in backward:
                backward.remove(name)

        def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            self._fresh_stacks().forward.append(name)
            _hook_first_gradient((*args, *kwargs.values()), close_backward)

        def after_forward(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            forward = self._fresh_stacks().forward
            if name in forward:
                del forward[_last_index(forward, name) :]
            _hook_first_gradient(output, open_backward)

        # First before and last after the hooks of parallel styles, whose redistributions belong to the module.
        self._handles.append(_compat.register_first(module, before_forward, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after_forward, always_call=True))


def _note_checkpointed(name: str) -> None:
    """Remember on a checkpoint the module that it is in: no module of it runs when its function is run again.

    Of the names seen in it, that of the function itself is the shortest; the others lie below.
    """
    frame = _compat.checkpoint_frame()
    if frame is not None and len(name) < len(getattr(frame, NOTED_SITE, name + ".")):
        setattr(frame, NOTED_SITE, name)


def _noted_checkpointed(default: str) -> str:
    return getattr(_compat.checkpoint_frame(), NOTED_SITE, default)


def _hook_first_gradient(values: Any, hook: Any) -> None:
    """Call `hook` when the gradient of the first tensor of `values` that needs one has been computed."""
    if not torch.is_grad_enabled():
        return
    for tensor in _tensors(values):
        if tensor.requires_grad:
            tensor.register_hook(hook)
            return


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _names_to_follow(module: nn.Module) -> set[str]:
    names: set[str] = set()
    for name, child in module.named_modules():
        if _may_exchange(child):
            parts = name.split(".")
            names.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return names - {""}


def _may_exchange(module: nn.Module) -> bool:
    has_dtensor = any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
    return has_dtensor or bool(module._forward_pre_hooks) or bool(module._forward_hooks)


def _clean(name: str) -> str:
    for prefix in WRAPPER_PREFIXES:
        name = f"{name}.".replace(prefix, "").removesuffix(".")
    return name


def _last_index(names: list[str], name: str) -> int:
    return len(names) - 1 - names[::-1].index(name)
