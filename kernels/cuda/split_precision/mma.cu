// What the kernels of split that multiply with mma.sync share: the instruction, and its filters.

struct __align__(4 * WORDS) Filters {
    unsigned word[WORDS];  // products 2t and 2t + 1, and those 8 further: high, then low
};

// Where the words of rows g and g + 8 of A lie.
struct Pair {
    const unsigned char *at[2];
};

__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
