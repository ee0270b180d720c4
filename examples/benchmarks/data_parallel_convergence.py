"""What compressed data parallelism costs in loss, and how far the copy of the weights is from the weights::

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/benchmarks/data_parallel_convergence.py

A byte-level GPT under FSDP2 (weights gathered in `--gather`, gradients reduced in fp32) is trained on the Python
standard library's sources for `--pretrain-steps`, and from there, with the same batches, `--steps` further in each way:

    exact                as FSDP2 does it
    bf16 gradients       gradients reduced in bf16: the noise floor
    tlq_hs               gradients in 8 bits inside a node and 4 between nodes
    sdp4bit              the same, and weights as 4-bit differences from a copy
    plain 4-bit weights  the same gradients, and the weights themselves in 4 bits: shown to be worse

Ranks are two nodes of half the ranks each. The gap in validation loss is of the exact weights (a model in
eval mode gathers them), but for plain 4-bit weights, which has no others; the gap in training loss is the mean over the
last `--last` steps, paired by batch, with its standard error.

Drift is the distance of the copy from the fp32 weights, over their norm, after `--drift-steps` of `sdp4bit`; beside it
that of a copy in bf16 that is kept in the same way, that of the weights cast to bf16, and that of a copy in bf16 to
which differences of consecutive weights are added, without feedback of what their codes got wrong.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `examples` is not an installed package

from examples.gpt import GPT, GPTConfig
from lightning_taco import CodecConfig
from lightning_taco._compat import all_gather_single
from lightning_taco.codec import decode, encode
from lightning_taco.data_parallel import DataParallelConfig, DataParallelSession, compress_fsdp
from lightning_taco.data_parallel.settings import weight_differences

SEQUENCE_LENGTH = 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = ("exact", "bf16 gradients", "tlq_hs", "sdp4bit", "plain 4-bit weights")
CONFIG = GPTConfig.preset(
    "tiny", vocab_size=256, sequence_length=SEQUENCE_LENGTH, num_layers=2, hidden_size=128, num_heads=4
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=500, help="of each way, from the same weights")
    parser.add_argument("--last", type=int, default=200, help="steps over which training losses are compared")
    parser.add_argument("--drift-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of each rank")
    parser.add_argument("--gather", choices=list(DTYPES), default="fp32", help="bf16 is slow on most CPUs")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    results = measure(arguments)
    if dist.get_rank() == 0:
        print_results(results)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways, one after the other, from one set of weights."""
    text = Text(arguments.batch_size)
    model = build("exact", DTYPES[arguments.gather])
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    train(model, optimizer, text, range(arguments.pretrain_steps))
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    results: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(arguments).items()}}
    steps = range(arguments.pretrain_steps, arguments.pretrain_steps + arguments.steps)
    for way in arguments.ways:
        began = time.perf_counter()
        model = build(way, DTYPES[arguments.gather])
        model.load_state_dict(start[0])
        session = compress(model, way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
        optimizer.load_state_dict(copy.deepcopy(start[1]))
        drift = Drift(model, session, arguments.drift_steps) if way == "sdp4bit" else None
        losses = train(model, optimizer, text, steps, drift)
        results[way] = {
            "training losses": losses,
            "validation loss": validate(model, text),
            "seconds": time.perf_counter() - began,
        }
        if drift is not None:
            results["drift"] = drift.result
        if session is not None:
            results[way]["bits"] = {what: session.traffic.bits_per_value(what) for what in session.traffic.num_values}
    for way in arguments.ways[1:]:
        results[way] |= gaps(results[way], results[arguments.ways[0]], arguments.last)
    return results


def gaps(ours: dict[str, Any], exact: dict[str, Any], last: int) -> dict[str, float]:
    """In percent of the exact losses."""
    pairs = list(zip(ours["training losses"][-last:], exact["training losses"][-last:], strict=True))
    apart = [100 * (one / other - 1) for one, other in pairs]
    return {
        "validation gap %": 100 * (ours["validation loss"] / exact["validation loss"] - 1),
        "training gap %": statistics.fmean(apart),
        "standard error %": statistics.stdev(apart) / math.sqrt(len(apart)),
    }


class Text:
    """Bytes of the Python standard library's sources; batches are a function of the step and the rank."""

    def __init__(self, batch_size: int, max_bytes: int = 4_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        joined = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:max_bytes]
        self.data = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
        self.batch_size, self.held_out = batch_size, len(self.data) // 20

    def batch(self, step: int, *, is_validation: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``[B, S]`` each."""
        seed = (2 * step + is_validation) * dist.get_world_size() + dist.get_rank()
        low, high = (0, self.held_out) if is_validation else (self.held_out, len(self.data))
        starts = torch.randint(
            low, high - SEQUENCE_LENGTH - 1, (self.batch_size,), generator=torch.Generator().manual_seed(seed)
        )
        rows = torch.stack([self.data[start : start + SEQUENCE_LENGTH + 1] for start in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]


def build(way: str, gathered_in: torch.dtype) -> Any:
    """The model under FSDP2, as `way` reduces gradients."""
    model = GPT(CONFIG, seed=0)
    reduce_dtype = torch.bfloat16 if way == "bf16 gradients" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=gathered_in, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def compress(model: Any, way: str) -> DataParallelSession | None:
    if way in ("exact", "bf16 gradients"):
        return None
    weights = weight_differences() if way == "sdp4bit" else None
    node_size = max(1, dist.get_world_size() // 2)
    session = compress_fsdp(model, DataParallelConfig(min_bytes=0, node_size=node_size, weights=weights))
    if way == "plain 4-bit weights":
        for module in (*model.blocks, model):
            module.set_custom_all_gather(PlainGather())
    return session


class PlainGather(AllGather):
    """Gathers the weights themselves in 4 bits, rounded to nearest: what differences are there to avoid."""

    codec = CodecConfig(element="int4", block_size=2048, rotation=False)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        message = encode(input_tensor.view(1, -1), self.codec)
        messages = message.new_empty(group.size(), message.shape[1])
        all_gather_single(messages.view(-1), message.view(-1), group=group)
        decoded = decode(messages, self.codec, input_tensor.numel(), output_tensor.dtype)
        output_tensor.copy_(decoded.reshape(-1))


class Drift:
    """How far copies of this rank's shards are from them."""

    def __init__(self, model: Any, session: DataParallelSession | None, num_steps: int) -> None:
        assert session is not None
        self.result: dict[str, float] = {}
        self._session, self._num_steps, self._step = session, num_steps, 0
        self._units = {"": model} | {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
        self._last = {name: self._shard(unit) for name, unit in self._units.items()}
        self._without_feedback = {name: shard.bfloat16() for name, shard in self._last.items()}
        self._in_bf16 = {name: shard.bfloat16() for name, shard in self._last.items()}

    def after_forward(self) -> None:
        """The copy is as near to the weights as it gets: between the gather and the optimizer's step."""
        self._step += 1
        if self._step > self._num_steps:
            return
        for name, unit in self._units.items():
            shard = self._shard(unit)
            self._add(self._without_feedback[name], shard - self._last[name])
            self._add(self._in_bf16[name], shard.bfloat16().float() - self._in_bf16[name])
            self._last[name] = shard
        if self._step == self._num_steps:
            rank = dist.get_rank()
            copies = {name: gather._held()[rank] for name, gather in self._session.gathers.items()}
            self.result = {
                "copy %": self._distance(copies),
                "copy in bf16 %": self._distance(self._in_bf16),
                "bf16 cast %": self._distance({name: shard.bfloat16() for name, shard in self._last.items()}),
                "without feedback %": self._distance(self._without_feedback),
            }

    def _add(self, copy_in_bf16: Tensor, difference: Tensor) -> None:
        """As `WeightDifferenceGather` does."""
        codec = weight_differences()
        message = encode(difference.view(1, -1), codec, seed=self._step)
        copy_in_bf16.add_(decode(message, codec, difference.numel(), torch.bfloat16)[0])

    def _distance(self, copies: dict[str, Tensor]) -> float:
        """Over all ranks, in percent."""
        squares = torch.zeros(2, dtype=torch.float64)
        for name, shard in self._last.items():
            squares[0] += (copies[name].double() - shard.double()).square().sum()
            squares[1] += shard.double().square().sum()
        dist.all_reduce(squares)
        return 100 * (squares[0] / squares[1]).sqrt().item()

    @staticmethod
    def _shard(unit: Any) -> Tensor:
        """This rank's row of a gather, in fp32."""
        from lightning_taco._compat import fsdp_param_groups

        (group,) = fsdp_param_groups(unit)
        return torch.cat([param._sharded_param_data.float() for param in group.fsdp_params]).clone()


def train(model: Any, optimizer: Any, text: Text, steps: range, drift: Drift | None = None) -> list[float]:
    """Losses, averaged over ranks."""
    losses = []
    for step in steps:
        inputs, targets = text.batch(step)
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        if drift is not None:
            drift.after_forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


@torch.no_grad()
def validate(model: Any, text: Text, num_batches: int = 40) -> float:
    model.eval()
    losses = []
    for step in range(num_batches):
        inputs, targets = text.batch(step, is_validation=True)
        losses.append(mean_over_ranks(F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())))
    model.train()
    return statistics.fmean(losses)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def print_results(results: dict[str, Any]) -> None:
    for way in (way for way in WAYS if way in results):
        shown = {name: value for name, value in results[way].items() if name != "training losses"}
        print(f"{way:>20}  {shown}")
    print(f"{'drift':>20}  {results.get('drift')}")


if __name__ == "__main__":
    main()
