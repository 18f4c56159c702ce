// Atomic operations: plain ones, for no two threads run at once. One that may be a spin's gives way.
#pragma once

// Said to whoever looks for races, which does not see what they do with plain reads and writes.
#define EMULATED_UNWATCHED inline __attribute__((noinline, no_sanitize("thread")))

#define EMULATED_ATOMIC(NAME, TYPE, EXPRESSION)                                                                        \
    EMULATED_UNWATCHED TYPE NAME(TYPE *address, TYPE value) {                                                          \
        emulated::emulated_atomic(address, sizeof(TYPE));                                                              \
        volatile TYPE *at = address;                                                                                   \
        TYPE old = *at;                                                                                                \
        *at = EXPRESSION;                                                                                              \
        return old;                                                                                                    \
    }                                                                                                                  \
    inline TYPE NAME##_block(TYPE *address, TYPE value) { return NAME(address, value); }                               \
    inline TYPE NAME##_system(TYPE *address, TYPE value) { return NAME(address, value); }

#define EMULATED_ATOMICS(TYPE)                                                                                         \
    EMULATED_ATOMIC(atomicAnd, TYPE, old &value)                                                                       \
    EMULATED_ATOMIC(atomicOr, TYPE, old | value)                                                                       \
    EMULATED_ATOMIC(atomicXor, TYPE, old ^ value)                                                                      \
    EMULATED_ATOMIC(atomicMin, TYPE, old < value ? old : value)                                                        \
    EMULATED_ATOMIC(atomicMax, TYPE, old > value ? old : value)

EMULATED_ATOMICS(int)
EMULATED_ATOMICS(unsigned)
EMULATED_ATOMICS(long long)
EMULATED_ATOMICS(unsigned long long)
EMULATED_ATOMIC(atomicAdd, int, static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value)))
EMULATED_ATOMIC(atomicAdd, unsigned, old + value)
EMULATED_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATED_ATOMIC(atomicAdd, float, old + value)
EMULATED_ATOMIC(atomicAdd, double, old + value)
EMULATED_ATOMIC(atomicSub, int, static_cast<int>(static_cast<unsigned>(old) - static_cast<unsigned>(value)))
EMULATED_ATOMIC(atomicSub, unsigned, old - value)
EMULATED_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATED_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)
#undef EMULATED_ATOMICS

#define EMULATED_EXCHANGE(TYPE)                                                                                        \
    EMULATED_UNWATCHED TYPE atomicExch(TYPE *address, TYPE value) {                                                    \
        emulated::emulated_atomic(address, sizeof(TYPE));                                                              \
        volatile TYPE *at = address;                                                                                   \
        TYPE old = *at;                                                                                                \
        *at = value;                                                                                                   \
        if (old == value)                                                                                              \
            emulated::emulated_yield();                                                                                \
        return old;                                                                                                    \
    }

EMULATED_EXCHANGE(int)
EMULATED_EXCHANGE(unsigned)
EMULATED_EXCHANGE(unsigned long long)
EMULATED_EXCHANGE(float)
#undef EMULATED_EXCHANGE

#define EMULATED_COMPARE(TYPE)                                                                                         \
    EMULATED_UNWATCHED TYPE atomicCAS(TYPE *address, TYPE compare, TYPE value) {                                       \
        emulated::emulated_atomic(address, sizeof(TYPE));                                                              \
        volatile TYPE *at = address;                                                                                   \
        TYPE old = *at;                                                                                                \
        if (old == compare)                                                                                            \
            *at = value;                                                                                               \
        else                                                                                                           \
            emulated::emulated_yield();                                                                                \
        return old;                                                                                                    \
    }

EMULATED_COMPARE(int)
EMULATED_COMPARE(unsigned short)
EMULATED_COMPARE(unsigned)
EMULATED_COMPARE(unsigned long long)
#undef EMULATED_COMPARE
