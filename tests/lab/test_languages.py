"""What the page on norms says of one kernel in two languages."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.pages.router_mhc import languages
from dsv4lib.viz import ptx

PTX = """.version 9.0
.target sm_90a
.visible .entry k()
{
	ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
	ld.global.v2.b64 {%rd2, %rd3}, [%rd1];
	{ cvt.f32.bf16 %f1, %rs1;}
	st.global.u16 [%rd1], %rs1;
	ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%r1];
	ret;
}
"""


@pytest.fixture(scope="module")
def compared():
    return languages.run(384, 3, 0)


def test_both_languages_agree_and_a_fault_is_seen(compared):
    assert (compared.differ, compared.hazards) == (0, 0)
    assert languages.run(384, 3, 0, "cpp_warps_forgotten").differ > 0


def test_without_nvrtc_the_page_says_why(monkeypatch):
    monkeypatch.setenv("DSV4_NVRTC", "/nowhere/libnvrtc.so")
    monkeypatch.setattr(languages, "run", lambda *given: pytest.fail("it was called"))
    found, why = languages.attempt(384, 3, 0)
    assert found is None and "NVRTC" in why and "pip install" in why


def test_the_table_holds_what_the_page_says_of_it(compared):
    found = {name: (dsl, cpp) for name, dsl, cpp in languages.rows(compared)}
    assert (
        found["global accesses of 16 bytes"][0] == found["global accesses of 16 bytes"][1] == found["global memory"][0]
    )
    assert found["of these, ahead of griddepcontrol.wait"] == (2, 0)
    dsl, cpp = (one.ptx for one in compared.code.values())
    assert ptx.count(dsl, "fma.rn.f32.bf16") > 0 == ptx.count(cpp, "fma.rn.f32.bf16")
    assert ptx.count(dsl, "mul.f32x2") > 0 == ptx.count(cpp, "mul.f32x2")
    assert ptx.count(cpp, "cvt.f32.bf16") > ptx.count(dsl, "cvt.f32.bf16")
    total = sum(cpp for name, (_, cpp) in found.items() if name in {f.name for f in ptx.FAMILIES})
    assert total == found["instructions"][1]


def test_the_other_kernels_are_what_the_page_says_of_them():
    found = {name.partition(",")[0]: numbers for name, *numbers in languages.others()}
    assert set(found) == {"topk", "router", "compressor", "a tile of scores"}
    assert all(0 < number < 5000 for numbers in found.values() for number in numbers)
    assert found["compressor"][2] > 2 * found["compressor"][3]  # registers: all rows at once, or one after the other
    assert found["router"][1] > found["router"][0]


def test_widths_of_global_accesses():
    assert ptx.global_widths(PTX) == {16: 2, 2: 1}


def test_a_passage_begins_where_it_should_and_is_shown_beside_another(monkeypatch):
    assert ptx.passage(PTX, r"cvt\.", 2) == ["cvt.f32.bf16 %f1, %rs1;", "st.global.u16 [%rd1], %rs1;"]
    with pytest.raises(ArgumentError, match="pattern"):
        ptx.passage(PTX, "wgmma", 2)
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    ptx.show_beside({"a": ["one", "<two>"], "b": ["three"]})
    assert shown[0]["text/plain"].splitlines() == ["a       b", "one     three", "<two>"]
    assert "&lt;two&gt;" in shown[0]["text/html"] and "<two>" not in shown[0]["text/html"]
