"""Memory for weights: apart from one another, kept as long as it is used and no longer."""

import gc
import weakref

import torch

from nightmill_kernels.cpu import huge_pages
from nightmill_kernels.cpu.huge_pages import packed_memory, zeroed_on_touch


def test_pieces_do_not_overlap_and_are_aligned_and_zero() -> None:
    sizes = [1, 255, 256, 257, 0, 5 << 20, 31 << 20, 40 << 20, 3]
    pieces = [packed_memory(size) for size in sizes]
    for i, piece in enumerate(pieces):
        assert piece.dtype == torch.uint8
        assert piece.shape == (sizes[i],)
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(i + 1)
    for i, piece in enumerate(pieces):
        assert bool((piece == i + 1).all())


def test_neighbours_share_a_block_which_outlives_the_first_of_them_and_not_the_last() -> None:
    blocks = huge_pages._Blocks()
    first, second = blocks.take(1000), blocks.take(1000)
    assert second.data_ptr() - first.data_ptr() == 1024
    second.fill_(7)
    assert blocks._block is not None
    block: weakref.ref[object] = blocks._block  # type: ignore[assignment]
    del first
    gc.collect()
    assert block() is not None
    assert bool((second == 7).all())
    del second
    gc.collect()
    assert block() is None
    assert not blocks.take(10).any()


def test_zeros_have_the_shape_and_dtype_asked_for() -> None:
    zeros = zeroed_on_touch((3, 5), torch.bfloat16)
    assert (zeros.shape, zeros.dtype) == ((3, 5), torch.bfloat16)
    assert not zeros.any()
