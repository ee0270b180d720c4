"""Settings of stored activations, and the bits that a pipeline leaves to its stages."""

from typing import Any

import pytest

from lightning_taco.activations import (
    ActivationConfig,
    live_micro_batches,
    pipeline_bits,
    resolve_activations,
    stage_bits,
)
from lightning_taco.config import CodecConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"element": "int3"}, "element='int3' is no format of stored activations; use one of 'fp4', 'nf4', 'int4', "),
        ({"element": "e4m3"}, "element='e4m3' is no format of stored activations"),
        ({"block_size": 100}, "block_size=100 is not supported; use one of 32, 64, 128, 256, 512"),
        ({"rounding": "up"}, "rounding='up' is not supported; use one of 'nearest', 'stochastic'"),
        ({"levels": "gaussian"}, "levels='gaussian' fits rotated integers of 3 to 6 bits"),
        ({"min_numel": -1}, "min_numel=-1 is not a number of values; use an integer from 0 up"),
        ({"min_numel": 1.5}, "min_numel=1.5 is not a number of values"),
        ({"min_numel": True}, "min_numel=True is not a number of values"),
        ({"exclude": "head"}, r"exclude='head' is one string; use a list of patterns, \['head'\]"),
        (
            {"weight_gradient": "fast"},
            "weight_gradient='fast' is not supported; use one of 'auto', 'fused', 'separate'",
        ),
        (
            {"weight_gradient": "fused", "element": "int8"},
            r"weight_gradient='fused' does not fit messages of int8, .*: a matrix product reads 'fp4', 'nf4' and "
            "'int4' in blocks of 64 or 128 without rotation. Change those, or use weight_gradient='separate'",
        ),
        (
            {"weight_gradient": "fused", "block_size": 256},
            "weight_gradient='fused' does not fit messages of fp4, block",
        ),
        ({"weight_gradient": "fused", "rotation": True}, "weight_gradient='fused' does not fit messages of fp4, block"),
        ({"hooked": [3]}, r"hooked=\[3\] is not a list of patterns; use \[\] for none"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationConfig(**fields)


def test_recipes_and_mappings() -> None:
    assert resolve_activations("agoq") == ActivationConfig()
    assert resolve_activations("none") is resolve_activations(None) is None
    config = ActivationConfig(element="nf4", exclude=["head"])
    assert resolve_activations(config) is config
    assert resolve_activations({"element": "nf4", "exclude": ("head",)}) == config
    with pytest.raises(ValueError, match="activations='fp4' is not a recipe; use 'agoq', 'none', or an Activation"):
        resolve_activations("fp4")
    with pytest.raises(ValueError, match="activations has no field 'bits'; it has 'element', 'block_size'"):
        resolve_activations({"bits": 4})
    with pytest.raises(TypeError, match="activations=4 has type int; use 'agoq', None, or an ActivationConfig"):
        resolve_activations(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("element", "bits"), [("fp4", 4.25), ("nf4", 4.25), ("int4", 4.25), ("int5", 5.25), ("int6", 6.25), ("int8", 8.25)]
)
def test_the_scales_are_counted_in_the_bits(element: Any, bits: float) -> None:
    assert ActivationConfig(element=element).bits_per_value == bits
    assert ActivationConfig(element=element, block_size=64).bits_per_value == bits + 0.25


def test_the_defaults_are_the_papers() -> None:
    config = ActivationConfig()
    assert config.codec == CodecConfig(element="fp4", block_size=128, rotation=False)
    assert str(config) == "fp4, block 128, no rotation, 4.25 bits a value"


def test_bits_choose_an_element() -> None:
    config = ActivationConfig(element="nf4", min_numel=7)
    assert config.with_bits(4) is config
    assert [config.with_bits(bits).element for bits in (5, 6, 8)] == ["int5", "int6", "int8"]
    assert config.with_bits(6).min_numel == 7
    fused = ActivationConfig(element="nf4", weight_gradient="fused")
    assert [fused.with_bits(bits).weight_gradient for bits in (4, 5, 8)] == ["fused", "separate", "separate"]
    assert ActivationConfig(weight_gradient="separate").with_bits(6).weight_gradient == "separate"
    rotated = ActivationConfig(element="int4", rotation=True, levels="gaussian")
    assert rotated.with_bits(6).levels == "gaussian"
    assert rotated.with_bits(8).levels == "uniform"
    assert rotated.with_bits(8).with_bits(4).element == "int4"
    with pytest.raises(ValueError, match="bits=7 has no format of stored activations; use 4, 5, 6 or 8"):
        config.with_bits(7)


def test_patterns_reach_modules_inside() -> None:
    config = ActivationConfig(exclude=["blocks.0", "*head"], hooked=["*.norm"])
    assert config.excludes("blocks.0.mlp.up")
    assert not config.excludes("blocks.01")
    assert config.excludes("model.head")
    assert config.hooks("blocks.1.norm")
    assert not config.hooks("blocks.1")


def test_live_micro_batches_are_the_papers() -> None:
    assert [live_micro_batches(4, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [live_micro_batches(4, stage, "interleaved", 2) for stage in range(4)] == [11, 9, 7, 5]
    assert [live_micro_batches(2, stage, "interleaved", 3) for stage in range(2)] == [7, 5]
    assert [live_micro_batches(4, stage, num_micro_batches=2) for stage in range(4)] == [2, 2, 2, 1]


def test_bits_of_four_stages() -> None:
    assert pipeline_bits(4) == (4, 5, 8, 8)
    assert pipeline_bits(4, "interleaved", 2) == (4, 4, 6, 8)
    assert pipeline_bits(4, "interleaved", 2, rounding="nearest") == (4, 5, 6, 8)  # the paper's
    assert pipeline_bits(4, num_micro_batches=1) == (4, 4, 4, 4)
    assert pipeline_bits(1) == (4,)


@pytest.mark.parametrize("num_stages", range(1, 17))
@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4)])
def test_no_stage_ever_holds_more_than_the_first(num_stages: int, schedule: Any, num_chunks: int) -> None:
    bits = pipeline_bits(num_stages, schedule, num_chunks)
    live = [live_micro_batches(num_stages, stage, schedule, num_chunks) for stage in range(num_stages)]
    budget = live[0] * 4
    assert all(count * bit <= budget for count, bit in zip(live, bits, strict=True))
    assert bits[0] == 4
    assert list(bits) == sorted(bits)
    assert set(bits) <= {4, 5, 6, 8}
    # None could take the next format.
    for count, bit in zip(live, bits, strict=True):
        following = {4: 5, 5: 6, 6: 8}.get(bit)
        assert following is None or count * following > budget


def test_the_papers_rounding_may_hold_more() -> None:
    live = [live_micro_batches(4, stage, "interleaved", 2) for stage in range(4)]
    bits = pipeline_bits(4, "interleaved", 2, rounding="nearest")
    assert [count * bit for count, bit in zip(live, bits, strict=True)] == [44, 45, 42, 40]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0, "stage": 0}, "num_stages=0 is not a number of stages; use an integer from 1 up"),
        ({"num_stages": 4, "stage": 4}, "stage=4 is not one of 4 stages; use 0 to 3"),
        ({"num_stages": 4, "stage": 0, "schedule": "gpipe"}, "schedule='gpipe' is not supported; use one of '1f1b', "),
        ({"num_stages": 4, "stage": 0, "num_chunks": 2}, "num_chunks=2 does not fit schedule='1f1b'; use 1 for"),
        ({"num_stages": 4, "stage": 0, "num_micro_batches": 0}, "num_micro_batches=0 is not a number of them"),
        ({"num_stages": 4, "stage": 0, "rounding": "up"}, "rounding='up' is not supported; use one of 'floor', "),
    ],
)
def test_impossible_pipelines_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stage_bits(**arguments)
