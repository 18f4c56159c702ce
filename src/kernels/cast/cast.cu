// Between dtypes, through F32, or F64 where one side is; rounded to nearest even. From F64 to 16 bits that is twice,
// through F32, as on the CPU.

template <class S, class D> DEVICE void cast(D *y, const S *x, size_t n) {
    along<PACK<S, D>>(n, aligned(x) && aligned(y), global_thread(), global_threads(), [&](size_t i, auto width) {
        Acc<S> wide[decltype(width)::value];
        read(x + i, wide);
        write(y + i, wide);
    });
}

// From a view of any strides. `packed`: the elements a thread takes lie along the last dimension.
template <class S, class D>
DEVICE void cast_strided(D *y, const S *x, size_t n, int packed, size_t d1, size_t d2, size_t d3, size_t x0,
                         size_t x1, size_t x2, size_t x3) {
    bool packs = packed && aligned(x) && aligned(y);
    along<PACK<S, D>>(n, packs, global_thread(), global_threads(), [&](size_t i, auto width) {
        Acc<S> wide[decltype(width)::value];
        read_strided(x + Place(i, d1, d2, d3).of(x0, x1, x2, x3), x3, wide);
        write(y + i, wide);
    });
}

#define CAST(s, S, d, D)                                                                          \
    KERNEL cast_##s##_##d(D *y, const S *x, size_t n) { cast(y, x, n); }                          \
    KERNEL cast_strided_##s##_##d(D *y, const S *x, size_t n, int packed, size_t d1, size_t d2,    \
                                  size_t d3, size_t x0, size_t x1, size_t x2, size_t x3) {         \
        cast_strided(y, x, n, packed, d1, d2, d3, x0, x1, x2, x3);                                \
    }
#define FROM(s, S) CAST(s, S, f32, float) CAST(s, S, f16, f16) CAST(s, S, bf16, bf16) CAST(s, S, f64, double)
#define FROM_F32(d, D) CAST(f32, float, d, D)
EACH_FLOAT(FROM_F32)
OF_F16(FROM(f16, f16)) OF_BF16(FROM(bf16, bf16)) OF_F64(FROM(f64, double))
