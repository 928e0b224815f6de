// waves: which of a launch's work items one block computes, where a block computes several.
//
// Multiprocessors are not equally fast: some store a third more in the same time. With equal shares, the whole chip
// waits at the end for the slowest one (wave quantization). So a grid with many items consists of waves, each of as
// many blocks as the chip holds; the blocks of a wave, but for the last, compute half of the items that are left.
//
//     items  [ ------- wave 0: 1/2 ------- | -- wave 1: 1/4 -- | - 1/8 - | ... | last wave: the rest ]
//
// The chip starts blocks in order, wherever one has ended, so no counter has to be reset for a launch.
// Source: guided self-scheduling, C. Polychronopoulos and D. Kuck, IEEE Transactions on Computers, 1987.
//
// Config: resident_blocks, the blocks that the chip holds at a time; waves, their number.

struct WorkItems {
    unsigned first, end, stride;
};

__device__ __forceinline__ WorkItems work_items(unsigned items, unsigned block, unsigned blocks) {
    const unsigned resident = Config::resident_blocks, waves = Config::waves;
    if (blocks <= resident) return {block, items, blocks};
    const unsigned wave = block / resident;
    // All items but 1/2^wave of them, rounded down so that the blocks of a wave get equal shares.
    const auto begin = [&](unsigned wave) {
        return wave == waves ? items : (items - (items >> wave)) / resident * resident;
    };
    return {begin(wave) + block - wave * resident, begin(wave + 1), resident};
}
