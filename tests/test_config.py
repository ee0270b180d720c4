"""Settings: what is refused and in which words, recipes, rules by module name, and the round trip through YAML."""

import dataclasses
import doctest
import re
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_taco import config as config_module
from lightning_taco.config import (
    BLOCK_SIZES,
    DEFAULT_MIN_BYTES,
    RECIPE_NAMES,
    RECIPES,
    CodecConfig,
    CompressionConfig,
    matches_site,
    resolve_compression,
)

INT8 = CodecConfig(element="int8")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"element": "fp8"},
            "element='fp8' is not supported; use one of 'auto', 'e4m3', 'e5m2', 'int8', 'int7', 'int6', 'int5', "
            "'int4', 'int3', 'fp4', 'nf4'.",
        ),
        (
            {"element": None},
            "element=None is not supported; use one of 'auto', 'e4m3', 'e5m2', 'int8', 'int7', 'int6', 'int5', 'int4', "
            "'int3', 'fp4', 'nf4'.",
        ),
        ({"block_size": 96}, "block_size=96 is not supported; use one of 32, 64, 128, 256, 512, 2048."),
        (
            {"block_size": 2048},
            "block_size=2048 is for values that are not rotated, but rotation=True was given; use rotation=False, or a "
            "block_size of 512 or less.",
        ),
        ({"block_size": 1024}, "block_size=1024 is not supported; use one of 32, 64, 128, 256, 512, 2048."),
        ({"block_size": 0}, "block_size=0 is not supported; use one of 32, 64, 128, 256, 512, 2048."),
        ({"block_size": "128"}, "block_size='128' is not supported; use one of 32, 64, 128, 256, 512, 2048."),
        ({"block_size": 128.0}, "block_size=128.0 is not supported; use one of 32, 64, 128, 256, 512, 2048."),
        ({"block_size": True}, "block_size=True is not supported; use one of 32, 64, 128, 256, 512, 2048."),
        ({"scale_mode": "triple"}, "scale_mode='triple' is not supported; use one of 'merged', 'dual', 'fine'."),
        ({"rotation": 1}, "rotation=1 is not a boolean; use True or False."),
        ({"rotation": "no"}, "rotation='no' is not a boolean; use True or False."),
        (
            {"scale_mode": "dual", "rotation": False},
            "scale_mode='dual' puts one scale before and one after the rotation, but rotation=False was given; "
            "use rotation=True, or scale_mode='merged'.",
        ),
    ],
)
def test_impossible_codec_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        CodecConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"forward": "int8"}, "forward='int8' is neither a CodecConfig nor None; use forward=CodecConfig(...)."),
        ({"backward": 8}, "backward=8 is neither a CodecConfig nor None; use backward=CodecConfig(...)."),
        ({"min_bytes": -1}, "min_bytes=-1 is not a number of bytes; use an integer from 0 up, or 'auto'."),
        ({"min_bytes": 1.5}, "min_bytes=1.5 is not a number of bytes; use an integer from 0 up, or 'auto'."),
        ({"min_bytes": "often"}, "min_bytes='often' is not a number of bytes; use an integer from 0 up, or 'auto'."),
        ({"min_bytes": True}, "min_bytes=True is not a number of bytes; use an integer from 0 up, or 'auto'."),
        ({"exclude": "head"}, "exclude='head' is one string; use a list of patterns, ['head']."),
        (
            {"recipes": {"head": "fp8"}},
            "recipes['head']='fp8' is unknown; use one of 'default', 'taco', 'int8', 'balanced', 'smallest', 'none'.",
        ),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        CompressionConfig(**fields)


@pytest.mark.parametrize("cls", [CodecConfig, CompressionConfig])
def test_settings_are_keyword_only_frozen_and_hashable(cls: Any) -> None:
    first = dataclasses.fields(cls)[0]
    with pytest.raises(TypeError, match="positional argument"):
        cls(getattr(cls(), first.name))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(cls(), first.name, None)
    assert cls() == cls()
    assert len({cls(), cls()}) == 1


def test_hash_agrees_with_equality() -> None:
    rules = {"a": "int8", "b": "none"}
    settings = CompressionConfig(recipes=rules, exclude=["x"])
    assert hash(settings) == hash(CompressionConfig(recipes=dict(rules), exclude=("x",)))
    # The order of the rules decides which one wins; whatever is equal must have one hash.
    reordered = CompressionConfig(recipes=dict(reversed(rules.items())), exclude=["x"])
    assert settings != reordered or hash(settings) == hash(reordered)
    assert settings != CompressionConfig(recipes=rules)


def test_settings_keep_no_reference_to_the_callers_collections() -> None:
    rules, patterns = {"a": "int8"}, ["x"]
    settings = CompressionConfig(recipes=rules, exclude=patterns)
    rules["b"] = "none"
    patterns.append("y")
    assert settings.recipes == {"a": "int8"}
    assert settings.exclude == ("x",)


def test_defaults() -> None:
    codec = CodecConfig()
    assert (codec.element, codec.block_size, codec.scale_mode, codec.rotation) == ("int8", 128, "merged", True)
    assert (codec.levels, codec.rounding, codec.reshape) == ("uniform", "nearest", "natural")
    settings = CompressionConfig()
    assert (settings.forward, settings.backward) == (codec, codec)
    assert settings.min_bytes == DEFAULT_MIN_BYTES == 1024 * 1024
    assert (settings.exclude, settings.recipes, settings.during_validation) == ((), {}, False)


def test_bits_per_value() -> None:
    for element in ("auto", "e4m3", "int8"):
        for block_size in BLOCK_SIZES:
            merged = CodecConfig(element=element, block_size=block_size)
            dual = CodecConfig(element=element, block_size=block_size, scale_mode="dual")
            assert merged.bits_per_value == 8 + 32 / block_size
            assert dual.bits_per_value == 8 + 64 / block_size
    assert CodecConfig().bits_per_value == 8.25
    assert RECIPES["taco"].forward.bits_per_value == 8.5


def test_resolved_replaces_only_auto() -> None:
    auto = CodecConfig(element="auto", block_size=64, scale_mode="dual")
    assert auto.resolved("int8") == CodecConfig(element="int8", block_size=64, scale_mode="dual")
    assert auto.element == "auto"
    assert CodecConfig(element="e4m3").resolved("int8").element == "e4m3"


def test_codec_says_what_it_is() -> None:
    assert str(CodecConfig(element="e4m3")) == "e4m3, block 128, Hadamard"
    assert str(CodecConfig(element="int8", block_size=32, rotation=False)) == "int8, block 32, no rotation"
    assert str(CodecConfig(element="auto", scale_mode="dual")) == "auto, block 128, Hadamard, dual scale"
    assert str(CodecConfig(scale_mode="fine", reshape="calibrated")) == (
        "int8, block 128, Hadamard, fine scale, calibrated channel order"
    )
    assert str(CodecConfig(element="int4", levels="gaussian", rounding="stochastic")) == (
        "int4, block 128, Hadamard, Gaussian levels, stochastic rounding"
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"levels": "nf4"}, "levels='nf4' is not supported; use one of 'uniform', 'gaussian'."),
        ({"reshape": True}, "reshape=True is not supported; use one of 'natural', 'calibrated'."),
        ({"element": "int8", "levels": "gaussian"}, "use one of 'int6', 'int5', 'int4', 'int3' with rotation=True"),
        ({"element": "int4", "levels": "gaussian", "rotation": False}, "rotation=False were given"),
        ({"scale_mode": "fine", "block_size": 32}, "block_size=32 were given"),
        ({"scale_mode": "fine", "rotation": False}, "use rotation=True and a block_size of 64 or more"),
    ],
)
def test_modes_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        CodecConfig(**fields)


def test_recipes() -> None:
    assert tuple(RECIPES) == RECIPE_NAMES
    assert RECIPES["default"] == CompressionConfig()
    paper = CodecConfig(element="e4m3", scale_mode="dual")
    assert RECIPES["taco"] == CompressionConfig(forward=paper, backward=paper)
    assert RECIPES["int8"] == CompressionConfig(forward=INT8, backward=INT8)
    assert RECIPES["none"] is None


@pytest.mark.parametrize(("name", "mean_bits"), [("balanced", 5.25), ("smallest", 4.25)])
def test_recipes_of_few_bits_have_no_bias_backward(name: str, mean_bits: float) -> None:
    recipe = RECIPES[name]
    assert recipe is not None
    assert recipe.forward is not None
    assert recipe.backward is not None
    assert (recipe.forward.bits_per_value + recipe.backward.bits_per_value) / 2 == mean_bits
    assert recipe.backward.rounding == "stochastic"


@pytest.mark.parametrize(
    ("pattern", "site", "expected"),
    [
        ("blocks.3", "blocks.3", True),
        ("blocks.3", "blocks.3.mlp.down", True),
        ("blocks.3", "blocks.31", False),
        ("blocks.3", "blocks.31.mlp", False),
        ("blocks.3", "model.blocks.3", False),
        ("*.blocks.3", "model.blocks.3.mlp", True),
        ("*blocks.3", "blocks.3.mlp", True),
        ("*lm_head", "model.lm_head", True),
        ("*lm_head", "lm_head", True),
        ("*lm_head", "model.lm_head_norm", False),
        ("layers.0.*", "layers.0.attention", True),
        ("layers.0.*", "layers.0", False),
        ("layers.0.*", "layers.00.attention", False),
        ("*.mlp", "blocks.3.mlp.down", True),
        ("blocks.[0-3]", "blocks.2.mlp", True),
        ("blocks.[0-3]", "blocks.4.mlp", False),
        ("blocks.?", "blocks.12.mlp", False),
        ("Blocks.3", "blocks.3", False),
        ("*", "", True),
        ("*", "anything.at.all", True),
        ("", "blocks", False),
    ],
)
def test_a_pattern_matches_a_module_or_its_ancestor(pattern: str, site: str, expected: bool) -> None:
    assert matches_site(pattern, site) is expected


def test_excluded_sites_have_no_codec_in_either_direction() -> None:
    settings = CompressionConfig(exclude=["blocks.3", "*head"], recipes={"blocks.*": "int8"})
    for direction in ("forward", "backward"):
        assert settings.codec_for("blocks.3.mlp", direction) is None
        assert settings.codec_for("model.head", direction) is None
        assert settings.codec_for("blocks.31.mlp", direction) == INT8
        assert settings.codec_for("embedding", direction) == CodecConfig()


def test_directions_are_settings_of_their_own() -> None:
    settings = CompressionConfig(forward=None, backward=INT8)
    assert settings.codec_for("mlp", "forward") is None
    assert settings.codec_for("mlp", "backward") == INT8


def test_the_first_matching_recipe_wins() -> None:
    rules = {"blocks.3.mlp": "none", "blocks.3": "int8", "blocks.*": "taco"}
    settings = CompressionConfig(forward=None, backward=None, recipes=rules)
    assert settings.codec_for("blocks.3.mlp.down", "forward") is None
    assert settings.codec_for("blocks.3.attention", "forward") == INT8
    assert settings.codec_for("blocks.31.mlp", "backward") == RECIPES["taco"].backward
    assert settings.codec_for("head", "forward") is None
    reversed_rules = dict(reversed(rules.items()))
    settings = CompressionConfig(recipes=reversed_rules)
    assert settings.codec_for("blocks.3.mlp.down", "forward") == RECIPES["taco"].forward


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"forward": None}, False),
        ({"forward": None, "backward": None}, True),
        ({"forward": None, "backward": None, "recipes": {"a": "none"}}, True),
        ({"forward": None, "backward": None, "recipes": {"a": "none", "b": "int8"}}, False),
    ],
)
def test_settings_know_whether_they_compress_nothing(fields: dict[str, Any], expected: bool) -> None:
    assert CompressionConfig(**fields).is_empty is expected


def test_resolving_what_a_user_passes() -> None:
    settings = CompressionConfig(min_bytes=7)
    assert resolve_compression(settings) is settings
    assert resolve_compression(None) is None
    for name in RECIPE_NAMES:
        assert resolve_compression(name) is RECIPES[name]
    fields = {"forward": {"element": "int8", "block_size": 64}, "backward": None, "exclude": ["head"]}
    expected = CompressionConfig(forward=CodecConfig(element="int8", block_size=64), backward=None, exclude=("head",))
    assert resolve_compression(fields) == expected
    assert resolve_compression({}) == CompressionConfig()
    assert resolve_compression({"forward": INT8}) == CompressionConfig(forward=INT8)
    assert fields["forward"] == {"element": "int8", "block_size": 64}, "the caller's mapping was changed"


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (
            "tacos",
            ValueError,
            "compression='tacos' is not a recipe; use one of 'default', 'taco', 'int8', 'balanced', 'smallest', "
            "'none', None, or a CompressionConfig.",
        ),
        (
            {"min_byte": 3},
            ValueError,
            "compression has no field 'min_byte'; it has 'forward', 'backward', 'min_bytes', 'exclude', 'recipes', "
            "'during_validation', 'transport', 'asynchronous'.",
        ),
        (
            {"backward": {"block_sise": 64}},
            ValueError,
            "backward has no field 'block_sise'; it has 'element', 'block_size', 'scale_mode', 'rotation', 'levels', "
            "'rounding', 'reshape'.",
        ),
        (
            {"forward": {"block_size": 96}},
            ValueError,
            "block_size=96 is not supported; use one of 32, 64, 128, 256, 512, 2048.",
        ),
        (True, TypeError, "compression=True has type bool; use a recipe name, None, or a CompressionConfig."),
        (8, TypeError, "compression=8 has type int; use a recipe name, None, or a CompressionConfig."),
        (
            INT8,
            TypeError,
            f"compression={INT8!r} has type CodecConfig; use a recipe name, None, or a CompressionConfig.",
        ),
    ],
)
def test_unresolvable_compression_is_refused(value: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        resolve_compression(value)


class Strategy:
    """Stands for what takes ``compression=`` in a YAML file."""

    def __init__(self, compression: CompressionConfig | str | None = "default") -> None:
        self.compression = compression


def parsed(*args: str) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Strategy, "strategy")
    return instantiated(parser, list(args))


def instantiated(parser: ArgumentParser, args: list[str]) -> Any:
    # Releases before 4.49 have the second name only.
    name = "instantiate" if hasattr(parser, "instantiate") else "instantiate_classes"
    return getattr(parser, name)(parser.parse_args(args)).strategy.compression


def parsed_yaml(tmp_path: Any, text: str) -> Any:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return parsed("--config", str(path))


def test_yaml_gives_the_settings_that_python_gives(tmp_path: Any) -> None:
    text = """
strategy:
  compression:
    forward:
      element: int8
      block_size: 256
    backward: null
    min_bytes: 0
    exclude: ["*head", layers.0.*]
    recipes:
      blocks.3: int8
      blocks.*: none
    during_validation: true
"""
    settings = parsed_yaml(tmp_path, text)
    assert settings == CompressionConfig(
        forward=CodecConfig(element="int8", block_size=256),
        backward=None,
        min_bytes=0,
        exclude=("*head", "layers.0.*"),
        recipes={"blocks.3": "int8", "blocks.*": "none"},
        during_validation=True,
    )
    assert isinstance(settings.forward, CodecConfig)
    assert list(settings.recipes) == ["blocks.3", "blocks.*"]


@pytest.mark.parametrize(("text", "expected"), [("taco", "taco"), ("null", None), ("none", "none")])
def test_yaml_gives_a_recipe_or_off(tmp_path: Any, text: str, expected: Any) -> None:
    assert parsed_yaml(tmp_path, f"strategy:\n  compression: {text}\n") == expected
    assert parsed(f"--strategy.compression={text}") == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{min_byte: 3}", "min_byte"),
        ("{forward: {block_sise: 64}}", "block_sise"),
        ("{forward: {block_size: 96}}", "block_size=96 is not supported"),
        ("{recipes: {head: fp8}}", re.escape("recipes['head']='fp8' is unknown")),
    ],
)
def test_yaml_with_a_misspelt_key_or_value_is_refused_by_name(tmp_path: Any, text: str, name: str) -> None:
    with pytest.raises(Exception, match=name):
        parsed_yaml(tmp_path, f"strategy:\n  compression: {text}\n")


def test_settings_survive_a_dump(tmp_path: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Strategy, "strategy")
    values = ["--strategy.compression.min_bytes=3", "--strategy.compression.forward.block_size=64"]
    values.append('--strategy.compression.exclude=["*head"]')
    namespace = parser.parse_args(values)
    path = tmp_path / "dump.yaml"
    path.write_text(parser.dump(namespace))
    expected = CompressionConfig(min_bytes=3, forward=CodecConfig(block_size=64), exclude=("*head",))
    assert instantiated(parser, ["--config", str(path)]) == expected


def test_docstring_examples_run() -> None:
    results = doctest.testmod(config_module)
    assert results.failed == 0
    assert results.attempted == 1
