# SPDX-License-Identifier: Apache-2.0
"""Writes rows.md, the page of every row, from the grid itself: ``python docs/rows.py``. CI holds the page to it."""

from __future__ import annotations

from pathlib import Path

from tunekit.cpu.features import implied
from tunekit.measure.fixtures import Unit
from tunekit.q8 import emission, grid, kernels, legality
from tunekit.q8.layout import layout_of
from tunekit.rows import Row

KERNEL = kernels.q8q8.kernel
ARCHES = ("x86_64", "aarch64")

INTRODUCTION = """\
<!-- Written by docs/rows.py from the grid; do not edit. -->
# Every row of q8q8

One table a leg, in order of the legs. All rows give the same bits as the oracle: exact int32 sums in each block of 32,
then `f = fma(float(sum), ws * xs, f)`, blocks ascending. So "exact" is not repeated below; what differs is what a leg
asks of its operands.

- **layout**: rows in a group (`mr`), neighbouring k of a row side by side (`kgroup`), `bias128` where bytes are stored
  as `w ^ 0x80`, and after the `+` the form of the prepared activations.
- **tile**: tokens that one call covers at most, and blocks per iteration; **gemv**: blocks per iteration.
- **products**: how often the leg's multiply stands in the widest tile function, in the GEMV, and in the MXFP4 GEMV.
  `python -m tunekit verify --emission` compiles every row with every compiler that is there and counts: products,
  signs, folds and conversions are exact, and what must not be there is 0.
- **gates**: how many counts one object of the row must meet.

How a row is executed in the proofs follows from what it is compiled for:
"""

EXECUTED = (
    # What the features must hold, and how such an object is run.
    (
        {"amx-tile"},
        "natively where the CPU has AMX; elsewhere tile and configuration by trap and emulate, and the 512-bit GEMV "
        "and MXFP4 companions, where the CPU has no AVX512-VNNI, by Bochs (`bochscpu-python`) in the same process",
    ),
    (
        {"avx512f"},
        "natively where the CPU has it, elsewhere by Bochs (`bochscpu-python`), in place in the memory of the process "
        "that tests it; with `EMULATE_ALL=1` in the environment everywhere",
    ),
    ({"avx512vl"}, "as with `avx512f`"),
    ({"avxvnniint8"}, "natively where the CPU has it, elsewhere by trap and emulate"),
    ({"avxvnni"}, "natively where the CPU has it, elsewhere by trap and emulate"),
    ({"avx2"}, "natively"),
    ({"i8mm"}, "natively on AArch64, elsewhere under qemu-aarch64 (`-cpu max`), inside a whole CPython"),
    ({"dotprod"}, "natively on AArch64, elsewhere under qemu-aarch64 (`-cpu max`), inside a whole CPython"),
)

BESIDE = """
## The quantiser's share

`python benchmarks/overhead.py --quantiser` times quantising alone and the whole product from float32, in every row
that runs here: 16 tokens by 2048 x 2048, one lane. Here it takes 7.5 to 9.1 us of 1000 to 1400, 0.5 to 0.9 % in every
row of AVX2, and 78 of 14 850 us in the reference (0.5 %). It is vectors in every row of the grid, and its four
divisions a block are most of its 24 cycles; wider rows have the same, of 256 bits, since a division of 512 takes
twice as long. Where a product is faster, its share grows: at 250 GMAC/s a core, which no box here reaches, it would
be 3 % (a prediction).

## Packing

`python benchmarks/packing.py` measures it beside a plain copy of as many bytes, in turns. Codes are laid out by
`tunekit._core` (`csrc/pack.c`: a transposition of words by SSE2, word by word elsewhere), on the lanes of the team,
in one pass; Q8_0 bytes are taken apart there too, and their codes meet no float. 8192 x 2048, two lanes, best of many
in one run on Zen 3: a copy into fresh memory 2.6 ms, `mr16_kgroup2` 2.4 (NumPy's transposition: 9.4). Into memory that
was touched before: 1.0 to 1.2 times a copy in every layout, on one lane 0.85 to 1.3. `from_q8_0` parts codes and
float16 scales and converts neither: on Zen 4 0.8 times a copy of the blocks by two lanes, 1.2 by one. Without a core
NumPy does the same, and tests hold the two together.

## Small translation units

To read `<immintrin.h>` takes 0.4 s of CPU, which is half of what a row of AVX2 takes in all. Rows compiled for AVX2,
FMA and AVX-VNNI alone include its parts (`templates/isa/intrinsics.h`): an object takes 0.5 to 0.7 s instead of 1.0
to 1.5, with gcc 11 and 12 and with clang 13, 19 and 22, and its code is the same to the byte. The parts refuse to be
included alone unless the umbrella's guard is defined, `_IMMINTRIN_H_INCLUDED` in gcc and `__IMMINTRIN_H` in clang.
Where they do not compile so, the build tries the unit again with the whole; a test watches that no row here needs it.
A cold grid (64 objects, gcc 12, in turns on a busy box): 79 and 84 s of CPU against 94 and 103; the install's nine
rows, most of which are wider than AVX2: no difference beyond the noise (9.5 and 10.2 s against 9.1 and 10.8).

Rows of AVX-512 and matrix tiles keep the umbrella: its AVX-512 parts are 40 000 of 63 000 lines even when the rest is
left out (0.75 against 0.95 s), and what each needs of the others changes between releases (in gcc 12
`avx512bwintrin.h` takes types from `avx512vlintrin.h`, and the 256-bit VNNI is in a file of another name than
clang's)."""

PREDICTED = """
## Predicted for CPUs that are not here

Multiply-accumulates a cycle of a row's widest tile / its GEMV of most streams / its MXFP4 tile, where it looks nibbles
up / its MXFP4 GEMV, as LLVM 19's llvm-mca predicts them of what gcc 12 makes (`python benchmarks/predict.py`). No
measurements: every load hits the first cache, and where a CPU was here the model was off: 17 for the int16 tile on Zen 3
and 22 for VNNI's of 512 bits on Zen 4, where 22 and 47 were measured. It ranks loops on one core.

| row | compiled for | znver3 | znver4 | sapphirerapids | neoverse-v2 | apple-m1 |
|---|---|---|---|---|---|---|
| `dot_maddubs_width256_mr8_kstep2` | avx2,fma,f16c | 22 / 18.9 / 26 / 15.7 | 22 / 18.9 / 24.3 / 14.2 | 17.3 / 14.4 / 27.1 / 15.7 |  |  |
| `dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0` | avx2,fma,f16c | 17.2 / 9 / 28.7 / 17.9 | 17.2 / 9 / 29.2 / 15.9 | 18.1 / 15.2 / 27.4 / 16.4 |  |  |
| `dot_vpdpbusd_width256_mr8_kstep2_gkstep2_bias128` | avx2,fma,f16c,avxvnni |  |  | 46.1 / 32.4 / 37.8 / 19 |  |  |
| `dot_vpdpbusd_width256_mr8_kstep2_gkstep2_bias128` | avx2,fma,f16c,avx512vnni,avx512vl |  | 13.5 / 14.9 / 13.4 / 9.9 | 46.1 / 32.4 / 37.5 / 18.9 |  |  |
| `dot_vpdpbusd_width512_mr16_kstep2_gkstep2_bias128` | avx512f,avx512bw,avx512vnni |  | 20.9 / 19.6 / 20.2 / 15.8 | 46.4 / 45.8 / 39.2 / 25.1 |  |  |
| `dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128` | avx2,fma,f16c,avxvnni |  |  | 46.3 / 45.8 / 39.1 / 20.2 |  |  |
| `dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128` | avx2,fma,f16c,avx512vnni,avx512vl |  | 12.7 / 15 / 13.5 / 10.2 | 46.4 / 45.8 / 40.3 / 20.2 |  |  |
| `dot_vpdpbusd_width512_mr32_kstep1_nr4_gstreams2_gahead0_bias128` | avx512f,avx512bw,avx512vnni |  | 21.8 / 24.9 / 22 / 17.1 | 46.5 / 46.3 / 37.9 / 25.9 |  |  |
| `kstep2` | dotprod |  |  |  | 38.8 / 30.3 / - / 13.9 | 31.5 / 18.9 / - / 10.7 |
| `mr8_kstep1_nr4` | dotprod |  |  |  | 37.7 / 35.5 / - / 13.9 | 30.6 / 21.8 / - / 10.7 |
| `dot_smmla_mr8_kstep1_nr4` | dotprod,i8mm |  |  |  | 50.2 / 23.4 / - / 12.5 |  |

**SVE** is not written. Where its vectors are 128 bits (Neoverse N2, V2 and later) an `sdot` of it does what NEON's does.
Neoverse V1 has 256, on two pipes where NEON has four: loops in ACLE intrinsics, 256 bits fixed, clang 19, by llvm-mca for
neoverse-v1, multiply-accumulates a cycle: tile of 8 rows by 4 tokens 37.8, 8 by 8 35.6, 16 by 4 38.6, GEMV of 8 and 16
rows 38.4 and 39.0; the NEON rows there: `mr8_kstep1_nr4` 37.7 (gcc 12) and 39.2 (clang 19), GEMV 35.2, `mr16_kstep1_nr3`
38.5 and 38.1, and smmla's tile 50.1. There is nothing to win on any core that runs these models, at the price of a
second set of gates for every vector length."""  # noqa: E501

MEASURED = """
## Measured, and what came of it

One core of a Zen 3 guest with AVX2 and no VNNI, gcc 12 unless said, best of many, interleaved, in one run each; the
measured limit of two multiplies a cycle was 96 to 103 GMAC/s. Kernel: one group, K 512, in L1.

| idea | figures, GMAC/s | outcome |
|---|---|---|
| int16 leg, 16 rows: two products before their two additions | by 5 tokens 67.1 to 69.8 (clang 19: 66.5 to 69.1), by 4 64.1 to 68.3 (64.3 to 67.5), by 6 67.8 to 69.7 | in every row of maddubs and madd16 |
| the same with three products | by 5 tokens 71.6 against 70.8 with two | within the noise; two are one token's |
| the same, carried over k-groups | by 4 tokens 65, by 5 66.5: no gain over none | not taken |
| int16 leg, 8 rows by 8 tokens, two products first | 64.5 to 63.2 | loses 2 %; these rows lose anyway |
| sign trick, 16 rows, two products first | by 4 tokens 62.1 to 62.3 | no gain: vpsignb has the port |
| xor leg, 16 rows, mask computed (timing only) | by 4, 5, 6 tokens 69.9, 71.3, 71.1; int16 by 5: 71.2 | not written: no gain for a plane of corrections |
| xor leg, mask loaded, 2 bytes a weight (timing only) | 76.0, 75.6, 74.4 | 6 % ahead in L1, for twice the memory: not written |
| no sign work at all (timing only, not exact) | 87 to 88 | the bound of that leg |
| fold left to contraction, fold not pinned | 68.5, 68.7 against 68.7 | no gain |
| GEMV, 32 rows a group | L1 57 against 50; from L3 no gain | a row, for `retune` to judge |
| GEMV in four streams of groups, no lines asked for (`python benchmarks/gemv.py`; against one stream, a burst of lines 8 KiB ahead) | of 1, 4, 16, 256 MiB: 36.2 against 32.3, 48.8 against 41.3, 29.2 against 30.7, 16.5 against 11.5; of the best plain reading from DRAM 0.95 against 0.66; SmolLM2-135M's matrices one after the other, with huge pages, 14.6 against 9.6 | first of the AVX2 chain |
| in three streams, lines asked for 1344 bytes ahead, one by one | 34.6, 47.6, 30.9, 15.4; SmolLM2-135M 13.7 to 14.3 | a row, for `retune` to judge |
| in two streams, 1344 ahead; in three, 2112 ahead, none | 35.7, 48.4, 27.1, 14.5; 34.9, 47.4, 31.7, 15.0; 36.5, 49.9, 26.8, 15.8 | not taken |
| in one stream, 1344 ahead | 34.2, 45.2, 22.7, 13.2 | loses a quarter from L3 |
| vpdpbusd of 512 bits by 32 rows on a Zen 4 guest, two streams, none asked for (the same command with `--row`; against one stream, two blocks an iteration) | of 4, 16, 64, 256 MiB: 75.0 against 68.2, 72.8 against 67.7, 36.5 against 13.9, 31.2 against 11.1; of the best plain reading from DRAM 0.93 against 0.33 | first of the AVX512-VNNI chain |
| in one, three, four streams, none asked for; in three, 1344 ahead | 74.7, 75.7, 74.2, 62.4; from DRAM 29.2, 31.0, 30.6, 27.7 | not taken |
| vpdpbusd of 256 bits by 16 rows, there, two streams (against one, two blocks an iteration; four) | 74.4 (65.6; 71.5), from DRAM 31.4 (13.8; 31.6) | first of the AVX-VNNI chain |
| rows that a retune never chose: int16 leg with 8 rows by 6 and 8 tokens, four blocks an iteration, two blocks a step of the GEMV; sign trick with 8 rows by 5 and 8 tokens, four blocks, two blocks a step (`python -m tunekit.retune`, tile against the row then first) | 0.79, 0.84, 0.95, 0.95; 0.94, 0.94, 0.90, 0.96 | pruned; rows like them remain, and the seeds' rows |
| 128 KiB of weights at a time instead of 16 | whole products of 64 tokens: 2048x512 65.3 to 67.8, 2048x2048 60.9 to 62.9, 2048x8192 48.1 to 50.9 (noisy) | taken |

## Measured on Zen 4, with AVX512-VNNI

Two vCPUs of a Zen 4 guest, gcc 12, one lane, all else on the box stopped. Every object of x86-64 passed its gates there,
36 of 55 run by the CPU itself (`python -m tunekit verify --execution`). `python -m tunekit.retune --fresh`, 50 seconds,
GMAC/s; tile is 64 tokens by 2048x512, few 3, streamed is a matrix of 40 MB:

| row | tile | gemv | few | tile, streamed | gemv, streamed | |
|---|---|---|---|---|---|---|
| `dot_vpdpbusd_width512_mr32_kstep1_nr6_gstreams2_gahead0_bias128` | 179.1 | 77.3 | 165.1 | 150.0 | 35.7 | tied |
| `dot_vpdpbusd_width512_mr32_kstep1_nr4_gstreams2_gahead0_bias128` | 178.8 | 76.0 | 166.7 | 151.9 | 36.8 | winner |
| `dot_vpdpbusd_width512_mr16_kstep1_nr8_gstreams2_gahead0_bias128` | 177.0 | 74.1 | 148.2 | 157.4 | 34.2 | tied |
| `dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128` | 175.1 | 69.6 | 141.7 | 154.3 | 35.6 | tied |
| `dot_vpdpbusd_width512_mr16_kstep2_gkstep2_bias128`, the seeds' | 167.7 | 74.4 | 148.4 | 150.1 | 13.5 | slower |
| `dot_maddubs_width512_mr16_kstep1_nr6` | 80.3 | 50.8 | 70.7 | 79.1 | 33.6 | slower |
| `dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0` | 75.4 | 50.3 | 68.8 | 73.5 | 34.3 | slower |

The GEMV that takes two blocks an iteration reads two places of a page by turns, which its prefetcher does not follow.
Pruned with that: four rows of one block fewer tokens or of two blocks in the GEMV, tile 0.93 to 1.00 of these and streamed
GEMV 0.35 to 0.40; and three streams with hints 1344 bytes ahead, 0.83 of two without from L2 and 0.86 from DRAM.

Every tile and GEMV stands twice, for float32 scales of the weights and for float16 ones; a product takes that which its
matrix is held in. GEMV, float16 against float32 in one run (`python benchmarks/gemv.py --row ...`), GMAC/s:

| row | 4 MiB | 16 MiB | 256 MiB | of the best plain reading from DRAM |
|---|---|---|---|---|
| `dot_vpdpbusd_width512_mr32_kstep1_nr4_gstreams2_gahead0_bias128` | 80.3 against 76.8 | 74.5, 69.9 | 32.6, 30.4 | 0.95 |
| `dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128` | 79.3, 75.8 | 73.9, 68.6 | 32.4, 30.4 | 0.94 |
| `dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0` | 50.6, 50.6 | 50.6, 50.8 | 32.1, 29.8 | 0.94 |
| `dot_maddubs_width256_mr8_kstep2` | 48.2, 47.7 | 49.0, 48.3 | 32.3, 29.3 | 0.94 |

Their tiles of most tokens, in the same way: 0.99 to 1.01 in every cache. Widening a row vector of scales is one
instruction for a load (two micro-operations), 2 to 5 % more instructions in a GEMV's loop and 1 % in a tile's.

Ideas for `vpdpbusd` of 512 bits, timing only (the tile alone, K 2048, weights in L2, best of 400 in turns, GMAC/s):

| idea | figures | outcome |
|---|---|---|
| the splat embedded in the multiply, `{1to16}` | 16 rows by 8 tokens 174 against 184, 32 by 4 174 against 188, 32 by 6 187 against 188 | loses: each multiply loads again |
| 48 rows by 4 tokens, a splat for three row vectors | 188, as 32 by 4 | no gain |
| two registers a sum, by turns, where a tile has 6 sums at most (in L1, K 512) | 512 bits, 16 rows by 2, 3, 4 tokens 115, 153, 163 against 123, 147, 163, 32 rows by 2 162 against 162; 256 bits, 16 rows by 2, 3 tokens 125, 153 against 122, 145, 8 rows by 4 113 against 111 | 0.94 to 1.05, as code happens to lie: a block's sums begin anew, so the dots of the next one fill what the latency of this one's leaves; not written |
| k-groups of 8 bytes, half as many splats | not written: twice the use of a splat, 32 rows for 16, is 2 %, and three times no more | at most 2 % for 16 rows, none for 32 |

MXFP4 weights, whole products from float32, best of many in turns with the tree before, GMAC/s:

| row | tokens | expanded before the tile | looked up in it | |
|---|---|---|---|---|
| `dot_madd16_width256_mr16_kstep1_nr5_gstreams4_gahead0` | 1, 4 | 46, 46 | 66, 109 | its GEMV had to bring int16 codes to bytes |
| | 8, 16, 64 | 64, 69, 74 | 109, 109, 111 | taken: 1.5 to 1.7 |
| `dot_vpdpbusd_width512_mr32_kstep1_nr4_gstreams2_gahead0_bias128` | 4, 8, 16, 64 | 89, 132, 146, 166 | 173, 173, 173, 173 | taken: 1.0 to 1.9 |
| `dot_vpdpbusd_width512_mr16_kstep2_gkstep2_bias128` | 4, 8, 16, 64 | 82, 125, 142, 158 | 171, 171, 170, 166 | taken: 1.05 to 2.1 |
| `dot_vpdpbusd_width256_mr16_kstep1_nr6_gstreams2_gahead0_bias128` | 4, 8, 16, 64 | 72, 124, 147, 167 | 141, 141, 147, 152 | taken: 0.9 by 64 tokens, and 1.0 to 2 by fewer |"""  # noqa: E501

CONTRACTS = {
    "maddubs": "`|w|` times `sign(w)*x`: any w; activations in [-127, 127]. A pair sums to at most 32512: no "
    "saturation.",
    "madd16": "int16 by int16: any w and any x. No saturation.",
    "vpdpbusd": "Unbiased: `|w|` times `sign(w)*x`, activations in [-127, 127]. Biased: `w + 128` unsigned, any x; "
    "sums begin at -128 times the block's sum. 32-bit sums: no saturation.",
    "vpdpbssd": "Signed by signed: any w and any x. No saturation.",
    "amx_int8": "Tiles of signed by signed (biased: by unsigned) bytes: any w; the GEMV companions are vpdpbusd's, "
    "with its precondition where unbiased. No saturation.",
    "sdot": "Signed by signed: any w and any x. No saturation.",
    "smmla": "Signed by signed, 2x2 patches: any w and any x; the GEMV is sdot on the same plane. No saturation.",
}


def executed(features: tuple[str, ...]) -> str:
    """How an object that is compiled for these features is run in the proofs."""
    have = implied(features)
    return next(text for needs, text in EXECUTED if needs <= have)


def refusal(row: Row) -> str | None:
    """Why no architecture has the row, or None."""
    reasons = [KERNEL.refuses(row, arch) for arch in ARCHES]
    leg = grid.leg_of(row)
    if None in reasons:
        return None
    return next((r for a, r in zip(ARCHES, reasons, strict=True) if leg is not None and a == leg.arch), reasons[0])


def gates(row: Row, features: tuple[str, ...]) -> int:
    """Counts that one object of the row must meet, apart from those that every object must."""
    symbols = {name: KERNEL.symbol(name, row.suffix) for name, _ in KERNEL.functions}
    return len(emission.expected(Unit(row, emission.leg(row).arch, features, symbols)))


def products(row: Row) -> str:
    """Multiplies in the widest tile function, the GEMV and the MXFP4 GEMV."""
    if emission.leg(row).dot == "amx_int8":
        side = grid.number(row, "nrsplit")
        tile = side * side * (2 if grid.number(row, "pipe") else 1)
    else:
        tile = emission.tile_dots(row, emission.tile_widths(row)[-1])
    return f"{tile} / {emission.gemv_dots(row)} / {emission.mx4_dots(row)}"


def line(row: Row) -> str:
    """The table line of a row that is emitted."""
    layout = layout_of(row)
    cells = [
        f"`{row.suffix}`",
        f"`{layout.id}`",
        f"{grid.tokstep(row)} tokens, {grid.number(row, 'kstep')}",
        str(grid.number(row, "gkstep")),
        f"`{row.requires}`" if row.requires else "",
        products(row),
        str(gates(row, grid.targets(row)[0])),
        "; ".join(
            note
            for note in (
                "in the fallback chain" if row.suffix in KERNEL.fallback else "",
                "over the register budget" if legality.advice(row) else "",
            )
            if note
        ),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    parts += [f"- with `{', '.join(sorted(needs))}`: {text}." for needs, text in EXECUTED]
    for leg in grid.LEGS:
        rows = [row for row in grid.ROWS if grid.leg_of(row) == leg and refusal(row) is None]
        if not rows:
            continue
        compiled = "; or ".join(f"`{','.join(features)}`" for features in leg.needs)
        parts += [
            f"\n## {leg.dot}, {leg.width} bits, {leg.arch}\n",
            f"{CONTRACTS[leg.dot]}\n",
            f"Compiled for {compiled}.\n",
            "| row | layout | tile | gemv | requires | products | gates | |",
            "|---|---|---|---|---|---|---|---|",
            *(line(row) for row in rows),
        ]
    parts += [
        "\n## Rows that decline\n",
        "Kept in the grid to hold the decline rail to its word: such a row behaves as the reference does.\n",
        "| row | reason |",
        "|---|---|",
        *(f"| `{row.suffix}` | {reason} |" for row in grid.ROWS if (reason := refusal(row)) is not None),
        "\n## The reference\n",
        "Portable C at the architecture's baseline, on the plane of one row a group: the matrix row by row. Executed "
        "natively everywhere; its objects must hold no instruction beyond the baseline.",
        BESIDE,
        PREDICTED,
        MEASURED,
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page(), encoding="utf-8")
