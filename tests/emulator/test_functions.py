"""Device functions: arguments and results, divergence, nesting, addresses; heap and stack; assertions; refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import EmulatorError, LaunchError, MemoryFault, PtxSyntaxError, UnsupportedInstruction
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.ptx import parse
from tests.emulator.launching import HEADER, aligned, copy, entry, launch

LANES = np.arange(32)
FRAME = "ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;"
STORE = "st.global.b32 [%rd1], %r9;"
# Collatz steps by a loop that lanes leave at different times.
STEPS = """
.func (.param .b32 steps_result) steps(.param .b32 steps_param)
{
  .reg .b32 %r<9>; .reg .pred %p<9>;
  ld.param.b32 %r1, [steps_param]; mov.b32 %r2, 0;
LOOP:
  setp.le.u32 %p1, %r1, 1; @%p1 st.param.b32 [steps_result], %r2; @%p1 ret;
  and.b32 %r3, %r1, 1; setp.eq.u32 %p2, %r3, 1; shr.u32 %r4, %r1, 1; mad.lo.u32 %r5, %r1, 3, 1;
  selp.b32 %r1, %r5, %r4, %p2; add.u32 %r2, %r2, 1; bra.uni LOOP;
}
"""
# (a, b) by value in 16 bytes -> a - b in 64 bits and a * b in 32, through a function of its own.
PAIR = """
.func (.param .b32 product_result) product(.param .b32 product_a, .param .b32 product_b)
{
  .reg .b32 %r<9>; ld.param.b32 %r1, [product_a]; ld.param.b32 %r2, [product_b];
  mul.lo.u32 %r3, %r1, %r2; st.param.b32 [product_result], %r3; ret;
}
.func (.param .align 8 .b8 pair_result[16]) pair(.param .align 8 .b8 pair_param[16])
{
  .reg .b32 %r<9>; .reg .b64 %rd<9>;
  ld.param.v2.b64 {%rd1, %rd2}, [pair_param]; sub.s64 %rd3, %rd1, %rd2; st.param.b64 [pair_result], %rd3;
  cvt.u32.u64 %r1, %rd1; ld.param.b32 %r2, [pair_param+8];
  { .param .b32 p0; .param .b32 p1; .param .b32 back;
    st.param.b32 [p0], %r1; st.param.b32 [p1], %r2; call.uni (back), product, (p0, p1); ld.param.b32 %r3, [back]; }
  st.param.b32 [pair_result+8], %r3;
  ret;
}
"""


def run(functions: str, body: str, params: str = "u64 out", *args: np.ndarray) -> np.ndarray:
    out = aligned(32, np.int32)
    text = entry(params, FRAME + body + STORE)
    launch(text.replace(HEADER, HEADER + functions), out, *args)
    return out


def call_steps(source: str) -> str:
    return f"""{{ .param .b32 p0; .param .b32 back; st.param.b32 [p0], {source}; call.uni (back), steps, (p0);
    ld.param.b32 %r9, [back]; }}"""


def collatz(n: int) -> int:
    steps = 0
    while n > 1:
        n, steps = n * 3 + 1 if n % 2 else n // 2, steps + 1
    return steps


def test_lanes_that_return_at_different_times():
    """They go on together; the function is called twice, with registers of its own."""
    body = f"""add.u32 %r2, %r1, 1; mov.u32 %r5, 77; {call_steps("%r2")} mov.u32 %r8, %r9; {call_steps("%r1")}
    add.u32 %r9, %r9, %r8; activemask.b32 %r6; popc.b32 %r6, %r6; mad.lo.u32 %r9, %r6, 1000, %r9; sub.u32 %r9, %r9, 77;
    add.u32 %r9, %r9, %r5;"""
    out = run(STEPS, body)
    assert out.tolist() == [32000 + collatz(n + 1) + collatz(n) for n in range(32)]


def test_structures_and_nested_calls():
    body = """cvt.u64.u32 %rd4, %r1; mov.b64 %rd5, 5;
    { .param .align 8 .b8 p0[16]; .param .align 8 .b8 back[16];
      st.param.b64 [p0], %rd4; st.param.b64 [p0+8], %rd5; call (back), pair, (p0);
      ld.param.b32 %r3, [back+8]; ld.param.b64 %rd6, [back]; }
    cvt.u32.u64 %r4, %rd6; mad.lo.s32 %r9, %r3, 1000, %r4;"""
    assert run(PAIR, body).tolist() == (LANES * 5 * 1000 + LANES - 5).tolist()


def test_functions_may_follow_and_calls_may_be_guarded():
    body = f"mov.u32 %r9, 7; setp.lt.u32 %p7, %r1, 9; {call_steps('%r1').replace('call.uni', '@%p7 call')}"
    text = entry("u64 out", FRAME + body.replace("ld.param.b32 %r9", "@%p7 ld.param.b32 %r9") + STORE)
    out = aligned(32, np.int32)
    prototype = ".func (.param .b32 steps_result) steps(.param .b32 steps_param);"
    launch(text.replace(HEADER, HEADER + prototype) + STEPS, out)
    assert out.tolist() == [collatz(n) if n < 9 else 7 for n in range(32)]


# Three functions of one type, one of another; where they lie is in two tables.
MANY = """
.func (.param .b32 r) twice(.param .b32 a) { .reg .b32 %r<3>; ld.param.b32 %r1, [a]; add.u32 %r2, %r1, %r1;
  st.param.b32 [r], %r2; ret; }
.func (.param .b32 r) minus(.param .b32 a) { .reg .b32 %r<3>; ld.param.b32 %r1, [a]; neg.s32 %r2, %r1;
  st.param.b32 [r], %r2; ret; }
.func (.param .b32 r) plus(.param .b32 a) { .reg .b32 %r<3>; ld.param.b32 %r1, [a]; add.u32 %r2, %r1, 100;
  st.param.b32 [r], %r2; ret; }
.func other(.param .b64 a) { ret; }
.global .u64 table[4] = {twice, minus, other, table};
"""
INDIRECT = """
mov.b64 %rd4, table; and.b32 %r2, %r1, 1; mul.wide.u32 %rd5, %r2, 8; add.s64 %rd4, %rd4, %rd5;
ld.global.b64 %rd6, [%rd4];
setp.gt.u32 %p1, %r1, 20; @%p1 mov.b64 %rd6, plus; setp.ne.u32 %p2, %r1, 5; mov.b32 %r9, 7;
{ .param .b32 p0; .param .b32 back; st.param.b32 [p0], %r1; type: .callprototype (.param .b32 _) _ (.param .b32 _);
  @%p2 call (back), %rd6, (p0), type; @%p2 ld.param.b32 %r9, [back]; }
"""


def test_calls_of_addresses():
    """Every lane calls its own function, one none; functions of another type are none that it may mean."""
    module = parse.parse(entry("u64 out", FRAME + INDIRECT + STORE).replace(HEADER, HEADER + MANY))
    gpu = make("sm_100a")
    out = gpu.copy(np.zeros(32, np.int32))
    gpu.launch(LaunchRequest("k", module, (1, 1, 1), (32, 1, 1), params=out.ctypes.data.to_bytes(8, "little")))
    want = [n + 100 if n > 20 else -n if n & 1 else 2 * n for n in range(32)]
    assert out.tolist() == [7 if n == 5 else want[n] for n in range(32)]


def test_an_address_of_no_such_function_is_told():
    """The third of the table has other parameters; the fourth is no function."""
    for number in (2, 3):
        text = INDIRECT.replace("and.b32 %r2, %r1, 1", f"mov.b32 %r2, {number}")
        module = parse.parse(entry("u64 out", FRAME + text + STORE).replace(HEADER, HEADER + MANY))
        gpu = make("sm_100a")
        out = gpu.empty(128, "out")
        request = LaunchRequest("k", module, (1, 1, 1), (32, 1, 1), params=out.ctypes.data.to_bytes(8, "little"))
        with pytest.raises(EmulatorError, match="no function with such parameters"):
            gpu.launch(request)


CONST = """
mov.b64 %rd4, fixed; cvta.const.u64 %rd4, %rd4; mov.b64 %rd5, other; add.s64 %rd6, %rd4, 15; add.s64 %rd7, %rd4, 16;
add.s64 %rd8, %rd5, 3; mov.b32 %r9, 0;
"""


def test_which_addresses_are_constant():
    """Both variables to their last byte, what lies past the end or elsewhere not, nor in a lane that does not query."""
    query = "setp.ne.u32 %p1, %r1, 3; isspacep.const %p2, {}; @%p1 isspacep.const %p2, {}; selp.b32 %r2, 1, 0, %p2;"
    body = CONST + "".join(
        query.format("%rd1", name) + "mad.lo.u32 %r9, %r9, 2, %r2;" for name in ("%rd4", "%rd6", "%rd8", "%rd7", "%rd1")
    )
    variables = ".const .align 4 .b8 fixed[16]; .const .b32 other = 5; .global .b32 no;\n"
    module = parse.parse(entry("u64 out", FRAME + body + STORE).replace(HEADER, HEADER + variables))
    gpu = make("sm_100a")
    out = gpu.copy(np.zeros(32, np.int32))
    gpu.launch(LaunchRequest("k", module, (1, 1, 1), (32, 1, 1), params=out.ctypes.data.to_bytes(8, "little")))
    assert out.tolist() == [0 if n == 3 else 0b11100 for n in range(32)]


def test_variables_that_point_to_what_is_not_there():
    module = parse.parse(HEADER + ".extern .global .u32 far;\n.global .u64 p = far;\n.entry k() { ret; }")
    with pytest.raises(LaunchError, match="p points to far"):
        make("sm_100a").launch(LaunchRequest("k", module, (1, 1, 1), (32, 1, 1)))


HEAP = """
.extern .func (.param .b64 r) malloc(.param .b64 n);
.extern .func free(.param .b64 p);
"""
TAKE = """
mul.wide.u32 %rd4, %r1, 4; { .param .b64 n; .param .b64 back; st.param.b64 [n], %rd4; call (back), malloc, (n);
  ld.param.b64 %rd5, [back]; }
setp.eq.b64 %p1, %rd5, 0; mov.b32 %r9, 0; @%p1 bra DONE; mov.b32 %r2, 0; mov.b64 %rd6, %rd5;
FILL: st.b32 [%rd6], %r1; add.s64 %rd6, %rd6, 4; add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, %r1; @%p2 bra FILL;
bar.warp.sync %r8;
SUM: add.s64 %rd6, %rd6, -4; ld.b32 %r3, [%rd6]; add.u32 %r9, %r9, %r3; setp.gt.u64 %p2, %rd6, %rd5; @%p2 bra SUM;
{ .param .b64 p; st.param.b64 [p], %rd5; call free, (p); }
DONE:
"""


def test_the_heap_gives_every_lane_memory_of_its_own():
    """Lane n fills n words, and adds them up when all are full; none for none."""
    assert run(HEAP, "mov.b32 %r8, 0xfffffffe;" + TAKE).tolist() == (LANES * LANES).tolist()


def test_memory_is_freed_once():
    again = TAKE.replace("DONE:", "{ .param .b64 p; st.param.b64 [p], %rd5; call free, (p); } DONE:")
    with pytest.raises(MemoryFault, match="lane 1 frees 0x.*, which malloc did not return"):
        run(HEAP, "mov.b32 %r8, 0xfffffffe;" + again)


STACK = """
mul.lo.u32 %r2, %r1, 8; add.u32 %r2, %r2, SIZE; cvt.u64.u32 %rd4, %r2; stacksave.u64 %rd9; alloca.u64 %rd5, %rd4, 64;
alloca.u64 %rd6, 4, 4; and.b64 %rd7, %rd5, 63; st.local.b32 [%rd5], %r1; st.local.b32 [%rd6], 5; stackrestore.u64 %rd9;
alloca.u64 %rd8, %rd4, 64; sub.s64 %rd8, %rd8, %rd5; sub.s64 %rd6, %rd6, %rd5; ld.local.b32 %r9, [%rd5];
cvt.u32.u64 %r3, %rd6; cvt.u32.u64 %r4, %rd7; cvt.u32.u64 %r5, %rd8; mad.lo.u32 %r9, %r3, 100, %r9;
mad.lo.u32 %r9, %r4, 1000000, %r9; mad.lo.u32 %r9, %r5, 1000000, %r9;
"""


def test_stacks():
    """Pieces of the size that a lane wants, aligned, after each other, and the same ones after a restore."""
    out = run("", STACK.replace("SIZE", "4"))
    assert out.tolist() == ((8 * LANES + 4) * 100 + LANES).tolist()


def test_a_stack_ends():
    with pytest.raises(MemoryFault, match="the stack of lane 30 has 16384 bytes"):
        run("", STACK.replace("SIZE", str(16384 - 8 * 30 - 56)))


ASSERT = """
.extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
"""
FAIL = """
setp.lt.u32 %p1, %r1, BOUND; @%p1 bra FINE;
{ .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
  ld.param.b64 %rd4, [texts]; add.s64 %rd5, %rd4, 4; add.s64 %rd6, %rd4, 9; st.param.b64 [p0], %rd4;
  st.param.b64 [p1], %rd5; st.param.b32 [p2], 41; st.param.b64 [p3], %rd6; st.param.b64 [p4], 1;
  call.uni __assertfail, (p0, p1, p2, p3, p4); }
FINE: mov.u32 %r9, 3;
"""


def test_failed_assertions_stop_with_their_text():
    texts = copy(np.frombuffer(b"x>0\0a.cu\0f\0", np.uint8))
    params = "u64 out, u64 texts"
    assert (run(ASSERT, FAIL.replace("BOUND", "32"), params, texts) == 3).all()
    with pytest.raises(EmulatorError, match=r"assertion 'x>0' failed at a.cu:41 in f \(lane 30\)") as error:
        run(ASSERT, FAIL.replace("BOUND", "30"), params, texts)
    assert error.value.place.lanes == 0b11 << 30


FACTORIAL = """
.func (.param .b32 r) fact(.param .b32 n) { .reg .b32 %a<4>; .reg .pred %q; ld.param.b32 %a1, [n]; mov.b32 %a2, 1;
setp.lt.u32 %q, %a1, 2; @%q bra DONE; add.u32 %a3, %a1, -1;
{ .param .b32 m; .param .b32 back; st.param.b32 [m], %a3; call (back), fact, (m); ld.param.b32 %a2, [back]; }
mul.lo.u32 %a2, %a2, %a1; DONE: st.param.b32 [r], %a2; ret; }
"""
FIBONACCI = """
.func (.param .b32 r) fib(.param .b32 n) { .reg .b32 %a<6>; .reg .pred %q; ld.param.b32 %a1, [n];
setp.lt.u32 %q, %a1, 2; @%q bra DONE; add.u32 %a2, %a1, -1; add.u32 %a3, %a1, -2;
{ .param .b32 m; .param .b32 back; st.param.b32 [m], %a2; call.uni (back), fib, (m); ld.param.b32 %a4, [back]; }
{ .param .b32 m; .param .b32 back; st.param.b32 [m], %a3; call.uni (back), fib, (m); ld.param.b32 %a5, [back]; }
add.u32 %a1, %a4, %a5; DONE: st.param.b32 [r], %a1; ret; }
"""
APPLY = "{ .param .b32 n; .param .b32 back; st.param.b32 [n], %r2; call (back), NAME, (n); ld.param.b32 %r9, [back]; }"


def test_recursion_of_lanes_to_depths_of_their_own():
    wanted = [math.factorial(lane) % 2**32 for lane in range(32)]
    got = run(FACTORIAL, "mov.b32 %r2, %r1;" + APPLY.replace("NAME", "fact"))
    assert got.astype(np.uint32).tolist() == wanted
    numbers = [0, 1, 1, 2, 3, 5, 8, 13]
    got = run(FIBONACCI, "rem.u32 %r2, %r1, 8;" + APPLY.replace("NAME", "fib"))
    assert got.tolist() == [numbers[lane % 8] for lane in range(32)]


def test_recursion_that_is_too_deep_stops_the_launch_that_makes_it():
    """64 levels of one call, 9 of two; another kernel of the file runs, and so does a launch that stays above."""
    body = APPLY.replace("NAME", "fact")
    assert run(FACTORIAL, "mov.b32 %r2, 64;" + body).tolist() == [0] * 32  # 64! is a multiple of 2^32
    with pytest.raises(EmulatorError, match="recursion is deeper"):
        run(FACTORIAL, "mov.b32 %r2, 65;" + body)
    body = APPLY.replace("NAME", "fib")
    assert run(FIBONACCI, "mov.b32 %r2, 9;" + body).tolist() == [34] * 32
    with pytest.raises(EmulatorError, match="recursion is deeper"):
        run(FIBONACCI, "mov.b32 %r2, 10;" + body)
    recursive = ".func f() { call f; ret; } .entry other() { call f; ret; }"
    module = parse.parse(entry("u64 out", FRAME + "mov.b32 %r9, 8;" + STORE).replace(HEADER, HEADER + recursive))
    gpu = make("sm_100a")
    out = gpu.copy(np.zeros(32, np.int32))
    gpu.launch(LaunchRequest("k", module, (1, 1, 1), (32, 1, 1), params=out.ctypes.data.to_bytes(8, "little")))
    assert out.tolist() == [8] * 32
    with pytest.raises(EmulatorError, match="recursion is deeper"):
        gpu.launch(LaunchRequest("other", module, (1, 1, 1), (32, 1, 1)))


@pytest.mark.parametrize("inner", [" call f; call f;", " call f; call g;", " call g; call g;"])
def test_functions_that_call_each_other_twice_have_few_copies(inner):
    """They share what two calls may make: not 9 levels of one in 9 of the other."""
    twice = ".func g(); .func f() { call g; call g; ret; } .func g() {" + inner + " ret; }"
    module = parse.parse(entry("u64 out", FRAME + "call f;" + STORE).replace(HEADER, HEADER + twice))
    assert 64 < len(module.kernels["k"].instructions) < 4000


@pytest.mark.parametrize(
    ("functions", "body", "error", "text"),
    [
        (".func f() { call f; ret; }", "call f;", EmulatorError, "recursion is deeper"),
        (".func g(); .func f() { call g; } .func g() { call f; }", "call g;", EmulatorError, "recursion is deeper"),
        (STEPS, "{ .param .b32 p; call steps, (p); }", PtxSyntaxError, "1 results and arguments, it has 2"),
        (STEPS, "{ .param .b32 p; call (p), steps, (%r1); }", PtxSyntaxError, "only variables of the .param space"),
        (".func f(.reg .b32 %a) { ret; }", "{ .param .b32 p; call f, (p); }", PtxSyntaxError, "declaration"),
        ("", "{ .param .b64 p; call vprintf, (p, p); }", UnsupportedInstruction, "vprintf with other operands"),
        (".extern .func cudaFoo();", "call cudaFoo;", UnsupportedInstruction, "call of cudaFoo: its code is not in"),
        ("", "mov.b64 %rd4, 16; call %rd4, ();", EmulatorError, "call of 0x10: no function with such parameters"),
    ],
)
def test_what_is_refused(functions, body, error, text):
    with pytest.raises(error, match=text):
        run(functions, body)
