"""Gradient norms and clipping for models of which some parameters are sharded and some are not.

A tensor-parallel model holds a mixture: DTensors that are sharded on the tensor-parallel axis, DTensors that
are replicated on it, DTensors that FSDP2 sharded on the data-parallel axis as well, and plain tensors that
every rank has whole. `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` refuse the mixture, and a norm
that adds the squares of all ranks counts each replicated gradient once per rank. Here a gradient counts once,
whatever its placement, so the numbers are those of the unsharded model.

How a norm is taken, in two exchanges for TP x FSDP2 and one for TP alone, however many parameters there are:

1. Gradients that are `Partial` (each rank holds a term of a sum; what sequence-parallel norm weights get) are
   summed first, in copies: one all-reduce per process group and dtype. The norm of a term means nothing.
2. Each rank takes |local gradient|^p, one float64 per parameter: [num_parameters].
3. This vector is summed over each mesh axis in turn. A gradient that is replicated on an axis of n ranks
   goes in with weight 1/n, so it comes out as the mean of n equal values. That counts it once, and makes the
   result the same on every rank even where replicas have come apart, and NaN everywhere if it is on one.
4. The sum to the power 1/p. For p = inf, steps 3 and 4 take the maximum.

The exchanges call `torch.distributed` itself, not DTensor, so nothing here is ever compressed. Nothing reads
a value back to the host, except `error_if_nonfinite=True`, which has to.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from lightning_taco import _compat
from lightning_taco.data_parallel.quantized_gradient import QuantizedGradient, quantized_gradient

PARTIAL_NORM_TORCH = (2, 13)  # the first whose norm of a partial gradient is not that of each rank's term

# torch's CPU kernels add float32 values one after another: over 38 million values the 1-norm comes out 10%
# off and the 2-norm 0.3%. Pieces of this many values stay within 1e-6; CUDA kernels add in a tree.
_CPU_PIECE_NUMEL = 4096

# What `max_norm / (norm + epsilon)` uses in torch.nn.utils.clip_grad_norm_.
_CLIP_EPSILON = 1e-6


@torch.no_grad()
def reduce_partial_gradients(parameters: Tensor | Iterable[Tensor]) -> int:
    """Give each `Partial` gradient the placements of its parameter, by an exact sum over the ranks.

    Args:
        parameters: DTensors and plain tensors, the same list on every rank. Their `.grad` is replaced where
            it is a DTensor with a `Partial` placement; every other gradient stays as it is.

    Returns:
        The number of gradients that were reduced.

    Cost:
        One all-reduce per process group and dtype, on a flat copy of the partial gradients.
    """
    partial = [parameter for parameter in _as_list(parameters) if _is_partial(parameter.grad)]
    for parameter, gradient in zip(partial, _sum_partial([_dtensor(p.grad) for p in partial]), strict=True):
        # From Replicate this is a local slice at most.
        parameter.grad = gradient.redistribute(placements=_dtensor(parameter).placements)
    return len(partial)


@torch.no_grad()
def gradient_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    per_parameter: bool = False,
    pipeline: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the norm of all gradients taken as one vector: that of the unsharded model, on every rank.

    Args:
        parameters: DTensors and plain tensors, with or without `.grad`, the same list on every rank.
        norm_type: p of the p-norm, above 0; `math.inf` for the largest absolute value.
        per_parameter: return each gradient's own norm instead, 0 where there is no gradient.
        pipeline: the ranks whose stages hold the other parameters of the model; ``None`` for none. Norms of single
            parameters do not need it.

    Returns:
        A plain float32 tensor, 0-dim, or [num_parameters] if `per_parameter`. NaN or Inf in any gradient on
        any rank makes it NaN or Inf on every rank. Gradients are left as they are, partial ones included.

    Raises:
        ValueError: `norm_type` is not above 0.

    Cost:
        One all-reduce of num_parameters float64 values per mesh axis (twice as many for `math.inf`), and one
        per process group and dtype that has partial gradients.
    """
    norms = _norms(_as_list(parameters), _checked_order(norm_type))
    return (norms if per_parameter else _total(norms, float(norm_type), pipeline)).float()


def gradient_norms_by_parameter(
    named_parameters: Iterable[tuple[str, Tensor]], norm_type: float = 2.0
) -> dict[str, Tensor]:
    """Return the norm of each gradient by the name of its parameter; see `gradient_norm`.

    The norm of all of them together is the norm of these values: no second exchange is needed for it.

    Args:
        named_parameters: as `module.named_parameters()` gives them, the same on every rank.
        norm_type: p of the p-norm, above 0; `math.inf` for the largest absolute value.

    Returns:
        Plain 0-dim float32 tensors, the same on every rank. Parameters without a gradient are left out.

    Raises:
        ValueError: `norm_type` is not above 0.
    """
    named = list(named_parameters)
    norms = gradient_norm([parameter for _, parameter in named], norm_type, per_parameter=True)
    return {
        name: norm for (name, parameter), norm in zip(named, norms.unbind(), strict=True) if has_gradient(parameter)
    }


@torch.no_grad()
def clip_gradients_by_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    pipeline: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm is at most `max_norm`, by one factor on all ranks.

    The factor is `min(1, max_norm / (norm + 1e-6))`, as in `torch.nn.utils.clip_grad_norm_`. `Partial`
    gradients are reduced first (`reduce_partial_gradients`).

    Args:
        parameters: DTensors and plain tensors, with or without `.grad`, the same list on every rank.
        max_norm: the largest norm that is left alone, above 0.
        norm_type: p of the p-norm, above 0; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or Inf, instead of scaling by it (which makes every
            gradient NaN or 0). Waits for the device.
        pipeline: the ranks whose stages hold the other parameters of the model; ``None`` for none.

    Returns:
        The norm before clipping, a plain 0-dim float32 tensor, the same on every rank.

    Raises:
        ValueError: `max_norm` or `norm_type` is not above 0.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; on every rank.
    """
    max_norm, order = _checked_bound("max_norm", max_norm), _checked_order(norm_type)
    tensors = _as_list(parameters)
    reduce_partial_gradients(tensors)
    total = _total(_norms(tensors, order), order, pipeline)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(
            f"The gradient norm of order {order} is {total.item()}, so the gradients cannot be clipped to "
            f"max_norm={max_norm}. Look for the parameter with gradient_norms_by_parameter, or pass "
            "error_if_nonfinite=False to scale by it all the same."
        )
    coefficient = torch.clamp(max_norm / (total + _CLIP_EPSILON), max=1.0)
    for gradients in _local_gradients(tensors):
        first = gradients[0]
        # At least float32 also for half-precision gradients: in bfloat16 the factor would be up to 0.4% off.
        factor_dtype = torch.promote_types(first.dtype, torch.float32)
        torch._foreach_mul_(gradients, coefficient.to(first.device, factor_dtype))
    for quantized in _quantized(tensors):
        quantized.scale(coefficient)
    return total.float()


@torch.no_grad()
def clip_gradients_by_value(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Limit each gradient value in place to [-clip_value, clip_value].

    As `torch.nn.utils.clip_grad_value_`. `Partial` gradients are reduced first (`reduce_partial_gradients`):
    a limited term of a sum is not the limited sum.

    Args:
        parameters: DTensors and plain tensors, with or without `.grad`, the same list on every rank.
        clip_value: the largest absolute value that is left alone, above 0.

    Raises:
        ValueError: `clip_value` is not above 0.
    """
    clip_value = _checked_bound("clip_value", clip_value)
    tensors = _as_list(parameters)
    reduce_partial_gradients(tensors)
    for gradients in _local_gradients(tensors):
        torch._foreach_clamp_min_(gradients, -clip_value)
        torch._foreach_clamp_max_(gradients, clip_value)
    for quantized in _quantized(tensors):
        quantized.limit(clip_value)


def is_norm_right_in_torch(parameters: Iterable[Tensor]) -> bool:
    """Whether `torch.nn.utils.clip_grad_norm_` takes the norm of all gradients; the same answer on all ranks.

    It does not see quantised gradients, refuses mixtures of DTensors and plain tensors and, before torch 2.13,
    takes the norm of each rank's term of a partial gradient.
    """
    parameters = list(parameters)
    if any(quantized_gradient(parameter) is not None for parameter in parameters):
        return False
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len({isinstance(gradient, DTensor) for gradient in gradients}) == 2:
        return False
    return _compat.torch_version() >= PARTIAL_NORM_TORCH or not any(map(_is_partial, gradients))


def has_gradient(parameter: Tensor) -> bool:
    """Whether `parameter` has a gradient, in ``.grad`` or quantised."""
    quantized = quantized_gradient(parameter)
    return parameter.grad is not None or (quantized is not None and quantized.num_added > 0)


def _quantized(parameters: Iterable[Tensor]) -> list[QuantizedGradient]:
    """Return the quantised gradients that hold something."""
    found = map(quantized_gradient, parameters)
    return [gradient for gradient in found if gradient is not None and gradient.num_added]


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _checked_order(norm_type: float) -> float:
    order = float(norm_type)
    if not order > 0:
        raise ValueError(
            f"norm_type={norm_type} is not the order of a norm; give a number above 0, such as 1, 2 or math.inf."
        )
    return order


def _checked_bound(name: str, value: float) -> float:
    bound = float(value)
    if not bound > 0:
        raise ValueError(
            f"{name}={value} would leave no gradient to train with; give a number above 0, or turn clipping off."
        )
    return bound


def _is_partial(gradient: Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def _dtensor(tensor: Tensor | None) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise TypeError(
            f"A partial gradient and its parameter must both be DTensors, but one is {type(tensor).__name__}."
        )
    return tensor


def _local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`, ready to be read and written in place."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _local_gradients(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the local gradients, one list for each device and dtype."""
    locals_ = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return [[locals_[index] for index in indices] for indices in _by_device_and_dtype(locals_)]


def _by_device_and_dtype(tensors: Sequence[Tensor | None]) -> list[list[int]]:
    """Return the positions of the tensors that one foreach launch takes; empty tensors are left out."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None and tensor.numel():
            groups.setdefault((tensor.device, tensor.dtype), []).append(index)
    return list(groups.values())


def _mesh_groups(tensors: Iterable[Tensor]) -> dict[str, dist.ProcessGroup]:
    """Return the process groups of all mesh axes under `tensors`, by name, in an order all ranks agree on."""
    groups: dict[str, dist.ProcessGroup] = {}
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            for axis in range(tensor.device_mesh.ndim):
                if tensor.device_mesh.size(axis) > 1:
                    group = tensor.device_mesh.get_group(axis)
                    groups.setdefault(group.group_name, group)
    return groups


def _sum_partial(gradients: Sequence[DTensor]) -> list[DTensor]:
    """Return `gradients` with Replicate wherever they were Partial; the given ones are left as they are."""
    gradients = [_with_plain_sums(gradient) for gradient in gradients]
    groups = _mesh_groups(gradients)
    locals_ = [_local(gradient) for gradient in gradients]
    exchanges: dict[tuple[str, str, torch.dtype, torch.device], list[int]] = {}
    for index, gradient in enumerate(gradients):
        for axis, placement in enumerate(gradient.placements):
            if isinstance(placement, Partial) and gradient.device_mesh.size(axis) > 1:
                group, local = gradient.device_mesh.get_group(axis), locals_[index]
                key = (group.group_name, placement.reduce_op, local.dtype, local.device)
                exchanges.setdefault(key, []).append(index)
    for (group_name, reduce_op, _, _), indices in exchanges.items():
        group = groups[group_name]
        flat = torch.cat([locals_[index].reshape(-1) for index in indices])
        dist.all_reduce(flat, group=group)
        if reduce_op == "avg":  # gloo has no average
            flat.div_(group.size())
        for index, summed in zip(indices, flat.split([locals_[i].numel() for i in indices]), strict=True):
            locals_[index] = summed.view(locals_[index].shape)
    return [_as_replicated(gradient, local) for gradient, local in zip(gradients, locals_, strict=True)]


def _with_plain_sums(gradient: DTensor) -> DTensor:
    """Let DTensor reduce the partial placements that are more than a sum or a mean (maxima, masked sums)."""
    placements = [
        Replicate() if placement.is_partial() and not _is_plain_sum(placement) else placement
        for placement in gradient.placements
    ]
    return gradient.redistribute(placements=placements)


def _is_plain_sum(placement: Placement) -> bool:
    # Subclasses of Partial do more than add up.
    return type(placement) is Partial and placement.reduce_op in ("sum", "avg")


def _as_replicated(gradient: DTensor, local: Tensor) -> DTensor:
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    # The sums lie contiguous in memory even where the gradient did not.
    stride = torch.empty(gradient.shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(),
        gradient.device_mesh,
        placements,
        run_check=False,
        shape=gradient.shape,
        stride=stride,
    )


def _whole_gradients(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of `parameters`, with sums in place of the partial ones."""
    gradients = [parameter.grad for parameter in parameters]
    partial = [index for index, gradient in enumerate(gradients) if _is_partial(gradient)]
    for index, summed in zip(partial, _sum_partial([_dtensor(gradients[i]) for i in partial]), strict=True):
        gradients[index] = summed
    return gradients


def _norms(parameters: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of each gradient over all ranks, 0 where there is none: [num_parameters] float64."""
    gradients = _whole_gradients(parameters)
    # The groups come from the parameters, not from the gradients: a rank on which a gradient is missing must
    # still take part in every exchange.
    groups = _mesh_groups(parameters)
    values = _local_powers(gradients, order, _exchange_device(parameters))
    for index, quantized in enumerate(map(quantized_gradient, parameters)):
        if quantized is not None and quantized.num_added:  # one at a time: together they may not fit in full precision
            values[index] = _local_powers([quantized.read()], order, values.device)[0]
    if not groups:
        return _root(values, order)
    if math.isinf(order):
        # A maximum may drop NaN (it does on NCCL), so NaN travels beside the values as a flag.
        message = torch.cat([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().double()])
        for group in groups.values():
            dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
        values, is_nan = message.chunk(2)
        return values.masked_fill(is_nan > 0, math.nan)
    weights = [
        _share(parameter if gradient is None else gradient, groups)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    # Python numbers reach the kernel as arguments; a tensor of weights would be a copy that waits.
    torch._foreach_mul_(list(values.unbind()), weights)
    for group in groups.values():
        dist.all_reduce(values, group=group)
    return _root(values, order)


def _share(tensor: Tensor, groups: dict[str, dist.ProcessGroup]) -> float:
    """Return 1 over the number of ranks that hold the same part of `tensor`."""
    sharded: set[str] = set()
    if isinstance(tensor, DTensor):
        sharded.update(
            tensor.device_mesh.get_group(axis).group_name
            for axis, placement in enumerate(tensor.placements)
            # Not `is_shard()`: it is False for the strided shards of FSDP2 over tensor parallelism.
            if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
        )
    return 1.0 / math.prod(group.size() for name, group in groups.items() if name not in sharded)


def _exchange_device(parameters: Sequence[Tensor]) -> torch.device:
    """Return the device that the process groups of `parameters` work on (gradients may be offloaded)."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            return torch.device(parameter.device_mesh.device_type)
    return parameters[0].device if parameters else torch.device("cpu")


def _local_powers(gradients: Sequence[Tensor | None], order: float, device: torch.device) -> Tensor:
    """Return |local part|^order of each gradient (the maximum for inf): [len(gradients)] float64."""
    powers = [torch.zeros((), dtype=torch.float64, device=device)] * len(gradients)
    locals_ = [None if gradient is None else _local(gradient) for gradient in gradients]
    for indices in _by_device_and_dtype(locals_):
        pieces = [_pieces(local) for index in indices if (local := locals_[index]) is not None]
        dtype = torch.promote_types(pieces[0][0].dtype, torch.float32)
        norms = torch._foreach_norm([piece for group in pieces for piece in group], order, dtype=dtype)
        # float64 from here on: the square of a float32 norm need not fit in float32.
        taken = torch.stack(norms).to(device, torch.float64)
        if not math.isinf(order):
            taken.pow_(order)
        for index, part in zip(indices, taken.split([len(group) for group in pieces]), strict=True):
            powers[index] = part[0] if len(part) == 1 else part.amax() if math.isinf(order) else part.sum()
    return torch.stack(powers) if powers else torch.zeros(0, dtype=torch.float64, device=device)


def _pieces(local: Tensor) -> tuple[Tensor, ...]:
    if local.device.type == "cpu" and local.numel() > _CPU_PIECE_NUMEL:
        return local.reshape(-1).split(_CPU_PIECE_NUMEL)
    return (local,)


def _root(powers: Tensor, order: float) -> Tensor:
    return powers if math.isinf(order) else powers.pow(1.0 / order)


def _total(norms: Tensor, order: float, pipeline: dist.ProcessGroup | None = None) -> Tensor:
    """Return the norm of `norms`, and of those that the other stages of a pipeline have: 0-dim float64."""
    if math.isinf(order):
        largest = norms.amax() if norms.numel() else norms.sum()
        return largest if pipeline is None else _largest_of_stages(largest, pipeline)
    total = norms.pow(order).sum() if norms.numel() else norms.sum()
    if pipeline is not None:
        total = _on_device_of(pipeline, total)
        dist.all_reduce(total, group=pipeline)
    return total.pow(1.0 / order)


def _largest_of_stages(largest: Tensor, pipeline: dist.ProcessGroup) -> Tensor:
    message = _on_device_of(
        pipeline, torch.stack([largest.nan_to_num(nan=0.0, posinf=math.inf), largest.isnan().double()])
    )
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=pipeline)
    return message[0].masked_fill(message[1] > 0, math.nan)


def _on_device_of(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """`tensor` where `group` can exchange it: a stage without parameters does not know its device."""
    is_for_cpu = "cpu:" in str(dist.get_backend_config(group))
    return tensor if is_for_cpu or tensor.device.type == "cuda" else tensor.cuda()
