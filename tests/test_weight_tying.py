"""Tied weights stay one parameter through parallelisation, materialising and FSDP2, or it is an error at set-up."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.modules import module as torch_module

from lightning_taco.strategies.weight_tying import preserve_tied_parameters
from tests.ranks import run_forked, run_threads

VOCABULARY, HIDDEN = 16, 8


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(tokens)).tanh())


def good_plan() -> dict[str, ParallelStyle]:
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data_parallel", "tensor_parallel")[-len(sizes) :])


def tokens(rank: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(3 + rank))


def train_step(model: nn.Module, batch: Tensor) -> Tensor:
    model.zero_grad()
    logits = model(batch)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.roll(1).flatten())
    loss.backward()
    return loss.detach()


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hooks_left() -> int:
    return len(torch_module._global_parameter_registration_hooks)


def seeded_model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_add_up_as_in_one_process(world_size: int) -> None:
    expected = seeded_model()
    expected_loss = train_step(expected, tokens())
    expected_grad = expected.embedding.weight.grad
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    optimizer.step()
    expected_after = expected.embedding.weight.detach()

    def rank_function(rank: int) -> tuple[Any, ...]:
        model = seeded_model()
        with preserve_tied_parameters(model) as record:
            parallelize_module(model, mesh_of(world_size), good_plan())
            assert model.embedding.weight is model.head.weight  # at once, not only at the end
        loss = train_step(model, tokens())
        grad = whole(model.embedding.weight.grad)
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        return (
            model.embedding.weight is model.head.weight,
            record.tied_again,
            loss,
            grad,
            whole(model.head.weight.detach()),
            sorted(name for name, _ in model.named_parameters()),
        )

    for is_tied, tied_again, loss, grad, after, names in run_forked(world_size, rank_function):
        assert is_tied
        assert tied_again == [("embedding.weight", "head.weight")]
        torch.testing.assert_close(loss, expected_loss)
        torch.testing.assert_close(grad, expected_grad)
        torch.testing.assert_close(after, expected_after)
        assert names == ["embedding.weight", "middle.bias", "middle.weight"]


def test_without_the_block_the_weights_come_apart() -> None:
    """What torch does, which is why the block exists: if this fails, torch has learned it."""

    def rank_function(rank: int) -> bool:
        model = parallelize_module(seeded_model(), mesh_of(2), good_plan())
        return model.embedding.weight is model.head.weight

    assert run_threads(2, rank_function) == [False, False]


def test_model_and_tie_made_inside_the_block() -> None:
    def rank_function(rank: int) -> tuple[bool, Any]:
        root = nn.Module()
        with preserve_tied_parameters(root) as record:
            root.model = seeded_model()
            parallelize_module(root.model, mesh_of(2), good_plan())
        return root.model.embedding.weight is root.model.head.weight, record.tied_again

    assert run_threads(2, rank_function) == [(True, [("model.embedding.weight", "model.head.weight")])] * 2


def test_tie_that_the_block_cannot_know_of() -> None:
    """Neither named at entry nor registered inside: a deep copy registers nothing."""

    def rank_function(rank: int) -> bool:
        original = seeded_model()
        with preserve_tied_parameters():
            model = copy.deepcopy(original)
            parallelize_module(model, mesh_of(2), good_plan())
        return model.embedding.weight is model.head.weight

    assert run_threads(2, rank_function) == [True, True]


def test_tie_made_after_parallelizing() -> None:
    def rank_function(rank: int) -> bool:
        model = seeded_model()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        with preserve_tied_parameters(model):
            parallelize_module(model, mesh_of(2), good_plan())
            assert model.embedding.weight is not model.head.weight  # never tied, never joined
            model.head.weight = model.embedding.weight
        return model.embedding.weight is model.head.weight

    assert run_threads(2, rank_function) == [True, True]


def test_equal_layouts_that_were_never_tied_stay_apart() -> None:
    def rank_function(rank: int) -> tuple[bool, Any]:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        with preserve_tied_parameters(model) as record:
            parallelize_module(model, mesh_of(2), {"0": ColwiseParallel(), "1": ColwiseParallel()})
        return model[0].weight is model[1].weight, record.tied_again

    assert run_threads(2, rank_function) == [(False, [])] * 2


def test_three_places_and_two_ties() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            self.b.weight = self.c.weight = self.a.weight
            self.b.bias = self.c.bias

    def rank_function(rank: int) -> tuple[Any, ...]:
        model = Three()
        with preserve_tied_parameters(model) as record:
            parallelize_module(model, mesh_of(2), {name: ColwiseParallel() for name in "abc"})
        weights = {id(module.weight) for module in (model.a, model.b, model.c)}
        biases = [id(module.bias) for module in (model.a, model.b, model.c)]
        return len(weights), biases[1] == biases[2], biases[0] == biases[1], sorted(record.tied_again)

    expected = (1, True, False, [("a.weight", "b.weight", "c.weight"), ("b.bias", "c.bias")])
    assert run_threads(2, rank_function) == [expected] * 2


@pytest.mark.parametrize("is_plan_applied", [False, True])
def test_meta_device(is_plan_applied: bool) -> None:
    """`to_empty` makes a new plain tensor for each place; a DTensor it swaps where it is."""

    def rank_function(rank: int) -> tuple[bool, bool]:
        with torch.device("meta"):
            model = Tied()
        with preserve_tied_parameters(model):
            if is_plan_applied:
                parallelize_module(model, mesh_of(2), good_plan())
            model.to_empty(device="cpu")
            for module in (model.embedding, model.middle, model.head):
                module.reset_parameters()
        is_real = not any(parameter.is_meta for parameter in model.parameters())
        return model.embedding.weight is model.head.weight, is_real

    assert run_forked(2, rank_function) == [(True, True)] * 2


ROWS, COLUMNS = r"\(Shard\(dim=0\) on tensor_parallel\)", r"\(Shard\(dim=1\) on tensor_parallel\)"
PLAIN = r"\(a plain tensor on cpu\)"


@pytest.mark.parametrize(
    ("plan", "layouts"),
    [
        ({"embedding": ColwiseParallel(), "head": ColwiseParallel()}, (COLUMNS, ROWS)),
        ({"embedding": RowwiseParallel(input_layouts=Replicate())}, (ROWS, PLAIN)),
        ({"head": ColwiseParallel()}, (PLAIN, ROWS)),
    ],
)
@pytest.mark.parametrize("is_made_inside", [False, True])
def test_layouts_that_differ_are_refused(
    plan: dict[str, ParallelStyle], layouts: tuple[str, str], is_made_inside: bool
) -> None:
    text = (
        rf"embedding\.weight {layouts[0]} and head\.weight {layouts[1]} were one tied parameter and have come apart.*"
        r"RowwiseParallel for an embedding and ColwiseParallel for its head both split the vocabulary.*"
        r"give head\.weight its own nn\.Parameter before"
    )

    def parallelize_in_block() -> None:
        root = nn.Module() if is_made_inside else seeded_model()
        with preserve_tied_parameters(root):
            if is_made_inside:
                for name, child in seeded_model().named_children():
                    root.add_module(name, child)
            parallelize_module(root, mesh_of(2), plan)

    def rank_function(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            parallelize_in_block()

    run_threads(2, rank_function)
    assert hooks_left() == 0


def test_weight_untied_on_purpose_stays_untied() -> None:
    def rank_function(rank: int) -> tuple[bool, ...]:
        before, after, plain = seeded_model(), seeded_model(), seeded_model()
        mesh = mesh_of(2)
        with preserve_tied_parameters(before):  # untied before the plan is applied
            before.head.weight = nn.Parameter(before.embedding.weight.detach().clone())
            parallelize_module(before, mesh, good_plan())
        with preserve_tied_parameters(after):  # and after it
            parallelize_module(after, mesh, good_plan())
            after.head.weight = nn.Parameter(after.embedding.weight.detach().clone())
        with preserve_tied_parameters(plain):  # without any plan, by a deep copy of the parameter
            plain.head.weight = copy.deepcopy(plain.embedding.weight)
        return tuple(model.embedding.weight is model.head.weight for model in (before, after, plain))

    assert run_threads(2, rank_function) == [(False, False, False)] * 2


def test_deep_copy_of_a_tied_dtensor_is_no_tie() -> None:
    """A deep copy of a DTensor takes its attributes along, the tie's mark too."""

    def rank_function(rank: int) -> bool:
        model = seeded_model()
        with preserve_tied_parameters(model):
            parallelize_module(model, mesh_of(2), good_plan())
            model.head.weight = copy.deepcopy(model.embedding.weight)
        return model.embedding.weight is model.head.weight

    assert run_threads(2, rank_function) == [False, False]


def test_tie_false_does_nothing() -> None:
    def rank_function(rank: int) -> bool:
        model = seeded_model()
        with preserve_tied_parameters(model, tie=False) as record:
            assert hooks_left() == 0
            parallelize_module(model, mesh_of(2), good_plan())
        return model.embedding.weight is model.head.weight or bool(record.tied_again)

    assert run_forked(2, rank_function) == [False, False]


@pytest.mark.parametrize("is_failing", [False, True])
def test_nothing_is_left_behind(is_failing: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded_model()
    head = nn.Linear(HIDDEN, VOCABULARY)

    def use_block() -> None:
        with preserve_tied_parameters(model):
            model.extra = head
            model.extra.weight = model.embedding.weight
            model.to_empty(device="meta")  # a new parameter for each place
            model.late = nn.Linear(2, 2)
            if is_failing:
                raise RuntimeError("plan failed")

    with caplog.at_level(logging.INFO, logger="lightning_taco"):
        if is_failing:
            with pytest.raises(RuntimeError, match="plan failed"):
                use_block()
            assert not caplog.messages
        else:
            use_block()
            assert caplog.messages == [
                "lightning_taco: kept embedding.weight and head.weight and extra.weight one parameter"
            ]
    assert hooks_left() == 0
    assert all(not parameter.__dict__ for parameter in [*model.parameters(), head.weight])


def test_blocks_nest_and_repeat() -> None:
    def rank_function(rank: int) -> tuple[bool, ...]:
        results = []
        for _ in range(2):  # a second Trainer in the same process
            model, inner = seeded_model(), seeded_model()
            with preserve_tied_parameters(model):
                parallelize_module(model, mesh_of(2), {"embedding": good_plan()["embedding"]})
                with preserve_tied_parameters(inner):
                    parallelize_module(inner, mesh_of(2), good_plan())
                assert hooks_left() == 1
                parallelize_module(model, mesh_of(2), {"head": good_plan()["head"]})
            assert hooks_left() == 0
            results += [model.embedding.weight is model.head.weight, inner.embedding.weight is inner.head.weight]
            with preserve_tied_parameters(model), preserve_tied_parameters(model):  # validate() after fit()
                model.to(torch.float64)
            results.append(model.embedding.weight is model.head.weight)
        return tuple(results)

    assert run_forked(2, rank_function) == [(True,) * 6] * 2


def test_other_threads_are_not_seen() -> None:
    """Rank 0 alone is in a block: rank 1 gets torch's behaviour, and each rank has its own parameters."""

    def rank_function(rank: int) -> bool:
        model = seeded_model()
        with preserve_tied_parameters(model, tie=rank == 0):
            parallelize_module(model, mesh_of(2), good_plan())
            torch.distributed.barrier()
        return model.embedding.weight is model.head.weight

    assert run_threads(2, rank_function) == [True, False]
    assert hooks_left() == 0


def fsdp_outcome(rank: int) -> tuple[Any, ...]:
    """Two data-parallel ranks with their own batches, each split over two tensor-parallel ranks."""
    model, mesh = seeded_model(), mesh_of(2, 2)
    with preserve_tied_parameters(model) as record:
        parallelize_module(model, mesh["tensor_parallel"], good_plan())
        fully_shard(model.middle, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
    assert model.embedding.weight is model.head.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train_step(model, tokens(rank // 2))
    grad = whole(model.embedding.weight.grad)
    optimizer.step()
    train_step(model, tokens(rank // 2))  # the second all-gather reads what the optimizer wrote
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return (
        record.tied_again,
        grad,
        whole(model.head.weight.detach()),
        model.embedding.weight is model.head.weight,
        state,
    )


def test_fsdp_on_top_of_tensor_parallel() -> None:
    expected = seeded_model()
    grads = []
    for data_rank in range(2):
        train_step(expected, tokens(data_rank))
        grads.append([parameter.grad for parameter in expected.parameters()])
    for parameter, *of_ranks in zip(expected.parameters(), *grads, strict=True):
        parameter.grad = torch.stack(of_ranks).mean(0)
    torch.optim.SGD(expected.parameters(), lr=0.5).step()

    for rank, (tied_again, grad, after, is_tied, state) in enumerate(run_forked(4, fsdp_outcome)):
        assert tied_again == [("embedding.weight", "head.weight")]
        torch.testing.assert_close(grad, expected.embedding.weight.grad)
        torch.testing.assert_close(after, expected.embedding.weight.detach())
        assert is_tied
        if rank == 0:  # the full state dict is gathered on rank 0; both names are in it, as in one process
            assert state.keys() == expected.state_dict().keys()
            for name, value in expected.state_dict().items():
                torch.testing.assert_close(state[name], value)


def test_fsdp_that_takes_one_of_a_tied_pair_is_refused() -> None:
    text = (
        r"embedding\.weight \(.*Shard\(dim=0\) on tensor_parallel\) and head\.weight \(Shard\(dim=0\) on "
        r"tensor_parallel\) are tied, but fully_shard manages them apart.*Leave both to one fully_shard call"
    )

    def shard_embedding_only() -> None:
        model, mesh = seeded_model(), mesh_of(2, 2)
        with preserve_tied_parameters(model):
            parallelize_module(model, mesh["tensor_parallel"], good_plan())
            fully_shard(model.embedding, mesh=mesh["data_parallel"])

    def rank_function(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            shard_embedding_only()

    run_forked(4, rank_function)


def test_fsdp_alone_on_each_of_a_tied_pair_is_refused() -> None:
    """Alike layouts, and yet two parameters of two fully_shard calls: they cannot be made one."""
    text = r"embedding\.weight .* and head\.weight .* are tied, but fully_shard manages them apart"

    def shard_each() -> None:
        model, mesh = seeded_model(), mesh_of(2)
        with preserve_tied_parameters(model):
            fully_shard(model.embedding, mesh=mesh)
            fully_shard(model.head, mesh=mesh)

    def rank_function(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            shard_each()

    run_forked(2, rank_function)


def test_state_dict_round_trip() -> None:
    """Loading into the tied model fills the one parameter; the names in the file are those of one process."""

    def rank_function(rank: int) -> tuple[list[str], bool, Tensor]:
        model, mesh = seeded_model(), mesh_of(2)
        with preserve_tied_parameters(model):
            parallelize_module(model, mesh, good_plan())
        state = model.state_dict()
        new = torch.arange(float(VOCABULARY * HIDDEN)).view(VOCABULARY, HIDDEN)
        state["embedding.weight"] = state["head.weight"] = distribute_tensor(new, mesh, [Shard(0)])
        model.load_state_dict(state)
        return list(state), model.embedding.weight is model.head.weight, whole(model.head.weight.detach())

    names = list(seeded_model().state_dict())
    for state_names, is_tied, weight in run_forked(2, rank_function):
        assert state_names == names
        assert is_tied
        assert torch.equal(weight, torch.arange(float(VOCABULARY * HIDDEN)).view(VOCABULARY, HIDDEN))
