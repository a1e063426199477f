//# SPDX-License-Identifier: Apache-2.0
//% include "tunekit/isa/vpdpbusd.h"

/*
 * isa/amx_int8.h: matrix tiles. A tile product takes 16 tokens by 32 codes and 32 codes by 16 rows to
 * 16 by 16 exact sums, so one product is one block. The plane of 16 rows with k-groups of 4 is the
 * second operand as it stands: eight k-groups, each 64 bytes. GEMV and MXFP4, one token each, are
 * vpdpbusd's. The tile itself is q8q8/amx_tile.c.j2.
 */
