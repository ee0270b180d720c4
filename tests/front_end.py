"""Kernels through the front end of Triton's compiler, for a device that need not be there: `python -m tests.front_end`.

The interpreter, in which the other tests run kernels on a CPU, takes Python as it is; the compiler refuses some of it,
such as a constant that is assigned anew. A process of its own, since TRITON_INTERPRET must not be set.
"""

from typing import Any

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from lightning_taco.codec import kernels, kernels_tah_quant, kernels_token_entropy
from lightning_taco.codec.constants import KernelConstants
from lightning_taco.config import CodecConfig

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    "values_ptr": "*bf16",
    "keys_ptr": "*i32",
    "slots_ptr": "*i32",
    "message_ptr": "*u8",
    "factor": "fp32",
}


def lower(kernel: Any, messages: str = "*u8", **constants: Any) -> str:
    """The first intermediate form of `kernel`, whose other arguments are those above, `messages`, or integers."""
    backend = make_backend(TARGET)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"enable_fp_fusion": False})
    names = kernel.arg_names
    pointers = POINTERS | {"messages_ptr": messages}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, {})
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(TARGET, options, functions, modules, context))


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
    print("lowered")


if __name__ == "__main__":
    main()
