// The functions of kernels/cuda/split_precision/tma.cuh for cuda_on_cpu.h: copies of boxes of a tensor, done at once.
#define __grid_constant__

// What a CUtensorMap says (ece408_op/runtime/launch.py): sizes of each dimension, the innermost first; the box; and of
// im2col mode where the first and the last window begin, and the steps between windows, columns first.
struct TensorMap {
    const unsigned char *from;
    long long sizes[4];
    int box[3], lower[2], upper[2], step[2];
};

inline void fence_mbarrier_init() {}

// Element c + `column` of row `row` of the box, whose rows are swizzled over their own width; zero outside the tensor.
UNWATCHED inline void copy_element(void *to, const TensorMap &map, int row, int c, bool inside, long long from) {
    const int width = 2 * map.box[0], at = row * width + 2 * c;
    unsigned short value = 0;
    if (inside) std::memcpy(&value, map.from + 2 * from, 2);
    std::memcpy(static_cast<unsigned char *>(to) + (at ^ (at >> 3 & (width - 16))), &value, 2);
}
UNWATCHED inline void tma_load(void *to, const TensorMap &map, Barrier *, int i, int j, int k) {
    require_aligned(static_cast<unsigned char *>(to), 8 * 2 * map.box[0]);
    for (int n = 0; n < map.box[2]; n++)
        for (int c = 0; c < map.box[0]; c++)
            copy_element(to, map, n, c, i + c < map.sizes[0] && k + n < map.sizes[2],
                         ((k + n) * map.sizes[1] + j) * map.sizes[0] + i + c);
}
UNWATCHED inline void tma_load_im2col(void *to, const TensorMap &map, Barrier *, int channel, int column, int row,
                                      int image, int tap_column, int tap_row) {
    require_aligned(static_cast<unsigned char *>(to), 8 * 2 * map.box[0]);
    if (channel % 8) std::abort();  // an illegal instruction on a GPU
    for (int n = 0; n < map.box[1]; n++) {
        const int w = column + tap_column, h = row + tap_row;
        const bool inside = w >= 0 && w < map.sizes[1] && h >= 0 && h < map.sizes[2] && image < map.sizes[3];
        for (int c = 0; c < map.box[0]; c++)
            copy_element(to, map, n, c, inside && channel + c < map.sizes[0],
                         ((image * map.sizes[2] + h) * map.sizes[1] + w) * map.sizes[0] + channel + c);
        column += map.step[0];
        if (column > map.sizes[1] - 1 + map.upper[0]) column = map.lower[0], row += map.step[1];
        if (row > map.sizes[2] - 1 + map.upper[1]) row = map.lower[1], image++;
    }
}
