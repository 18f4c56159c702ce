// Interpolation of planes of (h, w), nearest or bilinear. A thread has one pixel: of the output in forward, of the
// input in backward.
//
// Backward gathers. `touched` gives a range of output pixels that has all those made of this input pixel and a few
// more, and the thread adds the gradients of those that are. So it needs no atomics, and each sum has one order, the
// CPU's. Sums are F32 (F64 for F64) and rounded once.
//
// Bilinear positions and weights are computed in F64, nearest ones exactly, by the formulas of sampling_grid.rs, so that the CPU picks the same pixels.
// Bilinear copies along an axis that keeps its size: an infinity times a weight of 0 would be NaN.

template <class I> struct Between {
    I low, high;
    double weight; // of high; low has the rest
};

// One dimension: `from` pixels in, `to` out.
template <class I> struct Axis {
    I from, to;
    double step, centre;
    bool linear;

    // Copied, where nothing is averaged: not even an infinity times 0 is added.
    DEVICE bool kept() const { return from == to; }

    DEVICE Between<I> at(I i) const {
        if (kept()) return {i, i, 0};
        if (!linear) {
            // Exactly: a rounded step would take the pixel before for some sizes.
            unsigned long long from_zero = (unsigned long long)i * from;
            I low = from_zero >> 32 ? (I)(from_zero / to) : (I)((u32)from_zero / (u32)to);
            return {low, low, 0};
        }
        double place = ((double)i + centre) * step - centre;
        if (place < 0) place = 0;
        I low = (I)place;
        if (low > from - 1) low = from - 1;
        double weight = place - (double)low;
        weight = weight < 0 ? 0 : weight > 1 ? 1 : weight;
        return {low, low + 1 > from - 1 ? from - 1 : low + 1, weight};
    }

    // Output pixels, among which are all that `pixel` is part of.
    DEVICE void touched(I pixel, I &first, I &last) const {
        first = 0;
        last = to;
        if (step == 0) return;
        if (pixel > 0) {
            double start = ((double)pixel - 1 + centre) / step - centre - 2;
            if (start >= (double)to) start = (double)to;
            if (start > 0) first = (I)start;
        }
        if (pixel < from - 1) {
            double end = ((double)pixel + 1 + centre) / step - centre + 3;
            if (end < (double)to) last = end > 0 ? (I)end : 0;
        }
    }
};

template <class I, class T>
DEVICE void forward(const T *x, T *y, I i, Axis<I> vertical, Axis<I> horizontal) {
    typedef Acc<T> A;
    I w = horizontal.from, plane = i / horizontal.to / vertical.to;
    Between<I> column = horizontal.at(i % horizontal.to), row = vertical.at(i / horizontal.to % vertical.to);
    const T *from = x + (size_t)plane * vertical.from * w;
    if (!vertical.linear) {
        y[i] = from[row.low * w + column.low];
        return;
    }
    auto across = [&](const T *x) {
        A low = widen(x[column.low]), high = widen(x[column.high]);
        return horizontal.kept() ? low : low * (A)(1 - column.weight) + high * (A)column.weight;
    };
    A above = across(from + row.low * w), below = across(from + row.high * w);
    narrow(vertical.kept() ? above : above * (A)(1 - row.weight) + below * (A)row.weight, y[i]);
}

template <class I, class G, class O>
DEVICE void backward(const G *g, O *dx, I i, Axis<I> vertical, Axis<I> horizontal) {
    typedef Acc<G> A;
    I w = horizontal.from, x = i % w, y = i / w % vertical.from, plane = i / w / vertical.from;
    I top, bottom, left, right;
    vertical.touched(y, top, bottom);
    horizontal.touched(x, left, right);
    const G *from = g + (size_t)plane * vertical.to * horizontal.to;
    A sum = 0;
    for (I oy = top; oy < bottom; oy++) {
        Between<I> row = vertical.at(oy);
        for (int side = 0; side < (vertical.linear && !vertical.kept() ? 2 : 1); side++) {
            if ((side ? row.high : row.low) != y) continue;
            A down = (A)(side ? row.weight : 1 - row.weight);
            for (I ox = left; ox < right; ox++) {
                Between<I> column = horizontal.at(ox);
                if (column.low != x && column.high != x) continue;
                A grad = widen(from[oy * horizontal.to + ox]);
                if (!vertical.linear) {
                    sum += grad;
                    continue;
                }
                if (column.low == x) sum += grad * down * (A)(1 - column.weight);
                if (column.high == x && !horizontal.kept()) sum += grad * down * (A)column.weight;
            }
        }
    }
    narrow(sum, dx[i]);
}

#define GRID                                                                                       \
    size_t planes, size_t h, size_t w, size_t oh, size_t ow, double down, double across,           \
        double centre, int linear
#define AXES(I) Axis<I>{(I)h, (I)oh, down, centre, linear != 0}, Axis<I>{(I)w, (I)ow, across, centre, linear != 0}

// 32-bit places where they are enough: division by 64-bit ones is slow.
#define FOR_EACH(count, body)                                                                      \
    if (planes * h * w < 1ull << 31 && planes * oh * ow < 1ull << 31) {                            \
        typedef u32 I;                                                                             \
        for (I i = (I)global_thread(); i < (I)(count); i += (I)global_threads()) body;             \
    } else {                                                                                       \
        typedef size_t I;                                                                          \
        for (I i = global_thread(); i < (count); i += global_threads()) body;                      \
    }

#define FORWARD(t, T)                                                                              \
    KERNEL forward_##t(const T *x, T *y, GRID) {                                                   \
        FOR_EACH(planes * oh * ow, forward(x, y, i, AXES(I)))                                      \
    }
EACH_FLOAT(FORWARD)

#define BACKWARD(t, T, o, O)                                                                       \
    KERNEL backward_##t##_##o(const T *g, O *dx, GRID) {                                           \
        FOR_EACH(planes * h * w, backward(g, dx, i, AXES(I)))                                      \
    }
EACH_PAIR(BACKWARD)
