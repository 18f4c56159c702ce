// Layer, RMS and group norm: forward, dx, and sums for the gradients of weight and bias.
//
// A team of threads, a warp or a block, has a row at a time. Element i of row r is of channel
// r % groups * (columns / inner) + i / inner. In layer and RMS norm, inner and groups are 1; in group norm, a row is a
// group of a sample. RMS norm is not `centred`: its mean is 0.
//
// Forward reads a row for the mean, then for the distances from it, then to write the result. The shorter formula, the
// mean of squares minus the squared mean, would cancel where the mean is large. The average distance is the part of the
// mean that rounding lost (`rest`). It is saved with the mean and 1 / std, so that backward normalises as forward did.
//
// `norm_backward` reads x and the gradient twice: for two averages of a row, then for dx. Weight and bias need sums
// over rows: `norm_columns` sums columns of parts of the rows, `norm_planes` sums planes. Another launch adds these, in
// F64. Statistics and the averages are in the type of the arithmetic.

struct Channels {
    size_t first, inner;

    DEVICE Channels(size_t row, size_t columns, size_t groups, size_t inner)
        : first(row % groups * (columns / inner)), inner(inner) {}

    // The parameters of the N elements from i on, or `none`.
    template <int N, class P> DEVICE void get(const P *from, size_t i, Acc<P> none, Acc<P> (&p)[N]) const {
        if (!from) {
#pragma unroll
            for (int k = 0; k < N; k++) p[k] = none;
        } else if (inner == 1) {
            read(from + first + i, p);
        } else {
#pragma unroll
            for (int k = 0; k < N; k++) p[k] = widen(from[first + (u32)(i + k) / (u32)inner]);
        }
    }
};

// Whether packs of V start where 16 bytes do, in every row, and in the parameters.
template <int V, class P> DEVICE bool packs(size_t columns, size_t inner, const P *weight, const P *bias) {
    return columns % V == 0 && (inner != 1 || aligned(weight) && aligned(bias));
}

template <class A> struct Normal {
    A mean, rest, inv_std;

    DEVICE A of(A x) const { return ((x - mean) - rest) * inv_std; }
};

template <class T, class P>
DEVICE void norm(T *y, Acc<T> *statistics, const T *x, const P *weight, const P *bias, size_t rows, size_t columns,
                 size_t groups, size_t inner, double eps, int centred, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, P>;
    Team team(size);
    bool packed = aligned(x) && aligned(y) && packs<V>(columns, inner, weight, bias);
    for (size_t row = team.row; row < rows; row += team.teams) {
        const T *from = x + row * columns;
        A mean = A(0);
        if (centred) {
            along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
                constexpr int N = decltype(width)::value;
                A u[N];
                read(from + i, u);
#pragma unroll
                for (int k = 0; k < N; k++) mean += u[k];
            });
            mean = team.reduce<Sum>(mean, A(0)) / (A)columns;
        }
        A sum = A(0), squares = A(0);
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(from + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A distance = u[k] - mean;
                sum += distance;
                squares += distance * distance;
            }
        });
        A rest = centred ? team.reduce<Sum>(sum, A(0)) / (A)columns : A(0);
        A var = team.reduce<Sum>(squares, A(0)) / (A)columns - rest * rest;
        var = var < A(0) ? A(0) : var; // NaN stays
        Normal<A> normal = {mean, rest, A(1) / root(var + (A)eps)};
        if (team.rank == 0) {
            statistics[row * 3] = mean;
            statistics[row * 3 + 1] = rest;
            statistics[row * 3 + 2] = normal.inv_std;
        }
        Channels channels(row, columns, groups, inner);
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], w[N], b[N];
            read(from + i, u);
            channels.get(weight, i, A(1), w);
            channels.get(bias, i, A(0), b);
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = normal.of(u[k]) * w[k] + b[k];
            write(y + row * columns + i, u);
        });
    }
}

// dx = (weighted - average(weighted) - normal * average(weighted * normal)) / std + the pending gradient, with
// weighted = weight * grad.
template <class T, class P, class O>
DEVICE void norm_backward(O *dx, const T *x, const T *grad, const P *weight, const O *pending,
                          const Acc<T> *statistics, size_t rows, size_t columns, size_t groups, size_t inner,
                          int centred, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, P> > PACK<T, O> ? PACK<T, P> : PACK<T, O>;
    Team team(size);
    bool packed = aligned(x) && aligned(grad) && aligned(dx) && aligned(pending) &&
                  packs<V>(columns, inner, weight, weight);
    for (size_t row = team.row; row < rows; row += team.teams) {
        size_t first = row * columns;
        Channels channels(row, columns, groups, inner);
        Normal<A> normal = {statistics[row * 3], statistics[row * 3 + 1], statistics[row * 3 + 2]};
        A average = A(0), dot = A(0);
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], g[N], w[N];
            read(x + first + i, u);
            read(grad + first + i, g);
            channels.get(weight, i, A(1), w);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A weighted = g[k] * w[k];
                average += weighted;
                dot += weighted * normal.of(u[k]);
            }
        });
        average = centred ? team.reduce<Sum>(average, A(0)) / (A)columns : A(0);
        dot = team.reduce<Sum>(dot, A(0)) / (A)columns;
        along<V>(columns, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], g[N], w[N], other[N];
            read(x + first + i, u);
            read(grad + first + i, g);
            channels.get(weight, i, A(1), w);
#pragma unroll
            for (int k = 0; k < N; k++) {
                u[k] = (g[k] * w[k] - average - normal.of(u[k]) * dot) * normal.inv_std;
            }
            if (pending) {
                read(pending + first + i, other);
#pragma unroll
                for (int k = 0; k < N; k++) u[k] += other[k];
            }
            write(dx + first + i, u);
        });
    }
}

// The sums of grad * normal and of grad over the rows, by column.
template <class T, int V>
DEVICE void norm_columns(double *y, const T *x, const T *grad, const Acc<T> *statistics, size_t rows, size_t columns,
                         size_t parts, size_t tiles) {
    typedef Acc<T> A;
    column_sums<2, V, A>(y, rows, columns, parts, tiles, [&](size_t row, size_t column, A(&t)[2][V]) {
        Normal<A> normal = {statistics[row * 3], statistics[row * 3 + 1], statistics[row * 3 + 2]};
        read(x + row * columns + column, t[0]);
        read(grad + row * columns + column, t[1]);
#pragma unroll
        for (int v = 0; v < V; v++) t[0][v] = normal.of(t[0][v]) * t[1][v];
    });
}

// The same sums over each plane of `inner` elements, in y (samples, 2, channels).
template <class T>
DEVICE void norm_planes(double *y, const T *x, const T *grad, const Acc<T> *statistics, size_t planes,
                        size_t channels, size_t inner, size_t groups, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T>;
    Team team(size);
    bool packed = aligned(x) && aligned(grad) && inner % V == 0;
    for (size_t plane = team.row; plane < planes; plane += team.teams) {
        size_t first = plane * inner, row = plane / (channels / groups);
        Normal<A> normal = {statistics[row * 3], statistics[row * 3 + 1], statistics[row * 3 + 2]};
        A sum = A(0), dot = A(0);
        along<V>(inner, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N], g[N];
            read(x + first + i, u);
            read(grad + first + i, g);
#pragma unroll
            for (int k = 0; k < N; k++) {
                sum += g[k];
                dot += g[k] * normal.of(u[k]);
            }
        });
        double total = team.reduce<Sum>((double)dot, 0.0);
        double shift = team.reduce<Sum>((double)sum, 0.0);
        if (team.rank == 0) {
            double *to = y + plane / channels * 2 * channels + plane % channels;
            to[0] = total;
            to[channels] = shift;
        }
    }
}

#define NORM(t, T, p, P)                                                                          \
    ROW_KERNEL norm_##t##_##p(T *y, Acc<T> *statistics, const T *x, const P *weight, const P *bias, \
                              size_t rows, size_t columns, size_t groups, size_t inner,           \
                              double eps, int centred, int team) {                                \
        norm(y, statistics, x, weight, bias, rows, columns, groups, inner, eps, centred, team);   \
    }
#define BACKWARD(t, T, p, P, o, O)                                                                \
    ROW_KERNEL norm_backward_##t##_##p##_##o(                                                     \
        O *dx, const T *x, const T *grad, const P *weight, const O *pending,                      \
        const Acc<T> *statistics, size_t rows, size_t columns, size_t groups, size_t inner,       \
        int centred, int team) {                                                                  \
        norm_backward(dx, x, grad, weight, pending, statistics, rows, columns, groups, inner,     \
                      centred, team);                                                             \
    }
#define SUMS(t, T)                                                                                \
    ROW_KERNEL norm_columns_##t(double *y, const T *x, const T *grad, const Acc<T> *statistics,   \
                                size_t rows, size_t columns, size_t parts, size_t tiles,          \
                                int packed) {                                                     \
        if (packed) {                                                                             \
            norm_columns<T, PACK<T>>(y, x, grad, statistics, rows, columns, parts, tiles);        \
        } else {                                                                                  \
            norm_columns<T, 1>(y, x, grad, statistics, rows, columns, parts, tiles);              \
        }                                                                                         \
    }                                                                                             \
    ROW_KERNEL norm_planes_##t(double *y, const T *x, const T *grad, const Acc<T> *statistics,    \
                               size_t planes, size_t channels, size_t inner, size_t groups,       \
                               int team) {                                                        \
        norm_planes(y, x, grad, statistics, planes, channels, inner, groups, team);               \
    }
EACH_PAIR(NORM)
EACH_TRIPLE(BACKWARD)
EACH_FLOAT(SUMS)
