// Waves: which of a launch's items a block does, where a block does many.
//
// Multiprocessors are not equally fast: some store a third more in the same time. Where every block of a grid that fills
// the chip has an equal share, the fast ones wait for the slow ones at the end. So where there are many items the grid
// has HELD blocks, as many as the chip holds at once, WAVES times: those of each wave but the last do half of what is
// left. The chip starts them in order, wherever a block has ended (guided self-scheduling: C. Polychronopoulos, D. Kuck,
// 1987), and there is no counter that a launch would have to reset.

struct Turn {
    unsigned item, end, step;  // the block's first item, where its wave ends, and how far its items are apart
};

__device__ __forceinline__ Turn turn_of(unsigned items, unsigned block, unsigned blocks) {
    if (blocks <= HELD) return {block, items, blocks};
    const unsigned wave = block / HELD;
    const auto begin = [&](unsigned wave) {
        return wave == WAVES ? items : (items - (items >> wave)) / HELD * HELD;  // all but 1/2^wave, for each block as many
    };
    return {begin(wave) + block - wave * HELD, begin(wave + 1), HELD};
}
