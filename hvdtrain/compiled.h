/* What all kernels need: their source text, instruction sets and the floating-point mode. Each
 * includes this file first, from within the package, so that it is found without options. */

#ifndef HVD_COMPILED_H
#define HVD_COMPILED_H

#include <stdint.h>
#if defined(__x86_64__)
#include <emmintrin.h>
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

#endif
