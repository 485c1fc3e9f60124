"""Integer arithmetic. (draft)"""

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native.irtools import Emitter


@isa.native("add.<type:u16|u32|u64|s16|s32|s64>")
def add(e: Emitter, form: Form) -> None:
    kind = "i" + form.get("type")[1:]
    e.store(0, e.load(1, kind) + e.load(2, kind))
