/* What the CPU and the operating system let this process use. The compiler's own check reads both,
 * so an instruction set that the operating system or a virtual machine masks does not count. */
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>

enum { AVX2 = 1, AVX512 = 2, AVX512_BF16 = 4, AMX = 8 };

unsigned omn_cpu_features(void) {
    unsigned found = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= AVX2;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        found |= AVX512;
    /* Older compilers do not know the name. */
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 12
    if (found & AVX512 && __builtin_cpu_supports("avx512bf16")) found |= AVX512_BF16;
#endif
    /* Nothing here uses AMX, but torch may: what the CPU reports counts, masked or not. */
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1) found |= AMX;
    return found;
}
#else
unsigned omn_cpu_features(void) { return 0; }
#endif
