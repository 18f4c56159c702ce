// Functions of a warp: exchanges among the lanes that a mask names.
#pragma once

namespace emulated {

template <class T> unsigned long long bits_of(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> T from_bits(unsigned long long bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// What lane `source` gave. A lane that is not there, or has ended, gives garbage: so says CUDA.
template <class T> T lane_value(const Lanes &lanes, unsigned source) {
    return from_bits<T>(lanes.present >> source & 1 ? lanes.value[source] : ~0ull);
}

inline void check_width(int width) {
    if (width < 1 || width > 32 || (width & (width - 1)))
        emulated_fail(LAUNCH_FAILED, "a shuffle's width is %d, which is no power of two up to 32", width);
}

template <class T> T shuffle(unsigned mask, T value, int source, int width) {
    check_width(width);
    unsigned first = emulated_lane() & ~(width - 1);
    return lane_value<T>(emulated_exchange(Warp::shuffle, mask, bits_of(value)), first + (source & (width - 1)));
}

template <class T> T shuffle_up(unsigned mask, T value, unsigned delta, int width) {
    check_width(width);
    unsigned lane = emulated_lane(), first = lane & ~(width - 1);
    Lanes lanes = emulated_exchange(Warp::shuffle, mask, bits_of(value));
    return lane - first < delta ? value : lane_value<T>(lanes, lane - delta);
}

template <class T> T shuffle_down(unsigned mask, T value, unsigned delta, int width) {
    check_width(width);
    unsigned lane = emulated_lane(), end = (lane & ~(width - 1)) + width;
    Lanes lanes = emulated_exchange(Warp::shuffle, mask, bits_of(value));
    return lane + delta >= end ? value : lane_value<T>(lanes, lane + delta);
}

template <class T> T shuffle_xor(unsigned mask, T value, int bits, int width) {
    check_width(width);
    unsigned lane = emulated_lane(), end = (lane & ~(width - 1)) + width;
    Lanes lanes = emulated_exchange(Warp::shuffle, mask, bits_of(value));
    return (lane ^ bits) >= end ? value : lane_value<T>(lanes, lane ^ bits);
}

template <class T, class F> T reduce(unsigned mask, T value, F combine) {
    Lanes lanes = emulated_exchange(Warp::reduce, mask, bits_of(value));
    unsigned first = __builtin_ctz(lanes.present);
    T result = from_bits<T>(lanes.value[first]);
    for (unsigned lane = first + 1; lane < 32; lane++)
        if (lanes.present >> lane & 1)
            result = combine(result, from_bits<T>(lanes.value[lane]));
    return result;
}

} // namespace emulated

#define EMULATED_SHUFFLES(TYPE)                                                                                        \
    inline TYPE __shfl_sync(unsigned mask, TYPE value, int source, int width = 32) {                                   \
        return emulated::shuffle(mask, value, source, width);                                                          \
    }                                                                                                                  \
    inline TYPE __shfl_up_sync(unsigned mask, TYPE value, unsigned delta, int width = 32) {                            \
        return emulated::shuffle_up(mask, value, delta, width);                                                        \
    }                                                                                                                  \
    inline TYPE __shfl_down_sync(unsigned mask, TYPE value, unsigned delta, int width = 32) {                          \
        return emulated::shuffle_down(mask, value, delta, width);                                                      \
    }                                                                                                                  \
    inline TYPE __shfl_xor_sync(unsigned mask, TYPE value, int bits, int width = 32) {                                 \
        return emulated::shuffle_xor(mask, value, bits, width);                                                        \
    }

EMULATED_SHUFFLES(int)
EMULATED_SHUFFLES(unsigned)
EMULATED_SHUFFLES(long)
EMULATED_SHUFFLES(unsigned long)
EMULATED_SHUFFLES(long long)
EMULATED_SHUFFLES(unsigned long long)
EMULATED_SHUFFLES(float)
EMULATED_SHUFFLES(double)

inline void __syncwarp(unsigned mask = ~0u) { emulated::emulated_exchange(emulated::Warp::sync, mask, 0); }
inline unsigned __activemask() { return emulated::emulated_active_lanes(); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    emulated::Lanes lanes = emulated::emulated_exchange(emulated::Warp::vote, mask, predicate != 0);
    unsigned votes = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        votes |= (lanes.present >> lane & 1 && lanes.value[lane]) << lane;
    return votes;
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    unsigned long long bits = emulated::bits_of(value);
    emulated::Lanes lanes = emulated::emulated_exchange(emulated::Warp::match, mask, bits);
    unsigned same = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        same |= (lanes.present >> lane & 1 && lanes.value[lane] == bits) << lane;
    return same;
}

template <class T> unsigned __match_all_sync(unsigned mask, T value, int *predicate) {
    unsigned same = __match_any_sync(mask, value), named = mask & emulated::emulated_active_lanes();
    *predicate = same == named;
    return *predicate ? same : 0;
}

#define EMULATED_REDUCE(NAME, TYPE, EXPRESSION)                                                                        \
    inline TYPE __reduce_##NAME##_sync(unsigned mask, TYPE value) {                                                    \
        return emulated::reduce(mask, value, [](TYPE a, TYPE b) -> TYPE { return EXPRESSION; });                       \
    }

EMULATED_REDUCE(add, unsigned, a + b)
EMULATED_REDUCE(add, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
EMULATED_REDUCE(min, unsigned, a < b ? a : b)
EMULATED_REDUCE(min, int, a < b ? a : b)
EMULATED_REDUCE(max, unsigned, a > b ? a : b)
EMULATED_REDUCE(max, int, a > b ? a : b)
EMULATED_REDUCE(and, unsigned, a &b)
EMULATED_REDUCE(or, unsigned, a | b)
EMULATED_REDUCE(xor, unsigned, a ^ b)
#undef EMULATED_REDUCE
