// Batch normalisation of (rows, channels): a thread has the same few channels in every row of its part,
// and a warp reads what lies side by side.
//
// Sums over a part's rows are F32 (F64 for F64), in an order that depends on the shape alone; parts are
// merged in F64.

// Rows whose elements a thread asks for before it uses the first.
constexpr int AHEAD = 4;

// The rows of a thread.
struct Lines {
    size_t row, end;

    template <int V> DEVICE Lines(const Columns<V> &of, size_t rows, size_t columns, size_t parts) {
        row = rows * of.part / parts + of.line;
        end = of.column < columns ? rows * (of.part + 1) / parts : 0;
    }
};

// As in batch_norm.cu, a few rows at a time instead of a pack: about the channel's first element.
template <int V, class T, class A>
DEVICE void row_moments(const T *x, A *parts_of, size_t rows, size_t channels, size_t parts, size_t tiles) {
    __shared__ A counts[256], means[256 * V], all[256 * V];
    Columns<V> of(channels, tiles);
    Lines lines(of, rows, channels, parts);
    A shift[V] = {}, mean[V] = {}, squares[V] = {}, count = 0;
    if (of.column < channels) read(x + of.column, shift);
    for (size_t row = lines.row; row < lines.end; row += AHEAD * of.lines) {
        A values[AHEAD][V];
        int here = 0;
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            if (row + r * of.lines >= lines.end) continue;
            read(x + (row + r * of.lines) * channels + of.column, values[r]);
            here = r + 1;
        }
        A each = A(1) / here, share = here / (count + here);
#pragma unroll
        for (int v = 0; v < V; v++) {
            A sum = 0, own = 0;
#pragma unroll
            for (int r = 0; r < AHEAD; r++)
                if (r < here) sum += values[r][v] -= shift[v];
            sum *= each;
#pragma unroll
            for (int r = 0; r < AHEAD; r++)
                if (r < here) own += (values[r][v] - sum) * (values[r][v] - sum);
            A distance = sum - mean[v];
            mean[v] += distance * share;
            squares[v] += own + distance * distance * count * share;
        }
        count += here;
    }
    counts[threadIdx.x] = count;
#pragma unroll
    for (int v = 0; v < V; v++) {
        int at = (of.line * V + v) * of.lanes + of.lane;
        means[at] = mean[v];
        all[at] = squares[v];
    }
    __syncthreads();
    // A thread has a channel's lines.
    for (int at = threadIdx.x; at < of.lanes * V; at += 256) {
        double number = 0, sum = 0, spread = 0;
        for (int line = 0; line < of.lines; line++) {
            double own = counts[line * of.lanes + at % of.lanes];
            number += own;
            sum += own * means[line * V * of.lanes + at];
        }
        double centre = sum / number;
        for (int line = 0; line < of.lines; line++) {
            double distance = means[line * V * of.lanes + at] - centre;
            spread += all[line * V * of.lanes + at] + counts[line * of.lanes + at % of.lanes] * distance * distance;
        }
        size_t channel = (blockIdx.x % tiles * of.lanes + at % of.lanes) * V + at / of.lanes;
        if (channel >= channels) continue;
        A *to = parts_of + (of.part * channels + channel) * 3;
        to[0] = (A)number;
        to[1] = (A)centre;
        to[2] = (A)spread;
    }
}

// Mean, variance and 1 / sqrt(var + eps) out of the moments of all parts: a warp has a channel.
template <class T, class A>
DEVICE void merge_moments(const T *x, const A *parts_of, A *means, A *vars, A *inv_stds, double eps,
                          size_t channels, size_t parts) {
    size_t channel = global_thread() / 32;
    if (channel >= channels) return;
    double mean, var;
    merge(parts_of, channel, channels, parts, mean, var);
    if (threadIdx.x % 32) return;
    means[channel] = (A)(mean + (double)widen(x[channel]));
    vars[channel] = (A)var;
    inv_stds[channel] = (A)(1.0 / sqrt(var + eps));
}

// As `normalise` in batch_norm.cu. With `train`, `spreads` are 1 / sqrt(var + eps), else variances.
template <int V, class T, class A>
DEVICE void normalise_rows(const T *x, const T *residual, T *y, const A *weight, const A *bias, const A *means,
                           const A *spreads, int finish, int train, double eps, size_t rows, size_t channels,
                           size_t parts, size_t tiles) {
    constexpr int AT_ONCE = AHEAD / 2;
    Columns<V> of(channels, tiles);
    Lines lines(of, rows, channels, parts);
    if (lines.row >= lines.end) return;
    A mean[V], scale[V], shift[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        size_t channel = of.column + v;
        A inv_std = train ? spreads[channel] : (A)(1.0 / sqrt((double)spreads[channel] + eps));
        mean[v] = means[channel];
        scale[v] = weight ? weight[channel] * inv_std : inv_std;
        shift[v] = bias ? bias[channel] : A(0);
    }
    for (size_t row = lines.row; row < lines.end; row += AT_ONCE * of.lines) {
        A xs[AT_ONCE][V], others[AT_ONCE][V];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            size_t at = (row + r * of.lines) * channels + of.column;
            if (row + r * of.lines >= lines.end) continue;
            read(x + at, xs[r]);
            if (finish == 2) read(residual + at, others[r]);
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            if (row + r * of.lines >= lines.end) continue;
#pragma unroll
            for (int v = 0; v < V; v++) {
                A y = affine(xs[r][v], mean[v], scale[v], shift[v]);
                if (finish == 2) y += others[r][v];
                xs[r][v] = finished(y, finish);
            }
            write(y + (row + r * of.lines) * channels + of.column, xs[r]);
        }
    }
}

// The gates of a thread's channels.
template <int V, class T, class A>
DEVICE void gates_of(Gate<T, A> (&gates)[V], const A *means, const A *inv_stds, const A *weight, const A *bias,
                     int rectifier, size_t column) {
#pragma unroll
    for (int v = 0; v < V; v++) gates[v] = gate_of<T>(means, inv_stds, weight, bias, rectifier, column + v);
}

// The sums of g, let through, and of g * (x - mean), of each part and channel: `sums (parts, 2, channels)`.
template <int V, class T, class A>
DEVICE void row_gradient_sums(double *sums, const T *x, const T *g, const A *means, const A *inv_stds,
                              const A *weight, const A *bias, int rectifier, size_t rows, size_t channels,
                              size_t parts, size_t tiles) {
    Columns<V> of(channels, tiles);
    Gate<T, A> gates[V] = {};
    if (of.column < channels) gates_of<V>(gates, means, inv_stds, weight, bias, rectifier, of.column);
    column_sums<2, V, A>(sums, rows, channels, parts, tiles, [&](size_t row, size_t column, A(&t)[2][V]) {
        read(g + row * channels + column, t[0]);
        read(x + row * channels + column, t[1]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            t[0][v] = gates[v](t[1][v], t[0][v]);
            t[1][v] = t[0][v] * (t[1][v] - gates[v].mean);
        }
    });
}

// dweight, dbias, and what dx is made of, `factors (3, channels)`: dx = (x - mean) * factors[0] +
// (g * factors[1] + factors[2]). A warp has a channel.
template <class A>
DEVICE void merge_gradients(const double *sums, const A *weight, const A *spreads, A *dweight, A *dbias,
                            A *factors, int train, double eps, size_t rows, size_t channels, size_t parts) {
    size_t channel = global_thread() / 32;
    if (channel >= channels) return;
    double sum = 0, dot = 0;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32) {
        sum += sums[part * 2 * channels + channel];
        dot += sums[(part * 2 + 1) * channels + channel];
    }
    sum = warp_reduce<Sum>(sum);
    dot = warp_reduce<Sum>(dot);
    if (threadIdx.x % 32) return;
    double spread = spreads[channel], inv_std = train ? spread : 1.0 / sqrt(spread + eps);
    double exact = weight ? weight[channel] * inv_std : inv_std;
    dweight[channel] = (A)(dot * inv_std);
    dbias[channel] = (A)sum;
    factors[channel] = (A)(-exact * inv_std * inv_std * dot / rows);
    factors[channels + channel] = (A)exact;
    factors[2 * channels + channel] = (A)(-exact * sum / rows);
}

template <int V, class T, class A>
DEVICE void row_input_gradient(const T *x, const T *g, T *dx, const A *means, const A *inv_stds, const A *weight,
                               const A *bias, int rectifier, const A *factors, int train, size_t rows,
                               size_t channels, size_t parts, size_t tiles) {
    constexpr int AT_ONCE = AHEAD / 2;
    Columns<V> of(channels, tiles);
    Lines lines(of, rows, channels, parts);
    if (lines.row >= lines.end) return;
    Gate<T, A> gates[V];
    gates_of<V>(gates, means, inv_stds, weight, bias, rectifier, of.column);
    A deviation_scale[V], scale[V], shift[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        size_t channel = of.column + v;
        deviation_scale[v] = factors[channel];
        scale[v] = factors[channels + channel];
        shift[v] = factors[2 * channels + channel];
    }
    for (size_t row = lines.row; row < lines.end; row += AT_ONCE * of.lines) {
        A xs[AT_ONCE][V], gs[AT_ONCE][V];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            size_t at = (row + r * of.lines) * channels + of.column;
            if (row + r * of.lines >= lines.end) continue;
            read(g + at, gs[r]);
            if (train) read(x + at, xs[r]);
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            if (row + r * of.lines >= lines.end) continue;
#pragma unroll
            for (int v = 0; v < V; v++) {
                A own = train ? gates[v](xs[r][v], gs[r][v]) : gs[r][v], scaled = own * scale[v];
                gs[r][v] = train ? (xs[r][v] - gates[v].mean) * deviation_scale[v] + (scaled + shift[v]) : scaled;
            }
            write(dx + (row + r * of.lines) * channels + of.column, gs[r]);
        }
    }
}

#define SIZES size_t rows, size_t channels, size_t parts, size_t tiles, int packed
// Packs of columns, or one column a thread.
#define PACKED(name, T, ...)                                                                       \
    if (packed) name<PACK<T>>(__VA_ARGS__, rows, channels, parts, tiles);                          \
    else name<1>(__VA_ARGS__, rows, channels, parts, tiles);
#define KERNELS(t, T)                                                                              \
    ROW_KERNEL row_moments_##t(const T *x, Acc<T> *parts_of, SIZES) {                              \
        PACKED(row_moments, T, x, parts_of)                                                        \
    }                                                                                              \
    ROW_KERNEL merge_moments_##t(const T *x, const Acc<T> *parts_of, Acc<T> *mean, Acc<T> *var,    \
                                 Acc<T> *inv_std, double eps, size_t channels, size_t parts) {     \
        merge_moments(x, parts_of, mean, var, inv_std, eps, channels, parts);                      \
    }                                                                                              \
    ROW_KERNEL normalise_rows_##t(const T *x, const T *residual, T *y, const Acc<T> *weight,       \
                                  const Acc<T> *bias, const Acc<T> *mean, const Acc<T> *spread,    \
                                  int finish, int train, double eps, SIZES) {                      \
        PACKED(normalise_rows, T, x, residual, y, weight, bias, mean, spread, finish, train, eps)  \
    }                                                                                              \
    ROW_KERNEL row_gradient_sums_##t(double *sums, const T *x, const T *g, const Acc<T> *mean,     \
                                     const Acc<T> *inv_std, const Acc<T> *weight,                  \
                                     const Acc<T> *bias, int rectifier, SIZES) {                   \
        PACKED(row_gradient_sums, T, sums, x, g, mean, inv_std, weight, bias, rectifier)           \
    }                                                                                              \
    ROW_KERNEL merge_gradients_##t(const double *sums, const Acc<T> *weight, const Acc<T> *spread, \
                                   Acc<T> *dweight, Acc<T> *dbias, Acc<T> *factors, int train,     \
                                   double eps, size_t rows, size_t channels, size_t parts) {       \
        merge_gradients(sums, weight, spread, dweight, dbias, factors, train, eps, rows, channels, parts); \
    }                                                                                              \
    ROW_KERNEL row_input_gradient_##t(const T *x, const T *g, T *dx, const Acc<T> *mean,           \
                                      const Acc<T> *inv_std, const Acc<T> *weight,                 \
                                      const Acc<T> *bias, int rectifier, const Acc<T> *factors,    \
                                      int train, SIZES) {                                          \
        PACKED(row_input_gradient, T, x, g, dx, mean, inv_std, weight, bias, rectifier, factors, train) \
    }

EACH_FLOAT(KERNELS)
