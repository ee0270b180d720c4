"""Keeps tied weights tied while a model is parallelised.

``parallelize_module`` registers a new DTensor parameter for each module that its plan names. A weight that two modules
share, such as an embedding and the output head, becomes two weights, and nothing says so. Materialising a model that
was built on the meta device does the same by another way (``Module.to_empty`` makes a new tensor for each place).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

logger = logging.getLogger(__name__)

# A parameter carries the key of its tie as an attribute for the length of a block. A table by weak reference would be
# in the way of `to_empty` (torch swaps no tensor that has weak references), one by strong reference would keep the full
# weight of each parameter that is being cut, and one by `id` would confuse a parameter with a dead one.
_KEY = "_lightning_taco_tie"
_keys = itertools.count()


class _Place:
    """Where a module holds a parameter."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    @property
    def parameter(self) -> nn.Parameter | None:
        """What the module holds there now."""
        module = self.module
        return None if module is None else module._parameters.get(self.name)

    def is_at(self, module: nn.Module, name: str) -> bool:
        return self.name == name and self.module is module


class TiedParameters:
    """The ties between parameters that one `preserve_tied_parameters` block has seen.

    Attributes:
        tied_again: one tuple of parameter names for each tie that would have come apart.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.tied_again: list[tuple[str, ...]] = []
        self._root = module
        self._ties: dict[int, list[_Place]] = {}
        self._joined: set[int] = set()  # keys of the ties that were kept in the hook
        if module is not None:
            self._remember(module)

    def register(self, module: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter | None:
        """Torch's registration hook: what `module` will hold under `name` in place of `new`, ``None`` for `new`."""
        old = module._parameters.get(name)
        if old is new:
            return None
        new_key = self._key_of(new)
        if new_key is not None and not any(place.parameter is new for place in self._ties[new_key]):
            new_key = None  # a deep copy of a DTensor takes the attributes along
        if old is not None and new_key is None and _is_parallelized(old, new):
            key = self._key_of(old)
            if key is None:  # a module that came in without registration, such as a deep copy
                key = self._new_tie(old)
            self._add(key, module, name)
            twin = self._twin(key, new)
            if twin is not None:
                self._joined.add(key)
                return twin
            setattr(new, _KEY, key)
            return None
        # Anything else is meant by who wrote it: the place leaves its old tie.
        if old is not None and (old_key := self._key_of(old)) is not None:
            self._ties[old_key] = [place for place in self._ties[old_key] if not place.is_at(module, name)]
        self._add(self._new_tie(new) if new_key is None else new_key, module, name)
        return None

    def restore(self) -> None:
        """Tie again what came apart, by the parameter of the first place.

        Raises:
            ValueError: when the parameters of one tie cannot be one any more, with their names and placements.
        """
        names = _ParameterNames(self._root)
        for key, places in self._ties.items():
            held = [place for place in places if place.parameter is not None]
            if len({id(place.parameter) for place in held}) > 1:
                _check_can_be_one(held, names)
                first = held[0].parameter
                for place in held[1:]:
                    assert place.module is not None
                    place.module._parameters[place.name] = first
                self._joined.add(key)
            if key in self._joined:
                self.tied_again.append(tuple(names.of(place) for place in held))
        for tied in self.tied_again:
            logger.info("lightning_taco: kept %s one parameter", " and ".join(tied))

    def forget(self) -> None:
        """Remove what the block left on the parameters."""
        for places in self._ties.values():
            for place in places:
                if (parameter := place.parameter) is not None:
                    parameter.__dict__.pop(_KEY, None)
        self._ties.clear()

    def _remember(self, module: nn.Module) -> None:
        places: dict[int, list[_Place]] = {}
        for submodule in module.modules():
            for name, parameter in submodule._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append(_Place(submodule, name))
        for tied in places.values():
            if len(tied) > 1 and tied[0].parameter is not None:
                self._ties[self._new_tie(tied[0].parameter)].extend(tied)

    def _new_tie(self, parameter: nn.Parameter) -> int:
        key = next(_keys)
        self._ties[key] = []
        setattr(parameter, _KEY, key)
        return key

    def _key_of(self, parameter: nn.Parameter) -> int | None:
        key = parameter.__dict__.get(_KEY)
        return key if key in self._ties else None  # not one of an enclosing block

    def _add(self, key: int, module: nn.Module, name: str) -> None:
        if not any(place.is_at(module, name) for place in self._ties[key]):
            self._ties[key].append(_Place(module, name))

    def _twin(self, key: int, new: nn.Parameter) -> nn.Parameter | None:
        """The parameter by which another place of the tie was parallelised already, if it is laid out like `new`."""
        layout = _layout(new)
        held = (place.parameter for place in self._ties[key])
        return next((other for other in held if isinstance(other, DTensor) and _layout(other) == layout), None)


_blocks = threading.local()  # the blocks that this thread is in, outermost first
_hook_lock = threading.Lock()
_num_blocks = 0
_hook_handle: Any = None


@contextmanager
def preserve_tied_parameters(module: nn.Module | None = None, *, tie: bool = True) -> Iterator[TiedParameters]:
    """Keep the tied parameters of a model tied while it is parallelised or materialised in this block.

    Ties that exist before the block are those within `module`; ties made in the block are always seen. The gradients
    of a tied parameter's places add up in one ``grad``, as on one device. A weight that is assigned anew on purpose
    (plain to plain, or a DTensor for another of the same layout) is left as assigned. Blocks nest, and ranks that are
    threads of one process do not see each other's.

    Args:
        module: the model, where it exists before the block.
        tie: ``False`` makes the block do nothing.

    Yields:
        A record whose `tied_again` names, after the block, what was kept together.

    Raises:
        ValueError: at the end of the block, when parameters that were tied now have different layouts, or only some
            are DTensors, or FSDP2 manages them apart. It names them, their placements and the fix.

    Example::

        with preserve_tied_parameters(model):
            parallelize_module(model, mesh, {"embedding": RowwiseParallel(), "head": ColwiseParallel()})
        assert model.embedding.weight is model.head.weight
    """
    record = TiedParameters(module if tie else None)
    if not tie:
        yield record
        return
    stack = _stack()
    _enter_hook()
    stack.append(record)
    try:
        yield record
        record.restore()
    finally:
        stack.remove(record)
        _exit_hook()
        record.forget()


def _stack() -> list[TiedParameters]:
    if not hasattr(_blocks, "stack"):
        _blocks.stack = []
    return _blocks.stack


def _enter_hook() -> None:
    global _num_blocks, _hook_handle
    with _hook_lock:
        if _num_blocks == 0:
            # torch's annotation lacks the replacement that its documentation lets a hook return
            _hook_handle = register_module_parameter_registration_hook(_on_registration)  # type: ignore[arg-type]
        _num_blocks += 1


def _exit_hook() -> None:
    global _num_blocks, _hook_handle
    with _hook_lock:
        _num_blocks -= 1
        if _num_blocks == 0:
            _hook_handle.remove()
            _hook_handle = None


def _on_registration(module: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter | None:
    stack = _stack()
    # The innermost block decides; those around it look at the outcome when they end.
    return stack[-1].register(module, name, new) if stack else None


def _is_parallelized(old: nn.Parameter, new: nn.Parameter) -> bool:
    return isinstance(new, DTensor) and _layout(old) != _layout(new)


def _layout(parameter: nn.Parameter) -> tuple[Any, ...]:
    """What two parameters must share to be one; for FSDP's and TP's DTensors, placements on every mesh axis."""
    placement = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
    return placement, parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad


class _ParameterNames:
    """Full names of parameters in a model, and the FSDP2 module that shards each."""

    def __init__(self, root: nn.Module | None) -> None:
        modules = dict(root.named_modules()) if root is not None else {}
        self._prefixes = {id(module): name for name, module in modules.items()}
        self._fsdp_modules = [name for name, module in modules.items() if isinstance(module, FSDPModule)]

    def of(self, place: _Place) -> str:
        if id(place.module) not in self._prefixes:
            return f"{type(place.module).__name__}.{place.name}"
        prefix = self._prefixes[id(place.module)]
        return f"{prefix}.{place.name}" if prefix else place.name

    def fsdp_module_of(self, place: _Place) -> str | None:
        """Name of the innermost module around `place` that ``fully_shard`` was called on; ``None`` without one."""
        around = [name for name in self._fsdp_modules if not name or self.of(place).startswith(f"{name}.")]
        return max(around, key=len, default=None)


def _check_can_be_one(places: Sequence[_Place], names: _ParameterNames) -> None:
    """Raise a ValueError unless the parameters at `places` have one layout, and FSDP2 has none of them yet."""
    first, *others = places
    for other in others:
        assert first.parameter is not None
        assert other.parameter is not None
        if other.parameter is first.parameter:
            continue
        owners = (names.fsdp_module_of(first), names.fsdp_module_of(other))
        is_alike = _layout(other.parameter) == _layout(first.parameter)
        if is_alike and owners == (None, None):
            continue
        pair = f"{names.of(first)} ({_describe(first.parameter)}) and {names.of(other)} ({_describe(other.parameter)})"
        on_purpose = f"untie them on purpose: give {names.of(other)} its own nn.Parameter before"
        if is_alike or owners[0] != owners[1]:
            raise ValueError(
                f"{pair} are tied, but fully_shard manages them apart, so each would be trained on its own. Leave both "
                f"to one fully_shard call (the one on the whole model), or {on_purpose}."
            )
        raise ValueError(
            f"{pair} were one tied parameter and have come apart, so each would be trained on its own. Give both the "
            f"same layout in the parallelization plan (RowwiseParallel for an embedding and ColwiseParallel for its "
            f"head both split the vocabulary), or {on_purpose}."
        )


def _describe(parameter: nn.Parameter) -> str:
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
        return ", ".join(f"{placement!r} on {axis}" for axis, placement in zip(axes, parameter.placements, strict=True))
    return f"a plain tensor on {parameter.device}"
