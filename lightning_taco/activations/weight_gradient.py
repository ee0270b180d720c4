"""A linear layer whose input is stored as a message: its weight's gradient from the message itself, or from what it
decodes to, whichever is faster on this device.

Only layers that own a message come here. In a LLaMA block on one rank that is the output projection, since
attention's result is copied for it where rotary positions have laid out the heads anew; else it shares what attention
keeps. Query, key, value, gate and up read what a norm gives, and down what SwiGLU gives: both are computed again from
other messages. Under sequence parallelism the layers behind a norm, the head among them, read what has been gathered,
which is a message of its own; so is the input of any layer behind something unknown.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_taco import _compat
from lightning_taco.activations.settings import ActivationConfig, WeightGradient
from lightning_taco.activations.storage import Quantized, VersionWatch, unwrapped
from lightning_taco.activations.store import ActivationStore
from lightning_taco.config import CodecConfig

if TYPE_CHECKING:
    from lightning_taco.activations.kernels_weight_gradient import Tile

HALF_DTYPES = (torch.bfloat16, torch.float16)
NUM_WARM_UPS = 2
NUM_RUNS = 5

logger = logging.getLogger(__name__)


class Problem(NamedTuple):
    """What a choice holds for."""

    device: torch.device
    dtype: torch.dtype
    codec: CodecConfig
    log2_tokens: int
    """Rounded up: batches of other lengths are not measured anew."""
    num_outputs: int
    num_channels: int
    num_readers: int
    """That share what is decoded."""


_chosen: dict[Problem, Tile | None] = {}


class LinearOfMessage(torch.autograd.Function):
    """``F.linear`` of an input that is stored as a message. Forward, and the other gradients, are those of stock torch.

    Stock autograd's saved-tensor hooks hand out decoded tensors only, so the message is saved here.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, source: Quantized, store: ActivationStore
    ) -> Tensor:
        """The layer's output; `source` stands for `input`, or for this rank's part of it if it is a DTensor."""
        local, ctx.wrapper = unwrapped(input)
        assert local is not None  # it has a message
        ctx.watch, ctx.store, ctx.source = VersionWatch(input, local), store, weakref.ref(source)
        ctx.shape, ctx.placements = local.shape, getattr(input, "placements", ())
        source.num_users += 1
        ctx.save_for_backward(source.message, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of input, weight and bias."""
        _, weight = ctx.saved_tensors
        source, store = ctx.source(), ctx.store
        ctx.watch.check(ctx.shape)
        of_input = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        of_weight = _of_weight(ctx, gradient, weight, source) if ctx.needs_input_grad[1] else None
        if of_weight is None:
            store.let_go(source)
        of_bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None


def message_hooks(source: Quantized, store: ActivationStore) -> AbstractContextManager[Any]:
    """Have the message of `source` saved as `source` itself, which autograd then holds as long as it needs it."""

    def pack(tensor: Tensor) -> Any:
        return source if tensor is source.message else store.keep(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed.message if isinstance(packed, Quantized) else store.unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def may_read_message(config: ActivationConfig, input: Tensor, weight: Tensor, local: Tensor) -> bool:
    """Whether the gradient of `weight` might come from the message of `input`, of which `local` is this rank's part."""
    if config.weight_gradient == "separate" or not runs_kernels(local) or not config.has_readable_messages:
        return False
    kinds = {input.dtype, weight.dtype}
    is_cast = torch.is_autocast_enabled(local.device.type)
    return (
        len(kinds) == 1
        and local.dtype in HALF_DTYPES
        and not is_cast
        and local.dim() > 1
        and local.shape[-1] % config.block_size == 0
    )


def runs_kernels(tensor: Tensor) -> bool:
    """Whether the kernel runs where `tensor` lies, and runs now: operations may also be only recorded."""
    return tensor.is_cuda and _compat.has_triton() and not _compat.is_tracing()


def weight_gradient(gradient: Tensor, source: Quantized, num_channels: int, store: ActivationStore) -> Tensor:
    """``gradient.t() @ input``, from the message or from what it decodes to.

    Which is measured at first use, both ways on these very tensors, for each device, dtype, format, shape (tokens to
    the next power of two) and number of layers that share what is decoded; a line of the log says what was kept. Never
    measured while a CUDA graph is captured: then, and wherever the kernel does not fit, it is decoded. Ranks choose by
    their own clocks and may differ, even within a tensor-parallel group: each computes the gradient of its own part of
    the weight, and both ways sum the same products in fp32, in another order.

    Args:
        gradient: of the layer's outputs, ``[tokens, outputs]``.
        source: of the input, `tokens` times `num_channels` values. One of its users has had it then.
        num_channels: of the input; where they are no multiple of the block size, the message is decoded.
        store: that `source` is of.

    Returns:
        ``[outputs, channels]``.

    Cost: a matrix product, and one launch to decode unless another layer has had it done or the message is read by the
    product itself. The first time a dozen of both, and the host waits for them.
    """
    tile = None
    if not store.is_decoded(source):  # else the library's product has nothing left to wait for
        tile = _chosen_tile(gradient, source, num_channels, store.config.weight_gradient)
    if tile is None:
        return gradient.t() @ store.value(source).view(-1, num_channels)
    store.let_go(source)
    return _fused(gradient, source, num_channels, tile)


def _of_weight(ctx: Any, gradient: Tensor, weight: Tensor, source: Quantized) -> Tensor:
    """The gradient of a weight that may be a DTensor."""
    local_gradient, _ = unwrapped(gradient)
    local_weight, wrapper = unwrapped(weight)
    is_local = wrapper is None or _is_local(ctx.placements, weight, gradient)
    if is_local and local_gradient is not None and local_weight is not None:
        result = weight_gradient(_rows(local_gradient), source, local_weight.shape[1], ctx.store)
        return result if wrapper is None else wrapper.around(result)
    value = ctx.store.value(source).view(ctx.shape)
    return _rows(gradient).t() @ _rows(value if ctx.wrapper is None else ctx.wrapper.around(value))


def _is_local(input_placements: Any, weight: Any, gradient: Any) -> bool:
    """Whether each rank's part of the weight's gradient follows from its own parts of the other two.

    It does where the weight is split by outputs, or by channels, over all axes of the mesh, and the others as fits.
    """
    placements = getattr(gradient, "placements", None)
    if not placements or not input_placements:
        return False
    last = gradient.dim() - 1

    def are_split(those: Any, dim: int) -> bool:
        return all(each.is_shard(dim) for each in those)

    def are_whole(those: Any) -> bool:
        return all(each.is_replicate() for each in those)

    by_outputs = are_split(weight.placements, 0) and are_whole(input_placements) and are_split(placements, last)
    by_channels = are_split(weight.placements, 1) and are_split(input_placements, last) and are_whole(placements)
    return by_outputs or by_channels


def _chosen_tile(gradient: Tensor, source: Quantized, num_channels: int, way: WeightGradient) -> Tile | None:
    """That the kernel is to be run with; ``None`` to decode."""
    is_readable = gradient.numel() and num_channels % source.codec.block_size == 0 and runs_kernels(gradient)
    if way == "separate" or not is_readable:
        return None
    from lightning_taco.activations.kernels_weight_gradient import TILES

    if way == "fused":
        return TILES[0]
    problem = _problem(gradient, source, num_channels)
    if problem not in _chosen:
        if torch.cuda.is_current_stream_capturing():
            return None
        _chosen[problem] = _measured(problem, gradient, source, TILES)
    return _chosen[problem]


def _problem(gradient: Tensor, source: Quantized, num_channels: int) -> Problem:
    num_tokens, num_outputs = gradient.shape
    sizes = ((num_tokens - 1).bit_length(), num_outputs, num_channels, source.num_users)
    return Problem(gradient.device, gradient.dtype, source.codec, *sizes)


def _measured(problem: Problem, gradient: Tensor, source: Quantized, tiles: tuple[Tile, ...]) -> Tile | None:
    """The faster way, which the log is told."""
    product = microseconds(partial(torch.matmul, gradient.t(), source.value().view(-1, problem.num_channels)))
    separate = product + microseconds(source.value) / max(1, problem.num_readers)
    fused = {tile: microseconds(partial(_fused, gradient, source, problem.num_channels, tile)) for tile in tiles}
    best = min(fused, key=fused.__getitem__)
    is_fused = fused[best] < separate
    logger.info(
        "gradient of a weight [%d, %d] from %d tokens in %s: %.0f us decoded and multiplied (%d share what is "
        "decoded), %.0f us in one kernel; kept: %s",
        problem.num_outputs,
        problem.num_channels,
        gradient.shape[0],
        source.codec,
        separate,
        problem.num_readers,
        fused[best],
        "fused" if is_fused else "separate",
    )
    return best if is_fused else None


def _fused(gradient: Tensor, source: Quantized, num_channels: int, tile: Tile) -> Tensor:
    from lightning_taco.activations.kernels_weight_gradient import weight_gradient_triton

    return weight_gradient_triton(gradient, source.message, source.codec, num_channels, tile)


def microseconds(run: Callable[[], Tensor]) -> float:
    """Of one run on the CUDA device of now, the least of a few; infinite for a kernel that does not fit it."""
    from lightning_taco.activations.kernels_weight_gradient import CannotRun

    try:
        for _ in range(NUM_WARM_UPS):
            run()
    except CannotRun:
        return float("inf")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_RUNS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    marks[-1].synchronize()
    return 1000 * min(start.elapsed_time(end) for start, end in itertools.pairwise(marks))


def _rows(tensor: Tensor) -> Tensor:
    """``[..., values]`` as ``[tokens, values]``."""
    return tensor.reshape(-1, tensor.shape[-1])
