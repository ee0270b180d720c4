"""Row-parallel layers in slices: the bits of torch's own where products are exact, and where slices cannot be."""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_taco import OverlappedRowwiseParallel
from lightning_taco.activations import store_in_few_bits
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import overlap
from lightning_taco.dtensor.exchange import Exchange, SiteKey
from lightning_taco.dtensor.outcomes import COMPRESSED
from tests.models import installed_session, local, tensor_parallel_mesh
from tests.ranks import run_forked, run_threads

BATCH, LENGTH, WIDTH, OUTPUT = 2, 12, 64, 128
INT8 = CodecConfig(element="int8")
EVERYTHING = CompressionConfig(forward=INT8, backward=INT8, min_bytes=0)
RANKS = 4


class Layer(nn.Module):
    """One row-parallel layer, of integer weights: its products are exact, however they are cut."""

    def __init__(self, style: RowwiseParallel, mesh: Any, *, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, OUTPUT, bias=bias)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.down.parameters():
            parameter.data = torch.randint(-4, 5, parameter.shape, generator=generator).float().to(mesh.device_type)
        parallelize_module(self, mesh, {"down": style})

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


def inputs(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, shape, generator=generator).float().requires_grad_()


def outcome(layer: nn.Module, session: Any, x: Tensor) -> list[Tensor]:
    """Output and gradients of one step; the gradient of the output is the same on all ranks, or of their shards."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with session.scope(is_new_step=True):
        output = layer(x)
    shape = output.shape
    weights = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(9)).float().to(output.device)
    with session.scope():
        (output.float() * weights).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(local(parameter.grad).clone() for parameter in layer.parameters())]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def both(
    mesh: Any, config: CompressionConfig, x: Tensor, num_slices: int, *, bias: bool = False, **layout: Any
) -> dict[str, Any]:
    """What torch's style and ours give under one configuration, and what was counted."""
    results, traffic = [], []
    for style in (RowwiseParallel(**layout), OverlappedRowwiseParallel(num_slices=num_slices, **layout)):
        layer = Layer(style, mesh, bias=bias)
        with installed_session(mesh, config, layer) as session:
            results.append(outcome(layer, session, x))
            counts = {key: (count.num_messages, count.sent_bytes) for key, count in session.traffic.counts.items()}
            traffic.append(counts)
    stock, ours = results
    return {
        "same": same(stock, ours),
        "same gradients": same(stock[1:], ours[1:]),
        "error": ((ours[0] - stock[0]).norm() / stock[0].norm()).item(),
        "traffic": traffic,
    }


def check_rank(rank: int) -> dict[str, Any]:
    mesh, found = tensor_parallel_mesh(), {}
    part = WIDTH // dist.get_world_size()
    x = inputs(rank, BATCH, LENGTH, part)
    for num_slices in (2, 3, 24, 1000):
        found[f"all-reduce {num_slices}"] = both(mesh, EVERYTHING, x, num_slices)
        found[f"reduce-scatter {num_slices}"] = both(mesh, EVERYTHING, x, num_slices, output_layouts=Shard(1))
    found["first dim"] = both(mesh, EVERYTHING, inputs(rank, 8, 3, part), 2, output_layouts=Shard(0))
    found["two dims"] = both(mesh, EVERYTHING, inputs(rank, 20, part), 3)
    found["uneven"] = both(mesh, EVERYTHING, inputs(rank, BATCH, 11, part), 2, output_layouts=Shard(1))
    calibrated = CompressionConfig(forward=CodecConfig(element="int8", reshape="calibrated"), min_bytes=0)
    found["calibrated"] = both(mesh, calibrated, x, 2)
    found["bias"] = [both(mesh, EVERYTHING, x, 2, bias=True, **way) for way in ({}, {"output_layouts": Shard(1)})]
    found["excluded"] = both(mesh, CompressionConfig(forward=INT8, min_bytes=0, exclude=("down",)), x, 2)
    found["small"] = both(mesh, CompressionConfig(forward=INT8, min_bytes=1 << 30), x, 2)
    found["observed"] = check_observers(mesh, x)
    found["suspended"] = check_suspension(mesh, x)
    found["modes"] = check_modes(mesh, x)
    found["seeds"] = check_seeds(mesh)
    found["copies"] = check_copies(mesh, x)
    return found


def check_observers(mesh: Any, x: Tensor) -> list[tuple[str, bool]]:
    """Observers see the whole partial sum, once."""
    layer, seen = Layer(OverlappedRowwiseParallel(num_slices=3), mesh), []
    exact = x.detach() @ local(layer.down.weight).t()

    def observer(exchange: Exchange, site: Any, codec: Any) -> None:
        seen.append((site.name, torch.equal(exchange.tensor, exact)))

    with installed_session(mesh, EVERYTHING, layer) as session:
        session.observers.append(observer)
        outcome(layer, session, x)
    return seen


def check_suspension(mesh: Any, x: Tensor) -> list[str]:
    layer = Layer(OverlappedRowwiseParallel(), mesh)
    with installed_session(mesh, EVERYTHING, layer) as session:
        session.suspend("guard", {SiteKey("down", "forward", "all_reduce"): "for a test"})
        outcome(layer, session, x)
        return [key.outcome for key in session.traffic.counts]


def check_modes(mesh: Any, x: Tensor) -> dict[str, Any]:
    """Under autocast in bf16, recomputed, without gradients, and with stored activations, which see torch's layer."""
    layer, found = Layer(OverlappedRowwiseParallel(), mesh), {}
    with installed_session(mesh, EVERYTHING, layer) as session:
        plain = outcome(layer, session, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = outcome(layer, session, x)
        found["autocast"] = (cast[0].dtype, cast[1].dtype, cast[2].dtype, (cast[0] - plain[0]).abs().max().item())
        again = outcome(lambda_module(layer, lambda x: checkpoint(layer, x, use_reentrant=False)), session, x)
        found["checkpoint"] = same(again, plain)
        with torch.no_grad(), session.scope():
            found["no_grad"] = torch.equal(layer(x), plain[0])
        stored = store_in_few_bits(layer, {"min_numel": 0})
        session.traffic.clear()
        outcome(layer, session, x)
        found["stored"] = (stored.ledger.total.stored_bytes, session.traffic.total(outcome=COMPRESSED).num_messages)
        stored.remove()
    return found


def lambda_module(layer: nn.Module, function: Any) -> nn.Module:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    return Wrapped()


def check_seeds(mesh: Any) -> bool:
    """Slices of equal content draw other numbers."""
    stochastic = CodecConfig(element="int4", rounding="stochastic")
    layer = Layer(OverlappedRowwiseParallel(num_slices=2), mesh, bias=False)
    x = torch.rand(1, WIDTH // dist.get_world_size()).expand(2, -1)
    with installed_session(mesh, CompressionConfig(forward=stochastic, min_bytes=0), layer) as session, session.scope():
        first, second = layer(x)
    return not torch.equal(first, second)


def check_copies(mesh: Any, x: Tensor) -> bool:
    """A deep copy runs its own weights."""
    layer = Layer(OverlappedRowwiseParallel(), mesh, bias=False)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.down.weight.zero_()
    with installed_session(mesh, EVERYTHING, other) as session, session.scope():
        return bool((other(x) == 0).all())


def check_compiled(mesh: Any, x: Tensor) -> bool:
    """In a graph it is torch's, without a break."""
    layer = Layer(OverlappedRowwiseParallel(), mesh, bias=False)
    with installed_session(mesh, EVERYTHING, layer) as session, session.scope():
        eager = layer(x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    return torch.equal(eager, compiled)


def check_one_slice(mesh: Any, x: Tensor) -> bool:
    """Nothing is computed on the way to torch's layer."""
    overlap._Sliced.of = overlap._autocast = None  # type: ignore[assignment,method-assign]
    return bool(both(mesh, EVERYTHING, x, 1)["same"])


def torch_s_rank(rank: int) -> tuple[bool, bool]:
    mesh, x = tensor_parallel_mesh(), inputs(rank, BATCH, LENGTH, WIDTH // 2)
    return check_compiled(mesh, x), check_one_slice(mesh, x)


def test_a_layer_that_is_compiled_or_has_one_slice_is_torch_s() -> None:
    assert run_forked(2, torch_s_rank) == [(True, True)] * 2


@cache
def checks() -> list[dict[str, Any]]:
    return run_threads(RANKS, check_rank)


@pytest.mark.parametrize("num_slices", [2, 3, 24, 1000])
@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter"])
def test_values_and_gradients_have_the_bits_of_one_exchange(kind: str, num_slices: int) -> None:
    for found in checks():
        assert found[f"{kind} {num_slices}"]["same"], found[f"{kind} {num_slices}"]["error"]


@pytest.mark.parametrize("name", ["first dim", "two dims", "uneven", "calibrated", "excluded", "small"])
def test_any_layout_and_setting(name: str) -> None:
    for found in checks():
        assert found[name]["same"], found[name]["error"]


def test_a_bias_is_added_after_the_sum() -> None:
    """So it is not quantised, where torch's has gone through the codec with the rest."""
    for found in checks():
        for each in found["bias"]:
            assert each["same gradients"]
            assert 0 < each["error"] < 0.02


def test_what_is_counted_is_what_torch_s_style_counts() -> None:
    for found in checks():
        for name in ("all-reduce 2", "reduce-scatter 3", "excluded", "small"):
            stock, ours = found[name]["traffic"]
            assert stock == ours
        assert any(key.outcome == COMPRESSED for key in found["all-reduce 2"]["traffic"][1])


def test_observers_see_the_whole_once() -> None:
    for found in checks():
        assert found["observed"] == [("down", True)]


def test_a_suspended_site_is_sent_as_it_is() -> None:
    for found in checks():
        assert all(text != COMPRESSED for text in found["suspended"])


def test_modes() -> None:
    for found in checks():
        output, of_input, of_weight, error = found["modes"]["autocast"]
        assert (output, of_input, of_weight) == (torch.bfloat16, torch.float32, torch.float32)
        assert error < 16  # sums up to some 500 in bf16, and 8 bits
        assert found["modes"]["checkpoint"]
        assert found["modes"]["no_grad"]
        stored_bytes, num_compressed = found["modes"]["stored"]
        assert stored_bytes > 0
        assert num_compressed == 1


def test_slices_draw_their_own_numbers() -> None:
    assert all(found["seeds"] for found in checks())


def test_a_copy_is_a_layer_of_its_own() -> None:
    assert all(found["copies"] for found in checks())


@pytest.mark.parametrize("num_slices", [0, -1, 1.5, True, "2"])
def test_a_number_of_slices_that_is_none_is_refused(num_slices: Any) -> None:
    with pytest.raises(ValueError, match=r"num_slices=.* is not a number of slices; give an integer from 1 up"):
        OverlappedRowwiseParallel(num_slices=num_slices)


def check_asynchronous(rank: int) -> list[tuple[str, bool]]:
    mesh, seen = tensor_parallel_mesh(), []
    layer = Layer(RowwiseParallel(output_layouts=Shard(1)), mesh)

    def observer(exchange: Exchange, site: Any, codec: Any) -> None:
        seen.append((exchange.kind, exchange.is_async))

    with installed_session(mesh, replace(EVERYTHING, asynchronous=True), layer) as session:
        session.observers.append(observer)
        outcome(layer, session, inputs(rank, BATCH, LENGTH, WIDTH // 2))
        partial = DTensor.from_local(torch.ones(4, 64), mesh, (Replicate(),)).redistribute(placements=(Shard(0),))
        with session.scope():
            partial.redistribute(placements=(Replicate(),))
            partial.redistribute(placements=(Replicate(),), async_op=True)
    return seen


def test_who_does_not_wait_is_known() -> None:
    """torch's styles redistribute their outputs without waiting, forward and backward."""
    for seen in run_threads(2, check_asynchronous):
        assert seen == [("reduce_scatter", True), ("all_gather", True), ("all_gather", False), ("all_gather", True)]
