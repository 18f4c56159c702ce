// Attention's rows of scores, between two matrix products: queries (b, h, t), each with `keys` products. A query sees
// keys 0 to its own number where `causal`.
//
// A team of threads, a warp or a block, has one row at a time, and reads it twice. In forward, the first pass keeps the
// largest score and the sum of exponentials (online softmax), and the second writes the probabilities. Forward saves
// the largest score and one over the sum. From these and the products, backward computes the probabilities again. Its
// first pass sums probability times gradient, and its second writes probabilities and gradients.
//
// A team has finished its first pass before it writes, and a thread reads an element before it overwrites it. So
// results may take the place of products. Products and sums are F32 (F64 for F64), what goes into the next product is
// rounded once, and sums have one order. A query that sees no key gets zeros, not NaN.

struct Query {
    size_t row, number, seen, mask_row;

    DEVICE Query(size_t row, size_t heads, size_t queries, size_t keys, int causal, const Mask &mask)
        : row(row), number(row % queries), seen(causal && number + 1 < keys ? number + 1 : keys),
          mask_row(mask.row(row / queries / heads, row / queries % heads, number)) {}
};

// Probabilities, the largest score, and 1 / sum(exp(scores - largest)): zeros where no key is seen. y may be x.
template <class T, class A>
DEVICE void probabilities(T *y, A *maxima, A *shares, const A *x, const Scores<A> &scores, size_t rows, size_t heads,
                          size_t queries, size_t keys, int causal, int size) {
    constexpr int V = PACK<T, A>;
    Team team(size);
    bool packed = aligned(x) && aligned(y) && keys % V == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        Query query(row, heads, queries, keys, causal, scores.mask);
        LargestAndSum<A> all;
        A derivative;
        along<V>(query.seen, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(x + row * keys + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = scores.of(u[k], query.mask_row, i + k, derivative);
            all.add(u);
        });
        all.join(team);
        bool hidden = all.sum == A(0);
        A share = hidden ? A(0) : A(1) / all.sum, largest = all.largest == -infinity<A>() ? A(0) : all.largest;
        if (team.rank == 0) maxima[row] = largest, shares[row] = share;
        along<V>(keys, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(x + row * keys + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A p = exponential(scores.of(u[k], query.mask_row, i + k, derivative) - largest) * share;
                u[k] = i + k < query.seen ? p : A(0);
            }
            write(y + row * keys + i, u);
        });
    }
}

// From the products again, and the gradients of probabilities: probabilities, and the gradients of the
// products and of the mask. p may be x, and dx may be dp.
template <class T, class A>
DEVICE void derivatives(T *p, T *dx, A *dmask, const A *x, const A *dp, const A *maxima, const A *shares,
                   const Scores<A> &scores, size_t rows, size_t heads, size_t queries, size_t keys, int causal, int size) {
    constexpr int V = PACK<T, A>;
    Team team(size);
    bool packed = aligned(x) && aligned(dp) && aligned(p) && aligned(dx) && aligned(dmask) && keys % V == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        Query query(row, heads, queries, keys, causal, scores.mask);
        A largest = maxima[row], share = shares[row], average = A(0);
        along<V>(query.seen, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], d[N], derivative;
            read(x + row * keys + i, u);
            read(dp + row * keys + i, d);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A score = scores.of(u[k], query.mask_row, i + k, derivative);
                average += i + k < query.seen ? exponential(score - largest) * share * d[k] : A(0);
            }
        });
        average = team.reduce<Sum>(average, A(0));
        along<V>(keys, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], d[N], s[N];
            read(x + row * keys + i, u);
            read(dp + row * keys + i, d);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A p = exponential(scores.of(u[k], query.mask_row, i + k, s[k]) - largest) * share;
                u[k] = i + k < query.seen ? p : A(0);
                d[k] = i + k < query.seen ? u[k] * (d[k] - average) : A(0);
            }
            write(p + row * keys + i, u);
            if (dmask) write(dmask + row * keys + i, d);
#pragma unroll
            for (int k = 0; k < N; k++) d[k] = d[k] * s[k] * scores.scale;
            write(dx + row * keys + i, d);
        });
    }
}

#define SETTINGS double scale, double cap, const void *mask, size_t s0, size_t s1, size_t s2, size_t s3, int kind
#define SCORES(A) {(A)scale, (A)cap, {mask, s0, s1, s2, s3, kind}}
#define SDPA(t, T)                                                                                \
    ROW_KERNEL probabilities_##t(T *y, Acc<T> *maxima, Acc<T> *shares, const Acc<T> *x, SETTINGS, \
                                 size_t rows, size_t heads, size_t queries, size_t keys,          \
                                 int causal, int team) {                                          \
        Scores<Acc<T>> scores = SCORES(Acc<T>);                                                   \
        probabilities(y, maxima, shares, x, scores, rows, heads, queries, keys, causal, team);    \
    }                                                                                             \
    ROW_KERNEL slopes_##t(T *p, T *dx, Acc<T> *dmask, const Acc<T> *x, const Acc<T> *dp,          \
                          const Acc<T> *maxima, const Acc<T> *shares, SETTINGS, size_t rows,      \
                          size_t heads, size_t queries, size_t keys, int causal, int team) {      \
        Scores<Acc<T>> scores = SCORES(Acc<T>);                                                   \
        derivatives(p, dx, dmask, x, dp, maxima, shares, scores, rows, heads, queries, keys, causal,   \
               team);                                                                             \
    }
EACH_FLOAT(SDPA)
