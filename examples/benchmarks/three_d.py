"""Steps under data, pipeline and tensor parallelism together: as they are, and with every axis compressed.

    torchrun --nproc-per-node 8 -m examples.benchmarks.three_d
    NCCL_P2P_DISABLE=1 torchrun ... --variants none tensor pipeline data all    # other links, see collectives.py
    torchrun --nproc-per-node 8 -m examples.benchmarks.three_d --accelerator cpu --preset tiny --num_layers 2 \
        --sequence_length 32 --vocab_size 64 --batch_size 4 --num_microbatches 2 --min_bytes 0 --precision 32-true

A GPT is trained by the Trainer on random tokens: tensor parallelism by DTensor, stages by the strategy, FSDP2 over the
data-parallel ranks, AdamW, clipping. Variants compress nothing, one axis, or all. They take turns: in each round each
trains the same model from the start, on the same batches, for `--warm_up_steps` and then `--steps` steps, each timed
from the end of the one before. The figure is the median over the steps of all rounds, of the slowest rank.

``--node_size 1`` says that each data-parallel rank is a node of its own, as on a network, so that gradients travel in 4
bits; without it ranks of one host take 8 bits. Of a compressed axis with more than one rank something must have been
compressed, or the variant is refused.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.benchmarks.timing import Clock
from examples.language_module import LanguageModule
from lightning_taco import TacoTPStrategy
from lightning_taco.collectives.traffic import TrafficCounters
from lightning_taco.config import resolve_compression
from lightning_taco.data_parallel.settings import resolve_data_parallel
from lightning_taco.pipeline_parallel import resolve_pipeline

AXES = ("tensor", "pipeline", "data")
VARIANTS = ("none", *AXES, "all")


def main() -> None:
    arguments = parse()
    rows = measure(arguments)
    if dist.get_rank() == 0:
        print(table(rows))
        if arguments.output:
            settings = {key: str(value) for key, value in vars(arguments).items()}
            content = {"settings": settings, "torch": torch.__version__, "rows": rows}
            arguments.output.write_text(json.dumps(content, indent=1))
    dist.destroy_process_group()


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["none", "all"])
    parser.add_argument("--data_parallel_size", type=int, default=2)
    parser.add_argument("--pipeline_parallel_size", type=int, default=2)
    parser.add_argument("--tensor_parallel_size", type=int, default=2)
    parser.add_argument("--tensor_recipe", default="int8", help="`compression` of the strategy")
    parser.add_argument("--pipeline_recipe", default="int8", help="`pipeline_compression`")
    parser.add_argument("--data_recipe", default="sdp4bit", help="`data_parallel`")
    parser.add_argument("--node_size", type=int, help="data-parallel ranks of one node; default: those of the host")
    parser.add_argument("--min_bytes", type=int, help="smaller tensors are sent as they are; the recipes' by default")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--num_microbatches", type=int, default=4)
    parser.add_argument("--preset", default="2.7B", help="sizes of the GPT")
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--batch_size", type=int, default=8, help="samples of one data-parallel rank, in a step")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--warm_up_steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of each variant in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    return parser.parse_args(args)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant, the same on all ranks."""
    laps: dict[str, list[list[float]]] = {name: [] for name in arguments.variants}
    fits: dict[str, Fit] = {}
    for _ in range(arguments.rounds):
        for name in arguments.variants:
            fits[name] = Fit(arguments, name)
            laps[name].append(fits[name].run())
    times = _slowest([statistics.median(chain(*rounds)) for rounds in laps.values()])
    first = next(iter(fits.values()))
    return [
        {
            "variant": name,
            "step_ms": step_ms,
            "speedup": times[0] / step_ms,
            "spread": spread_of([statistics.median(each) for each in laps[name]]),
            "loss_gap": fit.losses[0] / first.losses[0] - 1,
            "bytes": fit.bytes_by_axis(),
        }
        for (name, fit), step_ms in zip(fits.items(), times, strict=True)
    ]


class Fit:
    """One training of one variant."""

    def __init__(self, arguments: argparse.Namespace, variant: str) -> None:
        self.arguments, self.variant = arguments, variant
        self.strategy = make_strategy(arguments, variant)
        self.losses: list[float] = []
        self._counters: dict[str, TrafficCounters] = {}

    def run(self) -> list[float]:
        """Milliseconds of each step but the first ones.

        Raises:
            RuntimeError: for an axis that is meant to be compressed and was not.
        """
        arguments, num_steps = self.arguments, self.arguments.warm_up_steps + self.arguments.steps
        laps = Laps(arguments.warm_up_steps, self._start_counting)
        trainer = pl.Trainer(
            strategy=self.strategy,
            accelerator=arguments.accelerator,
            devices=arguments.data_parallel_size * arguments.pipeline_parallel_size * arguments.tensor_parallel_size,
            precision=arguments.precision,
            max_steps=num_steps,
            gradient_clip_val=1.0,
            use_distributed_sampler=False,  # data-parallel ranks may train on the same tokens: it takes as long
            callbacks=[laps],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data: DataLoader[Any] = DataLoader(RandomTokens(arguments, num_steps), batch_size=arguments.batch_size)
        trainer.fit(self._model(), data)
        self.losses = laps.losses
        self._check()
        del trainer
        gc.collect()  # a model of its own for each fit: cycles would keep the one before
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return laps.milliseconds

    def bytes_by_axis(self) -> dict[str, dict[str, float]]:
        """What this rank sent in a step along each axis, and would have sent as it is."""
        num_steps = self.arguments.steps
        totals = {axis: counters.total() for axis, counters in self._counters.items()}
        return {
            axis: {"stock": total.stock_bytes / num_steps, "sent": total.sent_bytes / num_steps}
            for axis, total in totals.items()
            if total.num_messages
        }

    def _model(self) -> LanguageModule:
        names = ("preset", "num_layers", "sequence_length", "vocab_size")
        return LanguageModule("gpt", **{name: getattr(self.arguments, name) for name in names})

    def _start_counting(self) -> None:
        # Not from the first step: before it FSDP2's weights travel whole, to be copied on every rank.
        counts = self.strategy.pipeline.counts
        self._counters = {
            "tensor": self.strategy.compression.traffic,
            "data": self.strategy.data_parallel.traffic,
            **({} if counts is None else {"pipeline": counts.sent}),
        }
        for counters in self._counters.values():
            counters.clear()

    def _check(self) -> None:
        for axis in AXES:
            is_meant = self.variant in (axis, "all") and getattr(self.arguments, f"{axis}_parallel_size") > 1
            if is_meant and self._counters[axis].total(outcome="compressed").num_messages == 0:
                raise RuntimeError(f"{self.variant} compressed nothing along {axis}: {self._counters[axis].counts}")


class Laps(pl.Callback):
    """Times steps from the end of one to the end of the next, without waiting for the device in between.

    Args:
        num_skipped: steps at the start that are not timed; one or more.
        on_start: called after them.
    """

    def __init__(self, num_skipped: int, on_start: Callable[[], None]) -> None:
        self.num_skipped, self.on_start = num_skipped, on_start
        self.losses: list[float] = []
        self.milliseconds: list[float] = []
        self._losses: list[Tensor] = []
        self._clock: Clock | None = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._losses.append(outputs["loss"].detach())
        if self._clock is not None:
            self._clock.lap()
        elif batch_idx + 1 == self.num_skipped:
            self.on_start()
            self._clock = Clock(pl_module.device)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._clock is not None
        self.milliseconds = self._clock.laps()
        self.losses = [loss.item() for loss in self._losses]


class RandomTokens(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as a run takes; ``[S]`` inputs and ``[S]`` targets."""

    def __init__(self, arguments: argparse.Namespace, num_steps: int) -> None:
        shape = (num_steps * arguments.batch_size, arguments.sequence_length + 1)
        self.tokens = torch.randint(arguments.vocab_size, shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def make_strategy(arguments: argparse.Namespace, variant: str) -> TacoTPStrategy:
    """The strategy of a variant; axes of one rank are left as they are."""
    chosen = {
        "tensor": resolve_compression(arguments.tensor_recipe),
        "pipeline": resolve_pipeline(arguments.pipeline_recipe),
        "data": resolve_data_parallel(arguments.data_recipe),
    }
    settings: dict[str, Any] = {axis: chosen[axis] if variant in (axis, "all") else None for axis in AXES}
    if arguments.min_bytes is not None:
        settings = {axis: each and replace(each, min_bytes=arguments.min_bytes) for axis, each in settings.items()}
    if settings["data"] is not None:
        settings["data"] = replace(settings["data"], node_size=arguments.node_size)
    has_stages = arguments.pipeline_parallel_size > 1
    return TacoTPStrategy(
        compression=settings["tensor"],
        pipeline_compression=settings["pipeline"] if has_stages else None,
        data_parallel=settings["data"] if arguments.data_parallel_size > 1 else None,
        data_parallel_size=arguments.data_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_schedule=arguments.schedule if has_stages else "1F1B",
        num_microbatches=arguments.num_microbatches if has_stages else None,
        sample_every_n_steps=0,
    )


def spread_of(medians: list[float]) -> float:
    """From the fastest to the slowest round, as a share of the middle one."""
    return (max(medians) - min(medians)) / statistics.median(medians)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; ratios are to the first variant, bytes those of one rank in a step."""
    lines = [
        "| compressed | step, ms | speed-up | spread over rounds | tensor | pipeline | data | first loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sent = [f"{row['bytes'][axis]['sent'] / 2**20:.2f} MiB" if axis in row["bytes"] else "" for axis in AXES]
        lines.append(
            f"| {row['variant']} | {row['step_ms']:.1f} | {row['speedup']:.3f}x | {100 * row['spread']:.1f}% "
            f"| {' | '.join(sent)} | {100 * row['loss_gap']:+.4f}% |"
        )
    return "\n".join(lines)


def _slowest(milliseconds: list[float]) -> list[float]:
    """Of all ranks, each: stages do not take the same time."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    slowest = torch.tensor(milliseconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


if __name__ == "__main__":
    main()
