// Where lanes reconverge: the order of a program's basic blocks, found from those that threads have run.
//
// The blocks of a function get an order in which a loop's blocks are together and the code behind it follows them (F.
// Bourdoncle, Efficient chaotic iteration strategies with widenings, 1993: a weak topological order). Lanes in lower blocks
// go first, so all lanes of a warp wait behind a branch or a loop for the last.
#include <algorithm>
#include <unordered_map>

#include "internal.h"

namespace emulator {

namespace {

struct Node {
    uint32_t code;
    std::vector<int> successors;
    int order;
    int seen, low;  // Tarjan's numbers
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

// Number the nodes from `next` on; the head of each loop is where the search entered it.
void place(const std::vector<int> &members, const std::vector<int> &starts, int &next) {
    Components components;
    components.inside.assign(nodes.size(), 0);
    for (const int v : members) components.inside[v] = 1, nodes[v].seen = 0;
    for (const std::vector<int> *some : {&starts, &members})
        for (const int v : *some)
            if (components.inside[v] && !nodes[v].seen) components.visit(v);
    for (auto each = components.found.rbegin(); each != components.found.rend(); ++each) {
        const int head = each->back();
        nodes[head].order = next++;
        if (each->size() > 1) place({each->begin(), each->end() - 1}, nodes[head].successors, next);
    }
}

void add(std::vector<int> &all, int node) {
    if (std::find(all.begin(), all.end(), node) == all.end()) all.push_back(node), changed = true;
}

}  // namespace

int found_edge(uint32_t from, uint32_t to) {
    static struct {
        uint64_t edge;
        int target;
    } last[1024];  // edges that were found before
    const uint64_t edge = uint64_t(from) << 32 | to;
    auto &known = last[(from * 31 + to) % 1024];
    if (known.edge == edge) return known.target;
    const int target = number(to);
    add(from ? nodes[number(from)].successors : entries, target);
    known = {edge, target};
    return target;
}

void order_blocks() {
    if (!changed) return;
    changed = false;
    std::vector<int> all(nodes.size());
    for (size_t i = 0; i < all.size(); i++) all[i] = i;
    int next = 0;
    place(all, entries, next);
}

int order_of(int block) { return nodes[block].order; }

}  // namespace emulator
