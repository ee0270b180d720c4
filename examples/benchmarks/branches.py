"""The branches of the convergence study: what each sends, by name.

A name is ``forward/backward``; one part alone stands for both. ``int6`` is a rotated integer at block 128, ``g``
Gaussian levels, ``s`` stochastic rounding, ``f`` fine scales, ``c`` calibrated channel order, ``p`` plain, without
rotation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_taco import CodecConfig, CompressionConfig
from lightning_taco.collectives import ProcessGroupTransport
from lightning_taco.dtensor import CompressionSession, Exchange
from lightning_taco.study import baselines

SUFFIXES: dict[str, dict[str, Any]] = {
    "g": {"levels": "gaussian"},
    "s": {"rounding": "stochastic"},
    "f": {"scale_mode": "fine"},
    "c": {"reshape": "calibrated"},
    "p": {"rotation": False},
}
# Only one part of each layer compressed: the exchanges of modules that match are left as they are.
PARTS = {"attention_only": ("*.mlp", "token_embedding", "head"), "mlp_only": ("*.attention", "token_embedding", "head")}

Quantizer = Callable[[Tensor], baselines.Reconstruction]
# With the bits of a value that each would send; TAH-Quant's vary by a few hundredths.
SIMULATED: dict[str, tuple[Quantizer, float]] = {
    "int8_per_tensor": (baselines.int8_per_tensor, 8.0),
    "fp8_per_row": (baselines.fp8_per_row, 8.03),
    "tah_quant": (baselines.tah_quant, 4.35),
    "rotated_e4m3_per_tensor": (baselines.rotation_fp8_per_tensor, 8.0),
}


@dataclass(frozen=True)
class Branch:
    """One way to go on from the checkpoint."""

    name: str
    compression: CompressionConfig | None
    quantizer: Quantizer | None = None
    """Stands in for the codec: partials are rounded by it, gathered in full and added."""
    simulated_bits: float = 0.0

    @property
    def bits(self) -> tuple[float, float]:
        """Bits of a value on the wire, forward and backward."""
        if self.compression is None:
            return 16.0, 16.0
        if self.quantizer is not None:
            return self.simulated_bits, self.simulated_bits
        codecs = (self.compression.forward, self.compression.backward)
        return tuple(16.0 if codec is None else codec.bits_per_value for codec in codecs)  # type: ignore[return-value]

    @property
    def is_stochastic(self) -> bool:
        return self.compression is not None and any(c.rounding == "stochastic" for c in self.compression.codecs)

    @property
    def is_calibrated(self) -> bool:
        return self.compression is not None and any(c.reshape == "calibrated" for c in self.compression.codecs)


def branch(name: str, min_bytes: int) -> Branch:
    """The branch called `name`, which may carry the name of a part: ``int4@mlp_only``; ``none#2`` is a second run."""
    recipe, _, part = name.partition("#")[0].partition("~")[0].partition("@")
    if recipe == "none":
        return Branch(name, None)
    common: dict[str, Any] = {"min_bytes": min_bytes, "during_validation": True, "exclude": PARTS[part] if part else ()}
    if recipe in SIMULATED:
        return Branch(name, CompressionConfig(**common), *SIMULATED[recipe])
    forward, _, backward = recipe.partition("/")
    codecs = {"forward": codec(forward), "backward": codec(backward or forward)}
    return Branch(name, CompressionConfig(**codecs, **common))


def scratch_seed(name: str) -> int | None:
    """The seed of a run from scratch, such as 1 in ``int8~1``; ``None`` for a branch from the checkpoint."""
    _, tilde, seed = name.partition("~")
    return int(seed) if tilde else None


def codec(name: str) -> CodecConfig | None:
    """``"int6g"`` and the like; ``"taco"`` is the paper's, ``"none"`` sends a direction as it is."""
    if name == "none":
        return None
    if name == "taco":
        return CodecConfig(element="e4m3", scale_mode="dual")
    element = name[:4]
    config = CodecConfig(element=element)  # type: ignore[arg-type]
    settings: dict[str, Any] = {}
    for suffix in name[4:]:
        settings |= SUFFIXES[suffix]
    return replace(config, **settings)


def simulate(session: CompressionSession, quantizer: Quantizer) -> None:
    """Let `session` round by `quantizer` what it would have compressed, and add in fp32 and in rank order.

    It has the numbers of a one-shot exchange and none of its savings.
    """

    def exchange(request: Exchange, stock: Callable[[], Tensor]) -> Tensor:
        site = session.sites.current()
        chosen, outcome = session.choose(request, site)
        session.record(request, site, chosen, outcome)
        if chosen is None or request.kind != "all_reduce":
            return stock()
        rounded = quantizer(request.tensor.float()).values.contiguous()
        gathered = ProcessGroupTransport(session.group).start_all_gather(rounded.view(1, -1), False).wait()
        return gathered.sum(0).to(request.tensor.dtype).view(request.tensor.shape)

    session.exchange = exchange  # type: ignore[method-assign]
