// Attention backward without the scores in memory, on tensor cores: they are made again from two numbers
// a query, in one kernel for the gradient of queries and one for those of keys and values, so that each is
// added up by one block, in order. Sums are F32; probabilities and the gradients of scores are rounded to
// the inputs' dtype for the products that they go into. Tri Dao, FlashAttention-2.
//
// The gradient of a score is p (dp - average), dp being that of the probability, and average the sum of
// p dp over the keys: that of output times gradient over a query's elements. Of values far from zero the output's
// rounding would be larger than dp - average, https://arxiv.org/abs/2510.04212, as would that of probabilities whose
// sum is not one: so it is the output in F32, and forward divides by the sum of what it multiplied.

// The gradient of a product of a query and a key; zero where the one does not see the other, whatever NaN
// there is.
DEVICE float gradient(float p, float dp, float average, float derivative) {
    return p == 0 ? 0.f : p * (dp - average) * derivative;
}

// The averages, and the gradient of queries where there is a place for it.
template <int D, class T>
DEVICE void of_queries(const Output &dq, float *averages, const float *maxima, const float *shares,
                       const Heads<const T> &grad, const Heads<const float> &output, const Attention<T> &in) {
    constexpr int KEYS = TILE<D, T>;
    __shared__ __align__(16) T key_tiles[2][KEYS][D + 8], value_tiles[2][KEYS][D + 8];
    const Sizes &sizes = in.sizes;
    Block block(sizes.queries, sizes.heads, true);
    size_t batch = block.batch, head = block.head, shared = head / sizes.group;
    int t = threadIdx.x % 4;
    Left<D, T> left, grad_left;
    load_left(grad_left, grad.head(batch, head), grad.s2, block, sizes.queries, sizes.width);
    float average[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool there = block.row[i] < sizes.queries;
        const float *row = output.head(batch, head) + block.row[i] * output.s2;
        average[i] = row_sum(times_left(grad_left, i, row, there ? sizes.width : 0));
        if (t == 0 && there) averages[sizes.at(batch, head, block.row[i])] = average[i];
    }
    if (!dq.to) return;

    load_left(left, in.q.head(batch, head), in.q.s2, block, sizes.queries, sizes.width);
    float base[2] = {0, 0}, share[2] = {0, 0}, result[D / 8][4] = {}, unit = in.unit();
    for (int i = 0; i < 2; i++) {
        if (block.row[i] >= sizes.queries) continue;
        size_t at = sizes.at(batch, head, block.row[i]);
        base[i] = in.base(maxima[at]), share[i] = shares[at];
    }
    size_t end = sizes.end(block.after());
    in.template fetch<D>(key_tiles[0], value_tiles[0], batch, shared, 0);
    int stage = 0;
    for (size_t first = 0; first < end; first += KEYS, stage ^= 1) {
        arrived();
        __syncthreads(); // and nobody reads the other stage any more
        size_t next = first + KEYS;
        if (next < end) in.template fetch<D>(key_tiles[stage ^ 1], value_tiles[stage ^ 1], batch, shared, next);
        for (int from = 0; from < KEYS; from += 16) {
            float p[2][4] = {}, dp[2][4] = {}, derivatives[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                times_turned<D>(p[half], left, key_tiles[stage], from + half * 8);
                times_turned<D>(dp[half], grad_left, value_tiles[stage], from + half * 8);
            }
            bool edge = sizes.is_edge(block.first(), first + from, 16);
            in.score(p, derivatives, batch, head, edge, [&](int half, int e) {
                return Seen{block.row[e / 2], first + from + half * 8 + 2 * t + e % 2};
            });
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float weight = power_of_two(fmaf(p[half][e], unit, -base[e / 2])) * share[e / 2];
                    dp[half][e] = gradient(weight, dp[half][e], average[e / 2], derivatives[half][e]);
                }
            }
            Left<16, T> weights;
            as_left(weights, dp[0], dp[1]);
            times<D>(result, weights, key_tiles[stage], from);
        }
    }
    dq.store<T>(result, block, sizes.queries, sizes.width);
}

// The gradients of keys and of values, each where there is a place for it, from the queries of all heads
// that share them.
template <int D, class T>
DEVICE void of_keys(const Output &dk, const Output &dv, const float *averages, const float *maxima,
                    const float *shares, const Heads<const T> &grad, const Attention<T> &in) {
    constexpr int QUERIES = TILE<D, T>;
    __shared__ __align__(16) T query_tiles[2][QUERIES][D + 8], grad_tiles[2][QUERIES][D + 8];
    __shared__ float largest[2][QUERIES], share[2][QUERIES], average[2][QUERIES];
    const Sizes &sizes = in.sizes;
    Block block(sizes.keys, sizes.heads / sizes.group, false);
    size_t batch = block.batch, begin = sizes.begin(block);
    int t = threadIdx.x % 4;
    auto fetch = [&](int stage, size_t head, size_t first) {
        fetch_rows<D>(query_tiles[stage], in.q.head(batch, head), in.q.s2, first, sizes.queries, sizes.width);
        fetch_rows<D>(grad_tiles[stage], grad.head(batch, head), grad.s2, first, sizes.queries, sizes.width);
        if (threadIdx.x < QUERIES) {
            size_t at = sizes.at(batch, head, first + threadIdx.x);
            bool there = first + threadIdx.x < sizes.queries;
            copy_async<4>(&largest[stage][threadIdx.x], maxima + at, there);
            copy_async<4>(&share[stage][threadIdx.x], shares + at, there);
            copy_async<4>(&average[stage][threadIdx.x], averages + at, there && dk.to);
        }
    };
    float unit = in.unit();
    Left<D, T> left, value_left;
    load_left(left, in.k.head(batch, block.head), in.k.s2, block, sizes.keys, sizes.width);
    load_left(value_left, in.v.head(batch, block.head), in.v.s2, block, sizes.keys, sizes.width);
    float keys[D / 8][4] = {}, values[D / 8][4] = {};
    size_t head = block.head * sizes.group, last = head + sizes.group, first = begin;
    if (begin >= sizes.queries) head = last; // no query sees these keys
    if (head < last) fetch(0, head, first);
    for (int stage = 0; head < last; stage ^= 1) {
        arrived();
        __syncthreads(); // and nobody reads the other stage any more
        size_t next = first + QUERIES < sizes.queries ? first + QUERIES : begin, its_head = head + (next == begin);
        if (its_head < last) fetch(stage ^ 1, its_head, next);
        for (int from = 0; from < QUERIES; from += 16) {
            float p[2][4] = {}, dp[2][4] = {}, derivatives[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                times_turned<D>(p[half], left, query_tiles[stage], from + half * 8);
                times_turned<D>(dp[half], value_left, grad_tiles[stage], from + half * 8);
            }
            bool edge = first + from + 16 > sizes.queries || sizes.is_edge(first + from, block.first(), 16);
            in.score(p, derivatives, batch, head, edge, [&](int half, int e) {
                return Seen{first + from + half * 8 + 2 * t + e % 2, block.row[e / 2]};
            });
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int at = from + half * 8 + 2 * t + e % 2;
                    float base = in.base(largest[stage][at]);
                    p[half][e] = power_of_two(fmaf(p[half][e], unit, -base)) * share[stage][at];
                    dp[half][e] = gradient(p[half][e], dp[half][e], average[stage][at], derivatives[half][e]);
                }
            }
            Left<16, T> weights;
            as_left(weights, p[0], p[1]);
            if (dv.to) times<D>(values, weights, grad_tiles[stage], from);
            as_left(weights, dp[0], dp[1]);
            if (dk.to) times<D>(keys, weights, query_tiles[stage], from);
        }
        head = its_head, first = next;
    }
    if (dk.to) dk.store<T>(keys, block, sizes.keys, sizes.width);
    if (dv.to) dv.store<T>(values, block, sizes.keys, sizes.width);
}

#define OUTPUT(x) void *x, size_t x##0, size_t x##1, size_t x##2, int x##_wide
#define STORED(x) {x, x##0, x##1, x##2, x##_wide}
#define FLASH(t, T, D)                                                                            \
    extern "C" __global__ void __launch_bounds__(128) flash_queries_##D##_##t(                    \
        OUTPUT(dq), float *averages, const float *maxima, const float *shares, const T *grad,     \
        size_t g0, size_t g1, size_t g2, const float *output, size_t o0, size_t o1, size_t o2,    \
        ATTENTION(T)) {                                                                           \
        of_queries<D, T>(STORED(dq), averages, maxima, shares, {grad, g0, g1, g2},                \
                         {output, o0, o1, o2}, ATTENDED);                                         \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, 384 / sizeof(T) / D) flash_keys_##D##_##t(              \
        OUTPUT(dk), OUTPUT(dv), const float *averages, const float *maxima,                       \
        const float *shares, const T *grad, size_t g0, size_t g1, size_t g2, ATTENTION(T)) {      \
        of_keys<D, T>(STORED(dk), STORED(dv), averages, maxima, shares, {grad, g0, g1, g2},       \
                      ATTENDED);                                                                  \
    }
OF_F16(FLASH(f16, f16, 64) FLASH(f16, f16, 128))
OF_BF16(FLASH(bf16, bf16, 64) FLASH(bf16, bf16, 128))
OF_F32(FLASH(f32, float, 64) FLASH(tf32_f32, tf32, 64))
