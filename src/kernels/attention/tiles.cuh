// What attention's kernels on tensor cores share: blocks of warps with 16 rows each, times tiles of other rows in
// shared memory. Products and sums are F32.

template <class T> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;

#define LOG2_E 1.44269504f

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

// Four matrices of 8 x 8 halves out of shared memory, a register each. Lane i says where row i % 8 of matrix
// i / 8 is. Lane 4 g + t gets the elements 2 t and 2 t + 1 of row g, or of column g where TURNED.
template <bool TURNED> DEVICE void load_matrices(u32 (&to)[4], const void *row) {
    u32 at = (u32)__cvta_generic_to_shared(row);
#define LOAD(turned)                                                                              \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" turned ".shared.b16 {%0, %1, %2, %3}, [%4];"     \
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])                             \
                 : "r"(at)                                                                        \
                 : "memory")
    if constexpr (TURNED) {
        LOAD(".trans");
    } else {
        LOAD("");
    }
}

// c (16, 8) += a (16, 16) b (16, 8), a warp together. Lane 4 g + t has rows g and g + 8 of a and c,
// column g of b, and of the dimension that is summed, or of c's columns, 2 t and 2 t + 1, and 8 further.
template <class T> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
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
    size_t tile, batch, head, row[2];
    int size;

    // The grid is flat, of all tiles of all heads, a tile of every head after another.
    DEVICE Block(size_t rows, size_t heads, bool last_first, int size = 64) : size(size) {
        size_t tiles = (rows + size - 1) / size, all = gridDim.x / tiles;
        tile = last_first ? tiles - 1 - blockIdx.x / all : blockIdx.x / all;
        batch = blockIdx.x % all / heads, head = blockIdx.x % heads;
        row[0] = first() + threadIdx.x % 32 / 4, row[1] = row[0] + 8;
    }

    // The first row of the 16 that a warp has.
    DEVICE size_t first() const { return tile * size + threadIdx.x / 32 * 16; }

    // The row after the last one, of the block and of the warpgroup.
    DEVICE size_t after() const { return (tile + 1) * size; }
    DEVICE size_t after_group() const { return tile * size + threadIdx.x / 128 * 64 + 64; }
};

struct Sizes {
    size_t heads, group, queries, keys, width;
    int causal;

    DEVICE bool sees(size_t query, size_t key) const {
        return query < queries && key < keys && (!causal || key <= query);
    }

    // Whether any of 16 queries does not see all of `count` keys.
    DEVICE bool is_edge(size_t query, size_t key, size_t count) const {
        return key + count > keys || (causal && key + count - 1 > query);
    }

    // The end of the keys that queries before `after` see, and the first query that sees a block of keys.
    DEVICE size_t end(size_t after) const { return causal && after < keys ? after : keys; }
    DEVICE size_t begin(const Block &block) const { return causal ? block.tile * block.size : 0; }

    // Where a query's numbers are.
    DEVICE size_t at(size_t batch, size_t head, size_t query) const { return (batch * heads + head) * queries + query; }
};

// Rows of a tile: of two tiles in two stages, one that is read and one on its way, there is room for as many.
template <int D> constexpr int TILE = 4096 / D;

// The rows of a tile begin to come, of `width` elements, zeros where there are none. A row has 8 more than D,
// so that eight rows start in different banks.
template <int D, class T>
DEVICE void fetch_rows(T (*to)[D + 8], const T *from, size_t stride, size_t first, size_t rows, size_t width) {
    constexpr int APART = 1024 / D; // rows, from one pack of a thread to the next
    int row = threadIdx.x / (D / 8), column = threadIdx.x % (D / 8) * 8;
    int there = column >= width ? 0 : rows - first < TILE<D> ? (int)(rows - first) : TILE<D>;
    from += (first + row) * stride + column;
#pragma unroll
    for (int i = 0; i < TILE<D>; i += APART) {
        copy_async<16>(&to[row + i][column], from + i * stride, row + i < there);
    }
}

struct Seen {
    size_t query, key;
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

    // The keys and the values of a tile begin to come, from `first` on.
    template <int D>
    DEVICE void fetch(T (*keys)[D + 8], T (*values)[D + 8], size_t batch, size_t head, size_t first) const {
        fetch_rows<D>(keys, k.head(batch, head), k.s2, first, sizes.keys, sizes.width);
        fetch_rows<D>(values, v.head(batch, head), v.s2, first, sizes.keys, sizes.width);
    }

    // From products to scores: -infinity where a query does not see a key, which is looked at where the
    // tile is at an `edge` of what is seen. `place` says of which query and which key a product is;
    // derivatives are those of scores, in units of e, by products.
    template <int N, class P>
    DEVICE void score(float (&x)[N][4], float (&derivatives)[N][4], size_t batch, size_t head, bool edge,
                      const P &place) const {
        bool simple = plain();
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) derivatives[n][e] = scores.scale;
        }
        if (simple && !edge) return;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                Seen at = place(n, e);
                if (!sizes.sees(at.query, at.key)) {
                    x[n][e] = -infinity<float>();
                } else if (!simple) {
                    size_t row = scores.mask.row(batch, head, at.query);
                    x[n][e] = scores.of(x[n][e], row, at.key, derivatives[n][e]);
                    derivatives[n][e] *= scores.scale;
                }
            }
        }
    }
};

// The 16 rows of a warp, as the left one of a product, zeros where there are none.
template <int D, class T>
DEVICE void load_left(u32 (&left)[D / 16][4], const T *from, size_t stride, const Block &block, size_t rows,
                      size_t width) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            size_t row = block.row[i % 2], column = step * 16 + i / 2 * 8 + threadIdx.x % 4 * 2;
            bool there = row < rows && column < width;
            left[step][i] = there ? *(const u32 *)(from + row * stride + column) : 0;
        }
    }
}

// A lane's part of the sum, over the elements, of row `i` of the two it has of `left` and of a row of F32.
template <int D, class T>
DEVICE float times_left(const u32 (&left)[D / 16][4], int i, const float *row, size_t width) {
    float sum = 0;
#pragma unroll
    for (int at = 0; at < D / 8; at++) {
        size_t column = at * 8 + threadIdx.x % 4 * 2;
        if (column >= width) continue;
        float2 pair = *(const float2 *)(row + column);
        u32 both = left[at / 2][i + at % 2 * 2];
        sum += widen(T{(u16)both}) * pair.x + widen(T{(u16)(both >> 16)}) * pair.y;
    }
    return sum;
}

// c (16, 8) += left (16, D) times eight rows of a tile, turned.
template <int D, class T>
DEVICE void times_turned(float (&c)[4], const u32 (&left)[D / 16][4], const T (*tile)[D + 8], int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < D / 16; step += 2) {
        u32 right[4];
        load_matrices<false>(right, &tile[first + lane % 8][step * 16 + lane / 8 * 8]);
        multiply<T>(c, left[step], right[0], right[1]);
        multiply<T>(c, left[step + 1], right[2], right[3]);
    }
}

// Weights (16, 16), whose halves are as products leave them, rounded to T: the left one of a product.
template <class T> DEVICE void as_left(u32 (&left)[4], const float (&w0)[4], const float (&w1)[4]) {
    left[0] = pack<T>(w0[0], w0[1]), left[1] = pack<T>(w0[2], w0[3]);
    left[2] = pack<T>(w1[0], w1[1]), left[3] = pack<T>(w1[2], w1[3]);
}

// c (16, D) += weights (16, 16) times sixteen rows of a tile.
template <int D, class T>
DEVICE void times(float (&c)[D / 8][4], const u32 (&weights)[4], const T (*tile)[D + 8], int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
        u32 right[4];
        load_matrices<true>(right, &tile[first + lane % 16][(n + lane / 16) * 8]);
        multiply<T>(c[n], weights, right[0], right[1]);
        multiply<T>(c[n + 1], weights, right[2], right[3]);
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
    DEVICE void store(const float (&c)[N][4], const Block &block, size_t rows, size_t width) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (block.row[i] >= rows) continue;
            size_t first = block.batch * s0 + block.head * s1 + block.row[i] * s2;
#pragma unroll
            for (int n = 0; n < N; n++) {
                size_t column = n * 8 + threadIdx.x % 4 * 2;
                if (column >= width) continue;
                float a = c[n][2 * i], b = c[n][2 * i + 1];
                if (wide) {
                    *(float2 *)((float *)to + first + column) = make_float2(a, b);
                } else {
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
            {heads, group, queries, keys, width, causal},                                         \
    }
