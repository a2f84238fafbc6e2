"""Products and conversions of packed numbers in PTX, two or more at a time.

Triton converts one element after another; with few rows that takes longer than reading them.

4-bit codes are in quarters of a chunk of inputs: nibble j of the 16-bit number k has the code of
input `j * chunk / 4 + k`. So the same nibble of neighbouring 16-bit numbers belongs to neighbouring
inputs, and one operation on 32 bits gives two of them.

    chunk of 32 inputs     number k = 0 … 7     input 24 + k | 16 + k | 8 + k | k
"""

import triton
import triton.language as tl

_INT4_PRODUCTS = tl.constexpr("""{
    .reg .b32 lo, hi, p, q, m;
    .reg .s32 s, t;
    mov.b64 {lo, hi}, $1;
    mov.b32 m, 0x0F0F0F0F;
    and.b32 p, lo, m;
    shr.u32 q, lo, 4;
    and.b32 q, q, m;
    dp4a.u32.s32 s, p, $3, 0;
    dp4a.u32.s32 t, p, $4, $2;
    dp4a.u32.s32 s, q, $5, s;
    dp4a.u32.s32 t, q, $6, t;
    and.b32 p, hi, m;
    shr.u32 q, hi, 4;
    and.b32 q, q, m;
    dp4a.u32.s32 s, p, $7, s;
    dp4a.u32.s32 t, p, $8, t;
    dp4a.u32.s32 s, q, $9, s;
    dp4a.u32.s32 t, q, $10, t;
    mad.lo.s32 $0, s, 256, t;
}""")

_SUM_OF_PAIR = """
    mov.b32 {h0, h1}, s;
    cvt.f32.f16 f0, h0;
    cvt.f32.f16 f1, h1;
    add.f32 $0, f0, f1;
}"""

_E4M3_PRODUCTS = tl.constexpr(
    """{
    .reg .b32 lo, hi, v, s;
    .reg .b16 h0, h1;
    .reg .f32 f0, f1;
    mov.b64 {lo, hi}, $1;
    mov.b32 {h0, h1}, lo;
    cvt.rn.f16x2.e4m3x2 v, h0;
    mul.rn.f16x2 s, v, $2;
    cvt.rn.f16x2.e4m3x2 v, h1;
    fma.rn.f16x2 s, v, $3, s;
    mov.b32 {h0, h1}, hi;
    cvt.rn.f16x2.e4m3x2 v, h0;
    fma.rn.f16x2 s, v, $4, s;
    cvt.rn.f16x2.e4m3x2 v, h1;
    fma.rn.f16x2 s, v, $5, s;"""
    + _SUM_OF_PAIR
)


def _e2m1_pairs(word: str, body: int, places: list[str]) -> str:
    """PTX that runs `places` one after another. Before each, `v` is set to the next nibble of
    every half of `word`, as a number.

    The three low bits of a code go to the lowest bits of the exponent and the highest of the
    fraction, from bit `body` on, and the highest bit becomes the sign.
    """
    lines = []
    for nibble, use in enumerate(places):
        shift = body - 4 * nibble
        move = f"shl.b32 t, {word}, {shift}" if shift >= 0 else f"shr.u32 t, {word}, {-shift}"
        lines.append(
            f"{move}; shl.b32 u, {word}, {12 - 4 * nibble}; and.b32 u, u, sign;"
            f" lop3.b32 v, t, body, u, 0xEA; {use}"
        )
    return "\n".join(lines)


_E2M1_PRODUCTS = tl.constexpr(
    """{
    .reg .b32 lo, hi, t, u, v, s, sign, body;
    .reg .b16 h0, h1;
    .reg .f32 f0, f1;
    mov.b64 {lo, hi}, $1;
    mov.b32 sign, 0x80008000;
    mov.b32 body, 0x0E000E00;
    mov.b32 s, 0;
    """
    + _e2m1_pairs("lo", 9, [f"fma.rn.f16x2 s, v, ${n}, s;" for n in (2, 4, 6, 8)])
    + "\n"
    + _e2m1_pairs("hi", 9, [f"fma.rn.f16x2 s, v, ${n}, s;" for n in (3, 5, 7, 9)])
    + _SUM_OF_PAIR
)


def _e2m1_numbers(kind: str, body: int) -> str:
    """PTX: the numbers of the four nibbles, times a scale."""
    uses = [f"mul.rn.{kind}x2 ${n}, v, $5;" for n in range(4)]
    mask = 7 << body
    return (
        "{ .reg .b32 t, u, v, sign, body; mov.b32 sign, 0x80008000;"
        f" mov.b32 body, 0x{mask:04X}{mask:04X};\n" + _e2m1_pairs("$4", body, uses) + "\n}"
    )


_E2M1_BFLOAT16 = tl.constexpr(_e2m1_numbers("bf16", 6))
_E2M1_FLOAT16 = tl.constexpr(_e2m1_numbers("f16", 9))


def _int4_numbers(kind: str, magic: int, *, is_scaled: bool) -> str:
    """PTX: a code that is put into the low bits of `magic` gives a number that is `code` above
    a power of two."""
    lines = ["{ .reg .b32 t, v, m, magic; mov.b32 m, 0x000F000F;"]
    lines.append(f"mov.b32 magic, 0x{magic:04X}{magic:04X};")
    for nibble in range(4):
        lines.append(f"shr.u32 t, $4, {4 * nibble}; lop3.b32 v, t, m, magic, 0xEA;")
        if is_scaled:
            lines.append(f"sub.rn.{kind}x2 v, v, $5; mul.rn.{kind}x2 ${nibble}, v, $6;")
        else:
            lines.append(f"sub.rn.{kind}x2 ${nibble}, v, $5;")
    return "\n".join([*lines, "}"])


_INT4_BFLOAT16 = tl.constexpr(_int4_numbers("bf16", 0x4300, is_scaled=False))
_INT4_FLOAT16 = tl.constexpr(_int4_numbers("f16", 0x6400, is_scaled=False))
_SCALED_BFLOAT16 = tl.constexpr(_int4_numbers("bf16", 0x4300, is_scaled=True))
_SCALED_FLOAT16 = tl.constexpr(_int4_numbers("f16", 0x6400, is_scaled=True))

_E4M3_HALVES = tl.constexpr("""{
    .reg .b32 p;
    .reg .b16 l, h;
    prmt.b32 p, $2, 0, 0x3120;
    mov.b32 {l, h}, p;
    cvt.rn.f16x2.e4m3x2 $0, l;
    cvt.rn.f16x2.e4m3x2 $1, h;
}""")


@triton.jit
def half_pair(low, high):  # noqa: ANN201 - Triton's own types
    """Two float32 numbers as float16, in 32 bits."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def int4_products(w, initial, a, b, c, d, e, f, g, h):  # noqa: ANN201 - Triton's own types
    """`initial` plus the products of the 16 codes of 64 bits and 16 inputs, all integers.

    Each pair of arguments has four inputs: `a` their high bytes and `b` their low bytes, and so
    on. `a, b` belong to the low nibbles of the first 32 bits, `c, d` to their high nibbles,
    `e, f` and `g, h` to those of the other 32 bits.
    """
    return tl.inline_asm_elementwise(
        _INT4_PRODUCTS, "=r,l,r,r,r,r,r,r,r,r,r", [w, initial, a, b, c, d, e, f, g, h],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_products(w, a, b, c, d, e, f, g, h):  # noqa: ANN201 - Triton's own types
    """The sum of products of the 16 e2m1 codes of 64 bits and of pairs of inputs, divided by
    2 ** 14.

    `a` and `b` belong to nibble 0 of the first and the other 32 bits, `c` and `d` to nibble 1,
    and so on. Products and their sums are float16.
    """
    return tl.inline_asm_elementwise(
        _E2M1_PRODUCTS, "=f,l,r,r,r,r,r,r,r,r", [w, a, b, c, d, e, f, g, h],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_products(w, a, b, c, d):  # noqa: ANN201 - Triton's own types
    """The sum of products of the 8 e4m3 numbers of 64 bits and four pairs of inputs. It needs
    no correction."""
    return tl.inline_asm_elementwise(
        _E4M3_PRODUCTS, "=f,l,r,r,r,r", [w, a, b, c, d], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def int4_integers(w, zero):  # noqa: ANN201 - Triton's own types
    """`code - zero` of the nibbles of 16-bit numbers: four tensors of the type of `zero`. The
    caller adds 128 (bfloat16) or 1024 (float16) to `zero`, as the PTX does to codes."""
    asm: tl.constexpr = _INT4_BFLOAT16 if zero.dtype == tl.bfloat16 else _INT4_FLOAT16
    return tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r,r", [w, zero], dtype=(zero.dtype, zero.dtype, zero.dtype, zero.dtype), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def int4_numbers(w, zero, scale):  # noqa: ANN201 - Triton's own types
    """Like `int4_integers`, multiplied by `scale`."""
    asm: tl.constexpr = _SCALED_BFLOAT16 if zero.dtype == tl.bfloat16 else _SCALED_FLOAT16
    return tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r,r,r", [w, zero, scale],
        dtype=(zero.dtype, zero.dtype, zero.dtype, zero.dtype), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def e2m1_numbers(w, scale):  # noqa: ANN201 - Triton's own types
    """Values of the nibbles of 16-bit numbers times `scale`, divided by 2 ** 126 (bfloat16) or
    2 ** 14 (float16): four tensors of the type of `scale`."""
    asm: tl.constexpr = _E2M1_BFLOAT16 if scale.dtype == tl.bfloat16 else _E2M1_FLOAT16
    return tl.inline_asm_elementwise(
        asm, "=&r,=&r,=&r,=&r,r,r", [w, scale],
        dtype=(scale.dtype, scale.dtype, scale.dtype, scale.dtype), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def e4m3_halves(pairs):  # noqa: ANN201 - Triton's own types
    """float16 values of the first and of the second e4m3 number of each 16 bits."""
    return tl.inline_asm_elementwise(
        _E4M3_HALVES, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip
