// Where lanes reconverge after a branch or a loop: control_flow.cpp.
#pragma once
#include <utility>
#include <vector>

#include "internal.h"

namespace emulator {

// A thread went from one basic block to another of the same call; from 0: into a function.
void found_edge(uint32_t from, uint32_t to);
// Order the blocks again if there are new edges.
void order_blocks();

// Where a lane is: numbers that are compared one after the other.
struct Place {
    std::vector<int> numbers;
    std::vector<std::pair<int, int>> loops;  // that it is in, with its iteration of each
    uint64_t hash = 0;
    void enter(uint32_t block);
};

}  // namespace emulator
