// NHWC convolutions: the kernels around their matrix products, and depthwise convolutions.
//
// `im2row` writes a row for each output pixel: its taps, in the order (kh, kw, channels), padded with zeros to the
// length that the products want. `turn` transposes the weights to that order. Then rows x weights^T is the output in
// NHWC, so nothing has to be moved after the product. In dgrad the product gives gradients of such rows, and `row2im`
// gathers those of each input pixel: without atomics, so that a sum has one order.
//
// A depthwise convolution has one input channel per group. A product would sum over kh * kw terms only, so threads sum
// the taps themselves. wgrad sums parts of the batch's pixels, and `depthwise_merge` adds the parts in F64.
//
// Neighbouring threads have neighbouring channels, so that their accesses coalesce. A thread has a pack of V of them
// where channels and addresses are multiples of 16 bytes. `im2row` does the divisions of an index once per PIXELS
// pixels.

// Transposes each of `count` matrices (a, b). Matrices are `from_ld` elements apart before and `to_ld` after; zeros
// fill up each matrix of the result.
template <class T, class O>
DEVICE void turn(const T *from, O *to, size_t count, size_t a, size_t b, size_t from_ld, size_t to_ld) {
    for (size_t i = global_thread(); i < count * to_ld; i += global_threads()) {
        size_t matrix = quotient(i, to_ld), at = i - matrix * to_ld, column = quotient(at, a);
        narrow(column < b ? widen(from[matrix * from_ld + (at - column * a) * b + column]) : Acc<T>(0), to[i]);
    }
}

// Pixels a thread has, one after the other.
constexpr int PIXELS = 4;

// What each of `count` output pixels sees, from pixel `first` on: group by group, tap by tap, its input
// channels. A group has `row` elements; those after its taps, like padding, are 0.
template <int V, class T>
DEVICE void im2row(const T *x, T *rows, size_t first, size_t count, size_t row, size_t groups, const Shape &of) {
    size_t each = quotient(of.c_in, groups), packs = row / V, all = packs * groups;
    size_t runs = (count + PIXELS - 1) / PIXELS;
    for (size_t i = global_thread(); i < runs * all; i += global_threads()) {
        size_t run = quotient(i, all), at = i - run * all, group = quotient(at, packs);
        size_t element = (at - group * packs) * V, tap = quotient(element, each);
        size_t channel = group * each + element - tap * each, ky = quotient(tap, of.kw), kx = tap - ky * of.kw;
        Pixel pixel(first + run * PIXELS, of.oh, of.ow);
#pragma unroll
        for (int p = 0; p < PIXELS; p++) {
            if (run * PIXELS + p >= count) break;
            // Below zero where it is above the image, which is more than `h`.
            size_t y = pixel.y * of.stride + ky * of.dilation - of.ph;
            size_t column = pixel.x * of.stride + kx * of.dilation - of.pw;
            __align__(16) T values[V] = {};
            if (ky < of.kh && y < of.h && column < of.w)
                load_run<V>(values, x + ((pixel.image * of.h + y) * of.w + column) * of.c_in + channel);
            store_run<V>(rows + ((run * PIXELS + p) * all + at) * V, values);
            pixel.next(of.oh, of.ow);
        }
    }
}

// The gradient of images from that of im2row's rows, tap after tap; plus a bias for each channel.
template <int V, class A, class O>
DEVICE void row2im(const A *rows, O *dx, const A *bias, size_t first_image, size_t images, size_t row,
                   size_t groups, const Shape &of) {
    size_t each = quotient(of.c_in, groups), packs = of.c_in / V, area = of.h * of.w;
    for (size_t i = global_thread(); i < images * area * packs; i += global_threads()) {
        size_t pixel = quotient(i, packs), channel = (i - pixel * packs) * V, group = quotient(channel, each);
        Pixel at(pixel, of.h, of.w);
        const A *from = rows + group * row + channel - group * each;
        A sum[V] = {};
        for (size_t ky = 0; ky < of.kh; ky++) {
            size_t y, x;
            if (!position(at.y, ky, of.ph, of.stride, of.dilation, of.oh, y)) continue;
            for (size_t kx = 0; kx < of.kw; kx++) {
                if (!position(at.x, kx, of.pw, of.stride, of.dilation, of.ow, x)) continue;
                A part[V];
                read(from + ((at.image * of.oh + y) * of.ow + x) * groups * row + (ky * of.kw + kx) * each, part);
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] += part[v];
            }
        }
        if (bias)
            for (int v = 0; v < V; v++) sum[v] += bias[channel + v];
        write(dx + (first_image * area + pixel) * of.c_in + channel, sum);
    }
}

// One input channel per group; `weight` is (kh, kw, c_out). A thread has V channels of an output pixel:
// more than one where each input channel has one output channel.
template <int V, class T, class O>
DEVICE void depthwise(const T *x, const T *weight, const Acc<T> *bias, O *y, size_t batch, const Shape &of) {
    typedef Acc<T> A;
    size_t each = quotient(of.c_out, of.c_in), packs = of.c_out / V;
    for (size_t i = global_thread(); i < batch * of.oh * of.ow * packs; i += global_threads()) {
        size_t pixel = quotient(i, packs), channel = (i - pixel * packs) * V;
        Pixel at(pixel, of.oh, of.ow);
        const T *plane = x + at.image * of.h * of.w * of.c_in + quotient(channel, each);
        A sum[V] = {};
        for (size_t ky = 0; ky < of.kh; ky++)
            for (size_t kx = 0; kx < of.kw; kx++) {
                size_t row = at.y * of.stride + ky * of.dilation - of.ph;
                size_t column = at.x * of.stride + kx * of.dilation - of.pw;
                // A zero outside is a factor like any other.
                A values[V] = {}, taps[V];
                if (row < of.h && column < of.w) read(plane + (row * of.w + column) * of.c_in, values);
                read(weight + (ky * of.kw + kx) * of.c_out + channel, taps);
#pragma unroll
                for (int v = 0; v < V; v++) sum[v] += values[v] * taps[v];
            }
        if (bias)
            for (int v = 0; v < V; v++) sum[v] += bias[channel + v];
        write(y + pixel * of.c_out + channel, sum);
    }
}

// A thread has V channels of an input pixel.
template <int V, class T, class O>
DEVICE void depthwise_dgrad(const T *g, const T *weight, const Acc<T> *bias, O *dx, size_t batch,
                            const Shape &of) {
    typedef Acc<T> A;
    size_t each = quotient(of.c_out, of.c_in), packs = of.c_in / V;
    for (size_t i = global_thread(); i < batch * of.h * of.w * packs; i += global_threads()) {
        size_t pixel = quotient(i, packs), channel = (i - pixel * packs) * V;
        Pixel at(pixel, of.h, of.w);
        const T *plane = g + at.image * of.oh * of.ow * of.c_out;
        A sum[V] = {};
        for (size_t out = channel * each; out < channel * each + each; out++)
            for (size_t ky = 0; ky < of.kh; ky++) {
                size_t y, x;
                if (!position(at.y, ky, of.ph, of.stride, of.dilation, of.oh, y)) continue;
                for (size_t kx = 0; kx < of.kw; kx++) {
                    if (!position(at.x, kx, of.pw, of.stride, of.dilation, of.ow, x)) continue;
                    A values[V], taps[V];
                    read(plane + (y * of.ow + x) * of.c_out + out, values);
                    read(weight + (ky * of.kw + kx) * of.c_out + out, taps);
#pragma unroll
                    for (int v = 0; v < V; v++) sum[v] += values[v] * taps[v];
                }
            }
        if (bias)
            for (int v = 0; v < V; v++) sum[v] += bias[channel + v];
        write(dx + pixel * of.c_in + channel, sum);
    }
}

// The sums of a part of the batch's output pixels: `sums (kh * kw, parts, c_out)`. Blocks of one `y` have
// a tap.
template <int V, class T>
DEVICE void depthwise_wgrad(double *sums, const T *x, const T *g, size_t batch, size_t parts, size_t tiles,
                             const Shape &of) {
    typedef Acc<T> A;
    size_t ky = quotient(blockIdx.y, of.kw), kx = blockIdx.y - ky * of.kw, each = quotient(of.c_out, of.c_in);
    double *own = sums + blockIdx.y * parts * of.c_out;
    auto terms = [&](size_t pixel, size_t channel, A(&t)[1][V]) {
        Pixel at(pixel, of.oh, of.ow);
        size_t row = at.y * of.stride + ky * of.dilation - of.ph;
        size_t column = at.x * of.stride + kx * of.dilation - of.pw;
#pragma unroll
        for (int v = 0; v < V; v++) t[0][v] = 0;
        if (row >= of.h || column >= of.w) return;
        A values[V];
        read(x + ((at.image * of.h + row) * of.w + column) * of.c_in + quotient(channel, each), values);
        read(g + pixel * of.c_out + channel, t[0]);
#pragma unroll
        for (int v = 0; v < V; v++) t[0][v] *= values[v];
    };
    column_sums<1, V, A>(own, batch * of.oh * of.ow, of.c_out, parts, tiles, terms);
}

// Of all parts, to `dw (channels, taps)`: a warp has an element.
template <class A>
DEVICE void depthwise_merge(const double *sums, A *dw, size_t taps, size_t parts, size_t channels) {
    size_t i = global_thread() / 32;
    if (i >= taps * channels) return;
    size_t tap = i / channels, channel = i % channels;
    double sum = 0;
    for (size_t part = threadIdx.x % 32; part < parts; part += 32)
        sum += sums[(tap * parts + part) * channels + channel];
    sum = warp_reduce<Sum>(sum);
    if (threadIdx.x % 32 == 0) dw[channel * taps + tap] = (A)sum;
}

#define MOVES(t, T)                                                                                \
    KERNEL im2row_##t(const T *x, T *rows, size_t first, size_t count, size_t row, size_t groups,  \
                      SHAPE) {                                                                     \
        if (of_packs(PACK<T>, c_in / groups, x, rows))                                             \
            im2row<PACK<T>>(x, rows, first, count, row, groups, AS_SHAPE);                         \
        else                                                                                       \
            im2row<1>(x, rows, first, count, row, groups, AS_SHAPE);                               \
    }                                                                                              \
    ROW_KERNEL depthwise_wgrad_##t(double *sums, const T *x, const T *g, size_t batch, size_t parts, \
                                    size_t tiles, int packed, SHAPE) {                             \
        if (packed) depthwise_wgrad<PACK<T>>(sums, x, g, batch, parts, tiles, AS_SHAPE);          \
        else depthwise_wgrad<1>(sums, x, g, batch, parts, tiles, AS_SHAPE);                       \
    }

// Whether so many neighbours are read and written at a time, of rows of `channels`.
DEVICE bool of_packs(size_t pack, size_t channels, const void *a, const void *b) {
    return channels % pack == 0 && aligned(a) && aligned(b);
}

EACH_FLOAT(MOVES)

#define MERGE(a, A)                                                                                \
    KERNEL depthwise_merge_##a(const double *sums, A *dw, size_t taps, size_t parts, size_t channels) { \
        depthwise_merge(sums, dw, taps, parts, channels);                                          \
    }
OF_F32(MERGE(f32, float))
OF_F64(MERGE(f64, double))

#define ROWS(s_o, A, O)                                                                            \
    KERNEL row2im_##s_o(const A *rows, O *dx, const A *bias, size_t first_image, size_t images,    \
                        size_t row, size_t groups, SHAPE) {                                        \
        if (of_packs(PACK<A>, c_in / groups, rows, dx))                                            \
            row2im<PACK<A>>(rows, dx, bias, first_image, images, row, groups, AS_SHAPE);           \
        else                                                                                       \
            row2im<1>(rows, dx, bias, first_image, images, row, groups, AS_SHAPE);                 \
    }
EACH_ROUNDED(ROWS)

#define PAIRS(t, T, o, O)                                                                          \
    KERNEL turn_##t##_##o(const T *from, O *to, size_t count, size_t a, size_t b, size_t from_ld,  \
                          size_t to_ld) {                                                          \
        turn(from, to, count, a, b, from_ld, to_ld);                                               \
    }                                                                                              \
    KERNEL depthwise_##t##_##o(const T *x, const T *weight, const Acc<T> *bias, O *y, size_t batch, SHAPE) { \
        if (c_in == c_out && of_packs(PACK<T>, c_out, x, y))                                       \
            depthwise<PACK<T>>(x, weight, bias, y, batch, AS_SHAPE);                               \
        else                                                                                       \
            depthwise<1>(x, weight, bias, y, batch, AS_SHAPE);                                     \
    }                                                                                              \
    KERNEL depthwise_dgrad_##t##_##o(const T *g, const T *weight, const Acc<T> *bias, O *dx, size_t batch, \
                                 SHAPE) {                                                          \
        if (c_in == c_out && of_packs(PACK<T>, c_out, g, dx))                                      \
            depthwise_dgrad<PACK<T>>(g, weight, bias, dx, batch, AS_SHAPE);                        \
        else                                                                                       \
            depthwise_dgrad<1>(g, weight, bias, dx, batch, AS_SHAPE);                              \
    }
EACH_PAIR(PAIRS)
