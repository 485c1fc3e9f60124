"""Faults around the attention op are found by what the notebook names, and only where they are made."""

import dataclasses

import pytest

from dsv4lib.ops.fmha.inputs import case
from dsv4lib.pages.fmha.op_faults import FAULTS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FAULTS)
def test_found_where_it_is_and_nowhere_else(name):
    one = case(64, [150, 20], [30, 0])
    late = dataclasses.replace(one, index=one.index.clone())
    late.index[0, :64] = -1  # the first tile has no keys, so the first part is empty
    find, kind = FAULTS[name]
    assert kind in {found[0] for found in find(late)}
    assert find(late, inject=False) == []
