// Pooling of (n, c, h, w). A thread has one element: of the output in forward, of the input in backward.
//
// Forward goes over the elements of a window. Max pooling keeps the index of the largest: the first of equal ones, and
// NaN wins. Average pooling divides by the whole window, so padding counts as zeros.
//
// Backward gathers. A thread goes over the windows that cover its element, and adds their gradients; of a max pool,
// those whose kept index is its own. So it needs no atomics, and each sum has one order, the CPU's. The CPU adds
// averages tap by tap, so here the windows of a row come from the last to the first.
//
// Sums are F32 (F64 for F64) and rounded once. Global average pooling has a block for a plane, and joins its threads'
// sums by `block_reduce`. Indices are 32-bit where they fit, because 64-bit division is slow.

// The first of the largest, as an index into the plane; NaN wins.
template <class I, class T>
DEVICE void max_forward(const T *x, T *y, u32 *index, I i, Window<I> of) {
    I ox = i % of.ow, oy = i / of.ow % of.oh, plane = i / of.ow / of.oh;
    Span<I> rows(oy, of.kh, of.sh, of.ph, of.h), columns(ox, of.kw, of.sw, of.pw, of.w);
    const T *from = x + (size_t)plane * of.h * of.w;
    Acc<T> best = -infinity<Acc<T>>();
    I at = rows.from * of.w + columns.from;
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.from; column < columns.to; column++) {
            Acc<T> value = widen(from[row * of.w + column]);
            if (value > best || value != value) {
                best = value;
                at = row * of.w + column;
            }
        }
    narrow(best, y[i]);
    index[i] = (u32)at;
}

template <class I, class G, class O>
DEVICE void max_backward(const G *g, const u32 *index, O *dx, I i, Window<I> of) {
    I x = i % of.w, y = i / of.w % of.h, plane = i / of.w / of.h;
    Cover<I> rows(y, of.kh, of.sh, of.ph, of.oh), columns(x, of.kw, of.sw, of.pw, of.ow);
    size_t first = (size_t)plane * of.oh * of.ow;
    u32 here = (u32)(y * of.w + x);
    Acc<G> sum = 0;
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.from; column < columns.to; column++) {
            size_t window = first + row * of.ow + column;
            if (index[window] == here) sum += widen(g[window]);
        }
    narrow(sum, dx[i]);
}

// Padding counts as zeros.
template <class I, class T> DEVICE void avg_forward(const T *x, T *y, I i, Window<I> of) {
    I ox = i % of.ow, oy = i / of.ow % of.oh, plane = i / of.ow / of.oh;
    Span<I> rows(oy, of.kh, of.sh, of.ph, of.h), columns(ox, of.kw, of.sw, of.pw, of.w);
    const T *from = x + (size_t)plane * of.h * of.w;
    Acc<T> sum = 0;
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.from; column < columns.to; column++) sum += widen(from[row * of.w + column]);
    narrow(sum / (Acc<T>)(of.kh * of.kw), y[i]);
}

template <class I, class G, class O> DEVICE void avg_backward(const G *g, O *dx, I i, Window<I> of) {
    I x = i % of.w, y = i / of.w % of.h, plane = i / of.w / of.h;
    Cover<I> rows(y, of.kh, of.sh, of.ph, of.oh), columns(x, of.kw, of.sw, of.pw, of.ow);
    const G *from = g + (size_t)plane * of.oh * of.ow;
    Acc<G> sum = 0, area = (Acc<G>)(of.kh * of.kw);
    for (I row = rows.from; row < rows.to; row++)
        for (I column = columns.to; column-- > columns.from;) sum += widen(from[row * of.ow + column]) / area;
    narrow(sum, dx[i]);
}

// A block has a plane.
template <class T> DEVICE void global_avg_forward(const T *x, T *y, size_t area) {
    const T *from = x + blockIdx.x * area;
    Acc<T> sum = 0;
    if (area % Pack<T>::LEN == 0 && aligned(x)) {
        for (size_t i = threadIdx.x; i < area / Pack<T>::LEN; i += blockDim.x) {
            Pack<T> pack = load_pack(from + i * Pack<T>::LEN);
            Acc<T> own = 0;
            for (int j = 0; j < Pack<T>::LEN; j++) own += widen(pack.at[j]);
            sum += own;
        }
    } else {
        for (size_t i = threadIdx.x; i < area; i += blockDim.x) sum += widen(from[i]);
    }
    sum = block_reduce<Sum>(sum, Acc<T>(0));
    if (threadIdx.x == 0) narrow(sum / (Acc<T>)area, y[blockIdx.x]);
}

// A block has a plane.
template <class G, class O> DEVICE void global_avg_backward(const G *g, O *dx, size_t area) {
    O *to = dx + blockIdx.x * area;
    O share = as<O>(widen(g[blockIdx.x]) / (Acc<G>)area);
    if (area % Pack<O>::LEN == 0 && aligned(dx)) {
        Pack<O> pack;
        for (int j = 0; j < Pack<O>::LEN; j++) pack.at[j] = share;
        for (size_t i = threadIdx.x; i < area / Pack<O>::LEN; i += blockDim.x)
            store_pack(to + i * Pack<O>::LEN, pack);
    } else {
        for (size_t i = threadIdx.x; i < area; i += blockDim.x) to[i] = share;
    }
}

#define FORWARD(t, T)                                                                              \
    KERNEL max_forward_##t(const T *x, T *y, u32 *index, WINDOW) {                                 \
        FOR_EACH(planes * oh * ow, max_forward(x, y, index, i, OF(I)))                             \
    }                                                                                              \
    KERNEL avg_forward_##t(const T *x, T *y, WINDOW) {                                             \
        FOR_EACH(planes * oh * ow, avg_forward(x, y, i, OF(I)))                                    \
    }                                                                                              \
    ROW_KERNEL global_avg_forward_##t(const T *x, T *y, size_t area) { global_avg_forward(x, y, area); }
EACH_FLOAT(FORWARD)

// From gradients of one dtype to those of another.
#define BACKWARD(t, T, o, O)                                                                       \
    KERNEL max_backward_##t##_##o(const T *g, const u32 *index, O *dx, WINDOW) {                   \
        FOR_EACH(planes * h * w, max_backward(g, index, dx, i, OF(I)))                             \
    }                                                                                              \
    KERNEL avg_backward_##t##_##o(const T *g, O *dx, WINDOW) {                                     \
        FOR_EACH(planes * h * w, avg_backward(g, dx, i, OF(I)))                                    \
    }                                                                                              \
    ROW_KERNEL global_avg_backward_##t##_##o(const T *g, O *dx, size_t area) { global_avg_backward(g, dx, area); }
EACH_PAIR(BACKWARD)
