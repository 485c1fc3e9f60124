"""Kernels and launch descriptions for tests of the sanitizer: a block sum with a race, and its twin."""

from __future__ import annotations

from pathlib import Path

HEADER = ".version 8.0\n.target sm_90\n.address_size 64\n"
SOURCE = """__global__ void sum(const float *x, float *out) {
  __shared__ float s[64];  // zeroed by one warp after the other, then a barrier
  s[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = s[threadIdx.x ^ 32] + s[63 - threadIdx.x];
}
"""


def racy(folder: Path, barrier: bool = False) -> str:
    """Make PTX in which threads read what another warp has written, by two loads of one source line."""
    (folder / "sum.cu").write_text(SOURCE)
    return f"""{HEADER}.file 1 "{folder / "sum.cu"}"
.visible .entry _Z3sumPKfPf(.param .u64 _Z3sumPKfPf_param_0, .param .u64 _Z3sumPKfPf_param_1) .reqntid 64
{{
  .reg .b32 %r<12>; .reg .f32 %f<6>; .reg .b64 %rd<8>;
  .shared .align 4 .b8 s[256];
  .loc 1 3 1
  ld.param.u64 %rd1, [_Z3sumPKfPf_param_0]; ld.param.u64 %rd2, [_Z3sumPKfPf_param_1];
  cvta.to.global.u64 %rd3, %rd1; cvta.to.global.u64 %rd4, %rd2;
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd5, %r1, 4; add.s64 %rd6, %rd3, %rd5; add.s64 %rd7, %rd4, %rd5;
  ld.global.f32 %f1, [%rd6]; mov.u32 %r2, s; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;
  mov.f32 %f5, 0f00000000; st.shared.f32 [%r4], %f5; bar.sync 0;
  st.shared.f32 [%r4], %f1;
  {"bar.sync 0;" if barrier else ""}
  .loc 1 4 1
  xor.b32 %r5, %r3, 128; add.s32 %r6, %r2, %r5;
  ld.shared.f32 %f2, [%r6];
  sub.s32 %r7, 252, %r3; add.s32 %r8, %r2, %r7;
  ld.shared.f32 %f3, [%r8];
  add.f32 %f4, %f2, %f3; st.global.f32 [%rd7], %f4;
  ret;
}}
"""


DESCRIPTION = """source = "sum.ptx"
[tensors.x]
shape = [64]
fill = "arange"
[tensors.out]
shape = [64]
fill = "nan"
[[launch]]
kernel = "sum"
grid = 1
block = 64
shared = 0
args = ["x", "out"]
"""


def write(folder: Path, barrier: bool = False, text: str = DESCRIPTION) -> Path:
    """Write PTX and description; returns the path of the PTX."""
    path = folder / "sum.ptx"
    path.write_text(racy(folder, barrier))
    (folder / "sum.toml").write_text(text)
    return path
