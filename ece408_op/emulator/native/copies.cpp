// cp.async: copies from global to shared memory that take place where their thread waits for them, as late as on a GPU.
//
// A GPU may write any time from the copy's instruction on, so races are looked for at both places.
#include <cstring>
#include <deque>

#include "internal.h"

namespace emulator {

namespace {
struct Copy {
    void *to;
    const void *from;
    int bytes;
    const void *code;
};
typedef std::vector<Copy> Group;
Group open_groups[MOST_THREADS];
std::deque<Group> committed[MOST_THREADS];
}  // namespace

bool copies_used;

void forget_copies() {
    for (int i = 0; copies_used && i < MOST_THREADS; i++) open_groups[i].clear(), committed[i].clear();
    copies_used = false;
}

void copy_later(unsigned to, const void *from, int bytes) {
    const void *const code = __builtin_return_address(0);
    copies_used = true;
    void *const target = shared_pointer(to);
    if (uintptr_t(target) % bytes || uintptr_t(from) % bytes)
        stop("misaligned", "a copy from or to an address that is no multiple of its size", code);
    if (counting || racing) access(from, bytes, READ, code);
    const InRuntime scope;
    // Another address of the same call: one instruction has counters of both spaces.
    count_access(target, bytes, WRITE, static_cast<const char *>(code) - 1);
    if (racing) watch_shared(uintptr_t(target), bytes, current, WRITE, code), forget_shared(uintptr_t(target), bytes);
    open_groups[current].push_back({target, from, bytes, code});
}

void commit_copies() {
    const InRuntime scope;
    committed[current].push_back(std::move(open_groups[current]));
    open_groups[current].clear();
}

void wait_for_copies(size_t pending) {
    const InRuntime scope;
    for (auto &groups = committed[current]; groups.size() > pending; groups.pop_front())
        for (const Copy &copy : groups.front()) {
            const uintptr_t to = uintptr_t(copy.to);
            if ((counting || racing) && !check_shared(to, copy.bytes, WRITE, copy.code)) continue;
            if (racing) watch_shared(to, copy.bytes, current, WRITE, copy.code);
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
}

}  // namespace emulator
