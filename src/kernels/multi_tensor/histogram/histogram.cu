// Counts by exponent, as in cpu.rs: three for each exponent from -300 to 300, then zeros, infinities and
// NaN. A block counts in shared memory and adds its counts to those of all: sums of integers, the same in
// any order.

constexpr int LOWEST = -300, HIGHEST = 300, BINS = (HIGHEST - LOWEST + 1) * 3, COUNTS = BINS + 3;

template <class T> DEVICE void exponents(u64 *counts, const T *x, size_t n, float factor) {
    __shared__ u32 mine[COUNTS];
    for (int i = threadIdx.x; i < COUNTS; i += blockDim.x) mine[i] = 0;
    __syncthreads();
    constexpr u64 ONE = 1ull << 52, TOP = ONE - (1ull << 41); // from 2 - 2^-11 on
    for (size_t i = global_thread(); i < n; i += global_threads()) {
        // As F64 every F32 is normal, so that there is one way to read an exponent.
        double value = (double)(widen(x[i]) * (Acc<T>)factor);
        u64 bits = (u64)__double_as_longlong(value) & 0x7fffffffffffffffull, fraction = bits & (ONE - 1);
        int exponent = (int)(bits >> 52) - 1023, at;
        if (bits == 0) {
            at = BINS;
        } else if (exponent == 1024) {
            at = fraction ? BINS + 2 : BINS + 1;
        } else {
            exponent = exponent < LOWEST ? LOWEST : exponent > HIGHEST ? HIGHEST : exponent;
            at = (exponent - LOWEST) * 3 + (fraction != 0) + (fraction >= TOP);
        }
        atomicAdd(&mine[at], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < COUNTS; i += blockDim.x) {
        if (mine[i]) atomicAdd(&counts[i], (u64)mine[i]);
    }
}

#define EXPONENTS(t, T)                                                                           \
    KERNEL exponents_##t(u64 *counts, const T *x, size_t n, float factor) { exponents(counts, x, n, factor); }
EACH_FLOAT(EXPONENTS)
