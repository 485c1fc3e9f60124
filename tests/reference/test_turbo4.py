"""turbo4 in the reference: attention in the rotated space, variants of the codec, pages of a request."""

import pytest
import torch

from dsv4lib.formats import turbo4
from dsv4lib.formats.turbo4 import Encoded
from dsv4lib.reference import turbo4_decode as attention
from dsv4lib.reference.turbo4_encode import turbo4_encode, variant


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("heads", "length", "dim"), [(4, 37, 128), (1, 1, 64), (3, 130, 448)])
def test_rotated_equals_elementwise(heads, length, dim):
    """Rows of different length, K and V with an outlier channel: the same to 1e-6."""
    q, rows = 2 * normals(heads, dim), normals(2, length, dim, seed=1) * normals(2, length, 1, seed=2).exp()
    rows[..., 5] *= 20
    k, v = (turbo4.encode(one, 4) for one in rows)
    found, want = (f(q, k, v, dim**-0.5, 4) for f in (attention.rotated, attention.elementwise))
    assert torch.allclose(found.o, want.o, rtol=1e-6, atol=1e-6) and torch.allclose(found.lse, want.lse, atol=1e-6)
    wrong = attention.rotated(q, k, v, dim**-0.5, 5)
    assert not torch.allclose(wrong.o, want.o, rtol=1e-2, atol=1e-2), "another seed is another rotation"


def test_pages_of_requests():
    """Pages in any order, a shared one, lengths inside a page, 0 and negative: as the same entries in a row."""
    dim, page_size, kv_heads = 64, 16, 2
    rows = normals(2, 5 * page_size, kv_heads, dim, seed=3)
    where = turbo4.layout(dim)
    pools = []
    for one in rows:
        packed, norms = turbo4_encode(one.float(), 1)
        pages = torch.stack(
            [
                turbo4.pages_of_records(turbo4.to_records(Encoded(packed[:, h], norms[:, h])), page_size)
                for h in range(kv_heads)
            ],
            1,
        )
        assert pages.shape == (5, kv_heads, where.page_bytes(page_size))
        pools.append(pages)
    q, lengths = normals(4, 6, dim, seed=4), torch.tensor([33, 0, 16, -1])
    table = torch.tensor([[3, 1, 4], [7, 7, 7], [1, 99, -5], [0, 0, 0]])  # what no length reaches may be anything
    o, lse = attention.turbo4_decode(q, *pools, table, lengths, page_size, 0.2, 1)
    assert not o[[1, 3]].any() and bool((lse[[1, 3]] == -torch.inf).all())
    for b, order in ((0, [3, 1, 4]), (2, [1])):
        at = torch.cat([torch.arange(p * page_size, (p + 1) * page_size) for p in order])[: lengths[b]]
        k, v = (turbo4.encode(one[at].float().transpose(0, 1), 1) for one in rows)
        for h in range(6):
            one = [Encoded(x.packed[h // 3], x.norms[h // 3]) for x in (k, v)]
            want = attention.elementwise(q[b, h, None], *one, 0.2, 1)
            assert torch.allclose(o[b, h], want.o[0], atol=1e-6) and float(lse[b, h] - want.lse[0]) < 1e-6


def test_variants_have_the_errors_that_neighbours_report():
    """4 bits 0.0093, 3 bits 0.0338, 3 bits and QJL 0.0533; outliers without rotation 0.41; a corrected norm helps."""
    x = normals(4096, 128, seed=5)

    def error(given, **options):
        return float((variant(given, **options) - given).square().sum() / given.square().sum())

    four, three, sketch = error(x), error(x, bits=3), error(x, legacy_qjl=True)
    assert (four, three, sketch) == pytest.approx((0.00928, 0.0338, 0.0533), rel=0.02)
    assert error(x, corrected=True) == pytest.approx(0.00915, rel=0.02) and error(x, corrected=True) < four
    assert four == pytest.approx(float((turbo4.fake_quantize(x) - x).square().sum() / x.square().sum()), rel=1e-3)
    x[:, [3, 77]] *= 20
    assert error(x) == pytest.approx(0.0081, rel=0.03) and error(x, rotated=False) == pytest.approx(0.41, rel=0.1)
