// Element-wise arithmetic, in one pass that reads each operand once and writes the result once.
//
// A thread takes as many elements at a time as 16 bytes hold in the narrowest of the float dtypes. It widens them to
// F32 (F64 for F64), computes, and rounds each result once. At the end, and at addresses that are not multiples of 16,
// it takes single elements. It reads its elements before it writes them, so a result may overwrite an operand.
//
// The `_strided` kernels read broadcast operands by their strides, so that these are not copied first. Maximum, minimum
// and ReLU are comparisons that keep NaN, and ReLU's gradient passes where its result is NaN.
//
// `keep_mask` draws dropout's mask. ChaCha computes any block of 16 numbers from the key, the stream and the block's
// number. So threads need no order, and the mask is the CPU's.

struct Sub {
    template <class A> static DEVICE A of(A a, A b) { return a - b; }
};
struct Mul {
    template <class A> static DEVICE A of(A a, A b) { return a * b; }
};
struct Div {
    template <class A> static DEVICE A of(A a, A b) { return a / b; }
};
// NaN wins, as in Max.
struct Min {
    template <class A> static DEVICE A of(A a, A b) { return a < b || a != a ? a : b; }
};
// Zero where x is negative; NaN is not.
struct Relu {
    template <class A> static DEVICE A of(A x) { return x <= A(0) ? A(0) : x; }
};
struct AddRelu {
    template <class A> static DEVICE A of(A a, A b) { return Relu::of(a + b); }
};
// A NaN lets the gradient through, as in PyTorch.
struct ReluBackward {
    template <class A> static DEVICE A of(A y, A grad) { return y <= A(0) ? A(0) : grad; }
};

template <class Op, class T, class S, class O> DEVICE void binary(O *y, const T *a, const S *b, size_t n) {
    bool packed = aligned(a) && aligned(b) && aligned(y);
    along<PACK<S, O>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N], v[N];
        read(a + i, u);
        read(b + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = Op::of(u[k], v[k]);
        write(y + i, u);
    });
}

// Of views of any strides. `packed`: the elements a thread takes lie along the last dimension.
template <class Op, class T, class O>
DEVICE void binary_strided(O *y, const T *a, const T *b, size_t n, int packed, size_t d1, size_t d2, size_t d3,
                           size_t a0, size_t a1, size_t a2, size_t a3, size_t b0, size_t b1, size_t b2, size_t b3) {
    bool packs = packed && aligned(a) && aligned(b) && aligned(y);
    along<PACK<T, O>>(n, packs, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N], v[N];
        Place place(i, d1, d2, d3);
        read_strided(a + place.of(a0, a1, a2, a3), a3, u);
        read_strided(b + place.of(b0, b1, b2, b3), b3, v);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = Op::of(u[k], v[k]);
        write(y + i, u);
    });
}

#define FLAT(name, Op, t, T, o, O)                                                                \
    KERNEL name##_##t##_##o(O *y, const T *a, const T *b, size_t n) { binary<Op>(y, a, b, n); }
#define ADD_MIXED(t, T)                                                                            \
    KERNEL add_mixed_##t(float *y, const float *a, const T *b, size_t n) { binary<Sum>(y, a, b, n); }
#define STRIDED(name, Op, t, T, o, O)                                                             \
    KERNEL name##_strided_##t##_##o(O *y, const T *a, const T *b, size_t n, int packed, size_t d1, \
                                    size_t d2, size_t d3, size_t a0, size_t a1, size_t a2,         \
                                    size_t a3, size_t b0, size_t b1, size_t b2, size_t b3) {       \
        binary_strided<Op>(y, a, b, n, packed, d1, d2, d3, a0, a1, a2, a3, b0, b1, b2, b3);        \
    }
#define SAME(X, name, Op)                                                                         \
    OF_F32(X(name, Op, f32, float, f32, float)) OF_F64(X(name, Op, f64, double, f64, double))     \
    OF_F16(X(name, Op, f16, f16, f16, f16)) OF_BF16(X(name, Op, bf16, bf16, bf16, bf16))
#define ANY(X, name, Op)                                                                          \
    SAME(X, name, Op)                                                                             \
    OF_F16(X(name, Op, f16, f16, f32, float)) OF_BF16(X(name, Op, bf16, bf16, f32, float))
SAME(FLAT, add, Sum)
OF_F16(ADD_MIXED(f16, f16)) OF_BF16(ADD_MIXED(bf16, bf16))
SAME(FLAT, sub, Sub)
ANY(FLAT, mul, Mul)
ANY(FLAT, div, Div)
SAME(STRIDED, add, Sum)
SAME(STRIDED, sub, Sub)
ANY(STRIDED, mul, Mul)
ANY(STRIDED, div, Div)
SAME(FLAT, maximum, Max)
SAME(FLAT, minimum, Min)
SAME(STRIDED, maximum, Max)
SAME(STRIDED, minimum, Min)
SAME(FLAT, add_relu, AddRelu)
SAME(FLAT, relu_backward, ReluBackward)

template <class T> DEVICE void relu(T *y, const T *x, size_t n) {
    along<PACK<T>>(n, aligned(x) && aligned(y), global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N];
        read(x + i, u);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = Relu::of(u[k]);
        write(y + i, u);
    });
}

// The gradient of a quotient in its divisor.
struct Divisor {
    template <class A> static DEVICE A of(A a, A b, A grad) { return -(grad * (a / b)) / b; }
};
// The gradient of a maximum in a, and of a minimum in b.
struct Selection {
    template <class A> static DEVICE A of(A a, A b, A grad) { return a < b ? A(0) : a == b ? grad * A(0.5) : grad; }
};

template <class Op, class T, class O> DEVICE void ternary(O *y, const T *a, const T *b, const T *grad, size_t n) {
    bool packed = aligned(a) && aligned(b) && aligned(grad) && aligned(y);
    along<PACK<T, O>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N], v[N], g[N];
        read(a + i, u);
        read(b + i, v);
        read(grad + i, g);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = Op::of(u[k], v[k], g[k]);
        write(y + i, u);
    });
}

template <class T, class S> DEVICE void add_assign(T *y, const S *x, size_t n) {
    along<PACK<T, S>>(n, aligned(x) && aligned(y), global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N], v[N];
        read(y + i, u);
        read(x + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] += v[k];
        write(y + i, u);
    });
}

template <class T> DEVICE void dropout(T *y, const T *x, const u8 *keep, double scale, size_t n) {
    Acc<T> factor = (Acc<T>)scale;
    bool packed = aligned(x) && aligned(y) && aligned(keep);
    along<PACK<T>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N];
        __align__(16) u8 kept[N];
        read(x + i, u);
        load_run<N>(kept, keep + i);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = kept[k] ? u[k] * factor : Acc<T>(0);
        write(y + i, u);
    });
}

#define UNARY(t, T)                                                                               \
    KERNEL relu_##t(T *y, const T *x, size_t n) { relu(y, x, n); }                                \
    KERNEL selection_##t(T *y, const T *a, const T *b, const T *grad, size_t n) {                 \
        ternary<Selection>(y, a, b, grad, n);                                                     \
    }                                                                                             \
    KERNEL dropout_##t(T *y, const T *x, const u8 *keep, double scale, size_t n) {                \
        dropout(y, x, keep, scale, n);                                                            \
    }
EACH_FLOAT(UNARY)

#define MIXED(t, T, o, O)                                                                         \
    KERNEL divisor_##t##_##o(O *y, const T *a, const T *b, const T *grad, size_t n) {             \
        ternary<Divisor>(y, a, b, grad, n);                                                              \
    }                                                                                             \
    KERNEL add_assign_##t##_##o(T *y, const O *x, size_t n) { add_assign(y, x, n); }
EACH_PAIR(MIXED)

// ChaCha with 8 rounds, as the CPU's generator draws: a thread has a block of 16 numbers, and keeps
// those below the threshold.
DEVICE u32 turned(u32 x, int by) { return x << by | x >> (32 - by); }

DEVICE void quarter(u32 &a, u32 &b, u32 &c, u32 &d) {
    a += b, d = turned(d ^ a, 16);
    c += d, b = turned(b ^ c, 12);
    a += b, d = turned(d ^ a, 8);
    c += d, b = turned(b ^ c, 7);
}

// A captured draw reads key and stream from memory that the host rewrites before each replay.
KERNEL keep_mask(u8 *y, size_t n, u64 threshold, u64 k0, u64 k1, u64 k2, u64 k3, u64 stream, const u64 *captured) {
    if (captured) k0 = captured[0], k1 = captured[1], k2 = captured[2], k3 = captured[3], stream = captured[4];
    for (u64 block = global_thread(); block * 16 < n; block += global_threads()) {
        u32 start[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, (u32)k0, (u32)(k0 >> 32),
                         (u32)k1,    (u32)(k1 >> 32), (u32)k2, (u32)(k2 >> 32), (u32)k3, (u32)(k3 >> 32),
                         (u32)block, (u32)(block >> 32), (u32)stream, (u32)(stream >> 32)};
        u32 x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = start[i];
#pragma unroll
        for (int round = 0; round < 4; round++) {
            quarter(x[0], x[4], x[8], x[12]), quarter(x[1], x[5], x[9], x[13]);
            quarter(x[2], x[6], x[10], x[14]), quarter(x[3], x[7], x[11], x[15]);
            quarter(x[0], x[5], x[10], x[15]), quarter(x[1], x[6], x[11], x[12]);
            quarter(x[2], x[7], x[8], x[13]), quarter(x[3], x[4], x[9], x[14]);
        }
        u32 kept[4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) kept[i / 4] |= (u32)(x[i] + start[i] < threshold) << (i % 4 * 8);
        if (block * 16 + 16 <= n) {
            *(uint4 *)(y + block * 16) = make_uint4(kept[0], kept[1], kept[2], kept[3]); // memory of its own
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (block * 16 + i < n) y[block * 16 + i] = (u8)(kept[i / 4] >> (i % 4 * 8));
            }
        }
    }
}
