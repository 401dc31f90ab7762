/* SPDX-License-Identifier: MIT */
/*
 * dispatch.c - chooses the path.
 *
 * Idea: the compiler's runtime asks the processor, and the kernel whether it saves the wide
 * registers; a path is there if every instruction set its files are compiled for is.
 * Invariant: the path changes only in lk_cpu_open(), which is called before threads start.
 */
#include <errno.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "dispatch.h"

static enum lk_cpu_path chosen = LK_CPU_PORTABLE;

static bool has_avx2(void) {
#ifdef __x86_64__
    unsigned a, b, c = 0, d; /* not every compiler knows F16C by name */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
#else
    return false;
#endif
}

static bool has_avx512(void) {
#ifdef __x86_64__
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

bool lk_cpu_has(enum lk_cpu_path path) {
    return path == LK_CPU_AVX512 ? has_avx512() : path == LK_CPU_AVX2 ? has_avx2() : true;
}

int lk_cpu_open(enum lk_cpu_path path) {
    if ((unsigned)path > LK_CPU_AVX512)
        return -EINVAL;
    if (!lk_cpu_has(path))
        return -ENOTSUP;
    if (path == LK_CPU_BEST)
        path = has_avx512() ? LK_CPU_AVX512 : has_avx2() ? LK_CPU_AVX2 : LK_CPU_PORTABLE;
    chosen = path;
    return 0;
}

enum lk_cpu_path lk_cpu_path(void) {
    return chosen;
}

const char *lk_cpu_path_name(enum lk_cpu_path path) {
    switch (path) {
    case LK_CPU_AVX512:
        return "avx512";
    case LK_CPU_AVX2:
        return "avx2";
    default:
        return "portable";
    }
}
