"""Kernels through Triton's compiler, for a device that need not be there: `python -m tests.front_end`.

The interpreter, in which the other tests run kernels on a CPU, takes Python as it is; the compiler refuses some of it,
such as a constant that is assigned anew. And it may lay a tile out so that every stage of a rotation goes through
shared memory, which is right and slow: two kernels are compiled to the end and looked at. A process of its own, since
TRITON_INTERPRET must not be set.
"""

import re
from collections import Counter
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from lightning_taco.codec import kernels, kernels_tah_quant, kernels_token_entropy
from lightning_taco.codec.constants import KernelConstants
from lightning_taco.codec.kernel_launch import DEFAULT_WARPS
from lightning_taco.config import CodecConfig

TARGET = GPUTarget("cuda", 90, 32)
WHOLE = ("values_ptr", "messages_ptr", "num_values", "row_stride")
POINTERS = {
    "values_ptr": "*bf16",
    "keys_ptr": "*i32",
    "slots_ptr": "*i32",
    "message_ptr": "*u8",
    "factor": "fp32",
}


def source_of(kernel: Any, messages: str, attributes: dict[Any, Any], **constants: Any) -> ASTSource:
    """`kernel` with these constants, whose other arguments are those above, `messages`, or integers."""
    names = kernel.arg_names
    pointers = POINTERS | {"messages_ptr": messages}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    return ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)


def lower(kernel: Any, messages: str = "*u8", **constants: Any) -> str:
    """The first intermediate form of `kernel`."""
    backend = make_backend(TARGET)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"enable_fp_fusion": False})
    source = source_of(kernel, messages, {}, **constants)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(TARGET, options, functions, modules, context))


def instructions(kernel: Any, **constants: Any) -> Counter[str]:
    """How often each instruction stands in `kernel`, all of whose pointers and sizes are multiples of 16."""
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name in WHOLE}
    options = {"num_warps": DEFAULT_WARPS, "enable_fp_fusion": False}
    compiled = triton.compile(source_of(kernel, "*u8", attributes, **constants), target=TARGET, options=options)
    return Counter(re.findall(r"\b(?:[a-z]+\.)+[a-z0-9.]+", compiled.asm["ptx"]))


def check_exchanges() -> None:
    """A value goes to another lane twice, once for each stage between the threads of its block, and nowhere else."""
    codec = CodecConfig(element="e4m3", scale_mode="dual")
    tile = KernelConstants.of(codec, True, True).for_values(1 << 20)
    values_per_thread = tile.block_size * tile.lane_values // tile.width
    encoding = instructions(kernels.encode_kernel, NUM_COPIES=1, SEGMENTED=False, C=tile)
    decoding = instructions(kernels.decode_kernel, NUM_SOURCES=1, AVERAGE=False, SEGMENTED=False, C=tile)
    for name, found, num_scales in (("encode", encoding, 2), ("decode", decoding, 0)):
        through_memory = sum(number for each, number in found.items() if each.startswith("st.shared"))
        assert through_memory <= num_scales, (name, found)  # where the scales are stored from
        between_lanes = found["shfl.sync.bfly.b32"]
        assert 2 * values_per_thread <= between_lanes <= 2 * values_per_thread + 12, (name, between_lanes)
    assert encoding["ld.global.v4.b32"] == decoding["st.global.v4.b32"] == tile.parts, (encoding, decoding)


def main() -> None:
    """Lower every kernel of TAH-Quant; of the codec, codes in three planes and in two, and messages by address."""
    lower(kernels_token_entropy.entropy_kernel)
    lower(kernels_token_entropy.choose_kernel, CHUNK=2048)
    lower(kernels_token_entropy.slots_kernel, CHUNK=2048)
    tile, stochastic = kernels_tah_quant.tile_constants(False), kernels_tah_quant.tile_constants(True)
    lower(kernels_tah_quant.encode_kernel, ROTATION=1, IS_BF16=True, TAIL=False, C=stochastic)
    lower(kernels_tah_quant.encode_kernel, ROTATION=2, IS_BF16=False, TAIL=True, C=tile)
    lower(kernels_tah_quant.decode_kernel, IS_BF16=True, C=tile)
    lower(kernels_tah_quant.decode_kernel, IS_BF16=False, C=tile)
    for element in ("int7", "int3"):
        packed = KernelConstants.of(CodecConfig(element=element, block_size=64), False, False)  # type: ignore[arg-type]
        lower(kernels.encode_kernel, NUM_COPIES=1, SEGMENTED=False, C=packed)
        lower(kernels.decode_kernel, NUM_SOURCES=1, AVERAGE=False, SEGMENTED=False, C=packed)
    lower(kernels.encode_kernel, messages="*i64", NUM_COPIES=2, SEGMENTED=True, C=packed)
    lower(kernels.decode_kernel, messages="*i64", NUM_SOURCES=2, AVERAGE=True, SEGMENTED=True, C=packed)
    check_exchanges()
    print("lowered")


if __name__ == "__main__":
    main()
