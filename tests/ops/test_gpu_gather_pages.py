"""Pages to staging and back in Triton: every bit, as words of two and of four bytes."""

import pytest
import torch

from nightmill_kernels.gather_pages import gather_pages, scatter_pages

pytestmark = pytest.mark.usefixtures("triton_only")

PLANES, NUM_PAGES = 5, 11
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
PAGES = [(2, 4, 8), *(pytest.param(page, marks=pytest.mark.device) for page in [(1, 3, 5), (3, 16, 96)])]
"""Of one piece, of an odd number of elements (no four-byte words in 16 bits), and of more than one piece."""


def bits(x):
    return x.cpu().contiguous().view(torch.uint8)


@pytest.fixture(params=PAGES, ids=str)
def page(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def pool(request, page, device):
    """Random bits, so NaNs of every payload too."""
    torch.manual_seed(0)
    shape = (PLANES, NUM_PAGES, *page)
    size = torch.empty(shape, dtype=request.param).nbytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(request.param).view(shape).to(device)


def staging(pool, count):
    return torch.zeros((count, PLANES, *pool.shape[2:]), dtype=pool.dtype, device=pool.device)


@pytest.mark.parametrize("pages", [[], [10], [10, 0, 9, 4], list(range(NUM_PAGES))])
def test_gather_takes_each_page_with_all_its_planes(pool, pages):
    out = staging(pool, len(pages))
    ids = torch.tensor(pages, dtype=torch.int64, device=pool.device)
    assert gather_pages(pool, ids, out) is out
    assert torch.equal(bits(out), bits(pool.cpu()[:, pages].transpose(0, 1)))


@pytest.mark.parametrize("pages", [[], [3, 1, 2], [10, 0, 9, 4]])
def test_scatter_puts_pages_elsewhere_and_touches_no_other(pool, pages):
    before, count = pool.cpu().clone(), len(pages)
    source = torch.arange(NUM_PAGES - count, NUM_PAGES)
    staged = before[:, source].transpose(0, 1).contiguous().to(pool.device)
    scatter_pages(staged, torch.tensor(pages, dtype=torch.int64, device=pool.device), pool)
    want = before.clone()
    want[:, pages] = before[:, source]
    assert torch.equal(bits(pool), bits(want))


def test_planes_and_pages_may_lie_apart(pool):
    apart = torch.zeros((PLANES, 2 * NUM_PAGES, *pool.shape[2:]), dtype=pool.dtype, device=pool.device)[:, ::2]
    apart.copy_(pool)
    out = gather_pages(apart, torch.tensor([7, 2], device=pool.device), staging(pool, 2))
    assert torch.equal(bits(out), bits(pool.cpu()[:, [7, 2]].transpose(0, 1)))


def test_pages_in_pieces_go_the_plain_way(device):
    pool = torch.randn(PLANES, NUM_PAGES, 8, 4, device=device).transpose(2, 3)
    out = gather_pages(pool, torch.tensor([7], device=device), staging(pool, 1))
    assert torch.equal(out[0], pool[:, 7])
