/* SPDX-License-Identifier: Apache-2.0 */
/* The probe: CPUID and XCR0 on x86-64, AT_HWCAP and MIDR on AArch64, nothing elsewhere.
 *
 * It decides nothing. It returns raw words, so that a recorded CPU can be replayed on any machine and every
 * decision sits in one Python table. Compiled at the architecture's baseline; the only two instructions beyond
 * that, XGETBV and MRS MIDR_EL1, run behind the bit that says the operating system allows them. The machine's
 * flag text (/proc/cpuinfo) is never read: it is the host's under qemu-user and may disagree with CPUID. */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* syscall() */
#endif
#include "probe.h"

#include <stdint.h>

/* The architecture that this file was compiled for. uname() would answer for the kernel: a 32-bit Python on a
 * 64-bit kernel, or `setarch`, makes it lie. */
#if defined(__x86_64__) || defined(_M_X64)
#define TK_ARCH "x86_64"
#elif defined(__AARCH64EB__)
#define TK_ARCH "aarch64_be"
#elif defined(__aarch64__) || defined(_M_ARM64)
#define TK_ARCH "aarch64"
#elif defined(__i386__) || defined(_M_IX86)
#define TK_ARCH "i686"
#elif defined(__arm__)
#define TK_ARCH "arm"
#elif defined(__riscv) && __riscv_xlen == 64
#define TK_ARCH "riscv64"
#elif defined(__powerpc64__) && defined(__LITTLE_ENDIAN__)
#define TK_ARCH "ppc64le"
#elif defined(__powerpc64__)
#define TK_ARCH "ppc64"
#elif defined(__s390x__)
#define TK_ARCH "s390x"
#elif defined(__loongarch64)
#define TK_ARCH "loongarch64"
#else
#define TK_ARCH "unknown"
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define TK_X86 1
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#define TK_ARM_LINUX 1
#include <stdio.h>
#endif
#if defined(TK_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---- x86-64 ------------------------------------------------------------------------------------------------ */

#ifdef TK_X86

typedef struct {
    uint32_t eax, ebx, ecx, edx;
} regs;

static regs cpuid(uint32_t leaf, uint32_t sub)
{
    regs r;
    __cpuid_count(leaf, sub, r.eax, r.ebx, r.ecx, r.edx);
    return r;
}

static int has_osxsave(void)
{
    return cpuid(0, 0).eax >= 1 && (cpuid(1, 0).ecx >> 27) & 1;
}

/* XGETBV(0), as bytes: `xgetbv` wants -mxsave with some assemblers. #UD where OSXSAVE is clear. */
static uint64_t read_xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(lo), "=d"(hi) : "c"(0));
    return ((uint64_t)hi << 32) | lo;
}

static int put_leaf(PyObject *leaves, uint32_t leaf, uint32_t sub, regs r)
{
    PyObject *key = Py_BuildValue("(II)", leaf, sub);
    PyObject *value = Py_BuildValue("(IIII)", r.eax, r.ebx, r.ecx, r.edx);
    int rc = key && value ? PyDict_SetItem(leaves, key, value) : -1;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return rc;
}

/* Leaves that carry features, state or identity. `subs`: how many subleaves are read; with COUNTED, leaf.0's EAX
 * bounds them. A leaf past the maximum is not read: Intel answers it with the last leaf's data. */
enum { PLAIN = 0, COUNTED = 1 };
static const struct {
    uint32_t leaf, subs, counted;
} WANTED[] = {
    {0x00, 1, PLAIN},   /* maximum leaf, vendor */
    {0x01, 1, PLAIN},   /* family, SSE .. AVX, OSXSAVE */
    {0x07, 3, COUNTED}, /* AVX2, AVX-512, AMX, AVX-VNNI */
    {0x0D, 2, PLAIN},   /* what XCR0 may hold */
    {0x14, 1, PLAIN},   /* processor trace */
    {0x19, 1, PLAIN},   /* key locker */
    {0x1A, 1, PLAIN},   /* core kind of a hybrid part */
    {0x1D, 2, COUNTED}, /* tile palette */
    {0x1E, 2, COUNTED}, /* tile multiply unit; .1 has further AMX legs */
    {0x24, 1, PLAIN},   /* AVX10 version */
};

static int put_leaves(PyObject *leaves)
{
    uint32_t max = cpuid(0, 0).eax;
    for (size_t i = 0; i < sizeof WANTED / sizeof WANTED[0]; i++) {
        if (WANTED[i].leaf > max)
            continue;
        regs first = cpuid(WANTED[i].leaf, 0);
        if (put_leaf(leaves, WANTED[i].leaf, 0, first) < 0)
            return -1;
        for (uint32_t sub = 1; sub < WANTED[i].subs; sub++) {
            if (WANTED[i].counted && sub > first.eax)
                break;
            if (put_leaf(leaves, WANTED[i].leaf, sub, cpuid(WANTED[i].leaf, sub)) < 0)
                return -1;
        }
    }
    uint32_t ext = cpuid(0x80000000u, 0).eax;
    if (ext < 0x80000000u || ext > 0x8000FFFFu)
        return 0; /* a CPU without extended leaves answers with something else */
    if (ext > 0x80000008u)
        ext = 0x80000008u;
    for (uint32_t leaf = 0x80000000u; leaf <= ext; leaf++)
        if (put_leaf(leaves, leaf, 0, cpuid(leaf, 0)) < 0)
            return -1;
    return 0;
}

#endif

/* ---- AArch64 Linux ----------------------------------------------------------------------------------------- */

#ifdef TK_ARM_LINUX

#define TK_AT_HWCAP 16
#define TK_AT_HWCAP2 26
#define TK_HWCAP_CPUID (1u << 11)

#if defined(__has_include)
#if __has_include(<sys/auxv.h>)
#include <sys/auxv.h>
#define TK_GETAUXVAL 1
#endif
#endif

static uint64_t auxval(uint64_t type)
{
#ifdef TK_GETAUXVAL
    return getauxval((unsigned long)type);
#else
    /* uclibc and old libcs: the same vector, from the kernel's file. */
    unsigned long pair[2];
    uint64_t found = 0;
    FILE *f = fopen("/proc/self/auxv", "rb");
    if (!f)
        return 0;
    while (fread(pair, sizeof pair, 1, f) == 1 && pair[0] != 0)
        if (pair[0] == type) {
            found = pair[1];
            break;
        }
    fclose(f);
    return found;
#endif
}

/* MIDR names the box; it never enables a feature. CPU 0's comes first, so that a big.LITTLE machine has one name
 * whichever core asks; else this core's, which the kernel emulates where it sets HWCAP_CPUID. */
static int read_midr(uint64_t hwcap, uint64_t *midr)
{
    FILE *f = fopen("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1", "r");
    if (f) {
        unsigned long long value;
        int n = fscanf(f, "%llx", &value);
        fclose(f);
        if (n == 1) {
            *midr = value;
            return 1;
        }
    }
    if (hwcap & TK_HWCAP_CPUID) {
        __asm__("mrs %0, MIDR_EL1" : "=r"(*midr));
        return 1;
    }
    return 0;
}

#endif

/* ---- Python ------------------------------------------------------------------------------------------------ */

PyObject *tk_probe(PyObject *self, PyObject *noargs)
{
    (void)self;
    (void)noargs;
    uint64_t hwcap = 0, hwcap2 = 0;
    PyObject *xcr0 = NULL, *midr = NULL, *result = NULL;
    PyObject *leaves = PyDict_New();
    if (!leaves)
        return NULL;
#ifdef TK_X86
    if (put_leaves(leaves) < 0)
        goto done;
    if (has_osxsave() && !(xcr0 = PyLong_FromUnsignedLongLong(read_xcr0())))
        goto done;
#endif
#ifdef TK_ARM_LINUX
    uint64_t id;
    hwcap = auxval(TK_AT_HWCAP);
    hwcap2 = auxval(TK_AT_HWCAP2);
    if (read_midr(hwcap, &id) && !(midr = PyLong_FromUnsignedLongLong(id)))
        goto done;
#endif
    result = Py_BuildValue("{s:s,s:O,s:O,s:O,s:K,s:K,s:O}",
                           "arch", TK_ARCH, "leaves", leaves, "xcr0", xcr0 ? xcr0 : Py_None, "tiles", Py_None,
                           "hwcap", (unsigned long long)hwcap, "hwcap2", (unsigned long long)hwcap2,
                           "midr", midr ? midr : Py_None);
#if defined(TK_X86) || defined(TK_ARM_LINUX)
done:
#endif
    Py_DECREF(leaves);
    Py_XDECREF(xcr0);
    Py_XDECREF(midr);
    return result;
}

#if defined(TK_X86) && defined(__linux__) && defined(SYS_arch_prctl)

#define TK_ARCH_GET_XCOMP_PERM 0x1022
#define TK_ARCH_REQ_XCOMP_PERM 0x1023
#define TK_XFEATURE_XTILEDATA 18
#define TK_XCR0_TILES 0x60000u /* XTILECFG (17) and XTILEDATA (18) */

static int ask_for_tiles(void)
{
    if (cpuid(0, 0).eax < 7 || !((cpuid(7, 0).edx >> 24) & 1))
        return 0;
    if (!has_osxsave() || (read_xcr0() & TK_XCR0_TILES) != TK_XCR0_TILES)
        return 0;
    if (syscall(SYS_arch_prctl, TK_ARCH_REQ_XCOMP_PERM, TK_XFEATURE_XTILEDATA) != 0)
        return 0; /* an old kernel, a sandbox, or an alternate signal stack that is too small for the state */
    /* Some sandboxes answer 0 to what they do not know, so the grant is read back. */
    uint64_t granted = 0;
    if (syscall(SYS_arch_prctl, TK_ARCH_GET_XCOMP_PERM, &granted) != 0)
        return 0;
    return (int)((granted >> TK_XFEATURE_XTILEDATA) & 1);
}

#else

static int ask_for_tiles(void)
{
    return 0;
}

#endif

PyObject *tk_request_tiles(PyObject *self, PyObject *noargs)
{
    /* -1 not asked yet. Two threads that race here ask twice, which the kernel allows. */
    static volatile int granted = -1;
    (void)self;
    (void)noargs;
    if (granted < 0)
        granted = ask_for_tiles();
    return PyBool_FromLong(granted);
}
