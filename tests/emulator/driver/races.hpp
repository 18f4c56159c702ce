// Races: two threads touch a byte, one of them writes it, and nothing between orders the two.
//
// Looked for in kernels compiled with EMULATED_GPU_RACES=1, before whose accesses g++ calls functions, as
// it does for its thread sanitizer.
#pragma once
#include <array>
#include <cstdint>

#include "fibers.hpp"

namespace emulated::races {

bool looked_for();

// What a thread knows of how far each lane of its warp has come.
using Clocks = std::array<uint16_t, 32>;

void begin_launch(const void *dynamic_shared, size_t size);
void begin_block();
// All threads have come to a barrier.
void barrier();
// A lane comes to `__syncwarp`, and goes on from it: `met` is what those who came knew. No other warp
// function orders memory.
void arrive(Clocks &met);
void leave(const Clocks &met);
// A `__shared__` variable: of each block its own, at one address.
void add_shared(const void *start, size_t size);

} // namespace emulated::races
