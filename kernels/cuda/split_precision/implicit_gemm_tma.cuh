// implicit_gemm_tma: a block's work in general.cu, which describes it, and in split_form.cu.

static_assert(Config::tile_filters % 32 == 0, "epilogues store 32 filters at a time");

// Load: one thread fills the stages in turn. Before it refills a stage, the thread waits until all consumers have
// released it. TMA gathers the inputs of tile_pixels output pixels at tap (p, q) of their windows. The first window
// begins at (image, row, column); windows lie `stride` input pixels apart. The taps are the inner loop: all taps of a
// stage's channels read the same pixels, and L2 holds the pixels of all blocks for a few channels.
//
// With 1 x 1 filters and two tiles of filters, only one other tile reads the same pixels. Their loads are then
// evict-first, so that L2 writes other lines back less often. With one tile of filters, or more than two, evict-first
// loads took longer.
constexpr bool EVICTS_PIXELS = Config::buffers && TAPS == 1 && FILTER_TILES == 2;
__device__ __forceinline__ void produce(const Pipeline &pipeline, int tiles, const TensorMap &x_high,
                                        const TensorMap &x_low, const TensorMap &w_high, const TensorMap &w_low) {
    if (Config::resident) {
        mbarrier_arrive_expect_bytes(pipeline.resident, RESIDENT_BYTES);
        for (int step = 0; step < K_TILES; step++)
            load_filters(pipeline.filters(0, step), pipeline.resident, w_high, w_low,
                         step / TAPS * Config::stage_channels, step % TAPS, Tile(blockIdx.x).filter);
    }
    int stage = 0, phase = 1;
    for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
        const Tile tile(number);
        const int image = tile.pixel / OUTPUT_AREA;
        const Window window(tile.pixel % OUTPUT_AREA);
        for (int c = 0; c < C; c += Config::stage_channels) {
            for (int tap = 0; tap < TAPS; tap++) {
                const int p = tap / Config::kernel_width * Config::dilate_height;
                const int q = tap % Config::kernel_width * Config::dilate_width;
                Barrier *const full = pipeline.full + stage;
                unsigned char *const pixels = pipeline.pixels(stage);
                mbarrier_wait_thread(pipeline.empty + stage, phase);
                mbarrier_arrive_expect_bytes(full, STAGE_BYTES);
                const int channel = tile.group * Config::padded_channels + c;
                tma_load_im2col<EVICTS_PIXELS>(pixels, x_high, full, channel, window.column, window.row, image, q, p);
                if (COMPONENTS == 2)
                    tma_load_im2col(pixels + PIXEL_BYTES, x_low, full, channel, window.column, window.row, image, q, p);
                if (!Config::resident)
                    load_filters(pipeline.filters(stage, 0), full, w_high, w_low, c, tap, tile.filter);
                if (++stage == Config::stages) stage = 0, phase ^= 1;
            }
        }
    }
}

// Whether epilogue.prepare runs after the first stage's wgmmas are issued, which hide its time. With two components and
// stages of fewer than 64 channels that was slower (96 channels, 3 x 3; `ece408-bench layers` times it).
constexpr bool PREPARES_LATE = !Config::ping_pong && (COMPONENTS == 1 || Config::stage_channels == 64);
// All of a block's work: producer and consumers loop over its tiles. Per tile, a consumer calls
// epilogue.prepare(staging, tile, consumer), and later epilogue.store(sums, staging, tile, consumer, outputs) with the
// sums of its share. Ping-pong consumers take turns: each issues its products after the previous consumer has issued
// its last, so that the epilogue of one overlaps the products of the others. The order also makes sure that a stage's
// previous phase is complete before a consumer waits for the next: until then, a wait for the next phase's parity
// would return at once.
template <typename Epilogue>
__device__ __forceinline__ void run_block(const TensorMap &x_high, const TensorMap &x_low, const TensorMap &w_high,
                                          const TensorMap &w_low, int images, const Epilogue &epilogue) {
    extern __shared__ __align__(16) unsigned char memory[];
    const Pipeline pipeline(memory);
    pipeline.init(1);
    const int tiles = tiles_of(images);
    if (threadIdx.x < 128) {
        lower_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(pipeline, tiles, x_high, x_low, w_high, w_low);
    } else {
        raise_registers<CONSUMER_REGISTERS>();
        // A ping-pong consumer's stages depend on its number. The shuffle shows the compiler that the number is
        // uniform, so descriptors stay in uniform registers. With one stage per tile (64 channels, 1 x 1) that was
        // slower.
        constexpr bool UNIFORM = Config::ping_pong && K_TILES > 1;
        const int warpgroup = UNIFORM ? __shfl_sync(~0u, threadIdx.x / 128, 0) : threadIdx.x / 128;
        const int consumer = warpgroup - 1;
        int stage = 0, phase = 0;
        if (Config::resident) mbarrier_wait(pipeline.resident, 0);
        constexpr int TILES_IN_FLIGHT = Config::consumers / CONSUMERS_PER_TILE;
        int i = Config::ping_pong ? consumer : 0;  // the tile's index in the block
        for (int number = blockIdx.x + i * gridDim.x; number < tiles;
             number += TILES_IN_FLIGHT * gridDim.x, i += TILES_IN_FLIGHT) {
            const Tile tile = Tile(number).of(consumer);
            const auto begin_products = [&](Accumulators &sums, int which, int step) {
                multiply_stage(sums, pipeline, which, step, consumer);
                if (Config::ping_pong && step == K_TILES - 1 && threadIdx.x % 128 == 0)
                    mbarrier_arrive(pipeline.turns + (consumer + 1) % Config::consumers);
                if (PREPARES_LATE && step == 0) epilogue.prepare(pipeline.epilogue_storage, tile, consumer);
            };
            if (!PREPARES_LATE) epilogue.prepare(pipeline.epilogue_storage, tile, consumer);
            Accumulators sums = {};
            if (Config::ping_pong) {
                stage = i * K_TILES % Config::stages, phase = i * K_TILES / Config::stages % 2;
                if (i) mbarrier_wait(pipeline.turns + consumer, (i - 1) / TILES_IN_FLIGHT);
            }
            multiply_stages(sums, pipeline, K_TILES, stage, phase, begin_products);
            epilogue.store(sums, pipeline.epilogue_storage, tile, consumer, pipeline.outputs);
        }
        epilogue.end();
    }
}
