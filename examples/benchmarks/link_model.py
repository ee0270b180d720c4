"""How long exchanges take at P ranks, in closed form, from what two ranks took: bytes, links, kernels and launches.

Times are microseconds, bytes those that one rank sends. What is assumed, each an argument or a field where it can be
doubted:

1. Stock: a ring. An all-reduce of N bytes sends 2 (P - 1) / P N from each rank, a reduce-scatter or an all-gather
   (P - 1) / P N, at the bandwidth that two ranks reached in the same collective. No in-switch sums (NVLS), no tree.
2. Compressed, two ranks: a one-shot. Encode, all-gather the messages of M bytes, decode and add two of them.
3. Compressed, more ranks: a two-shot. Encode, all-to-all of (P - 1) / P M, add P messages of M / P and quantise the
   sum, all-gather of (P - 1) / P M, decode. Steps follow one another; slices, which overlap them, are left out.
4. Kernels: of their measured time the share that their bytes have, so a sum of P messages of a P-th takes less than one
   of two whole messages. fp32 input counts as bf16.
5. All-gathers of messages are as fast as the library's of tensors. All-to-alls are something between the library's
   send and receive of one pair (`all_to_all` = 0), which is slower, and its all-gather (1): with more peers it may use
   more of the link.
6. `contention` = 0: each rank sends as fast as one of two did (ports of a switch; memory and processors that have
   plenty left; a NIC for each rank). 1: all ranks share what two had together, so wires take P / 2 times as long (host
   memory, or one NIC or processor for all ranks of a host). Between them (P / 2)^contention. Both sides of a comparison
   have the same. On several hosts whose ranks share a NIC it is not the same: a ring crosses it once, an all-to-all
   with each of the host's ranks; see `two_hosts`.
7. The fixed part of a collective stays what it was, and each further step of a ring adds `hop_us`: 2 (P - 2) steps of
   an all-reduce, P - 2 of a reduce-scatter or an all-gather, none of an all-to-all.
8. Launches are hidden behind the wire, but an exchange does not end before the host has launched it.
9. Ranks meet: nobody waits for a slower one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_taco.config import CodecConfig

KERNEL_VALUES = 32 << 20
"""Values of the tensor whose kernels were timed (64 MiB of bf16)."""
MEBI = 1 << 20
VALUE_BYTES = 2
LAUNCHES = {"one_shot": 3, "two_shot": 5, "all_to_all": 3, "all_gather": 3}


@dataclass(frozen=True)
class Line:
    """Time of a transfer: `latency_us` and `us_per_byte` of what a rank sends."""

    latency_us: float
    us_per_byte: float

    def wire_us(self, num_bytes: float) -> float:
        """Without the latency."""
        return self.us_per_byte * num_bytes

    def us(self, num_bytes: float) -> float:
        """With it."""
        return self.latency_us + self.wire_us(num_bytes)


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least relative squares through ``(bytes, us)``; its latency is not negative.

    >>> fit_line([(2.0, 100.0)])
    Line(latency_us=0.0, us_per_byte=50.0)

    Raises:
        ValueError: for no points, or for times that do not grow with bytes.
    """
    if not points:
        raise ValueError("a line needs one measured point at least; none was given.")
    weights = [1 / time**2 for _, time in points]
    total = sum(weights)
    mean_bytes = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_us = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    variance = sum(w * (x - mean_bytes) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    covariance = sum(w * (x - mean_bytes) * (y - mean_us) for w, (x, y) in zip(weights, points, strict=True))
    slope = covariance / variance if variance else mean_us / mean_bytes
    latency = mean_us - slope * mean_bytes
    if latency < 0 or not variance:
        latency = 0.0
        slope = sum(x / y for x, y in points) / sum((x / y) ** 2 for x, y in points)
    if slope <= 0:
        raise ValueError(f"times do not grow with bytes: {list(points)}.")
    return Line(latency, slope)


@dataclass(frozen=True)
class Kernels:
    """Microseconds of a codec's kernels on `KERNEL_VALUES` values of bf16; the last two take two messages.

    Attributes:
        encode_us: values to a message.
        decode_us: a message to values.
        requantize_us: two messages to one.
        decode_sum_us: two messages to values.
    """

    encode_us: float
    decode_us: float
    requantize_us: float
    decode_sum_us: float


@dataclass(frozen=True)
class Codec:
    """A codec's messages and kernels."""

    config: CodecConfig
    kernels: Kernels

    def message_bytes(self, num_values: float) -> float:
        """Of that many values."""
        return num_values * self.config.bits_per_value / 8

    def encode_us(self, num_values: float) -> float:
        """Of that many values."""
        return self.kernels.encode_us * num_values / KERNEL_VALUES

    def decode_us(self, num_values: float) -> float:
        """To that many values."""
        return self.kernels.decode_us * num_values / KERNEL_VALUES

    def requantize_us(self, num_messages: int, num_values: float) -> float:
        """Of `num_messages` of that many values each, to one."""
        moved = (num_messages + 1) * num_values
        return self.kernels.requantize_us * moved / (3 * KERNEL_VALUES)

    def decode_sum_us(self, num_messages: int, num_values: float) -> float:
        """Of `num_messages` of that many values each, to values."""
        message, out = self.message_bytes(1), VALUE_BYTES
        moved = (num_messages * message + out) * num_values
        return self.kernels.decode_sum_us * moved / ((2 * message + out) * KERNEL_VALUES)


@dataclass(frozen=True)
class Mapped:
    """Exchanges in memory that GPUs map: kernels write where the peers read, so encoding and sending overlap.

    Attributes:
        launch_us: of the two launches and barriers of a one-shot.
        us_per_byte: of what a rank writes to peers.
    """

    launch_us: float
    us_per_byte: float


@dataclass(frozen=True)
class Link:
    """What two ranks measured on one link.

    Attributes:
        all_reduce: the library's.
        reduce_scatter: the library's.
        all_gather: the library's.
        send_recv: both ways at once.
        contention: the least and the most that is assumed.
        hop_us: the same.
        mapped: where GPUs read each other's memory: of the codec ``"int8"``.
        host_us_per_launch: until the host has launched one of an exchange's kernels or collectives.
    """

    all_reduce: Line
    reduce_scatter: Line
    all_gather: Line
    send_recv: Line
    contention: tuple[float, float] = (0.0, 1.0)
    hop_us: tuple[float, float] = (0.0, 0.0)
    mapped: Mapped | None = None
    host_us_per_launch: float = 0.0


@dataclass(frozen=True)
class Assumptions:
    """What 2-rank figures do not say; see the module. `divided`: share of computing that tensor parallelism divides."""

    contention: float = 0.0
    hop_us: float = 0.0
    all_to_all: float = 1.0
    divided: float = 1.0


@dataclass(frozen=True)
class Exchanges:
    """Times on one link, under some assumptions, at `num_ranks`.

    Attributes:
        link: what two ranks measured.
        num_ranks: of a group.
        assumptions: about more ranks.
        num_sharing: ranks of all groups that use the link at once; ``None``: those of one group.
    """

    link: Link
    num_ranks: int
    assumptions: Assumptions = field(default_factory=Assumptions)
    num_sharing: int | None = None

    def stock_us(self, kind: str, num_bytes: float) -> float:
        """The library's ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"`` of a whole tensor of `num_bytes`."""
        line: Line = getattr(self.link, kind)
        rounds = 2 if kind == "all_reduce" else 1
        return self._line_us(line, rounds * self._others * num_bytes) + rounds * self._hops_us

    def compressed_us(self, kind: str, num_values: float, codec: Codec) -> float:
        """Ours, over the process group, of a whole tensor of `num_values`; by the algorithm that is the default."""
        if kind == "all_reduce":
            return self.one_shot_us(num_values, codec) if self.num_ranks == 2 else self.two_shot_us(num_values, codec)
        message, own = self._others * codec.message_bytes(num_values), num_values / self.num_ranks
        if kind == "all_gather":
            time = codec.encode_us(own) + self.all_gather_us(message) + codec.decode_us(num_values)
            return self._at_least(time, "all_gather")
        time = codec.encode_us(num_values) + self.all_to_all_us(message) + codec.decode_sum_us(self.num_ranks, own)
        return self._at_least(time, "all_to_all")

    def one_shot_us(self, num_values: float, codec: Codec) -> float:
        """Of an all-reduce: all messages go to all ranks."""
        message = (self.num_ranks - 1) * codec.message_bytes(num_values)
        time = codec.encode_us(num_values) + self.all_gather_us(message)
        return self._at_least(time + codec.decode_sum_us(self.num_ranks, num_values), "one_shot")

    def two_shot_us(self, num_values: float, codec: Codec) -> float:
        """Of an all-reduce."""
        sent = self._others * codec.message_bytes(num_values)
        time = codec.encode_us(num_values) + self.all_to_all_us(sent)
        time += codec.requantize_us(self.num_ranks, num_values / self.num_ranks)
        return self._at_least(time + self.all_gather_us(sent) + codec.decode_us(num_values), "two_shot")

    def mapped_us(self, num_values: float, codec: Codec) -> float:
        """Of an all-reduce in mapped memory: one-shot for two ranks, else two-shot, with a launch and a barrier more.

        Raises:
            ValueError: for a link without mapped memory.
        """
        mapped = self.link.mapped
        if mapped is None:
            raise ValueError("this link has no figures of mapped memory.")
        written_us = self._slowdown * mapped.us_per_byte * self._others * codec.message_bytes(num_values)
        encoded_us = codec.encode_us(num_values)
        if self.num_ranks == 2:
            return mapped.launch_us + max(encoded_us, 2 * written_us) + codec.decode_sum_us(2, num_values)
        added_us = codec.requantize_us(self.num_ranks, num_values / self.num_ranks)
        sent_us = max(encoded_us, written_us) + max(added_us, written_us)
        return 1.5 * mapped.launch_us + sent_us + codec.decode_us(num_values)

    def all_gather_us(self, sent_bytes: float) -> float:
        """Of messages, of which a rank sends so many bytes."""
        return self._line_us(self.link.all_gather, sent_bytes) + self._hops_us

    def all_to_all_us(self, sent_bytes: float) -> float:
        """The same; two ranks can do it by an all-gather."""
        if self.num_ranks == 2:
            return self.all_gather_us(sent_bytes)
        share = self.assumptions.all_to_all
        by_pairs, as_gathered = (
            self._line_us(line, sent_bytes) for line in (self.link.send_recv, self.link.all_gather)
        )
        return share * as_gathered + (1 - share) * by_pairs

    def send_us(self, sent_bytes: float) -> float:
        """From one rank to another, while all ranks do the same."""
        return self._line_us(self.link.send_recv, sent_bytes)

    @property
    def _others(self) -> float:
        return (self.num_ranks - 1) / self.num_ranks

    @property
    def _hops_us(self) -> float:
        return self.assumptions.hop_us * (self.num_ranks - 2)

    @property
    def _slowdown(self) -> float:
        return ((self.num_sharing or self.num_ranks) / 2) ** self.assumptions.contention

    def _line_us(self, line: Line, sent_bytes: float) -> float:
        return line.latency_us + self._slowdown * line.wire_us(sent_bytes)

    def _at_least(self, time_us: float, algorithm: str) -> float:
        return max(time_us, LAUNCHES[algorithm] * self.link.host_us_per_launch)


@dataclass(frozen=True)
class TwoHosts:
    """Bytes through the NIC of a host, in each direction, for hosts of several ranks that share one; an all-reduce.

    Attributes:
        stock: a ring, which enters and leaves each host once.
        two_shot: an all-to-all from each rank to each rank of the other host, and a ring.
        hierarchical: `lightning_taco.collectives.hierarchy`: sums within the hosts, codes between them.
    """

    stock: float
    two_shot: float
    hierarchical: float


def two_hosts(num_ranks: int, num_bytes: float, message_bytes: float) -> TwoHosts:
    """Of a tensor of `num_bytes` on each rank, whose message has `message_bytes`; half of the ranks on each host.

    >>> eight = two_hosts(8, 64, 33)
    >>> eight.stock / eight.two_shot, eight.stock / eight.hierarchical
    (1.1805006587615283, 3.393939393939394)
    """
    others, per_host = (num_ranks - 1) / num_ranks, num_ranks // 2
    all_to_all = per_host * per_host / num_ranks * message_bytes
    # Two hosts, one rank of each place: a one-shot of a part of the values, so all of the message together.
    return TwoHosts(2 * others * num_bytes, all_to_all + others * message_bytes, message_bytes)
