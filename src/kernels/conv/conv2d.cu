// What surrounds the matrix products of a convolution, and convolutions of one channel per group.
//
// Between the products, pixels are counted through the whole batch, image by image: a tile is
// `count` of them from `first` on, and a matrix has a row per channel or tap, `ld` elements apart.

// Elements a thread has of a row, stored at once where that can be.
template <class T> constexpr int RUN = Pack<T>::LEN;

// The row of this block, and the first element of this thread in it.
struct Run {
    size_t row, from;

    DEVICE Run(size_t count, int run) {
        size_t chunk = (size_t)blockDim.x * run, chunks = (count + chunk - 1) / chunk;
        row = blockIdx.x / chunks;
        from = blockIdx.x % chunks * chunk + (size_t)threadIdx.x * run;
    }
};

template <class T> DEVICE void store_run(T *row, const Pack<T> &pack, size_t from, size_t count) {
    if (from + RUN<T> <= count && aligned(row + from)) {
        store_pack(row + from, pack);
    } else {
        for (int i = 0; i < RUN<T> && from + i < count; i++) row[from + i] = pack.at[i];
    }
}

// A row per tap of an input channel, as weights lie: what each output pixel sees there; padding is 0.
template <class T>
DEVICE void im2col(const T *x, T *columns, size_t first, size_t count, size_t ld, const Shape &of) {
    Run run(count, RUN<T>);
    if (run.from >= count) return;
    size_t kx = run.row % of.kw, ky = run.row / of.kw % of.kh, channel = run.row / of.kw / of.kh;
    Pixel pixel(first + run.from, of.oh, of.ow);
    Pack<T> pack;
    for (int i = 0; i < RUN<T>; i++) {
        // Below zero where it is above the image, which is more than `h`.
        size_t y = pixel.y * of.stride + ky * of.dilation - of.ph;
        size_t column = pixel.x * of.stride + kx * of.dilation - of.pw;
        pack.at[i] = T{};
        if (run.from + i < count && y < of.h && column < of.w)
            pack.at[i] = x[((pixel.image * of.c_in + channel) * of.h + y) * of.w + column];
        pixel.next(of.oh, of.ow);
    }
    store_run(columns + run.row * ld, pack, run.from, count);
}

// A row per output channel, out of images (n, c_out, oh, ow).
template <class T>
DEVICE void to_rows(const T *images, T *rows, size_t first, size_t count, size_t ld, const Shape &of) {
    Run run(count, RUN<T>);
    if (run.from >= count) return;
    size_t area = of.oh * of.ow;
    Pack<T> pack;
    for (int i = 0; i < RUN<T>; i++) {
        size_t at = first + run.from + i, image = quotient(at, area);
        pack.at[i] = T{};
        if (run.from + i < count) pack.at[i] = images[(image * of.c_out + run.row) * area + at - image * area];
    }
    store_run(rows + run.row * ld, pack, run.from, count);
}

// The other way, with a bias for each channel, rounded once.
template <class S, class O, class A>
DEVICE void from_rows(const S *rows, O *images, const A *bias, size_t first, size_t count, size_t ld,
                      const Shape &of) {
    Run run(count, 1);
    if (run.from >= count) return;
    size_t area = of.oh * of.ow, at = first + run.from, image = quotient(at, area);
    Acc<S> value = widen(rows[run.row * ld + run.from]);
    if (bias) value += bias[run.row];
    narrow(value, images[(image * of.c_out + run.row) * area + at - image * area]);
}

// The gradient of images from that of im2col's rows, tap after tap; plus a bias for each channel.
template <class A, class O>
DEVICE void col2im(const A *columns, O *dx, const A *bias, size_t first_image, size_t images, size_t ld,
                   const Shape &of) {
    size_t area = of.h * of.w;
    for (size_t i = global_thread(); i < images * of.c_in * area; i += global_threads()) {
        Pixel at(i, of.h, of.w); // "image" counts channels too
        size_t image = quotient(at.image, of.c_in), channel = at.image - image * of.c_in;
        A sum = 0;
        for (size_t ky = 0; ky < of.kh; ky++) {
            size_t y, x;
            if (!position(at.y, ky, of.ph, of.stride, of.dilation, of.oh, y)) continue;
            for (size_t kx = 0; kx < of.kw; kx++) {
                if (!position(at.x, kx, of.pw, of.stride, of.dilation, of.ow, x)) continue;
                size_t row = (channel * of.kh + ky) * of.kw + kx;
                sum += columns[row * ld + (image * of.oh + y) * of.ow + x];
            }
        }
        if (bias) sum += bias[channel];
        narrow(sum, dx[first_image * of.c_in * area + i]);
    }
}

// One input channel per group. A thread has an output pixel.
template <class T, class O>
DEVICE void depthwise(const T *x, const T *weight, const Acc<T> *bias, O *y, size_t batch, const Shape &of) {
    size_t each = of.c_out / of.c_in;
    for (size_t i = global_thread(); i < batch * of.c_out * of.oh * of.ow; i += global_threads()) {
        Pixel at(i, of.oh, of.ow);
        size_t image = quotient(at.image, of.c_out), channel = at.image - image * of.c_out;
        const T *plane = x + (image * of.c_in + quotient(channel, each)) * of.h * of.w;
        const T *taps = weight + channel * of.kh * of.kw;
        Acc<T> sum = 0;
        for (size_t ky = 0; ky < of.kh; ky++)
            for (size_t kx = 0; kx < of.kw; kx++) {
                size_t row = at.y * of.stride + ky * of.dilation - of.ph;
                size_t column = at.x * of.stride + kx * of.dilation - of.pw;
                // A zero outside is a factor like any other.
                Acc<T> value = row < of.h && column < of.w ? widen(plane[row * of.w + column]) : Acc<T>(0);
                sum += value * widen(taps[ky * of.kw + kx]);
            }
        if (bias) sum += bias[channel];
        narrow(sum, y[i]);
    }
}

// A thread has an input pixel.
template <class T, class O>
DEVICE void depthwise_dgrad(const T *g, const T *weight, const Acc<T> *bias, O *dx, size_t batch,
                            const Shape &of) {
    size_t each = of.c_out / of.c_in;
    for (size_t i = global_thread(); i < batch * of.c_in * of.h * of.w; i += global_threads()) {
        Pixel at(i, of.h, of.w);
        size_t image = quotient(at.image, of.c_in), channel = at.image - image * of.c_in;
        Acc<T> sum = 0;
        for (size_t out = channel * each; out < (channel + 1) * each; out++) {
            const T *plane = g + (image * of.c_out + out) * of.oh * of.ow;
            const T *taps = weight + out * of.kh * of.kw;
            for (size_t ky = 0; ky < of.kh; ky++) {
                size_t y, x;
                if (!position(at.y, ky, of.ph, of.stride, of.dilation, of.oh, y)) continue;
                for (size_t kx = 0; kx < of.kw; kx++) {
                    if (!position(at.x, kx, of.pw, of.stride, of.dilation, of.ow, x)) continue;
                    sum += widen(plane[y * of.ow + x]) * widen(taps[ky * of.kw + kx]);
                }
            }
        }
        if (bias) sum += bias[channel];
        narrow(sum, dx[i]);
    }
}

// A block has a weight, and goes over the batch.
template <class T>
DEVICE void depthwise_wgrad(const T *x, const T *g, Acc<T> *dw, size_t batch, const Shape &of) {
    size_t kx = blockIdx.x % of.kw, ky = blockIdx.x / of.kw % of.kh, out = blockIdx.x / of.kw / of.kh;
    size_t channel = out / (of.c_out / of.c_in), area = of.oh * of.ow;
    Acc<T> sum = 0;
    for (size_t i = threadIdx.x; i < batch * area; i += blockDim.x) {
        Pixel at(i, of.oh, of.ow);
        size_t row = at.y * of.stride + ky * of.dilation - of.ph;
        size_t column = at.x * of.stride + kx * of.dilation - of.pw;
        if (row >= of.h || column >= of.w) continue;
        Acc<T> value = widen(x[((at.image * of.c_in + channel) * of.h + row) * of.w + column]);
        sum += value * widen(g[(at.image * of.c_out + out) * area + at.y * of.ow + at.x]);
    }
    sum = block_reduce<Sum>(sum, Acc<T>(0));
    if (threadIdx.x == 0) dw[blockIdx.x] = sum;
}

#define MOVES(t, T)                                                                                \
    KERNEL im2col_##t(const T *x, T *columns, size_t first, size_t count, size_t ld, SHAPE) {      \
        im2col(x, columns, first, count, ld, AS_SHAPE);                                            \
    }                                                                                              \
    KERNEL to_rows_##t(const T *images, T *rows, size_t first, size_t count, size_t ld, SHAPE) {   \
        to_rows(images, rows, first, count, ld, AS_SHAPE);                                         \
    }                                                                                              \
    KERNEL depthwise_wgrad_##t(const T *x, const T *g, Acc<T> *dw, size_t batch, SHAPE) {         \
        depthwise_wgrad(x, g, dw, batch, AS_SHAPE);                                               \
    }
EACH_FLOAT(MOVES)

#define ROWS(s_o, S, O)                                                                            \
    KERNEL from_rows_##s_o(const S *rows, O *images, const Acc<S> *bias, size_t first, size_t count, \
                           size_t ld, SHAPE) {                                                     \
        from_rows(rows, images, bias, first, count, ld, AS_SHAPE);                                 \
    }
OF_F32(ROWS(f32_f32, float, float))
OF_F16(ROWS(f32_f16, float, f16) ROWS(f16_f16, f16, f16))
OF_BF16(ROWS(f32_bf16, float, bf16) ROWS(bf16_bf16, bf16, bf16))
OF_F64(ROWS(f64_f64, double, double))

#define COLUMNS(s_o, A, O)                                                                         \
    KERNEL col2im_##s_o(const A *columns, O *dx, const A *bias, size_t first_image, size_t images, \
                        size_t ld, SHAPE) {                                                        \
        col2im(columns, dx, bias, first_image, images, ld, AS_SHAPE);                              \
    }
EACH_ROUNDED(COLUMNS)

#define DEPTHWISE(t, T, o, O)                                                                       \
    KERNEL depthwise_##t##_##o(const T *x, const T *weight, const Acc<T> *bias, O *y, size_t batch, SHAPE) { \
        depthwise(x, weight, bias, y, batch, AS_SHAPE);                                            \
    }                                                                                              \
    KERNEL depthwise_dgrad_##t##_##o(const T *g, const T *weight, const Acc<T> *bias, O *dx, size_t batch, \
                                 SHAPE) {                                                          \
        depthwise_dgrad(g, weight, bias, dx, batch, AS_SHAPE);                                     \
    }
EACH_PAIR(DEPTHWISE)
