// Attention backward without the scores in memory, on tensor cores: they are made again from one number
// a query, in one kernel for the gradient of queries and one for those of keys and values, so that each is
// added up by one block, in order. Sums are F32; probabilities and the gradients of scores are rounded to
// the inputs' dtype for the products that they go into. Tri Dao, FlashAttention-2.
//
// The gradient of a score is p (dp - average), dp being that of the probability, and average the sum of
// p dp over the keys. The sum of output times gradient would be the same, but the output is rounded, and of
// values far from zero that error is larger than dp - average: https://arxiv.org/abs/2510.04212.

// The gradient of a product of a query and a key; zero where the one does not see the other, whatever NaN
// there is.
DEVICE float gradient(float p, float dp, float average, float slope) {
    return p == 0 ? 0.f : p * (dp - average) * slope;
}

// The averages, and the gradient of queries where there is a place for it, in two passes through the keys.
template <int D, class T>
DEVICE void of_queries(const Output &dq, float *averages, const float *log_sums, const Heads<const T> &grad,
                       const Attention<T> &in) {
    __shared__ __align__(16) T key_tile[64][D + 8], value_tile[64][D + 8];
    const Sizes &sizes = in.sizes;
    Block block(sizes.queries, sizes.heads, true);
    size_t batch = block.batch, head = block.head, shared = head / sizes.group, end = sizes.end(block);
    int t = threadIdx.x % 4;
    float unit = in.unit();
    u32 left[D / 16][4], grad_left[D / 16][4];
    load_left<D>(left, in.q.head(batch, head), in.q.s2, block, sizes.queries, sizes.width);
    load_left<D>(grad_left, grad.head(batch, head), grad.s2, block, sizes.queries, sizes.width);
    float log_sum[2], average[2] = {0, 0}, result[D / 8][4] = {};
    for (int i = 0; i < 2; i++)
        log_sum[i] = block.row[i] < sizes.queries ? log_sums[sizes.at(batch, head, block.row[i])] * LOG2_E : 0;
    for (int pass = 0; pass < (dq.to ? 2 : 1); pass++) {
        float sum[2] = {0, 0};
        for (size_t first = 0; first < end; first += 64) {
            __syncthreads(); // whoever still reads the tiles before
            load_rows<D>(key_tile, in.k.head(batch, shared), in.k.s2, first, sizes.keys, sizes.width);
            load_rows<D>(value_tile, in.v.head(batch, shared), in.v.s2, first, sizes.keys, sizes.width);
            __syncthreads();
            float part[2] = {0, 0}; // so that few terms are added to a sum of many
            for (int from = 0; from < 64; from += 16) {
                float p[2][4] = {}, dp[2][4] = {}, slopes[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    times_turned<D>(p[half], left, key_tile, from + half * 8);
                    times_turned<D>(dp[half], grad_left, value_tile, from + half * 8);
                }
                bool edge = sizes.is_edge(block.first(), first + from, 16);
                in.score(p, slopes, batch, head, edge, [&](int half, int e) {
                    return Seen{block.row[e / 2], first + from + half * 8 + 2 * t + e % 2};
                });
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float share = power_of_two(fmaf(p[half][e], unit, -log_sum[e / 2]));
                        part[e / 2] += share == 0 ? 0.f : share * dp[half][e];
                        dp[half][e] = gradient(share, dp[half][e], average[e / 2], slopes[half][e]);
                    }
                }
                if (pass == 1) times<D>(result, dp[0], dp[1], key_tile, from);
            }
            sum[0] += part[0], sum[1] += part[1];
        }
        if (pass == 0) average[0] = row_sum(sum[0]), average[1] = row_sum(sum[1]);
    }
    for (int i = 0; i < 2; i++) {
        bool writes = t == 0 && block.row[i] < sizes.queries;
        if (writes) averages[sizes.at(batch, head, block.row[i])] = average[i];
    }
    if (dq.to) dq.store<T>(result, block, sizes.queries, sizes.width);
}

// The gradients of keys and of values, each where there is a place for it, from the queries of all heads
// that share them.
template <int D, class T>
DEVICE void of_keys(const Output &dk, const Output &dv, const float *averages, const float *log_sums,
                    const Heads<const T> &grad, const Attention<T> &in) {
    __shared__ __align__(16) T query_tile[64][D + 8], grad_tile[64][D + 8];
    __shared__ float log_sum[64], average[64];
    const Sizes &sizes = in.sizes;
    Block block(sizes.keys, sizes.heads / sizes.group, false);
    size_t batch = block.batch;
    int t = threadIdx.x % 4;
    float unit = in.unit();
    u32 left[D / 16][4], value_left[D / 16][4];
    load_left<D>(left, in.k.head(batch, block.head), in.k.s2, block, sizes.keys, sizes.width);
    load_left<D>(value_left, in.v.head(batch, block.head), in.v.s2, block, sizes.keys, sizes.width);
    float keys[D / 8][4] = {}, values[D / 8][4] = {};
    for (size_t head = block.head * sizes.group; head < (block.head + 1) * sizes.group; head++) {
        for (size_t first = sizes.begin(block); first < sizes.queries; first += 64) {
            __syncthreads(); // whoever still reads the tiles before
            load_rows<D>(query_tile, in.q.head(batch, head), in.q.s2, first, sizes.queries, sizes.width);
            load_rows<D>(grad_tile, grad.head(batch, head), grad.s2, first, sizes.queries, sizes.width);
            if (threadIdx.x < 64) {
                size_t at = sizes.at(batch, head, first + threadIdx.x);
                bool there = first + threadIdx.x < sizes.queries;
                log_sum[threadIdx.x] = there ? log_sums[at] * LOG2_E : 0;
                average[threadIdx.x] = there && dk.to ? averages[at] : 0;
            }
            __syncthreads();
            for (int from = 0; from < 64; from += 16) {
                float p[2][4] = {}, dp[2][4] = {}, slopes[2][4];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    times_turned<D>(p[half], left, query_tile, from + half * 8);
                    times_turned<D>(dp[half], value_left, grad_tile, from + half * 8);
                }
                bool edge = first + from + 16 > sizes.queries || sizes.is_edge(first + from, block.first(), 16);
                in.score(p, slopes, batch, head, edge, [&](int half, int e) {
                    return Seen{first + from + half * 8 + 2 * t + e % 2, block.row[e / 2]};
                });
#pragma unroll
                for (int half = 0; half < 2; half++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int at = from + half * 8 + 2 * t + e % 2;
                        p[half][e] = power_of_two(fmaf(p[half][e], unit, -log_sum[at]));
                        dp[half][e] = gradient(p[half][e], dp[half][e], average[at], slopes[half][e]);
                    }
                }
                if (dv.to) times<D>(values, p[0], p[1], grad_tile, from);
                if (dk.to) times<D>(keys, dp[0], dp[1], query_tile, from);
            }
        }
    }
    if (dk.to) dk.store<T>(keys, block, sizes.keys, sizes.width);
    if (dv.to) dv.store<T>(values, block, sizes.keys, sizes.width);
}

#define OUTPUT(x) void *x, size_t x##0, size_t x##1, size_t x##2, int x##_wide
#define STORED(x) {x, x##0, x##1, x##2, x##_wide}
#define FLASH(t, T, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) flash_queries_##D##_##t(                    \
        OUTPUT(dq), float *averages, const float *log_sums, const T *grad, size_t g0, size_t g1,  \
        size_t g2, ATTENTION(T)) {                                                                \
        of_queries<D, T>(STORED(dq), averages, log_sums, {grad, g0, g1, g2}, ATTENDED);           \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(128) flash_keys_##D##_##t(                       \
        OUTPUT(dk), OUTPUT(dv), const float *averages, const float *log_sums, const T *grad,      \
        size_t g0, size_t g1, size_t g2, ATTENTION(T)) {                                          \
        of_keys<D, T>(STORED(dk), STORED(dv), averages, log_sums, {grad, g0, g1, g2}, ATTENDED);  \
    }
OF_F16(FLASH(f16, f16, 64) FLASH(f16, f16, 128))
OF_BF16(FLASH(bf16, bf16, 64) FLASH(bf16, bf16, 128))
