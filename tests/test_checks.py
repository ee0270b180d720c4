"""Each check refuses what fails, with the numbers and names in the message, and lets pass what torch gets right."""

import copy
import sys
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_taco import _compat
from lightning_taco.strategies import checks, rank_agreement
from tests.ranks import run_forked, run_threads

Plan = dict[str, ParallelStyle]


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel")[-len(sizes) :])


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "no error"


# Sizes of the mesh


@pytest.mark.parametrize(
    ("data", "tensor", "world", "num_nodes"),
    [(1, 1, 1, 1), (2, 2, 4, 1), (1, 4, 4, 1), ("auto", "auto", 8, 2), ("auto", 4, 8, 2), (2, "auto", 8, 2)],
)
def test_mesh_sizes_that_fit(data: int | str, tensor: int | str, world: int, num_nodes: int) -> None:
    checks.check_mesh_sizes(data, tensor, world, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("data", "tensor", "world", "num_nodes", "text"),
    [
        (1, 3, 2, 1, "data_parallel_size=1 x tensor_parallel_size=3 needs 3 processes, but this run has 2 (num_n"),
        (1, 3, 2, 1, "(num_nodes=1 x devices=2). Use tensor_parallel_size=2, or change devices and num_nodes"),
        ("auto", 2, 8, 2, "data_parallel_size=2 x tensor_parallel_size=2 needs 4 processes, but this run has 8 ("),
        ("auto", 2, 8, 2, "Use data_parallel_size=4, or"),
        (2, "auto", 2, 1, "data_parallel_size=2 x tensor_parallel_size=2 needs 4 processes, but this run has 2 ("),
        (3, 3, 8, 1, "Use data_parallel_size=1 and tensor_parallel_size=8, or"),
        (0, 2, 2, 1, "data_parallel_size=0 is below 1; give the number of ranks along this axis, or 'auto'."),
        (1, -2, 2, 1, "tensor_parallel_size=-2 is below 1"),
    ],
)
def test_mesh_sizes_that_do_not_fit(data: Any, tensor: Any, world: int, num_nodes: int, text: str) -> None:
    assert text in error_of(lambda: checks.check_mesh_sizes(data, tensor, world, num_nodes=num_nodes))


@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_mesh_sizes_that_are_no_integers(size: Any) -> None:
    with pytest.raises(TypeError, match=rf"tensor_parallel_size={size!r} is neither a number of ranks nor 'auto'"):
        checks.check_mesh_sizes(1, size, 2)


# Devices, callbacks, packages


@pytest.mark.parametrize("device", ["mps", "tpu", "xla", "hpu"])
def test_other_accelerators(device: str) -> None:
    with pytest.raises(
        ValueError, match=rf"accelerator '{device}' is not supported: .* over gloo on CPU or NCCL on CUDA"
    ):
        checks.check_accelerator(device)


def test_supported_accelerators() -> None:
    checks.check_accelerator("cpu")
    checks.check_accelerator("cuda")


def test_callbacks() -> None:
    class MySwa(StochasticWeightAveraging):
        pass

    checks.check_callbacks([ModelCheckpoint(), EMAWeightAveraging()])
    for swa in (StochasticWeightAveraging(swa_lrs=0.1), MySwa(swa_lrs=0.1)):
        with pytest.raises(
            ValueError, match=r"DTensor parameters.*use lightning\.pytorch\.callbacks\.EMAWeightAveraging"
        ):
            checks.check_callbacks([ModelCheckpoint(), swa])


def test_other_class_tree() -> None:
    was_imported = "pytorch_lightning" in sys.modules
    module = type("LightningModule", (nn.Module,), {"__module__": "pytorch_lightning.core.module"})
    mine = type("MyModel", (module,), {"__module__": "train"})
    text = (
        r"train\.MyModel \(a pytorch_lightning\.core\.module\.LightningModule\) belongs to the package "
        r"pytorch_lightning.*`import lightning as L` or `from lightning\.pytorch import LightningModule`"
    )
    with pytest.raises(TypeError, match=text):
        checks.check_unified_package(nn.Linear(1, 1), mine())
    with pytest.raises(TypeError, match=r"^pytorch_lightning\.core\.module\.LightningModule belongs to the package"):
        checks.check_callbacks([module()])
    checks.check_unified_package(nn.Linear(1, 1), ModelCheckpoint)
    assert ("pytorch_lightning" in sys.modules) == was_imported


# What is a DTensor on the tensor-parallel axis


def test_reasons_that_nothing_is_parallelized() -> None:
    def rank_function(rank: int) -> list[str | None]:
        mesh = mesh_of(2, 2)
        tensor_mesh = mesh["tensor_parallel"]
        plain, whole_only, other_axis, split, both = (nn.Sequential(nn.Linear(4, 4)) for _ in range(5))
        parallelize_module(whole_only, tensor_mesh, {"0": SequenceParallel()})
        fully_shard(other_axis, mesh=mesh["data_parallel"])
        parallelize_module(split, tensor_mesh, {"0": ColwiseParallel()})
        parallelize_module(both, tensor_mesh, {"0": ColwiseParallel()})
        fully_shard(both, mesh=mesh["data_parallel"])
        reasons = [checks.check_parallelized(model, tensor_mesh) for model in (plain, whole_only, other_axis)]
        assert [checks.check_parallelized(model, tensor_mesh) for model in (split, both)] == [None, None]
        # A second Trainer makes a mesh of its own over the same ranks.
        assert checks.check_parallelized(split, mesh_of(2, 2)["tensor_parallel"]) is None
        return reasons

    for reasons in run_forked(4, rank_function):
        assert reasons == [
            "no parameter is a DTensor; apply parallelize_module with device_mesh['tensor_parallel']",
            "every parameter is whole on each tensor-parallel rank; split some by ColwiseParallel, RowwiseParallel",
            "its DTensors are on other mesh axes; apply parallelize_module with device_mesh['tensor_parallel']",
        ]


def test_one_tensor_parallel_rank_is_no_error() -> None:
    def rank_function(rank: int) -> str | None:
        mesh, model = mesh_of(1), mlp(15)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        checks.check_even_shards(model, mesh)
        assert checks.add_sequence_length_checks(model, mesh) == []
        return checks.check_parallelized(model, mesh)

    assert run_threads(1, rank_function) == ["tensor_parallel_size is 1, so there is no tensor-parallel exchange"]


# Uneven splits


def mlp(size: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, size), nn.GELU(), nn.Linear(size, 8))


def embedding(size: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(size, 8))


def head(size: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, size))


def right_cases() -> list[tuple[Callable[[int], nn.Sequential], Plan]]:
    """Splits that are right at any size."""
    replicate = Replicate()
    return [
        (embedding, {"0": RowwiseParallel(input_layouts=replicate)}),
        (embedding, {"0": RowwiseParallel(input_layouts=replicate, output_layouts=Shard(1), use_local_output=False)}),
        (head, {"0": ColwiseParallel(output_layouts=replicate)}),
        (head, {"0": ColwiseParallel(use_local_output=False)}),
        (mlp, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}),
        (mlp, {"0": ColwiseParallel(output_layouts=replicate), "2": RowwiseParallel(input_layouts=replicate)}),
        (mlp, {"2": RowwiseParallel(input_layouts=replicate)}),
    ]


def distance_from_one_process(make: Callable[[int], nn.Sequential], plan: Plan, size: int) -> float:
    """Largest difference of output and gradients to the model that is not split."""
    mesh, reference = mesh_of(dist.get_world_size()), make(size)
    model = copy.deepcopy(reference)
    parallelize_module(model, mesh, plan)
    checks.check_even_shards(model, mesh)
    generator = torch.Generator().manual_seed(1)
    is_embedding = isinstance(reference[0], nn.Embedding)
    batch = (
        torch.randint(0, size, (2, 4), generator=generator)
        if is_embedding
        else torch.randn(2, 4, 8, generator=generator)
    )
    expected, actual = reference(batch), whole(model(batch))
    weights = torch.randn(expected.shape, generator=generator)
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    pairs = [(expected, actual)]
    pairs += [(p.grad, whole(q.grad)) for p, q in zip(reference.parameters(), model.parameters(), strict=True)]
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("world_size", [2, 4])
def test_uneven_splits_that_are_right_pass_and_are_right(world_size: int) -> None:
    sizes = (15, 1, 257) if world_size == 2 else (15, 1)

    def rank_function(rank: int) -> list[float]:
        return [distance_from_one_process(make, plan, size) for make, plan in right_cases() for size in sizes]

    for distances in run_forked(world_size, rank_function):
        assert len(distances) == 7 * len(sizes)
        assert max(distances) < 1e-5


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("size", "fits"), [(15, {2: "14 or 16", 4: "12 or 16"}), (1, {2: "2", 4: "4"})])
def test_uneven_plain_shards_are_refused(world_size: int, size: int, fits: dict[int, str]) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.ModuleDict({"mlp": mlp(size), "other": mlp(16)})

    plan = {"block.mlp.0": ColwiseParallel(), "block.mlp.2": RowwiseParallel()}
    even = {"block.other.0": ColwiseParallel(), "block.other.2": RowwiseParallel()}

    def rank_function(rank: int) -> str:
        mesh = mesh_of(world_size)
        checks.check_even_shards(parallelize_module(Nested(), mesh, even), mesh)
        model = parallelize_module(Nested(), mesh, plan | even)
        return error_of(lambda: checks.check_even_shards(model, mesh))

    expected = (
        f"block.mlp.2 takes {size} features, split over tensor_parallel_size={world_size}, which does not divide "
        f"{size}; block.mlp.0 hands its shard on as a plain tensor, from which the full size cannot be told. Use a "
        f"size of {fits[world_size]}, or give block.mlp.0 ColwiseParallel(use_local_output=False)."
    )
    assert run_threads(world_size, rank_function) == [expected] * world_size


def test_what_is_refused_does_fail() -> None:
    """The forward that the check prevents: another error on each rank, and neither names a layer."""

    def rank_function(rank: int) -> str:
        model = parallelize_module(mlp(15), mesh_of(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        with pytest.raises(RuntimeError, match="must have same reduction dim") as caught:
            model(torch.ones(2, 8))
        return str(caught.value).splitlines()[0]

    first, second = run_forked(2, rank_function)
    assert first != second


@pytest.mark.parametrize(
    "plan",
    [
        # a head with plain local logits, in another module
        {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(), "head": ColwiseParallel()},
        # a layer beside it, with a plain local output that is not its input
        {"beside": ColwiseParallel(), "down": RowwiseParallel()},
        # a plain input that every rank has whole
        {"up": ColwiseParallel(), "down": RowwiseParallel(input_layouts=Replicate())},
    ],
)
def test_uneven_row_that_gets_no_plain_shard(plan: Plan) -> None:
    def rank_function(rank: int) -> str:
        inner = {"up": nn.Linear(8, 15), "beside": nn.Linear(8, 16), "down": nn.Linear(15, 8)}
        model = nn.ModuleDict({"mlp": nn.ModuleDict(inner), "head": nn.Linear(8, 30)})
        paths = {name if name == "head" else f"mlp.{name}": style for name, style in plan.items()}
        mesh = mesh_of(2)
        return error_of(lambda: checks.check_even_shards(parallelize_module(model, mesh, paths), mesh))

    assert run_threads(2, rank_function) == ["no error"] * 2


# Attention heads


def attention(sizes: dict[str, int], **attributes: int) -> nn.Module:
    module = nn.Module()
    for name, size in sizes.items():
        module.add_module(name, nn.Linear(12, size))
    module.add_module("output", nn.Linear(12, 12))
    for name, value in attributes.items():
        setattr(module, name, value)
    return nn.ModuleDict({"blocks": nn.ModuleList([module])})


QKV = {"q_proj": 12, "k_proj": 12, "v_proj": 12}
GQA = {"q_proj": 16, "k_proj": 4, "v_proj": 4}


@pytest.mark.parametrize(
    ("sizes", "attributes", "text"),
    [
        (QKV, {"num_heads": 3}, "blocks.0.num_heads=3 is not divisible by tensor_parallel_size=2, so a rank would"),
        (QKV, {"num_heads": 3}, "Use 2 or 4 heads, or a tensor_parallel_size that divides 3. If 3 is the count per"),
        (QKV, {"n_head": 3, "head_dim": 4}, "blocks.0.n_head=3 is not divisible by tensor_parallel_size=2"),
        (QKV, {"head_size": 4}, "blocks.0.q_proj computes 3 heads (head_size=4), and 3 is not divisible by tensor"),
        ({"c_attn": 36}, {"n_head": 3}, "blocks.0.n_head=3 is not divisible by tensor_parallel_size=2"),
        ({"qkv": 36}, {"n_head": 3, "head_dim": 4}, "blocks.0.n_head=3 is not divisible by tensor_parallel_size=2"),
        (GQA, {"num_heads": 4, "num_key_value_heads": 1}, "blocks.0.num_key_value_heads=1 is not divisible by ten"),
        (GQA, {"n_heads": 4, "n_kv_heads": 1, "head_dim": 4}, "blocks.0.n_kv_heads=1 is not divisible by tensor"),
        (QKV, {"num_heads": 4}, "no error"),
        (QKV, {"num_attention_heads": 6, "head_dim": 2}, "no error"),
        (QKV, {"num_heads": 2, "num_kv_heads": 2, "head_dim": 6}, "no error"),
        # 2 heads in all, and the module already counts those of its rank
        (QKV, {"num_heads": 1, "head_dim": 6}, "no error"),
        # keys and values stay whole on every rank
        ({"q_proj": 16}, {"num_heads": 4, "num_key_value_heads": 1}, "no error"),
        # an MLP inside a block that knows its number of heads
        ({"up_proj": 12}, {"num_heads": 3, "head_dim": 4}, "no error"),
    ],
)
def test_attention_heads(sizes: dict[str, int], attributes: dict[str, int], text: str) -> None:
    def rank_function(rank: int) -> str:
        mesh = mesh_of(2)
        plan = {f"blocks.0.{name}": ColwiseParallel() for name in sizes}
        model = parallelize_module(attention(sizes, **attributes), mesh, plan)
        return error_of(lambda: checks.check_even_shards(model, mesh))

    first, second = run_threads(2, rank_function)
    assert first == second
    assert text in first


# Sequence length


@pytest.mark.parametrize(("length", "size", "fits"), [(5, 2, "4 or 6"), (7, 4, "4 or 8"), (1, 2, "2"), (3, 4, "4")])
def test_sequence_length_is_refused(length: int, size: int, fits: str) -> None:
    text = (
        f"the input has a sequence length of {length}, which tensor_parallel_size={size} does not divide: .* "
        rf"Pad or cut the sequence to {fits} tokens"
    )
    with pytest.raises(ValueError, match=text):
        checks.check_sequence_length(length, size)


def sequence_parallel_model(*, use_local_output: bool) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16))
    mesh, is_plain = mesh_of(dist.get_world_size()), use_local_output
    plan: Plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=is_plain),
        "1": SequenceParallel(use_local_output=is_plain),
        "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return reference, parallelize_module(copy.deepcopy(reference), mesh, plan), mesh


@pytest.mark.parametrize("use_local_output", [True, False])
def test_sequence_length_is_checked_at_the_embedding(use_local_output: bool) -> None:
    is_right_uneven = not use_local_output and _compat.torch_version() >= (2, 13)

    def rank_function(rank: int) -> list[str]:
        reference, model, mesh = sequence_parallel_model(use_local_output=use_local_output)
        handles = checks.add_sequence_length_checks(model, mesh)
        outcomes = []
        for length in (4, 5, 1):
            tokens = torch.arange(2 * length).view(2, length)

            def compare(tokens: Tensor = tokens) -> None:
                torch.testing.assert_close(model(tokens), reference(tokens))

            outcomes.append(error_of(compare))
        assert len(handles) == (0 if is_right_uneven else 1)
        for handle in handles:
            handle.remove()
        return outcomes

    for even, *uneven in run_forked(2, rank_function):
        assert even == "no error"
        for length, outcome in zip((5, 1), uneven, strict=True):
            expected = "no error" if is_right_uneven else f"the input of 0 has a sequence length of {length}, which ten"
            assert outcome.startswith(expected)


def test_plain_tensor_parallelism_takes_any_length() -> None:
    def rank_function(rank: int) -> int:
        model = nn.Sequential(nn.Embedding(16, 8))
        mesh = mesh_of(2)
        parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        return len(checks.add_sequence_length_checks(model, mesh))

    assert run_threads(2, rank_function) == [0, 0]


# One batch, one generator


class Sample(NamedTuple):
    tokens: Tensor
    mask: Tensor


def change_one(batch: dict[str, Any], name: str) -> dict[str, Any]:
    changed = copy.deepcopy(batch)
    values = changed["sample"].tokens if name == "tokens" else changed[name]
    values.view(-1)[-1] = 1 - values.view(-1)[-1]
    return changed


def make_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "sample": Sample(torch.arange(12).view(3, 4), torch.ones(3, dtype=torch.bool)),
        "image": torch.randint(0, 255, (2, 3, 5), dtype=torch.uint8, generator=generator),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(2, 2, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(0.0),
        "nothing": torch.empty(0, 3),
        "text": ["not", "compared"],
    }


@pytest.mark.parametrize("name", ["tokens", "image", "half", "wide", "scalar"])
def test_one_value_that_differs(name: str) -> None:
    text = (
        "The ranks of one tensor-parallel group compute one model and must get the same batch, but these ranks got "
        "different ones: [0, 2] / [1]. Shard the data over the data-parallel ranks only: give a custom sampler "
        "**trainer.strategy.distributed_sampler_kwargs (num_replicas and rank)"
    )

    def rank_function(rank: int) -> tuple[str, bool, bool]:
        batch = make_batch()
        agrees_first = rank_agreement.batches_agree(batch, dist.group.WORLD)
        if rank == 1:
            batch = change_one(batch, name)
        return (
            error_of(lambda: rank_agreement.check_same_batch(batch, dist.group.WORLD)),
            agrees_first,
            rank_agreement.batches_agree(batch, dist.group.WORLD),
        )

    results = run_threads(3, rank_function)
    assert len(set(results)) == 1  # the same verdict on every rank
    assert results[0][0].startswith(text)
    assert results[0][1:] == (True, False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2])),  # order
        (torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 2], [3, 4]])),  # shape
        (torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1])),  # dtype, the same bytes
        (torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")])),
        ([torch.tensor(1), torch.tensor(2)], [torch.tensor(2), torch.tensor(1)]),  # order of tensors
        ([torch.tensor([1, 2])], [torch.tensor([1]), torch.tensor([2])]),
        ([], [torch.tensor(0)]),
        (torch.arange(2 << 20).int(), torch.arange(2 << 20).int().roll(1 << 20)),  # whole chunks in another order
        ({"a": torch.tensor(1)}, UserDict(a=torch.tensor(2))),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
    ],
)
def test_batches_that_differ(first: Any, second: Any) -> None:
    def rank_function(rank: int) -> tuple[bool, bool]:
        mine = (first, second)[rank]
        return rank_agreement.batches_agree(mine, dist.group.WORLD), rank_agreement.batches_agree(
            first, dist.group.WORLD
        )

    assert run_threads(2, rank_function) == [(False, True)] * 2


def test_layout_in_memory_does_not_count() -> None:
    def rank_function(rank: int) -> bool:
        tokens = torch.arange(12).view(3, 4)
        return rank_agreement.batches_agree(tokens if rank == 0 else tokens.t().contiguous().t(), dist.group.WORLD)

    assert run_threads(2, rank_function) == [True, True]


def test_batches_are_compared_within_the_group_only() -> None:
    """Data-parallel ranks have different batches, which is right; rank 3 strays from its own group."""

    def rank_function(rank: int) -> tuple[str, str]:
        group = mesh_of(2, 2)["tensor_parallel"].get_group()
        right, stray = torch.tensor([rank // 2]), torch.tensor([rank // 2 + (rank == 3)])
        return (
            error_of(lambda: rank_agreement.check_same_batch(right, group)),
            error_of(lambda: rank_agreement.check_same_batch(stray, group)),
        )

    results = run_forked(4, rank_function)
    assert [right for right, _ in results] == ["no error"] * 4
    assert [stray for _, stray in results[:2]] == ["no error"] * 2
    assert results[2][1] == results[3][1]
    assert "got different ones: [2] / [3]." in results[2][1]


def test_generators_and_dropout_masks() -> None:
    def rank_function(rank: int) -> tuple[str, Tensor, str, Tensor]:
        activations, dropout = torch.ones(64), nn.Dropout(0.5)
        torch.manual_seed(5)
        before = error_of(lambda: rank_agreement.check_rng_agrees(dist.group.WORLD))
        same_mask = dropout(activations)
        if rank == 1:
            torch.rand(1)  # something that only one rank draws
        after = error_of(lambda: rank_agreement.check_rng_agrees(dist.group.WORLD))
        return before, same_mask, after, dropout(activations)

    first, second = run_forked(2, rank_function)
    assert first[0] == second[0] == "no error"
    assert torch.equal(first[1], second[1])
    assert first[2] == second[2]
    assert "generators of one tensor-parallel group differ (ranks [0] / [1])" in first[2]
    assert not torch.equal(first[3], second[3])  # what the check is there for


# What the installed torch gets wrong


def gathers_exactly(num_rows: int, mesh: DeviceMesh) -> bool:
    tensor = torch.arange(num_rows * 3.0).view(num_rows, 3)
    gathered = distribute_tensor(tensor, mesh, [Shard(0), Shard(0)]).full_tensor()
    return gathered.shape == tensor.shape and torch.equal(gathered, tensor)


def test_gather_over_a_flattened_mesh() -> None:
    """pytorch#194457: over a mesh with a flattened sub-mesh, two gathers become one, whose shards are cut otherwise.

    5 rows are held as 2 + 1 + 1 + 1 but read as 2 + 2 + 1 + 0. Parameters under FSDP2 and tensor parallelism are not
    concerned (their outer placement is strided), which this test pins; a tensor that is plainly sharded twice is.
    """

    def rank_function(rank: int) -> dict[str, list[bool]]:
        mesh, sizes = mesh_of(2, 2), (5, 6, 7, 8)
        results = {"not flattened": [gathers_exactly(size, mesh) for size in sizes]}
        mesh._flatten("everything")
        results["flattened"] = [gathers_exactly(size, mesh) for size in sizes]
        results["parameters"] = []
        for size in sizes:
            model = head(size)
            expected = model[0].weight.detach().clone()
            parallelize_module(model, mesh["tensor_parallel"], {"0": ColwiseParallel()})
            fully_shard(model, mesh=mesh["data_parallel"])
            results["parameters"].append(torch.equal(whole(model[0].weight.detach()), expected))
        return results

    is_wrong = _compat.torch_version() in {(2, 11), (2, 12), (2, 13)}  # 2.11.0 and 2.13.0 were seen to be
    for results in run_forked(4, rank_function):
        assert results["not flattened"] == [True] * 4
        assert results["parameters"] == [True] * 4
        assert results["flattened"] == [not is_wrong, not is_wrong, True, True]
