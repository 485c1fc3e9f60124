"""`mla_page_table` on a Hopper: the oracle's tables at full sizes, misaligned tokens, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.mla_page_table.op import MisalignedPage, mla_page_table
from dsv4lib.pages.mla.page_table import slots_of, text_example

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]


@pytest.mark.parametrize(("page", "count", "tokens"), [(16, 5, 777), (64, 37, 4099), (128, 3, 131072)])
def test_tables(page, count, tokens):
    lengths = torch.randint(1, tokens + 1, (count,))
    slots = slots_of(lengths.tolist(), page, tokens, seed=1)
    requests = torch.randperm(count).int()
    given = slots, requests, lengths[requests.long()].int()
    want = mla_page_table(*given, page, check=True, backend="reference")
    found = mla_page_table(*(x.cuda() for x in given), page, check=True, backend="native")
    assert torch.equal(found.cpu(), want)


def test_misaligned_tokens_are_named():
    slots, requests, lengths = (x.cuda() for x in text_example())
    with pytest.raises(MisalignedPage) as caught:
        mla_page_table(slots, requests, lengths, 128, check=True, backend="native")
    assert (caught.value.token, caught.value.slot, caught.value.count) == (0, 14, 300)


def test_cuda_graph():
    """Captured once, replayed on other requests and lengths; counts of the check are written inside, too."""
    slots = slots_of([900, 40, 512], 64, 1000, seed=2).cuda()
    requests, lengths = (torch.tensor(x).int().cuda() for x in ([0, 1], [5, 5]))
    out, misaligned = torch.full((2, 16), -1).int().cuda(), torch.zeros(2, 2).int().cuda()
    call = {"out": out, "misaligned": misaligned, "backend": "native"}
    mla_page_table(slots, requests, lengths, 64, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_page_table(slots, requests, lengths, 64, **call)
    for ids, sizes in (([2, 0], [512, 900]), ([-1, 1], [0, 40])):
        requests.copy_(torch.tensor(ids).int())
        lengths.copy_(torch.tensor(sizes).int())
        out.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        want = mla_page_table(slots.cpu(), *(torch.tensor(x).int() for x in (ids, sizes)), 64, backend="reference")
        assert torch.equal(out.cpu(), want) and not misaligned[:, 0].any()
