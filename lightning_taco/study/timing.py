"""How long a codec takes on this device."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from lightning_taco.codec import decode, encode
from lightning_taco.config import CodecConfig

NUM_WARM_UPS = 2
NUM_REPEATS = 9
QUEUING_CYCLES = 20_000_000  # about 10 ms


def encode_decode_us(codec: CodecConfig, values: Tensor) -> float:
    """Microseconds of one encode and one decode of `values`, ``[1, N]``: the median of nine, after two to warm up.

    On CUDA by events, else by the clock of the host. The time does not depend on what the values are.
    """
    for _ in range(NUM_WARM_UPS):
        _round_trip(codec, values)
    if values.device.type != "cuda":
        return statistics.median(_host_us(codec, values) for _ in range(NUM_REPEATS))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(NUM_REPEATS)]
    # Keeps the device busy until all launches are queued: else the time would be that of the host, which launches them.
    torch.cuda._sleep(QUEUING_CYCLES)
    for start, end in pairs:
        start.record()
        _round_trip(codec, values)
        end.record()
    torch.cuda.synchronize(values.device)
    return statistics.median(1000 * start.elapsed_time(end) for start, end in pairs)


def _host_us(codec: CodecConfig, values: Tensor) -> float:
    start = time.perf_counter()
    _round_trip(codec, values)
    return (time.perf_counter() - start) * 1e6


def _round_trip(codec: CodecConfig, values: Tensor) -> Tensor:
    return decode(encode(values, codec), codec, values.shape[1], values.dtype)
