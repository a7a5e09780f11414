"""Shared memory by address, with PTX instructions, because Triton gives no access to it.

Triton does not see these accesses. They stay in the order written, and accesses of different lanes need a barrier in
between. Every asm block returns a value, because Triton requires it. Triton's interpreter cannot run them, so tests
replace them with NumPy.
"""

import triton
import triton.language as tl

SHARED_LIMIT = 48 * 1024  # Bytes of shared memory that a kernel may declare


@triton.constexpr_function
def _room(nbytes):
    return f"{{ .shared .align 16 .b8 room[{nbytes}]; mov.u32 $0, room; }}"


@triton.jit
def shared_room(NBYTES: tl.constexpr):
    """Return the address of NBYTES of shared memory. Every call in the source gets another piece."""
    return tl.inline_asm_elementwise(_room(NBYTES), "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def fill_shared(at, word):
    """Write 16 bytes at each address, the same word four times."""
    text: tl.constexpr = "st.shared.v4.b32 [$1], {$2, $2, $2, $2}; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r,r,r", [at, word], tl.int32, is_pure=False, pack=1)


@triton.jit
def write_shared(at, word, BYTE: tl.constexpr):
    """Write the word, or its lowest byte if BYTE, at each address."""
    text: tl.constexpr = "st.shared.b8 [$1], $2; mov.b32 $0, 0;" if BYTE else "st.shared.b32 [$1], $2; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(text, "=r,r,r", [at, word.to(tl.int32)], tl.int32, is_pure=False, pack=1)


@triton.jit
def read_shared(at, TYPE: tl.constexpr):
    """Read a number at each address. TYPE is its PTX type: u8, u16 or b32."""
    return tl.inline_asm_elementwise("ld.shared." + TYPE + " $0, [$1];", "=r,r", [at], tl.int32, is_pure=False, pack=1)


@triton.jit
def read_shared_bits(at, shift):
    """Read 32 bits that begin `shift` bits into the word at each address."""
    text: tl.constexpr = """{ .reg .b32 low, high;
        ld.shared.b32 low, [$1]; ld.shared.b32 high, [$1+4]; shf.r.wrap.b32 $0, low, high, $2; }"""
    return tl.inline_asm_elementwise(text, "=r,r,r", [at, shift], tl.int32, is_pure=False, pack=1)


@triton.jit
def read_shared_floats(at):
    """Read four floats at each address."""
    return tl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [at],
        (tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def add_to_shared(at, value, there):
    """Add a value to the float at each address, if `there`.

    No two lanes may hold the same element, or it is added twice.
    """
    text: tl.constexpr = """{ .reg .pred p; .reg .f32 x; setp.ne.b32 p, $3, 0;
        @p ld.shared.f32 x, [$1]; @p add.rn.f32 x, x, $2; @p st.shared.f32 [$1], x; mov.b32 $0, 0; }"""
    tl.inline_asm_elementwise(text, "=r,r,f,r", [at, value, there.to(tl.int32)], tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _list_ones():
    step = (
        "and.b32 bit, $1, {}; setp.ne.b32 one, bit, 0; "
        "@one st.shared.b16 [at], high; @one add.u32 at, at, 2; @!one add.u32 high, high, 1;"
    )
    steps = "\n".join(step.format(1 << i) for i in range(8))
    return f"{{ .reg .pred one; .reg .b32 bit, at, high; mov.b32 at, $2; mov.b32 high, $3;\n{steps}\nmov.b32 $0, 0; }}"


@triton.jit
def list_ones(byte, at, high):
    """Write `high`, 16 bits, to the next address for each one of the byte. Each zero increments `high`."""
    tl.inline_asm_elementwise(_list_ones(), "=r,r,r,r", [byte, at, high], tl.int32, is_pure=False, pack=1)


@triton.jit
def count_ones(word):
    """Return the number of set bits."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], tl.int32, is_pure=True, pack=1)
