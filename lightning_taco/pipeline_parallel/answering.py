"""Lets a user's step run as it is written: what it calls as its model is, for a moment, something else.

On the rank of the first stage the call is only listened to, for what the model is given. On that of the last stage it
is answered with what the pipeline has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class _Heard(BaseException):
    """Ends a step once the model was called. No `Exception`, so that a step that catches those does not keep it."""


def heard_inputs(root: nn.Module, module: nn.Module, step: Callable[[nn.Module], Any]) -> tuple[Any, ...]:
    """What `step` calls `module` with; what it does after that call is not run.

    Args:
        root: given to `step`, or a stand-in for it.
        module: the model that is cut: `root`, or a module within it.
        step: calls the model.

    Raises:
        TypeError: for keyword arguments.
        RuntimeError: for a step that does not call the model.
    """
    inputs: list[tuple[Any, ...]] = []

    def listen(*args: Any, **kwargs: Any) -> None:
        if kwargs:
            raise TypeError(
                f"The model was called with the keyword arguments {', '.join(kwargs)}, but the first stage of a "
                "pipeline takes positional ones only; pass them in the order of its forward."
            )
        inputs.append(args)
        raise _Heard

    with _in_place_of(root, module, listen) as stand_in:
        try:
            step(stand_in)
        except _Heard:
            return inputs[0]
    raise RuntimeError(_not_called(module))


def answered(root: nn.Module, module: nn.Module, output: Any, step: Callable[[nn.Module], Any]) -> Any:
    """What `step` returns when its call of `module` is answered by `output`.

    Raises:
        RuntimeError: for a step that calls the model not once.
    """
    calls = 0

    def answer(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                f"{type(module).__name__} was called twice in one step, but a pipeline computes one forward for each "
                "micro-batch; call it once, with both inputs in one batch."
            )
        return output

    with _in_place_of(root, module, answer) as stand_in:
        result = step(stand_in)
    if not calls:
        raise RuntimeError(_not_called(module))
    return result


def _not_called(module: nn.Module) -> str:
    return (
        f"The step has not called {type(module).__name__}, the model that pipeline_layers() cuts, so there is nothing "
        "to run; call it as self(...) or by its name, such as self.model(...)."
    )


@contextmanager
def _in_place_of(root: nn.Module, module: nn.Module, call: Callable[..., Any]) -> Iterator[nn.Module]:
    stand_in = _stand_in(module, call)
    places = [(parent, name) for parent in root.modules() for name, child in parent._modules.items() if child is module]
    for parent, name in places:
        parent._modules[name] = stand_in
    try:
        yield stand_in if module is root else root
    finally:
        for parent, name in places:
            parent._modules[name] = module


def _stand_in(module: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """An object of the class of `module` with its very attributes, which does something else when it is called."""

    def answer(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    kind = type(module)
    names = {"__call__": answer, "forward": answer, "__module__": kind.__module__, "__doc__": kind.__doc__}
    stand_in: nn.Module = object.__new__(type(kind.__name__, (kind,), names))
    object.__setattr__(stand_in, "__dict__", module.__dict__)
    return stand_in
