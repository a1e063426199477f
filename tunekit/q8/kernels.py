# SPDX-License-Identifier: Apache-2.0
"""The declaration of ``q8q8``: the tile of the Q8xQ8 product, and the functions that are stamped with its row.

The bodies are the reference: plain NumPy on the reference layout (one row in a group, so the weight plane is the
matrix row by row) and the reference's prepared activations: one record a token, its K int8 codes and then its nb
float32 scales (nb = K/32), padded to an odd number of 64-byte lines, as the portable C reference has it. Nobody but
a row's own functions looks inside the prepared form.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import tunekit as tk
from tunekit.q8 import grid, layout, legality, oracle
from tunekit.rows import Row

SCOPE = tk.Scope("tunekit")

REFERENCE_TOKSTEP = 4
"""Tokens that one call of the reference tile covers at most."""


def _stride(nb: int) -> int:
    """Bytes of a token's record."""
    return (-(-nb * (grid.BLOCK + 4) // 64) | 1) * 64


def _open(xa: NDArray[Any], tokens: int, nb: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Views of the reference's prepared form: codes (tokens, K), scales (tokens, nb)."""
    k, stride = nb * grid.BLOCK, _stride(nb)
    records = xa.reshape(-1).view(np.uint8)[: tokens * stride].reshape(tokens, stride)
    return records[:, :k].view(np.int8), records[:, k : k + 4 * nb].view(np.float32)


def _context(row: Row | None) -> dict[str, Any]:
    """What the templates ask of the schema, so that they need not repeat it."""
    schema = layout.layout_of(row)
    leg = grid.leg_of(row) if row else None
    return {
        "leg_arch": leg.arch if leg else "",
        "lanes": leg.lanes if leg else 1,
        "inside": grid.inside(row) if row else (),
        "kgroup": schema.kgroup,
        "nibble_kgroup": schema.nibble_kgroup,
        "looks_up": row is not None and grid.looks_up(row),
        "tokstep": REFERENCE_TOKSTEP if row is None else grid.tokstep(row),
        "acts_codes": schema.codes,
        "acts_sums": schema.sums,
        "acts_pairs": schema.pairs,
        **({"mr": schema.mr} if row is None else {}),
    }


@tk.companion
def q8q8_layout() -> tk.i32:
    """Rows of weights in a group: ``mr`` of the row's layout."""
    return layout.REFERENCE.mr


@tk.companion
def q8q8_wbias() -> tk.i32:
    """What is added to the stored weight bytes: 0 or 128."""
    return layout.REFERENCE.bias


@tk.companion
def q8q8_kgroup() -> tk.i32:
    """Neighbouring k of one row that stand together in the weight plane."""
    return layout.REFERENCE.kgroup


@tk.companion
def q8q8_tokstep() -> tk.i32:
    """Tokens that one call of the tile covers at most."""
    return REFERENCE_TOKSTEP


@tk.companion
def q8q8_amx_cfg() -> None:
    """Make this thread ready for the tiles of a traversal: rows with ``latch`` load their configuration.

    Tile instructions need leave of the operating system, once per process; whether it was granted is known before
    such a row can be chosen (:func:`tunekit.cpu.this_cpu` asks for it).
    """


@tk.companion
def q8q8_live() -> tk.i32:
    """1 in every emitted row, 0 in the reference: tells what runs, whatever it computes."""
    return 0


@tk.companion
def q8q8_acts_bytes(tokens: tk.i64, nb: tk.i32) -> tk.i64:
    """Bytes of the prepared form of ``tokens`` tokens of ``nb`` blocks: a multiple of 64."""
    return int(tokens * _stride(nb))


@tk.companion
def q8q8_prepare(
    xa: tk.Out[tk.u8],
    q: tk.In[tk.i8],
    s: tk.In[tk.f32],
    tokens: tk.i64,
    t0: tk.i64,
    t1: tk.i64,
    nb: tk.i32,
) -> None:
    """Bring tokens [t0, t1) of codes ``q`` (tokens, K) and scales ``s`` (tokens, nb) into the row's own form."""
    codes, scales = _open(xa, tokens, nb)
    codes[t0:t1] = q.reshape(-1)[: codes.size].reshape(codes.shape)[t0:t1]
    scales[t0:t1] = s.reshape(-1)[: scales.size].reshape(scales.shape)[t0:t1]


@tk.companion
def q8q8_quantize(
    q: tk.Out[tk.i8], s: tk.Out[tk.f32], x: tk.In[tk.f32], t0: tk.i64, t1: tk.i64, nb: tk.i32
) -> None:
    """Quantise tokens [t0, t1) of ``x`` (tokens, K): :func:`tunekit.q8.oracle.quantize`."""
    k = nb * grid.BLOCK
    codes, scales = oracle.quantize(x.reshape(-1)[t0 * k : t1 * k].reshape(t1 - t0, k))
    q.reshape(-1)[t0 * k : t1 * k] = codes.reshape(-1)
    s.reshape(-1)[t0 * nb : t1 * nb] = scales.reshape(-1)


@tk.companion(seat=True)
def q8q8_gemv(
    y: tk.Out[tk.f32],
    w: tk.In[tk.i8],
    ws: tk.In[tk.f32],
    xa: tk.In[tk.u8],
    tokens: tk.i64,
    t: tk.i64,
    nb: tk.i32,
    ng: tk.i32,
) -> None:
    """One token: ``y[g*mr + r]`` for ``ng`` groups of rows, token ``t`` of the prepared ``tokens``."""
    _tile(y, 0, w, ws, xa, tokens, t, 1, nb, ng)


@tk.companion
def q8q8_f16(
    y: tk.Out[tk.f32],
    ldy: tk.i64,
    w: tk.In[tk.i8],
    ws: tk.In[tk.u16],
    xa: tk.In[tk.u8],
    tokens: tk.i64,
    t0: tk.i64,
    nt: tk.i32,
    nb: tk.i32,
    ng: tk.i32,
) -> None:
    """As :func:`q8q8`, with float16 scales of the weights, given as their bits."""
    _tile(y, ldy, w, _halves(ws), xa, tokens, t0, nt, nb, ng)


@tk.companion(seat="q8q8_gemv")
def q8q8_gemv_f16(
    y: tk.Out[tk.f32],
    w: tk.In[tk.i8],
    ws: tk.In[tk.u16],
    xa: tk.In[tk.u8],
    tokens: tk.i64,
    t: tk.i64,
    nb: tk.i32,
    ng: tk.i32,
) -> None:
    """As :func:`q8q8_gemv`, with float16 scales of the weights, given as their bits."""
    _tile(y, 0, w, _halves(ws), xa, tokens, t, 1, nb, ng)


def _halves(bits: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(all="ignore"):  # a signalling NaN may be converted
        return bits.reshape(-1).view(np.float16).astype(np.float32)


def _weights(
    nib: NDArray[Any], e: NDArray[Any], nb: int, ng: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes and scales of MXFP4 planes in the reference's layout, which keeps rows apart."""
    half = nb * grid.BLOCK // 2
    return oracle.mxfp4(nib.reshape(-1)[: ng * half].reshape(ng, half), e.reshape(-1)[: ng * nb].reshape(ng, nb))


@tk.companion
def q8q8_mx4_gemv(
    y: tk.Out[tk.f32],
    nib: tk.In[tk.u8],
    e: tk.In[tk.u8],
    xa: tk.In[tk.u8],
    tokens: tk.i64,
    t: tk.i64,
    nb: tk.i32,
    ng: tk.i32,
) -> None:
    """As :func:`q8q8_gemv`, from MXFP4 weights: nibble and exponent planes in the row's layout."""
    w, ws = _weights(nib, e, nb, ng)
    _tile(y, 0, w, ws, xa, tokens, t, 1, nb, ng)


@tk.companion
def q8q8_mx4_room(nb: tk.i32) -> tk.i64:
    """Bytes that one group of MXFP4 weights takes expanded; 0 in rows whose tile looks the nibbles up itself."""
    return int(nb * (grid.BLOCK + 4))


@tk.companion
def q8q8_mx4_expand(room: tk.Out[tk.u8], nib: tk.In[tk.u8], e: tk.In[tk.u8], nb: tk.i32, ng: tk.i32) -> None:
    """Before the tiles of ``ng`` groups of MXFP4 weights: fill their ``room``, 64-byte aligned."""
    codes, scales = _weights(nib, e, nb, ng)
    w, ws = _expanded(room, nb, ng)
    w[...], ws[...] = codes, scales


def _expanded(room: NDArray[Any], nb: int, ng: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Views of the reference's expansion: codes (ng, K) and scales (ng, nb)."""
    flat, codes = room.reshape(-1).view(np.uint8), ng * nb * grid.BLOCK
    scales = flat[codes : codes + 4 * ng * nb].view(np.float32)
    return flat[:codes].view(np.int8).reshape(ng, nb * grid.BLOCK), scales.reshape(ng, nb)


@tk.companion
def q8q8_mx4_tile(
    y: tk.Out[tk.f32],
    ldy: tk.i64,
    nib: tk.In[tk.u8],
    e: tk.In[tk.u8],
    room: tk.In[tk.u8],
    xa: tk.In[tk.u8],
    tokens: tk.i64,
    t0: tk.i64,
    nt: tk.i32,
    nb: tk.i32,
    ng: tk.i32,
) -> None:
    """As :func:`q8q8`, from MXFP4 weights: nibble and exponent planes in the row's layout, or their expansion.

    ``room`` is what :func:`q8q8_mx4_expand` made of the same ``ng`` groups; a row whose room is 0 does not look at it.
    """
    _tile(y, ldy, *_expanded(room, nb, ng), xa, tokens, t0, nt, nb, ng)


def _tile(
    y: NDArray[Any],
    ldy: int,
    w: NDArray[Any],
    ws: NDArray[Any],
    xa: NDArray[Any],
    tokens: int,
    t0: int,
    nt: int,
    nb: int,
    ng: int,
) -> None:
    k = nb * grid.BLOCK
    codes, scales = _open(xa, tokens, nb)
    part = oracle.matmul_codes(
        codes[t0 : t0 + nt],
        scales[t0 : t0 + nt],
        w.reshape(-1)[: ng * k].reshape(ng, k),
        ws.reshape(-1)[: ng * nb].reshape(ng, nb),
    )
    flat = y.reshape(-1)
    for t in range(nt):
        flat[t * ldy : t * ldy + ng] = part[t]


@tk.tune(
    scope=SCOPE,
    template="tunekit/q8q8/row.c.j2",
    reference="tunekit/q8q8/reference.c.j2",
    rows=grid.ROWS,
    defaults=grid.DEFAULTS,
    declines=legality.declines,
    targets=grid.targets,
    inside=grid.inside,
    context=_context,
    layout=lambda row: layout.layout_of(row).id,
    fallback=grid.FALLBACK,
    companions=[
        q8q8_gemv,
        q8q8_layout,
        q8q8_wbias,
        q8q8_kgroup,
        q8q8_tokstep,
        q8q8_amx_cfg,
        q8q8_live,
        q8q8_acts_bytes,
        q8q8_prepare,
        q8q8_quantize,
        q8q8_mx4_gemv,
        q8q8_mx4_room,
        q8q8_mx4_expand,
        q8q8_mx4_tile,
        q8q8_f16,
        q8q8_gemv_f16,
    ],
    # The fold's fused multiply-add is written out; nothing else may be fused.
    cflags=("-ffp-contract=off",),
    fixtures="tunekit.q8.fixtures:FIXTURES",
)
def q8q8(
    y: tk.Out[tk.f32],
    ldy: tk.i64,
    w: tk.In[tk.i8],
    ws: tk.In[tk.f32],
    xa: tk.In[tk.u8],
    tokens: tk.i64,
    t0: tk.i64,
    nt: tk.i32,
    nb: tk.i32,
    ng: tk.i32,
) -> None:
    """The tile: ``y[t*ldy + g*mr + r]`` for t in [0, nt) and g in [0, ng).

    Args:
        y: where token ``t0`` begins; written, not added to.
        ldy: floats from one token's outputs to the next.
        w, ws: weight and scale planes of ``ng`` groups of ``mr`` rows, in the row's layout.
        xa: the prepared form of ``tokens`` tokens, 64-byte aligned.
        tokens: how many tokens ``xa`` holds.
        t0, nt: which of them; 1 <= nt <= the row's tokstep.
        nb: blocks of 32 in a row, K/32.
        ng: groups of rows.
    """
    _tile(y, ldy, w, ws, xa, tokens, t0, nt, nb, ng)
