"""Stored activations of models that are split: DTensor tensor parallelism, sequence parallelism and FSDP2.

One fork for each number of ranks; what is stored must be this rank's values, in messages, and an exact store must give
the gradients of the same model without it.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from examples import gpt, llama
from examples.plans import shard_data_parallel
from lightning_taco.activations import ActivationConfig, store, store_in_few_bits, weight_gradient
from tests.ranks import run_forked
from tests.test_activations import SMALL, Exact, make_model, perturbed, relative_error, tokens


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), {name: whole(weight.grad).clone() for name, weight in model.named_parameters()}


def compare(model: nn.Module, what: str) -> dict[str, Any]:
    """Against the same model with stock autograd, exactly and in four bits."""
    expected = step(model)
    quantized = store.Quantized
    store.Quantized = Exact  # this process ends with the test
    handle = store_in_few_bits(model, SMALL)
    exact = step(model)
    handle.remove()
    store.Quantized = quantized
    for name, gradient in exact[1].items():
        assert relative_error(gradient, expected[1][name]) < 1e-5 or name.endswith("key.bias"), (what, name)
    handle = store_in_few_bits(model, SMALL)
    actual = step(model)
    rows = {key: (row.stock_bytes, row.stored_bytes) for key, row in handle.ledger.rows.items()}
    handle.remove()
    assert torch.equal(actual[0], expected[0])
    for name, gradient in actual[1].items():
        if gradient.dim() > 1:
            assert 1e-4 < relative_error(gradient, expected[1][name]) < 0.25, (what, name)
    return rows


def check_tensor_parallel(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    num_values = 2 * 24 * 64
    for kind, module in (("llama", llama), ("gpt", gpt)):
        for sequence_parallel in (False, True):
            model = perturbed(make_model(kind))
            module.parallelize(model, mesh, sequence_parallel=sequence_parallel)
            rows = compare(model, f"{kind}, sequence parallel: {sequence_parallel}")
            stock, stored = 4 * num_values, num_values * SMALL.bits_per_value / 8
            norm, query = rows[("blocks.0.attention_norm", "norm")], rows[("blocks.0.attention.query", "linear")]
            part = world_size if sequence_parallel else 1
            assert norm[0] == stock / part
            assert norm[1] == pytest.approx(stored / part, abs=32)
            # The norm's output is this rank's rows of the sequence; the layers read all rows, gathered.
            assert query[0] == stock
            assert query[1] == (stored if sequence_parallel else 0)
            assert ("blocks.0.attention.key", "linear") not in rows


def check_sharded_data(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    model = shard_data_parallel(perturbed(make_model("llama")), mesh)
    rows = compare(model, "FSDP2")
    assert rows[("blocks.0.mlp.down", "linear")][1] == 0


def check_both(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    model = perturbed(make_model("gpt"))
    gpt.parallelize(model, mesh["tensor_parallel"], sequence_parallel=True)
    compare(shard_data_parallel(model, mesh["data_parallel"]), "FSDP2 and sequence parallel")


def check_partial_sums(world_size: int) -> None:
    """GELU of a partial sum is that of the sum: its output may not be recomputed from this rank's part."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(nn.GELU(), nn.Linear(64, 8, bias=False))
    weight = model[1].weight.detach().clone()
    model[1].weight = nn.Parameter(DTensor.from_local(weight, mesh, (Replicate(),), run_check=False))
    torch.manual_seed(torch.distributed.get_rank())
    part = torch.randn(4, 64)
    x = DTensor.from_local(part, mesh, (Partial(),), run_check=False)
    expected = torch.autograd.grad(whole(model(x)).sum(), model[1].weight)[0]
    handle = store_in_few_bits(model, ActivationConfig(element="int8", min_numel=0))
    actual = torch.autograd.grad(whole(model(x)).sum(), model[1].weight)[0]
    handle.remove()
    assert relative_error(whole(actual), whole(expected)) < 0.02


def check_hooks(world_size: int) -> None:
    """Hooks everywhere pack this rank's activations, and no weight, whole, split, gathered or cast."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    model = perturbed(make_model("llama", ffn_size=80))  # no weight has the shape of the tokens
    llama.parallelize(model, mesh, sequence_parallel=True)
    sharded = shard_data_parallel(
        perturbed(make_model("gpt")), init_device_mesh("cpu", (world_size,), mesh_dim_names=("data_parallel",))
    )
    quantized, packed = store.Quantized, []

    def record(tensor: Tensor, *rest: Any) -> Any:
        packed.append(tensor)
        return quantized(tensor, *rest)

    store.Quantized = record
    config = ActivationConfig(element="int8", min_numel=500, hooked=["*"])
    for each in (model, sharded):
        packed.clear()
        expected = step(each)[1]
        handle = store_in_few_bits(each, config)
        weights = {tuple(whole(weight).shape) for weight in each.parameters()}
        weights |= {tuple(weight.to_local().shape) for weight in each.parameters() if isinstance(weight, DTensor)}
        with torch.autocast("cpu", torch.bfloat16):
            step(each)
        assert len(packed) >= 7
        shapes = {tuple(tensor.shape) for tensor in packed}
        assert not (shapes | {shape[::-1] for shape in shapes}) & weights
        for name, gradient in step(each)[1].items():
            if gradient.dim() > 1:
                assert relative_error(gradient, expected[name]) < 0.05, name
        handle.remove()
    store.Quantized = quantized


def check_modified_in_place(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.GELU()
    store_in_few_bits(model, SMALL)
    x = DTensor.from_local(torch.randn(4, 64), mesh, (Shard(0),), run_check=False).requires_grad_() * 1
    output = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.to_local().sum().backward()


def check_replicated_weight(mesh: Any) -> None:
    """Of tokens that are split over the ranks, a whole weight's gradient is a sum over them."""
    model = nn.Linear(128, 8, bias=False).half()
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(4)).half()
    model.weight = nn.Parameter(DTensor.from_local(weight, mesh, (Replicate(),), run_check=False))
    torch.manual_seed(torch.distributed.get_rank())
    x = DTensor.from_local(torch.randn(4, 128).half(), mesh, (Shard(0),), run_check=False)
    expected = torch.autograd.grad(model(x).sum(), model.weight)[0]
    handle = store_in_few_bits(model, ActivationConfig(min_numel=0, weight_gradient="fused"))
    actual = torch.autograd.grad(model(x).sum(), model.weight)[0]
    handle.remove()
    assert relative_error(whole(actual).float(), whole(expected).float()) < 0.2


def check_messages_that_products_read(world_size: int) -> None:
    """Under sequence parallelism layers behind a norm read messages: of weights split by outputs, and by channels."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    model = perturbed(make_model("llama", hidden_size=128, ffn_size=256, num_layers=1)).half()
    llama.parallelize(model, mesh, sequence_parallel=True)
    shapes: list[tuple[int, ...]] = []
    runs, fused = weight_gradient.runs_kernels, weight_gradient._fused

    def record(*arguments: Any) -> Tensor:
        result = fused(*arguments)
        shapes.append(tuple(result.shape))
        return result

    weight_gradient.runs_kernels, weight_gradient._fused = (lambda tensor: True), record
    gradients: dict[str, dict[str, Tensor]] = {}
    for way in ("separate", "fused"):
        config = ActivationConfig(min_numel=0, block_size=64, weight_gradient=way)  # type: ignore[arg-type]
        handle = store_in_few_bits(model, config)
        gradients[way] = step(model)[1]
        handle.remove()
        assert way == "fused" or shapes == []
    shapes_of_blocks, num_fused = set(shapes), len(shapes)
    check_replicated_weight(mesh)
    assert len(shapes) == num_fused  # the sum over ranks of what each would have is not this rank's to tell
    weight_gradient.runs_kernels, weight_gradient._fused = runs, fused
    assert {(64, 128), (32, 128), (128, 128)} <= shapes_of_blocks  # query, key and value, gate and up
    assert (128, 64) in shapes_of_blocks  # the output projection
    assert num_fused == 7  # and the head, whose vocabulary the ranks do not share evenly
    for name, gradient in gradients["fused"].items():
        assert relative_error(gradient.float(), gradients["separate"][name].float()) < 5e-3, name


def check_two_ranks(rank: int) -> None:
    check_tensor_parallel(2)
    check_sharded_data(2)
    check_partial_sums(2)
    check_modified_in_place(2)
    check_hooks(2)
    check_messages_that_products_read(2)


def check_four_ranks(rank: int) -> None:
    check_both(4)


def test_two_ranks() -> None:
    run_forked(2, check_two_ranks)


def test_four_ranks() -> None:
    run_forked(4, check_four_ranks)
