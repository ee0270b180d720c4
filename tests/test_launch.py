"""Real processes through Lightning's launcher, as a user starts them: two gloo ranks on this machine."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 150
OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
FAILING_SCRIPT = """
import lightning as L
from lightning_taco import CompressionConfig, TacoTPStrategy
from tests.lightning_models import TinyModule, tiny_dataloader


class FailsOnRankOne(TinyModule):
    def training_step(self, batch, batch_index):
        if self.global_rank == 1 and batch_index == 2:
            raise RuntimeError("a bad batch on rank 1")
        return super().training_step(batch, batch_index)


if __name__ == "__main__":
    L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TacoTPStrategy(compression=CompressionConfig(min_bytes=0)),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    ).fit(FailsOnRankOne(), tiny_dataloader())
"""

pytestmark = pytest.mark.launch


@dataclass
class Ended:
    """A command that came to its end by itself."""

    status: int
    output: str
    seconds: float


def launch(*command: str, folder: Path) -> Ended:
    """Run a Python command from the repository's root; stop it and what it started after the time limit."""
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCH}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "120",
    }
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {TIME_LIMIT_S} s:\n{output}")
    return Ended(process.returncode, output, time.monotonic() - started)


def test_fit_of_the_command_line_trains_over_two_ranks(tmp_path: Path) -> None:
    ended = launch(
        *("-m", "lightning_taco.cli", "fit", "--config", "configs/gpt_tiny_cpu.yaml"),
        *("--trainer.max_steps=3", "--trainer.limit_val_batches=1", "--trainer.val_check_interval=3"),
        "--trainer.log_every_n_steps=1",
        *("--data.init_args.max_bytes=400000", "--data.init_args.vocab_size=300"),
        *("--model.init_args.vocab_size=300", "--model.init_args.num_layers=1"),
        f"--trainer.logger.init_args.save_dir={tmp_path}",
        folder=tmp_path,
    )
    assert ended.status == 0, ended.output
    for line in (
        "lightning_taco: mesh data_parallel=1, tensor_parallel=2",
        "lightning_taco: forward: int8, block 128, Hadamard, 8.25 bits a value",
        "lightning_taco: backward: int8, block 128, Hadamard, 8.25 bits a value",
        "axis of at least 16.0 KiB, in training",
        "lightning_taco: first step: 7 of 7 exchanges compressed",
        "lightning_taco: what one rank sent over the tensor-parallel axis",
        "worst site: ",
    ):
        assert ended.output.count(line) == 1, (line, ended.output)
    (metrics,) = tmp_path.glob("gpt_tiny_cpu/version_0/metrics.csv")
    assert "train_loss" in metrics.read_text()
    assert "val_loss" in metrics.read_text()


def test_fabric_example_trains_over_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"{index} times {index} is {index * index}.\n" for index in range(9999)))
    sizes = ("--vocab_size", "300", "--sequence_length", "32", "--min_bytes", "0")
    ended = launch(
        "examples/train_fabric.py", "--files", str(tmp_path / "text.txt"), "--max_steps", "3", *sizes, folder=tmp_path
    )
    assert ended.status == 0, ended.output
    assert ended.output.count("lightning_taco: first step: ") == 1, ended.output
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in ended.output.splitlines() if "loss " in line]
    assert len(losses) == 2, ended.output  # of the first step and the last, once each
    assert losses[1] < losses[0] < 7


def test_failure_on_one_rank_ends_the_run_and_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(FAILING_SCRIPT)
    ended = launch(str(script), folder=tmp_path)
    assert ended.status != 0
    assert "RuntimeError: a bad batch on rank 1" in ended.output
    assert "lightning_taco: first step: 2 of 2 exchanges compressed" in ended.output
    assert ended.seconds < 60
