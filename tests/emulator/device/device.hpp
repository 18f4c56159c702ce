// What CUDA C++ has beyond C++, for kernels compiled by g++. `__global__`, `__shared__`,
// `__launch_bounds__` and `__noinline__` are the compiler's (see ../compiler).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <type_traits>
#include <utility>

#include "abi.hpp"

#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))

constexpr int warpSize = 32;

#undef assert
#define assert(condition)                                                                                              \
    ((condition)                                                                                                       \
         ? void()                                                                                                      \
         : emulated::emulated_fail(emulated::ASSERT, "%s:%d: assertion `%s` failed", __FILE__, __LINE__, #condition))

inline void __trap() { emulated::emulated_fail(emulated::LAUNCH_FAILED, "__trap()"); }
inline void __brkpt() { __trap(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emulated::emulated_yield(); }
inline long long clock64() { return __builtin_ia32_rdtsc(); }
inline long long clock() { return clock64(); }
inline void __prof_trigger(int) {}

#include "vectors.hpp"

inline void __syncthreads() { emulated::emulated_barrier(0); }
inline int __syncthreads_count(int predicate) { return emulated::emulated_barrier(predicate).yes; }
inline int __syncthreads_or(int predicate) { return emulated::emulated_barrier(predicate).yes > 0; }
inline int __syncthreads_and(int predicate) {
    emulated::Votes votes = emulated::emulated_barrier(predicate);
    return votes.yes == votes.threads;
}

#include "warp.hpp"

#include "atomics.hpp"

#include "copies.hpp"

#include "arithmetic.hpp"

#include "halves.hpp"

#include "ptx.hpp"

namespace emulated {

// A kernel's parameters, taken from where a launch points to them.
template <auto Function> struct Thunk;

template <class... Arguments, void (*Function)(Arguments...)> struct Thunk<Function> {
    template <unsigned long... I> static void spread(void **arguments, std::integer_sequence<unsigned long, I...>) {
        Function(*static_cast<std::remove_reference_t<Arguments> *>(arguments[I])...);
    }
    static void call(void **arguments) {
        spread(arguments, std::make_integer_sequence<unsigned long, sizeof...(Arguments)>());
    }
    static constexpr unsigned sizes[sizeof...(Arguments) + 1] = {sizeof(Arguments)...};
    static constexpr Kernel describe(unsigned max_threads) { return {call, sizes, sizeof...(Arguments), max_threads}; }
};

} // namespace emulated
