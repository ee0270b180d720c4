"""Whether compressed exchanges give what they should, before they are timed: a fast wrong answer is none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_taco.bench.exchanges import Exchanges
from lightning_taco.collectives.algorithms import MeasuredKind
from lightning_taco.collectives.calibration import RankGroup, relative_error

CHECKED_BYTES = 1 << 20
SAME_EVERYWHERE = ("all_reduce", "all_gather", "weight_all_gather")
MAX_ERROR = {8: 0.1, 7: 0.1, 6: 0.1, 5: 0.2, 4: 0.4, 3: 0.7}
"""Largest relative error of a sum of normal values by bits of a code: about three times what is usual."""


def problem_of(exchanges: Exchanges, kinds: Sequence[MeasuredKind]) -> str | None:
    """What is wrong with the result of a compressed exchange of 1 MiB, the same on all ranks; ``None`` for nothing."""
    for kind in kinds:
        contest = exchanges.contest(kind, CHECKED_BYTES)
        exact = contest.stock()
        for (codec, algorithm), call in contest.ours.items():
            problem = _problem(kind, MAX_ERROR[contest.code_bits[codec]], call(), exact, exchanges.ranks)
            if problem is not None:
                return f"{kind} by {algorithm}, {codec}: {problem}"
    return None


def _problem(kind: MeasuredKind, limit: float, result: Tensor, exact: Tensor, ranks: RankGroup) -> str | None:
    error = relative_error(result, exact)
    is_large = float(not error <= limit)  # NaN too
    differs = float(kind in SAME_EVERYWHERE and not _is_that_of_first_rank(result, ranks))
    ((any_large, any_differs),) = ranks.slowest([[is_large, differs]])
    if any_large:
        return f"the relative error on rank 0 is {error:.3g}, and on a rank above {limit:g}"
    return "the ranks hold different bits" if any_differs else None


def _is_that_of_first_rank(result: Tensor, ranks: RankGroup) -> bool:
    first = result.clone()
    dist.broadcast(first, group=ranks.group, group_src=0)
    return torch.equal(first.view(torch.uint8), result.view(torch.uint8))
