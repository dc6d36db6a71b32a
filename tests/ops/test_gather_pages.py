"""Pages to staging and back: every bit, in any order, and nothing beside them."""

import pytest
import torch

from nightmill_kernels.gather_pages import gather_pages, scatter_pages

PLANES, NUM_PAGES, PAGE = 6, 11, (2, 4, 8)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def pool(request: pytest.FixtureRequest) -> torch.Tensor:
    """Random bits, so NaNs of every payload too: a copy must not look at what it copies."""
    torch.manual_seed(0)
    shape = (PLANES, NUM_PAGES, *PAGE)
    size = torch.empty(shape, dtype=request.param).nbytes
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(request.param).view(shape)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def staging(pool: torch.Tensor, count: int) -> torch.Tensor:
    return torch.full((count, PLANES, *PAGE), float("nan"), dtype=pool.dtype)


@pytest.mark.parametrize("pages", [[], [0], [10], [3, 1, 2], [10, 0, 9, 4], list(range(NUM_PAGES))])
def test_gather_takes_each_page_with_all_its_planes(pool, pages):
    out = staging(pool, len(pages))
    assert gather_pages(pool, torch.tensor(pages, dtype=torch.int64), out) is out
    for i, page in enumerate(pages):
        for plane in range(PLANES):
            assert torch.equal(bits(out[i, plane]), bits(pool[plane, page]))


@pytest.mark.parametrize("pages", [[], [0], [3, 1, 2], [10, 0, 9, 4]])
def test_scatter_puts_pages_elsewhere_and_touches_no_other(pool, pages):
    before, count = pool.clone(), len(pages)
    staged = gather_pages(pool, torch.arange(NUM_PAGES - count, NUM_PAGES), staging(pool, count))
    scatter_pages(staged, torch.tensor(pages, dtype=torch.int64), pool)
    for i, page in enumerate(pages):
        assert torch.equal(bits(pool[:, page]), bits(before[:, NUM_PAGES - count + i]))
    others = [page for page in range(NUM_PAGES) if page not in pages]
    assert torch.equal(bits(pool[:, others]), bits(before[:, others]))


def test_staging_may_be_a_part_of_a_larger_buffer(pool):
    buffer = staging(pool, 5)
    gather_pages(pool, torch.tensor([7, 8]), buffer[2:4])
    assert torch.equal(bits(buffer[3]), bits(pool[:, 8]))
    assert buffer[:2].isnan().all()
    assert buffer[4:].isnan().all()


@pytest.mark.parametrize(
    ("pages", "shape", "message"),
    [
        (torch.tensor([1, 2]), (3, PLANES, *PAGE), "staging"),
        (torch.tensor([1]), (1, PLANES + 1, *PAGE), "staging"),
        (torch.tensor([1], dtype=torch.int32), (1, PLANES, *PAGE), "int64"),
    ],
)
def test_what_does_not_fit_is_refused(pool, pages, shape, message):
    out = torch.empty(shape, dtype=pool.dtype)
    with pytest.raises(ValueError, match=message):
        gather_pages(pool, pages, out)
    with pytest.raises(ValueError, match=message):
        scatter_pages(out, pages, pool)


def test_dtype_and_layout_of_staging_are_checked(pool):
    pages = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="dtype"):
        gather_pages(pool, pages, torch.empty(2, PLANES, *PAGE, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        gather_pages(pool, pages, torch.empty(PLANES, 2, *PAGE, dtype=pool.dtype).transpose(0, 1))
