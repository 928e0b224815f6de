// Races in shared memory, found as racecheck finds them on a GPU, but on cuda_on_cpu.h's fibers.
//
// g++ -fsanitize=thread calls a function before every access; here those functions are ours. Threads have vector clocks
// (C. Flanagan, S. Freund, FastTrack: efficient and precise dynamic race detection, 2009): a barrier orders what was
// before it with what is behind it, and nothing else does, not even that a warp's lanes exchange values. Two accesses
// of a word that are not in order, one of them a write, are a race.
#pragma once
#include <cstdio>
#include <unordered_map>
#include <vector>

#define UNWATCHED __attribute__((no_sanitize("thread")))

namespace races {

typedef std::vector<int> Clock;  // of every thread, how often it had released when last heard of
struct Access {
    int thread, time;
    const void *code;
};
struct Word {
    Access write = {-1, 0, nullptr};
    std::vector<Access> reads, atomics;  // since then, one a thread
};
enum Kind { READ, WRITE, ATOMIC };  // atomics are in order with one another

static std::vector<Clock> clocks;
static std::unordered_map<uintptr_t, Word> words;
static bool off = true;  // where it is not a kernel that runs
static int found;

struct Pause {
    const bool was;
    UNWATCHED Pause() : was(off) { off = true; }
    UNWATCHED ~Pause() { off = was; }
};

UNWATCHED inline void begin(int threads) {
    clocks.assign(threads, Clock(threads, 0)), words.clear();
    for (int i = 0; i < threads; i++) clocks[i][i] = 1;
}

UNWATCHED inline void join(Clock &to, const Clock &from) {
    if (to.size() < from.size()) to.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); i++)
        if (to[i] < from[i]) to[i] = from[i];
}

// What the thread has done so far comes before what others do once they have acquired that clock.
UNWATCHED inline void release(int thread, Clock &to) {
    join(to, clocks[thread]);
    clocks[thread][thread]++;
}
UNWATCHED inline void acquire(int thread, const Clock &from) { join(clocks[thread], from); }

UNWATCHED inline bool before(const Access &a, int thread) {
    return a.thread == thread || a.time <= clocks[thread][a.thread];
}

UNWATCHED inline bool report(const char *what, const Access &a, int thread, const void *code) {
    std::fprintf(stderr, "a race: %s, thread %d at %p behind thread %d at %p\n", what, thread, code, a.thread, a.code);
    found++;
    return false;
}

UNWATCHED inline bool behind(const char *what, const std::vector<Access> &all, int thread, const void *code) {
    for (const Access &each : all)
        if (!before(each, thread)) return report(what, each, thread, code);
    return true;
}
UNWATCHED inline void put(std::vector<Access> &all, const Access &now) {
    for (Access &each : all)
        if (each.thread == now.thread) return void(each = now);
    all.push_back(now);
}

// Whether the access is in order with those before it.
UNWATCHED inline bool watch(uintptr_t at, int thread, Kind kind, const void *code) {
    Word &word = words[at];
    const Access now = {thread, clocks[thread][thread], code};
    const Access &last = word.write;
    if (last.thread >= 0 && !before(last, thread)) return report("behind a write", last, thread, code);
    if (kind != ATOMIC && !behind("behind an atomic addition", word.atomics, thread, code)) return false;
    if (kind != READ && !behind("a write behind a read", word.reads, thread, code)) return false;
    if (kind == WRITE) word.write = now, word.reads.clear(), word.atomics.clear();
    else put(kind == READ ? word.reads : word.atomics, now);
    return true;
}

}  // namespace races
