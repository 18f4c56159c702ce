// Parts that attention's tensor-core kernels share: fragments, tiles, scores and output. Tri Dao, FlashAttention-2.
//
// A block has 64 rows of one head, or more, and each of its warps has 16 of them. Rows of the other operand come into
// shared memory one tile at a time. Scores exist for one tile only, in registers, so memory never holds them.
//
// A warp multiplies its rows by a tile with `mma.sync` (warps.cuh), or a Hopper warpgroup with `wgmma` (wgmma.cuh).
// Both leave the result in the same registers: of rows g and g + 8 and every 8 columns, lane 4 g + t has columns 2 t
// and 2 t + 1. A left operand has that layout too, so probabilities go into the next product without a shuffle.
//
// Sums are F32. Tensor cores have no F32 operands, so an F32 number is the sum of two TF32 terms, and a product takes
// four instructions; of the type `tf32` it is rounded to one term. Exponentials are powers of two, because the hardware
// computes those. Where scores are products times a scale, log2(e) and the scale are one factor (`unit`).

template <class T> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;

#define LOG2_E 1.44269504f

// F32 numbers that products round to TF32. Of `float`, products are F32: see `multiply`.
struct tf32 {
    float number;
};
template <class T> constexpr bool IS_WIDE = sizeof(T) == 4;
template <class T> constexpr bool IS_TF32 = false;
template <> constexpr bool IS_TF32<tf32> = true;
// What one product of tensor cores adds up.
template <class T> constexpr int STEP = 32 / sizeof(T);

// Two numbers, rounded to T.
template <class T> DEVICE u32 pack(float low, float high) {
#ifdef AMPERE
    u32 both;
    if constexpr (IS_F16<T>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    }
    return both;
#else
    return as<T>(low).bits | (u32)as<T>(high).bits << 16;
#endif
}

// 2^x, to 2 ulp; a result below F32's normal numbers is 0.
DEVICE float power_of_two(float x) {
#ifdef AMPERE
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// c (16, 8) += a (16, 8) b (8, 8) of TF32, a warp together: bits below TF32's count for nothing. As `multiply`.
DEVICE void multiply_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef AMPERE
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap(); // nobody launches this below 8.0
#endif
}

// To nearest.
DEVICE u32 as_tf32(u32 bits) {
    u32 rounded = bits;
#ifdef AMPERE
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
#endif
    return rounded;
}

// A number is the sum of two of TF32, to 2^-22 of it: its upper bits, and this. Never zero where the number is not, of the
// same sign, and infinite where that is: so that infinity times it is what infinity times the number is.
DEVICE u32 lower_tf32(u32 bits) {
    float x = __uint_as_float(bits), upper = __uint_as_float(bits & 0xffffe000);
    return as_tf32(__float_as_uint(upper == x ? x * 9.31322575e-10f : x - upper)); // 2^-30
}

// c (16, 8) += a (16, STEP) b (STEP, 8), a warp together. Lane 4 g + t has rows g and g + 8 of a and c, column g of b, and
// of the dimension that is summed, or of c's columns, 2 t and 2 t + 1, and of 16 bits 8 further. In F32 that is another
// order of what is summed than the instruction's own: of both matrices the same.
template <class T> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_WIDE<T>) {
        u32 upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            upper[i] = IS_TF32<T> ? as_tf32(a[i]) : a[i] & 0xffffe000;
            lower[i] = lower_tf32(a[i]);
        }
        if constexpr (IS_TF32<T>) {
            multiply_tf32(c, upper, as_tf32(b0), as_tf32(b1));
        } else {
            // The smallest first.
            u32 lower0 = lower_tf32(b0), lower1 = lower_tf32(b1);
            b0 &= 0xffffe000, b1 &= 0xffffe000;
            multiply_tf32(c, lower, lower0, lower1);
            multiply_tf32(c, lower, b0, b1);
            multiply_tf32(c, upper, lower0, lower1);
            multiply_tf32(c, upper, b0, b1);
        }
        return;
    }
#ifdef AMPERE
#define MULTIPLY(type)                                                                            \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                   \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_F16<T>) {
        MULTIPLY("f16");
    } else {
        MULTIPLY("bf16");
    }
#else
    __trap(); // nobody launches this below 8.0
#endif
}

// The same, but what this product adds up is added to c by an addition, which rounds to nearest. Tensor cores round towards
// zero: over many products that adds up to more than F32's own rounding. Where bits are dropped anyway, it does not matter.
template <class T> DEVICE void multiply_to_nearest(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_WIDE<T> && !IS_TF32<T>) {
        float sum[4] = {};
        multiply<T>(sum, a, b0, b1);
#pragma unroll
        for (int e = 0; e < 4; e++) c[e] += sum[e];
    } else {
        multiply<T>(c, a, b0, b1);
    }
}

// Begins to copy 16 or 4 bytes into shared memory; zeros, where there are none. They are there once the thread
// has called `arrived`, for others of its block after a barrier too.
template <int BYTES> DEVICE void copy_async(void *to, const void *from, bool there) {
#ifdef AMPERE
    u32 at = (u32)__cvta_generic_to_shared(to), size = there ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(at), "l"(from), "r"(size) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" : : "r"(at), "l"(from), "r"(size) : "memory");
    }
#endif
}

DEVICE void arrived() {
#ifdef AMPERE
    asm volatile("cp.async.wait_all;" : : : "memory");
#endif
}

// Elements of a tensor (b, h, n, d) whose last dimension has a stride of 1.
template <class T> struct Heads {
    T *from;
    size_t s0, s1, s2;

    DEVICE T *head(size_t batch, size_t head) const { return from + batch * s0 + head * s1; }
};

// The rows of one head that a block has, 64 or more, and the two of them that a lane has.
struct Block {
    u32 tile, batch, head, row[2];
    int size;

    // The grid is flat, of all tiles of all heads, a tile of every head after another.
    DEVICE Block(u32 rows, u32 heads, bool last_first, int size = 64) : size(size) {
        u32 tiles = (rows + size - 1) / size, all = gridDim.x / tiles;
        tile = last_first ? tiles - 1 - blockIdx.x / all : blockIdx.x / all;
        batch = blockIdx.x % all / heads, head = blockIdx.x % heads;
        row[0] = first() + threadIdx.x % 32 / 4, row[1] = row[0] + 8;
    }

    // The first row of the 16 that a warp has.
    DEVICE u32 first() const { return tile * size + threadIdx.x / 32 * 16; }

    // The row after the last one of the block, and the first of a warpgroup and the one after its last.
    DEVICE u32 after() const { return (tile + 1) * size; }
    DEVICE u32 first_of_group() const { return tile * size + threadIdx.x / 128 * 64; }
    DEVICE u32 after_group() const { return first_of_group() + 64; }
};

struct Sizes {
    u32 heads, group, queries, keys, width;
    int causal;

    DEVICE bool sees(u32 query, u32 key) const {
        return query < queries && key < keys && (!causal || key <= query);
    }

    // Whether any of 16 queries does not see all of `count` keys.
    DEVICE bool is_edge(u32 query, u32 key, u32 count) const {
        return key + count > keys || (causal && key + count - 1 > query);
    }

    // The end of the keys that queries before `after` see, and the first query that sees a block of keys.
    DEVICE u32 end(u32 after) const { return causal && after < keys ? after : keys; }
    DEVICE u32 begin(const Block &block) const { return causal ? block.tile * block.size : 0; }

    // Where a query's numbers are.
    DEVICE size_t at(size_t batch, u32 head, u32 query) const { return (batch * heads + head) * queries + query; }
};

struct Seen {
    u32 query, key;
};

// What is attended: head `i` of q sees head `i / group` of k and v.
template <class T> struct Attention {
    Heads<const T> q, k, v;
    Scores<float> scores;
    Sizes sizes;

    // Whether a score is a product, scaled: then the scale is a part of `unit`, which costs nothing.
    DEVICE bool plain() const { return scores.cap == 0 && scores.mask.kind == 0 && scores.scale > 0; }

    // What `score` gives, times this, is the exponent of two.
    DEVICE float unit() const { return plain() ? scores.scale * LOG2_E : LOG2_E; }

    // The score of the largest of what `score` gives; 0 where all are hidden.
    DEVICE float largest(float x) const {
        return x == -infinity<float>() ? 0.f : plain() ? x * scores.scale : x;
    }

    // The exponent of two that those of all scores are relative to, of that: the same in forward and backward to the
    // bit, as its rounding, of a large score, would be seen in the probabilities.
    DEVICE float base(float largest) const { return largest * LOG2_E; }

    // From products to scores: -infinity where a query does not see a key, which is looked at where the
    // tile is at an `edge` of what is seen. `place` says of which query and which key a product is;
    // `slope` gets the derivative of each score, in units of e, by its product.
    template <int N, class P, class S>
    DEVICE void score(float (&x)[N][4], u32 batch, u32 head, bool edge, const P &place, const S &slope) const {
        bool simple = plain();
        if (simple && !edge) {
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) slope(n, e, scores.scale);
            }
            return;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                Seen at = place(n, e);
                float derivative = 1;
                if (!sizes.sees(at.query, at.key)) {
                    x[n][e] = -infinity<float>();
                } else if (!simple) {
                    size_t row = scores.mask.row(batch, head, at.query);
                    x[n][e] = scores.of(x[n][e], row, at.key, derivative);
                }
                slope(n, e, derivative * scores.scale);
            }
        }
    }
};

// The left one of a product, (16, N), in the registers of a warp.
template <int N, class T> struct Left {
    u32 at[N / STEP<T>][4];
};

// The 16 rows of a warp, zeros where there are none.
template <int D, class T>
DEVICE void load_left(Left<D, T> &left, const T *from, size_t stride, const Block &block, u32 rows, u32 width) {
#pragma unroll
    for (int pair = 0; pair < D / 8; pair++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 row = block.row[i], column = pair * 8 + threadIdx.x % 4 * 2;
            bool there = row < rows && column < width;
            const T *at = from + row * stride + column;
            if constexpr (IS_WIDE<T>) {
                uint2 both = there ? *(const uint2 *)at : make_uint2(0, 0);
                left.at[pair][i] = both.x, left.at[pair][i + 2] = both.y;
            } else {
                left.at[pair / 2][i + pair % 2 * 2] = there ? *(const u32 *)at : 0;
            }
        }
    }
}

// A lane's part of the sum, over the elements, of row `i` of the two it has of `left` and of a row of F32.
template <int D, class T>
DEVICE float times_left(const Left<D, T> &left, int i, const float *row, u32 width) {
    float sum = 0;
#pragma unroll
    for (int at = 0; at < D / 8; at++) {
        u32 column = at * 8 + threadIdx.x % 4 * 2;
        if (column >= width) continue;
        float2 pair = *(const float2 *)(row + column);
        if constexpr (IS_WIDE<T>) {
            sum += __uint_as_float(left.at[at][i]) * pair.x + __uint_as_float(left.at[at][i + 2]) * pair.y;
        } else {
            u32 both = left.at[at / 2][i + at % 2 * 2];
            sum += widen(T{(u16)both}) * pair.x + widen(T{(u16)(both >> 16)}) * pair.y;
        }
    }
    return sum;
}

// Weights (16, 16), in two parts as products leave them, rounded to T: the left operand of a product.
template <class T> DEVICE void as_left(Left<16, T> &left, const float (&w0)[4], const float (&w1)[4]) {
    if constexpr (IS_WIDE<T>) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            left.at[0][i] = __float_as_uint(w0[i % 2 * 2 + i / 2]);
            left.at[1][i] = __float_as_uint(w1[i % 2 * 2 + i / 2]);
        }
    } else {
        left.at[0][0] = pack<T>(w0[0], w0[1]), left.at[0][1] = pack<T>(w0[2], w0[3]);
        left.at[0][2] = pack<T>(w1[0], w1[1]), left.at[0][3] = pack<T>(w1[2], w1[3]);
    }
}

// Of the four lanes that have a row together.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// A tensor (b, h, n, d) that is written: F32 where `wide`, else T.
struct Output {
    void *to;
    size_t s0, s1, s2;
    int wide;

    // The rows of a block.
    template <class T, int N>
    DEVICE void store(const float (&c)[N][4], const Block &block, u32 rows, u32 width) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (block.row[i] >= rows) continue;
            size_t first = block.batch * s0 + block.head * s1 + block.row[i] * s2;
#pragma unroll
            for (int n = 0; n < N; n++) {
                u32 column = n * 8 + threadIdx.x % 4 * 2;
                if (column >= width) continue;
                float a = c[n][2 * i], b = c[n][2 * i + 1];
                if (IS_WIDE<T> || wide) {
                    *(float2 *)((float *)to + first + column) = make_float2(a, b);
                } else if constexpr (!IS_WIDE<T>) {
                    *(u32 *)((T *)to + first + column) = pack<T>(a, b);
                }
            }
        }
    }
};

// Arguments of kernels, in this order: queries, keys and values, each with the strides of its first three
// dimensions, and how scores are made.
#define ATTENTION(T)                                                                              \
    const T *q, size_t q0, size_t q1, size_t q2, const T *k, size_t k0, size_t k1, size_t k2,     \
        const T *v, size_t v0, size_t v1, size_t v2, double scale, double cap, const void *mask,  \
        size_t s0, size_t s1, size_t s2, size_t s3, int kind, size_t heads, size_t group,         \
        size_t queries, size_t keys, size_t width, int causal
#define ATTENDED                                                                                  \
    {                                                                                             \
        {q, q0, q1, q2}, {k, k0, k1, k2}, {v, v0, v1, v2},                                        \
            {(float)scale, (float)cap, {mask, s0, s1, s2, s3, kind}},                             \
            {(u32)heads, (u32)group, (u32)queries, (u32)keys, (u32)width, causal},                                         \
    }
