// Sums and maxima of what ranks sent. `parts` has a piece of `piece` elements from each of `ranks`, one after another.
// Each thread combines some of the first `count` elements of all pieces, in the order of the ranks: the same bits as
// `combine.rs` of the engine on the host.

// The first of equal ones; NaN wins.
struct Largest {
    template <class A> static DEVICE A of(A a, A b) { return b > a || b != b ? b : a; }
};

template <class Op, class T, class O>
DEVICE void combine(O *y, const T *parts, size_t count, size_t piece, size_t ranks) {
    constexpr int V = PACK<T, O>;
    bool packed = aligned(y) && aligned(parts) && piece % V == 0;
    along<V>(count, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> sum[N], next[N];
        read(parts + i, sum);
        for (size_t rank = 1; rank < ranks; rank++) {
            read(parts + rank * piece + i, next);
#pragma unroll
            for (int k = 0; k < N; k++) sum[k] = Op::of(sum[k], next[k]);
        }
        write(y + i, sum);
    });
}

#define COMBINE(t, T, o, O)                                                                        \
    KERNEL combine_sum_##t##_##o(O *y, const T *parts, size_t count, size_t piece, size_t ranks) { \
        combine<Sum>(y, parts, count, piece, ranks);                                               \
    }                                                                                              \
    KERNEL combine_max_##t##_##o(O *y, const T *parts, size_t count, size_t piece, size_t ranks) { \
        combine<Largest>(y, parts, count, piece, ranks);                                           \
    }
EACH_PAIR(COMBINE)

// The sum of integers in 128 bits. What does not fit T is told in `overflow`.
template <class T>
DEVICE void add_integers(T *y, const T *parts, u32 *overflow, size_t count, size_t piece, size_t ranks) {
    for (size_t i = global_thread(); i < count; i += global_threads()) {
        u64 low = 0;
        long long high = 0;
        for (size_t rank = 0; rank < ranks; rank++) {
            long long x = (long long)parts[rank * piece + i];
            low += (u64)x;
            high += (low < (u64)x ? 1 : 0) + (x < 0 ? -1 : 0);
        }
        T sum = (T)low;
        if (high != ((long long)low < 0 ? -1 : 0) || (long long)sum != (long long)low) atomicOr(overflow, 1u);
        y[i] = sum;
    }
}

template <class T> DEVICE void largest_integers(T *y, const T *parts, size_t count, size_t piece, size_t ranks) {
    for (size_t i = global_thread(); i < count; i += global_threads()) {
        T largest = parts[i];
        for (size_t rank = 1; rank < ranks; rank++) largest = Largest::of(largest, parts[rank * piece + i]);
        y[i] = largest;
    }
}

#define COMBINE_INTEGERS(t, T)                                                                                        \
    KERNEL combine_sum_##t(T *y, const T *parts, u32 *overflow, size_t count, size_t piece, size_t ranks) {           \
        add_integers(y, parts, overflow, count, piece, ranks);                                                        \
    }                                                                                                                 \
    KERNEL combine_max_##t(T *y, const T *parts, size_t count, size_t piece, size_t ranks) {                          \
        largest_integers(y, parts, count, piece, ranks);                                                              \
    }
COMBINE_INTEGERS(u8, u8)
COMBINE_INTEGERS(u32, u32)
COMBINE_INTEGERS(i16, short)
COMBINE_INTEGERS(i32, int)
COMBINE_INTEGERS(i64, long long)
