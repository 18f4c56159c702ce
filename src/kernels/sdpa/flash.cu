// Attention forward without the scores in memory, on tensor cores: a block has 64 queries of one head,
// each of its four warps 16 of them, and goes through the keys 64 at a time. Scores, softmax and sums
// are F32; probabilities, relative to the largest score so far, are rounded to the inputs' dtype for the
// second product. Tri Dao, FlashAttention-2.

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

struct Sizes {
    size_t heads, group, queries, keys, width;
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

template <int D, class T>
DEVICE void flash(Heads<T> out, float *log_sums, Heads<const T> q, Heads<const T> k, Heads<const T> v,
                  const Scores<float> &scores, Sizes sizes, int causal) {
    __shared__ __align__(16) T key_tile[64][D + 8], value_tile[64][D + 8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    size_t tiles = (sizes.queries + 63) / 64, all = gridDim.x / tiles;
    // The last queries first: with `causal`, they see the most.
    size_t tile = tiles - 1 - blockIdx.x / all, batch = blockIdx.x % all / sizes.heads;
    size_t head = blockIdx.x % sizes.heads, shared = head / sizes.group;
    size_t query[2] = {tile * 64 + warp * 16 + g, tile * 64 + warp * 16 + g + 8};

    u32 left[D / 16][4];
    const T *from = q.head(batch, head);
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            size_t row = query[i % 2], column = step * 16 + i / 2 * 8 + 2 * t;
            bool there = row < sizes.queries && column < sizes.width;
            left[step][i] = there ? *(const u32 *)(from + row * q.s2 + column) : 0;
        }
    }

    float sum[2] = {0, 0}, most[2] = {-infinity<float>(), -infinity<float>()}, result[D / 8][4] = {};
    size_t mask_row[2];
    for (int i = 0; i < 2; i++) {
        size_t row = query[i] < sizes.queries ? query[i] : sizes.queries - 1;
        mask_row[i] = scores.mask.row(batch, head, row);
    }
    size_t end = causal && (tile + 1) * 64 < sizes.keys ? (tile + 1) * 64 : sizes.keys;
    for (size_t first = 0; first < end; first += 64) {
        __syncthreads(); // whoever still reads the tiles before
        load_rows<D>(key_tile, k.head(batch, shared), k.s2, first, sizes.keys, sizes.width);
        load_rows<D>(value_tile, v.head(batch, shared), v.s2, first, sizes.keys, sizes.width);
        __syncthreads();

        float p[8][4] = {};
        float largest[2] = {most[0], most[1]};
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int step = 0; step < D / 16; step++) {
                const T *right = &key_tile[n * 8 + g][step * 16 + 2 * t];
                multiply<T>(p[n], left[step], *(const u32 *)right, *(const u32 *)(right + 8));
            }
#pragma unroll
            for (int e = 0; e < 4; e++) {
                size_t key = first + n * 8 + 2 * t + e % 2;
                bool seen = key < sizes.keys && (!causal || key <= query[e / 2]);
                float slope;
                p[n][e] = seen ? scores.of(p[n][e], mask_row[e / 2], key, slope) : -infinity<float>();
                largest[e / 2] = p[n][e] > largest[e / 2] ? p[n][e] : largest[e / 2];
            }
        }
        float base[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int offset = 1; offset < 4; offset *= 2) {
                float other = __shfl_xor_sync(0xffffffffu, largest[i], offset);
                largest[i] = other > largest[i] ? other : largest[i];
            }
            // Where all are hidden, so far.
            base[i] = largest[i] == -infinity<float>() ? 0.f : largest[i];
            float shrink = exponential(most[i] - base[i]);
            sum[i] *= shrink;
            most[i] = largest[i];
#pragma unroll
            for (int n = 0; n < D / 8; n++) result[n][2 * i] *= shrink, result[n][2 * i + 1] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[n][e] = exponential(p[n][e] - base[e / 2]);
                sum[e / 2] += p[n][e];
            }
        }
#pragma unroll
        for (int step = 0; step < 4; step++) {
            u32 weights[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *two = &p[2 * step + i / 2][i % 2 * 2];
                weights[i] = bits_of(as<T>(two[0]), as<T>(two[1]));
            }
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                int row = step * 16 + 2 * t, column = n * 8 + g;
                u32 b0 = bits_of(value_tile[row][column], value_tile[row + 1][column]);
                u32 b1 = bits_of(value_tile[row + 8][column], value_tile[row + 9][column]);
                multiply<T>(result[n], weights, b0, b1);
            }
        }
    }

    T *to = out.head(batch, head);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        if (query[i] >= sizes.queries) continue;
        bool hidden = sum[i] == 0;
        float share = hidden ? 0.f : 1 / sum[i];
        if (t == 0) {
            float log_sum = (most[i] == -infinity<float>() ? 0.f : most[i]) + logarithm(sum[i]);
            log_sums[(batch * sizes.heads + head) * sizes.queries + query[i]] = hidden ? infinity<float>() : log_sum;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            size_t column = n * 8 + 2 * t;
            if (column >= sizes.width) continue;
            u32 two = bits_of(as<T>(result[n][2 * i] * share), as<T>(result[n][2 * i + 1] * share));
            *(u32 *)(to + query[i] * out.s2 + column) = two;
        }
    }
}

#define FLASH(t, T, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) flash_##D##_##t(                            \
        T *out, size_t o0, size_t o1, size_t o2, float *log_sums, const T *q, size_t q0,          \
        size_t q1, size_t q2, const T *k, size_t k0, size_t k1, size_t k2, const T *v, size_t v0, \
        size_t v1, size_t v2, double scale, double cap, const void *mask, size_t s0, size_t s1,   \
        size_t s2, size_t s3, int kind, size_t heads, size_t group, size_t queries, size_t keys,  \
        size_t width, int causal) {                                                               \
        Scores<float> scores = {(float)scale, (float)cap, {mask, s0, s1, s2, s3, kind}};          \
        flash<D, T>({out, o0, o1, o2}, log_sums, {q, q0, q1, q2}, {k, k0, k1, k2},                \
                    {v, v0, v1, v2}, scores, {heads, group, queries, keys, width}, causal);       \
    }
OF_F16(FLASH(f16, f16, 64) FLASH(f16, f16, 128))
OF_BF16(FLASH(bf16, bf16, 64) FLASH(bf16, bf16, 128))
