// What compiled kernels and the driver agree upon. Kernels find the functions in libcuda.so.1, which
// the process has loaded before it loads any kernel.
#pragma once

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// Constants to a kernel, which one thread runs from its start to its end.
#ifndef EMULATED_CONSTANT
#define EMULATED_CONSTANT const
#endif
extern "C" {
extern EMULATED_CONSTANT uint3 threadIdx, blockIdx;
extern EMULATED_CONSTANT dim3 blockDim, gridDim;
extern unsigned char *emulated_dynamic_shared;
}

namespace emulated {

// Says that a thread has come to a warp function, so that lanes that come to different ones are told.
enum class Warp : int { sync, shuffle, vote, match, reduce, matrix };

// The values of all lanes that took part, and whether this one is the first to go on.
struct Lanes {
    unsigned present;
    bool first;
    unsigned long long value[32];
};

// How many threads of the block came to a barrier, and how many with a predicate that is not zero.
struct Votes {
    int threads, yes;
};

// From memory to shared memory, or zeros to there.
struct Copy {
    void *to;
    const void *from;
    unsigned size;
    bool reads;
};

// A product of a warp, `mma.sync`, as one lane gives it and gets it: its registers of a and b, and its sums. Without `value`,
// a and b are TF32, a number a register; else a register has two numbers of 16 bits.
struct WarpProduct {
    unsigned left[4], right[2];
    float sums[4];
    float (*value)(unsigned short);
};

// A product that the threads of a warpgroup begin together, d (64, columns) += a (64, 16) b, as one of them gives it: its
// registers of a and of d, and what describes where b is in shared memory. Where a is there, too, so does `left_matrix`.
struct GroupProduct {
    unsigned long long right, left_matrix; // 0: a is in registers
    unsigned left[4];
    int columns;
    bool turned;
    float (*value)(unsigned short);
    float *results[64];
};

constexpr int ILLEGAL_ADDRESS = 700, ASSERT = 710, MISALIGNED_ADDRESS = 716, LAUNCH_FAILED = 719;

// What the compiler appends for a kernel: `emulated_kernel_NAME`.
struct Kernel {
    void (*call)(void **arguments);
    const unsigned *sizes;
    unsigned count, max_threads;
};

extern "C" {
Votes emulated_barrier(int predicate);
Lanes emulated_exchange(Warp function, unsigned mask, unsigned long long value);
unsigned emulated_active_lanes();
unsigned emulated_lane();
// Another thread of the block may run: called where a thread may be waiting for one.
void emulated_yield();
// A `__shared__` variable comes into scope: filled with garbage, once in each block.
void emulated_shared(void *variable, unsigned long size);
// An atomic operation is about to be done.
void emulated_atomic(const void *address, unsigned long size);
// Shared memory has addresses of 32 bits of its own, for PTX.
unsigned emulated_shared_address(const void *pointer);
void *emulated_shared_pointer(unsigned address);
// Remembers a copy that the thread has begun.
void emulated_begin_copy(const Copy &copy);
// Takes one of them; false where there is none.
bool emulated_next_copy(Copy *copy);
// Adds a product to the sums of all lanes.
void emulated_multiply(WarpProduct &product);
// `fence.proxy.async`: what the thread has written is there for tensor cores once the block has met at a barrier.
void emulated_fence_writes();
// `wgmma.fence`, `wgmma.mma_async`, `wgmma.commit_group`, and `wgmma.wait_group` for all but so many groups.
void emulated_fence_registers();
void emulated_begin_product(const GroupProduct &product);
void emulated_commit_products();
void emulated_wait_for_products(unsigned groups);
// Ends the launch with one of the driver's errors.
[[noreturn]] void emulated_fail(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
}

} // namespace emulated
