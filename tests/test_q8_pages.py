# SPDX-License-Identifier: Apache-2.0
"""Memory for weights: apart, aligned, freed with the last plane in it, and shared by matrices that are small."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import numpy as np
import pytest

from tunekit.q8 import pages


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_open", [])


SIZES = [0, 1, 63, 64, pages.SMALL - 1, pages.SMALL, 200_001, 3_000_000, pages.CHUNK // 2, pages.CHUNK // 2 + 1, 20_000_003]


def test_arrays_are_apart_and_aligned() -> None:
    made = [pages.weights(size) for size in SIZES * 2]
    for i, array in enumerate(made):
        assert len(array) == (SIZES * 2)[i] and (not len(array) or array.ctypes.data % 64 == 0)
        array[:] = i
    for i, array in enumerate(made):
        assert (array == i).all()


def test_small_matrices_share_a_mapping_from_a_huge_boundary() -> None:
    if pages._ADVICE is None:
        pytest.skip("this system has no huge pages to ask for")
    first, second = pages.weights(300_001), pages.weights(300_001)
    assert first.ctypes.data % pages.HUGE == 0
    assert second.ctypes.data == first.ctypes.data + -(-300_001 // 64) * 64


def test_a_mapping_goes_with_its_last_plane() -> None:
    first, second = pages.weights(pages.CHUNK // 2), pages.weights(pages.CHUNK // 2)
    base = first.base if isinstance(first.base, np.ndarray) else first
    gone = weakref.ref(base)
    pages.weights(pages.CHUNK // 2)  # the next one is open now
    del first, base
    gc.collect()
    assert gone() is not None and (second.fill(1) is None)
    del second
    gc.collect()
    assert gone() is None


def test_threads_get_memory_of_their_own() -> None:
    made: list[np.ndarray] = []

    def work(number: int) -> None:
        for _ in range(50):
            array = pages.weights(100_000)
            array[:] = number
            made.append(array)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 200 and all((array == array[0]).all() for array in made)


def test_no_room_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        pages.weights(1 << 60)


def test_a_kernel_without_huge_pages_is_none_the_wiser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_ADVICE", 9999)  # EINVAL
    pages.weights(pages.CHUNK)[:] = 1
    monkeypatch.setattr(pages, "_ADVICE", None)
    array = pages.weights(pages.CHUNK)
    assert array.ctypes.data % 64 == 0 and not pages._open


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_shares_nothing_that_is_written() -> None:
    mine = pages.weights(100_000)
    mine[:] = 1
    child = os.fork()
    if child == 0:
        pages.weights(100_000)[:] = 2
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    theirs = pages.weights(100_000)
    theirs[:] = 3
    assert (mine == 1).all()
