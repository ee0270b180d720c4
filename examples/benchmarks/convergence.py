"""What a codec costs in loss: branches from one checkpoint, over two tensor-parallel ranks, through the strategy.

    torchrun --nproc-per-node 2 -m examples.benchmarks.convergence --checkpoint /tmp/base --output convergence.json

A model is trained uncompressed past its early plateau, once; its weights, optimizer state and place in the text are
kept. Each branch goes on from there, with the same batches, and sends what its name says (see `branches.py`). Losses
are paired by batch, which resolves a hundredth of a percent where runs from scratch scatter by percents. Branches that
the output file holds already are left out, so a run that stopped goes on where it was.

Runs ``--from_scratch`` have no checkpoint: new weights and another order of the batches by their seed. They scatter far
more than codecs cost, so each stands beside the uncompressed run of its seed.

Steps are replayed as CUDA graphs (`graphed.py`). A branch with stochastic rounding cycles through several captures with
other random numbers.
"""

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from examples import gpt, llama
from examples.benchmarks.branches import Branch, branch, scratch_seed, simulate
from examples.benchmarks.graphed import GraphedStep
from examples.plans import initialize_weights, materialize, next_token_loss
from examples.text_data import TextDataModule
from lightning_taco import CompressionConfig
from lightning_taco.callbacks.versions import versions
from lightning_taco.fabric import TacoTPStrategy
from lightning_taco.strategies.compression import Compression
from lightning_taco.strategies.gradients import clip_gradients_by_norm
from lightning_taco.study import provenance, tables
from lightning_taco.study.candidates import Candidate, CodecCandidate, candidates_of
from lightning_taco.study.recorder import MessageRecorder, SiteSums
from lightning_taco.study.results import study_result
from lightning_taco.study.settings import StudySettings
from lightning_taco.study.timing import encode_decode_us

DEFAULT_BRANCHES = (
    "none none#2 taco e4m3p int8 int6 int5 int4 int8/int4 int6/int4 int6/int3 int5/int4 int6g/int4g int5g/int4g "
    "int6g/int3g int5g/int3g int6g/int4gs int6g/int3gs int6/int4s int5f/int4f int8_per_tensor rotated_e4m3_per_tensor"
)
NUM_STOCHASTIC_CAPTURES = 8
NUM_CALIBRATION_STEPS = 6


def main() -> None:
    arguments = parse()
    started = time.perf_counter()
    study = ConvergenceStudy(arguments)
    study.prepare_base()
    if arguments.study:
        study.study_messages(arguments.study)
    results = Results(arguments.output, vars(arguments), study.fabric.global_rank)
    seconds = 0.0
    for name in [*arguments.branches, *arguments.from_scratch]:
        if results.holds(name):
            continue
        if time.perf_counter() - started + 1.1 * seconds > arguments.budget_s:
            study.fabric.print(f"stopping before {name}: the budget of {arguments.budget_s:.0f} s is used up")
            break
        begun = time.perf_counter()
        try:
            result = study.run_branch(branch(name, arguments.min_bytes), scratch_seed(name))
        except Exception as error:
            results.add(name, {"error": repr(error)})  # so that the next run goes on with the others
            raise
        seconds = time.perf_counter() - begun
        results.add(name, result)
        study.fabric.print(
            f"{name:24s} {seconds:5.1f} s, step {result['step_ms']:.1f} ms, last train loss "
            f"{result['train_loss'][-1]:.4f}, validation {result['validation_on']:.5f} on, "
            f"{result['validation_off']:.5f} off, {time.perf_counter() - started:.0f} s since the start"
        )
    study.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the checkpoint, made if missing")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, gone on with if it is there")
    parser.add_argument("--branches", nargs="*", default=DEFAULT_BRANCHES.split(), help="names, see branches.py")
    parser.add_argument("--from_scratch", nargs="*", default=[], help="runs without a checkpoint: taco~0 has seed 0")
    parser.add_argument("--scratch_steps", type=int, default=600, help="of each run from scratch")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="no branch is begun after these seconds")
    parser.add_argument("--model", choices=["gpt", "llama"], default="gpt")
    parser.add_argument("--preset", default="350M")
    parser.add_argument("--num_layers", type=int)
    parser.add_argument("--hidden_size", type=int)
    parser.add_argument("--num_heads", type=int)
    parser.add_argument("--num_kv_heads", type=int)
    parser.add_argument("--ffn_size", type=int)
    parser.add_argument("--sequence_parallel", action="store_true")
    parser.add_argument("--files", nargs="*", help="glob patterns of text; default: the Python standard library")
    parser.add_argument("--max_bytes", type=int, default=120_000_000)
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--base_steps", type=int, default=2500)
    parser.add_argument("--steps", type=int, default=300, help="of each branch")
    parser.add_argument("--validation_batches", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--min_bytes", type=int, default=0)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--eager", action="store_true", help="capture no graphs")
    parser.add_argument("--study", type=Path, help="measure every codec on the checkpoint's messages; write here")
    parser.add_argument("--verify", action="store_true", help="compare replayed steps with eager ones")
    return parser.parse_args()


class Results:
    """The output file: settings, and a result for each branch; written after each."""

    def __init__(self, path: Path, settings: dict[str, Any], rank: int) -> None:
        self.path, self.rank = path, rank
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        self.content: dict[str, Any] = {"settings": plain, "torch": torch.__version__, "branches": {}}
        if path.exists():
            self.content["branches"] = json.loads(path.read_text())["branches"]

    def holds(self, name: str) -> bool:
        return name in self.content["branches"]

    def add(self, name: str, result: dict[str, Any]) -> None:
        self.content["branches"][name] = result
        if self.rank == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.content, indent=1))


class ConvergenceStudy:
    """One model on two ranks, its optimizer, its text, and the state that every branch starts from."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.strategy = TacoTPStrategy(self._parallelize, compression=CompressionConfig(), sample_every_n_steps=0)
        self.fabric = Fabric(
            strategy=self.strategy, accelerator=arguments.accelerator, devices=2, precision=arguments.precision
        )
        self.fabric.launch()
        seed_everything(0, verbose=False)
        self.device = self.fabric.device
        data = self._data()
        self.train_tokens, self.validation_tokens = (self._tokens(data, split) for split in ("train", "validation"))
        with torch.device("meta"):
            model = self._model()
        self.model = self.fabric.setup_module(model)
        self.inputs, self.targets = (
            torch.zeros(arguments.batch_size, arguments.sequence_length, dtype=torch.int64, device=self.device)
            for _ in range(2)
        )
        self.parameters = list(self.model.parameters())
        # An optimizer of this rank's own parts: AdamW works value by value, and plain tensors can be captured.
        self.local_parameters = [nn.Parameter(_local(parameter.detach())) for parameter in self.parameters]
        self.lr = torch.tensor(arguments.lr, device=self.device)
        self.optimizer = self._optimizer()
        self.base: list[Tensor] = []
        self.base_step = 0
        self.evaluate_off: GraphedStep | None = None

    def prepare_base(self) -> None:
        """Load the checkpoint, or train and save it."""
        path = self.arguments.checkpoint / f"rank_{self.fabric.global_rank}.pt"
        self._set_compression(None)
        if not path.exists():
            self._train_base(path)
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self.base_step, self.base = saved["step"], saved["state"]
        self._load_batch(self.train_tokens, 0)
        self._step()  # makes the optimizer's state
        self._restore()
        if self.arguments.verify:
            for name in ("none", "int8"):
                self._verify(branch(name, self.arguments.min_bytes))
        self._set_compression(None)
        self.evaluate_off = self._graphed(self._evaluate)
        self.fabric.print(f"base: step {self.base_step}, validation loss {self._validate(self.evaluate_off):.5f}")

    def close(self) -> None:
        """Let go of every capture: communicators that a graph still holds keep the process from ending."""
        self.evaluate_off = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._set_compression(None)

    def run_branch(self, chosen: Branch, seed: int | None = None) -> dict[str, Any]:
        """Go on as `chosen` says: from the checkpoint, or from new weights and another order of batches by `seed`."""
        self._set_compression(chosen)
        if chosen.is_calibrated:
            for step in range(NUM_CALIBRATION_STEPS):
                self._load_batch(self.train_tokens, self.base_step + step)
                self._step()
        self.lr.fill_(self.arguments.lr)
        captures = [self._graphed(self._step)]
        if chosen.is_stochastic and captures[0].graph is not None:
            captures += [self._graphed(self._step, captures[0]) for _ in range(NUM_STOCHASTIC_CAPTURES - 1)]
        ratio = self.strategy.compression.compression_ratio  # of training: evaluation sends nothing backward
        evaluate_on = self._graphed(self._evaluate, captures[0])
        if seed is None:
            self._restore()
            losses, seconds = self._train(captures, self.base_step, self.arguments.steps)
        else:
            initialize_weights(self.model.module, seed)
            self._clear_optimizer()
            losses, seconds = self._train(captures, 0, self.arguments.scratch_steps, seed, warm_up=True)
        result = {
            "bits": chosen.bits,
            "train_loss": losses,
            "step_ms": 1000 * seconds / len(losses),
            "compression_ratio": ratio,
            "validation_on": self._validate(evaluate_on),
        }
        self._set_compression(None)
        assert self.evaluate_off is not None
        return result | {"validation_off": self._validate(self.evaluate_off)}

    def study_messages(self, folder: Path) -> None:
        """Measure codecs on all messages of one step from the checkpoint, as `lightning-taco study` does."""
        self._set_compression(branch("int8", self.arguments.min_bytes))
        session = self.strategy.session
        assert session is not None
        settings = StudySettings(num_steps=1, max_messages=1)
        candidates = candidates_of(settings, session.element)
        recorder = MessageRecorder(candidates, session.group, settings.max_messages)
        self._restore()
        self._load_batch(self.train_tokens, self.base_step)
        session.observers.append(recorder)
        self._step()
        session.observers.remove(recorder)
        sums = recorder.read()
        if self.fabric.global_rank == 0:
            self._write_study(sums, candidates, settings, folder)
        self.fabric.barrier()
        self._restore()

    def _write_study(
        self, sums: list[SiteSums], candidates: tuple[Candidate, ...], settings: StudySettings, folder: Path
    ) -> None:
        largest = max(sums, key=lambda each: torch.Size(each.shape).numel())
        values = torch.randn(1, torch.Size(largest.shape).numel(), device=self.device).to(largest.dtype)
        times = {
            each.name: encode_decode_us(each.codec, values) for each in candidates if isinstance(each, CodecCandidate)
        }
        made = {
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": provenance.command(),
            "versions": versions(),
            "device": provenance.device_name(self.device),
            "num_ranks": self.fabric.world_size,
            "tensor_parallel_size": self.fabric.world_size,
            "model": f"{self.arguments.model} {self.arguments.preset}",
            "precision": self.arguments.precision,
            "trained_with": {"forward": "as it is", "backward": "as it is", "min_bytes": self.arguments.min_bytes},
            "settings": asdict(settings),
            "first_step": self.base_step,
            "last_step": self.base_step,
            "timed": f"one message of {values.numel()} {str(largest.dtype).removeprefix('torch.')} values",
        }
        reasons = self.strategy.compression.traffic.stock_reasons()
        result = study_result(sums, candidates, times, made, reasons)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "study.json").write_text(json.dumps(result.as_json(), indent=1))
        (folder / "study.md").write_text(tables.markdown(result))

    def _train(
        self, steps: list[GraphedStep], first: int, count: int, order: int = 0, *, warm_up: bool = False
    ) -> tuple[list[float], float]:
        losses = torch.zeros(count, device=self.device)
        started = time.perf_counter()
        for index in range(count):
            if warm_up:
                self._warm_up(index)
            self._load_batch(self.train_tokens, first + index, order)
            losses[index].copy_(steps[index % len(steps)]())
        values = losses.tolist()
        return values, time.perf_counter() - started

    def _train_base(self, path: Path) -> None:
        arguments = self.arguments
        self._load_batch(self.train_tokens, 0)
        initial = [tensor.clone() for tensor in self.local_parameters]
        self._step()  # makes the optimizer's state
        step = self._graphed(self._step)
        with torch.no_grad():
            torch._foreach_copy_(list(self.local_parameters), initial)
        self._clear_optimizer()
        losses = torch.zeros(arguments.base_steps, device=self.device)
        started = time.perf_counter()
        for index in range(arguments.base_steps):
            self._warm_up(index)
            self._load_batch(self.train_tokens, index)
            losses[index].copy_(step())
            if index % 250 == 249:
                loss, seconds = losses[index - 49 : index + 1].mean().item(), time.perf_counter() - started
                self.fabric.print(f"base step {index + 1}: loss {loss:.4f}, {seconds:.0f} s")
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": arguments.base_steps, "state": [tensor.detach() for tensor in self._state()]}, path)

    def _warm_up(self, step: int) -> None:
        self.lr.fill_(self.arguments.lr * min(1.0, (step + 1) / (self.arguments.warmup_steps + 1)))

    def _verify(self, chosen: Branch) -> None:
        """Replays must give the first loss of eager steps, and stay near: some backwards add in any order."""
        self._set_compression(chosen)
        eager, replayed = [], []
        for losses, enabled in ((eager, False), (replayed, True)):
            step = self._graphed(self._step, enabled=enabled)
            self._restore()
            losses += self._train([step], self.base_step, 3)[0]
        self.fabric.print(f"{chosen.name}: three steps, eager {eager}, replayed {replayed}")
        if eager[0] != replayed[0] or max(abs(a - b) for a, b in zip(eager, replayed, strict=True)) > 1e-3 * eager[0]:
            raise AssertionError(f"replayed steps of {chosen.name} differ from eager ones: {eager}, {replayed}")
        self._restore()

    def _step(self) -> Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        self.model.train()
        with loss_parallel():
            loss = next_token_loss(self.model(self.inputs), self.targets)
            self.fabric.backward(loss)
        clip_gradients_by_norm(self.parameters, 1.0)
        for local, parameter in zip(self.local_parameters, self.parameters, strict=True):
            gradient = parameter.grad
            if isinstance(gradient, DTensor):  # a whole gradient of a split embedding, for one
                gradient = gradient.redistribute(placements=parameter.placements)
            local.grad = _local(gradient)
        self.optimizer.step()
        return loss.detach()

    def _evaluate(self) -> Tensor:
        self.model.eval()
        with torch.no_grad(), loss_parallel():
            return next_token_loss(self.model(self.inputs), self.targets)

    def _validate(self, evaluate: GraphedStep) -> float:
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for index in range(self.arguments.validation_batches):
            self._load_batch(self.validation_tokens, index)
            total += evaluate()
        return total.item() / self.arguments.validation_batches

    def _graphed(
        self, function: Callable[[], Tensor], other: GraphedStep | None = None, *, enabled: bool = True
    ) -> GraphedStep:
        return GraphedStep(function, self.device, enabled=enabled and not self.arguments.eager, other=other)

    def _set_compression(self, chosen: Branch | None) -> None:
        self.strategy.compression.stop()
        config = None if chosen is None else chosen.compression
        self.strategy.compression = Compression(config, 0)
        self.strategy.compression.start(self.model, self.strategy.device_mesh, self.device)
        session = self.strategy.session
        if session is not None and chosen is not None and chosen.quantizer is not None:
            simulate(session, chosen.quantizer)

    def _load_batch(self, tokens: Tensor, step: int, order: int = 0) -> None:
        """Copy batch `step` of the windows of `tokens`, shuffled by `order`, to where the graphs read it."""
        length, size = self.arguments.sequence_length, self.arguments.batch_size
        num_batches = (len(tokens) - 1) // length // size
        epoch, index = divmod(step, num_batches)
        order = torch.randperm(num_batches * size, generator=torch.Generator().manual_seed(epoch + 1000 * order))
        starts = order[index * size : (index + 1) * size].to(self.device) * length
        window = tokens[starts.unsqueeze(1) + torch.arange(length + 1, device=self.device)].long()
        self.inputs.copy_(window[:, :-1])
        self.targets.copy_(window[:, 1:])

    def _state(self) -> list[Tensor]:
        """Everything that a step changes, in place."""
        state = [self.optimizer.state[parameter] for parameter in self.local_parameters]
        return [
            *self.local_parameters,
            *(values[name] for name in ("exp_avg", "exp_avg_sq", "step") for values in state),
        ]

    @torch.no_grad()
    def _restore(self) -> None:
        for tensor, saved in zip(self._state(), self.base, strict=True):
            tensor.copy_(saved)

    @torch.no_grad()
    def _clear_optimizer(self) -> None:
        for tensor in self._state()[len(self.local_parameters) :]:
            tensor.zero_()

    def _optimizer(self) -> torch.optim.AdamW:
        groups = [
            {"params": [weight for weight in self.local_parameters if weight.dim() > 1], "weight_decay": 0.1},
            {"params": [weight for weight in self.local_parameters if weight.dim() <= 1], "weight_decay": 0.0},
        ]
        on_cuda = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=on_cuda, capturable=on_cuda)

    def _model(self) -> nn.Module:
        arguments = self.arguments
        sizes = ("vocab_size", "sequence_length", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size")
        given = {name: value for name in sizes if (value := getattr(arguments, name)) is not None}
        if arguments.model == "gpt":
            return gpt.GPT(gpt.GPTConfig.preset(arguments.preset, **given))
        return llama.Llama(llama.LlamaConfig.preset(arguments.preset, **given))

    def _parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        split = gpt.parallelize if self.arguments.model == "gpt" else llama.parallelize
        settings = {"sequence_parallel": self.arguments.sequence_parallel, "loss_parallel": True}
        return materialize(split(model, mesh["tensor_parallel"], **settings), self.fabric.device, seed=0)

    def _data(self) -> TextDataModule:
        arguments = self.arguments
        data = TextDataModule(
            arguments.files or None,
            vocab_size=arguments.vocab_size,
            sequence_length=arguments.sequence_length,
            batch_size=arguments.batch_size,
            max_bytes=arguments.max_bytes,
        )
        with self.fabric.rank_zero_first(local=True):
            data.prepare_data()
        data.setup()
        return data

    def _tokens(self, data: TextDataModule, split: str) -> Tensor:
        tokens = data.samples(split).tokens
        self.fabric.print(f"{split}: {len(tokens) / 1e6:.1f} million tokens")
        return torch.from_numpy(tokens.astype("int32")).to(self.device)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    try:
        main()
    except Exception:
        # At once: communicators that a graph still holds would keep the process from ending.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
