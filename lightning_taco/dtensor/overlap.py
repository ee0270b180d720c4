"""Row-parallel linear layers that send the tokens that are finished while they compute the next.

The product of a row-parallel layer is a partial sum on each rank, whose exchange can begin only when it is there. Cut
in slices of tokens, slice i + 1 is computed while slice i is encoded, sent, added up and decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from lightning_taco import _compat
from lightning_taco.collectives.traffic import Kind
from lightning_taco.config import CodecConfig
from lightning_taco.dtensor.exchange import Exchange
from lightning_taco.dtensor.outcomes import COMPRESSED
from lightning_taco.dtensor.scopes import session_in_scope
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.sites import Site

NUM_SLICES = "num_slices"
"""Attribute of a layer."""


class OverlappedRowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` for a linear layer whose compressed exchange overlaps with its own product.

    Use it in a tensor-parallel plan in place of torch's. Where nothing is compressed (compression off, excluded, a
    suspended site, channels in calibrated order, stored activations, embeddings, torch.compile) it is torch's, with the
    same bits.

    Args:
        num_slices: of tokens, in which the product is cut; at most as many as there are tokens. The layer has it as
            an attribute, which may be changed between steps.
        input_layouts: as for `RowwiseParallel`.
        output_layouts: as for `RowwiseParallel`: ``Replicate()`` (all-reduce), or ``Shard`` of a dim of tokens
            (reduce-scatter), which the ranks must divide.
        use_local_output: as for `RowwiseParallel`.

    Raises:
        ValueError: for a `num_slices` that is no number of slices.

    Cost: on CUDA the product and the codec share the GPU, and each slice is an exchange of its own: it gains where the
        link is slower than the product (a bias is added after the sum, so it is not quantised). In backward it is
        torch's: there the product has no exchange behind it. It has no second derivative.

    Source: the decomposition of PyTorch's asynchronous tensor parallelism, here with compressed exchanges.
    """

    def __init__(
        self,
        *,
        num_slices: int = 2,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        if not isinstance(num_slices, int) or isinstance(num_slices, bool) or num_slices < 1:
            raise ValueError(f"num_slices={num_slices!r} is not a number of slices; give an integer from 1 up.")
        self.num_slices = num_slices

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if isinstance(module, nn.Linear):
            setattr(module, NUM_SLICES, self.num_slices)
            stock = module.forward
            module.forward = partial(_forward, module, stock, device_mesh, self.output_layouts[0])  # type: ignore[method-assign]
        return module


def _forward(
    module: nn.Linear, stock: Callable[[Any], Any], mesh: DeviceMesh, layout: Placement, input: DTensor
) -> DTensor:
    """The layer's output, as `layout` says; partial sums where the exchange is left to whoever asks for it."""
    num_slices = getattr(module, NUM_SLICES)
    # First of all, and by shapes only: where nothing is cut, nothing is cast or computed for it.
    sliced = None if num_slices == 1 or _is_left_alone(input) else _Sliced.of(module, input, mesh, layout, num_slices)
    if sliced is None:
        return stock(input)
    assert isinstance(module.weight, DTensor)
    local, weight = _autocast(input.to_local()), _autocast(module.weight.to_local())
    bias = _autocast(module.bias.to_local()) if isinstance(module.bias, DTensor) else None
    output = _SlicedLinear.apply(local, weight, bias, sliced)
    shape = torch.Size((*input.shape[:-1], module.out_features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(output, mesh, (layout,), run_check=False, shape=shape, stride=stride)


def _is_left_alone(input: DTensor) -> bool:
    if torch.compiler.is_compiling() or _compat.is_tracing() or input.placements != (Shard(input.dim() - 1),):
        return True
    return any(getattr(mode, "keeps_inputs", False) for mode in _compat.function_modes())


def _autocast(tensor: Tensor) -> Tensor:
    return tensor.to(_computed_in(tensor))


def _computed_in(tensor: Tensor) -> torch.dtype:
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype


@dataclass(frozen=True)
class _Sliced:
    """An exchange in slices of tokens, as the session in scope means it."""

    session: CompressionSession
    exchange: Exchange
    """Of the whole product, with a tensor that has its shape only."""
    site: Site
    codec: CodecConfig
    mesh: DeviceMesh
    layout: Placement
    num_slices: int

    @classmethod
    def of(
        cls, module: nn.Linear, input: DTensor, mesh: DeviceMesh, layout: Placement, num_slices: int
    ) -> _Sliced | None:
        """``None`` where the product is to be exchanged as a whole, or as it is."""
        session, local = session_in_scope(mesh.get_group()), input._local_tensor
        dim = _token_dim(layout, local)
        if session is None or dim is None or local.numel() == 0 or session.world_size == 1:
            return None
        kind: Kind = "all_reduce" if isinstance(layout, Replicate) else "reduce_scatter"
        if kind == "reduce_scatter" and local.shape[dim] % session.world_size:
            return None
        whole = torch.empty(*local.shape[:-1], module.out_features, dtype=_computed_in(local), device="meta")
        exchange, site = Exchange(kind=kind, tensor=whole, dim=dim), session.sites.current()
        codec, _ = session.choose(exchange, site)
        if codec is None or codec.reshape == "calibrated" or session.suspended_outcome(kind, site) is not None:
            return None
        return cls(session, session.by_measurement(exchange, codec), site, codec, mesh, layout, num_slices)

    @property
    def is_scattered(self) -> bool:
        """Whether each rank gets a shard of the tokens, and not all of them."""
        return self.exchange.kind == "reduce_scatter"

    def multiply(self, local: Tensor, weight: Tensor) -> Tensor:
        """``local @ weight.T``, of ``[..., K]`` and ``[N, K]``, summed over ranks: ``[..., N]``, or a shard of it."""
        session, num_shards, shape = self.session, self.session.world_size if self.is_scattered else 1, local.shape
        dim = self.exchange.dim
        # [outer, shards, tokens, K]: a slice has the same tokens of every rank's shard.
        inputs = local.reshape(shape[:dim].numel(), num_shards, -1, shape[-1])
        summed = local.new_empty(inputs.shape[0], inputs.shape[2], weight.shape[0])
        parts = []
        for index, (start, stop) in enumerate(_cuts(inputs.shape[2], self.num_slices)):
            part = inputs[:, :, start:stop] @ weight.t()
            exchange = replace(self.exchange, tensor=part, dim=1)
            seed = session.seed(exchange.kind, self.site, index)
            with session.beside.stream(part, summed):
                summed[:, start:stop] = exchange.run(self.codec, session.group, seed, session.memory).squeeze(1)
            if session.observers:
                parts.append(part)
        session.record(self.exchange, self.site, self.codec, COMPRESSED)
        if parts:
            whole = torch.cat(parts, dim=2).view(self.exchange.tensor.shape)
            session.observe(replace(self.exchange, tensor=whole), self.site, self.codec)
        session.beside.join()
        return summed.view(*shape[:dim], shape[dim] // num_shards, *shape[dim + 1 : -1], weight.shape[0])

    def gather(self, gradient: Tensor) -> Tensor:
        """The gradient of all tokens, of that of this rank's; by DTensor, so it is compressed as others are."""
        if not self.is_scattered:
            return gradient
        sharded = DTensor.from_local(gradient, self.mesh, (self.layout,), run_check=False)
        return _compat.waited(sharded.redistribute(placements=(Replicate(),)).to_local())


class _SlicedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, weight: Tensor, bias: Tensor | None, sliced: _Sliced) -> Tensor:
        ctx.save_for_backward(local, weight)
        ctx.sliced = sliced
        summed = sliced.multiply(local, weight)
        return summed if bias is None else summed.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        local, weight = ctx.saved_tensors
        gradient = ctx.sliced.gather(gradient)
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        tokens = gradient.flatten(0, -2)
        of_input = gradient @ weight if needs_input else None
        of_weight = tokens.t() @ local.flatten(0, -2) if needs_weight else None
        return of_input, of_weight, tokens.sum(0) if needs_bias else None, None


def _token_dim(layout: Placement, local: Tensor) -> int | None:
    """The dim that the exchange scatters, 0 for an all-reduce; ``None`` for what is no exchange of tokens."""
    if isinstance(layout, Replicate):
        return 0 if local.dim() > 1 else None
    if not isinstance(layout, Shard) or layout.dim % local.dim() == local.dim() - 1:
        return None
    return layout.dim % local.dim()


def _cuts(num_tokens: int, num_slices: int) -> list[tuple[int, int]]:
    """Starts and stops of slices of nearly equal size; none is empty.

    >>> _cuts(7, 2), _cuts(2, 4)
    ([(0, 4), (4, 7)], [(0, 1), (1, 2)])
    """
    size = -(-num_tokens // num_slices)
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
