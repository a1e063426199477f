// SPDX-License-Identifier: Apache-2.0
#include "shape.h"

static int64_t clamp(int64_t n, int64_t low, int64_t high)
{
    return n > high ? (high > low ? high : low) : n < low ? low : n;
}

int32_t tk_lanes(int64_t work, int64_t target, int32_t live, int32_t cap)
{
    const int64_t most = cap > 0 && cap < live ? cap : live;
    return (int32_t)clamp(target > 0 ? work / target : most, 1, most);
}

int32_t tk_chunks(int64_t units, int64_t grain, int32_t lanes, int32_t oversplit, int fill)
{
    if (units <= 0)
        return 0;
    if (lanes <= 1)
        return 1;
    const int64_t want = clamp((int64_t)lanes * (oversplit > 1 ? oversplit : 1), 1, units);
    int64_t n = clamp(grain > 0 ? units / grain : want, 1, want);
    if (n >= lanes)
        n -= n % lanes;
    else if (fill && units >= lanes && units * 2 / lanes >= grain)
        n = lanes;
    return (int32_t)clamp(n, 1, INT32_MAX);
}

static int64_t gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

tk_grid tk_cells(
    int32_t chunks, int64_t tokens, int64_t tiles, int32_t lanes, int32_t oversplit, int mode, int64_t most)
{
    tk_grid grid = {chunks, 1};
    if (mode <= 0 || chunks < 1 || chunks >= lanes || tiles < 2)
        return grid;
    const int64_t room = clamp(most / chunks, 1, clamp(tiles, 1, INT32_MAX / chunks));
    if (mode == 1) {
        grid.tokens = (int32_t)clamp((tokens + 15) / 16, 1, room);
        return grid;
    }
    /* Any multiple of `step` token cells makes whole waves: the fewest of them that give each lane its share. */
    const int64_t step = lanes / gcd(chunks, lanes);
    const int64_t share = (int64_t)lanes * (oversplit > 1 ? oversplit : 1);
    const int64_t need = (share + chunks - 1) / chunks;
    const int64_t cells = clamp((need + step - 1) / step * step, 1, room);
    /* Where there is no room for a whole wave: a part of one, in which no lane gets two. */
    grid.tokens = (int32_t)(cells >= step ? cells / step * step : clamp(lanes / chunks, 1, room));
    return grid;
}

int64_t tk_part(int64_t total, int64_t parts, int64_t i)
{
    if (parts <= 0)
        return 0;
    const int64_t larger = total % parts;
    return total / parts * i + (i < larger ? i : larger);
}

int64_t tk_times(int64_t a, int64_t b)
{
    return a < 0 || b < 0 || (b > 0 && a > INT64_MAX / b) ? -1 : a * b;
}

int64_t tk_token_block(int64_t block, int64_t budget, int64_t each)
{
    return clamp(budget / (each > 0 ? each : 1), 1, block > 1 ? block : 1);
}

int32_t tk_admitted(int32_t workers, int32_t lanes, int32_t widest, int gate)
{
    int64_t most = workers;
    if (gate) {
        most = most < lanes - 1 ? most : lanes - 1;
        most = most < widest - 1 ? most : widest - 1;
    }
    return (int32_t)(most > 0 ? most : 0);
}
