// What a matrix product leaves to be done: y = x + bias, x (rows, n) in the type of the arithmetic, or
// nothing where there was nothing to multiply.

template <class A, class O> DEVICE void add_bias(O *y, const A *x, const A *bias, size_t count, size_t n) {
    constexpr int V = PACK<A, O>;
    bool packed = aligned(x) && aligned(bias) && aligned(y) && n % V == 0;
    along<V>(count, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        A u[N] = {}, v[N] = {};
        if (x) read(x + i, u);
        if (bias) read(bias + i % n, v);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] += v[k];
        write(y + i, u);
    });
}

#define BIAS(a, A, o, O)                                                                          \
    KERNEL bias_##a##_##o(O *y, const A *x, const A *bias, size_t count, size_t n) {              \
        add_bias(y, x, bias, count, n);                                                           \
    }
#define FROM_F32(o, O) BIAS(f32, float, o, O)
#define FROM_F64(o, O) BIAS(f64, double, o, O)
EACH_FLOAT(FROM_F32)
OF_F64(FROM_F64(f32, float) FROM_F64(f16, f16) FROM_F64(bf16, bf16) FROM_F64(f64, double))
