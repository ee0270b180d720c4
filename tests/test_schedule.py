"""`CompressionSchedule`: what holds in which step, on all ranks, in a Trainer and by hand, and after a resume.

Trainers run in forked gloo ranks, several to a group. What a suspended or switched session does within a step is the
matter of `tests/test_guard.py`.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from lightning.fabric import Fabric

from lightning_taco.callbacks import CompressionGuard, CompressionSchedule
from lightning_taco.callbacks.compression_schedule import Phase
from lightning_taco.config import RECIPES, CodecConfig, CompressionConfig
from lightning_taco.dtensor.channel_order import CALIBRATION_STEPS
from lightning_taco.dtensor.session import CompressionSession
from lightning_taco.fabric import TacoTPStrategy as FabricStrategy
from tests.guarded_runs import COMPRESSION, DOWN, EventRecorder, FaultyModule, fit
from tests.lightning_models import (
    TinyModule,
    captured_messages,
    full_weights,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.models import installed_session, make_model, make_tokens, tensor_parallel_mesh, train_step
from tests.ranks import run_forked

pytestmark = pytest.mark.usefixtures("warm_lightning")

INT4 = CodecConfig(element="int4")
LAST = "last steps, from 9 on"


class CodecRecorder(L.Callback):
    """Keeps the element of the codec of each step's forward, by step; none where nothing is compressed."""

    def __init__(self) -> None:
        self.elements: dict[int, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        def observe(exchange: Any, site: Any, codec: CodecConfig) -> None:
            if site.direction == "forward":
                self.elements[trainer.global_step] = codec.element

        trainer.strategy.session.observers.append(observe)  # type: ignore[attr-defined]


def same_weights(one: Any, other: Any) -> bool:
    others = full_weights(other)
    return all(torch.equal(value, others[name]) for name, value in full_weights(one).items())


def by_step(step: int) -> CompressionConfig | str | None:
    """Whole settings, the name of a recipe, nothing; each for two steps."""
    settings = (CompressionConfig(forward=INT4, backward=None, min_bytes=0), "taco", None)
    return settings[step // 2 % 3]


def test_first_and_last_steps_are_uncompressed_and_recipes_hold_between_them() -> None:
    def body(rank: int) -> Any:
        codecs = CodecRecorder()
        schedule = CompressionSchedule(
            uncompressed_first=2, uncompressed_last=0.25, recipes={3: "taco", 5: "none", 7: "balanced"}
        )
        with captured_messages() as lines:
            events, outcomes = fit(FaultyModule(rank), [schedule, codecs], max_steps=12)
        assert not any("compressed nothing" in line for line in lines)
        if rank == 0:
            first = [line for line in lines if "first step:" in line]
            assert len(first) == 1, "the first step that compresses is reported, though it is the third"
            assert [line for line in lines if "schedule:" in line] == [str(event) for event in events.events]
            assert any("forward: int6, block 128, Hadamard, Gaussian levels, 6.25 bits" in line for line in lines)
        reasons = {step: found[DOWN] for step, found in outcomes.outcomes.items() if found[DOWN] != {"compressed"}}
        texts = [(event.step, event.action, event.reason) for event in events.events]
        return codecs.elements, reasons, texts

    one, other = run_forked(2, body)
    assert one == other
    elements, reasons, texts = one
    assert elements == {2: "int8", 3: "e4m3", 4: "e4m3", 7: "int6", 8: "int6"}
    first, none, last = (f"suspended by schedule: {why}" for why in ("first 2 steps", "recipe 'none'", LAST))
    assert reasons == {0: {first}, 1: {first}, 5: {none}, 6: {none}, 9: {last}, 10: {last}, 11: {last}}
    assert texts == [
        (0, "suspend", "first 2 steps"),
        (2, "resume", "no longer first 2 steps"),
        (3, "switch", "recipe 'taco' from now on"),
        (5, "suspend", "recipe 'none'"),
        (7, "switch", "recipe 'balanced' from now on"),
        (7, "resume", "no longer recipe 'none'"),
        (9, "suspend", LAST),
    ]


def test_a_function_of_the_step_across_resumes_and_beside_a_guard(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        def run(**settings: Any) -> Any:
            codecs, module = CodecRecorder(), FaultyModule(rank, cancel_at=[1])
            guard = CompressionGuard(every_n_steps=1, retry_after_steps=6, max_relative_error=0.5, spike_factor=None)
            schedule = CompressionSchedule(by_step=by_step)
            events, outcomes = fit(
                module, [schedule, guard, codecs], max_steps=10, num_samples=4, save_every=3, **settings
            )
            reasons = {step: "; ".join(found[DOWN]) for step, found in outcomes.outcomes.items()}
            return module, codecs.elements, reasons, [(each.step, each.source, each.action) for each in events.events]

        whole, elements, reasons, events = run(folder=tmp_path)
        # Within a recipe, which the resumed strategy does not have; at the start of settings.
        for step in (3, 6):
            resumed, later_elements, later_reasons, later_events = run(resume_from=tmp_path / f"step={step}.ckpt")
            assert later_elements == {at: element for at, element in elements.items() if at >= step}
            assert later_reasons == {at: reason for at, reason in reasons.items() if at >= step}
            assert later_events == [event for event in events if event[0] >= step]
            assert resumed.losses == whole.losses[step:]
            assert same_weights(resumed, whole)
        return elements, reasons, events

    one, other = run_forked(2, body)
    assert one == other
    elements, reasons, events = one
    guard, schedule = "suspended by guard: error above its bound", "suspended by schedule: recipe 'none'"
    # The guard holds the site from step 2 to 7, and the schedule all in steps 4 and 5.
    assert elements == {0: "int4", 1: "int4", 8: "e4m3", 9: "e4m3"}
    assert reasons == {
        **dict.fromkeys((0, 1, 8, 9), "compressed"),
        **dict.fromkeys((2, 3, 6, 7), guard),
        **dict.fromkeys((4, 5), schedule),
    }
    assert events == [
        (0, "schedule", "switch"),
        (2, "guard", "suspend"),
        (2, "schedule", "switch"),
        (4, "schedule", "suspend"),
        (6, "schedule", "switch"),
        (6, "schedule", "resume"),
        (8, "guard", "resume"),
        (8, "schedule", "switch"),
    ]


def test_in_a_fabric_script_it_is_driven_by_hand() -> None:
    def body(rank: int) -> Any:
        strategy = FabricStrategy(lambda model, mesh: model, COMPRESSION)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=(recorder := EventRecorder()))
        fabric.launch()
        model = fabric.setup_module(make_model(strategy.device_mesh["tensor_parallel"]))
        with pytest.raises(ValueError, match=r"uncompressed_last=1 depends on .* not known; give Compression"):
            CompressionSchedule(uncompressed_last=1).attach(fabric)
        schedule = CompressionSchedule(uncompressed_first=0.25, uncompressed_last=1, total_steps=5)
        schedule.attach(fabric)
        found = []
        for step in range(5):
            strategy.compression.traffic.clear()
            schedule.start_step(step)
            fabric.backward(model(make_tokens()).square().sum())
            schedule.end_step(step)
            found.append("compressed" in {key.outcome for key in strategy.compression.traffic.counts})
        strategy.teardown()
        return found, recorder.changes

    found = [False, False, True, True, False]
    changes = [(0, "suspend", ""), (2, "resume", ""), (4, "suspend", "")]
    assert run_forked(2, body) == [(found, changes)] * 2


# What a switch does to a session


def test_switched_settings_hold_from_the_next_step_on_and_orders_are_calibrated_anew() -> None:
    def calibrated(**codec: Any) -> CompressionConfig:
        settings = CodecConfig(reshape="calibrated", block_size=32, **codec)
        return CompressionConfig(forward=settings, backward=settings, min_bytes=0)

    def body(rank: int) -> None:
        mesh = tensor_parallel_mesh()
        model, tokens, lines = make_model(mesh).eval(), make_tokens(), list[str]()
        with installed_session(mesh, COMPRESSION, model) as session:
            session._inform = lines.append
            assert session.channel_orders is None
            train_step(model, tokens, session)
            session.switch(calibrated())
            # Calibrated while suspended: the values are the same.
            session.suspend("schedule", {None: "calibrating"})
            for _ in range(CALIBRATION_STEPS + 1):
                train_step(model, tokens, session)
            session.suspend("schedule", {})
            expected = train_step(model, tokens, session)[1]
            assert session.channel_orders is not None
            orders = session.channel_orders
            assert len(orders.orders) > 0
            assert len(lines) == 1
            # Other sizes, same codecs: the orders stay. Other codecs: they are looked for anew.
            session.switch(CompressionConfig(forward=calibrated().forward, backward=calibrated().backward, min_bytes=1))
            train_step(model, tokens, session)
            assert session.channel_orders is orders
            state = session.state_dict()
            session.switch(calibrated(element="int6"))
            train_step(model, tokens, session)
            assert session.channel_orders is not orders
            assert not session.channel_orders.is_calibrated
            session.switch(COMPRESSION)
            train_step(model, tokens, session)
            assert session.channel_orders is None
        # A resumed session is opened with its own settings, and has the orders back when it is switched.
        with installed_session(mesh, COMPRESSION, model) as session:
            warnings: list[str] = []
            session._warn = warnings.append
            session.load_state_dict(state)
            session.switch(CompressionConfig(forward=calibrated().forward, backward=calibrated().backward, min_bytes=1))
            found = train_step(model, tokens, session)[1]
            assert all(map(torch.equal, found, expected))
            assert warnings == []

    run_forked(2, body)


def test_ranks_agree_on_auto_before_they_switch_to_it() -> None:
    def body(rank: int) -> None:
        from lightning_taco.strategies import compression as module

        asked = []
        module.agree_on_element = lambda group, device: asked.append(group) or "int8"  # type: ignore[assignment,func-returns-value]
        strategy = FabricStrategy(lambda model, mesh: model, COMPRESSION)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(make_model(strategy.device_mesh["tensor_parallel"]))
        assert asked == []
        auto = CodecConfig(element="auto")
        for _ in range(2):
            strategy.compression.switch(CompressionConfig(forward=auto, backward=INT4, min_bytes=0))
            model(make_tokens())
        assert isinstance(strategy.session, CompressionSession)
        assert asked == [strategy.session.group]
        assert strategy.session.codec_of("blocks.0", "forward") == CodecConfig(element="int8")
        with pytest.raises(ValueError, match="compresses nothing, so there is nothing to switch to"):
            strategy.compression.switch(CompressionConfig(forward=None, backward=None))
        strategy.teardown()
        dist.barrier()

    run_forked(2, body)


# Arguments, without a run


def test_phase_is_a_function_of_the_step() -> None:
    schedule = CompressionSchedule(recipes={10: "int8", 5: "taco"})
    assert [schedule.phase(step).settings for step in (0, 4, 5, 9, 10, 99)] == [
        None,
        None,
        "taco",
        "taco",
        *["int8"] * 2,
    ]
    assert schedule.phase(0) == Phase()
    given = CompressionConfig(exclude=["head"])
    phase = CompressionSchedule(by_step=lambda step: given).phase(3)
    assert phase.settings is given
    assert phase.name == f"forward {given.forward}; backward {given.backward}; min_bytes=1048576; exclude=('head',)"
    assert RECIPES["none"] is None
    with pytest.raises(ValueError, match=r"compression='fast' is not a recipe"):
        CompressionSchedule(by_step=lambda step: "fast").phase(0)


def test_it_can_be_written_in_yaml() -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(CompressionSchedule, "schedule")
    parser.add_class_arguments(CompressionGuard, "guard")
    text = "{schedule: {uncompressed_first: 0.05, uncompressed_last: 100, recipes: {1000: balanced, 5000: none}}, "
    settings = parser.parse_string(text + "guard: {max_relative_error: {'*.mlp': 0.1}, spike_factor: null}}")
    made = getattr(parser, "instantiate", parser.instantiate_classes)(settings)  # its name from jsonargparse 4.49 on
    assert (made.schedule.uncompressed_first, made.schedule.uncompressed_last) == (0.05, 100)
    assert made.schedule.recipes == {1000: "balanced", 5000: "none"}
    assert made.guard.max_relative_error == {"*.mlp": 0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"uncompressed_first": -1},
            "uncompressed_first=-1 is neither a number of steps nor a share of the run; use an",
        ),
        ({"uncompressed_first": True}, "uncompressed_first=True is neither"),
        ({"uncompressed_last": 1.5}, "uncompressed_last=1.5 is neither .* or a float from 0.0 to 1.0"),
        ({"uncompressed_last": None}, "uncompressed_last=None is neither"),
        ({"recipes": ["taco"]}, r"recipes=\['taco'\] is not a mapping of steps to recipes; use {} for none"),
        ({"recipes": {"a": "taco"}}, "recipes has the key 'a', which is not a step; use integers from 0 up"),
        ({"recipes": {-1: "taco"}}, "recipes has the key -1, which is not a step"),
        ({"recipes": {3: "fast"}}, r"recipes\[3\]='fast' is unknown; use one of 'default', 'taco'"),
        ({"recipes": {3: "taco"}, "by_step": by_step}, "recipes={3: 'taco'} and by_step were both given"),
        ({"by_step": 3}, "by_step=3 is not a function; use one that takes a step and gives a recipe"),
        ({"total_steps": 0}, "total_steps=0 is not a number of steps; use an integer from 1 up"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompressionSchedule(**arguments)


def test_a_run_without_an_end_and_another_strategy_are_refused() -> None:
    def trainer(callback: L.Callback) -> L.Trainer:
        return L.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )

    for callback in (CompressionSchedule(), CompressionGuard()):
        name = type(callback).__name__
        with pytest.raises(TypeError, match=f"{name} watches what TacoTPStrategy compresses, but the Trainer's"):
            trainer(callback).fit(TinyModule(parallelize=False), range(1))  # type: ignore[arg-type]

    def body(rank: int) -> None:
        schedule = CompressionSchedule(uncompressed_first=0.5)
        with pytest.raises(ValueError, match=r"uncompressed_first=0.5 depends .*; set trainer.max_steps, or give"):
            fit(TinyModule(), [schedule], max_steps=-1)

    run_forked(2, body)
