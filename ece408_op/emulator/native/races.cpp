// Races in shared memory, found as racecheck finds them on a GPU, and reads of what is written elsewhere in global memory.
//
// Threads have vector clocks (C. Flanagan, S. Freund, FastTrack: efficient and precise dynamic race detection, 2009): a
// barrier orders what was before it with what is behind it, and nothing else does, not even that a warp's lanes exchange
// values. Two accesses of a word that are not in order, one of them a write, are a race. A barrier of the whole block
// orders everything, so the words start afresh there.
//
// In global memory, a read or an atomic operation after another block's plain write in the same launch is a race, as in a
// sum that several blocks add to by +=: the emulator runs blocks one after another, a GPU side by side. So is a write of
// another value than the one that is there, as by threads beyond a tile's outputs: on a GPU, either may come last. A block
// passes on what it has written by a fence (__threadfence) and then an atomic operation or a volatile write. A block that
// has used an atomic operation or a volatile value may have received all that others have passed on, whatever the address.
#include <algorithm>
#include <cstring>
#include <map>

#include "internal.h"

namespace emulator {

bool in_volatile;

typedef std::vector<int> Clock;  // of every thread, how often it had released when last heard of
struct Ordering {
    Clock pending, opened;
};

namespace {

struct Access {
    int thread, time;
    uint32_t code;
    uint8_t mask;  // the bytes of the word
};
struct Word {
    long epoch = 0;
    std::vector<Access> accesses[3];  // by operation
};

std::vector<Clock> clocks;
std::vector<Word> words;
std::map<const void *, Ordering> orderings;
long epoch;
// A block's parts end with its fences. Of all launches: this part, the first ones of this block and of this launch, the
// last one that ended with a fence, and the first one of this block that has not been passed on.
long part, block_part, launch_part, fenced_part, kept_part;
std::vector<bool> passed_on;  // by part of this launch
bool receives;  // other blocks may have passed values on to this one
constexpr uint8_t VOLATILE = 16;  // in the mask of a write, behind the bytes
constexpr size_t MOST_WATCHED = size_t(64) << 20;  // bytes of an allocation
// A write over another's, which has not happened yet.
struct Overwrite {
    uintptr_t word;
    unsigned char old[4];
    uint8_t mask;
    const char *message;
    const void *code, *other;
};
std::vector<Overwrite> overwrites;

bool before(const Access &a, int thread) { return a.thread == thread || a.time <= clocks[thread][a.thread]; }

void join(Clock &to, const Clock &from) {
    if (to.size() < from.size()) to.resize(from.size(), 0);
    for (size_t i = 0; i < from.size(); i++)
        if (to[i] < from[i]) to[i] = from[i];
}

// Call `visit(word, mask)` for each word of 4 bytes of an access, with the bytes of the word that it has.
template <typename Visit>
void each_word(uintptr_t begin, int bytes, const Visit &visit) {
    for (uintptr_t at = begin; at < begin + bytes; at = (at / 4 + 1) * 4) {
        uint8_t mask = 0;
        for (uintptr_t i = at; i < begin + bytes && i / 4 == at / 4; i++) mask |= 1 << i % 4;
        visit(at / 4, mask);
    }
}

const char *message_for(Operation earlier, Operation now) {
    if (earlier == ATOMIC) return "an access and an atomic operation, with no barrier between";
    if (earlier == READ) return "one thread writes what another reads, with no barrier between";
    return now == READ ? "one thread reads what another writes, with no barrier between"
                       : "two threads write the same element, with no barrier between";
}

// Whether an earlier access of the word is not in order with one that is now; it is reported then.
bool found_race(const Word &word, const Access &now, Operation operation, const void *code) {
    for (const Operation earlier : {WRITE, ATOMIC, READ}) {
        if (earlier == operation && operation != WRITE) continue;
        for (const Access &each : word.accesses[earlier])
            if ((each.mask & now.mask) && !before(each, now.thread)) {
                report("race", message_for(earlier, operation), code, address_of(each.code));
                return true;
            }
    }
    return false;
}

}  // namespace

void begin_grid_races() { launch_part = part + 1, passed_on.clear(); }

static void begin_part() { part++, passed_on.push_back(false); }

void begin_races(int count) {
    begin_part();
    block_part = kept_part = part, fenced_part = part - 1;
    receives = false;
    clocks.assign(count, Clock(count, 0));
    for (int i = 0; i < count; i++) clocks[i][i] = 1;
    orderings.clear();
    epoch++;
    words.resize((shared_size() + 3) / 4);
}

void order_all() { epoch++; }

Ordering *ordering_of(const void *object) { return racing ? &orderings[object] : nullptr; }

void release(Ordering *to) {
    if (!racing) return;
    join(to->pending, clocks[current]);
    clocks[current][current]++;
}
void complete(Ordering *ordering) {
    if (racing) join(ordering->opened, ordering->pending), ordering->pending.clear();
}
void acquire(Ordering *from) {
    if (racing) join(clocks[current], from->opened);
}

void watch_shared(uintptr_t address, int bytes, int thread, Operation operation, const void *code) {
    const uintptr_t begin = shared_offset(address);
    if (begin + bytes > shared_size()) return;
    each_word(begin, bytes, [&](uintptr_t at, uint8_t mask) {
        Word &word = words[at];
        if (word.epoch != epoch)
            for (std::vector<Access> &all : word.accesses) all.clear();
        word.epoch = epoch;
        const Access now = {thread, clocks[thread][thread], uint32_t(uintptr_t(code)), mask};
        if (found_race(word, now, operation, code)) return;
        std::vector<Access> &same = word.accesses[operation];
        const auto covered = [=](const Access &each) { return !(each.mask & ~mask); };
        if (operation == WRITE)  // what it covers is part of the past
            for (std::vector<Access> &all : word.accesses)
                all.erase(std::remove_if(all.begin(), all.end(), covered), all.end());
        if (operation != WRITE && !same.empty() && same.back().thread == thread && same.back().mask == mask) same.back() = now;
        else same.push_back(now);
    });
}

void fence() {
    if (racing) fenced_part = part, begin_part();
}
void may_receive() { receives = true; }
void may_pass_on() {
    for (; racing && kept_part <= fenced_part; kept_part++) passed_on[kept_part - launch_part] = true;
}

void check_overwrites() {
    for (const Overwrite &each : overwrites)
        for (int i = 0; i < 4; i++)
            if ((each.mask & 1 << i) && reinterpret_cast<const unsigned char *>(each.word)[i] != each.old[i]) {
                report("race", each.message, each.code, each.other);
                break;
            }
    overwrites.clear();
}

void watch_global(std::vector<GlobalWrite> &writes, uintptr_t begin, uintptr_t end, uintptr_t address, int bytes,
                  Operation operation, const void *code) {
    if (operation == WRITE && writes.empty() && end - begin <= MOST_WATCHED) writes.resize((end - begin + 3) / 4);
    if (writes.empty()) return;
    each_word(address - begin, bytes, [&](uintptr_t at, uint8_t mask) {
        GlobalWrite &last = writes[at];
        const bool same_block = last.part >= block_part, same_launch = last.part >= launch_part;
        const bool synchronises = operation == ATOMIC || (operation == READ && in_volatile);
        const bool ordered = !same_launch || (synchronises && (last.mask & VOLATILE)) ||
                             (same_block ? last.epoch != epoch || before({last.thread, last.time, 0, 0}, current)
                                         : receives && (synchronises || passed_on[last.part - launch_part]));
        const void *const other = address_of(last.code);
        const bool race = (last.mask & mask) && !ordered;
        const char *const message =
            operation == WRITE ? (same_block ? "two threads write the same element, with no barrier between"
                                             : "two blocks write the same element, and blocks have no order")
            : same_block ? "one thread uses what another writes, with no barrier between"
            : receives   ? "one block uses what another writes, with no __threadfence() and atomic operation between"
                         : "one block uses what another writes, and blocks have no order: a sum needs atomicAdd";
        if (operation == WRITE) {
            if (race) {
                overwrites.push_back({begin + 4 * at, {}, uint8_t(last.mask & mask), message, code, other});
                std::memcpy(overwrites.back().old, reinterpret_cast<const void *>(overwrites.back().word), 4);
            }
            // A lock that is given back, or a flag behind a fence. Else it is no more than a plain write.
            const bool publishes = in_volatile && (receives || fenced_part >= block_part);
            last = {part, epoch, current, clocks[current][current], uint32_t(uintptr_t(code)),
                    uint8_t(mask | (publishes ? VOLATILE : 0))};
        } else if (race) {
            report("race", message, code, other);
        } else if (operation == ATOMIC && (last.mask & VOLATILE)) {
            last.mask = VOLATILE;  // a lock that is taken, after it was given back
        }
    });
}

// Whether something may have written the word at an address, where the bytes alone do not tell.
bool may_have_value(const Allocation &each, uintptr_t address) {
    if (!racing || each.host_may_use || each.input || each.end - each.begin > MOST_WATCHED) return true;
    if (address >= each.filled_begin && address < each.filled_end) return true;
    return !each.writes.empty() && each.writes[(address - each.begin) / 4].part;
}

}  // namespace emulator
