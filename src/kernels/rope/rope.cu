// Pairs of elements turned by the angle of their position, in the type of the arithmetic. x is
// (b, first, second, d) of any strides, y contiguous; positions count `first` or `second`. A pair is
// (2i, 2i + 1) where `adjacent`, else (i, i + d / 2).

template <class T, class C, class O>
DEVICE void rotate(O *y, const T *x, const C *cos, const C *sin, size_t pairs, size_t first, size_t second,
                   size_t half, size_t x0, size_t x1, size_t x2, size_t x3, size_t positions, int per_batch,
                   int positions_first, int adjacent, int back, int packed) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, O> > PACK<T, C> ? PACK<T, O> : PACK<T, C>;
    bool packs = packed && aligned(x) && aligned(y) && aligned(cos) && aligned(sin);
    along<V>(pairs, packs, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Place place(i, first, second, half); // batch, one, two, pair
        const T *from = x + place.of(x0, x1, x2, 0);
        O *to = y + (i - place.i3) * 2;
        size_t row = (per_batch ? place.i0 * positions : 0) + (positions_first ? place.i1 : place.i2);
        A c[N], s[N], a[2 * N], b[2 * N];
        read(cos + row * half + place.i3, c);
        read(sin + row * half + place.i3, s);
        if (adjacent) {
            if (N > 1) {
                read(from + 2 * place.i3, a);
            } else {
                a[0] = widen(from[2 * place.i3 * x3]), a[1] = widen(from[(2 * place.i3 + 1) * x3]);
            }
        } else {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                A u[N];
                if (N > 1) {
                    read(from + part * half + place.i3, u);
                } else {
                    u[0] = widen(from[(part * half + place.i3) * x3]);
                }
#pragma unroll
                for (int k = 0; k < N; k++) a[2 * k + part] = u[k];
            }
        }
#pragma unroll
        for (int k = 0; k < N; k++) {
            A turn = back ? -s[k] : s[k];
            b[2 * k] = a[2 * k] * c[k] - a[2 * k + 1] * turn;
            b[2 * k + 1] = a[2 * k] * turn + a[2 * k + 1] * c[k];
        }
        if (adjacent) {
            if (N > 1) {
                write(to + 2 * place.i3, b);
            } else {
                narrow(b[0], to[2 * place.i3]), narrow(b[1], to[2 * place.i3 + 1]);
            }
        } else {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                A u[N];
#pragma unroll
                for (int k = 0; k < N; k++) u[k] = b[2 * k + part];
                write(to + part * half + place.i3, u);
            }
        }
    });
}

#define ROTATE(t, T, c, C, o, O)                                                                  \
    KERNEL rotate_##t##_##c##_##o(                                                                \
        O *y, const T *x, const C *cos, const C *sin, size_t pairs, size_t first, size_t second,  \
        size_t half, size_t x0, size_t x1, size_t x2, size_t x3, size_t positions, int per_batch, \
        int positions_first, int adjacent, int back, int packed) {                                \
        rotate(y, x, cos, sin, pairs, first, second, half, x0, x1, x2, x3, positions, per_batch,  \
               positions_first, adjacent, back, packed);                                          \
    }
EACH_TRIPLE(ROTATE)
