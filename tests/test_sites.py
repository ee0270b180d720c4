"""Names of sites: which module an exchange belongs to, in forward, in backward and under activation checkpointing.

Ranks are forked, since dropout under checkpointing needs a random state of its own for each rank.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import CompressionSession, Exchange, Site
from tests.models import (
    EVERYTHING,
    HIDDEN,
    Mlp,
    installed_session,
    make_model,
    make_tokens,
    tensor_parallel_mesh,
    train_step,
)
from tests.ranks import run_forked

OUTSIDE = Site("", "forward", False)
PLAIN_FORWARD = {
    ("embedding", "all_reduce"): 1,
    ("blocks.0.mlp.down", "all_reduce"): 1,
    ("blocks.1.mlp.down", "all_reduce"): 1,
    ("head", "all_gather"): 1,
}
PLAIN_BACKWARD = {
    ("head", "all_reduce"): 1,
    ("blocks.1.mlp.up", "all_reduce"): 1,
    ("blocks.0.mlp.up", "all_reduce"): 1,
}
SEQUENCE_FORWARD = {
    ("embedding", "reduce_scatter"): 1,
    ("blocks.0.mlp", "all_gather"): 1,
    ("blocks.0.mlp.down", "reduce_scatter"): 1,
    ("blocks.1.mlp", "all_gather"): 1,
    ("blocks.1.mlp.down", "reduce_scatter"): 1,
    ("head", "all_gather"): 2,
}
SEQUENCE_BACKWARD = {
    ("head", "reduce_scatter"): 1,
    ("blocks.1.mlp.down", "all_gather"): 1,
    ("blocks.1.mlp", "reduce_scatter"): 1,
    ("blocks.0.mlp.down", "all_gather"): 1,
    ("blocks.0.mlp", "reduce_scatter"): 1,
    ("embedding", "all_gather"): 1,
}


def exchanges(session: CompressionSession) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Messages by site and kind, of the forward and of the backward, that were counted since the last call."""
    found: dict[str, dict[tuple[str, str], int]] = {"forward": {}, "backward": {}}
    for key, count in session.traffic.counts.items():
        found[key.direction][key.site, key.kind] = count.num_messages
    session.traffic.clear()
    return found["forward"], found["backward"]


def record_sites(session: CompressionSession) -> list[tuple[str, Site]]:
    """A list that fills with the kind and the site of each exchange."""
    sites: list[tuple[str, Site]] = []
    choose = session.choose

    def choose_and_record(exchange: Exchange, site: Site) -> Any:
        sites.append((exchange.kind, site))
        return choose(exchange, site)

    session.choose = choose_and_record  # type: ignore[method-assign]
    return sites


def num_hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    kinds += ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_names_in_forward_and_backward(sequence_parallel: bool) -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = make_model(mesh, sequence_parallel=sequence_parallel)
        with installed_session(mesh, module=model) as session:
            for _ in range(3):  # nothing is left open that would name the next step's
                train_step(model, make_tokens(), session)
                forward, backward = exchanges(session)
                assert forward == (SEQUENCE_FORWARD if sequence_parallel else PLAIN_FORWARD)
                assert backward == (SEQUENCE_BACKWARD if sequence_parallel else PLAIN_BACKWARD)
                assert session.sites.current() == OUTSIDE
            with torch.no_grad(), session.scope():
                model(make_tokens())
            assert exchanges(session) == (forward, {})

    run_forked(2, body)


def test_names_leave_wrappers_out_and_follow_a_module_that_runs_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, hidden: Tensor) -> Tensor:
            return self.mlp(self.mlp(hidden))

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = nn.Sequential(checkpoint_wrapper(Twice()), Mlp())
        for mlp in (module for module in model.modules() if isinstance(module, Mlp)):
            parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with installed_session(mesh, module=model) as session:
            leaf = torch.randn(4, HIDDEN).requires_grad_()
            with session.scope(is_new_step=True):
                model(leaf).square().sum().backward()
            forward, backward = exchanges(session)
            assert set(forward) == {("0.mlp.down", "all_reduce"), ("1.down", "all_reduce")}
            assert forward["0.mlp.down", "all_reduce"] in (3, 4)  # twice, and again; recomputing stops early
            assert backward == {("1.up", "all_reduce"): 1, ("0.mlp.up", "all_reduce"): 2}

    run_forked(2, body)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
def test_a_recomputed_forward_gives_the_same_bits_and_is_known_as_one(
    checkpointing: str, sequence_parallel: bool
) -> None:
    # The two directions differ, so that a recomputed forward in the wrong codec would show.
    config = CompressionConfig(min_bytes=0, forward=CodecConfig(), backward=CodecConfig(element="int8", block_size=32))

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        tokens = make_tokens()

        def run(kind: str | None) -> tuple[Tensor, list[Tensor], list[tuple[str, Site]], Counter[Site]]:
            model = make_model(mesh, sequence_parallel=sequence_parallel)
            for block in model.blocks:
                block.checkpointing = kind
            observed: Counter[Site] = Counter()
            with installed_session(mesh, config, model) as session:
                sites = record_sites(session)
                session.observers.append(lambda exchange, site, codec: observed.update([site]))
                torch.manual_seed(1)  # dropout
                loss, gradients = train_step(model, tokens, session)
                assert session.sites.current() == OUTSIDE
            return loss, gradients, sites, observed

        loss, gradients, sites, observed = run(None)
        again_loss, again_gradients, again_sites, again_observed = run(checkpointing)
        assert torch.equal(loss, again_loss)
        assert all(map(torch.equal, gradients, again_gradients))
        repeated = [(kind, site) for kind, site in again_sites if site.is_recompute]
        once = [(kind, site) for kind, site in again_sites if not site.is_recompute]
        assert sorted(once) == sorted(sites)
        assert observed == again_observed
        names = {site.name for _, site in repeated}
        assert {site.direction for _, site in repeated} == {"forward"}
        if checkpointing == "reentrant":  # the non-reentrant kind stops before the last exchange
            assert {"blocks.0.mlp.down", "blocks.1.mlp.down"} <= names
        elif sequence_parallel:
            assert {"blocks.0.mlp", "blocks.1.mlp"} <= names

    run_forked(2, body)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_function_that_is_recomputed_outside_any_module_is_forward_again(use_reentrant: bool) -> None:
    config = CompressionConfig(min_bytes=0, forward=CodecConfig(), backward=None)

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()

        def square_of_all(shard: Tensor) -> Tensor:
            whole = DTensor.from_local(shard, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
            return whole * whole  # saves `whole`, so that it has to be computed again

        def run(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, list[Site]]:
            leaf = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            with installed_session(mesh, config) as session, session.scope(is_new_step=True):
                sites = record_sites(session)
                result = function(leaf)
                result.sum().backward()
            assert leaf.grad is not None
            return result.detach(), leaf.grad, [site for kind, site in sites if kind == "all_gather"]

        result, gradient, sites = run(square_of_all)
        assert sites == [OUTSIDE]
        again = run(lambda leaf: checkpoint(square_of_all, leaf, use_reentrant=use_reentrant))
        assert torch.equal(again[0], result)
        assert again[2] == [OUTSIDE, Site("", "forward", True)]
        assert torch.equal(again[1], gradient)

    run_forked(2, body)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_backward_of_what_was_recomputed_is_backward(use_reentrant: bool) -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        mlp = Mlp()
        parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with installed_session(mesh, module=mlp) as session, session.scope(is_new_step=True):
            sites = record_sites(session)
            leaf = torch.randn(4, HIDDEN).requires_grad_()
            checkpoint(lambda hidden: mlp(mlp(hidden)), leaf, use_reentrant=use_reentrant).square().sum().backward()
        backward = [site for _, site in sites if site.direction == "backward"]
        assert backward == [Site("up", "backward", False)] * 2
        assert {site.name for _, site in sites if site.direction == "forward"} == {"down"}

    run_forked(2, body)


def test_every_hook_is_gone_after_detach() -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = make_model(mesh, sequence_parallel=True)
        before = num_hooks(model)
        with installed_session(mesh, module=model) as session:
            attached = num_hooks(model)
            assert attached > before
            other = make_model(mesh)
            before_other = num_hooks(other)
            session.attach(other)  # one more model
            assert num_hooks(other) > before_other
            train_step(model, make_tokens(), session)
            assert num_hooks(model) == attached
            session.observers.append(lambda *_: None)
        assert num_hooks(model) == before
        assert num_hooks(other) == before_other
        assert session.observers == []
        session.detach()
        assert num_hooks(model) == before

    run_forked(1, body)


def test_only_modules_that_can_exchange_and_those_around_them_are_followed() -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = make_model(mesh)
        session = CompressionSession(EVERYTHING, mesh.get_group())
        names = session.sites.attach(model)
        session.sites.detach()
        blocks = {f"blocks.{index}{rest}" for index in range(2) for rest in ("", ".mlp", ".mlp.up", ".mlp.down")}
        assert set(names) == {"embedding", "blocks", "head"} | blocks  # no norm, no dropout

    run_forked(1, body)


class Faulty(nn.Module):
    """Raises in forward, or in backward, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.fails_in = "nothing"

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.mlp(hidden)
        if self.fails_in == "backward":
            hidden.register_hook(self._fail)
        if self.fails_in == "forward":
            self._fail(hidden)
        return hidden

    def _fail(self, _: Tensor) -> None:
        raise ArithmeticError(f"in {self.fails_in}")


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_an_exception_leaves_nothing_open_for_the_next_step(fails_in: str) -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = nn.Sequential(Faulty(), Mlp())
        for mlp in (model[0].mlp, model[1]):
            parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        leaf = torch.randn(4, HIDDEN).requires_grad_()
        with installed_session(mesh, module=model) as session:

            def step() -> None:
                with session.scope(is_new_step=True):
                    model(leaf).square().sum().backward()

            step()
            expected = exchanges(session)
            assert expected == (
                {("0.mlp.down", "all_reduce"): 1, ("1.down", "all_reduce"): 1},
                {("1.up", "all_reduce"): 1, ("0.mlp.up", "all_reduce"): 1},
            )
            model[0].fails_in = fails_in
            with pytest.raises(ArithmeticError, match=f"in {fails_in}"):
                step()
            assert session.sites.current() == OUTSIDE
            model[0].fails_in = "nothing"
            session.traffic.clear()
            with session.scope(is_new_step=True):  # outside any module: no name that was left open
                whole = DTensor.from_local(leaf, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
                whole.sum().backward()
            assert exchanges(session) == ({}, {("", "all_reduce"): 1})
            step()
            assert exchanges(session) == expected

    run_forked(2, body)


def test_a_first_layer_whose_input_needs_no_gradient() -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = nn.Sequential(Mlp(), Mlp())
        for mlp in model:
            parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with installed_session(mesh, module=model) as session:
            for _ in range(2):
                with session.scope(is_new_step=True):
                    model(torch.randn(4, HIDDEN)).square().sum().backward()
                forward, backward = exchanges(session)
                assert forward == {("0.down", "all_reduce"): 1, ("1.down", "all_reduce"): 1}
                assert backward == {("1.up", "all_reduce"): 1}

    run_forked(2, body)


def test_frozen_layers_and_keyword_inputs_keep_names_right() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, *, states: dict[str, list[Tensor]]) -> dict[str, Tensor]:
            return {"output": self.inner(states["hidden"][0])}

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model = nn.ModuleDict({"first": Outer(), "second": Mlp()})
        for mlp in (model["first"].inner, model["second"]):
            parallelize_module(mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for parameter in model["second"].parameters():
            parameter.requires_grad_(False)
        leaf = torch.randn(4, HIDDEN).requires_grad_()
        with installed_session(mesh, module=model) as session:
            with session.scope(is_new_step=True):
                hidden = model["first"](states={"hidden": [leaf]})["output"]
                model["second"](hidden).square().sum().backward()
            forward, backward = exchanges(session)
            assert forward == {("first.inner.down", "all_reduce"): 1, ("second.down", "all_reduce"): 1}
            assert backward == {("second.up", "all_reduce"): 1, ("first.inner.up", "all_reduce"): 1}

    run_forked(2, body)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_recomputed_exchange_keeps_the_name_and_so_the_codec_of_the_first_time(use_reentrant: bool | None) -> None:
    """The gather belongs to ``outer``, but it is computed again in the middle of the backward of ``outer.mlp``."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Mlp()

        def forward(self, shard: Tensor) -> Tensor:
            if use_reentrant is None:
                return self.branch(shard)
            return checkpoint(self.branch, shard, use_reentrant=use_reentrant)

        def branch(self, shard: Tensor) -> Tensor:
            mesh = self.mlp.up.weight.device_mesh  # type: ignore[union-attr]
            whole = DTensor.from_local(shard, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local()
            return self.mlp(whole * whole)

    config = CompressionConfig(min_bytes=0, recipes={"outer.mlp*": "int8"}, backward=None)

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        torch.manual_seed(0)
        model = nn.ModuleDict({"outer": Outer()})
        parallelize_module(model["outer"].mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with installed_session(mesh, config, model) as session, session.scope(is_new_step=True):
            sites = record_sites(session)
            leaf = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            model["outer"](leaf).square().sum().backward()
        gathers = [site for kind, site in sites if kind == "all_gather" and site.direction == "forward"]
        once = [Site("outer", "forward", False)]
        assert gathers == (once if use_reentrant is None else [*once, Site("outer", "forward", True)])

    run_forked(2, body)
