// Sums in two launches, without atomics, so that each sum has one order. The first writes F64 sums of parts, and
// `finish` adds up the parts of each sum, a warp for each.
//
// `sum_runs` is for channels whose elements follow each other: a block has a part of one channel. A thread adds up at
// most 256 elements in F32 (F64 for F64) before its sum moves on to F64, so that a long sum has hardly more error than
// a short one. The block joins its threads' sums in F64.
//
// `sum_columns` is for matrices whose columns are summed, and uses `column_sums` of common.cuh. A thread has a column,
// or a pack of them where channels and addresses allow it, and at most 64 rows are added up in F32.
//
// Which elements a part has depends on shape, dtype and alignment, not on the GPU. A 16-bit result is rounded through
// F32, as in cast.cu.

constexpr size_t RUN = 8192;

// A tensor (outer, channels, inner), and the sums of each channel, for an inner of some length. Part
// p of channel c is block p * channels + c, and has every parts-th run of at most RUN elements.
template <class T>
DEVICE void sum_runs(double *y, const T *x, size_t outer, size_t channels, size_t inner, size_t parts) {
    constexpr int V = PACK<T>;
    size_t channel = blockIdx.x % channels, part = blockIdx.x / channels;
    size_t each = (inner + RUN - 1) / RUN, runs = outer * each;
    bool packed = aligned(x) && inner % V == 0;
    double total = 0;
    Acc<T> sum = 0;
    int held = 0;
    for (size_t run = part; run < runs; run += parts) {
        size_t first = run % each * RUN, left = inner - first;
        const T *from = x + (run / each * channels + channel) * inner + first;
        along<V>(left < RUN ? left : RUN, packed, threadIdx.x, blockDim.x, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            Acc<T> u[N];
            read(from + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) sum += u[k];
        });
        if (++held == 8) total += sum, sum = 0, held = 0;
    }
    total = block_reduce<Sum>(total + sum, 0.0);
    if (threadIdx.x == 0) y[blockIdx.x] = total;
}

// A matrix (rows, columns), and the sums of each column.
template <class T, int V>
DEVICE void sum_columns(double *y, const T *x, size_t rows, size_t columns, size_t parts, size_t tiles) {
    column_sums<1, V, Acc<T>>(y, rows, columns, parts, tiles, [&](size_t row, size_t column, Acc<T>(&t)[1][V]) {
        read(x + row * columns + column, t[0]);
    });
}

// Of parts (parts, channels, inner), the sum of each channel: a warp each.
template <class O> DEVICE void finish(O *y, const double *parts, size_t count, size_t channels, size_t inner) {
    size_t channel = global_thread() / 32;
    if (channel >= channels) return;
    double sum = 0;
    for (size_t i = threadIdx.x % 32; i < count * inner; i += 32) {
        sum += parts[(i / inner * channels + channel) * inner + i % inner];
    }
    sum = warp_reduce<Sum>(sum);
    if (threadIdx.x % 32 == 0) narrow(sum, y[channel]);
}

#define REDUCE(t, T)                                                                              \
    ROW_KERNEL sum_runs_##t(double *y, const T *x, size_t outer, size_t channels, size_t inner,   \
                            size_t parts) {                                                       \
        sum_runs(y, x, outer, channels, inner, parts);                                            \
    }                                                                                             \
    ROW_KERNEL sum_columns_##t(double *y, const T *x, size_t rows, size_t columns, size_t parts,  \
                               size_t tiles, int packed) {                                        \
        if (packed) {                                                                             \
            sum_columns<T, PACK<T>>(y, x, rows, columns, parts, tiles);                           \
        } else {                                                                                  \
            sum_columns<T, 1>(y, x, rows, columns, parts, tiles);                                 \
        }                                                                                         \
    }                                                                                             \
    ROW_KERNEL finish_##t(T *y, const double *parts, size_t count, size_t channels, size_t inner) { \
        finish(y, parts, count, channels, inner);                                                 \
    }
EACH_FLOAT(REDUCE)
