// cp.async: copies from global to shared memory that take place where their thread waits for them.
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
bool used;
}  // namespace

void forget_copies() {
    for (int i = 0; used && i < MOST_THREADS; i++) open_groups[i].clear(), committed[i].clear();
    used = false;
}

void copy_later(unsigned to, const void *from, int bytes) {
    const InRuntime scope;
    used = true;
    void *const target = shared_pointer(to);
    if (uintptr_t(target) % bytes || uintptr_t(from) % bytes)
        stop("misaligned", "a copy from or to an address that is no multiple of its size", __builtin_return_address(0));
    open_groups[current].push_back({target, from, bytes, __builtin_return_address(0)});
}

void commit_copies() {
    const InRuntime scope;
    committed[current].push_back(std::move(open_groups[current]));
    open_groups[current].clear();
}

void wait_for_copies(size_t pending) {
    for (auto &groups = committed[current]; groups.size() > pending; groups.pop_front())
        for (const Copy &copy : groups.front()) {
            if (counting || racing) {
                access(copy.from, copy.bytes, READ, copy.code);
                access(copy.to, copy.bytes, WRITE, copy.code);
            }
            std::memcpy(copy.to, copy.from, copy.bytes);
        }
}

}  // namespace emulator
