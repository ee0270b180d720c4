"""What the example models share: tensor-parallel styles, checks, sharding over data and initial weights.

How one layer of either model talks over the `tensor_parallel` axis, and where it does not:

    residual x            plain: [B, S, H] on every rank        sequence-parallel: [B, S / TP, H]
      norm                replicated weights, no exchange
      PrepareModuleInput  plain: nothing forward, one all-reduce backward (q, k and v, or gate and up, together)
                          sequence-parallel: all-gather forward, reduce-scatter backward
      ColwiseParallel     q, k, v / up, gate: each rank holds whole heads or a slice of the feed-forward width
      RowwiseParallel     plain: all-reduce forward; sequence-parallel: reduce-scatter, backward all-gather
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_taco import OverlappedRowwiseParallel

INIT_STD = 0.02  # standard deviation of every initial weight matrix, as in GPT-2


@dataclass(frozen=True)
class Parallelism:
    """How a model has been split; the default is a model that lives on one rank."""

    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False


ModelT = TypeVar("ModelT", bound=nn.Module)


class ReplicateParallel(ParallelStyle):
    """Keep a module's weights whole on every rank, as DTensors, and give back a plain tensor.

    An optimizer that updates many weights at once cannot mix plain tensors with DTensors, so a norm or a
    position table becomes a (replicated) DTensor too, although nothing of it is split.

    Args:
        shard_dim: the dim along which each rank takes its own part of the (replicated) input, and so of the
            output; None works on the whole input.
    """

    def __init__(self, *, shard_dim: int | None = None) -> None:
        super().__init__()
        self.shard_dim = shard_dim

    def _prepare_input(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
        whole = DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)
        return whole if self.shard_dim is None else whole.redistribute(mesh, (Shard(self.shard_dim),))

    @staticmethod
    def _prepare_output(module: nn.Module, outputs: DTensor, mesh: DeviceMesh) -> Tensor:
        return outputs.to_local()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            input_fn=self._prepare_input,
            output_fn=self._prepare_output,
        )


def check_divisible(sizes: Mapping[str, int], tensor_parallel_size: int) -> None:
    """Raise a ValueError that names the first size which the tensor-parallel degree does not divide."""
    for name, size in sizes.items():
        if size % tensor_parallel_size:
            raise ValueError(
                f"{name} is {size}, which tensor_parallel_size={tensor_parallel_size} does not divide: every rank"
                f" must hold the same whole number of them. Choose a tensor_parallel_size that divides {size}, or"
                f" change the model's size."
            )


def check_sequence_length(sequence_length: int, maximum: int, parallelism: Parallelism) -> None:
    """Refuse a sequence that the model cannot take, before any rank starts to communicate."""
    if sequence_length > maximum:
        raise ValueError(
            f"The input has a sequence length of {sequence_length}, but the model was built for at most {maximum}:"
            f" shorten the input or raise the model's sequence_length."
        )
    if parallelism.sequence_parallel and sequence_length % parallelism.tensor_parallel_size:
        raise ValueError(
            f"The input has a sequence length of {sequence_length}, which"
            f" tensor_parallel_size={parallelism.tensor_parallel_size} does not divide: under sequence_parallel"
            f" every rank holds an equal part of the sequence. Pad or cut the input to a multiple of"
            f" {parallelism.tensor_parallel_size}, or build the model with sequence_parallel=False."
        )


def model_plan(*, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """The styles of what lies around the blocks: vocabulary-parallel embedding, last norm, column-parallel head."""
    stream = Shard(1) if sequence_parallel else Replicate()
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "final_norm": SequenceParallel() if sequence_parallel else ReplicateParallel(),
        "head": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }


def block_plan(
    *, sequence_parallel: bool, column: tuple[str, ...], row: tuple[str, ...], num_slices: int = 1
) -> dict[str, ParallelStyle]:
    """The styles of one block whose parts are called attention_norm, attention, mlp_norm and mlp.

    The input of `attention` and of `mlp` is redistributed once, on the module, so the projections in `column`
    find it replicated already and their input gradients are added up before the one exchange in backward. With
    more than one of `num_slices` a compressed exchange of a projection in `row` overlaps with its product.
    """
    stream = Shard(1) if sequence_parallel else Replicate()

    def norm() -> ParallelStyle:
        return SequenceParallel() if sequence_parallel else ReplicateParallel()

    def entry() -> ParallelStyle:
        return PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))

    plan: dict[str, ParallelStyle] = {
        "attention_norm": norm(),
        "attention": entry(),
        "mlp_norm": norm(),
        "mlp": entry(),
    }
    plan.update({name: ColwiseParallel() for name in column})
    plan.update({name: OverlappedRowwiseParallel(num_slices=num_slices, output_layouts=stream) for name in row})
    return plan


def apply_plans(
    model: nn.Module,
    mesh: DeviceMesh,
    around: dict[str, ParallelStyle],
    block: dict[str, ParallelStyle],
) -> None:
    """Parallelise the model's blocks by one plan and what lies around them by another, tied weights kept tied."""
    tied = has_tied_head(model)
    parallelize_module(model, mesh, around)
    for layer in model.blocks:
        parallelize_module(layer, mesh, block)
    if tied:  # both are split over the vocabulary, each by a new Parameter
        model.head.weight = model.token_embedding.weight


def has_tied_head(model: nn.Module) -> bool:
    """Whether one matrix is token embedding and head; on a pipeline rank that lacks one of the two it is not."""
    weight = getattr(model.head, "weight", None)
    return weight is not None and weight is getattr(model.token_embedding, "weight", None)


def shard_data_parallel(model: ModelT, mesh: DeviceMesh) -> ModelT:
    """Apply FSDP2 over the `data_parallel` mesh, block by block; call it after `parallelize`."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def materialize(model: ModelT, device: torch.device, seed: int) -> ModelT:
    """Give a model built under `torch.device("meta")`, split or whole, real weights on `device`.

    Memory: this rank's part of the model and, for a moment, one whole weight of it.
    """
    tied = has_tied_head(model)
    model.to_empty(device=device)
    if tied:  # `to_empty` makes a new Parameter for each module
        model.head.weight = model.token_embedding.weight
    initialize_weights(model, seed)
    return model


@torch.no_grad()
def initialize_weights(model: nn.Module, seed: int) -> None:
    """Fill every weight; the values depend on its name and the seed, not on how the model is split.

    Each rank draws the full weight of one module at a time and keeps its own part, so a model has the same
    weights at any tensor-parallel size and none of it is sent. Call it before FSDP2 is applied.
    Modules with an attribute `init_scale` (projections back into the residual stream) draw that much less.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None or id(weight) in seen:  # tied weights are drawn once
            continue
        seen.add(id(weight))
        if isinstance(module, (nn.Linear, nn.Embedding)):
            generator = torch.Generator(weight.device).manual_seed(seed + zlib.crc32(name.encode()))
            std = INIT_STD * getattr(module, "init_scale", 1.0)
            full = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
            _copy_part(full.normal_(0.0, std, generator=generator), weight)
        else:
            weight.fill_(1.0)
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.fill_(0.0)


def _copy_part(full: Tensor, weight: Tensor) -> None:
    if isinstance(weight, DTensor):
        part = distribute_tensor(full, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.to_local().copy_(part.to_local())
    else:
        weight.copy_(full)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, in fp32 at least, of logits [B, S, V] against token ids [B, S]; a plain scalar.

    Logits that are split over the vocabulary need `torch.distributed.tensor.parallel.loss_parallel` around this
    and around the backward.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def to_matmul_dtype(x: Tensor) -> Tensor:
    """Cast to the dtype that autocast will multiply in, so that this is also what travels between ranks.

    Under autocast a norm gives fp32; without this cast its output would be gathered, and its gradient reduced,
    at twice the bytes.
    """
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
