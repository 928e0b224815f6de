// What a GPU's load and store units would do: the accesses of a warp's lanes, joined into requests.
//
// Each lane's events wait in its own queue. A step takes the lanes that are at the lowest place of the program's control
// flow (control_flow.cpp), those deeper in calls first. Accesses of one step are one request.
#include <algorithm>
#include <cstdio>
#include <unordered_map>

#include "internal.h"

namespace emulator {

namespace {

struct Counts {
    Operation operation;
    Space space;
    uint8_t bytes;
    uint8_t alignment = 16;  // of all addresses
    bool found = false;
    uint32_t partner = 0;  // the access behind this one in memory, of the same kind, with no other kind between
    uint32_t hint = 0;     // its number in the list of these accesses
    long requests = 0, sectors = 0, least_sectors = 0;
    // Of shared memory: with accesses of this width, and of 8 and 16 bytes, into which the compiler may join several.
    long wavefronts[3] = {}, least_wavefronts[3] = {};
};
struct Block {
    long entries = 0, divergent = 0;
};

struct Request {
    uint32_t code;
    uint32_t lanes;
    Operation operation;
    uintptr_t address[32];
};

std::unordered_map<uint32_t, Counts> counts;
std::unordered_map<uint32_t, Block> blocks;

struct Warp {
    uint32_t active = 0, last_code = 0;  // of the last basic block
    std::vector<Request> shared;         // requests of one kind in a row
};
Warp warps[32];

int distinct(uintptr_t *values, int n) {
    std::sort(values, values + n);
    return std::unique(values, values + n) - values;
}

// Wavefronts of some of the lanes: the most different words of one bank.
int bank_ways(const Request &request, int bytes, uint32_t lanes) {
    uintptr_t words[128];
    int n = 0;
    for (int lane = 0; lane < 32; lane++)
        if (lanes >> lane & 1)
            for (int i = 0; i < std::max(bytes, 4); i += 4) words[n++] = request.address[lane] / 4 + i / 4;
    n = distinct(words, n);
    int ways[32] = {}, most = 0;
    for (int i = 0; i < n; i++) most = std::max(most, ++ways[words[i] % 32]);
    return most;
}

// Whether lanes next to each other, or two apart, all use the same address: then twice as many lanes share a wavefront.
bool pairs_share(const Request &request, uint32_t lanes) {
    for (const int distance : {1, 2}) {
        bool same = true;
        for (int lane = 0; lane < 32; lane++) {
            const int other = lane ^ distance;
            if ((lanes >> lane & 1) && (lanes >> other & 1)) same &= request.address[lane] == request.address[other];
        }
        if (same) return true;
    }
    return false;
}

int wavefronts(const Request &request, int bytes) {
    if (bytes <= 4) return bank_ways(request, bytes, request.lanes);
    // 8 bytes: two halves of the warp, or the whole; 16 bytes: quarters, or halves.
    int sum = 0;
    const int step = bytes == 8 ? 32 : 16;
    for (int first = 0; first < 32; first += step) {
        const uint32_t mask = (step == 32 ? ~0u : 0xffffu << first), lanes = request.lanes & mask;
        if (!lanes) continue;
        const uint32_t lower = lanes & (step == 32 ? 0xffffu : 0xffu << first);
        if (pairs_share(request, lanes)) sum += bank_ways(request, bytes, lanes);
        else sum += (lower ? bank_ways(request, bytes, lower) : 0) +
                    (lanes & ~lower ? bank_ways(request, bytes, lanes & ~lower) : 0);
    }
    return sum;
}

void count(const Request &request, int bytes, Space space) {
    Counts &mine = counts[request.code];
    mine.operation = request.operation, mine.space = space, mine.bytes = bytes;
    mine.requests++;
    uintptr_t units[64];
    int n = 0, least_alignment = mine.alignment;
    for (int lane = 0; lane < 32; lane++)
        if (request.lanes >> lane & 1) {
            units[n++] = request.address[lane];
            while (request.address[lane] % least_alignment) least_alignment /= 2;
        }
    mine.alignment = least_alignment;
    if (space == Space::GLOBAL || space == Space::PROGRAM) {
        uintptr_t sectors[64];
        int m = 0;
        for (int i = 0; i < n; i++) {
            sectors[m++] = units[i] / 32;
            if ((units[i] + bytes - 1) / 32 != units[i] / 32) sectors[m++] = units[i] / 32 + 1;
        }
        mine.sectors += distinct(sectors, m);
        mine.least_sectors += (distinct(units, n) * bytes + 31) / 32;
    } else if (space == Space::SHARED) {
        const int addresses = distinct(units, n), halves = !!(request.lanes & 0xffff) + !!(request.lanes >> 16);
        for (int i = 0, width = bytes; i < 3 && width <= 16; i++, width *= 2) {
            if (i && mine.alignment < width) break;
            mine.wavefronts[i] += wavefronts(request, width);
            const int full = (addresses * std::max(width, 4) / 4 + 31) / 32;
            mine.least_wavefronts[i] += width == 16 ? std::max(full, halves) : full;
        }
    }
}

// Find, or check, which access of a row is the next in memory for every lane.
void pair(std::vector<Request> &all) {
    for (size_t i = 0; i < all.size(); i++) {
        Counts &mine = counts[all[i].code];
        const auto follows = [&](size_t j) {
            if (all[j].operation != all[i].operation || all[j].lanes != all[i].lanes) return false;
            if (counts[all[j].code].bytes != mine.bytes) return false;
            for (int lane = 0; lane < 32; lane++)
                if ((all[i].lanes >> lane & 1) && all[j].address[lane] != all[i].address[lane] + mine.bytes) return false;
            return true;
        };
        if (!mine.found) {
            mine.found = true;
            for (size_t j = 0; j < all.size() && !mine.partner; j++)
                if (j != i && follows(j)) mine.partner = all[j].code, mine.hint = j;
        } else if (mine.partner && !(mine.hint < all.size() && all[mine.hint].code == mine.partner && follows(mine.hint))) {
            mine.partner = 0;
        }
    }
    all.clear();
}

std::vector<Place> places[MOST_THREADS];  // by depth of calls
bool entered[MOST_THREADS];               // whether the place is that of the next event, a basic block

// Whether an event precedes another one, given the lanes' places.
bool goes_first(const Event &a, const Place &at_a, const Event &b, const Place &at_b) {
    if (a.depth != b.depth) return a.depth > b.depth;
    if (at_a.hash != at_b.hash) return at_a.numbers < at_b.numbers;
    return a.code < b.code;
}

// Take the second half of a vector of 16 bytes, if each of the lanes has it next. Returns the bytes of the request.
int join_halves(const Request &request, int bytes, int first) {
    if (bytes != 8 || request.operation == ATOMIC) return bytes;
    for (int i = 0; i < 32; i++) {
        if (!(request.lanes >> i & 1)) continue;
        const Thread &thread = threads[first + i];
        if (request.address[i] % 16 || thread.first_event == thread.events.size()) return bytes;
        const Event &next = thread.events[thread.first_event];
        if (next.bytes != 8 || next.operation != request.operation || next.address != request.address[i] + 8) return bytes;
    }
    for (int i = 0; i < 32; i++) {
        if (!(request.lanes >> i & 1)) continue;
        Thread &thread = threads[first + i];
        if (++thread.first_event == thread.events.size()) thread.events.clear(), thread.first_event = 0;
    }
    return 16;
}

}  // namespace

void merge(int warp) {
    Warp &state = warps[warp];
    const int first = 32 * warp, last = std::min(first + 32, thread_count);
    order_blocks();
    for (;;) {
        const Event *least = nullptr;
        const Place *place = nullptr;
        for (int i = first; i < last; i++) {
            const Thread &thread = threads[i];
            if (thread.first_event == thread.events.size()) {
                if (can_run(thread)) return;  // what it does next is not known yet
                continue;
            }
            const Event &next = thread.events[thread.first_event];
            std::vector<Place> &calls = places[i];
            if (calls.size() != next.depth + 1u) calls.resize(next.depth + 1);
            if (next.operation == BLOCK && !entered[i]) calls.back().enter(next.code), entered[i] = true;
            if (!least || goes_first(next, calls.back(), *least, *place)) least = &next, place = &calls.back();
        }
        if (!least) break;
        const Event event = *least;
        const uint64_t hash = place->hash;
        Request request{event.code, 0, event.operation, {}};
        for (int i = first; i < last; i++) {
            Thread &thread = threads[i];
            if (thread.first_event == thread.events.size()) continue;
            const Event &next = thread.events[thread.first_event];
            if (next.code != event.code || next.depth != event.depth || places[i].back().hash != hash) continue;
            request.lanes |= 1u << (i - first);
            request.address[i - first] = next.address;
            entered[i] = false;
            if (++thread.first_event == thread.events.size()) thread.events.clear(), thread.first_event = 0;
        }
        if (event.operation == BLOCK) {
            if (state.last_code) {
                Block &before = blocks[state.last_code];
                // Some of the lanes that were together in the last block are not here.
                if ((request.lanes & state.active) && (state.active & ~request.lanes)) before.divergent++;
            }
            blocks[event.code].entries++;
            state.active = request.lanes, state.last_code = event.code;
        } else {
            const int lane = __builtin_ctz(request.lanes), bytes = join_halves(request, event.bytes, first);
            const Space space = space_of(request.address[lane]);
            count(request, bytes, space);
            if (space != Space::SHARED || event.operation == ATOMIC) continue;
            // A compiler keeps the order of loads and stores, and joins no accesses of different iterations.
            const auto ends = [&](const Request &r) { return r.code == event.code || r.operation != event.operation; };
            if (std::any_of(state.shared.begin(), state.shared.end(), ends)) pair(state.shared);
            state.shared.push_back(request);
        }
    }
    pair(state.shared);
}

void end_of_block() {
    for (int i = 0; i < thread_count; i++) places[i].clear(), entered[i] = false;
    for (Warp &warp : warps) warp.active = 0, warp.last_code = 0, warp.shared.clear();
}

void write_counters(FILE *to) {
    // Two or four accesses next to one another, always aligned, are one instruction on a GPU.
    std::unordered_map<uint32_t, int> width;  // of the first of those accesses, in accesses; 0 for the others
    std::vector<uint32_t> codes;
    for (const auto &each : counts) codes.push_back(each.first);
    std::sort(codes.begin(), codes.end());
    for (const int n : {4, 2})
        for (const uint32_t code : codes) {
            const Counts &mine = counts[code];
            if (mine.space != Space::SHARED || width.count(code) || mine.alignment < n * mine.bytes || n * mine.bytes > 16)
                continue;
            uint32_t chain[4] = {code};
            int length = 1;
            while (length < n) {
                const uint32_t next = counts[chain[length - 1]].partner;
                if (!next || width.count(next) || counts[next].requests != mine.requests) break;
                chain[length++] = next;
            }
            if (length < n) continue;
            width[code] = n;
            for (int i = 1; i < n; i++) width[chain[i]] = 0;
        }
    // The numbers are in the order of COUNTED in ../_counters.py.
    for (const uint32_t code : codes) {
        const Counts &mine = counts[code];
        const bool shared = mine.space == Space::SHARED, global = mine.space == Space::GLOBAL || mine.space == Space::PROGRAM;
        if (!shared && !global) continue;
        const int joined = width.count(code) ? width[code] : 1;  // 0: the first of the accesses counts for all
        const long requests = joined ? mine.requests : 0;
        if (mine.operation == ATOMIC)
            std::fprintf(to, "counters\t%u\t0\t0\t%ld\n", code, mine.requests);
        else if (shared)
            std::fprintf(to, "counters\t%u\t0\t0\t0\t0\t0\t%ld\t%ld\t%ld\n", code, requests,
                         joined ? mine.wavefronts[joined / 2] : 0, joined ? mine.least_wavefronts[joined / 2] : 0);
        else
            std::fprintf(to, "counters\t%u\t%ld\t%ld\t0\t%ld\t%ld\n", code, mine.operation == READ ? requests : 0,
                         mine.operation == READ ? 0 : requests, mine.sectors, mine.least_sectors);
    }
    for (const auto &[code, block] : blocks)
        if (block.divergent)
            std::fprintf(to, "counters\t%u\t0\t0\t0\t0\t0\t0\t0\t0\t%ld\t%ld\n", code, block.entries, block.divergent);
}

void forget_counters() { counts.clear(), blocks.clear(); }

}  // namespace emulator
