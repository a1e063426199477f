//# SPDX-License-Identifier: Apache-2.0
//#
//# The intrinsics of x86. To read all that <immintrin.h> brings takes as long as to compile a row, so a row of AVX2
//# includes the parts that it needs. They refuse to be included alone, and know the whole by its guard, which is one
//# name in every gcc and another in every clang. Where they do not compile so, the build asks for the whole, by the
//# macro below (build_tools/objects.py). The parts of AVX-512 need one another in ways that change from release to
//# release, and are most of the whole.
//% if alternative | reject("in", ("avx2", "fma", "f16c", "avxvnni")) | list
#include <immintrin.h>
//% else
#if defined(TUNEKIT_WHOLE_INTRINSICS)
#include <immintrin.h>
#else
#define _IMMINTRIN_H_INCLUDED
#define __IMMINTRIN_H
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <fmaintrin.h>
#include <f16cintrin.h>
//% if "avxvnni" in alternative
#include <avxvnniintrin.h>
//% endif
#endif
//% endif
