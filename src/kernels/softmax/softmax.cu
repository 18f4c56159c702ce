// Softmax and log-softmax of contiguous rows. A team of threads, a warp or a block, has a row at a time.
//
// Forward reads a row twice and writes it once. First each thread keeps the largest element and the sum of
// exponentials relative to it in one pass (online softmax), and the team joins them. Then it computes the results. Rows
// may have any length, so none is kept in registers or shared memory: of short rows, the second read comes from a
// cache. Backward also has two passes, one for the sum and one for the results. It reads the gradient in both, and
// the result in both for softmax, only in the second for log-softmax.
//
// Elements are widened to F32 (F64 for F64) and rounded once. Forward's sum has that type, in a thread and across
// threads. Backward's has that type in a thread, and is F64 across threads.

template <bool LOG, class T, class O>
DEVICE void softmax(O *y, const T *x, size_t rows, size_t columns, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, O>;
    Team team(size);
    bool packed = aligned(x) && aligned(y) && columns % V == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        const T *from = x + row * columns;
        O *to = y + row * columns;
        LargestAndSum<A> all;
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            A u[decltype(width)::value];
            read(from + i, u);
            all.add(u);
        });
        all.join(team);
        A last = LOG ? (A)log(all.sum) : (A)(1.0 / all.sum);
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(from + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A shifted = u[k] - all.largest;
                u[k] = LOG ? shifted - last : exponential(shifted) * last;
            }
            write(to + i, u);
        });
    }
}

template <bool LOG, class T, class O>
DEVICE void softmax_backward(O *dx, const T *y, const T *grad, size_t rows, size_t columns, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, O>;
    Team team(size);
    bool packed = aligned(y) && aligned(grad) && aligned(dx) && columns % V == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        size_t first = row * columns;
        A part = A(0);
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], g[N];
            read(grad + first + i, g);
            if (!LOG) read(y + first + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) part += LOG ? g[k] : u[k] * g[k];
        });
        A sum = (A)team.reduce<Sum>((double)part, 0.0);
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], g[N];
            read(y + first + i, u);
            read(grad + first + i, g);
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = LOG ? g[k] - exponential(u[k]) * sum : u[k] * (g[k] - sum);
            write(dx + first + i, u);
        });
    }
}

#define SOFTMAX(t, T, o, O)                                                                       \
    ROW_KERNEL softmax_##t##_##o(O *y, const T *x, size_t rows, size_t columns, int team) {       \
        softmax<false>(y, x, rows, columns, team);                                                \
    }                                                                                             \
    ROW_KERNEL log_softmax_##t##_##o(O *y, const T *x, size_t rows, size_t columns, int team) {   \
        softmax<true>(y, x, rows, columns, team);                                                 \
    }                                                                                             \
    ROW_KERNEL log_softmax_backward_##t##_##o(O *dx, const T *y, const T *grad, size_t rows,      \
                                              size_t columns, int team) {                         \
        softmax_backward<true>(dx, y, grad, rows, columns, team);                                 \
    }
#define BACKWARD(t, T)                                                                            \
    ROW_KERNEL softmax_backward_##t##_##t(T *dx, const T *y, const T *grad, size_t rows,          \
                                          size_t columns, int team) {                             \
        softmax_backward<false>(dx, y, grad, rows, columns, team);                                \
    }
EACH_PAIR(SOFTMAX)
EACH_FLOAT(BACKWARD)
