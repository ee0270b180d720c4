"""Every shipped YAML is read by the command line's own parser, against the real signatures."""

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.language_module import LanguageModule
from examples.text_data import TextDataModule
from lightning_taco import TacoTPStrategy
from lightning_taco.activations import ActivationConfig
from lightning_taco.cli import build_cli
from lightning_taco.config import CompressionConfig
from lightning_taco.data_parallel.settings import RECIPES
from lightning_taco.pipeline_parallel import PipelineConfig, resolve_pipeline

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SUFFIX = "_uncompressed"
STORED = ROOT / "configs" / "llama_8b_h200_agoq.yaml"  # differs from others in its sizes too, and has no twin
THREE_D = ROOT / "configs" / "gpt_tiny_3d_cpu.yaml"  # every axis is compressed, each by settings of its own
DATA_PARALLEL = [path for path in CONFIGS if "data_parallel:" in path.read_text() and path != THREE_D]
COMPRESSED = [
    path for path in CONFIGS if not path.stem.endswith(SUFFIX) and path not in DATA_PARALLEL and path != THREE_D
]

by_name = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
by_pair = pytest.mark.parametrize("path", [path for path in COMPRESSED if path != STORED], ids=lambda path: path.stem)


@pytest.fixture(autouse=True)
def repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # class paths are found from the current directory
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lightning-taco"])  # LightningCLI warns when it gets arguments twice
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by seed_everything; put back afterwards
        monkeypatch.setenv(name, "0")


@cache
def parse(path: Path, *overrides: str) -> Any:
    """Parse as `lightning-taco fit` would and build the objects, on a CPU whatever the file asks for.

    Takes half a second: once for each file, whose objects no test changes.
    """
    on_cpu = ["--trainer.accelerator=cpu", "--trainer.precision=32-true"]
    return build_cli(["--config", str(path), *on_cpu, *overrides], run=False)


def as_mapping(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def test_the_presets_of_the_readme_are_shipped() -> None:
    assert {path.stem for path in COMPRESSED} == {
        "gpt_tiny_cpu",
        "gpt_350m_h200",
        "gpt_2.7b_h200",
        "gpt_6.7b_h200",
        "gpt_13b_h200",
        "llama_tiny_cpu",
        "llama_8b_h200",
        "llama_8b_h200_agoq",
    }


@by_name
def test_config_builds_its_objects(path: Path) -> None:
    cli = parse(path)
    assert isinstance(cli.model, LanguageModule)
    assert isinstance(cli.datamodule, TextDataModule)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, TacoTPStrategy)
    settings = as_mapping(path)
    sizes = settings["trainer"]["strategy"]["init_args"]
    model_size = sizes["tensor_parallel_size"] * sizes.get("pipeline_parallel_size", 1)
    assert model_size * sizes["data_parallel_size"] == settings["trainer"]["devices"]
    assert cli.datamodule.vocab_size <= cli.model.config.vocab_size
    assert cli.datamodule.sequence_length <= cli.model.config.sequence_length
    for name in ("num_heads", "num_kv_heads", "hidden_size", "vocab_size", "sequence_length"):
        assert getattr(cli.model.config, name, 0) % sizes["tensor_parallel_size"] == 0


def test_data_parallel_configs_are_shipped() -> None:
    assert {path.stem for path in DATA_PARALLEL} == {
        "gpt_350m_ddp_tlq_hs_h200",
        "gpt_2.7b_fsdp2_sdp4bit_h200",
        "gpt_6.7b_tp_fsdp2_sdp4bit_h200",
        "gpt_350m_ddp_quangrad_h200",
    }


def test_three_dimensional_settings_reach_the_strategy() -> None:
    strategy = parse(THREE_D).trainer.strategy
    assert strategy.data_parallel.config == replace(RECIPES["sdp4bit"], min_bytes=16384)
    assert strategy.pipeline.config == PipelineConfig(min_bytes=16384)
    assert strategy.compression.config == CompressionConfig(min_bytes=16384)
    assert (strategy.pipeline.layout.num_stages, strategy.pipeline.arguments.num_microbatches) == (2, 4)
    by_name = parse(THREE_D, "--trainer.strategy.init_args.pipeline_compression=int4").trainer.strategy
    assert by_name.pipeline.config == resolve_pipeline("int4")


@pytest.mark.parametrize("path", DATA_PARALLEL, ids=lambda path: path.stem)
def test_data_parallel_settings_are_those_of_the_recipe(path: Path) -> None:
    """A file spells out what a recipe's name stands for."""
    cli = parse(path)
    recipe = next(name for name in RECIPES if f"_{name}_" in path.stem)
    assert cli.trainer.strategy.data_parallel.config == RECIPES[recipe]
    assert cli.model.shard_weights == ("fsdp2" in path.stem)
    by_name = parse(path, f"--trainer.strategy.init_args.data_parallel={recipe}")
    assert by_name.trainer.strategy.data_parallel.config == RECIPES[recipe]


@by_pair
def test_compression_reaches_the_strategy(path: Path) -> None:
    """The smallest exchange of the residual stream is above the size floor, and the twin compresses nothing."""
    cli = parse(path)
    compression = cli.trainer.strategy.compression.config
    assert compression.forward is not None
    assert compression.backward is not None
    num_values = cli.datamodule.batch_size * cli.datamodule.sequence_length * cli.model.config.hidden_size
    tensor_parallel_size = as_mapping(path)["trainer"]["strategy"]["init_args"]["tensor_parallel_size"]
    assert num_values * 2 / tensor_parallel_size >= compression.min_bytes
    twin = parse(path.with_stem(path.stem + SUFFIX))
    assert twin.trainer.strategy.compression.config is None


def test_activations_reach_the_strategy() -> None:
    strategy = parse(STORED).trainer.strategy
    assert strategy.activations.config == ActivationConfig()
    assert strategy.compression.config is not None
    assert parse(STORED.with_stem("llama_8b_h200")).trainer.strategy.activations.config is None
    plain = parse(STORED, "--trainer.strategy.init_args.activations=agoq").trainer.strategy
    assert plain.activations.config == ActivationConfig()


@by_pair
def test_twins_differ_in_the_strategy_only(path: Path) -> None:
    compressed, uncompressed = as_mapping(path), as_mapping(path.with_stem(path.stem + SUFFIX))
    strategies = [settings["trainer"].pop("strategy") for settings in (compressed, uncompressed)]
    assert compressed == uncompressed
    settings = [strategy["init_args"].pop("compression") for strategy in strategies]
    assert settings[0] is not None
    assert settings[1] is None
    assert strategies[0] == strategies[1]


@by_name
def test_every_key_has_a_comment(path: Path) -> None:
    bare = [line for line in path.read_text().splitlines() if re.match(r"\s*[\w.\"]+:", line) and "  # " not in line]
    assert bare == []


@by_name
def test_header_shows_the_command_that_runs_the_file(path: Path) -> None:
    assert f"#     lightning-taco fit --config configs/{path.name}\n" in path.read_text()


KEYS = [  # one of each part of the file
    ("model", "init_args", "warmup_steps"),
    ("data", "init_args", "max_bytes"),
    ("trainer", "max_steps"),
    ("trainer", "strategy", "init_args", "tensor_parallel_size"),
    ("trainer", "strategy", "init_args", "compression", "min_bytes"),
    ("trainer", "strategy", "init_args", "compression", "forward", "block_size"),
]


@pytest.mark.parametrize("keys", KEYS, ids=lambda keys: keys[-1])
def test_misspelt_key_is_rejected_by_name(
    keys: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = as_mapping(ROOT / "configs" / "gpt_tiny_cpu.yaml")
    block = settings
    for key in keys[:-1]:
        block = block[key]
    misspelt = keys[-1] + "x"
    block[misspelt] = block.pop(keys[-1])
    path = tmp_path / "misspelt.yaml"
    path.write_text(yaml.safe_dump(settings))
    with pytest.raises(SystemExit):
        parse(path)
    assert misspelt in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--trainer.strategy.init_args.compression.forward.block_size=100", "block_size=100"),
        ("--trainer.strategy.init_args.compression=fp3", "fp3"),
        ("--model.init_args.preset=3B", "no GPT preset '3B'"),
        ("--model.init_args.model=bert", "bert"),
    ],
)
def test_wrong_value_is_rejected_by_name(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        parse(ROOT / "configs" / "gpt_tiny_cpu.yaml", override)
    assert message in f"{error.value}{capsys.readouterr().err}"
