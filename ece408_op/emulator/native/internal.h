// What the files of the runtime share among themselves.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

namespace emulator {

constexpr size_t STACK_BYTES = 256 * 1024, DYNAMIC_SHARED_BYTES = 256 * 1024;
constexpr size_t MOST_STATIC_SHARED = 48 * 1024, MOST_CONSTANT = 64 * 1024;
constexpr int MOST_THREADS = 1024, MOST_DEPTH = 64, EVENTS_PER_TURN = 8192;

// An access or, as BLOCK, the entry into a basic block of the program.
struct Event {
    uint32_t code;  // the return address of the hook; the program lies below 4 GB
    uint16_t depth;  // of calls
    Operation operation;
    uint8_t bytes;
    uintptr_t address;
};

struct Thread {
    void *stack_pointer;
    uintptr_t stack;  // the lowest address
    bool finished, full;
    struct Barrier *waits;  // for this barrier's generation to change
    long generation;
    const void *code;  // where it waits
    uint16_t depth;
    uint32_t previous[MOST_DEPTH];  // by depth of calls: the last basic block
    std::vector<Event> events;
    size_t first_event;
};

extern Thread threads[MOST_THREADS];
extern int thread_count, current;
bool can_run(const Thread &thread);  // it has not ended, and no barrier holds it back
extern bool in_kernel;        // a thread of a kernel runs, not the host's code nor the runtime
extern uint32_t last_code;    // of the last hook

inline const void *address_of(uint32_t code) { return reinterpret_cast<const void *>(uintptr_t(code)); }
inline void report(const char *kind, const std::string &message, const void *code, const void *other = nullptr) {
    report(kind, message.c_str(), code, other);
}

struct InRuntime {
    const bool was;
    InRuntime() : was(in_kernel) { in_kernel = false; }
    ~InRuntime() { in_kernel = was; }
};

// memory.cpp
enum class Space { SHARED, GLOBAL, LOCAL, CONSTANT, PROGRAM, HOST };
Space space_of(uintptr_t address);
bool is_symbol(const void *pointer);  // in a variable of the program
// The last plain write of a word of global memory in a launch; parts of blocks are numbered from launch to launch.
struct GlobalWrite {
    long part = 0, epoch = 0;
    int thread = 0, time = 0;
    uint32_t code = 0;
    uint8_t mask = 0;  // the bytes of the word
};
struct Allocation {
    uintptr_t begin, end;
    bool host_may_use, freed;
    char name[32];
    bool input;  // that kernels only read
    mutable std::vector<GlobalWrite> writes;  // by word, where kernels have written: races.cpp
    uintptr_t filled_begin = UINTPTR_MAX, filled_end = 0;  // around all that copies and cudaMemset have written
};
void note_filled(const void *address, size_t bytes);
void name_allocation(void *address, const char *name, bool input);
const Allocation *allocation_near(uintptr_t address);
void check_global(uintptr_t address, int bytes, Operation operation, const void *code);
void check_program(uintptr_t address, int bytes, Operation operation, const void *code);
uintptr_t shared_offset(uintptr_t address);  // from 0: static shared memory, then dynamic shared memory
void begin_launch();
size_t constant_bytes();  // of all __constant__ variables
size_t used_shared();  // bytes of static shared memory that the launch has used
void clear_shared(size_t dynamic_bytes);
bool check_shared(uintptr_t address, int bytes, Operation operation, const void *code);
void forget_shared(uintptr_t address, int bytes);  // until a copy there is done, it has no value
size_t shared_size();

// hooks.cpp
void count_access(const void *address, int bytes, Operation operation, const void *code);  // without a check

// copies.cpp
void forget_copies();
extern bool copies_used;  // has the block copied by cp.async?

// races.cpp
void begin_grid_races();
void begin_races(int threads);
void order_all();  // every thread has reached one barrier
void watch_shared(uintptr_t address, int bytes, int thread, Operation operation, const void *code);
void watch_global(std::vector<GlobalWrite> &writes, uintptr_t begin, uintptr_t end, uintptr_t address, int bytes,
                  Operation operation, const void *code);  // writes: of [begin, end), by word
bool may_have_value(const Allocation &allocation, uintptr_t address);
void check_overwrites();  // once the last write has happened
void may_receive();  // values that other blocks have written
void may_pass_on();  // values to other blocks
extern bool in_volatile;

// control_flow.cpp: where lanes reconverge after a branch or a loop
void found_edge(uint32_t from, uint32_t to);  // between two basic blocks of one call; from 0: into a function
void order_blocks();  // again, if there are new edges
// Where a lane is: numbers that are compared one after the other.
struct Place {
    std::vector<int> numbers;
    std::vector<std::pair<int, int>> loops;  // that it is in, with its iteration of each
    uint64_t hash = 0;
    void enter(uint32_t block);
};

// counters.cpp
void merge(int warp);
void end_of_block();
void write_counters(struct _IO_FILE *to);
void forget_counters();

// api.cpp
void finish_streams();  // all that the file's own streams have left to do
extern bool streams_in_turn;

// main.cpp
void end_launch(const Grid &grid);
extern bool counting, racing;

}  // namespace emulator
