"""Numbers, names and bytes of the formats of a KV cache."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry, turbo4
from dsv4lib.formats.kv_dtype import KVDtype, latent_bytes, token_bytes, vector_bytes


def test_numbers_and_names():
    """0 to 3 are those that serving engines have."""
    names = ["auto", "fp8_e4m3", "fp8_e5m2", "turbo4", "nvfp4", "fp8_dsv4"]
    assert [KVDtype.of(name) for name in names] == list(range(6))
    with pytest.raises(ArgumentError, match="turbo4") as caught:
        KVDtype.of("turbo3")
    assert caught.value.name == "kv_cache_dtype"


def test_bytes():
    wanted = {"auto": 256, "fp8_e4m3": 128, "fp8_e5m2": 128, "turbo4": 66, "nvfp4": 72}
    assert {name: vector_bytes(KVDtype.of(name), 128) for name in wanted} == wanted
    assert vector_bytes(KVDtype.FP8_DSV4, 512) == 584
    fp8, four = (token_bytes(kind, 128, 1) for kind in (KVDtype.FP8_E4M3, KVDtype.TURBO4))
    assert (fp8, four) == (256, 132) and 1 - four / fp8 == pytest.approx(0.484, abs=5e-4)
    assert token_bytes(KVDtype.TURBO4, 128, 8) == 8 * 132
    assert list(latent_bytes().values()) == [1024, 584, 384, 354, 258]


def test_bytes_are_those_of_the_codecs():
    kv = torch.zeros(1, 512)
    assert turbo4.to_records(turbo4.encode(kv)).shape[1] == vector_bytes(KVDtype.TURBO4, 512)
    assert sum(x.shape[1] for x in kv_entry.encode(kv)) == vector_bytes(KVDtype.FP8_DSV4, 512)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dim", lambda: vector_bytes(KVDtype.TURBO4, 96)),
        ("dim", lambda: vector_bytes(KVDtype.FP8_DSV4, 128)),
        ("dim", lambda: vector_bytes(KVDtype.NVFP4, 24)),
        ("dim", lambda: vector_bytes(KVDtype.AUTO, 0)),
        ("heads", lambda: token_bytes(KVDtype.AUTO, 128, 0)),
    ],
)
def test_what_is_not_allowed(name, call):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == name
