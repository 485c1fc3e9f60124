"""Device functions: arguments and results, divergence, nesting; assertions; what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator.errors import EmulatorError, PtxSyntaxError, UnsupportedInstruction
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


@pytest.mark.parametrize(
    ("functions", "body", "error", "text"),
    [
        (".func f() { call f; ret; }", "call f;", PtxSyntaxError, "recursion"),
        (".func g(); .func f() { call g; } .func g() { call f; }", "call g;", PtxSyntaxError, "recursion"),
        (STEPS, "{ .param .b32 p; call steps, (p); }", PtxSyntaxError, "1 results and arguments, it has 2"),
        (STEPS, "{ .param .b32 p; call (p), steps, (%r1); }", PtxSyntaxError, "only variables of the .param space"),
        (".func f(.reg .b32 %a) { ret; }", "{ .param .b32 p; call f, (p); }", PtxSyntaxError, "declaration"),
        ("", "{ .param .b64 p; call vprintf, (p, p); }", UnsupportedInstruction, "vprintf with other operands"),
        (".extern .func malloc();", "call malloc;", UnsupportedInstruction, "call of malloc: its code is not in"),
        (
            "",
            "mov.b64 %rd4, 0; call %rd4, ();",
            UnsupportedInstruction,
            "address is in a register",
        ),
    ],
)
def test_what_is_refused(functions, body, error, text):
    with pytest.raises(error, match=text):
        run(functions, body)
