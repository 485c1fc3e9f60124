"""The PTX parser: what every construct becomes, and that what is not understood is refused with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4lib.emulator.errors import PtxSyntaxError
from dsv4lib.emulator.ptx.ir import Imm, Location, Memory, Pair, Param, Reg, Sink, Special, Symbol, Vector
from dsv4lib.emulator.ptx.parse import parse

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def kernel(body: str, params: str = "", head: str = "", directives: str = ""):
    """The kernel of a PTX file with this body; its first line is line 7."""
    registers = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b128 %rq<2>;"
    text = f"{HEAD}{head}\n.visible .entry k({params})\n{directives}{{ {registers}\n{body}\n}}\n"
    return parse(text).kernels["k"]


def one(text: str, **kwargs):
    """Operands of one instruction, registers by name."""
    k = kernel(text, **kwargs)
    (instr,) = k.instructions
    return tuple(named(k, operand) for operand in instr.operands)


def named(k, operand):
    """An operand with registers replaced by their names."""
    if isinstance(operand, Reg):
        return ("!" if operand.negated else "") + k.registers[operand.index].name
    if isinstance(operand, Vector):
        return [named(k, item) for item in operand.items]
    if isinstance(operand, Pair):
        return (named(k, operand.first), named(k, operand.second))
    if isinstance(operand, Memory):
        return {"base": named(k, operand.base), "offset": operand.offset, "rest": [named(k, x) for x in operand.rest]}
    return operand


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("add.s32 %r1, %r2, %r3;", ("%r1", "%r2", "%r3")),
        ("add.s32 %r1, %r2, -7;", ("%r1", "%r2", Imm(2**64 - 7))),
        ("or.b32 %r1, %r2, 0xFFU;", ("%r1", "%r2", Imm(255))),
        ("or.b32 %r1, %r2, 0b101;", ("%r1", "%r2", Imm(5))),
        ("or.b32 %r1, %r2, 017;", ("%r1", "%r2", Imm(15))),
        ("mov.b64 %rd1, 0xffffffffffffffff;", ("%rd1", Imm(2**64 - 1))),
        ("mul.f32 %r1, %r2, 0f3F800000;", ("%r1", "%r2", Imm(0x3F800000))),
        ("mul.f32 %r1, %r2, 1.5;", ("%r1", "%r2", Imm(0x3FC00000))),
        ("mul.f32 %r1, %r2, -2e0;", ("%r1", "%r2", Imm(0xC0000000))),
        ("mul.f64 %rd1, %rd2, 1.5;", ("%rd1", "%rd2", Imm(0x3FF8000000000000))),
        ("mul.f64 %rd1, %rd2, 0d3FF0000000000000;", ("%rd1", "%rd2", Imm(0x3FF0000000000000))),
        ("mov.u32 %r1, %tid.x;", ("%r1", Special("tid.x"))),
        ("mov.u32 %r1, %cluster_ctarank;", ("%r1", Special("cluster_ctarank"))),
        ("mov.u32 %r1, WARP_SZ;", ("%r1", Imm(32))),
        ("mov.b64 %rd1, {%r1, _};", ("%rd1", ["%r1", Sink()])),
        ("mov.b64 {_, %r1}, %rd1;", ([Sink(), "%r1"], "%rd1")),
        ("setp.eq.and.s32 %p1|%p2, %r1, 0, !%p3;", (("%p1", "%p2"), "%r1", Imm(0), "!%p3")),
        ("elect.sync _|%p1, -1;", ((Sink(), "%p1"), Imm(2**64 - 1))),
        ("ld.global.b32 %r1, [%rd1];", ("%r1", {"base": "%rd1", "offset": 0, "rest": []})),
        ("ld.global.b32 %r1, [%rd1+-8];", ("%r1", {"base": "%rd1", "offset": -8, "rest": []})),
        ("ld.global.b32 %r1, [ %rd1 - 0x10 ];", ("%r1", {"base": "%rd1", "offset": -16, "rest": []})),
        ("ld.global.b32 %r1, [%rd1+4+16];", ("%r1", {"base": "%rd1", "offset": 20, "rest": []})),
        ("ld.shared.b32 %r1, [128];", ("%r1", {"base": Imm(128), "offset": 0, "rest": []})),
        (
            "st.shared.v4.b32 [%r1+16], {%r2, %r3, %r4, 0};",
            ({"base": "%r1", "offset": 16, "rest": []}, ["%r2", "%r3", "%r4", Imm(0)]),
        ),
        (
            "cp.async.bulk.tensor.2d.shared::cta.global.tile [%r1], [%rd1, {%r2, %r3}], [%r4+8];",
            (
                {"base": "%r1", "offset": 0, "rest": []},
                {"base": "%rd1", "offset": 0, "rest": [["%r2", "%r3"]]},
                {"base": "%r4", "offset": 8, "rest": []},
            ),
        ),
    ],
)
def test_operands(text, expected):
    assert one(text) == expected


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_64_bit_immediate_keeps_its_bits(value):
    assert one(f"mov.b64 %rd1, {value};")[1] == Imm(value % 2**64)


@given(st.integers(0, 2**32 - 1), st.integers(-(2**31), 2**31 - 1))
def test_any_float_pattern_and_offset(bits, offset):
    assert one(f"mov.f32 %r1, 0f{bits:08X};")[1] == Imm(bits)
    assert one(f"ld.global.b32 %r1, [%rd1+{offset}];")[1]["offset"] == offset


@pytest.mark.parametrize(
    ("text", "bits"),  # as ptxas takes them
    [
        ("mul.f32 %r1, %r2, 0d4008000000000000;", 0x40400000),
        ("mul.f32 %r1, %r2, 0d3FF0000010000000;", 0x3F800000),  # a tie
        ("mul.f32 %r1, %r2, 1e39;", 0x7F800000),
        ("mul.f64 %rd1, %rd2, 0f40400000;", 0x4008000000000000),
        ("mov.b64 %rd1, 1.5;", 0x3FF8000000000000),
        ("mov.b64 %rd1, 0d3FF8000000000000;", 0x3FF8000000000000),
        ("mov.b32 %r1, 0f40400000;", 0x40400000),
        ("cvt.f64.f32 %rd1, 1.5;", 0x3FC00000),
        ("cvt.f64.f32 %rd1, 0d3FF8000000000000;", 0x3FC00000),
        ("cvt.rn.f32.f64 %r1, 0f3FC00000;", 0x3FF8000000000000),
        ("cvt.rzi.s32.f32 %r1, 1.5;", 0x3FC00000),
        ("slct.f64.f32 %rd1, %rd1, 1.5, %r1;", 0x3FF8000000000000),
    ],
)
def test_float_constants_take_the_type_of_the_operand(text, bits):
    assert Imm(bits) in one(text)


def test_two_instructions_read_one_constant_each_in_its_type():
    body = "mul.f32 %r1, %r1, 0f40400000; mul.f64 %rd1, %rd1, 0f40400000;"
    assert [i.operands[2] for i in kernel(body).instructions] == [
        Imm(0x40400000),
        Imm(0x4008000000000000),
    ]


@pytest.mark.parametrize(
    "text",
    ["mul.f16 %rs1, %rs1, 2.0", "mov.b16 %rs1, 0f3F800000", "mov.u32 %r1, 1.0", "mov.b32 %r1, 1.0"]
    + ["mov.b32 %r1, 0d3FF0000000000000", "mul.f32 %r1, %r1, 1e400", "fma.rn.f32x2 %rd1, %rd1, %rd1, 1.0"],
)
def test_float_constants_that_ptxas_refuses(text):
    with pytest.raises(PtxSyntaxError, match="no constant of the type|does not fit"):
        one(text + ";")


def test_guards_and_lines():
    k = kernel("@%p1 add.s32 %r1, %r1, 1;\n  @!%p2 bra.uni L;\nL:\nret;")
    assert [i.opcode for i in k.instructions] == ["add.s32", "bra.uni", "ret"]
    assert [i.line for i in k.instructions] == [7, 8, 10]
    assert [i.guard and i.guard.negated for i in k.instructions] == [False, True, None]
    assert k.labels == {"L": 2} and k.instructions[1].operands == (Symbol("L"),)
    assert k.instructions[1].text == "@!%p2 bra.uni L"


def test_registers_exist_when_used_and_have_their_width():
    k = kernel("mov.b16 %rs1, 0;\nmov.b64 %rd8, 0;\nmov.pred %p0, -1;\nmov.b128 %rq1, {%rd8, %rd8};")
    assert [(r.name, r.bits, r.index) for r in k.registers] == [
        ("%rs1", 16, 0),
        ("%rd8", 64, 1),
        ("%p0", 1, 2),
        ("%rq1", 128, 3),
    ]


@pytest.mark.parametrize("name", ["%r99", "%r01", "%q1", "%r", "x"])
def test_undeclared_names_are_refused(name):
    with pytest.raises(PtxSyntaxError, match=f"'{name}' is not declared(?s:.*)PTX line 7"):
        kernel(f"mov.b32 %r1, {name};")


def test_prefixes_that_end_in_digits():
    k = kernel(".reg .b64 %x1<3>; .reg .b16 %x<2>;\nmov.b64 %x12, 0;\nmov.b16 %x1, 0;")
    assert [(r.name, r.bits) for r in k.registers] == [("%x12", 64), ("%x1", 16)]


def test_blocks_have_their_own_registers_and_labels():
    block = "{ .reg .pred P1;\n WAIT:\n setp.eq.s32 P1, %r1, 0;\n @P1 bra.uni DONE;\n bra WAIT;\n DONE:\n }"
    k = kernel(f"mov.b32 %r1, 0;\n{block}\n{block}\nret;")
    branches = [i for i in k.instructions if i.opcode.startswith("bra")]
    targets = [k.labels[i.operands[0].name] for i in branches]
    assert targets == [4, 1, 7, 4]
    assert [r.name for r in k.registers] == ["%r1", "P1@1", "P1@2"]
    assert branches[0].guard.index != branches[2].guard.index


def test_an_inner_name_hides_the_outer_one_from_its_declaration_on():
    k = kernel("mov.b32 %r1, 0;\n{ mov.b32 %r1, 1;\n.reg .b64 %r1;\n mov.b64 %r1, 2; }\nmov.b32 %r1, 3;")
    assert [k.registers[i.operands[0].index].name for i in k.instructions] == ["%r1", "%r1", "%r1@1", "%r1"]
    assert k.registers[k.instructions[2].operands[0].index].bits == 64


def test_branches_to_outer_blocks():
    k = kernel("OUT:\n{ { bra OUT; } bra IN; IN: }\nret;")
    assert [k.labels[i.operands[0].name] for i in k.instructions[:2]] == [0, 2]


def test_vector_registers():
    k = kernel(
        "{ .reg .v4 .s32 abcd;\nmov.b32 abcd.y, 1;\nst.global.v4.b32 [%rd1], abcd;\nadd.s32 %r1, abcd.w, abcd.g; }"
    )
    assert [r.name for r in k.registers if "abcd" in r.name] == [f"abcd.{c}@1" for c in "xyzw"]
    assert named(k, k.instructions[1].operands[1]) == [f"abcd.{c}@1" for c in "xyzw"]
    assert named(k, k.instructions[2].operands[2]) == "abcd.y@1"


def test_parameters_are_laid_out_by_alignment():
    k = kernel(
        "ret;",
        params=".param .u32 a, .param .u64 .ptr .global .align 16 b, .param .align 64 .b8 c[128], .param .f32 d",
    )
    assert k.params == [
        Param("a", 0, 4, 4, "u32"),
        Param("b", 8, 8, 8, "u64", pointer=True),
        Param("c", 64, 128, 64, "b8"),
        Param("d", 192, 4, 4, "f32"),
    ]
    assert k.param_bytes == 196


def test_parameter_addresses():
    assert one("ld.param.b32 %r1, [c+16];", params=".param .align 64 .b8 c[128]")[1]["base"] == Symbol("c")
    assert one("mov.b64 %rd1, c+16;", params=".param .align 64 .b8 c[128]")[1] == Symbol("c", 16)


def test_entry_directives():
    text = ".reqntid 192, 2, 1\n.maxntid 256\n.minnctapersm 1\n.reqnctapercluster 2\n.explicitcluster\n"
    k = kernel("ret;", directives=text)
    assert (k.reqntid, k.maxntid, k.cluster) == ((192, 2, 1), (256, 1, 1), (2, 1, 1))
    with pytest.raises(PtxSyntaxError, match="entry directive .mystery"):
        kernel("ret;", directives=".mystery 3\n")


def test_variables():
    head = """
.extern .shared .align 1024 .b8 smem[];
.visible .global .align 4 .b8 text[5] = {104, 105, 0x21};
.const .f32 table[2][2] = {{1.0, 0f40000000}, {-1.5}};
.global .u64 one = 0x1122334455667788, two;
.shared .v2 .b32 pair;
"""
    module = parse(f"{HEAD}{head}\n.entry k() {{ .local .align 16 .b8 depot[48]; .shared .b16 h[3]; ret; }}")
    got = {v.name: (v.space, v.size, v.align, v.extern, v.data) for v in module.variables}
    assert got["smem"] == ("shared", 0, 1024, True, None)
    assert got["text"] == ("global", 5, 4, False, b"hi!\0\0")
    assert got["table"] == ("const", 16, 4, False, bytes.fromhex("0000803f 00000040 0000c0bf 00000000"))
    assert got["one"] == ("global", 8, 8, False, bytes.fromhex("8877665544332211"))
    assert got["two"] == ("global", 8, 8, False, None)
    assert got["pair"] == ("shared", 8, 8, False, None)
    inner = {v.name: (v.space, v.size, v.align) for v in module.kernels["k"].variables}
    assert inner == {"depot": ("local", 48, 16), "h": ("shared", 6, 2)}


def test_a_header_inlined_twice_has_the_line_of_each_call():
    """Compilers write one text for an instruction of a header's header, whatever calls it."""
    chain = """.loc 1 {0} 3
.loc 2 66 5, function_name $a, inlined_at 1 {0} 3
.loc 3 139 5, function_name $b, inlined_at 2 66 5
add.s32 %r1, %r1, 1;
"""
    body = chain.format(10) + chain.format(20) + chain.format(10)
    text = f"{HEAD}.entry k() {{ .reg .b32 %r<4>;\n{body}ret;\n}}\n"
    text += '.file 1 "/a/main.cu"\n.file 2 "/b/outer.h"\n.file 3 "/b/inner.h"\n'
    places = [i.location for i in parse(text).kernels["k"].instructions[:3]]
    assert [place.line for place in places] == [139] * 3
    assert [place.outermost() for place in places] == [Location("/a/main.cu", n) for n in (10, 20, 10)]


def test_inline_assembly_has_the_line_of_its_statement():
    """Compilers count its lines on: the wait would be at line 113 of a file that ends at 110."""
    body = """.loc 1 110 4
// begin inline asm
{
.reg .pred P1;
.loc 1 112 4
LAB_WAIT:
.loc 1 113 4
mbarrier.try_wait.parity.shared.b64 P1, [%r1], 0;
}
// end inline asm
.loc 1 105 2
ret;
"""
    text = f'{HEAD}.entry k() {{ .reg .b32 %r<4>;\n{body}}}\n.file 1 "/a/main.py"\n'
    assert [i.location.line for i in parse(text).kernels["k"].instructions] == [110, 105]


def test_line_info():
    body = """.loc 1 10 4
add.s32 %r1, %r1, 1;
.loc 2 20 4, function_name $L__info_string0, inlined_at 1 10 4
add.s32 %r1, %r1, 2;
.loc 2 30 4, function_name $L__info_string0, inlined_at 2 20 4
mov.b64 %rd1,
.loc 1 99 0
 {%r1, %r2};
ret;
"""
    text = f"{HEAD}.entry k() {{ .reg .b32 %r<4>; .reg .b64 %rd<2>;\n{body}}}\n"
    text += '.file 1 "/a/main.py"\n.file 2 "/b//lib.py"\n'
    text += ".section .debug_str\n{\n$L__info_string0:\n.b8 95,90,0\n}\n"
    k = parse(text).kernels["k"]
    main = Location("/a/main.py", 10)
    inlined = Location("/b//lib.py", 20, main)
    assert [i.location for i in k.instructions] == [
        main,
        inlined,
        Location("/b//lib.py", 30, inlined),
        Location("/a/main.py", 99),
    ]
    assert k.instructions[2].location.outermost() == main
    assert k.instructions[2].text == "mov.b64 %rd1, {%r1, %r2}"


def test_comments_and_pragmas_leave_lines_alone():
    k = kernel('// x ; y\n/* { \n */ .pragma "nounroll"; ret; // }')
    assert [(i.opcode, i.line) for i in k.instructions] == [("ret", 9)]


def test_functions_are_skipped_and_calls_kept():
    head = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n.func f() { { ret; } }\n"
    k = kernel("{ .param .b64 p0;\ncall.uni (p0), vprintf, (p0, p0); }", head=head)
    assert k.instructions[0].operands == (
        Vector((Symbol("p0@1"),)),
        Symbol("vprintf"),
        Vector((Symbol("p0@1"), Symbol("p0@1"))),
    )


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("ret", 7, "no ; or }"),
        ("add.s32 %r1, , %r2;", 7, "balanced"),
        ("ret;\nadd.s32 %r1, {%r2;", 8, "balanced"),
        ("@%r1 ret;", 7, "not a predicate"),
        ("@%p8x ret;", 7, "guard"),
        ("setp.eq.s32 %p1, %r1, !%r2;", 7, "only a predicate"),
        ("bra NOWHERE;", 7, "unknown label"),
        ("{ L: } \nbra L;", 8, "unknown label"),
        ("L: ret;\nL: ret;", 8, "declared twice"),
        (".reg .b32 a;\n.reg .b64 a;", 8, "declared twice"),
        (".reg .b32 a<2>;\n.reg .b64 a<3>;", 8, "declared twice"),
        (".reg .b33 a;", 7, "register declaration"),
        (".shared .b8 x[3;", 7, "declarator"),
        (".shared .align 3 .b8 x[3];", 7, "power of two"),
        ("mov.b64 %rd1, 0x10000000000000000;", 7, "64 bits"),
        ("mov.b32 %r1, 09;", 7, "octal"),
        ("ADD %r1;", 7, "not an instruction"),
        (".loc 7 1 1\nret;", 7, "no .file"),
        (".mystery 3;", 7, "declaration"),
    ],
)
def test_what_is_not_ptx_is_refused_with_its_line(body, line, message):
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        kernel(body)
    assert caught.value.place.ptx_line == line


@pytest.mark.parametrize(
    "text",
    ["", ".version 9.0\n", HEAD + ".entry k( {", HEAD + ".entry k() { ret;", HEAD + "nonsense", HEAD + ".func f() {"],
)
def test_broken_files(text):
    with pytest.raises(PtxSyntaxError):
        parse(text)


def test_only_64_bit_addresses():
    with pytest.raises(PtxSyntaxError, match="64-bit"):
        parse(".version 9.0\n.target sm_100a\n.address_size 32\n")


def test_a_register_and_a_range_may_share_a_name():
    """As Triton's conversions have it."""
    k = kernel("{ .reg .b32 a; .reg .f16 a<2>; mov.b32 {a0, a1}, a; }")
    assert [r.bits for r in k.registers] == [16, 16, 32]


def test_initialisers_with_addresses():
    """What depends on where variables lie is kept apart: whole addresses, and their bytes."""
    module = parse(
        HEAD
        + ".func f() { ret; }\n.global .u32 a[4];\n"
        + ".global .u64 p[4] = {generic(a), 7, a+4, f};\n"
        + ".global .u8 q[4] = {0xFF(generic(a)), 0xFF00(a), 0xFF0000(generic(a)+8), 3};\n"
    )
    _, p, q = module.variables
    assert p.data == bytes(8) + (7).to_bytes(8, "little") + bytes(16) and q.data == bytes(3) + b"\3"
    assert p.pointers == ((0, 8, "a", 0, 0), (16, 8, "a", 4, 0), (24, 8, "f", 0, 0))
    assert q.pointers == ((0, 1, "a", 0, 0), (1, 1, "a", 0, 8), (2, 1, "a", 8, 16))


@pytest.mark.parametrize("value", ["generic(a", "a+b", "0xFF00FF(a)", "sin(a)", "a b"])
def test_other_initialisers_are_refused(value):
    with pytest.raises(PtxSyntaxError, match="initialiser|not an integer"):
        parse(HEAD + f".global .u32 a;\n.global .u8 p[2] = {{{value}, 0}};\n")


def test_a_long_kernel_parses_in_linear_time():
    import time

    def seconds(n):
        body = "\n".join(
            f"add.s32 %r{i % 90}, %r{i % 89}, {i};\nst.shared.v2.b32 [%r1+{i}], {{%r2, %r3}};" for i in range(n)
        )
        start = time.process_time()
        assert len(kernel(body).instructions) == 2 * n
        return time.process_time() - start

    seconds(200)
    short, long = min(seconds(500) for _ in range(3)), min(seconds(2000) for _ in range(3))
    assert long < 10 * short  # 4x the text; quadratic would be 16x


TRITON_STYLE = """
//
// Generated by LLVM NVPTX Back-End
//
.version 8.7
.target sm_90a, debug
.address_size 64

	// .globl	add_kernel              // -- Begin function add_kernel
.extern .shared .align 16 .b8 global_smem[];
.visible .entry add_kernel(
	.param .u64 .ptr .global .align 1 add_kernel_param_0,
	.param .u64 .ptr .global .align 1 add_kernel_param_1,
	.param .u32 add_kernel_param_2
)
.reqntid 128
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<3>;
	.loc	1 19 0                          // add.py:19:0
$L__func_begin0:
	.loc	1 19 0                          // add.py:19:0

// %bb.0:
	ld.param.u64 	%rd1, [add_kernel_param_0];
$L__tmp0:
	.loc	1 24 24                         // add.py:24:24
	mov.u32 	%r1, %ctaid.x;
	.loc	2 268 36                        // standard.py:268:36 @[ add.py:30:10 ]
	setp.lt.s32 	%p1, %r1, 7;
	// begin inline asm
	mov.u32 %r2, 0x0;
	@%p1 ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd1 + 0 ];
	// end inline asm
	ret;
$L__tmp1:
$L__func_end0:
                                        // -- End function
}
	.file	1 "/home/x/add.py"
	.file	2 "/home/x/standard.py", 1700000000, 4096
	.section	.debug_abbrev
	{
.b8 1                                   // Abbreviation Code
.b8 17                                  // DW_TAG_compile_unit
	}
	.section	.debug_info
	{
.b32 .debug_abbrev                      // Offset Into Abbrev. Section
.b64 $L__func_begin0
	}
	.section	.debug_macinfo	{	}
"""


def test_triton_style_file():
    module = parse(TRITON_STYLE)
    k = module.kernels["add_kernel"]
    assert module.target == "sm_90a" and k.reqntid == (128, 1, 1)
    assert [p.offset for p in k.params] == [0, 8, 16] and k.param_bytes == 20
    assert [i.opcode for i in k.instructions] == [
        "ld.param.u64",
        "mov.u32",
        "setp.lt.s32",
        "mov.u32",
        "ld.global.v4.b32",
        "ret",
    ]
    assert k.labels["$L__func_end0"] == 6
    assert k.instructions[4].location == Location("/home/x/standard.py", 268)
    assert named(k, k.instructions[4].operands[0]) == ["%r2", "%r3", "%r4", "%r5"]


NVCC_STYLE = """
.version 8.4
.target sm_80
.address_size 64
.func  (.param .b32 func_retval0) _Z3sqri(
	.param .b32 _Z3sqri_param_0
)
{
	.reg .b32 	%r<3>;
	ld.param.u32 	%r1, [_Z3sqri_param_0];
	mul.lo.s32 	%r2, %r1, %r1;
	st.param.b32 	[func_retval0+0], %r2;
	ret;
}
.visible .const .align 4 .b8 lut[16];
.visible .global .align 4 .u32 counter;
.weak .entry _Z4kernPi(
	.param .u64 _Z4kernPi_param_0
)
.maxntid 256, 1, 1
.minnctapersm 2
{
	.local .align 16 .b8 	__local_depot1[32];
	.reg .b64 	%SP;
	.reg .b64 	%SPL;
	.reg .f32 	%f<3>;
	.reg .f64 	%fd<2>;
	.reg .b32 	%r<5>;
	.reg .b64 	%rd<4>;
	// demoted variable
	.shared .align 4 .f32 _ZZ4kernPiE4tile[64];
	mov.u64 	%SPL, __local_depot1;
	cvta.local.u64 	%SP, %SPL;
	ld.param.u64 	%rd1, [_Z4kernPi_param_0];
	mov.u32 	%r1, %tid.x;
	mov.f32 	%f1, 0f3F800000;
	st.shared.f32 	[_ZZ4kernPiE4tile+4], %f1;
	{ // callseq 0, 0
	.reg .b32 temp_param_reg;
	.param .b32 param0;
	st.param.b32 	[param0+0], %r1;
	.param .b32 retval0;
	call.uni (retval0),
	_Z3sqri,
	(
	param0
	);
	ld.param.b32 	%r2, [retval0+0];
	} // callseq 0
	ret;
}
"""


def test_nvcc_style_file():
    module = parse(NVCC_STYLE)
    k = module.kernels["_Z4kernPi"]
    assert k.maxntid == (256, 1, 1)
    assert {v.name: (v.space, v.size) for v in k.variables} == {
        "__local_depot1": ("local", 32),
        "_ZZ4kernPiE4tile": ("shared", 256),
        "param0@1": ("param", 4),
        "retval0@1": ("param", 4),
    }
    passed, square, back = (
        next(i for i, x in enumerate(k.instructions) if t in x.text) for t in ("param0+0", "mul", "retval0")
    )
    assert passed < square < back, "the function's body stands where it is called"
    assert k.instructions[square - 1].operands[1] == Memory(Symbol("param0@1"))
    assert k.instructions[square + 1].operands[0] == Memory(Symbol("retval0@1"))
    assert k.labels[k.instructions[square + 2].operands[0].name] == square + 3
    assert [v.name for v in module.variables] == ["lut", "counter"]
