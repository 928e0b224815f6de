// Where lanes reconverge: the loops of the program's control flow, found from the basic blocks that threads have run.
//
// The blocks of a function get an order in which a loop's blocks are together and the code behind it follows them (F.
// Bourdoncle, Efficient chaotic iteration strategies with widenings, 1993: a weak topological order). A lane's place is a
// list of numbers: the position of its block outside all loops or that of the outermost loop, its iteration, the position in
// there, and so on. Lanes with lower places go first, so all lanes of a warp wait behind a branch or a loop for the last.
#include <algorithm>
#include <unordered_map>

#include "internal.h"

namespace emulator {

namespace {

struct Node {
    uint32_t code;
    std::vector<int> successors;
    std::vector<int> path;   // position, loop, position, loop, ..., position
    int seen, low;           // Tarjan's numbers
    bool waiting;
};

std::vector<Node> nodes;
std::unordered_map<uint32_t, int> number_of;
std::vector<int> entries;
bool changed;

int number(uint32_t code) {
    const auto [at, added] = number_of.try_emplace(code, int(nodes.size()));
    if (added) nodes.push_back({code}), changed = true;
    return at->second;
}

// Strongly connected components of the nodes in `inside`, the last in topological order first.
struct Components {
    std::vector<char> inside;
    int time = 0;
    std::vector<int> stack;
    std::vector<std::vector<int>> found;

    void visit(int v) {
        nodes[v].seen = nodes[v].low = ++time, nodes[v].waiting = true;
        stack.push_back(v);
        for (const int to : nodes[v].successors) {
            if (!inside[to]) continue;
            if (!nodes[to].seen) visit(to), nodes[v].low = std::min(nodes[v].low, nodes[to].low);
            else if (nodes[to].waiting) nodes[v].low = std::min(nodes[v].low, nodes[to].seen);
        }
        if (nodes[v].low != nodes[v].seen) return;
        found.emplace_back();
        int top;
        do {
            top = stack.back(), stack.pop_back();
            nodes[top].waiting = false;
            found.back().push_back(top);
        } while (top != v);
    }
};

// Give the nodes their places inside `prefix`; the head of each loop is where the search entered it.
void place(const std::vector<int> &members, const std::vector<int> &starts, const std::vector<int> &prefix) {
    Components components;
    components.inside.assign(nodes.size(), 0);
    for (const int v : members) components.inside[v] = 1, nodes[v].seen = 0;
    for (const int v : starts)
        if (components.inside[v] && !nodes[v].seen) components.visit(v);
    for (const int v : members)
        if (!nodes[v].seen) components.visit(v);
    int position = 0;
    for (auto each = components.found.rbegin(); each != components.found.rend(); ++each, ++position) {
        const int head = each->back();
        std::vector<int> path = prefix;
        path.push_back(position);
        const auto &out = nodes[head].successors;
        if (each->size() == 1 && std::find(out.begin(), out.end(), head) == out.end()) {
            nodes[head].path = path;
            continue;
        }
        path.push_back(head);
        std::vector<int> rest(each->begin(), each->end() - 1), head_path = path;
        head_path.push_back(-1);
        nodes[head].path = head_path;
        if (!rest.empty()) place(rest, nodes[head].successors, path);
    }
}

}  // namespace

void found_edge(uint32_t from, uint32_t to) {
    static uint64_t last[1024];  // edges that were found before
    const uint64_t edge = uint64_t(from) << 32 | to;
    uint64_t &known = last[(from * 31 + to) % 1024];
    if (known == edge) return;
    known = edge;
    const int target = number(to);
    if (!from) {
        if (std::find(entries.begin(), entries.end(), target) == entries.end()) entries.push_back(target), changed = true;
        return;
    }
    auto &all = nodes[number(from)].successors;
    if (std::find(all.begin(), all.end(), target) == all.end()) all.push_back(target), changed = true;
}

void order_blocks() {
    if (!changed) return;
    changed = false;
    std::vector<int> all(nodes.size());
    for (size_t i = 0; i < all.size(); i++) all[i] = i;
    place(all, entries, {});
}

void Place::enter(uint32_t code) {
    const Node &node = nodes[number_of[code]];
    const std::vector<int> &path = node.path;
    numbers.clear();
    hash = 1469598103934665603u;
    static std::vector<std::pair<int, int>> now;
    now.clear();
    for (size_t i = 0; i < path.size(); i++) {
        int value = path[i];
        if (i % 2) {  // a loop: its head; the lane is in one of its iterations
            const auto old = std::find_if(loops.begin(), loops.end(), [&](const auto &each) { return each.first == path[i]; });
            value = old == loops.end() ? 0 : old->second + (i + 2 == path.size() && path[i + 1] == -1);
            now.push_back({path[i], value});
        }
        numbers.push_back(value);
        hash = (hash ^ uint32_t(value)) * 1099511628211u;
    }
    loops = now;
}

}  // namespace emulator
