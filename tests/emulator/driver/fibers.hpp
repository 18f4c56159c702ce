#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "../device/abi.hpp"

namespace emulated {

// 0xff bytes are a NaN in every floating point format, and no index.
constexpr unsigned char GARBAGE = 0xff;

struct Launch {
    const Kernel *kernel;
    dim3 grid, block;
    unsigned dynamic_shared;
    void **arguments;
};

struct Outcome {
    int error = 0;
    std::string message;
};

// Runs a grid, and says what was wrong with it. One grid at a time: the caller sees to that. A seed
// of 0 is the ascending order of threads and blocks, any other one an order of its own.
Outcome run(const Launch &launch, unsigned long long seed);

// Whether the calling thread runs a kernel.
bool in_kernel();

// Of the block that runs: which of its threads does, and whether an address is on that one's stack.
unsigned current_thread();
bool on_stack(unsigned long address);

// How many threads the block has, and how often all of them have met at a barrier.
unsigned threads();
unsigned barriers();

// All of its shared memory.
std::vector<std::pair<const unsigned char *, size_t>> shared_memory();

// The byte of shared memory with these lowest 18 bits of an address; null where there is none.
const unsigned char *shared_byte(unsigned address);

// The current thread goes on when `products::begun` says so.
void wait_for_warpgroup();

// Ends the launch, from within one of its threads: also from a signal handler.
[[noreturn]] void fail(int error, const std::string &message);

} // namespace emulated
