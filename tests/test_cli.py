"""The command line's parser: forms of the strategy block that work, and what it says about those that do not."""

import functools
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from lightning_taco import CodecConfig, CompressionConfig, TacoTPStrategy
from lightning_taco.cli import build_cli, main
from lightning_taco.config import RECIPES
from lightning_taco.study import StudySettings, StudyTrainer

STRATEGY = "--trainer.strategy.class_path=lightning_taco.TacoTPStrategy"
INIT = "--trainer.strategy.init_args."
RUN = [
    "--model=lightning.pytorch.demos.boring_classes.BoringModel",
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.logger=false",
]


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lightning-taco"])  # LightningCLI warns when it gets arguments twice
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set by seed_everything; put back afterwards
        monkeypatch.setenv(name, "0")


def build(*options: str) -> Any:
    return build_cli([*RUN, *options], run=False)


def strategy_of(*options: str) -> TacoTPStrategy:
    strategy = build(*options).trainer.strategy
    assert isinstance(strategy, TacoTPStrategy)
    return strategy


def settings_of(*options: str) -> CompressionConfig | None:
    return strategy_of(STRATEGY, *options).compression.config


def refusal(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the parser says on stderr before it exits, after its usage."""
    with pytest.raises(SystemExit) as raised:
        build(*options)
    assert raised.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def write(name: str, content: Any) -> str:
    Path(name).write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return name


# Forms that work


def test_class_path_alone_is_the_default_recipe() -> None:
    strategy = strategy_of(STRATEGY)
    assert strategy.compression.config == CompressionConfig()
    assert strategy.compression.sample_every_n_steps == 50


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_compression_is_the_name_of_a_recipe(recipe: str) -> None:
    assert settings_of(f"{INIT}compression={recipe}") == RECIPES[recipe]


def test_null_switches_compression_off() -> None:
    assert settings_of(f"{INIT}compression=null") is None


def test_nested_mapping_in_a_file_reaches_every_field() -> None:
    compression = {
        "forward": {"element": "int8", "block_size": 64, "scale_mode": "merged", "rotation": False},
        "backward": None,
        "min_bytes": 7,
        "exclude": ["*head", "blocks.0"],
        "recipes": {"*.mlp": "taco"},
        "during_validation": True,
    }
    strategy = {"class_path": "lightning_taco.TacoTPStrategy", "init_args": {"compression": compression}}
    path = write("run.yaml", {"trainer": {"strategy": strategy}})
    assert strategy_of("--config", path).compression.config == CompressionConfig(
        forward=CodecConfig(element="int8", block_size=64, rotation=False),
        backward=None,
        min_bytes=7,
        exclude=("*head", "blocks.0"),
        recipes={"*.mlp": "taco"},
        during_validation=True,
    )


def test_fields_that_are_not_named_keep_their_defaults() -> None:
    assert settings_of(f"{INIT}compression.min_bytes=5") == CompressionConfig(min_bytes=5)
    assert settings_of(f"{INIT}compression.min_bytes=auto") == CompressionConfig(min_bytes="auto")
    nested = settings_of(f"{INIT}compression={{backward: {{scale_mode: dual}}}}")
    assert nested == CompressionConfig(backward=CodecConfig(scale_mode="dual"))


def test_short_name_needs_no_import() -> None:
    """The command itself imports the package, which registers the name."""
    assert strategy_of("--trainer.strategy=taco_tp").compression.config == CompressionConfig()


@pytest.mark.parametrize("timeout", ["600", "600.0", "0:10:00"])
def test_timeout_is_seconds_or_a_duration(timeout: str) -> None:
    assert strategy_of(STRATEGY, f"{INIT}timeout={timeout}")._timeout == timedelta(minutes=10)


def test_other_arguments_reach_the_strategy() -> None:
    sizes = [f"{INIT}data_parallel_size=2", f"{INIT}tensor_parallel_size=1", f"{INIT}sample_every_n_steps=3"]
    strategy = strategy_of(STRATEGY, *sizes, f"{INIT}save_distributed_checkpoint=false")
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (2, 1)
    assert strategy.compression.sample_every_n_steps == 3
    assert strategy._save_distributed_checkpoint is False


def test_model_with_its_own_dataloaders_needs_no_data_module() -> None:
    assert build(STRATEGY).datamodule is None


def test_classes_of_the_current_directory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write("my_own_model.py", "import lightning.pytorch as pl\n\n\nclass Mine(pl.LightningModule):\n    width = 7\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    cli = build_cli([*RUN, "--model=my_own_model.Mine"], run=False)
    assert isinstance(cli.model, pl.LightningModule)
    assert cli.model.width == 7


def test_printed_config_reads_back_as_itself(capsys: pytest.CaptureFixture[str]) -> None:
    nested = f"{INIT}compression={{min_bytes: 7, forward: {{element: int8}}, backward: null, recipes: {{head: none}}}}"
    options = [STRATEGY, nested, f"{INIT}timeout=600"]
    with pytest.raises(SystemExit) as raised:
        build(*options, "--print_config")
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["trainer"]["strategy"]["init_args"]["compression"]["min_bytes"] == 7

    again = build_cli(["--config", write("printed.yaml", text)], run=False)
    config, timeout = again.trainer.strategy.compression.config, again.trainer.strategy._timeout
    assert config == CompressionConfig(
        min_bytes=7, forward=CodecConfig(element="int8"), backward=None, recipes={"head": "none"}
    )
    assert timeout == timedelta(minutes=10)
    with pytest.raises(SystemExit):
        build_cli(["--config", "printed.yaml", "--print_config"], run=False)
    assert capsys.readouterr().out == text


# What is refused


@pytest.mark.parametrize(
    ("option", "key"),
    [
        (f"{INIT}compression={{min_bites: 7}}", "min_bites"),
        (f"{INIT}compression.min_bites=7", "min_bites"),
        (f"{INIT}compression={{forward: {{blocksize: 64}}}}", "blocksize"),
        (f"{INIT}compresion=int8", "compresion"),
    ],
)
def test_misspelt_key_is_named(capsys: pytest.CaptureFixture[str], option: str, key: str) -> None:
    assert f"Option '{key}' is not accepted" in refusal(capsys, STRATEGY, option)


def test_misspelt_key_in_a_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    init_args = {"compression": {"forward": {"element": "int8", "rotate": True}}}
    strategy = {"class_path": "lightning_taco.TacoTPStrategy", "init_args": init_args}
    path = write("run.yaml", {"trainer": {"strategy": strategy}})
    assert "Option 'rotate' is not accepted" in refusal(capsys, "--config", path)


def test_bare_class_path_is_refused_with_the_form_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, "--trainer.strategy=lightning_taco.TacoTPStrategy")
    assert text.strip() == (
        "trainer.strategy=lightning_taco.TacoTPStrategy is a class path, but a bare string can only be a registered "
        "name such as taco_tp; write trainer.strategy.class_path=lightning_taco.TacoTPStrategy, and its arguments "
        "below trainer.strategy.init_args."
    )


def test_bare_class_path_is_refused_below_a_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        build_cli(["fit", *RUN, "--trainer.strategy=lightning_taco.TacoTPStrategy"])
    assert raised.value.code == 2
    assert "write trainer.strategy.class_path=lightning_taco.TacoTPStrategy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "compression=in8",
            "compression='in8' is not a recipe; use one of 'default', 'taco', 'int8', 'balanced', 'smallest', 'none'",
        ),
        ("compression={forward: {block_size: 100}}", r"block_size=100 .*32, 64, 128, 256, 512"),
        ("compression={forward: {element: fp8}}", r"(?s)element.*e4m3"),
        ("compression={min_bytes: always}", "(?s)min_bytes.*always"),
        ("compression={min_bytes: -1}", "min_bytes=-1 is not a number of bytes; use an integer from 0 up"),
        ("compression={recipes: {head: in8}}", r"recipes\['head'\]='in8' is unknown; use one of 'default', 'taco'"),
        ("timeout=-1", "is not above zero; give seconds"),
        ("sample_every_n_steps=-1", "sample_every_n_steps=-1 is not a number of steps"),
        ("tensor_parallel_size=3", "data_parallel_size=1 x tensor_parallel_size=3 needs 3 processes, .* has 2"),
        ("tensor_parallel_size=two", r"(?s)tensor_parallel_size.*two"),
    ],
)
def test_impossible_value_is_refused_in_words(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    """By the parser or by the settings themselves, before any process is started."""
    with pytest.raises((SystemExit, ValueError)) as raised:
        build(STRATEGY, INIT + option)
    assert re.search(message, capsys.readouterr().err + str(raised.value))


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        build_cli(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert all(
        name in text
        for name in (
            "fit",
            "validate",
            "test",
            "predict",
            "study",
            "lightning-taco report RUN_DIR",
            "lightning-taco bench",
        )
    )


# The study


def outcome_of_study(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int | str | None, str]:
    """Exit status and what is printed of a study that the parser ends."""
    with pytest.raises(SystemExit) as raised:
        build_cli(["study", *RUN, STRATEGY, *options])
    captured = capsys.readouterr()
    return raised.value.code, captured.out + captured.err


def test_study_has_options_of_its_own_beside_those_of_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = outcome_of_study(capsys, "--help")
    assert status == 0
    for option in ("num_steps", "max_messages", "candidates", "baselines", "folder"):
        assert f"--study.{option} " in text
    assert "--ckpt_path " in text
    assert "observe the messages of this many optimizer steps, the" in text
    with pytest.raises(SystemExit):
        build_cli(["fit", "--help"])
    assert "--study" not in capsys.readouterr().out


def test_study_reads_its_candidates_and_the_file_of_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration of fit is one of a study."""
    path = write("run.yaml", {"trainer": {"max_steps": 5}})
    candidates = "--study.candidates=[{element: int4, levels: gaussian}]"
    status, text = outcome_of_study(capsys, "--config", path, "--study.num_steps=3", candidates, "--print_config")
    assert status == 0
    settings = yaml.safe_load(text)
    assert settings["trainer"]["max_steps"] == 5
    assert (settings["study"]["num_steps"], settings["study"]["max_messages"]) == (3, 4)
    (candidate,) = settings["study"]["candidates"]
    assert (candidate["element"], candidate["levels"], candidate["block_size"]) == ("int4", "gaussian", 128)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--study.steps=3", "steps"),
        ("--study.num_steps=two", "num_steps"),
        ("--study.candidates=[{element: int9}]", "int9"),
    ],
)
def test_wrong_option_of_a_study_is_named(capsys: pytest.CaptureFixture[str], option: str, message: str) -> None:
    status, text = outcome_of_study(capsys, option)
    assert status == 2
    assert message in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "A study observes what TacoTPStrategy compresses, but the Trainer's strategy is a SingleDeviceStrategy"),
        ([STRATEGY, f"{INIT}compression=null"], "compression is off; use any recipe, such as compression='default'"),
    ],
)
def test_study_of_what_cannot_be_observed_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as raised:
        build_cli(["study", *RUN, "--trainer.devices=1", *options])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_study_of_the_command_line_is_the_trainers_own_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    @functools.wraps(StudyTrainer.study)  # with the signature that the parser reads
    def study(self: StudyTrainer, **arguments: Any) -> None:
        calls.append(arguments)

    monkeypatch.setattr(StudyTrainer, "study", study)
    build_cli(["study", *RUN, STRATEGY, "--study.num_steps=3", "--study.folder=here", "--ckpt_path=some.ckpt"])
    (arguments,) = calls
    assert isinstance(arguments.pop("model"), pl.LightningModule)
    settings = StudySettings(num_steps=3, folder="here")
    assert arguments == {"ckpt_path": "some.ckpt", "weights_only": None, "study": settings}


def test_console_script_calls_the_same_parser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="lightning-taco")
    main: Callable[[], None] = script.load()
    monkeypatch.setattr(sys, "argv", ["lightning-taco", "fit", "--trainer.max_stepz=3"])
    with pytest.raises(SystemExit):
        main()
    assert "max_stepz" in capsys.readouterr().err


# The report


def test_report_has_a_parser_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-taco", "report", "nowhere"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 2
    assert "lightning-taco report: error: nowhere does not exist" in capsys.readouterr().err


CSV = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
OWN = "--trainer.logger=[{class_path: lightning_taco.callbacks.RunLogger, init_args: {folder: own}}]"
QUICK = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
QUIET = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")]


@pytest.mark.parametrize(
    ("loggers", "logs"),
    [
        (CSV, ["logs/lightning_logs/version_0/lightning_taco.jsonl"]),
        ([OWN], ["own/lightning_taco.jsonl"]),
        (["--trainer.logger=false"], []),
    ],
    ids=["beside", "own", "none"],
)
def test_fit_leaves_a_log_from_which_report_makes_the_page(
    loggers: list[str], logs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_cli(["fit", RUN[0], "--trainer.accelerator=cpu", "--trainer.devices=1", *QUICK, *QUIET, *loggers])
    found = sorted(path.as_posix() for path in Path().rglob("lightning_taco.jsonl"))
    assert found == logs
    for log in logs:
        monkeypatch.setattr(sys, "argv", ["lightning-taco", "report", str(Path(log).parent)])
        main()
        assert "SingleDeviceStrategy" in (Path(log).parent / "report.html").read_text()
