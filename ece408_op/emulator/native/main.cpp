// The program's life: read the job, make its calls, each within its time, write what came out and what was found.
//
// usage: PROGRAM JOB SECONDS. The job: the number of calls as int64; for each call the number of buffers; of each its name
// in 32 bytes, its bytes, the alignment of its address, whether it is an output; the number of parameters and these, all
// int64; then the contents, one after another. Call N writes its outputs in order into output-N, then report-N:
// lines of words between tabs.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <string>
#include <sys/time.h>
#include <unistd.h>

#include "internal.h"

extern emulator::Triple blockIdx;
extern "C" void ece408_run(void **buffers, const long long *parameters);
extern "C" __attribute__((weak)) const int ece408_counting, ece408_racing;

namespace emulator {

bool counting, racing;
void check_surroundings();

namespace {

struct Finding {
    std::string kind, message;
    uint32_t code, other;
    long times;
};
std::vector<Finding> findings;
struct LaunchShape {
    Grid grid;
    size_t static_shared;
};
std::vector<LaunchShape> launches;  // the first of each kernel with a block of that size
std::vector<std::pair<void *, size_t>> outputs;
int call;    // its number
bool ended;  // whether it is the last one, since it stopped the run
alignas(16) char signal_stack[64 * 1024];

FILE *open_next(const char *name) { return std::fopen((name + std::to_string(call)).c_str(), "wb"); }

void write_all() {
    std::fflush(stdout);
    if (FILE *to = open_next("output-")) {
        for (const auto &[address, bytes] : outputs) std::fwrite(address, 1, bytes, to);
        std::fclose(to);
    }
    FILE *const to = open_next("report-");
    if (!to) return;
    for (const Finding &each : findings)
        std::fprintf(to, "finding\t%s\t%s\t%u\t%u\t%ld\n", each.kind.c_str(), each.message.c_str(), each.code, each.other,
                     each.times);
    for (const auto &[grid, static_shared] : launches)
        std::fprintf(to, "launch\t%s\t%u\t%u\t%u\t%u\t%u\t%u\t%zu\t%zu\n", grid.name, grid.grid.x, grid.grid.y, grid.grid.z,
                     grid.block.x, grid.block.y, grid.block.z, static_shared, grid.shared_bytes);
    write_counters(to);
    if (ended) std::fprintf(to, "ended\n");
    std::fclose(to);
}

void on_signal(int number) {
    static bool again;
    const void *const code = address_of(last_code);
    if (again) _exit(113);  // _run.py knows the code
    again = true;
    static std::string late;
    const size_t done = (size_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    late = "it runs longer than its time limit: an endless loop?";
    if (done && blockIdx.z < gridDim.z)
        late = "it runs longer than its time limit, with " + std::to_string(done) + " of " +
               std::to_string(size_t(gridDim.x) * gridDim.y * gridDim.z) + " blocks done: try a smaller layer";
    const char *const message = number == SIGALRM ? late.c_str()
                                : number == SIGFPE ? "a division by zero"
                                : number == SIGABRT ? "an assertion failed, abort() or __trap() was called, or the host's "
                                                      "code has overwritten memory that is not its own"
                                                    : "it uses memory that does not exist";
    stop(number == SIGALRM ? "time" : "crash", message, code);
}

int64_t number(FILE *from) {
    int64_t value = 0;
    if (std::fread(&value, 8, 1, from) != 1) _exit(2);
    return value;
}

}  // namespace

void report(const char *kind, const char *message, const void *code, const void *other) {
    const uint32_t here = uintptr_t(code), there = uintptr_t(other);
    for (Finding &each : findings)
        if (each.kind == kind && each.code == here && (each.other == there || each.kind == "race")) {
            each.times++;
            return;
        }
    if (findings.size() >= 100) return;
    findings.push_back({kind, message, here, there, 1});
    for (char &letter : findings.back().message)
        if ((unsigned char)letter < ' ') letter = ' ';
}

void end_launch(const Grid &now) {
    const size_t bytes = used_shared();
    for (const auto &[grid, static_shared] : launches)
        if (!std::strcmp(grid.name, now.name) && !std::memcmp(&grid.block, &now.block, sizeof now.block) &&
            grid.shared_bytes == now.shared_bytes && static_shared == bytes)
            return;
    if (launches.size() < 100) launches.push_back({now, bytes});
    const auto limit = [&](size_t has, size_t most, const char *owner, const char *what) {
        const std::string text = owner + std::to_string(has) + " bytes of " + what + "; at most " + std::to_string(most) + " compile";
        if (has > most) report("call", text, now.code);
    };
    limit(bytes, MOST_STATIC_SHARED, "the kernel has ", "static shared memory");
    limit(constant_bytes(), MOST_CONSTANT, "the file has ", "__constant__ variables");
}

void stop(const char *kind, const char *message, const void *code, const void *other) {
    in_kernel = false;
    report(kind, message, code, other);
    if (!counting) check_surroundings();
    ended = true;
    write_all();
    _exit(0);
}

double milliseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

// End the run where it takes longer; 0 ends the limit.
void limit_time(double seconds) {
    itimerval timer{};
    timer.it_value = {time_t(seconds), suseconds_t((seconds - time_t(seconds)) * 1e6)};
    setitimer(ITIMER_REAL, &timer, nullptr);
}

void run_call(FILE *job, double seconds) {
    struct Buffer {
        char name[32];
        int64_t bytes, alignment, output;
    };
    std::vector<Buffer> all(number(job));
    if (!all.empty() && std::fread(all.data(), sizeof(Buffer), all.size(), job) != all.size()) _exit(2);
    std::vector<long long> parameters(number(job));
    for (long long &each : parameters) each = number(job);
    std::vector<void *> buffers;
    for (const Buffer &each : all) {
        void *const address = device_malloc(each.bytes, false, each.alignment);
        if (!address || std::fread(address, 1, each.bytes, job) != size_t(each.bytes)) _exit(2);
        if (each.output) outputs.push_back({address, each.bytes});
        name_allocation(address, each.name, !each.output);
        buffers.push_back(address);
    }
    buffers.push_back(nullptr);
    limit_time(seconds);
    try {
        streams_in_turn = !parameters.empty() && parameters[0] % 2 == 0;  // with an even number of images
        ece408_run(buffers.data(), parameters.data());
    } catch (const std::exception &error) {
        report("error", error.what(), address_of(last_code));
    }
    finish_streams();  // also after an error: the next call has other buffers
    limit_time(0);
    if (!counting) check_surroundings();
    write_all();
    findings.clear(), launches.clear(), outputs.clear(), forget_counters();
    for (void *const each : buffers) device_free(each);
}

}  // namespace emulator

int main(int count, char **words) {
    using namespace emulator;
    FILE *const job = count == 3 ? std::fopen(words[1], "rb") : nullptr;
    if (!job) return 2;
    counting = &ece408_counting && ece408_counting, racing = &ece408_racing && ece408_racing;
    stack_t stack{};
    stack.ss_sp = signal_stack, stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action{};
    action.sa_handler = on_signal, action.sa_flags = SA_ONSTACK | SA_NODEFER;
    for (const int each : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGILL, SIGALRM}) sigaction(each, &action, nullptr);
    std::atexit([] { stop("crash", "it ended the process, by exit()", address_of(last_code)); });
    const int64_t calls = number(job);
    for (; call < calls; call++) run_call(job, std::atof(words[2]));
    _exit(0);
}
