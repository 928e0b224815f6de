// Threads as fibers: a block's threads take turns on one CPU thread, each until it waits for others or ends.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "internal.h"

// What a kernel reads as constants; the headers declare them const, so that the compiler reads them once.
emulator::Triple threadIdx, blockIdx, blockDim, gridDim;
extern const int warpSize = 32;

namespace emulator {

Thread threads[MOST_THREADS];
int thread_count, current;
bool in_kernel;
uint32_t last_code;

struct Barrier {
    int arrived, expected;
    long generation;
    const void *code;  // where the first thread of this generation waits
    bool two_places;
};

namespace {

struct WarpBarrier : Barrier {
    unsigned waiting, passed;  // lanes, as `expected`; passed: those that waited elsewhere meanwhile
};

void *scheduler_stack;
Grid running;
Barrier block_barrier, named_barriers[16], group_barriers[8];
WarpBarrier warp_barriers[32][32];  // by warp
// By warp: the barriers where lanes wait, and the lanes that exchange values.
unsigned ended_lanes[32], waited_at[32], giving[32];
bool progress;
unsigned long long registers[32][32];
const void *givers[32][32];  // the calls that gave them

// Save the callee's registers on this stack, and continue on another one.
extern "C" void ece408_switch(void **save, void *load);
asm(R"(
.text
.globl ece408_switch
ece408_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");

void set_thread() {
    const unsigned thread = current;
    threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
}

void switch_to_scheduler() {
    ece408_switch(&threads[current].stack_pointer, scheduler_stack);
    set_thread();
}

bool complete_barrier(Barrier &barrier) {
    barrier.arrived = 0, barrier.generation++, barrier.code = nullptr, barrier.two_places = false;
    return progress = true;
}

void wait_at(Barrier &barrier, const void *code) {
    Thread &thread = threads[current];
    thread.waits = &barrier, thread.generation = barrier.generation, thread.code = code;
    while (barrier.generation == thread.generation) switch_to_scheduler();
    thread.waits = nullptr;
}

// Complete the block's barrier if all threads that have not ended wait there.
void check_block_barrier() {
    int alive = 0;
    for (int i = 0; i < thread_count; i++) alive += !threads[i].finished;
    if (!block_barrier.arrived || block_barrier.arrived < alive) return;
    if (alive < thread_count) {
        const std::string text = std::to_string(alive) + " of the block's " + std::to_string(thread_count) +
                                 " threads reach this __syncthreads(); the others have ended";
        report("barrier", text, block_barrier.code);
    }
    order_all();
    complete_barrier(block_barrier);
}

void check_warp_barriers(int warp) {
    for (unsigned left = waited_at[warp]; left; left &= left - 1) {
        WarpBarrier &barrier = warp_barriers[warp][__builtin_ctz(left)];
        if (barrier.expected & ~ended_lanes[warp] & ~barrier.waiting) continue;
        if (barrier.expected & ~barrier.waiting & barrier.passed)
            report("barrier", "lanes of one warp wait with different masks", barrier.code);
        barrier.waiting = 0, waited_at[warp] &= ~(left & -left);
        complete_barrier(barrier);
    }
}

// The one where lanes wait with this mask, or a free one; a warp has one per lane.
WarpBarrier &warp_barrier_of(unsigned mask) {
    WarpBarrier *const all = warp_barriers[current / 32];
    const unsigned waited = waited_at[current / 32];
    for (unsigned left = waited; left; left &= left - 1)
        if (all[__builtin_ctz(left)].expected == int(mask)) return all[__builtin_ctz(left)];
    const int first = mask ? __builtin_ctz(mask) : current % 32;
    return all[waited >> first & 1 ? __builtin_ctz(~waited) : first];
}

// The lanes of the mask wait for one another. A lane that has ended counts as arrived, as on a GPU, but not where it has
// waited elsewhere meanwhile.
void warp_barrier(unsigned mask, const void *code) {
    const int warp = current / 32;
    const unsigned lane = 1u << current % 32;
    mask &= lanes_of_warp();
    WarpBarrier &barrier = warp_barrier_of(mask);
    if (!(mask & lane)) report("barrier", "the mask lacks the lane that calls", code);
    for (unsigned left = waited_at[warp]; left; left &= left - 1)
        warp_barriers[warp][__builtin_ctz(left)].passed |= lane;
    if (!barrier.waiting) barrier.passed = 0;
    barrier.expected = mask;
    barrier.waiting |= lane;
    waited_at[warp] |= 1u << (&barrier - warp_barriers[warp]);
    if (!barrier.code) barrier.code = code;
    const long mine = barrier.generation;
    check_warp_barriers(warp);
    if (barrier.generation == mine) wait_at(barrier, code);
}

void count_at(Barrier &barrier, int expected, const void *code, bool waits = true) {
    const long mine = barrier.generation;
    if (!barrier.code) barrier.code = code;
    if (++barrier.arrived == expected) complete_barrier(barrier);
    else if (waits && barrier.generation == mine) wait_at(barrier, code);
}

void start() {
    set_thread();
    in_kernel = true;
    running.call(running.kernel);
    in_kernel = false;
    threads[current].finished = true;
    ended_lanes[current / 32] |= 1u << current % 32;
    progress = true;
    check_block_barrier();
    check_warp_barriers(current / 32);
    for (;;) switch_to_scheduler();
}

void prepare(Thread &thread) {
    if (!thread.stack) {
        void *const memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) stop("crash", "no memory for the threads' stacks", running.code);
        mprotect(memory, 4096, PROT_NONE);
        thread.stack = uintptr_t(memory);
    }
    void **top = reinterpret_cast<void **>(thread.stack + STACK_BYTES) - 1;
    top[0] = nullptr;  // the return address of start(), which never returns
    *--top = reinterpret_cast<void *>(start);
    thread.stack_pointer = top - 6;
    thread.finished = thread.full = false, thread.waits = nullptr, thread.code = nullptr, thread.depth = 0, thread.previous[0] = 0;
    thread.events.clear(), thread.first_event = 0;
}

[[noreturn]] void deadlock() {
    const Thread *first = nullptr, *second = nullptr;
    int waiting = 0;
    for (int i = 0; i < thread_count; i++) {
        if (threads[i].finished) continue;
        waiting++;
        if (!first) first = &threads[i];
        else if (!second && threads[i].code != first->code) second = &threads[i];
    }
    const std::string text = std::to_string(waiting) + " of the block's " + std::to_string(thread_count) +
                             " threads wait for ever" + (second ? ", in different places" : "");
    stop("deadlock", text.c_str(), first->code, second ? second->code : nullptr);
}

void run_block() {
    for (int i = 0; i < thread_count; i++) prepare(threads[i]);
    for (auto [barriers, n] : {std::pair(&block_barrier, 1), {named_barriers, 16}, {group_barriers, 8}})
        std::fill_n(barriers, n, Barrier{});
    std::fill_n(warp_barriers[0], 32 * 32, WarpBarrier{});
    std::fill_n(ended_lanes, 32, 0), std::fill_n(waited_at, 32, 0), std::fill_n(giving, 32, 0);
    clear_shared(running.shared_bytes);
    if (racing) begin_races(thread_count);
    forget_copies();
    int idle = 0;
    for (bool left = true; left;) {
        left = progress = false;
        for (int warp = 0; 32 * warp < thread_count; warp++) {
            for (current = 32 * warp; current < std::min(32 * warp + 32, thread_count); current++) {
                if (!can_run(threads[current])) continue;
                if (!threads[current].waits && threads[current].full) progress = true;
                threads[current].full = false;
                ece408_switch(&scheduler_stack, threads[current].stack_pointer);
            }
            if (counting) merge(warp);
        }
        for (int i = 0; i < thread_count; i++) left |= !threads[i].finished;
        idle = progress ? 0 : idle + 1;
        if (left && idle > 64) deadlock();
    }
    for (const Barrier &barrier : named_barriers)
        if (barrier.arrived) report("barrier", "the block ends while a barrier waits for more threads", barrier.code);
    if (counting) end_of_block();
}

}  // namespace

bool can_run(const Thread &thread) {
    return !thread.finished && !(thread.waits && thread.waits->generation == thread.generation);
}

int lane_number() { return current % 32; }

unsigned lanes_of_warp() {
    const int lanes = thread_count - current / 32 * 32;
    return lanes >= 32 ? ~0u : (1u << lanes) - 1;
}

void yield_thread() {
    const InRuntime scope;
    switch_to_scheduler();
}
void made_progress() { progress = true; }

unsigned gather(unsigned mask, unsigned long long value, unsigned long long (&all)[32], const void *code) {
    const InRuntime scope;
    if (!code) code = __builtin_return_address(0);
    const int warp = current / 32;
    registers[warp][current % 32] = value, givers[warp][current % 32] = code;
    giving[warp] |= 1u << current % 32;
    warp_barrier(mask, code);
    std::memcpy(all, registers[warp], sizeof all);
    const unsigned there = mask & lanes_of_warp() & ~ended_lanes[warp], participants = there & giving[warp];
    if (participants != there)
        report("barrier", "lanes of one warp exchange values while others wait at a __syncwarp()", code);
    for (unsigned left = participants; left; left &= left - 1)
        if (const void *const other = givers[warp][__builtin_ctz(left)]; other != code) {
            report("barrier", "lanes of one warp exchange values in two different places", code, other);
            break;
        }
    warp_barrier(mask, code);
    giving[warp] &= ~(1u << current % 32);
    return participants;
}

// Lanes that come to one call in the same round of turns are together; those on a branch's other side call elsewhere. A
// function's one call serves all of its callers, so the blocks from which these call it are part of the place.
unsigned active_lanes(const void *code) {
    const InRuntime scope;
    static unsigned arrived[32], together[MOST_THREADS];
    static uintptr_t places[MOST_THREADS];
    const int warp = current / 32, first = 32 * warp, behind = std::min(first + 32, thread_count);
    const Thread &thread = threads[current];
    uintptr_t place = uintptr_t(code);
    for (int i = 0; i < thread.depth; i++) place = place * 0x100000001b3 + thread.previous[i];
    places[current] = place;
    arrived[warp] |= 1u << current % 32;
    do switch_to_scheduler();
    while (std::any_of(threads + first, threads + behind, [](const Thread &each) { return each.full; }));
    if (arrived[warp] >> current % 32 & 1) {
        unsigned lanes = 0;
        for (int i = first; i < behind; i++)
            if ((arrived[warp] >> i % 32 & 1) && places[i] == place) lanes |= 1u << i % 32;
        for (int i = first; i < behind; i++)
            if (lanes >> i % 32 & 1) together[i] = lanes;
        arrived[warp] &= ~lanes;
    }
    progress = true;
    return together[current];
}

void named_barrier(int number, int count, bool waits) {
    const InRuntime scope;
    const void *const code = __builtin_return_address(0);
    if (number < 0 || number >= 16) stop("barrier", "the number of a barrier that is not 0 to 15", code);
    if (count <= 0 || count % 32) stop("barrier", "a barrier of a number of threads that is no multiple of 32", code);
    Barrier &barrier = named_barriers[number];
    if (barrier.arrived && barrier.expected != count)
        stop("barrier", "threads come to one barrier with different numbers of threads", code);
    barrier.expected = count;
    Ordering *const order = ordering_of(&barrier);
    release(order);
    if (barrier.arrived + 1 == count) complete(order);
    count_at(barrier, count, code, waits);
    if (waits) acquire(order);
}

void group_barrier(int group) {
    const InRuntime scope;
    count_at(group_barriers[group], 128, __builtin_return_address(0));
}

void run_grid(const Grid &grid) {
    running = grid;
    gridDim = grid.grid, blockDim = grid.block;
    thread_count = grid.block.x * grid.block.y * grid.block.z;
    begin_launch();
    begin_grid_races();
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) run_block();
    check_overwrites();
    end_launch(grid);
}

bool beyond_bounds(unsigned most_threads, unsigned, unsigned) {
    const unsigned count = thread_count;
    if (count > most_threads && !current && !(blockIdx.x | blockIdx.y | blockIdx.z))
        report("call", "the launch fails: a block of " + std::to_string(count) + " threads, and __launch_bounds__ allows " +
                           std::to_string(most_threads), running.code);
    return count > most_threads;
}

// A turn ends early when its events fill the buffer, so that the other lanes of the warp can catch up.
void end_turn() {
    threads[current].full = true;
    switch_to_scheduler();
}

}  // namespace emulator

void __syncthreads() {
    using namespace emulator;
    const InRuntime scope;
    const void *const code = __builtin_return_address(0);
    if (block_barrier.arrived && block_barrier.code != code && !block_barrier.two_places) {
        block_barrier.two_places = true;
        report("barrier", "threads of one block wait at two different __syncthreads()", code, block_barrier.code);
    }
    if (!block_barrier.arrived) block_barrier.code = code;
    block_barrier.arrived++;
    const long mine = block_barrier.generation;
    check_block_barrier();
    if (block_barrier.generation == mine) wait_at(block_barrier, code);
}

void __syncwarp(unsigned mask) {
    using namespace emulator;
    const InRuntime scope;
    mask &= lanes_of_warp();
    const WarpBarrier &barrier = warp_barrier_of(mask);
    Ordering *const order = ordering_of(&barrier);
    release(order);
    if (!(mask & ~ended_lanes[current / 32] & ~barrier.waiting & ~(1u << current % 32))) complete(order);
    warp_barrier(mask, __builtin_return_address(0));
    acquire(order);
}
