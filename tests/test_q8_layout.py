# SPDX-License-Identifier: Apache-2.0
"""The layout schema: index by index, and there and back."""

from __future__ import annotations

import numpy as np
import pytest

import tunekit as tk
from tunekit.q8 import grid
from tunekit.q8.layout import REFERENCE, Layout, layout_of, pack_plane, unpack_plane

LAYOUTS = sorted(
    {layout_of(row) for row in grid.ROWS}
    | {REFERENCE, Layout(4, 4), Layout(4, 8), Layout(8, 8), Layout(16, 4, 128), Layout(32, 4), Layout(5, 1)},
    key=lambda layout: (layout.mr, layout.kgroup, layout.bias, layout.id),
)
SHAPES = [(0, 64), (5, 0), (0, 0), (1, 32), (16, 64), (37, 96), (48, 160), (7, 32)]


def weights(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([n, k])
    codes = rng.integers(-128, 128, (n, k), dtype=np.int8)
    return codes, rng.standard_normal((n, k // 32), dtype=np.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plane_is_the_schema(layout: Layout, n: int, k: int) -> None:
    codes, scales = weights(n, k)
    w, ws = pack_plane(codes, scales, layout)
    nb, padded = k // 32, layout.padded(n)
    assert w.shape == (padded * k,) and ws.shape == (padded * nb,)
    assert not w.size or (w.ctypes.data % 64 == 0 and ws.ctypes.data % 64 == 0)
    stored = w.view(np.uint8) ^ layout.bias
    seen = np.zeros(w.shape, bool)
    for row in range(padded):
        group, r = divmod(row, layout.mr)
        for column in range(k):
            block, inside = divmod(column, 32)
            kg, j = divmod(inside, layout.kgroup)
            at = group * layout.mr * k + block * layout.mr * 32 + kg * layout.kgroup * layout.mr
            at += r * layout.kgroup + j
            seen[at] = True
            want = codes[row, column].view(np.uint8) if row < n else 0
            assert stored[at] == want
        for block in range(nb):
            got = ws[group * layout.mr * nb + block * layout.mr + r]
            assert got == (scales[row, block] if row < n else 0)
    assert seen.all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_there_and_back(layout: Layout, n: int, k: int) -> None:
    codes, scales = weights(n, k)
    back, back_scales = unpack_plane(*pack_plane(codes, scales, layout), n, k, layout)
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_array_equal(back_scales, scales)
    assert back.flags.c_contiguous and back_scales.flags.c_contiguous


def test_source_may_be_strided_and_is_left_alone() -> None:
    codes, scales = weights(20, 128)
    wide = np.repeat(codes, 2, axis=0)
    w, ws = pack_plane(wide[::2], np.asfortranarray(scales), Layout(8, 4, 128))
    plain = pack_plane(codes, scales, Layout(8, 4, 128))
    np.testing.assert_array_equal(w, plain[0])
    np.testing.assert_array_equal(ws, plain[1])
    np.testing.assert_array_equal(codes, weights(20, 128)[0])


def test_nan_scales_survive() -> None:
    codes, scales = weights(5, 64)
    scales[3, 1], scales[0, 0] = np.nan, -0.0
    back = unpack_plane(*pack_plane(codes, scales, Layout(8, 4)), 5, 64, Layout(8, 4))[1]
    np.testing.assert_array_equal(back.view(np.uint32), scales.view(np.uint32))


def test_wrong_arrays_are_refused() -> None:
    codes, scales = weights(8, 64)
    with pytest.raises(ValueError, match="multiple of 32"):
        pack_plane(codes[:, :40], scales, Layout(8, 4))
    with pytest.raises(ValueError, match="scales"):
        pack_plane(codes, scales[:, :1], Layout(8, 4))
    w, ws = pack_plane(codes, scales, Layout(8, 4))
    with pytest.raises(ValueError, match="planes"):
        unpack_plane(w, ws, 9, 64, Layout(8, 4))
    with pytest.raises(ValueError, match="no such layout"):
        Layout(8, 3)


def test_names() -> None:
    assert REFERENCE.plane == "mr1_kgroup4"
    assert Layout(16, 2, codes="int16").id == "mr16_kgroup2+int16"
    assert Layout(16, 2, codes="int16", pairs=True).id == "mr16_kgroup2+int16_pairs"
    assert Layout(8, 4, 128, sums=True).id == "mr8_kgroup4_bias128+int8_sums"
    assert Layout(16, 4).plane != Layout(16, 2).plane
    assert str(REFERENCE) == REFERENCE.id


def test_layout_follows_the_row_and_only_what_matters() -> None:
    assert layout_of(None) is REFERENCE
    row = tk.perm(dot="madd16", width=256, mr=16, kstep=1, nr=5)
    assert layout_of(row) == Layout(16, 2, codes="int16", pairs=True)
    assert layout_of(tk.perm(dot="madd16", width=256, mr=16, kstep=4, nr=3, gkstep=2)) == layout_of(row)
    assert layout_of(tk.perm(dot="vpdpbusd", width=256, mr=8, kstep=2, bias=128)) == Layout(8, 4, 128, sums=True)
    assert layout_of(tk.perm(dot="smmla", mr=4, kstep=2)).kgroup == 8
    with pytest.raises(ValueError, match="no leg"):
        layout_of(tk.perm(dot="vpdptitanic", width=256))
