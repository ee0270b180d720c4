"""``min_bytes="auto"`` through the Trainer strategy on two gloo ranks: what it reads, measures, says and compresses."""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback

from lightning_taco import CodecConfig, CompressionConfig, TacoTPStrategy
from lightning_taco import fabric as taco_fabric
from lightning_taco.callbacks.run_logger import RunLogger
from lightning_taco.collectives import all_reduce
from lightning_taco.collectives.algorithms import KINDS
from lightning_taco.collectives.break_even import BreakEven, Timing
from lightning_taco.collectives.break_even_file import Measured, cache_path, load, save
from lightning_taco.collectives.calibration import Ladder, RankGroup
from lightning_taco.collectives.hierarchy import Hierarchy
from lightning_taco.collectives.topology import Topology
from lightning_taco.collectives.traffic import compressed_sent_bytes
from lightning_taco.dtensor.exchange import Exchange
from lightning_taco.dtensor.session import COMPRESSED, CompressionSession
from lightning_taco.strategies import break_even as deciding
from tests.lightning_models import (
    TinyLm,
    TinyModule,
    apply_tiny_plan,
    captured_messages,
    make_trainer,
    tiny_dataloader,
    tiny_plan,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked, run_threads
from tests.timings import INT4, INT8, hand_made, timing

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("warm_lightning")


def fit(
    config: CompressionConfig, model: dict[str, Any] | None = None, data_parallel_size: int = 1, **settings: Any
) -> tuple[TacoTPStrategy, list[str]]:
    strategy = TacoTPStrategy(config, data_parallel_size, dist.get_world_size() // data_parallel_size)
    with captured_messages() as texts:
        trainer = make_trainer(strategy, limit_val_batches=0, limit_train_batches=2, **settings)
        trainer.fit(TinyModule(**model or {}), tiny_dataloader())
    return strategy, texts


def num_compressed(strategy: TacoTPStrategy, direction: str | None = None) -> int:
    return strategy.compression.traffic.total(outcome=COMPRESSED, direction=direction).num_messages


def test_auto_in_the_trainer_strategy(tmp_path: Path) -> None:
    """Two batches of one all-reduce of 4 KiB in forward and one in backward."""
    auto = CompressionConfig(min_bytes="auto", backward=INT4)

    def check(rank: int) -> list[tuple[Any, list[str]]]:
        pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        pytest.MonkeyPatch().setattr(deciding, "QUICK", Ladder(sizes=(1 << 14,), rounds=1))
        here = Topology.of(dist.group.WORLD, CPU)  # type: ignore[arg-type]
        outcomes = []

        def run(cached: Measured | None, config: CompressionConfig = auto, **settings: Any) -> TacoTPStrategy:
            dist.barrier()
            if rank == 0 and cached is not None:
                save(cached, cache_path())
            dist.barrier()
            strategy, texts = fit(config, **settings)
            measured = strategy.compression.measured
            outcomes.append((measured, [text for text in texts if "auto" in text or "first step" in text]))
            return strategy

        run(None)
        measured = outcomes[0][0]
        assert measured.topology == here
        assert [row.num_bytes for row in measured.break_even.timings] == [1 << 14] * 8
        assert not cache_path().exists()
        assert num_compressed(run(hand_made(4096, (INT8, INT4), here), logger=RunLogger(tmp_path / "run"))) == 4
        dist.barrier()
        assert load(tmp_path / "run" / "break_even.json") == outcomes[1][0] == hand_made(4096, (INT8, INT4), here)
        assert num_compressed(run(hand_made(4097, (INT8, INT4), here))) == 0
        by_codec = BreakEven.of((*hand_made(64).break_even.timings, *hand_made(None, (INT4,)).break_even.timings))
        strategy = run(Measured(here, by_codec))
        assert (num_compressed(strategy, "forward"), num_compressed(strategy, "backward")) == (2, 0)
        compiled = run(hand_made(64, (INT8, INT4), here), model={"compile_backend": "eager"})
        assert num_compressed(compiled) == 4
        state = compiled.compression.state_dict()
        assert state is not None
        assert state["settings"]["min_bytes"] == "auto", "a resumed run reads or measures again"
        assert not {"break_even", "measured"} & state.keys()
        with launched_fabric() as fabric:
            module = fabric.setup_module(TinyLm())
            fabric.backward(module(torch.zeros(2, 8, dtype=torch.long)).sum())
            assert num_compressed(fabric.strategy) == 2
            assert fabric.strategy.compression.measured == hand_made(64, (INT8, INT4), here)
        run(hand_made(64, (INT8,), here))
        run(hand_made(64, (INT8, INT4), replace(here, versions="torch 1.0")))
        return outcomes

    outcomes, of_other_rank = run_forked(2, check)
    assert [measured for measured, _ in outcomes] == [measured for measured, _ in of_other_rank]
    assert not [text for _, texts in of_other_rank for text in texts if text.startswith("lightning_taco: ")]
    texts = [texts for _, texts in outcomes]
    assert sum("min_bytes='auto': measured in " in text for text in texts[0]) == 1
    assert [sum(f"min_bytes='auto': {kind}: " in text for text in texts[0]) for kind in KINDS] == [1, 1, 1, 1]
    assert sum("as measured by `lightning-taco bench`" in text for text in texts[1]) == 1
    line = (
        "lightning_taco: min_bytes='auto': all_reduce: int8, block 128, Hadamard: from 4.0 KiB on, by one_shot "
        "(2.00x at 4.0 KiB); int4, block 128, Hadamard: from 4.0 KiB on, by one_shot (2.00x at 4.0 KiB)"
    )
    assert texts[1].count(line) == 1
    warning = (
        "lightning_taco compressed nothing in the first step: 2 x min_bytes='auto': compressed all_reduce was not "
        "faster below 4097 bytes, as measured."
    )
    assert texts[2].count(warning) == 1
    assert any("int4, block 128, Hadamard: never, as it does not pay (0.50x at 100 B)" in text for text in texts[3])
    assert sum("is not used: it has no figures for int4, block 128, Hadamard" in text for text in texts[5]) == 1
    assert sum("is not used: it was measured with other settings: versions 'torch 1.0'" in t for t in texts[6]) == 1
    assert all(any("measured in" in text for text in texts[index]) for index in (5, 6))


@contextmanager
def launched_fabric() -> Iterator[Any]:
    strategy = taco_fabric.TacoTPStrategy(
        lambda model, mesh: apply_tiny_plan(model, mesh, tiny_plan()),
        compression=CompressionConfig(min_bytes="auto", backward=INT4),
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    yield fabric
    strategy.teardown()


class SwitchesCodec(Callback):
    """Goes on with INT4 after the first batch."""

    break_even: BreakEven

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.strategy.compression.switch(CompressionConfig(min_bytes="auto", forward=INT4))
            self.break_even = trainer.strategy.session.break_even


def test_auto_says_why_nothing_pays_and_measures_each_codec_once(tmp_path: Path) -> None:
    def check(rank: int) -> list[str]:
        pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(tmp_path))
        calls: list[Sequence[CodecConfig]] = []

        def never(ranks: RankGroup, codecs: Sequence[CodecConfig], ladder: Ladder) -> list[Timing]:
            calls.append(codecs)
            return list(hand_made(None, codecs).break_even.timings)

        pytest.MonkeyPatch().setattr(deciding, "measure", never)
        switching = SwitchesCodec()
        strategy, texts = fit(CompressionConfig(min_bytes="auto"), callbacks=[switching])
        assert num_compressed(strategy) == 0
        assert calls == [[INT8], [INT4]], "the codec that a schedule switches to is measured then"
        assert [switching.break_even.covers(codec) for codec in (INT8, INT4)] == [True, True]
        assert strategy.lightning_module is not None
        strategy.lightning_module.trainer.validate(strategy.lightning_module, tiny_dataloader(), verbose=False)
        assert calls == [[INT8], [INT4]], "a second set-up takes what the first has measured"
        return texts

    texts = run_forked(2, check)[0]
    warning = (
        "lightning_taco compressed nothing in the first step: 2 x min_bytes='auto': compressed all_reduce was slower "
        "at all sizes that were measured."
    )
    assert texts.count(warning) == 1


class KeepsHierarchy(Callback):
    """Notes the groups within and between hosts while they exist."""

    hierarchy: Hierarchy | None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.hierarchy = trainer.strategy.session.hierarchy


def test_group_that_spans_hosts_measures_the_hierarchy_and_gives_its_groups_back(tmp_path: Path) -> None:
    def check(rank: int) -> list[str]:
        pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(tmp_path))
        pytest.MonkeyPatch().setattr(platform, "node", lambda: f"host{rank // 2}")
        pytest.MonkeyPatch().setattr(deciding, "QUICK", Ladder(sizes=(1 << 14,), rounds=1))
        keeping = KeepsHierarchy()
        strategy, texts = fit(CompressionConfig(min_bytes="auto"), callbacks=[keeping])
        measured = strategy.compression.measured
        assert measured is not None
        assert measured.topology.layout == "0 0 1 1"
        assert {"two_shot", "one_shot", "hierarchical"} == set(measured.break_even.timings[0].algorithm_us)
        assert keeping.hierarchy is not None
        groups = dist.distributed_c10d._world.pg_map
        assert not {keeping.hierarchy.inside, keeping.hierarchy.between} & set(groups)
        return [text for text in texts if "measured in" in text]

    (line,) = run_forked(4, check)[0]
    assert "on 4 ranks, gloo on cpu" in line


def test_replicas_come_to_the_same_result(tmp_path: Path) -> None:
    def check(rank: int) -> Measured | None:
        pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(tmp_path))
        pytest.MonkeyPatch().setattr(deciding, "QUICK", Ladder(sizes=(1 << 14, 1 << 15), rounds=1))
        config = CompressionConfig(min_bytes="auto")
        strategy, _ = fit(config, {"fsdp": True}, 2)
        assert strategy.compression.group is not None
        assert strategy.compression.group.size() == 2
        return strategy.compression.measured

    first, *others = run_forked(4, check)
    assert first is not None
    assert len(first.break_even.timings) == 8
    assert all(other == first for other in others)


def test_session_goes_by_the_algorithm_that_was_measured() -> None:
    """Three ranks: an all-reduce of 4 KiB by the one-shot, of 64 KiB by the two-shot, each counted as what it sends."""
    rows = [
        timing(4096, 9.0, "all_reduce", one_shot=1.0, two_shot=2.0),
        timing(1 << 16, 99.0, "all_reduce", one_shot=20.0, two_shot=10.0),
    ]

    def check(rank: int) -> None:
        group = dist.group.WORLD
        assert group is not None
        session = CompressionSession(CompressionConfig(min_bytes="auto"), group)
        session.break_even = BreakEven.of(rows)
        seen: list[str | None] = []
        session.observers.append(lambda exchange, site, codec: seen.append(exchange.algorithm))
        for num_rows, is_one_shot in ((8, True), (128, False), (7, None)):
            values = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(rank))
            before = session.traffic.total().sent_bytes
            result = session.exchange(Exchange(kind="all_reduce", tensor=values), values.clone)
            sent = session.traffic.total().sent_bytes - before
            if is_one_shot is None:
                assert torch.equal(result, values), "smaller than what pays: the stock exchange, here a copy"
                continue
            assert torch.equal(result, all_reduce(values, INT8, group, one_shot=is_one_shot))
            assert not torch.equal(result, all_reduce(values, INT8, group, one_shot=not is_one_shot))
            assert sent == compressed_sent_bytes("all_reduce", values.numel(), 3, INT8, one_shot=is_one_shot)
        assert seen == ["one_shot", "two_shot"]
        # Without "auto" nothing is chosen by what was measured.
        session.config = CompressionConfig(min_bytes=0)
        values = torch.ones(8, 128) * (rank + 1)
        session.exchange(Exchange(kind="all_reduce", tensor=values), values.clone)
        assert seen[2] is None

    run_threads(3, check)
