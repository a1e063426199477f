// SPDX-License-Identifier: Apache-2.0
/*
 * Trap and emulate: VNNI dot products in VEX encoding and AMX tiles, on a CPU that has neither.
 *
 * The CPU raises #UD, the kernel sends SIGILL, and the handler here performs the instruction on the
 * registers in the signal frame (and on a tile file of its own, one per thread), steps over it and
 * returns. So the very bytes that ship run inside the very process that tests them, and every
 * instruction that retires this way is counted, one by one. What is not in the table below, or breaks a rule that
 * makes the real instruction #UD, goes back to whoever handled SIGILL before: the handler restores him
 * and returns, and the instruction faults once more, this time for real.
 *
 * EVEX forms are not here: they write the upper halves of registers that a CPU without AVX-512 does
 * not have. Linux on x86-64 only.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cpuid.h>

#define API __attribute__((visibility("default")))

/* ---- what there is ------------------------------------------------------------------------------- */

enum mnemonic {
    VPDPBUSD, VPDPBUSDS, VPDPBSSD, VPDPBSSDS, VPDPBSUD, VPDPBSUDS, VPDPBUUD, VPDPBUUDS,
    LDTILECFG, STTILECFG, TILERELEASE, TILEZERO, TILELOADD, TILELOADDT1, TILESTORED,
    TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD,
    MNEMONICS
};

static const char *const names[MNEMONICS] = {
    "vpdpbusd", "vpdpbusds", "vpdpbssd", "vpdpbssds", "vpdpbsud", "vpdpbsuds", "vpdpbuud", "vpdpbuuds",
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored",
    "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud",
};

static _Atomic uint64_t retired[MNEMONICS];

/* ---- tiles: one file a thread --------------------------------------------------------------------- */

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };

typedef struct {
    uint8_t palette; /* 0: not configured */
    uint8_t start_row;
    uint8_t rows[TILES];
    uint16_t colsb[TILES];
    uint8_t data[TILES][ROWS][ROW_BYTES];
} tile_file;

static __thread tile_file tiles;

/* ---- the signal frame ----------------------------------------------------------------------------- */

/* Register numbers of instructions, as places in the frame. */
static const int places[16] = {
    REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
    REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
};

enum { SSE = 1, AVX = 2, ZMM_HIGH = 6 };           /* components of XSAVE */
static uint32_t avx_offset, zmm_offset;             /* where they are in the standard format; 0: nowhere */

typedef struct {
    greg_t *registers;
    uint8_t *xsave;
    uint64_t *present; /* XSTATE_BV, or NULL where the frame has no extended state */
    uint64_t saved;    /* components that the frame has room for */
} frame;

static int open_frame(frame *f, ucontext_t *context)
{
    f->registers = context->uc_mcontext.gregs;
    f->xsave = (uint8_t *)context->uc_mcontext.fpregs;
    if (f->xsave == NULL)
        return 0;
    /* The kernel describes what follows the legacy 512 bytes in their last 48. */
    uint32_t magic;
    memcpy(&magic, f->xsave + 464, sizeof magic);
    if (magic != 0x46505853)
        return 0;
    memcpy(&f->saved, f->xsave + 464 + 8, sizeof f->saved);
    f->present = (uint64_t *)(void *)(f->xsave + 512);
    return avx_offset != 0 && (f->saved >> AVX & 1);
}

/* The part of vector register n that a component holds, brought to life where it was in its initial state. */
static uint8_t *live_part(frame *f, int component, uint32_t offset, uint32_t size, int n)
{
    if (!(*f->present >> component & 1)) {
        memset(f->xsave + offset, 0, 16 * size);
        *f->present |= (uint64_t)1 << component;
    }
    return f->xsave + offset + (uint32_t)n * size;
}

static void read_ymm(frame *f, int n, uint8_t *out)
{
    memset(out, 0, 32);
    if (*f->present >> SSE & 1)
        memcpy(out, f->xsave + 160 + n * 16, 16);
    if (*f->present >> AVX & 1)
        memcpy(out + 16, f->xsave + avx_offset + n * 16, 16);
}

/* A VEX write of 16 or 32 bytes: everything above them in the register becomes zero. */
static void write_vector(frame *f, int n, const uint8_t *value, int bytes)
{
    memcpy(live_part(f, SSE, 160, 16, n), value, 16);
    uint8_t *high = live_part(f, AVX, avx_offset, 16, n);
    if (bytes == 32)
        memcpy(high, value + 16, 16);
    else
        memset(high, 0, 16);
    if (zmm_offset != 0 && (f->saved >> ZMM_HIGH & 1) && (*f->present >> ZMM_HIGH & 1))
        memset(f->xsave + zmm_offset + n * 32, 0, 32);
}

/* ---- decoding ------------------------------------------------------------------------------------- */

typedef struct {
    int address32;      /* prefix 67 */
    uint64_t segment;   /* base of fs or gs where overridden */
    int reg_high, index_high, base_high; /* VEX.R, X, B, not inverted: 0 or 8 */
    int wide, length, prefix, vvvv, map;
    uint8_t opcode;
    int mod, reg, rm;   /* without their high bits */
    int has_sib, scale, index, base;
    uint64_t address;   /* of the memory operand; of a tile operand: without the index */
    uint64_t stride;    /* of a tile operand: the scaled index */
    const uint8_t *end;
} instruction;

static int32_t dword(const uint8_t *p)
{
    int32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

enum { ARCH_GET_FS_ = 0x1003, ARCH_GET_GS_ = 0x1004 };

/*
 * A VEX instruction at p. The two-byte form is no case: it reaches map 0F alone, and everything here
 * is in 0F38. Returns 0 where it is something else.
 */
static int decode(const uint8_t *p, const greg_t *registers, instruction *i)
{
    memset(i, 0, sizeof *i);
    for (;; p++) {
        if (*p == 0x67)
            i->address32 = 1;
        else if (*p == 0x64)
            syscall(SYS_arch_prctl, ARCH_GET_FS_, &i->segment);
        else if (*p == 0x65)
            syscall(SYS_arch_prctl, ARCH_GET_GS_, &i->segment);
        else if (*p != 0x26 && *p != 0x2e && *p != 0x36 && *p != 0x3e)
            break;
    }
    if (*p++ != 0xc4) /* 66, F2, F3 and REX before VEX fault too, and end here */
        return 0;
    i->reg_high = p[0] & 0x80 ? 0 : 8;
    i->index_high = p[0] & 0x40 ? 0 : 8;
    i->base_high = p[0] & 0x20 ? 0 : 8;
    i->map = p[0] & 0x1f;
    i->wide = p[1] >> 7;
    i->vvvv = ~p[1] >> 3 & 15;
    i->length = p[1] >> 2 & 1;
    i->prefix = p[1] & 3; /* none, 66, F3, F2 */
    i->opcode = p[2];
    if (i->map != 2 || i->wide)
        return 0;
    const uint8_t modrm = p[3];
    p += 4;
    i->mod = modrm >> 6;
    i->reg = modrm >> 3 & 7;
    i->rm = modrm & 7;
    i->end = p;
    if (i->mod == 3)
        return 1;

    int base = i->rm + i->base_high, pc_relative = 0;
    uint64_t index = 0;
    if (i->rm == 4) {
        i->has_sib = 1;
        i->scale = *p >> 6;
        i->index = (*p >> 3 & 7) + i->index_high;
        base = (*p & 7) + i->base_high;
        p++;
        if (i->index != 4) /* rsp cannot index; r12 can */
            index = (uint64_t)registers[places[i->index]] << i->scale;
        if (i->mod == 0 && (base & 7) == 5)
            base = -1;
    } else if (i->mod == 0 && i->rm == 5) {
        pc_relative = 1;
        base = -1;
    }
    int64_t displacement = 0;
    if (i->mod == 1) {
        displacement = (int8_t)*p++;
    } else if (i->mod == 2 || base < 0) {
        displacement = dword(p);
        p += 4;
    }
    i->base = base;
    i->end = p;
    i->stride = index;
    i->address = (base >= 0 ? (uint64_t)registers[places[base]] : 0) + (uint64_t)displacement;
    if (pc_relative)
        i->address += (uint64_t)(uintptr_t)p;
    return 1;
}

static const uint8_t *memory_operand(const instruction *i)
{
    uint64_t address = i->address + i->stride;
    if (i->address32)
        address &= 0xffffffff;
    return (const uint8_t *)(uintptr_t)(address + i->segment);
}

/* ---- VNNI ----------------------------------------------------------------------------------------- */

static int byte_of(uint8_t byte, int is_signed)
{
    return is_signed ? (int8_t)byte : byte;
}

/* acc + four products, all exact, then wrapped or saturated to 32 bits. */
static uint32_t dot4(uint32_t acc, const uint8_t *a, int a_signed, const uint8_t *b, int b_signed, int saturate)
{
    const int unsigned_sum = !a_signed && !b_signed;
    int64_t sum = unsigned_sum ? (int64_t)acc : (int64_t)(int32_t)acc;
    for (int j = 0; j < 4; j++)
        sum += byte_of(a[j], a_signed) * byte_of(b[j], b_signed);
    if (saturate && unsigned_sum)
        sum = sum > UINT32_MAX ? UINT32_MAX : sum;
    else if (saturate)
        sum = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
    return (uint32_t)sum;
}

/* vpdpb__d reg, vvvv, rm: the first letter is the sign of the bytes in vvvv, the second of those in rm. */
static int vnni(frame *f, const instruction *i)
{
    static const enum mnemonic by_prefix[4] = {VPDPBUUD, VPDPBUSD, VPDPBSUD, VPDPBSSD};
    const int a_signed = i->prefix >= 2, b_signed = i->prefix == 1 || i->prefix == 3;
    const int saturate = i->opcode & 1, bytes = i->length ? 32 : 16;
    uint8_t acc[32], a[32], b[32];
    read_ymm(f, i->reg + i->reg_high, acc);
    read_ymm(f, i->vvvv, a);
    if (i->mod == 3)
        read_ymm(f, i->rm + i->base_high, b);
    else
        memcpy(b, memory_operand(i), (size_t)bytes);
    for (int at = 0; at < bytes; at += 4) {
        const uint32_t sum = dot4((uint32_t)dword(acc + at), a + at, a_signed, b + at, b_signed, saturate);
        memcpy(acc + at, &sum, sizeof sum);
    }
    write_vector(f, i->reg + i->reg_high, acc, bytes);
    return (int)by_prefix[i->prefix] + saturate;
}

/* ---- AMX ------------------------------------------------------------------------------------------ */

enum { UNDEFINED = -1, PROTECTION = -2 }; /* #UD, #GP */

static int usable(int tile)
{
    return tiles.palette != 0 && tile < TILES && tiles.rows[tile] != 0 && tiles.colsb[tile] != 0;
}

/* The 64 bytes of LDTILECFG: palette, start row, 14 zeros, 16 times colsb as uint16, 16 times rows as uint8. */
static int load_configuration(const uint8_t *m)
{
    tile_file next;
    memset(&next, 0, sizeof next);
    next.palette = m[0];
    next.start_row = m[1];
    if (next.palette > 1)
        return PROTECTION;
    if (next.palette == 0) {
        tiles = next;
        tiles.start_row = 0;
        return LDTILECFG;
    }
    for (int at = 2; at < 16; at++)
        if (m[at] != 0)
            return PROTECTION;
    for (int t = 0; t < 16; t++) {
        const int colsb = m[16 + 2 * t] | m[17 + 2 * t] << 8, rows = m[48 + t];
        if (t >= TILES) {
            if (colsb != 0 || rows != 0)
                return PROTECTION;
            continue;
        }
        if (colsb > ROW_BYTES || rows > ROWS || (colsb == 0) != (rows == 0))
            return PROTECTION;
        next.colsb[t] = (uint16_t)colsb;
        next.rows[t] = (uint8_t)rows;
    }
    tiles = next; /* all tiles are zero after it */
    return LDTILECFG;
}

static int store_configuration(uint8_t *m)
{
    memset(m, 0, 64);
    if (tiles.palette != 0) {
        m[0] = tiles.palette;
        m[1] = tiles.start_row;
        for (int t = 0; t < TILES; t++) {
            memcpy(m + 16 + 2 * t, &tiles.colsb[t], 2);
            m[48 + t] = tiles.rows[t];
        }
    }
    return STTILECFG;
}

/* Opcode 49: configuration, release, zero. */
static int configure(const instruction *i)
{
    if (i->length || i->vvvv != 0)
        return UNDEFINED;
    if (i->mod != 3) {
        if (i->reg != 0 || i->prefix > 1)
            return UNDEFINED;
        uint8_t *const m = (uint8_t *)(uintptr_t)memory_operand(i);
        return i->prefix == 0 ? load_configuration(m) : store_configuration(m);
    }
    if (i->prefix == 0) {
        if (i->reg != 0 || i->rm != 0)
            return UNDEFINED;
        memset(&tiles, 0, sizeof tiles);
        return TILERELEASE;
    }
    if (i->prefix != 3 || i->rm != 0 || i->reg_high || !usable(i->reg))
        return UNDEFINED;
    memset(tiles.data[i->reg], 0, sizeof tiles.data[i->reg]);
    tiles.start_row = 0;
    return TILEZERO;
}

/* Opcode 4B: rows of a tile to and from memory, a stride apart. */
static int move_tile(const instruction *i)
{
    if (i->length || i->vvvv != 0 || i->mod == 3 || !i->has_sib || i->reg_high || i->prefix == 0 || i->address32)
        return UNDEFINED;
    const int t = i->reg;
    if (!usable(t))
        return UNDEFINED;
    uint8_t *m = (uint8_t *)(uintptr_t)(i->address + i->segment);
    const int start = tiles.start_row, rows = tiles.rows[t];
    const size_t colsb = tiles.colsb[t];
    if (i->prefix != 2 && start == 0)
        memset(tiles.data[t], 0, sizeof tiles.data[t]);
    m += (uint64_t)start * i->stride;
    for (int r = start; r < rows; r++, m += i->stride) {
        if (i->prefix == 2) {
            memcpy(m, tiles.data[t][r], colsb);
        } else {
            memcpy(tiles.data[t][r], m, colsb);
        }
    }
    tiles.start_row = 0;
    return i->prefix == 3 ? TILELOADD : i->prefix == 1 ? TILELOADDT1 : TILESTORED;
}

/* Opcode 5E: tdpb__d reg, rm, vvvv. The first letter is the sign of the bytes in rm, the second of those in vvvv. */
static int multiply(const instruction *i)
{
    static const enum mnemonic by_prefix[4] = {TDPBUUD, TDPBUSD, TDPBSUD, TDPBSSD};
    if (i->length || i->mod != 3 || i->reg_high || i->base_high)
        return UNDEFINED;
    const int c = i->reg, a = i->rm, b = i->vvvv;
    if (c == a || c == b || a == b || !usable(c) || !usable(a) || !usable(b))
        return UNDEFINED;
    if (tiles.colsb[c] % 4 || tiles.colsb[a] % 4 || tiles.colsb[b] % 4)
        return UNDEFINED;
    if (tiles.rows[c] != tiles.rows[a] || tiles.colsb[a] / 4 != tiles.rows[b] || tiles.colsb[c] != tiles.colsb[b])
        return UNDEFINED;
    const int a_signed = i->prefix >= 2, b_signed = i->prefix == 1 || i->prefix == 3;
    for (int m = 0; m < tiles.rows[c]; m++) {
        for (int k = 0; k < tiles.colsb[a]; k += 4) {
            for (int n = 0; n < tiles.colsb[c]; n += 4) {
                uint8_t *const cell = tiles.data[c][m] + n;
                const uint32_t sum =
                    dot4((uint32_t)dword(cell), tiles.data[a][m] + k, a_signed, tiles.data[b][k / 4] + n, b_signed, 0);
                memcpy(cell, &sum, sizeof sum);
            }
        }
        memset(tiles.data[c][m] + tiles.colsb[c], 0, ROW_BYTES - tiles.colsb[c]);
    }
    memset(tiles.data[c][tiles.rows[c]], 0, (size_t)(ROWS - tiles.rows[c]) * ROW_BYTES);
    tiles.start_row = 0;
    return (int)by_prefix[i->prefix];
}

/* ---- the handler ---------------------------------------------------------------------------------- */

static struct sigaction before;
static int installed;

/* Performs one instruction, if it is one of ours: its mnemonic, UNDEFINED or PROTECTION. */
static int perform(frame *f)
{
    instruction i;
    int done = UNDEFINED;
    if (!decode((const uint8_t *)(uintptr_t)f->registers[REG_RIP], f->registers, &i))
        return UNDEFINED;
    switch (i.opcode) {
    case 0x49:
        done = configure(&i);
        break;
    case 0x4b:
        done = move_tile(&i);
        break;
    case 0x50:
    case 0x51:
        done = vnni(f, &i);
        break;
    case 0x5e:
        done = multiply(&i);
        break;
    default:
        break;
    }
    if (done >= 0) {
        atomic_fetch_add_explicit(&retired[done], 1, memory_order_relaxed);
        f->registers[REG_RIP] = (greg_t)(uintptr_t)i.end;
    }
    return done;
}

static void on_sigill(int signal_number, siginfo_t *info, void *context)
{
    (void)signal_number;
    frame f;
    int done = UNDEFINED;
    const int ours = info->si_code > 0; /* raised by the CPU, not sent by a process */
    if (ours && open_frame(&f, context))
        done = perform(&f);
    if (done >= 0) {
        /* A signal costs a thousand times what an instruction does: go on while the next one is ours too. One that
           would fault does so by itself, as soon as we return. */
        while (perform(&f) >= 0)
            ;
    } else if (done == PROTECTION) {
        /* #GP: what the kernel makes of it, delivered at this instruction as soon as we return. */
        syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid), SIGSEGV);
    } else {
        sigaction(SIGILL, &before, NULL);
        installed = 0;
        if (!ours)
            syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid), SIGILL);
    }
}

/* ---- for the tests -------------------------------------------------------------------------------- */

/* Take over SIGILL. 0, or -1 where that failed or the CPU has no AVX state to work on. */
API int trap_install(void)
{
    uint32_t eax, ebx, ecx, edx;
    if (installed)
        return 0;
    if (!__get_cpuid_count(0xd, AVX, &eax, &ebx, &ecx, &edx) || eax == 0)
        return -1;
    avx_offset = ebx;
    zmm_offset = __get_cpuid_count(0xd, ZMM_HIGH, &eax, &ebx, &ecx, &edx) && eax != 0 ? ebx : 0;
    struct sigaction own;
    memset(&own, 0, sizeof own);
    own.sa_sigaction = on_sigill;
    own.sa_flags = SA_SIGINFO;
    sigemptyset(&own.sa_mask);
    if (sigaction(SIGILL, &own, &before) != 0)
        return -1;
    installed = 1;
    return 0;
}

/* Give SIGILL back. */
API void trap_remove(void)
{
    if (installed)
        sigaction(SIGILL, &before, NULL);
    installed = 0;
}

API int trap_mnemonics(void)
{
    return MNEMONICS;
}

API const char *trap_name(int mnemonic)
{
    return names[mnemonic];
}

API uint64_t trap_retired(int mnemonic)
{
    return atomic_load_explicit(&retired[mnemonic], memory_order_relaxed);
}

/* The calling thread's palette: 0 where its tiles are not configured. */
API int trap_palette(void)
{
    return tiles.palette;
}
