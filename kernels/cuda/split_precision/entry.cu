// split: a block's warps part into those that multiply, and NP that load and split the next tile meanwhile.

extern "C" __global__ void __launch_bounds__(ALL, 1)
split(const float *__restrict__ x, float *__restrict__ y, const unsigned *__restrict__ filters,
      const int *__restrict__ columns, int *marks, long long first, int images) {
    extern __shared__ __align__(128) unsigned char memory[];
    const Shared s(memory);
    const int items = (images + IMG - 1) / IMG * (TILES_X * TILES_Y), first_item = blockIdx.x / MBLOCKS;
    if (first_item >= items) return;
#if !IMPLICIT
    if (threadIdx.x >= COMPUTE) load(s.raw, image_of(x, first, IMAGE), Item(first_item, images), threadIdx.x - COMPUTE);
#endif
    prepare(s);
    await_launch_before();
    let_next_begin();
    bool bad = false;
    for (int n = 0; n < NTILES; n++) bad = bad || columns[8 * NTILES + n];
    if (bad) {  // the filters cannot be split, split_repair does all images
        copies_arrived();
        return;
    }
    take_filters(s, filters, columns);
#if WGMMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // wgmma reads the filters past the caches' order
#endif
    __syncthreads();
    // From lane 0, so that the compiler knows that a warp stays together.
    if (__shfl_sync(~0u, threadIdx.x, 0) >= COMPUTE) {
#if WGMMA
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
#endif
        loader(s, image_of(x, first, IMAGE), image_of(y, first, OUTPUTS), marks, images, items);
    } else {
#if WGMMA
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TEAM_REGISTERS));
#endif
        computer(s, image_of(y, first, OUTPUTS), filters, images, items);
    }
}
