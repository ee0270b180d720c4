"""What a model's forward calls, seen and done in a way that stores less: a mode over torch's own functions.

So it works for any module that uses them, by class or by function, with plain tensors and DTensors alike. Values of the
forward are those of stock torch, bit for bit; only what is kept for backward differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_taco import _compat
from lightning_taco.activations.functions import (
    FromInputs,
    Product,
    SiluTimes,
    SiluTimesOfMessages,
    can_read_messages,
    gelu_derivative,
    silu_derivative,
    silu_times,
)
from lightning_taco.activations.norms import LayerNorm, Norm, NormOfInput, NormOutput, RMSNorm
from lightning_taco.activations.storage import Quantized, Recomputed, Source, unwrapped
from lightning_taco.activations.store import ActivationStore
from lightning_taco.activations.weight_gradient import LinearOfMessage, may_read_message, message_hooks
from lightning_taco.codec import VALUE_DTYPES

CASTS = (torch.Tensor.to, torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.float)


class Interception(TorchFunctionMode):
    """Stands between a model's forward and torch while it is entered.

    Args:
        store: where saved tensors go.

    Attributes:
        keeps_inputs: that it decides what an operation keeps; who replaces an operation leaves it alone under such a
            mode.
    """

    keeps_inputs = True

    def __init__(self, store: ActivationStore) -> None:
        super().__init__()
        self.store = store
        # silu(gate) -> gate, as long as the former lives: what multiplies it may be the other half of a SwiGLU.
        self._gates: Any = WeakIdKeyDictionary()
        self._handlers: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.rms_norm: self._rms_norm,
            F.layer_norm: self._layer_norm,
            F.gelu: self._gelu,
            F.silu: self._silu,
            torch.mul: partial(self._multiply, torch.mul),
            torch.Tensor.mul: partial(self._multiply, torch.Tensor.mul),
            torch.Tensor.__mul__: partial(self._multiply, torch.Tensor.__mul__),
            F.scaled_dot_product_attention: self._attention,
            F.relu: partial(self._relu, F.relu),
            torch.relu: partial(self._relu, torch.relu),
            **{cast: partial(self._cast, cast) for cast in CASTS},
        }

    def __torch_function__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is None or not self.store.is_active:
            return func(*args, **(kwargs or {}))
        if _compat.is_tracing():
            raise RuntimeError(
                "activations cannot be stored in few bits under torch.compile: what is kept for backward is decided "
                "inside the graph. Leave the model uncompiled, or exclude the compiled modules by name."
            )
        return handler(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not weight.requires_grad:  # nothing is saved but the weight
            return F.linear(input, weight, bias)
        input = self._as_multiplied(input)
        local, _ = unwrapped(input)
        if local is None or local.numel() < self.store.config.min_numel:
            return F.linear(input, weight, bias)
        with self.store.hooks("linear", only=local):
            source = self._message_to_read(input, weight, local)
            if source is None:
                return F.linear(input, weight, bias)
        with message_hooks(source, self.store):
            return LinearOfMessage.apply(input, weight, bias, source, self.store)

    def _message_to_read(self, input: Tensor, weight: Tensor, local: Tensor) -> Quantized | None:
        """The message of a linear layer's input, if it has one of its own and a matrix product may read it."""
        if not may_read_message(self.store.config, input, weight, local):
            return None
        known = self.store.source_of(local)
        return self.store.message_of(local) if known is None or isinstance(known, Quantized) else None

    def _rms_norm(
        self, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        return self._norm(RMSNorm(normalized_shape, eps), input, weight, None)

    def _layer_norm(
        self,
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        return self._norm(LayerNorm(normalized_shape, eps), input, weight, bias)

    def _norm(self, norm: Norm, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        with self.store.hooks("norm"):
            output = NormOfInput.apply(norm, input, weight, bias)
        # Copies, small beside the activations: the weights may be sharded again when the output is asked for.
        whole = [None if each is None else unwrapped(each)[0] for each in (weight, bias)]
        if all(part is None or part.shape == norm.normalized_shape for part in whole):
            copies = [None if each is None else each.detach().clone() for each in whole]

            def kind(_: Any, sources: list[Source], device: torch.device) -> Recomputed:
                return NormOutput(norm, (copies[0], copies[1]), sources[0], self.store, device)

            self._recomputable(output, norm, input, kind=kind)
        return output

    def _gelu(self, input: Tensor, *, approximate: str = "none") -> Tensor:
        operation = partial(F.gelu, approximate=approximate)
        with self.store.hooks("activation"):
            output = FromInputs.apply(operation, partial(gelu_derivative, approximate=approximate), input)
        self._recomputable(output, operation, input)
        return output

    def _silu(self, input: Tensor, inplace: bool = False) -> Tensor:
        if inplace:
            return F.silu(input, inplace=True)
        with self.store.hooks("activation"):
            output = FromInputs.apply(F.silu, silu_derivative, input)
        if output.requires_grad:
            self._gates[output] = (input, input._version, output._version)
            self._recomputable(output, F.silu, input)
        return output

    def _multiply(self, stock: Callable[..., Tensor], left: Any, right: Any, **options: Any) -> Tensor:
        for activated, up in ((left, right), (right, left)):
            if not isinstance(activated, Tensor) or options:
                continue
            gate, *versions = self._gates.get(activated, (None,))
            if gate is not None and [gate._version, activated._version] == versions and _match(activated, up):
                return self._silu_times(gate, up, activated)
        return stock(left, right, **options)

    def _silu_times(self, gate: Tensor, up: Tensor, activated: Tensor) -> Tensor:
        with self.store.hooks("activation"):
            gate_source = self.store.message_of(gate) if can_read_messages(gate) else None
            up_source = None if gate_source is None else self.store.message_of(up, may_be_pending=True)
            if up_source is None:
                output = SiluTimes.apply(gate, up, activated.detach())
            else:
                output = SiluTimesOfMessages.apply(gate, up, activated.detach(), gate_source, up_source)
            self.store.count_recomputed(activated)
        self._recomputable(output, silu_times, gate, up, kind=Product)
        return output

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Its query, key and value stay as they are: an error in them is multiplied in the scores."""
        with self.store.no_hooks():
            output = F.scaled_dot_product_attention(*args, **kwargs)
        if output.grad_fn is not None and output.grad_fn.name().startswith("ScaledDotProduct"):  # it keeps its output
            self.store.is_kept_anyway(output)
        return output

    def _relu(self, stock: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """It keeps its output, whose zeros say exactly where no gradient passes: a layer behind it may share that."""
        output = stock(input, *args, **kwargs)
        if output.requires_grad:
            self.store.is_kept_anyway(output)
        return output

    def _cast(self, stock: Callable[..., Tensor], input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = stock(input, *args, **kwargs)
        if output is not input and output.requires_grad and output.device == input.device:
            dtype = output.dtype
            self._recomputable(output, lambda x: x.to(dtype), input)
        return output

    def _as_multiplied(self, input: Tensor) -> Tensor:
        """`input` as a matrix product reads it, so that this is also what it saves: cast by autocast, contiguous."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind) and input.dtype in VALUE_DTYPES:
            input = self._cast(torch.Tensor.to, input, torch.get_autocast_dtype(kind))
        return input.contiguous()

    def _recomputable(
        self,
        output: Tensor,
        operation: Callable[..., Tensor],
        *inputs: Tensor,
        kind: Callable[..., Recomputed] = Recomputed,
    ) -> None:
        """Should autograd save `output`, it is computed again from what stands for `inputs`."""
        if not output.requires_grad or any(_placements(input) != _placements(output) for input in inputs):
            return
        sources = [self.store.source_of(input) for input in inputs]
        if all(source is not None for source in sources):
            found = [source for source in sources if source is not None]
            self.store.can_be_recomputed(output, kind(operation, found, output.device))


def _placements(tensor: Tensor) -> Any:
    """How a DTensor lies on its ranks: what holds of a partial sum does not hold of its parts. ``None`` if plain."""
    return getattr(tensor, "placements", None)


def _match(activated: Tensor, up: Any) -> bool:
    return (
        isinstance(up, Tensor)
        and type(up) is type(activated)
        and up.shape == activated.shape
        and up.dtype == activated.dtype
    )
