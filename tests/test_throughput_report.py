"""`ThroughputReport` and the timer under it: time is counted where it is spent, and the parts add up."""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_taco.callbacks import CompressionMonitor, ThroughputReport
from lightning_taco.collectives import all_reduce, timing
from lightning_taco.collectives.transport import Arriving, Pending
from lightning_taco.config import CodecConfig
from tests.lightning_models import (
    TinyModule,
    warm_lightning,  # noqa: F401  a fixture
)
from tests.ranks import run_forked
from tests.test_callbacks import RATIO, fit, rows_of

pytestmark = pytest.mark.usefixtures("warm_lightning")

CODEC = CodecConfig(element="e4m3")


class SlowTransport:
    """Two equal ranks in one, and messages that take 20 ms."""

    rank, world_size = 0, 2

    def message_buffer(self, num_rows: int, message_bytes: int) -> None:
        """Anywhere."""

    def receiving(self, is_async: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def start_all_gather(self, message: Tensor, is_async: bool) -> Pending:
        time.sleep(0.02)
        return Arriving(message.expand(2, -1).contiguous(), None)

    def start_all_to_all(self, messages: Tensor, is_async: bool) -> Pending:
        raise AssertionError("two ranks reduce by one all-gather")


def test_time_is_counted_where_it_is_spent() -> None:
    values, transport = torch.randn(40_000), SlowTransport()
    plain = all_reduce(values, CODEC, transport)
    timer = timing.StepTimer(torch.device("cpu"))
    start = time.perf_counter()
    timer.start()
    assert torch.equal(all_reduce(values, CODEC, transport), plain)
    with timing.aside():  # what another callback measures
        for _ in range(5):
            all_reduce(values, CODEC, transport)
    time.sleep(0.03)
    found = timer.stop()
    whole = time.perf_counter() - start
    assert 0.02 <= found.communication < 0.1, "one exchange, not six"
    assert found.codec > 0
    assert found.compute >= 0.03
    assert found.step == pytest.approx(found.compute + found.codec + found.communication)
    assert 0.05 <= found.step <= whole - 5 * 0.02


def test_nothing_is_counted_unless_a_timer_runs() -> None:
    transport = SlowTransport()
    timer, other = (timing.StepTimer(torch.device("cpu")) for _ in range(2))
    assert timing.timed_transport(transport) is transport
    with pytest.raises(RuntimeError, match=r"no step was started, so none can be stopped; call start\(\) before it"):
        timer.stop()
    timer.start()
    other.start()  # takes its place
    all_reduce(torch.randn(256), CODEC, transport)
    assert timer.stop().communication == 0
    assert other.stop().communication >= 0.02
    timer.start()
    timer.cancel()
    assert timing.timed_transport(transport) is transport


def test_parts_add_up_to_the_step(tmp_path: Path) -> None:
    def rank_of(rank: int) -> Any:
        callbacks = [CompressionMonitor(every_n_steps=3), ThroughputReport(every_n_steps=3)]
        metrics = fit(tmp_path, callbacks, max_steps=8).callback_metrics
        assert timing._timer is None
        return {name: value.item() for name, value in metrics.items() if name.startswith("throughput")}

    one, other = run_forked(2, rank_of)
    assert one == other
    assert len(one) == 4
    rows = rows_of(tmp_path, "throughput/step_ms")
    assert list(rows) == [1, 4, 7]  # between the monitor's 0, 3 and 6
    for row in rows.values():
        assert RATIO not in row
        parts = [row[f"throughput/{name}_ms"] for name in ("compute", "codec", "exposed_communication")]
        assert all(part > 0 for part in parts)
        assert sum(parts) == pytest.approx(row["throughput/step_ms"])


def test_no_clock_runs_on_after_a_step_that_failed() -> None:
    class Failing(TinyModule):
        def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
            assert timing._timer is not None
            raise KeyError("a step that failed")

    def rank_of(rank: int) -> None:
        with pytest.raises(KeyError, match="a step that failed"):
            fit(None, [ThroughputReport(every_n_steps=1)], module=Failing())
        assert timing._timer is None

    run_forked(2, rank_of)
