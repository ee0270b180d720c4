"""Whole training steps of tensor-parallel GPT layers: uncompressed, compressed, and with the callbacks that watch.

    torchrun --nproc-per-node 2 -m examples.benchmarks.step_time --variants none int8 taco balanced
    torchrun --nproc-per-node 2 -m examples.benchmarks.step_time --variants int8 int8+callbacks --steps 200
    NCCL_P2P_DISABLE=1 torchrun ...     # and other links, see collectives.py
    torchrun --nproc-per-node 4 -m examples.benchmarks.step_time --devices 4 ...     # as many as there are ranks
    torchrun --nproc-per-node 2 -m examples.benchmarks.step_time --accelerator cpu --num_layers 1 --hidden_size 64 \
        --num_heads 4 --sequence_length 32 --vocab_size 64 --min_bytes 0 --steps 2 --rounds 2

Variants take turns on one model: in each round each runs `--steps` steps (forward, backward, clipping, AdamW), each
timed by CUDA events. Of the first, second, ... step of a round the median over rounds counts, so that what only one
round met goes out, and what a step does each time stays in; the figure is the mean of these. ``+mapped`` lets GPUs read
each other's memory. ``+sliced`` cuts row-parallel products in `--num_slices`, each of which is sent while the next is
computed. ``+callbacks`` adds `CompressionMonitor`, `GradientNormMonitor`, `CompressionGuard` and
`ThroughputReport` with their default sampling and a CSV logger: give it as many steps as the rarest of them samples
(200). The loss of the same weights and batch is compared in the same run. With `--graphs` each round captures a
variant's step as a CUDA graph and replays it, so that the host's time, which is the longer one on a fast link, is left
out.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from examples import gpt
from examples.benchmarks.graphed import GraphedStep
from examples.benchmarks.timing import Clock
from examples.plans import materialize, next_token_loss
from lightning_taco.callbacks import CompressionGuard, CompressionMonitor, GradientNormMonitor, ThroughputReport
from lightning_taco.config import CompressionConfig, resolve_compression
from lightning_taco.dtensor.outcomes import COMPRESSED
from lightning_taco.dtensor.overlap import NUM_SLICES
from lightning_taco.fabric import TacoTPStrategy
from lightning_taco.strategies.compression import Compression

CALLBACKS_SUFFIX = "+callbacks"


def main() -> None:
    arguments = parse()
    benchmark = StepBenchmark(arguments)
    losses = {name: benchmark.loss(name) for name in arguments.variants}
    times: dict[str, list[list[float]]] = {name: [] for name in arguments.variants}
    for name in arguments.variants:
        benchmark.run(name, arguments.warm_up_steps)  # compiles kernels, opens communicators
        benchmark.check(name)
    for _ in range(arguments.rounds):
        for name in arguments.variants:
            times[name].append(benchmark.run(name, arguments.steps))
    rows = rows_of(times, losses)
    benchmark.fabric.print(table(rows))
    if arguments.output and benchmark.fabric.global_rank == 0:
        settings = {key: str(value) for key, value in vars(arguments).items()}
        content = {"settings": settings, "torch": torch.__version__, "rows": rows, "milliseconds": times}
        arguments.output.write_text(json.dumps(content, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["none", "int8", "taco", "balanced"], help="recipes")
    parser.add_argument("--steps", type=int, default=20, help="of each variant in each round")
    parser.add_argument("--rounds", type=int, default=3)
    add_model_arguments(parser)
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--num_slices", type=int, default=2, help="of row-parallel products, for +sliced")
    parser.add_argument("--graphs", action="store_true", help="replay steps as CUDA graphs")
    parser.add_argument("--min_bytes", type=int, help="smaller tensors are sent as they are; the recipe's by default")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    if arguments.graphs and any(CALLBACKS_SUFFIX in variant for variant in arguments.variants):
        parser.error("--graphs replays a step without Python, where callbacks see nothing; leave +callbacks out.")
    return arguments


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, and on what."""
    parser.add_argument("--warm_up_steps", type=int, default=3)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=4096)
    parser.add_argument("--num_heads", type=int, default=32)
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=2, help="all of them tensor-parallel")
    parser.add_argument("--precision", default="bf16-mixed")


def model_config(arguments: argparse.Namespace) -> gpt.GPTConfig:
    """The sizes that these arguments give."""
    names = ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size")
    return gpt.GPTConfig(**{name: getattr(arguments, name) for name in names})


class StepBenchmark:
    """One model and optimizer, whose compression is exchanged between the variants."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        # On while the model is set up: its forward is compressed by a hook that is not there otherwise.
        self.strategy = TacoTPStrategy(self._parallelize, compression="default", sample_every_n_steps=0)
        logger = CSVLogger(tempfile.mkdtemp(), name="", flush_logs_every_n_steps=50)
        self.fabric = Fabric(
            strategy=self.strategy,
            accelerator=arguments.accelerator,
            devices=arguments.devices,
            precision=arguments.precision,
            loggers=logger,
        )
        self.fabric.launch()
        seed_everything(0, verbose=False)
        with torch.device("meta"):
            model = gpt.GPT(model_config(self.arguments))
        self.model = self.fabric.setup_module(model)
        fused = self.fabric.device.type == "cuda"
        self.optimizer = self.fabric.setup_optimizers(
            torch.optim.AdamW(
                self.model.parameters(),
                lr=1e-4,
                fused=fused,
                foreach=False if not fused else None,
                capturable=arguments.graphs and fused,
            )
        )
        shape = (arguments.batch_size, arguments.sequence_length + 1)
        tokens = torch.randint(arguments.vocab_size, shape, device=self.fabric.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    @torch.no_grad()
    def loss(self, variant: str) -> float:
        """The loss of the weights as they are now, computed as `variant` computes it, once forward."""
        self._set_compression(variant)
        self.model.train()
        return next_token_loss(self.model(self.inputs), self.targets).item()

    def run(self, variant: str, num_steps: int) -> list[float]:
        """Milliseconds of each step of `variant`."""
        self._set_compression(variant)
        callbacks = _Callbacks(self.fabric) if variant.endswith(CALLBACKS_SUFFIX) else None
        self.model.train()
        graph = GraphedStep(self._step, self.fabric.device) if self.arguments.graphs else None
        self.fabric.barrier()
        clock = Clock(self.fabric.device)
        for step in range(num_steps):
            if graph is None:
                self._step(step, callbacks)
            else:
                graph()
            clock.lap()
        return clock.laps()

    def check(self, variant: str) -> None:
        """Refuse to time a variant that sends as it is what it is meant to compress.

        Raises:
            RuntimeError: naming the direction.
        """
        config = config_of(variant, self.arguments.min_bytes)
        if config is None:
            return
        compressed = {key.direction for key in self.strategy.compression.traffic.counts if key.outcome == COMPRESSED}
        for direction in ("forward", "backward"):
            if getattr(config, direction) is not None and direction not in compressed:
                raise RuntimeError(
                    f"{variant} compressed nothing {direction}: {self.strategy.compression.traffic.counts}"
                )

    def _step(self, step: int = 0, callbacks: "_Callbacks | None" = None) -> torch.Tensor:
        if callbacks is not None:
            callbacks.start_step(step)
        loss = next_token_loss(self.model(self.inputs), self.targets)
        self.fabric.backward(loss)
        if callbacks is not None:
            callbacks.before_optimizer(step, self.optimizer, self.model)
        # Raising for a norm that is not finite waits for the device, which a capture may not.
        is_checked = not self.arguments.graphs
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0, error_if_nonfinite=is_checked)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if callbacks is not None:
            callbacks.end_step(step, loss.detach())
        return loss.detach()

    def _set_compression(self, variant: str) -> None:
        self.strategy.compression.stop()
        self.strategy.compression = Compression(config_of(variant, self.arguments.min_bytes), 0)
        self.strategy.compression.start(self.model, self.strategy.device_mesh, self.fabric.device)
        for module in self.model.modules():
            if hasattr(module, NUM_SLICES):
                slices = self.arguments.num_slices if "sliced" in variant.split("+") else 1
                setattr(module, NUM_SLICES, slices)

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        sequence_parallel = self.arguments.sequence_parallel
        model = gpt.parallelize(model, mesh["tensor_parallel"], sequence_parallel=sequence_parallel)
        return materialize(model, self.fabric.device, seed=0)


def config_of(variant: str, min_bytes: int | None = None) -> CompressionConfig | None:
    """The settings of ``"int8"``, ``"int8+mapped"`` or ``"int8+mapped+callbacks"``; `min_bytes` replaces theirs."""
    recipe, *more = variant.split("+")
    config = resolve_compression(recipe)
    if config is None:
        return None
    transport = {"transport": "auto"} if "mapped" in more else {}
    return replace(config, **transport, **({} if min_bytes is None else {"min_bytes": min_bytes}))  # type: ignore[arg-type]


class _Callbacks:
    """All that watch, with their defaults."""

    def __init__(self, fabric: Fabric) -> None:
        self.norms = GradientNormMonitor()
        self.hosted = [CompressionMonitor(), CompressionGuard(), ThroughputReport()]
        for callback in (self.norms, *self.hosted):
            callback.attach(fabric)

    def start_step(self, step: int) -> None:
        for callback in self.hosted:
            callback.start_step(step)
        self.norms.start_step(step)

    def before_optimizer(self, step: int, optimizer: Any, module: nn.Module) -> None:
        self.norms.before_optimizer(step, optimizer, module)

    def end_step(self, step: int, loss: torch.Tensor) -> None:
        for callback in (*self.hosted, self.norms):
            callback.end_step(step, loss)


def rows_of(times: dict[str, list[list[float]]], losses: dict[str, float]) -> list[dict[str, Any]]:
    """Step times, ratios to the first variant, the spread over rounds, and how far the first loss is from its."""
    first = next(iter(times))
    step_ms = {name: step_time(rounds) for name, rounds in times.items()}
    return [
        {
            "variant": name,
            "step_ms": step_ms[name],
            "speedup": step_ms[first] / step_ms[name],
            "spread": spread_of([statistics.median(laps) for laps in rounds]),
            "loss_gap": losses[name] / losses[first] - 1,
        }
        for name, rounds in times.items()
    ]


def step_time(rounds: list[list[float]]) -> float:
    """The mean over the steps of a round of each one's median over rounds.

    >>> step_time([[1, 1, 4], [1, 9, 4], [1, 1, 4]])  # the third step samples; one step of one round was disturbed
    2
    """
    return statistics.mean(statistics.median(laps) for laps in zip(*rounds, strict=True))


def spread_of(medians: list[float]) -> float:
    """From the fastest to the slowest round, as a share of the middle one."""
    return (max(medians) - min(medians)) / statistics.median(medians)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; ratios are to the first variant."""
    lines = ["| variant | step, ms | speed-up | spread over rounds | first loss |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['variant']} | {row['step_ms']:.1f} | {row['speedup']:.3f}x | {100 * row['spread']:.1f}% | "
            f"{100 * row['loss_gap']:+.4f}% |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
