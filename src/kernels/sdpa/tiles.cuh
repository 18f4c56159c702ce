// What attention's kernels on tensor cores share: blocks of four warps with 64 rows, 16 each, times tiles
// of other rows in shared memory. Products and sums are F32.

DEVICE u32 bits_of(f16 a, f16 b) { return a.bits | (u32)b.bits << 16; }
DEVICE u32 bits_of(bf16 a, bf16 b) { return a.bits | (u32)b.bits << 16; }

template <class T> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;

// c (16, 8) += a (16, 16) b (16, 8), a warp together. Lane 4 g + t has rows g and g + 8 of a and c,
// column g of b, and of the dimension that is summed, or of c's columns, 2 t and 2 t + 1, and 8 further.
template <class T> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef EMULATED_GPU
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int pair = 0; pair < 8; pair++) {
        u32 left[2], right[2];
        for (int i = 0; i < 2; i++) {
            left[i] = __shfl_sync(0xffffffffu, a[pair / 4 * 2 + i], g * 4 + pair % 4);
            right[i] = __shfl_sync(0xffffffffu, pair < 4 ? b0 : b1, (2 * t + i) * 4 + pair % 4);
        }
        for (int e = 0; e < 4; e++) {
            u32 x = left[e / 2], y = right[e % 2];
            c[e] += widen(T{(u16)x}) * widen(T{(u16)y});
            c[e] += widen(T{(u16)(x >> 16)}) * widen(T{(u16)(y >> 16)});
        }
    }
#elif __CUDA_ARCH__ >= 800
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

// Elements of a tensor (b, h, n, d) whose last dimension has a stride of 1.
template <class T> struct Heads {
    T *from;
    size_t s0, s1, s2;

    DEVICE T *head(size_t batch, size_t head) const { return from + batch * s0 + head * s1; }
};

// The 64 rows of one head that a block has, and the two of them that a lane has.
struct Block {
    size_t tile, batch, head, row[2];

    // The grid is flat, of all tiles of all heads, a tile of every head after another.
    DEVICE Block(size_t rows, size_t heads, bool last_first) {
        size_t tiles = (rows + 63) / 64, all = gridDim.x / tiles;
        tile = last_first ? tiles - 1 - blockIdx.x / all : blockIdx.x / all;
        batch = blockIdx.x % all / heads, head = blockIdx.x % heads;
        row[0] = tile * 64 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, row[1] = row[0] + 8;
    }
};

struct Sizes {
    size_t heads, group, queries, keys, width;
    int causal;

    DEVICE bool sees(size_t query, size_t key) const {
        return query < queries && key < keys && (!causal || key <= query);
    }

    // The end of the keys that a block of queries sees, and the first query that sees a block of keys.
    DEVICE size_t end(const Block &block) const {
        size_t after = (block.tile + 1) * 64;
        return causal && after < keys ? after : keys;
    }
    DEVICE size_t begin(const Block &block) const { return causal ? block.tile * 64 : 0; }

    // Where a query's numbers are.
    DEVICE size_t at(size_t batch, size_t head, size_t query) const { return (batch * heads + head) * queries + query; }
};

// What is attended: head `i` of q sees head `i / group` of k and v.
template <class T> struct Attention {
    Heads<const T> q, k, v;
    Scores<float> scores;
    Sizes sizes;
};

// 64 rows of `width` elements into shared memory, zeros where there are none. A row has 8 more than D,
// so that eight rows start in different banks.
template <int D, class T>
DEVICE void load_rows(T (&to)[64][D + 8], const T *from, size_t stride, size_t first, size_t rows, size_t width) {
    for (int i = threadIdx.x; i < 64 * D / 8; i += 128) {
        int row = i / (D / 8), column = i % (D / 8) * 8;
        bool there = first + row < rows && column < width;
        uint4 pack = make_uint4(0, 0, 0, 0);
        if (there) pack = *(const uint4 *)(from + (first + row) * stride + column);
        *(uint4 *)&to[row][column] = pack;
    }
}

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

// c (16, 8) += left (16, D) times eight rows of a tile, turned.
template <int D, class T>
DEVICE void times_turned(float (&c)[4], const u32 (&left)[D / 16][4], const T (&tile)[64][D + 8], int first) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        const T *right = &tile[first + g][step * 16 + 2 * t];
        multiply<T>(c, left[step], *(const u32 *)right, *(const u32 *)(right + 8));
    }
}

// c (16, D) += weights (16, 16) times sixteen rows of a tile. The weights' halves are as products
// leave them; they are rounded to T.
template <int D, class T>
DEVICE void times(float (&c)[D / 8][4], const float (&w0)[4], const float (&w1)[4], const T (&tile)[64][D + 8],
                  int first) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = first + 2 * t;
    u32 weights[4] = {bits_of(as<T>(w0[0]), as<T>(w0[1])), bits_of(as<T>(w0[2]), as<T>(w0[3])),
                      bits_of(as<T>(w1[0]), as<T>(w1[1])), bits_of(as<T>(w1[2]), as<T>(w1[3]))};
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        int column = n * 8 + g;
        u32 b0 = bits_of(tile[row][column], tile[row + 1][column]);
        u32 b1 = bits_of(tile[row + 8][column], tile[row + 9][column]);
        multiply<T>(c[n], weights, b0, b1);
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
                    *(u32 *)((T *)to + first + column) = bits_of(as<T>(a), as<T>(b));
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
