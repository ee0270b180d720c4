"""Training steps under `TacoTPStrategy(compression=None)` against Lightning's own `ModelParallelStrategy`.

    torchrun --nproc-per-node 2 -m examples.benchmarks.off_against_lightning
    torchrun --nproc-per-node 2 -m examples.benchmarks.off_against_lightning --accelerator cpu --precision 32-true \
        --num_layers 2 --hidden_size 256 --num_heads 4 --sequence_length 128 --vocab_size 512 --rounds 15

One model and optimizer for each strategy, of the same weights, and the same batch: they take turns, and their losses
have to be equal bit for bit after every round. The ratio is that of the medians over rounds of a round's median step.
"""

import argparse
import statistics
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from examples import gpt
from examples.benchmarks.step_time import add_model_arguments, model_config
from examples.benchmarks.timing import Clock
from examples.plans import materialize, next_token_loss
from lightning_taco.fabric import TacoTPStrategy


def main() -> None:
    arguments = parse()
    runs = {
        "Lightning": Run(arguments, lambda plan: ModelParallelStrategy(plan, tensor_parallel_size=arguments.devices)),
        "compression=None": Run(arguments, lambda plan: TacoTPStrategy(plan, compression=None)),
    }
    for run in runs.values():
        run.steps(arguments.warm_up_steps)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(arguments.rounds):
        losses = set()
        for name, run in list(runs.items())[:: -1 if index % 2 else 1]:  # neither is always the first
            milliseconds, loss = run.steps(arguments.steps)
            times[name].append(statistics.median(milliseconds))
            losses.add(loss)
        if len(losses) != 1:
            raise RuntimeError(f"the strategies' losses differ: {sorted(losses)}")
    medians = {name: statistics.median(each) for name, each in times.items()}
    first = medians["Lightning"]
    run.fabric.print("| strategy | step, ms | against Lightning's | spread over rounds |\n|---|---|---|---|")
    for name, milliseconds in medians.items():
        spread = (max(times[name]) - min(times[name])) / milliseconds
        run.fabric.print(
            f"| {name} | {milliseconds:.2f} | {100 * (milliseconds / first - 1):+.2f}% | {100 * spread:.1f}% |"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each strategy in each round")
    parser.add_argument("--rounds", type=int, default=5)
    add_model_arguments(parser)
    return parser.parse_args()


class Run:
    """A model under one strategy."""

    def __init__(self, arguments: argparse.Namespace, strategy: Any) -> None:
        self.fabric = Fabric(
            strategy=strategy(self._parallelize),
            accelerator=arguments.accelerator,
            devices=arguments.devices,
            precision=arguments.precision,
        )
        self.fabric.launch()
        seed_everything(0, verbose=False)
        with torch.device("meta"):
            model = gpt.GPT(model_config(arguments))
        self.model = self.fabric.setup_module(model)
        self.optimizer = self.fabric.setup_optimizers(
            torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        )
        shape = (arguments.batch_size, arguments.sequence_length + 1)
        tokens = torch.randint(arguments.vocab_size, shape, device=self.fabric.device)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def steps(self, num_steps: int) -> tuple[list[float], float]:
        """Milliseconds of each step, and the last loss."""
        self.fabric.barrier()
        clock = Clock(self.fabric.device)
        for _ in range(num_steps):
            loss = next_token_loss(self.model(self.inputs), self.targets)
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            clock.lap()
        return clock.laps(), loss.item()

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model = gpt.parallelize(model, mesh["tensor_parallel"], sequence_parallel=False)
        return materialize(model, self.fabric.device, seed=0)


if __name__ == "__main__":
    main()
