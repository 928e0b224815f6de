// pipeline: stages of operands in shared memory, which a producer fills and consumer warpgroups multiply (sm_90a).
//
// Config: stages; consumers, consumer warpgroups; promote_every, stages between two accumulator promotions.

// The stages begin at a multiple of 1024 bytes, as the swizzle requires; a full and an empty barrier per stage follow,
// then other arrays.
template <int STAGE_BYTES>
struct PipelineOf {
    unsigned char *stages;
    Barrier *full, *empty;
    float *others;

    __device__ __forceinline__ explicit PipelineOf(unsigned char *memory)
        : stages(memory + (-shared_address(memory) & 1023)),
          full(reinterpret_cast<Barrier *>(stages + Config::stages * STAGE_BYTES)), empty(full + Config::stages),
          others(reinterpret_cast<float *>(empty + Config::stages)) {}

    // All threads; `arrivals` complete a full barrier.
    __device__ __forceinline__ void init(int arrivals) const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < Config::stages; i++)
                mbarrier_init(full + i, arrivals), mbarrier_init(empty + i, Config::consumers);
            fence_mbarrier_init();
        }
        __syncthreads();
    }
    __device__ __forceinline__ unsigned char *operator[](int stage) const { return stages + stage * STAGE_BYTES; }
};

// Main loop of a consumer over `steps` stages. On entry a stage's barrier `full` completes when its loads have arrived;
// on exit every stage that was read is released to the producer. multiply(stage) begins and commits the products of a
// stage; promote() follows the end of the products of promote_every stages: tensor cores truncate a long sum, ordinary
// additions round it.
template <typename Pipeline, typename Multiply, typename Promote>
__device__ __forceinline__ void consume(const Pipeline &pipeline, int steps, int &stage, int &phase,
                                        const Multiply &multiply, const Promote &promote) {
    const auto release = [&](int which) {
        if (threadIdx.x % 128 == 0) mbarrier_arrive(pipeline.empty + which);
    };
#pragma unroll 1
    for (int step = 0; step < steps;) {
        const int last = min(steps, step + Config::promote_every);
        int before = -1;
#pragma unroll 1
        for (; step < last; step++) {
            mbarrier_wait(pipeline.full + stage, phase);
            multiply(stage);
            wgmma_wait<1>();
            if (before >= 0) release(before);
            before = stage;
            if (++stage == Config::stages) stage = 0, phase ^= 1;
        }
        wgmma_wait<0>();
        release(before);
        promote();
    }
}
