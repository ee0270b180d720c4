"""The codecs beside E4M3 and INT8: E5M2, the packed formats, and stochastic rounding; kernels in the interpreter."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_taco.codec import MessageLayout, decode, decode_sum, encode, requantize
from lightning_taco.codec.elements import CODE_MAX, FLOAT_FORMATS, NF4_LEVELS, gaussian_half, gaussian_top
from lightning_taco.codec.layout import alpha_bytes
from lightning_taco.codec.reference import decode_reference, encode_reference, requantize_reference
from lightning_taco.codec.rounding import codes_to_values, gaussian_levels, pack, random_bits, round_to_codes, unpack
from lightning_taco.config import BITS_PER_CODE, GAUSSIAN_ELEMENTS, PLAIN_BLOCK_SIZE, SUB_BLOCK_SIZE, CodecConfig
from tests.test_codec_reference import assert_same_bits

INTEGERS = ("int8", "int7", "int6", "int5", "int4", "int3")
SEED = 123456789012345
# One quantisation of Gaussian values, block 128: 20 log10 of the relative L2 error, plain and rotated alike.
GAUSS_DECIBELS = {
    "e4m3": -31.8,
    "e5m2": -25.8,
    "int8": -43.8,
    "int7": -37.7,
    "int6": -31.5,
    "int5": -25.2,
    "int4": -18.6,
    "int3": -11.3,
    "fp4": -19.25,
    "nf4": -20.35,
}
GAUSSIAN_LEVEL_DECIBELS = {"int6": -32.95, "int5": -26.9, "int4": -20.55, "int3": -13.35}


def family(**fixed: object) -> list[CodecConfig]:
    """Every element in both roundings, rotated and not; every other mode with the elements that it could trouble."""
    modes: list[dict[str, object]] = [{"element": element} for element in CODE_MAX]
    modes += [{"element": element, "rotation": False} for element in CODE_MAX]
    modes += [{"element": element, "scale_mode": "dual"} for element in ("e4m3", "int8")]
    modes += [{"element": element, "levels": "gaussian"} for element in GAUSSIAN_ELEMENTS]
    if fixed["block_size"] != SUB_BLOCK_SIZE:
        modes += [{"element": element, "scale_mode": "fine"} for element in ("e4m3", "int6")]
        modes.append({"element": "int4", "scale_mode": "fine", "levels": "gaussian"})
    return [
        CodecConfig(rounding=rounding, **mode, **fixed)  # type: ignore[arg-type]
        for rounding in ("nearest", "stochastic")
        for mode in modes
    ]


# What weights' differences are sent in, and another element.
PLAIN = [
    CodecConfig(element=element, block_size=PLAIN_BLOCK_SIZE, rotation=False, rounding="stochastic")  # type: ignore[arg-type]
    for element in ("int4", "int7")
]


def interpreted() -> list[CodecConfig]:
    """Each pair of element, rounding, rotation and packing once: they meet nowhere in the kernels but in these pairs.

    Block 64 is held in 8 parts and costs the interpreter half of 128, which is held in 16 and is what recipes use.
    `test_codec_kernels` has E4M3 and INT8 in every mode at every block size, `test_codec_family_gpu` all of the family.
    """
    settings: list[dict[str, object]] = [{"element": element, "block_size": 64} for element in CODE_MAX]
    for element in CODE_MAX:
        settings.append({"element": element, "block_size": 64, "rotation": False, "rounding": "stochastic"})
    for element in GAUSSIAN_ELEMENTS:
        settings.append({"element": element, "block_size": 64, "levels": "gaussian"})
        settings.append({"element": element, "levels": "gaussian", "rounding": "stochastic"})
    settings += [{"element": element} for element in ("e5m2", "fp4", "nf4")]
    settings.append({"element": "int8", "block_size": 64, "scale_mode": "dual", "rounding": "stochastic"})
    settings.append({"element": "e4m3", "block_size": 64, "scale_mode": "fine"})
    settings.append({"element": "int6", "scale_mode": "fine", "rounding": "stochastic"})
    settings.append({"element": "int4", "block_size": 64, "scale_mode": "fine", "levels": "gaussian"})
    return [CodecConfig(**each) for each in settings]  # type: ignore[arg-type]


def content(messages: Tensor, codec: CodecConfig, num_values: int) -> Tensor:
    """Planes and scales of each message, without the padding after either."""
    layout = MessageLayout.of(num_values, codec)
    planes_bytes = layout.num_blocks * codec.block_size * BITS_PER_CODE[codec.element] // 8
    end = layout.alpha_offset_bytes + layout.num_blocks * alpha_bytes(codec)
    return torch.cat([messages[:, :planes_bytes], messages[:, layout.scale_offset_bytes : end]], dim=1)


def adversarial(num_values: int) -> Tensor:
    values = torch.randn(3, num_values) * torch.tensor([[1e-3], [1.0], [1e3]])
    values[0] = 0
    values[1, num_values // 2] = math.inf
    values[2, -1] = math.nan
    values[2, 0] = 1e30
    return values


def awkward_rows(block_size: int) -> Tensor:
    """Three rows of six blocks and a short one: zero in one row and in all, Inf, NaN, far apart in size, and tails."""
    rows = torch.randn(3, 6 * block_size + 44)
    blocks = rows[:, : 6 * block_size].view(3, 6, block_size)
    blocks[:, 0] = 0
    blocks[1, 1] = 0
    blocks[2, 2, block_size // 2] = math.inf
    blocks[1, 3, -1] = math.nan
    blocks[0, 4] *= 1e-3
    blocks[2, 4] *= 1e3
    blocks[1, 5, 0] = 1e30
    rows[2, -1] = -math.inf
    return rows


@pytest.mark.parametrize("element", CODE_MAX)
@pytest.mark.parametrize("rotation", [True, False])
def test_error_of_gaussian_values(element: str, rotation: bool) -> None:
    codec = CodecConfig(element=element, rotation=rotation)  # type: ignore[arg-type]
    values = torch.randn(64, 4096)
    decoded = decode(encode(values, codec), codec, 4096, torch.float32)
    decibels = 20 * math.log10(((decoded - values).norm() / values.norm()).item())
    assert abs(decibels - GAUSS_DECIBELS[element]) < 0.3
    if element in INTEGERS and not rotation:
        step = values.view(64, -1, 128).abs().amax(-1, keepdim=True) / CODE_MAX[element]
        assert ((decoded - values).view(64, -1, 128).abs() <= step * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("element", ["int7", "int6", "int5", "int4", "int3", "fp4"])
@pytest.mark.parametrize("block_size", [32, 128, 512])
def test_packing_is_exact_and_takes_its_bits(element: str, block_size: int) -> None:
    codec = CodecConfig(element=element, block_size=block_size)  # type: ignore[arg-type]
    bits = BITS_PER_CODE[element]
    codes = torch.randint(0, 1 << bits, (3, 5, block_size), dtype=torch.uint8)
    planes = pack(codes, codec)
    assert planes.shape == (3, 5 * block_size * bits // 8)
    assert torch.equal(unpack(planes, codec, 5), codes)
    layout = MessageLayout.of(5 * block_size, codec)
    assert layout.message_bytes * 8 <= 5 * block_size * codec.bits_per_value + 2 * 16 * 8


def test_a_byte_of_a_plane_holds_values_that_lie_half_a_quarter_and_an_eighth_apart() -> None:
    codes = torch.zeros(1, 1, 32, dtype=torch.uint8)
    codes[0, 0, 1], codes[0, 0, 17] = 3, 5  # i and i + block / 2 share byte i of the low plane
    assert pack(codes, CodecConfig(element="int4", block_size=32))[0, 1] == 3 | (5 << 4)
    codes = torch.zeros(1, 1, 32, dtype=torch.uint8)
    for quarter, high in enumerate((1, 2, 3, 1)):
        codes[0, 0, 2 + 8 * quarter] = high << 4
    assert pack(codes, CodecConfig(element="int6", block_size=32))[0, 16 + 2] == 1 | (3 << 2) | (2 << 4) | (1 << 6)


@pytest.mark.interpreter
# numpy, on which the interpreter runs, warns of the Inf and NaN that some inputs hold.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero|All-NaN) .*:RuntimeWarning")
@pytest.mark.parametrize("codec", [*interpreted(), *PLAIN], ids=str)
def test_kernels_equal_the_reference(codec: CodecConfig) -> None:
    """Two rows each, as the interpreter's time goes by programs; the sum is of three, since a third is inexact."""
    from lightning_taco.codec import kernels

    values = awkward_rows(codec.block_size)
    num_values = values.shape[1]
    layout = MessageLayout.of(num_values, codec)
    expected = encode_reference(values, codec, seed=SEED)
    messages = torch.full((2, layout.message_bytes), 255, dtype=torch.uint8)
    kernels.encode_triton(values[:2], codec, messages, seed=SEED)
    assert_same_bits(content(messages, codec, num_values), content(expected[:2], codec, num_values))
    decoded = torch.full((2, num_values), 7.0)
    kernels.decode_triton(expected[1:], codec, decoded)
    assert_same_bits(decoded, decode_reference(expected[1:], codec, num_values, torch.float32))
    total = torch.full((1, layout.message_bytes), 255, dtype=torch.uint8)
    kernels.requantize_triton(expected, codec, num_values, total, average=True, seed=SEED)
    truth = requantize_reference(expected, codec, num_values, average=True, seed=SEED)
    assert_same_bits(content(total, codec, num_values), content(truth, codec, num_values))


@pytest.mark.parametrize("codec", family(block_size=128), ids=str)
def test_non_finite_zero_and_extreme_blocks(codec: CodecConfig) -> None:
    values = torch.randn(1, 6 * 128)
    blocks = values.view(6, 128)
    blocks[0], blocks[1, 5], blocks[2, 7], blocks[3], blocks[4] = 0, math.nan, -math.inf, 1e-30, 1e30
    decoded = decode(encode(values, codec, seed=1), codec, values.numel(), torch.float32).view(6, 128)
    assert torch.equal(decoded[0], torch.zeros(128))
    assert not decoded[1].isfinite().any()
    assert not decoded[2].isfinite().any()
    assert decoded[3:].isfinite().all()
    for block in (3, 4):
        relative = (decoded[block] - blocks[block]).double().norm() / blocks[block].double().norm()
        assert relative < (0.4 if codec.element == "int3" else 0.3)


@pytest.mark.parametrize("element", CODE_MAX)
def test_stochastic_rounding_is_unbiased_and_never_leaves_the_range(element: str) -> None:
    codec = CodecConfig(element=element, rotation=False, rounding="stochastic")  # type: ignore[arg-type]
    values = torch.randn(1, 1024)
    rows = values.expand(500, -1).contiguous()  # each row draws its own numbers
    draws = torch.cat(
        [decode(encode(rows, codec, seed=seed), codec, 1024, torch.float32) for seed in range(4)]
    ).double()
    mean_error = draws.mean(0) - values.double()
    spread = draws.std(0)
    amax = values.view(-1, 128).abs().amax(-1).double().repeat_interleave(128)
    step = amax / CODE_MAX[element]
    if form := FLOAT_FORMATS.get(element):
        step = step * form.smallest_step + values.double().abs() * 2.0**-form.mantissa_bits
    # 1024 means of 2000 draws: five standard errors, and five draws where so few went up that none may have been seen.
    assert (mean_error.abs() <= 5 * spread / math.sqrt(2000) + 5 * step / 2000).all()
    largest = values.view(-1, 128).abs().amax(-1)
    assert (draws.view(2000, -1, 128).abs().amax(-1) <= largest * (1 + 1e-6)).all()


def test_a_scale_for_2048_values() -> None:
    """4.016 bits: the error is that of the largest of so many values over seven steps."""
    codec = CodecConfig(element="int4", block_size=2048, rotation=False)
    values = torch.randn(3, 50 * 2048)
    messages = encode(values, codec)
    assert 8 * messages.numel() / values.numel() == pytest.approx(4 + 32 / 2048, abs=0.002)
    decoded = decode(messages, codec, values.shape[1], torch.float32)
    step = values.view(3, -1, 2048).abs().amax(-1, keepdim=True) / 7
    assert ((decoded - values).view(3, -1, 2048).abs() <= step * (0.5 + 1e-5)).all()
    assert ((decoded - values).norm() / values.norm()).item() == pytest.approx(0.151, abs=0.003)


@pytest.mark.parametrize("element", GAUSSIAN_ELEMENTS)
def test_gaussian_levels_are_closer_and_never_clip(element: str) -> None:
    codec = CodecConfig(element=element, levels="gaussian")  # type: ignore[arg-type]
    values = torch.randn(64, 4096)
    decoded = decode(encode(values, codec), codec, 4096, torch.float32)
    decibels = 20 * math.log10(((decoded - values).norm() / values.norm()).item())
    assert abs(decibels - GAUSSIAN_LEVEL_DECIBELS[element]) < 0.25
    again = decode(encode(decoded, codec), codec, 4096, torch.float32)
    torch.testing.assert_close(again, decoded, rtol=0, atol=1e-5)  # idempotent
    torch.testing.assert_close(decode(encode(-values, codec), codec, 4096, torch.float32), -decoded, rtol=0, atol=0)
    # A lone outlier and a constant block, whose rotations have one magnitude, come back whole.
    special = torch.zeros(2, 128)
    special[0, 5], special[1] = -3.0, 0.7
    torch.testing.assert_close(decode(encode(special, codec), codec, 128, torch.float32), special, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("element", GAUSSIAN_ELEMENTS)
def test_gaussian_codes_take_the_nearest_level_but_for_a_twentieth_of_a_step(element: str) -> None:
    codec = CodecConfig(element=element, levels="gaussian")  # type: ignore[arg-type]
    half = gaussian_half(BITS_PER_CODE[element])
    levels = gaussian_levels(torch.arange(-half, half).float(), half)
    assert torch.equal(levels[-1], torch.tensor(gaussian_top(BITS_PER_CODE[element])))
    assert levels[0] == -half
    values = torch.linspace(-half, gaussian_top(BITS_PER_CODE[element]), 100_001)
    rounded = codes_to_values(round_to_codes(values.view(1, 1, -1), codec, 0), codec).view(-1)
    distance = (values.unsqueeze(1) - levels).abs().min(dim=1).values
    step = levels.diff().max()
    assert ((rounded - values).abs() <= distance + 0.1 * step).all()
    codes = round_to_codes(levels.view(1, 1, -1), codec, 0)
    assert torch.equal(codes_to_values(codes, codec).view(-1), levels)


@pytest.mark.parametrize("element", ["int3", "int5"])
def test_stochastic_rounding_to_gaussian_levels_is_unbiased(element: str) -> None:
    codec = CodecConfig(element=element, levels="gaussian", rounding="stochastic")  # type: ignore[arg-type]
    half = gaussian_half(BITS_PER_CODE[element])
    values = torch.linspace(-half, gaussian_top(BITS_PER_CODE[element]), 200)
    rows = values.expand(4000, 1, -1).contiguous()
    draws = codes_to_values(round_to_codes(rows, codec, 3), codec).double()
    spread = draws.std(0)
    step = gaussian_levels(torch.arange(-half, half).float(), half).diff().max()
    assert ((draws.mean(0) - values.double()).abs() <= 5 * spread / math.sqrt(4000) + 5 * step / 4000).all()
    assert ((draws - values.double()).abs() < step).all()


def block_of(values: Tensor) -> Tensor:
    """`values` in a block of 64 whose largest magnitude is the format's, so that they are what is rounded."""
    return torch.cat([values, torch.zeros(64 - values.numel())]).view(1, 64)


def test_fp4_has_the_values_of_e2m1_and_rounds_to_nearest_with_ties_to_even() -> None:
    codec = CodecConfig(element="fp4", block_size=64, rotation=False)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = block_of(torch.cat([grid, -grid]))
    message = encode(values, codec)
    assert torch.equal(decode(message, codec, 64, torch.float32), values)
    codes = unpack(message[:, :32], codec, 1)[0, 0]
    assert codes[:16].tolist() == list(range(16))  # the sign is the highest bit
    midpoints = (grid[1:] + grid[:-1]) / 2
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    ties = block_of(torch.cat([midpoints, -midpoints, torch.tensor([6.0])]))
    decoded = decode(encode(ties, codec), codec, 64, torch.float32)[0]
    assert decoded[:14].tolist() == torch.cat([even, -even]).tolist()


def test_nf4_takes_the_nearest_of_its_levels() -> None:
    codec = CodecConfig(element="nf4", block_size=64, rotation=False)
    levels = torch.tensor(NF4_LEVELS)
    assert torch.equal(decode(encode(block_of(levels), codec), codec, 64, torch.float32), block_of(levels))
    values = torch.linspace(-1, 1, 10_001)
    rounded = codes_to_values(round_to_codes(values.view(1, 1, -1), codec, 0), codec).view(-1)
    assert torch.equal((rounded - values).abs(), (values.unsqueeze(1) - levels).abs().min(dim=1).values)


@pytest.mark.parametrize(
    ("element", "block_size", "gauss", "student"),
    [("fp4", 64, 10.6, 12.6), ("nf4", 64, 9.2, 12.3), ("int4", 64, 10.8, 18.1), ("nf4", 128, 9.6, 15.0)],
)
def test_error_of_four_bits_without_rotation(element: str, block_size: int, gauss: float, student: float) -> None:
    """Per cent, as measured for AGoQ's storage; heavy tails cost more, and vary more between samples."""
    codec = CodecConfig(element=element, block_size=block_size, rotation=False)  # type: ignore[arg-type]
    tails = torch.distributions.StudentT(3.0).sample((64, 4096))
    for values, percent, tolerance in ((torch.randn(64, 4096), gauss, 0.15), (tails, student, 1.5)):
        decoded = decode(encode(values, codec), codec, 4096, torch.float32)
        assert abs(100 * ((decoded - values).norm() / values.norm()).item() - percent) < tolerance


@pytest.mark.parametrize("element", ["int8", "int4"])
def test_fine_scales_keep_the_relative_error_of_small_sub_blocks(element: str) -> None:
    values = torch.randn(64, 4096)
    sizes = 10.0 ** torch.arange(0, -4, -1)
    values = (values.view(64, -1, 4, 32) * sizes.view(1, 1, 4, 1)).view(64, 4096)
    error = {}
    for scale_mode in ("merged", "fine"):
        codec = CodecConfig(element=element, scale_mode=scale_mode)  # type: ignore[arg-type]
        decoded = decode(encode(values, codec), codec, 4096, torch.float32)
        parts, truth = ((decoded - values).view(64, -1, 4, 32), values.view(64, -1, 4, 32))
        error[scale_mode] = (parts.square().sum((0, 1, 3)) / truth.square().sum((0, 1, 3))).sqrt()
    expected = 10 ** (GAUSS_DECIBELS[element] / 20)
    assert (error["fine"] < 1.15 * expected).all()
    assert error["merged"][3] > 100 * error["fine"][3]
    assert error["fine"].max() / error["fine"].min() < 1.1


def test_fine_scales_reach_from_the_smallest_to_the_largest_values() -> None:
    codec = CodecConfig(element="int8", scale_mode="fine")
    values = torch.randn(1, 5 * 128)
    blocks = values.view(5, 128)
    blocks[0] *= 1e-30
    blocks[1] *= 1e36
    blocks[2, :32] = 0
    blocks[3, 32:] = 0
    blocks[4] = 0
    decoded = decode(encode(values, codec), codec, values.numel(), torch.float32).view(5, 128)
    error = (decoded - blocks).double().norm(dim=1) / blocks.double().norm(dim=1).clamp(min=1e-40)
    assert (error[:4] < 0.01).all()
    assert torch.equal(decoded[4], blocks[4])
    assert decoded[2, :32].abs().max() < 1e-6
    assert decoded[3, 32:].abs().max() < 1e-6


def test_stochastic_rounding_repeats_with_its_seed_and_differs_with_another() -> None:
    codec = CodecConfig(element="int4", rounding="stochastic")
    values = torch.randn(2, 512)
    assert torch.equal(encode(values, codec, seed=7), encode(values, codec, seed=7))
    assert not torch.equal(encode(values, codec, seed=7), encode(values, codec, seed=8))
    same_rows = values[:1].expand(2, -1).contiguous()
    messages = encode(same_rows, codec, seed=7)
    assert not torch.equal(messages[0], messages[1])  # rows draw their own numbers


def test_beside_a_channel_that_dominates_only_unbiased_rounding_keeps_the_others() -> None:
    """As in gradients of a residual stream: why few bits backward are rounded stochastically in the recipes."""
    values = torch.randn(4096, 128)
    values[:, 5] = 1000.0
    others = torch.arange(128) != 5

    def share_kept(codec: CodecConfig) -> float:
        decoded = decode(encode(values, codec, seed=SEED), codec, 128, torch.float32)
        return ((decoded * values)[:, others].double().sum() / values[:, others].double().square().sum()).item()

    for element, levels in (("int4", "uniform"), ("int4", "gaussian"), ("int3", "gaussian")):
        nearest = CodecConfig(element=element, levels=levels)
        assert abs(share_kept(nearest)) < 0.2
        # Noise of many times the values' own size, which averages out over half a million of them.
        assert abs(share_kept(replace(nearest, rounding="stochastic")) - 1) < 0.1
    assert abs(share_kept(CodecConfig(element="int8")) - 1) < 0.05


def test_random_bits_are_balanced_and_do_not_repeat_with_the_seeds_halves() -> None:
    shape = torch.Size((1, 512, 128))
    bits = random_bits(shape, SEED, torch.device("cpu"))
    ones = torch.stack([((bits >> place) & 1).double().mean() for place in range(16)])
    assert ((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(shape.numel())).all()
    for other in (SEED + 1, SEED + (1 << 31)):
        agreement = (random_bits(shape, other, torch.device("cpu")) == bits).double().mean()
        assert abs(agreement - 2**-16) < 5 * math.sqrt(2**-16 / shape.numel())


def test_random_bits_of_neighbours_and_of_a_shared_hash_are_independent() -> None:
    bits = random_bits(torch.Size((1, 2048, 128)), SEED, torch.device("cpu")).double()[0]
    centred = (bits - bits.mean()) / bits.std()
    bound = 5 / math.sqrt(centred.numel() / 2)
    for distance in (1, 2, 32, 64):  # 64: the other half of the same hash
        assert (centred[:, :-distance] * centred[:, distance:]).mean().abs() < bound
    assert (centred[:-1] * centred[1:]).mean().abs() < bound  # from block to block
    assert (centred.mean(0).abs() < 5 / math.sqrt(2048)).all()  # no place is favoured


@pytest.mark.parametrize("seed", [-1, 1 << 62])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    codec = CodecConfig(element="int4", rounding="stochastic")
    with pytest.raises(ValueError, match=rf"seed={seed} is out of range; give an integer from 0 to 2\^62 - 1"):
        encode(torch.randn(1, 128), codec, seed=seed)


def test_sums_stay_close_at_four_bits() -> None:
    codec = CodecConfig(element="int4")
    values = torch.randn(4, 1280)
    messages = encode(values, codec)
    exact = values.sum(0)
    total = decode_sum(messages, codec, 1280, torch.float32)
    assert (total - exact).norm() / exact.norm() < 0.13
    again = decode(requantize(messages, codec, 1280), codec, 1280, torch.float32)[0]
    assert (again - exact).norm() / exact.norm() < 0.19
