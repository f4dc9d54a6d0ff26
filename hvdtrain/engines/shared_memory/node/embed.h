/* The source text in the library, by which one compiled from a different version is detected. */

#ifndef HVD_NODE_EMBED_H
#define HVD_NODE_EMBED_H

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

#endif
