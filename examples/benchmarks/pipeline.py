"""Pipeline steps of GPT stages: torch's own transfers, ours as they are, and compressed; bytes, time and bubble.

    torchrun --nproc-per-node 2 -m examples.benchmarks.pipeline --variants torch none int8 int4
    NCCL_P2P_DISABLE=1 torchrun ...     # and other links, see collectives.py
    torchrun --nproc-per-node 2 -m examples.benchmarks.pipeline --preset tiny --num_layers 2 --device cpu \
        --batch_size 4 --num_microbatches 4 --sequence_length 32 --steps 2 --rounds 2

All ranks are stages of one pipeline. Variants take turns on one model: in each round each runs `--steps` steps (forward
and backward of all micro-batches), timed as a whole by CUDA events; figures are medians over rounds.

The bubble of a rank is the share of a step in which it computes nothing: one minus the time between the events around
each forward and backward of a micro-batch, over that of the step. What a codec takes, what a transfer takes and
does not hide, and what the ranks tell each other is in it too. Theory, with p ranks, m micro-batches and v stages a
rank: (p - 1) / (v m + p - 1), whatever multiple of forward a backward takes; none for the schedules that are named so.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

from examples import gpt
from examples.plans import materialize, next_token_loss
from lightning_taco.pipeline_parallel import (
    PIPELINE_RECIPES,
    SCHEDULES,
    Agreement,
    PipelineConfig,
    PipelineEngine,
    cut,
    host_group,
    make_layout,
    resolve_pipeline,
)
from lightning_taco.pipeline_parallel.local_stages import LocalStages
from lightning_taco.pipeline_parallel.schedules import SPLIT_BACKWARD

STOCK = "torch"


def main() -> None:
    arguments = parse()
    device = open_ranks(arguments.device)
    benchmark = PipelineBenchmark(arguments, device)
    rows = benchmark.measure()
    if dist.get_rank() == 0:
        print(table(rows, theoretical_bubble(benchmark.layout, arguments.num_microbatches)))
        if arguments.output:
            settings = {key: str(value) for key, value in vars(arguments).items()}
            arguments.output.write_text(json.dumps({"settings": settings, "torch": torch.__version__, "rows": rows}))
    dist.destroy_process_group()


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [STOCK, *PIPELINE_RECIPES]
    parser.add_argument("--variants", nargs="+", default=[STOCK, "none", "int8", "int4"], choices=names)
    parser.add_argument("--schedule", default="1F1B", choices=SCHEDULES)
    parser.add_argument("--num_microbatches", type=int, default=8)
    parser.add_argument("--preset", default="2.7B", help="sizes of the GPT")
    parser.add_argument("--num_layers", type=int, help="blocks of all stages; the preset's by default")
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=8, help="samples of all micro-batches together")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=5, help="of each variant in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    return parser.parse_args(args)


def whole_size_range(recipe: str) -> PipelineConfig | None:
    """The settings of a recipe, for tensors of every size."""
    config = resolve_pipeline(recipe)
    return None if config is None else replace(config, min_bytes=0)


def open_ranks(kind: str) -> torch.device:
    """Join the ranks that torchrun has started, over NCCL or gloo."""
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        is_cuda = device.type == "cuda"
        dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    return device


class PipelineBenchmark:
    """The stages of one GPT, and a pipeline over them for each variant."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        group = dist.group.WORLD
        assert group is not None
        self.layout = make_layout(arguments.schedule, group.size())
        self.holder = nn.ModuleDict({"model": self._model(group.rank())})
        self.agreement = Agreement(group, host_group(group, [range(group.size())]), device)
        shape = (arguments.batch_size, arguments.sequence_length + 1)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(arguments.vocab_size, shape, generator=generator).to(device)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.engines = {
            name: PipelineEngine(self.holder, self.agreement, arguments.num_microbatches, whole_size_range(name))
            for name in arguments.variants
            if name != STOCK
        }
        self._stock = self._stock_step() if STOCK in arguments.variants else None

    def measure(self) -> list[dict[str, Any]]:
        """A row for each variant; the same on all ranks."""
        times: dict[str, list[float]] = {name: [] for name in self.arguments.variants}
        busy: dict[str, list[float]] = {name: [] for name in self.arguments.variants}
        losses = {name: self._run(name, 1)[2] for name in self.arguments.variants}  # compiles, opens communicators
        for _ in range(self.arguments.rounds):
            for name in self.arguments.variants:
                step_ms, busy_ms, _ = self._run(name, self.arguments.steps)
                times[name].append(step_ms)
                busy[name].append(busy_ms)
        return [self._row(name, times, busy[name], losses) for name in self.arguments.variants]

    def _run(self, name: str, num_steps: int) -> tuple[float, float, float]:
        """Milliseconds of a step, of its computation on this rank, and the loss of the last."""
        engine = self.engines.get(name)
        spans = Spans(self.device)
        loss = 0.0
        if engine is not None:
            engine.counts.sent.clear()
            engine.step.forward_scope = engine.step.backward_scope = spans.around
        dist.barrier()
        with spans.around(0, is_step=True):
            for _ in range(num_steps):
                self.holder.zero_grad()
                loss = self._stock() if engine is None else self._step(engine)
        step_ms, busy_ms = spans.read()
        return step_ms / num_steps, busy_ms / num_steps, float(loss)

    def _step(self, engine: PipelineEngine) -> Tensor:
        def step(root: Any, part: tuple[Tensor, Tensor]) -> Tensor:
            return next_token_loss(root["model"](part[0]), part[1])

        return engine.run(self.batch, step, is_training=True, loss_of=lambda loss: loss)[0].result

    def _stock_step(self) -> Callable[[], float]:
        """The same stages as torch's own `PipelineStage` runs them."""
        modules = LocalStages(self.holder).modules
        stages = [
            pipelining.PipelineStage(module, stage, self.layout.num_stages, self.device, group=self.agreement.group)
            for stage, module in modules.items()
        ]
        kind = pipelining.schedules.get_schedule_class(self.layout.schedule)
        given = stages if self.layout.has_several_stages_a_rank else stages[0]
        schedule = kind(given, self.arguments.num_microbatches, loss_fn=next_token_loss)
        inputs, targets = self.batch

        def run() -> float:
            losses: list[Tensor] = []
            first = (inputs,) if 0 in modules else ()
            last = {"target": targets, "losses": losses} if self.layout.num_stages - 1 in modules else {}
            schedule.step(*first, return_outputs=False, **last)
            mean = torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)
            dist.all_reduce(mean)
            return mean.item()

        return run

    def _model(self, rank: int) -> gpt.GPT:
        names = {name: getattr(self.arguments, name) for name in ("vocab_size", "sequence_length")}
        if self.arguments.num_layers is not None:
            names["num_layers"] = self.arguments.num_layers
        with torch.device("meta"):
            model = gpt.GPT(gpt.GPTConfig.preset(self.arguments.preset, **names))
        cut(model, self.layout, rank)
        return materialize(model, self.device, seed=0).to(getattr(torch, self.arguments.dtype))

    def _row(
        self, name: str, times: dict[str, list[float]], busy: list[float], losses: dict[str, float]
    ) -> dict[str, Any]:
        step_ms, first = statistics.median(times[name]), next(iter(times))
        mine = torch.tensor([step_ms, statistics.median(busy), 0.0, 0.0], dtype=torch.float64)
        engine = self.engines.get(name)
        if engine is not None:
            total = engine.counts.sent.total()
            mine[2:] = torch.tensor([total.stock_bytes, total.sent_bytes]) / self.arguments.steps
        everyone = [each.tolist() for each in self._gathered(mine)]
        stock_bytes, sent_bytes = (sum(each[place] for each in everyone) for place in (2, 3))
        return {
            "variant": name,
            "step_ms": max(each[0] for each in everyone),
            "speedup": statistics.median(times[first]) / step_ms,
            "spread": (max(times[name]) - min(times[name])) / step_ms,
            "ratio": stock_bytes / sent_bytes if sent_bytes else 1.0,
            "sent_bytes": sent_bytes,
            "bubble": None if engine is None else statistics.mean(1 - each[1] / each[0] for each in everyone),
            "loss_gap": losses[name] / losses[first] - 1,
        }

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.agreement.host.size())]
        dist.all_gather(gathered, mine, group=self.agreement.host)
        return gathered


class Spans:
    """Milliseconds of a step and of the computations in it, by events on CUDA and by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"
        self._steps: list[tuple[Any, Any]] = []
        self._parts: list[tuple[Any, Any]] = []

    @contextmanager
    def around(self, _: int, *, is_step: bool = False) -> Iterator[None]:
        """Measure what is done within."""
        start = self._mark()
        yield
        (self._steps if is_step else self._parts).append((start, self._mark()))

    def read(self) -> tuple[float, float]:
        """Of the steps, and of all parts together; waits for the device."""
        if self._has_events:
            torch.cuda.synchronize()
        return self._total(self._steps), self._total(self._parts)

    def _total(self, spans: list[tuple[Any, Any]]) -> float:
        if self._has_events:
            return sum(start.elapsed_time(end) for start, end in spans)
        return sum(1000 * (end - start) for start, end in spans)

    def _mark(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def theoretical_bubble(layout: Any, num_microbatches: int) -> float:
    """Share of a step in which a rank waits, where all stages take the same time.

    >>> theoretical_bubble(make_layout("1F1B", 2), 7), theoretical_bubble(make_layout("Interleaved1F1B", 4), 8)
    (0.125, 0.15789473684210525)
    """
    if layout.schedule in SPLIT_BACKWARD:
        return 0.0
    waiting = layout.num_ranks - 1
    return waiting / (layout.num_stages // layout.num_ranks * num_microbatches + waiting)


def table(rows: list[dict[str, Any]], theory: float) -> str:
    """Markdown; speed-ups and losses are against the first variant."""
    lines = [
        f"| variant | step, ms | speed-up | spread over rounds | sent a step | smaller | bubble (theory {theory:.1%}) "
        "| first loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bubble = "" if row["bubble"] is None else f"{row['bubble']:.1%}"
        sent = f"{row['sent_bytes'] / 2**20:.2f} MiB" if row["sent_bytes"] else ""
        lines.append(
            f"| {row['variant']} | {row['step_ms']:.1f} | {row['speedup']:.3f}x | {100 * row['spread']:.1f}% | {sent} "
            f"| {row['ratio']:.2f}x | {bubble} | {100 * row['loss_gap']:+.4f}% |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
