"""`CompressionGuard`: what it sees, when it acts, on all ranks alike; and that it costs nothing when all is well.

Trainers run in forked gloo ranks, several to a group; faults are those of `tests.guarded_runs`.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_taco.callbacks import CompressionGuard, CompressionSchedule, RunLogger
from lightning_taco.callbacks.agreed_loss import AgreedLoss
from lightning_taco.callbacks.hysteresis import Hysteresis
from lightning_taco.config import CodecConfig, CompressionConfig
from lightning_taco.dtensor import Exchange, Site
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.dtensor.site_watch import SiteWatch, gaussian_error
from lightning_taco.dtensor.suspensions import SiteKey
from lightning_taco.dtensor.traced import exchange_op, trace_exchange
from lightning_taco.fabric import TacoTPStrategy as FabricStrategy
from lightning_taco.report.command import report_of
from tests.guarded_runs import COMPRESSION, DOWN, UP, FaultyModule, fit
from tests.lightning_models import TinyModule, captured_messages, full_weights, warm_lightning  # noqa: F401
from tests.models import (
    EVERYTHING,
    installed_session,
    make_model,
    make_tokens,
    tensor_parallel_mesh,
    train_step,
)
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")

ERROR = "suspended by guard: error above its bound"
NONFINITE = "suspended by guard: NaN or Inf"
LOSS = "suspended by guard: NaN or Inf loss"


def same_weights(one: Any, other: Any) -> bool:
    others = full_weights(other)
    return all(torch.equal(value, others[name]) for name, value in full_weights(one).items())


# What it holds back, and for how long


def test_time_doubles_at_each_relapse_and_is_forgotten_after_a_good_while() -> None:
    holds: Hysteresis[str] = Hysteresis()
    assert holds.hold("a", "why", step=10, num_steps=5).until == 15
    assert (holds.due(14), holds.due(15), holds.due(16)) == ([], ["a"], ["a"])
    assert holds.extend("a", step=16).until == 26
    holds.release("a", step=26)
    assert holds.holds == {}
    # Released after 10 steps: a failure within 10 more is a relapse, one later is not.
    twin: Hysteresis[str] = Hysteresis()
    twin.load_state_dict(holds.state_dict())
    assert holds.hold("a", "again", step=36, num_steps=5).num_steps == 20
    assert twin.hold("a", "later", step=37, num_steps=5).num_steps == 5


# What it measures


def test_error_of_a_sum_is_that_of_the_sum_and_of_the_rest_that_of_the_tensor() -> None:
    codec = CodecConfig(element="int8", rotation=False, block_size=32)

    def body(rank: int) -> Any:
        session = CompressionSession(EVERYTHING, dist.group.WORLD)  # type: ignore[arg-type]
        # A scale of 127 / 127: the first value is exact and the rest are rounded to whole numbers.
        values = torch.full((1, 32), 10.25 if rank == 0 else -10.0)
        values[0, 0] = 127.0 if rank == 0 else -127.0
        watch = SiteWatch(session)
        for kind in ("all_reduce", "all_gather"):
            watch.observe(Exchange(kind=kind, tensor=values), Site("site", "forward", False), codec)  # type: ignore[arg-type]
        scattered = Exchange(kind="reduce_scatter", tensor=values.repeat(1, 2).bfloat16(), dim=1)
        watch.observe(scattered, Site("site", "backward", False), codec)
        if rank == 1:
            values[0, 5] = math.inf
        watch.observe(Exchange(kind="all_reduce", tensor=values), Site("bad", "forward", False), codec)
        # One rank's own figures would differ.
        return {tuple(key): (seen.relative_l2_error, seen.is_finite) for key, seen in watch.read().items()}

    seen, others = run_forked(2, body)
    assert seen == others
    # Rank 0 rounds 10.25 to 10: the sum is 0 where it should be 0.25.
    assert seen["site", "forward", "all_reduce"] == (1.0, True)
    assert seen["site", "backward", "reduce_scatter"] == (1.0, True)
    expected = math.sqrt(31 * 0.25**2 / (2 * 127**2 + 31 * (10.25**2 + 100)))
    assert seen["site", "forward", "all_gather"] == (pytest.approx(expected, rel=1e-6), True)
    assert seen["bad", "forward", "all_reduce"] == (math.inf, False)


def test_default_bound_follows_the_codec() -> None:
    assert gaussian_error(CodecConfig(element="int8")) == pytest.approx(0.0065, rel=0.03)
    assert gaussian_error(CodecConfig(element="e4m3")) == pytest.approx(0.026, rel=0.03)
    assert gaussian_error(CodecConfig(element="int4", reshape="calibrated")) == pytest.approx(0.117, rel=0.03)
    key, codec = SiteKey("blocks.3.mlp", "forward", "all_reduce"), CodecConfig(element="int8")
    assert CompressionGuard()._bound(key, codec) == 4 * gaussian_error(codec)
    guard = CompressionGuard(max_relative_error={"head": 0.5, "blocks.*": 0.25, "*": 0.125})
    assert guard._bound(key, codec) == 0.25
    assert guard._bound(key._replace(site="other"), codec) == 0.125


def test_loss_is_the_largest_of_all_ranks_and_nan_if_one_is_not_finite() -> None:
    def body(rank: int) -> list[float]:
        cases: list[tuple[Any, Any]] = [
            (1.5, 2.5),
            (torch.tensor(-2.0), torch.tensor(-3.0)),
            (1.0, math.nan),
            (-math.inf, 1.0),
        ]
        return [AgreedLoss(case[rank], torch.device("cpu")).value() for case in cases]

    for found in run_forked(2, body):
        assert found[:2] == [2.5, -2.0]
        assert math.isnan(found[2])
        assert math.isnan(found[3])


# What it does: a site


def test_a_site_that_cancels_goes_back_to_full_precision_on_all_ranks_and_returns() -> None:
    def body(rank: int) -> Any:
        guard = CompressionGuard(every_n_steps=2, retry_after_steps=3, spike_factor=None)
        module = FaultyModule(rank, cancel_at=range(4, 10))
        with captured_messages() as lines:
            events, outcomes = fit(module, [guard], max_steps=16)
        assert guard.suspended == {}
        reasons = {text for found in outcomes.outcomes.values() for text in found[DOWN]}
        texts = [str(event) for event in events.events]
        printed = [line for line in lines if "guard" in line]
        assert printed == (texts if rank == 0 else [])
        return texts, outcomes.uncompressed_at(DOWN), outcomes.uncompressed_at(UP), reasons, module.losses

    one, other = run_forked(2, body)
    assert one == other
    texts, uncompressed, elsewhere, reasons, losses = one
    # Seen in step 4; tried in steps 7, while the fault is there, and 13, when it is over.
    assert uncompressed == list(range(5, 14))
    assert elsewhere == []
    assert reasons == {"compressed", ERROR}
    suspended, relapse, resumed = texts
    assert suspended.startswith(f"lightning_taco: step 5: guard: suspend {DOWN}: relative error ")
    assert suspended.endswith("is not below 0.026; sent as it is for 3 steps")
    assert relapse.startswith(f"lightning_taco: step 8: guard: suspend {DOWN}: tried again: relative error ")
    assert relapse.endswith("is not below 0.013; sent as it is for 6 steps")
    assert resumed.startswith(f"lightning_taco: step 14: guard: resume {DOWN}: tried again: relative error 0.00")
    assert resumed.endswith("is below 0.013")
    assert losses[-1] < losses[0]


def test_what_the_guard_did_is_on_the_page_of_the_run(tmp_path: Path) -> None:
    """Partial sums that cancel, and later one NaN on one rank: measured, suspended, resumed, and in the report."""

    def body(rank: int) -> list[str]:
        guard = CompressionGuard(every_n_steps=2, retry_after_steps=3, pause_steps=2)
        module = FaultyModule(rank, cancel_at=[4], nan_at=[12])
        events, _ = fit(module, [guard], max_steps=18, loggers=[RunLogger(tmp_path)])
        return [str(event) for event in events.events]

    told, other = run_forked(2, body)
    assert told == other
    shown = report_of(tmp_path).content()["tables"]["events"]
    assert len(shown["rows"]) == len(told) >= 6
    text = json.dumps(shown)
    for part in (DOWN, "suspend", "resume", "is not below 0.026", "NaN or Inf", "all sites"):
        assert part in text, text


def test_one_nan_on_one_rank_in_a_measured_step_and_between_them() -> None:
    def body(rank: int) -> Any:
        found = []
        for every_n_steps in (4, 100):
            settings: dict[str, Any] = {"retry_after_steps": 6, "pause_steps": 3}
            guard = CompressionGuard(every_n_steps=every_n_steps, **settings)
            module = FaultyModule(rank, nan_at=[4])
            events, outcomes = fit(module, [guard], max_steps=13)
            assert math.isnan(module.losses[4])
            assert all(math.isfinite(loss) for step, loss in enumerate(module.losses) if step != 4)
            assert guard.suspended == {}
            reasons = [outcomes.outcomes[step][DOWN] for step in (5, 6)]
            uncompressed = outcomes.uncompressed_at(DOWN), outcomes.uncompressed_at(UP)
            found.append((events.changes, uncompressed, reasons, [event.reason for event in events.events]))
        return found

    (measured, between), others = run_forked(2, body)
    assert others == [measured, between]
    changes, uncompressed, reasons, _ = measured
    assert sorted(changes) == [
        (5, "suspend", UP),
        (5, "suspend", DOWN),
        (6, "suspend", ""),
        (9, "resume", ""),
        (11, "resume", UP),
        (11, "resume", DOWN),
    ]
    assert uncompressed == (list(range(5, 11)), list(range(5, 11)))
    assert reasons == [{NONFINITE}, {LOSS}]
    # The loss of step 4 is read at the end of step 5.
    changes, uncompressed, reasons, texts = between
    assert changes == [(6, "suspend", ""), (9, "resume", "")]
    assert uncompressed == ([6, 7, 8], [6, 7, 8])
    assert reasons == [{"compressed"}, {LOSS}]
    assert texts == [
        "the loss of step 4 was NaN or Inf; sent as it is for 3 steps",
        "3 steps have passed since the NaN or Inf loss",
    ]


def test_replicas_agree_when_only_one_of_them_is_faulty() -> None:
    def body(rank: int) -> Any:
        guard = CompressionGuard(every_n_steps=2, retry_after_steps=100, pause_steps=100, spike_factor=None)
        module = FaultyModule(rank, nan_at=[2], nan_rank=3, fsdp=True)

        def make_strategy(*args: Any, **settings: Any) -> Any:
            from lightning_taco import TacoTPStrategy

            return TacoTPStrategy(*args, data_parallel_size=2, tensor_parallel_size=2, **settings)

        events, outcomes = fit(module, [guard], max_steps=5, make_strategy=make_strategy)
        return events.changes, outcomes.uncompressed_at(DOWN)

    found = run_forked(4, body)
    assert found == [([(3, "suspend", DOWN), (3, "suspend", UP), (4, "suspend", "")], [3, 4])] * 4


# What it does: the loss


def check_accumulation(rank: int) -> None:
    """Accumulated batches are one step, with one loss."""
    guard = CompressionGuard(every_n_steps=2, retry_after_steps=2, spike_window=4)
    module = FaultyModule(rank, cancel_at=[2])
    events, _ = fit(module, [guard], max_steps=6, accumulate_grad_batches=2)
    means = [sum(module.losses[2 * step : 2 * step + 2]) / 2 for step in range(6)]
    assert list(guard._losses) == pytest.approx(means[1:5], rel=1e-6)
    assert events.changes == [(3, "suspend", DOWN), (5, "resume", DOWN)]


def test_a_loss_spike_pauses_all_sites_and_the_time_doubles_at_a_relapse() -> None:
    def body(rank: int) -> Any:
        check_accumulation(rank)
        guard = CompressionGuard(every_n_steps=100, spike_window=4, pause_steps=2)
        # Step 2 is before there are four losses. Step 10 is soon after the first pause; so is the end of the second.
        module = FaultyModule(rank, spike_at=[2, 6, 10, 14], lr=1e-3)
        events, outcomes = fit(module, [guard], max_steps=25)
        return events.changes, outcomes.uncompressed_at(DOWN), [event.reason for event in events.events]

    one, other = run_forked(2, body)
    assert one == other
    changes, uncompressed, reasons = one
    # Read at the end of steps 7, 11 and 15; the second pause would end with step 15, which reads the loss of 14.
    assert changes == [
        (8, "suspend", ""),
        (10, "resume", ""),
        (12, "suspend", ""),
        (16, "suspend", ""),
        (24, "resume", ""),
    ]
    assert uncompressed == [8, 9, *range(12, 24)]
    assert reasons[0].startswith("the loss of step 6 was ")
    assert "more than 1.5 times the median of " in reasons[0]
    assert reasons[2].endswith("; sent as it is for 4 steps")
    assert reasons[3].startswith("still: the loss of step 14 was ")
    assert reasons[3].endswith("; sent as it is for 8 steps")


# With nothing to do, and with recomputation


def check_bit_equality(rank: int) -> None:
    """Of a run that is well to one without the callbacks."""
    stochastic = CodecConfig(rounding="stochastic")
    config = CompressionConfig(min_bytes=0, forward=stochastic, backward=stochastic)
    plain, guarded = FaultyModule(rank), FaultyModule(rank)
    fit(plain, [], max_steps=4, compression=config)
    guard = CompressionGuard(every_n_steps=1, max_relative_error=0.1)
    events, outcomes = fit(guarded, [guard, CompressionSchedule()], max_steps=4, compression=config)
    assert events.events == []
    assert outcomes.uncompressed_at(DOWN) == []
    assert guarded.losses == plain.losses
    assert same_weights(guarded, plain)


def check_off(rank: int) -> None:
    """Compression off: there is nothing to guard or to schedule, and nothing is done."""
    off, stock = TinyModule(), TinyModule()
    fit(stock, [], max_steps=3, compression=None)
    callbacks = [CompressionGuard(every_n_steps=1), CompressionSchedule(uncompressed_first=2, recipes={2: "taco"})]
    with captured_messages() as lines:
        events, _ = fit(off, callbacks, max_steps=3, compression=None)
    assert events.events == []
    assert same_weights(off, stock)
    assert any("CompressionSchedule does nothing" in line for line in lines) == (rank == 0)


def check_recomputation(rank: int) -> None:
    """A recomputed forward goes as its forward did, and is not measured again."""
    modules = []
    for is_checkpointing in (False, True):
        guard = CompressionGuard(every_n_steps=1, retry_after_steps=2, spike_factor=None)
        module = FaultyModule(rank, cancel_at=[1], checkpointing=is_checkpointing)
        with set_checkpoint_early_stop(False):
            events, outcomes = fit(module, [guard], max_steps=6)
        assert events.changes == [(2, "suspend", DOWN), (4, "resume", DOWN)]
        assert [len(found[DOWN]) for found in outcomes.outcomes.values()] == [1] * 6
        modules.append(module)
    assert same_weights(*modules)


def test_a_run_that_is_well_is_left_alone_and_a_recomputation_agrees_with_its_forward() -> None:
    def body(rank: int) -> None:
        check_bit_equality(rank)
        check_off(rank)
        check_recomputation(rank)

    run_forked(2, body)


def test_a_change_within_a_step_waits_for_the_next() -> None:
    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model, tokens = make_model(mesh).eval(), make_tokens()
        with installed_session(mesh, module=model) as session:
            expected = train_step(model, tokens, session)[1]
            asked = [False]

            def ask(exchange: Any, site: Site, codec: CodecConfig) -> None:
                if not asked[0]:
                    asked[0] = True
                    session.suspend("guard", {None: "within the step"})
                    session.switch(CompressionConfig(forward=CodecConfig(element="int4"), min_bytes=0))

            session.observers.append(ask)
            assert all(map(torch.equal, train_step(model, tokens, session)[1], expected))
            assert session.traffic.stock_reasons() == {}
            session.observers.clear()
            stock = train_step(model, tokens)[1]
            assert all(map(torch.equal, train_step(model, tokens, session)[1], stock))
            assert set(session.traffic.stock_reasons()) == {"suspended by guard: within the step"}
            assert session.are_all_suspended
            # Two owners: resumed by one, still held by the other.
            session.suspend("schedule", {None: "early"})
            session.suspend("guard", {})
            session.traffic.clear()
            train_step(model, tokens, session)
            assert set(session.traffic.stock_reasons()) == {"suspended by schedule: early"}
            assert session.nothing_compressed_reason() is None, "it was asked for, so there is nothing to warn of"
            session.suspend("schedule", {})
            session.traffic.clear()
            train_step(model, tokens, session)
            assert session.traffic.stock_reasons() == {}

    run_forked(2, body)


def test_an_exchange_in_a_graph_follows_suspensions_and_switches_when_it_runs() -> None:
    """The op that tracing puts into a graph, run by hand: `tests/test_seam.py` compiles."""

    def body(rank: int) -> None:
        tensor = torch.randn(8, 128, generator=torch.Generator().manual_seed(rank))
        exchange, site = Exchange(kind="all_reduce", tensor=tensor), Site("", "forward", False)
        session = CompressionSession(EVERYTHING, dist.group.WORLD)  # type: ignore[arg-type]
        seen: list[Site] = []
        session.trial_observers.append(lambda exchange, site, codec: seen.append(site))

        def run() -> tuple[Tensor, set[str]]:
            session.traffic.clear()
            with session.scope(is_new_step=True):
                result = trace_exchange(exchange, session)
            assert result is not None, "left out of the graph"
            assert {key[:3] for key in session.traffic.counts} == {("", "forward", "all_reduce")}
            return result, {key.outcome for key in session.traffic.counts}

        def sent_by(codec: CodecConfig) -> Tensor:
            return exchange.run(codec, session.group, session.seed("all_reduce", site))

        stock = tensor.clone()
        dist.all_reduce(stock)
        session.suspend("guard", {None: "while it is traced"})
        result, outcomes = run()
        assert torch.equal(result, stock)
        assert outcomes == {"suspended by guard: while it is traced"}
        # All exchanges of one direction and kind are one site without a name.
        session.suspend("guard", {SiteKey("", "backward", "all_reduce"): "others"})
        session.switch(CompressionConfig(forward=CodecConfig(element="int4", reshape="calibrated"), min_bytes=0))
        result, outcomes = run()
        assert torch.equal(result, sent_by(CodecConfig(element="int4")))
        assert outcomes == {"compressed"}
        assert seen == [site]
        session.suspend("guard", {SiteKey("", "forward", "all_reduce"): "these"})
        assert torch.equal(run()[0], stock)
        # What was traced under settings for all, and runs under settings by name.
        session.suspend("guard", {})
        run()
        session.switch(CompressionConfig(exclude=["head"], min_bytes=0))
        with session.scope(is_new_step=True):
            graph = (tensor, "all_reduce", "sum", 0, 0, session.group.group_name, 2, "forward")
            assert torch.equal(exchange_op(*graph), stock)

    run_forked(2, body)


# Checkpoints


def test_a_resumed_run_decides_as_the_unbroken_one(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        def run(max_steps: int, **settings: Any) -> Any:
            guard = CompressionGuard(every_n_steps=2, retry_after_steps=3, spike_window=3, pause_steps=2)
            module = FaultyModule(rank, cancel_at=range(2, 6), spike_at=[7], lr=1e-3)
            events, outcomes = fit(module, [guard], max_steps=max_steps, num_samples=4, **settings)
            return module, events.changes, outcomes.uncompressed_at(DOWN)

        whole, changes, uncompressed = run(14, folder=tmp_path, save_every=4)
        # Held back; with a spike whose loss is still to be read.
        for step in (4, 8):
            resumed, later_changes, later_uncompressed = run(14, resume_from=tmp_path / f"step={step}.ckpt")
            assert later_changes == [change for change in changes if change[0] > step], step
            assert later_uncompressed == [each for each in uncompressed if each >= step], step
            assert resumed.losses == whole.losses[step:], step
            assert same_weights(resumed, whole)
        return changes

    changes, others = run_forked(2, body)
    assert changes == others
    assert changes == [
        (3, "suspend", DOWN),
        (6, "suspend", DOWN),
        (9, "suspend", ""),
        (11, "resume", ""),
        (12, "resume", DOWN),
    ]
    state = torch.load(tmp_path / "step=8.ckpt", weights_only=True)["callbacks"]["CompressionGuard"]
    assert state["pending"][0] == 7


# In a Fabric script


def test_in_a_fabric_script_it_is_driven_by_hand() -> None:
    from lightning.fabric import Fabric

    from tests.guarded_runs import EventRecorder

    def losses_of(rank: int) -> Iterator[float]:
        yield from (1.0, 1.0, 1.0, 5.0 if rank == 1 else 1.0, 1.0, 1.0, 1.0)

    def body(rank: int) -> Any:
        def parallelize(model: Any, mesh: Any) -> Any:
            return model

        def run(guard: CompressionGuard, steps: range) -> Any:
            strategy = FabricStrategy(parallelize, COMPRESSION)
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=(recorder := EventRecorder()))
            fabric.launch()
            model = fabric.setup_module(make_model(strategy.device_mesh["tensor_parallel"]))
            guard.attach(fabric)
            losses, outcomes = list(losses_of(rank)), []
            for step in steps:
                strategy.compression.traffic.clear()
                guard.start_step(step)
                output: Tensor = model(make_tokens()).square().sum()
                fabric.backward(output)
                guard.end_step(step, losses[step])
                outcomes.append("compressed" in {key.outcome for key in strategy.compression.traffic.counts})
            strategy.teardown()
            return recorder.changes, outcomes

        def make_guard() -> CompressionGuard:
            return CompressionGuard(max_relative_error=1.0, spike_window=2, pause_steps=1)

        first, second = make_guard(), make_guard()
        changes, outcomes = run(first, range(4))
        second.load_state_dict(first.state_dict())
        more_changes, more_outcomes = run(second, range(4, 7))
        # The same object from step 0 on is a new run.
        whole = run(second, range(7))
        assert (changes + more_changes, outcomes + more_outcomes) == whole
        return whole

    for changes, outcomes in run_forked(2, body):
        # Only rank 1 had a spike, in step 3: all are back in step 5.
        assert changes == [(5, "suspend", ""), (6, "resume", "")]
        assert outcomes == [True, True, True, True, True, False, True]


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0 is not a number of steps; use an integer from 1 up"),
        ({"retry_after_steps": 1.5}, "retry_after_steps=1.5 is not a number of steps; use an integer from 1 up"),
        ({"spike_window": True}, "spike_window=True is not a number of steps; use an integer from 1 up"),
        ({"pause_steps": -1}, "pause_steps=-1 is not a number of steps; use an integer from 1 up"),
        ({"max_relative_error": 0}, "max_relative_error=0 is not a relative error; use a number above 0"),
        ({"max_relative_error": math.nan}, "max_relative_error=nan is not a relative error"),
        ({"max_relative_error": "1"}, "max_relative_error='1' is not a relative error"),
        ({"max_relative_error": {"a": -1.0}}, r"max_relative_error\['a'\]=-1.0 is not a relative error"),
        ({"retry_factor": 0}, "retry_factor=0 is not a share of the bound; use a number above 0, up to 1"),
        ({"retry_factor": 1.1}, "retry_factor=1.1 is not a share of the bound"),
        ({"spike_factor": 1}, "spike_factor=1 is not a multiple of the median loss; use a number above 1, or None"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressionGuard(**arguments)
