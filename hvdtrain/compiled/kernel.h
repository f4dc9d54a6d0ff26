/* What kernels need: their source text, instruction sets, floating-point mode and copies. Each
 * includes this file first, from within the package, so that it is found without options. */

#ifndef HVD_COMPILED_KERNEL_H
#define HVD_COMPILED_KERNEL_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* ---- source text, by which a library compiled from a different version is detected -------- */

/* Append the text of the file that contains this line to the texts before it. */
#define EMBED_TEXT                                                                              \
    __asm__(".pushsection .hvd_source, \"a\"\n"                                                  \
            ".incbin \"" __FILE__ "\"\n"                                                        \
            ".popsection\n")

__asm__(".pushsection .hvd_source, \"a\"\n"
        ".global hvd_source\n"
        "hvd_source:\n"
        ".popsection\n");

/* Written once, after the last text. */
#define EMBED_END                                                                               \
    __asm__(".pushsection .hvd_source, \"a\"\n"                                                  \
            ".global hvd_source_end\n"                                                          \
            "hvd_source_end: .byte 0\n"                                                         \
            ".popsection\n")

EMBED_TEXT;

/* ---- instruction sets --------------------------------------------------------------------- */

/* Compiled for several processor generations if the compiler and loader support it; tests set it
 * on the command line. */
#if defined(FAST)
#elif defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FAST static __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST static
#endif
#define INLINE static inline __attribute__((always_inline))

/* ---- floating-point mode ------------------------------------------------------------------ */

/* A thread may flush subnormal numbers to zero or round differently, but all ranks must get the
 * same bits. Set the default mode and return the previous one. */
static uint64_t enter_default_mode(void) {
    uint64_t kept = 0;
#if defined(__x86_64__)
    kept = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, no flags set */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(kept));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
#endif
    return kept;
}

static void leave_default_mode(uint64_t kept) {
#if defined(__x86_64__)
    _mm_setcsr(kept);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(kept) : "memory");
#else
    (void)kept;
#endif
}

/* ---- copies around the caches ------------------------------------------------------------- */

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static inline void copy_lines(char *target, const char *source,
                                                                 int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64)
        _mm512_stream_si512((__m512i *)(target + at), _mm512_loadu_si512(source + at));
}

static inline void copy_quarters(char *target, const char *source, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 16)
        _mm_stream_si128((__m128i *)(target + at), _mm_loadu_si128((const __m128i *)(source + at)));
}
#endif

/* Copy with non-temporal stores: lines that are overwritten need not be read first. Stores of whole
 * lines take up to a third less than those of quarters. Fence before others read the target. */
static inline void copy_around_caches(char *target, const char *source, int64_t bytes) {
    if (bytes == 0) return; /* memcpy does not allow null pointers */
#if defined(__x86_64__)
    int64_t head = -(uintptr_t)target % 64;
    if (bytes >= head + 64) {
        int64_t lines = (bytes - head) / 64 * 64;
        memcpy(target, source, head);
        target += head, source += head, bytes -= head + lines;
        if (__builtin_cpu_supports("avx512f")) copy_lines(target, source, lines);
        else copy_quarters(target, source, lines);
        target += lines, source += lines;
    }
#endif
    memcpy(target, source, bytes);
}

static inline void fence_copies(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

#endif
