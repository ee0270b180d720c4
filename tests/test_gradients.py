"""Gradient norms and clipping of partly parallel models, against one process with the same weights and batch.

Ranks are forked, not threads: the first use of an operation on a DTensor enters a fake tensor mode, and torch 2.11
crashes when two threads do so at once. The oracle of a norm is float64 over the unsharded gradients.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_taco import _compat
from lightning_taco.strategies.gradients import (
    clip_gradients_by_norm,
    clip_gradients_by_value,
    gradient_norm,
    gradient_norms_by_parameter,
    is_norm_right_in_torch,
    reduce_partial_gradients,
)
from tests.ranks import run_forked

ORDERS = (1.0, 2.0, 3.0, 0.5, math.inf)
NUM_TOKENS, HIDDEN, NUM_CLASSES = 13, 16, 5  # 13 rows are uneven over 2 and 4 ranks
RTOL = 1e-5


class PartlyParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, HIDDEN)
        self.sequence_norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)
        self.plain_norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, NUM_CLASSES)
        self.unused = nn.Linear(2, 2)  # never gets a gradient

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.sequence_norm(self.embedding(tokens))
        hidden = self.down(torch.relu(self.up(hidden)))
        return self.head(self.plain_norm(hidden))


def make_model() -> PartlyParallel:
    torch.manual_seed(0)
    return PartlyParallel()


def run_backward(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(NUM_TOKENS, (3, 8), generator=generator)
    labels = torch.randint(NUM_CLASSES, (3, 8), generator=generator)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).mul(100).backward()


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "sequence_norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def tensor_parallel_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))


def mesh_2x2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))


def one_process_model() -> PartlyParallel:
    model = make_model()
    run_backward(model)
    return model


def oracle(gradients: list[Tensor], order: float) -> float:
    return torch.cat([g.detach().double().flatten() for g in gradients]).norm(order).item()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def with_gradient(values: Tensor, gradient: Tensor | None) -> nn.Parameter:
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    return parameter


def sharded(mesh: DeviceMesh, gradient: Tensor, placements: list[Placement]) -> nn.Parameter:
    """A parameter whose gradient is `gradient`, the same on every rank, placed by `placements`."""
    placed = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
    return with_gradient(torch.zeros_like(placed), placed)


def partial(mesh: DeviceMesh, term: Tensor, gradient_placements: list[Placement]) -> nn.Parameter:
    """A parameter that is Replicate where its gradient, of which this rank holds `term`, is Partial."""
    gradient = DTensor.from_local(term, mesh, gradient_placements, run_check=False)
    placements = [Replicate() if p.is_partial() else p for p in gradient_placements]
    return with_gradient(distribute_tensor(torch.zeros(gradient.shape), mesh, placements), gradient)


def check_norms(model: nn.Module, reference: nn.Module) -> None:
    expected = gradients_of(reference)
    for order in ORDERS:
        norm = gradient_norm(model.parameters(), order)
        assert type(norm) is Tensor
        assert norm.shape == ()
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(oracle(list(expected.values()), order), rel=RTOL)
        by_name = gradient_norms_by_parameter(model.named_parameters(), order)
        assert by_name.keys() == expected.keys()
        for name, value in by_name.items():
            assert value.item() == pytest.approx(oracle([expected[name]], order), rel=RTOL), name


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norms_equal_the_unsharded_model(world_size: int) -> None:
    def rank_main(rank: int) -> list[float]:
        model = parallelize(make_model(), tensor_parallel_mesh(world_size))
        run_backward(model)
        # What is under test: a norm weight that each rank has one term of, next to plain and sharded ones.
        assert model.sequence_norm.weight.grad.placements == (Partial(),)
        assert type(model.plain_norm.weight) is nn.Parameter
        before = {name: g.to_local().clone() for name, g in gradients_of(model).items() if isinstance(g, DTensor)}
        check_norms(model, one_process_model())
        after = gradients_of(model)
        assert all(torch.equal(after[name].to_local(), value) for name, value in before.items())
        assert model.sequence_norm.weight.grad.placements == (Partial(),)
        return [gradient_norm(model.parameters(), order).item() for order in ORDERS]

    norms = run_forked(world_size, rank_main)
    assert all(each == norms[0] for each in norms)


def check_step(model: nn.Module, reference: nn.Module) -> None:
    """Check gradients and the weights after one step."""
    for name, gradient in gradients_of(reference).items():
        torch.testing.assert_close(full(dict(model.named_parameters())[name].grad), gradient, rtol=1e-4, atol=1e-6)
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    for (name, weight), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(weight), expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_clipping_by_norm_gives_the_one_process_step(world_size: int) -> None:
    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(world_size)
        for order in (2.0, 1.0, math.inf):
            model, reference = parallelize(make_model(), mesh), one_process_model()
            run_backward(model)
            unclipped = oracle(list(gradients_of(reference).values()), order)
            max_norm = 0.3 * unclipped
            nn.utils.clip_grad_norm_(reference.parameters(), max_norm, order)
            assert clip_gradients_by_norm(model.parameters(), max_norm, order).item() == pytest.approx(
                unclipped, rel=RTOL
            )
            assert gradient_norm(model.parameters(), order).item() == pytest.approx(max_norm, rel=RTOL)
            check_step(model, reference)

    run_forked(world_size, rank_main)


def test_gradients_under_the_limit_are_not_touched() -> None:
    def rank_main(rank: int) -> None:
        model = parallelize(make_model(), tensor_parallel_mesh(2))
        run_backward(model)
        assert reduce_partial_gradients(model.parameters()) > 0
        before = {name: full(gradient).clone() for name, gradient in gradients_of(model).items()}
        for max_norm in (1e6, math.inf):
            clip_gradients_by_norm(model.parameters(), max_norm)
        assert all(torch.equal(full(g), before[name]) for name, g in gradients_of(model).items())

    run_forked(2, rank_main)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_clipping_by_value_gives_the_one_process_step(world_size: int) -> None:
    def rank_main(rank: int) -> None:
        model, reference = parallelize(make_model(), tensor_parallel_mesh(world_size)), one_process_model()
        run_backward(model)
        nn.utils.clip_grad_value_(reference.parameters(), 0.05)
        clip_gradients_by_value(model.parameters(), 0.05)
        check_step(model, reference)

    run_forked(world_size, rank_main)


def test_fsdp2_over_tensor_parallelism() -> None:
    """Strided shards of two axes, shards of the data axis alone, and a head that FSDP2 does not know."""

    def rank_main(rank: int) -> list[list[float]]:
        mesh = mesh_2x2()
        norms = []
        for clip in (clip_by_norm, clip_by_value):
            model = parallelize(make_model(), mesh["tensor_parallel"])
            for name in ("embedding", "sequence_norm", "up", "down", "plain_norm"):
                fully_shard(model.get_submodule(name), mesh=mesh["data_parallel"])
            run_backward(model)
            placements = {type(p).__name__ for p in model.up.weight.grad.placements}
            assert placements == {"_StridedShard", "Shard"}
            assert model.plain_norm.weight.grad.device_mesh.mesh_dim_names == ("data_parallel",)
            assert type(model.head.weight.grad) is Tensor
            reference = one_process_model()
            check_norms(model, reference)
            norms.append([gradient_norm(model.parameters(), order).item() for order in ORDERS])
            clip(model, reference)
            check_step(model, reference)
        return norms

    def clip_by_norm(model: nn.Module, reference: nn.Module) -> None:
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert clip_gradients_by_norm(model.parameters(), 0.5).item() == pytest.approx(expected.item(), rel=RTOL)

    def clip_by_value(model: nn.Module, reference: nn.Module) -> None:
        nn.utils.clip_grad_value_(reference.parameters(), 0.05)
        clip_gradients_by_value(model.parameters(), 0.05)

    results = run_forked(4, rank_main)
    assert all(result == results[0] for result in results)


def test_every_mixture_of_placements_on_two_axes_counts_once() -> None:
    whole = torch.arange(-12.0, 12.0).reshape(4, 6)
    placements: list[list[Placement]] = [
        [first, second] for first in (Replicate(), Shard(0), Shard(1)) for second in (Replicate(), Shard(0), Shard(1))
    ]
    terms = [[Partial(), Replicate()], [Replicate(), Partial()], [Partial(), Partial()], [Partial("avg"), Partial()]]

    def rank_main(rank: int) -> None:
        mesh = mesh_2x2()
        parameters = [sharded(mesh, whole, each) for each in placements]
        for each in terms:
            # Integers, so that the sums are exact: 2 or 4 terms that differ by rank and add up to whole.
            num_terms = math.prod(2 for p in each if p.is_partial() and p.reduce_op == "sum")
            coordinate = mesh.get_coordinate()
            sign = math.prod(1 - 2 * coordinate[axis] for axis, p in enumerate(each) if p.is_partial())
            parameters.append(partial(mesh, whole / num_terms + sign * 100, each))
        shard_of_partial = partial(mesh, whole.chunk(2)[mesh.get_coordinate()[0]] / 2, [Shard(0), Partial()])
        parameters += [shard_of_partial, with_gradient(torch.zeros(4, 6), whole.clone())]
        copies = [whole] * len(parameters)
        for order in ORDERS:
            expected = oracle(copies, order)
            assert gradient_norm(parameters, order).item() == pytest.approx(expected, rel=RTOL)
            each_norm = gradient_norm(parameters, order, per_parameter=True)
            assert each_norm.shape == (len(parameters),)
            torch.testing.assert_close(each_norm, torch.full_like(each_norm, oracle([whole], order)), rtol=1e-6, atol=0)
        assert reduce_partial_gradients(parameters) == len(terms) + 1
        assert reduce_partial_gradients(parameters) == 0
        for parameter in parameters:
            assert torch.equal(full(parameter.grad), whole)
            if isinstance(parameter, DTensor):
                assert parameter.grad.placements == parameter.placements

    run_forked(4, rank_main)


def test_a_partial_gradient_of_a_sharded_parameter_ends_as_its_shard() -> None:
    whole = torch.arange(-6.0, 9.0).reshape(5, 3)

    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(4)
        parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
        term = whole if rank == 2 else torch.zeros(5, 3)
        # Transposed in memory: nothing may lean on the layout.
        term = term.t().contiguous().t()
        parameter.grad = DTensor.from_local(term, mesh, [Partial()], run_check=False)
        assert gradient_norm(parameter).item() == pytest.approx(oracle([whole], 2.0), rel=RTOL)
        assert reduce_partial_gradients(parameter) == 1
        assert parameter.grad.placements == (Shard(0),)
        assert torch.equal(parameter.grad.full_tensor(), whole)

    run_forked(4, rank_main)


def test_partial_values_are_clipped_as_a_sum() -> None:
    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(2)
        # 100 - 99.5 = 0.5 is under the limit, though both terms are above it; 0.75 + 0.75 is the other way round.
        parameter = partial(mesh, torch.tensor([[100.0, 0.75], [-99.5, 0.75]][rank]), [Partial()])
        clip_gradients_by_value([parameter], 1.0)
        assert parameter.grad.full_tensor().tolist() == [0.5, 1.0]

    run_forked(2, rank_main)


def test_empty_shards_count_nothing() -> None:
    whole = torch.tensor([[3.0, -4.0], [12.0, 0.0], [0.0, -84.0]])

    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(4)
        for order in ORDERS:
            parameter = sharded(mesh, whole, [Shard(0)])
            assert parameter.grad.to_local().shape[0] == (0 if rank == 3 else 1)
            expected = oracle([whole], order)
            assert gradient_norm([parameter], order).item() == pytest.approx(expected, rel=RTOL)
            clip_gradients_by_norm([parameter], expected / 2, order)
            torch.testing.assert_close(parameter.grad.full_tensor(), whole / 2, rtol=RTOL, atol=0)
            clip_gradients_by_value([parameter], 2.5)
            torch.testing.assert_close(parameter.grad.full_tensor(), (whole / 2).clamp(-2.5, 2.5), rtol=RTOL, atol=0)

    run_forked(4, rank_main)


def test_no_gradients_give_zero() -> None:
    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(2)
        parameters = [
            with_gradient(distribute_tensor(torch.ones(4), mesh, [Shard(0)]), None),
            with_gradient(torch.ones(3), None),
        ]
        for order in ORDERS:
            for listed in (parameters, [], iter(parameters)):
                norm = clip_gradients_by_norm(listed, 1.0, order)
                assert (norm.item(), norm.shape) == (0.0, ())
        assert gradient_norm(parameters, per_parameter=True).tolist() == [0.0, 0.0]
        assert gradient_norms_by_parameter(zip("ab", parameters, strict=True)) == {}
        clip_gradients_by_value(parameters, 1.0)
        assert reduce_partial_gradients(parameters) == 0
        assert all(parameter.grad is None for parameter in parameters)

    run_forked(2, rank_main)


def test_a_gradient_that_one_rank_lacks_does_not_stop_the_others() -> None:
    def rank_main(rank: int) -> float:
        parameter = sharded(tensor_parallel_mesh(2), torch.tensor([3.0, 4.0]), [Shard(0)])
        if rank == 0:
            parameter.grad = None
        return gradient_norm([parameter]).item()

    assert run_forked(2, rank_main) == [4.0, 4.0]


KINDS = ("shard", "partial", "plain", "replicated")


def parameters_with(mesh: DeviceMesh, bad: float, where: str, bad_rank: int) -> dict[str, nn.Parameter]:
    parameters = {
        "shard": sharded(mesh, torch.arange(1.0, 9.0), [Shard(0)]),
        "partial": partial(mesh, torch.full((3,), 2.0), [Partial()]),
        "plain": with_gradient(torch.zeros(2), torch.full((2,), 3.0)),
        "replicated": sharded(mesh, torch.full((2,), 5.0), [Replicate()]),
    }
    if mesh.get_rank() == bad_rank:
        gradient = parameters[where].grad
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[-1] = bad
    return parameters


def test_one_bad_value_on_one_rank_shows_on_all() -> None:
    message = r"gradient norm of order .* is (nan|inf), .*cannot be clipped to max_norm=1\.5"
    cases = list(itertools.product(KINDS, (math.nan, math.inf, -math.inf), (1.0, 2.0, math.inf)))

    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(4)
        for where, bad, order in cases:
            expected = math.nan if math.isnan(bad) else math.inf
            parameters = parameters_with(mesh, bad, where, bad_rank=2)
            by_name = gradient_norms_by_parameter(parameters.items(), order)
            assert [name for name in KINDS if not by_name[name].isfinite()] == [where]
            assert gradient_norm(parameters.values(), order).item() == pytest.approx(expected, nan_ok=True)
            with pytest.raises(RuntimeError, match=message):
                clip_gradients_by_norm(parameters.values(), 1.5, order, error_if_nonfinite=True)
            norm = clip_gradients_by_norm(parameters.values(), 1.5, order)
            assert norm.item() == pytest.approx(expected, nan_ok=True)
            # As torch: NaN makes all gradients NaN, Inf makes the finite ones 0.
            for name in set(KINDS) - {where}:
                values = full(parameters[name].grad)
                assert values.isnan().all() if math.isnan(bad) else not values.any()

    run_forked(4, rank_main)


def test_replicas_that_came_apart_are_scaled_by_one_factor() -> None:
    def rank_main(rank: int) -> float:
        mesh = tensor_parallel_mesh(3)
        parameters = [
            sharded(mesh, torch.tensor([2.0, 2.0, 2.0]), [Shard(0)]),
            with_gradient(torch.zeros(1), torch.tensor([3.0 + 1e-3 * rank])),
        ]
        return clip_gradients_by_norm(parameters, 1.0).item()

    norms = run_forked(3, rank_main)
    assert norms[0] == norms[1] == norms[2]


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.bfloat16, 1e30), (torch.float32, 1e18)])
def test_large_gradients_do_not_overflow(dtype: torch.dtype, value: float) -> None:
    whole = torch.full((64,), -value, dtype=dtype)

    def rank_main(rank: int) -> None:
        mesh = tensor_parallel_mesh(2)
        orders = (1.0, math.inf) if value == 1e30 else (1.0, 2.0, math.inf)
        for order in orders:
            parameters = [sharded(mesh, whole, [Shard(0)]), with_gradient(torch.zeros_like(whole), whole.clone())]
            expected = oracle([whole, whole], order)
            assert gradient_norm(parameters, order).item() == pytest.approx(expected, rel=RTOL)
            clip_gradients_by_norm(parameters, expected / 4, order)
            for parameter in parameters:
                assert parameter.grad.dtype == dtype
                torch.testing.assert_close(full(parameter.grad), whole / 4, rtol=1e-6, atol=0)

    run_forked(2, rank_main)


def test_the_factor_is_not_rounded_to_half_precision() -> None:
    parameters = [with_gradient(torch.zeros(1, dtype=torch.bfloat16), None)]
    wrong = 0
    for step in range(200):
        max_norm = 100.0 + step * 0.37
        parameters[0].grad = torch.tensor([191.0], dtype=torch.bfloat16)
        clip_gradients_by_norm(parameters, max_norm)
        wrong += parameters[0].grad.item() != torch.tensor(min(max_norm, 191.0)).bfloat16().item()
    assert wrong <= 2  # the 1e-6 of the formula may tip a tie


def test_a_long_gradient_is_summed_accurately_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(6_000_001, generator=generator)
    parameter = with_gradient(torch.empty_like(whole), whole)
    for order in (1.0, 2.0, math.inf):
        assert gradient_norm(parameter, order).item() == pytest.approx(oracle([whole], order), rel=1e-6)


def test_mixed_dtypes() -> None:
    gradients = [torch.tensor([3.0], dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    gradients.append(torch.tensor(-3.0, dtype=torch.float16))
    parameters = [with_gradient(torch.zeros_like(g), g) for g in gradients]
    assert gradient_norm(parameters).item() == 6.0
    clip_gradients_by_norm(parameters, 2.0)
    assert [p.grad.item() for p in parameters] == pytest.approx([1.0, 1.0, 1.0, -1.0], rel=1e-3)


def test_few_exchanges_whatever_the_number_of_parameters() -> None:
    def count(function: Callable[[], Any]) -> int:
        with CommDebugMode() as counter:
            function()
        return counter.get_total_counts()

    def rank_main(rank: int) -> dict[str, int]:
        mesh = mesh_2x2()
        whole = torch.arange(8.0).reshape(4, 2)
        axis_only = [sharded(mesh["tensor_parallel"], whole, [Shard(0)]) for _ in range(5)]
        axis_only.append(with_gradient(torch.zeros(2), torch.ones(2)))
        both = axis_only + [sharded(mesh, whole, [Shard(0), placement]) for placement in (Shard(1), Replicate())]
        some_partial = both + [partial(mesh["tensor_parallel"], whole, [Partial()]) for _ in range(7)]
        return {
            "one axis": count(lambda: gradient_norm(axis_only)),
            "maximum": count(lambda: gradient_norm(axis_only, math.inf)),
            "both axes": count(lambda: gradient_norm(both)),
            "by name": count(lambda: gradient_norms_by_parameter(enumerate(both))),
            "partial": count(lambda: gradient_norm(some_partial)),
            "clip": count(lambda: clip_gradients_by_norm(some_partial, 1.0)),
            "clip again": count(lambda: clip_gradients_by_norm(some_partial, 1.0)),
            "value": count(lambda: clip_gradients_by_value(some_partial, 1.0)),
        }

    expected = {"one axis": 1, "maximum": 1, "both axes": 2, "by name": 2, "partial": 3, "clip": 3}
    assert run_forked(4, rank_main)[0] == {**expected, "clip again": 2, "value": 0}


def test_nothing_is_read_back_to_the_host() -> None:
    # A fake tensor has no value to read: .item() and its kind raise.
    with FakeTensorMode():
        parameters = [with_gradient(torch.zeros(6), torch.ones(6)) for _ in range(3)]
        for order in ORDERS:
            gradient_norm(parameters, order)
            clip_gradients_by_norm(parameters, 1.0, order)
        clip_gradients_by_value(parameters, 1.0)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            clip_gradients_by_norm(parameters, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_bad_settings_are_refused_before_a_gradient_changes(value: float) -> None:
    parameter = with_gradient(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=rf"max_norm={value} .*give a number above 0, or turn clipping off"):
        clip_gradients_by_norm([parameter], value)
    with pytest.raises(ValueError, match=rf"clip_value={value} .*give a number above 0, or turn clipping off"):
        clip_gradients_by_value([parameter], value)
    for function in (gradient_norm, lambda p, order: clip_gradients_by_norm(p, 1.0, order)):
        with pytest.raises(ValueError, match=rf"norm_type={value} is not the order of a norm; give a number above 0"):
            function([parameter], value)
    assert parameter.grad.tolist() == [1.0, 1.0]


def test_torchs_own_norm_is_trusted_only_where_it_is_right() -> None:
    def body(rank: int) -> list[bool]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",))

        def with_gradient(placement: Placement) -> nn.Parameter:
            whole = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False)
            parameter = nn.Parameter(whole)
            parameter.grad = DTensor.from_local(torch.ones(4, 4), mesh, [placement], run_check=False)
            return parameter

        plain = nn.Parameter(torch.ones(2))
        plain.grad = torch.ones(2)
        without = nn.Parameter(torch.ones(2))
        sharded, partial = with_gradient(Replicate()), with_gradient(Partial())
        cases: list[list[nn.Parameter]] = [[], [plain], [sharded, without], [plain, sharded], [partial]]
        return [is_norm_right_in_torch(parameters) for parameters in cases]

    knows_partial = _compat.torch_version() >= (2, 13)
    assert run_forked(2, body) == [[True, True, True, False, knows_partial]] * 2
