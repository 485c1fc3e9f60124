"""The emulator's speed floors that need no other package, with room for a busy machine."""

from dsv4lib.bench import emulator
from dsv4lib.bench.emulator import Row


def test_computing_code_reaches_its_floor():
    row = emulator.alu()
    assert row.reached, row


def test_preparation_reaches_its_floor(tmp_path):
    cold, warm = emulator.preparation(emulator._ALU, str(tmp_path))
    assert cold.floor is None and warm.reached, warm


def test_a_missed_floor_is_seen():
    assert Row("x", 2.0, "s", 1.0).reached is False
    assert Row("x", 2.0, "1/s", 3.0, True).reached is False
    assert Row("x", 2.0, "s").reached is None
