// Pooling of (n, h, w, c). A thread has V channels of one pixel, and its neighbours have the channels beside them, so
// that accesses coalesce. V is a pack of 16 bytes where channels and addresses allow it, else 1.
//
// Forward goes over the pixels of a window. Max pooling keeps the pixel of each largest element: the first of equal
// ones, and NaN wins. Average pooling divides by the whole window, so padding counts as zeros.
//
// Backward gathers. A thread has a pixel of the input, goes over the windows that cover it, and adds their gradients;
// of a max pool, those whose kept pixel is its own. So it needs no atomics, and each sum has one order.
//
// Global average pooling has a block for an image's tile of channels. Its threads share the pixels and join their sums
// in shared memory. Indices are 32-bit where they fit, because 64-bit division is slow.

template <class I> struct Last {
    Window<I> of;
    I channels;

    // Where the pixel of an image is.
    DEVICE size_t at(size_t pixel, I channel) const { return pixel * channels + channel; }
};

// A thread's pixel on one side, of (image, y, x), and its first channel.
template <class I> struct Spot {
    I image, y, x, channel;

    DEVICE Spot(I i, I packs, int each, I height, I width) {
        channel = i % packs * each, i /= packs;
        x = i % width, i /= width;
        y = i % height, image = i / height;
    }
};

template <int V, class I, class T>
DEVICE void max_forward(const T *x, T *y, u32 *index, I i, const Last<I> &last) {
    const Window<I> &of = last.of;
    Spot<I> spot(i, last.channels / V, V, of.oh, of.ow);
    Span<I> rows(spot.y, of.kh, of.sh, of.ph, of.h), columns(spot.x, of.kw, of.sw, of.pw, of.w);
    const T *from = x + last.at((size_t)spot.image * of.h * of.w, spot.channel);
    Acc<T> best[V];
    __align__(16) u32 at[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
        best[v] = -infinity<Acc<T>>();
        at[v] = (u32)(rows.from * of.w + columns.from);
    }
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.from; column < columns.to; column++) {
            Acc<T> value[V];
            read(from + last.at(row * of.w + column, 0), value);
#pragma unroll
            for (int v = 0; v < V; v++)
                if (value[v] > best[v] || value[v] != value[v]) {
                    best[v] = value[v];
                    at[v] = (u32)(row * of.w + column);
                }
        }
    size_t to = (size_t)i * V;
    write(y + to, best);
    store_run<V>(index + to, at);
}

template <int V, class I, class G, class O>
DEVICE void max_backward(const G *g, const u32 *index, O *dx, I i, const Last<I> &last) {
    const Window<I> &of = last.of;
    Spot<I> spot(i, last.channels / V, V, of.h, of.w);
    Cover<I> rows(spot.y, of.kh, of.sh, of.ph, of.oh), columns(spot.x, of.kw, of.sw, of.pw, of.ow);
    size_t first = last.at((size_t)spot.image * of.oh * of.ow, spot.channel);
    u32 here = (u32)(spot.y * of.w + spot.x);
    Acc<G> sum[V] = {};
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.from; column < columns.to; column++) {
            size_t window = first + last.at(row * of.ow + column, 0);
            __align__(16) u32 at[V];
            Acc<G> share[V];
            load_run<V>(at, index + window);
            read(g + window, share);
#pragma unroll
            for (int v = 0; v < V; v++)
                if (at[v] == here) sum[v] += share[v];
        }
    write(dx + (size_t)i * V, sum);
}

template <int V, class I, class T> DEVICE void avg_forward(const T *x, T *y, I i, const Last<I> &last) {
    const Window<I> &of = last.of;
    Spot<I> spot(i, last.channels / V, V, of.oh, of.ow);
    Span<I> rows(spot.y, of.kh, of.sh, of.ph, of.h), columns(spot.x, of.kw, of.sw, of.pw, of.w);
    const T *from = x + last.at((size_t)spot.image * of.h * of.w, spot.channel);
    Acc<T> sum[V] = {}, area = (Acc<T>)(of.kh * of.kw);
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.from; column < columns.to; column++) {
            Acc<T> value[V];
            read(from + last.at(row * of.w + column, 0), value);
#pragma unroll
            for (int v = 0; v < V; v++) sum[v] += value[v];
        }
#pragma unroll
    for (int v = 0; v < V; v++) sum[v] /= area;
    write(y + (size_t)i * V, sum);
}

template <int V, class I, class G, class O>
DEVICE void avg_backward(const G *g, O *dx, I i, const Last<I> &last) {
    const Window<I> &of = last.of;
    Spot<I> spot(i, last.channels / V, V, of.h, of.w);
    Cover<I> rows(spot.y, of.kh, of.sh, of.ph, of.oh), columns(spot.x, of.kw, of.sw, of.pw, of.ow);
    const G *from = g + last.at((size_t)spot.image * of.oh * of.ow, spot.channel);
    Acc<G> sum[V] = {}, area = (Acc<G>)(of.kh * of.kw);
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.to; column-- > columns.from;) {
            Acc<G> value[V];
            read(from + last.at(row * of.ow + column, 0), value);
#pragma unroll
            for (int v = 0; v < V; v++) sum[v] += value[v] / area;
        }
    write(dx + (size_t)i * V, sum);
}

// A block has an image's tile of channels. At most 64 pixels are added up before their sum is.
template <int V, class T> DEVICE void global_avg_forward(const T *x, T *y, size_t area, size_t channels, size_t tiles) {
    typedef Acc<T> A;
    __shared__ A sums[256 * V];
    Columns<V> of(channels, tiles);
    const T *from = x + of.part * area * channels + of.column;
    A total[V] = {}, sum[V] = {};
    int held = 0;
    for (size_t pixel = of.line; of.column < channels && pixel < area; pixel += of.lines) {
        A value[V];
        read(from + pixel * channels, value);
        bool full = ++held == 64;
#pragma unroll
        for (int v = 0; v < V; v++) {
            sum[v] += value[v];
            if (full) total[v] += sum[v], sum[v] = 0;
        }
        if (full) held = 0;
    }
#pragma unroll
    for (int v = 0; v < V; v++) sums[(of.line * V + v) * of.lanes + of.lane] = total[v] + sum[v];
    __syncthreads();
    for (int at = threadIdx.x; at < of.lanes * V; at += 256) {
        A all = 0;
        for (int line = 0; line < of.lines; line++) all += sums[line * V * of.lanes + at];
        size_t channel = (blockIdx.x % tiles * of.lanes + at % of.lanes) * V + at / of.lanes;
        if (channel < channels) narrow(all / (A)area, y[of.part * channels + channel]);
    }
}

template <int V, class G, class O>
DEVICE void global_avg_backward(const G *g, O *dx, size_t count, size_t area, size_t channels) {
    for (size_t i = global_thread() * V; i < count; i += global_threads() * V) {
        size_t pixel = i / channels, channel = i - pixel * channels;
        Acc<G> share[V];
        read(g + pixel / area * channels + channel, share);
#pragma unroll
        for (int v = 0; v < V; v++) share[v] /= (Acc<G>)area;
        write(dx + i, share);
    }
}

#define LAST(I) Last<I>{OF(I), (I)channels}

#define OUTPUTS (planes * oh * ow)
#define INPUTS (planes * h * w)

// For every pack of `count` elements, or for every element. `together` says whether packs can be had.
#define FOR_EACH_PACK(P, count, together, call, ...)                                                \
    if (channels % P == 0 && (together)) {                                                         \
        FOR_EACH(count / P, call<P>(__VA_ARGS__, i, LAST(I)))                                      \
    } else {                                                                                       \
        FOR_EACH(count, call<1>(__VA_ARGS__, i, LAST(I)))                                          \
    }

#define FORWARD(t, T)                                                                              \
    KERNEL max_forward_last_##t(const T *x, T *y, u32 *index, WINDOW, size_t channels) {           \
        FOR_EACH_PACK(PACK<T>, OUTPUTS, aligned(x) && aligned(y) && aligned(index), max_forward, x, y, index) \
    }                                                                                              \
    KERNEL avg_forward_last_##t(const T *x, T *y, WINDOW, size_t channels) {                       \
        FOR_EACH_PACK(PACK<T>, OUTPUTS, aligned(x) && aligned(y), avg_forward, x, y)               \
    }                                                                                              \
    ROW_KERNEL global_avg_forward_last_##t(const T *x, T *y, size_t area, size_t channels,         \
                                           size_t tiles, int packed) {                             \
        if (packed) global_avg_forward<PACK<T>>(x, y, area, channels, tiles);                      \
        else global_avg_forward<1>(x, y, area, channels, tiles);                                   \
    }
EACH_FLOAT(FORWARD)

#define BACKWARD(t, G, o, O)                                                                       \
    KERNEL max_backward_last_##t##_##o(const G *g, const u32 *index, O *dx, WINDOW, size_t channels) { \
        FOR_EACH_PACK(PACK<G>, INPUTS, aligned(g) && aligned(index) && aligned(dx), max_backward, g, index, dx) \
    }                                                                                              \
    KERNEL avg_backward_last_##t##_##o(const G *g, O *dx, WINDOW, size_t channels) {               \
        FOR_EACH_PACK(PACK<G>, INPUTS, aligned(g) && aligned(dx), avg_backward, g, dx)             \
    }                                                                                              \
    KERNEL global_avg_backward_last_##t##_##o(const G *g, O *dx, size_t count, size_t area, size_t channels) { \
        if (channels % PACK<G> == 0 && aligned(g) && aligned(dx))                                  \
            global_avg_backward<PACK<G>>(g, dx, count, area, channels);                            \
        else                                                                                       \
            global_avg_backward<1>(g, dx, count, area, channels);                                  \
    }
EACH_PAIR(BACKWARD)
