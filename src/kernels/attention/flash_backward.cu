// Attention backward without the scores in memory, on tensor cores: they are made again from two numbers
// a query, in one kernel for the gradient of queries and one for those of keys and values, so that each is
// added up by one block, in order. Sums are F32; probabilities and the gradients of scores are rounded to
// the inputs' dtype for the products that they go into. Tri Dao, FlashAttention-2.
//
// The gradient of a score is p (dp - average), dp being that of the probability, and average the sum of
// p dp over the keys: that of output times gradient over a query's elements. Of values far from zero the output's
// rounding would be larger than dp - average, https://arxiv.org/abs/2510.04212, as would that of probabilities whose
// sum is not one: so it is the output in F32, and forward divides by the sum of what it multiplied.

// The gradient of a product of a query and a key, of the slope (dp - average) times the score's derivative; zero where the
// one does not see the other, whatever NaN there is.
DEVICE float gradient(float p, float slope) { return p == 0 ? 0.f : p * slope; }

// Rounded, 16 columns at a time.
template <class T, int N> DEVICE void as_weights(Left<16, T> (&weights)[N], const float (&p)[2 * N][4]) {
#pragma unroll
    for (int step = 0; step < N; step++) as_left(weights[step], p[2 * step], p[2 * step + 1]);
}

// The averages, and the gradient of queries where there is a place for it.
template <class Products, int D, class T>
DEVICE void of_queries(const Output &dq, float *averages, const float *maxima, const float *shares,
                       const Heads<const T> &grad, const Heads<const float> &output, const Attention<T> &in) {
    constexpr int KEYS = Products::TILE_ROWS, AT_ONCE = Products::AT_ONCE, N = AT_ONCE / 8;
    auto &tiles = Products::tiles();
    const Sizes &sizes = in.sizes;
    Block block(sizes.queries, sizes.heads, true, Products::ROWS);
    u32 batch = block.batch, head = block.head, shared = head / sizes.group;
    int t = threadIdx.x % 4;
    Left<D, T> query_rows, grad_rows;
    load_left(grad_rows, grad.head(batch, head), grad.s2, block, sizes.queries, sizes.width);
    float average[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool there = block.row[i] < sizes.queries;
        const float *row = output.head(batch, head) + block.row[i] * output.s2;
        average[i] = row_sum(times_left(grad_rows, i, row, there ? sizes.width : 0));
        if (t == 0 && there) averages[sizes.at(batch, head, block.row[i])] = average[i];
    }
    if (!dq.to) return;

    const auto &grad_left = Products::keep(1, grad_rows);
    load_left(query_rows, in.q.head(batch, head), in.q.s2, block, sizes.queries, sizes.width);
    const auto &left = Products::keep(0, query_rows);
    float base[2] = {0, 0}, share[2] = {0, 0}, result[D / 8][4] = {}, unit = in.unit();
    for (int i = 0; i < 2; i++) {
        if (block.row[i] >= sizes.queries) continue;
        size_t at = sizes.at(batch, head, block.row[i]);
        base[i] = in.base(maxima[at]), share[i] = shares[at];
    }
    auto fetch = [&](int stage, u32 first) {
        Products::fetch(tiles.first[stage], in.k.head(batch, shared), in.k.s2, first, sizes.keys, sizes.width);
        Products::fetch(tiles.second[stage], in.v.head(batch, shared), in.v.s2, first, sizes.keys, sizes.width);
    };
    u32 end = sizes.end(block.after()), end_of_group = sizes.end(block.after_group());
    fetch(0, 0);
    int stage = 0;
    for (u32 first = 0; first < end; first += KEYS, stage ^= 1) {
        Products::wait_for_tile(); // and nobody reads the other stage any more
        u32 next = first + KEYS;
        if (next < end) fetch(stage ^ 1, next);
        if (Products::ROWS > 64 && first >= end_of_group) continue;
        auto &keys = tiles.first[stage], &values = tiles.second[stage];
        for (int from = 0; from < KEYS; from += AT_ONCE) {
            float p[N][4] = {}, dp[N][4] = {};
            Products::both(p, left, keys, dp, grad_left, values, from);
            auto place = [&](int n, int e) {
                return Seen{block.row[e / 2], first + from + n * 8 + 2 * t + e % 2};
            };
            auto slope = [&](int n, int e, float derivative) {
                dp[n][e] = (dp[n][e] - average[e / 2]) * derivative;
            };
            in.score(p, batch, head, sizes.is_edge(block.first(), first + from, AT_ONCE), place, slope);
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float weight = power_of_two(fmaf(p[n][e], unit, -base[e / 2])) * share[e / 2];
                    dp[n][e] = gradient(weight, dp[n][e]);
                }
            }
            Left<16, T> weights[N / 2];
            as_weights(weights, dp);
            Products::add(result, weights, keys, from);
        }
    }
    dq.store<T>(result, block, sizes.queries, sizes.width);
}

// The gradients of keys and of values, each where there is a place for it, from the queries of all heads
// that share them.
template <class Products, int D, class T>
DEVICE void of_keys(const Output &dk, const Output &dv, const float *averages, const float *maxima,
                    const float *shares, const Heads<const T> &grad, const Attention<T> &in) {
    constexpr int QUERIES = Products::TILE_ROWS, AT_ONCE = Products::AT_ONCE, N = AT_ONCE / 8;
    __shared__ float largest[2][QUERIES], share[2][QUERIES], average[2][QUERIES];
    auto &tiles = Products::tiles();
    const Sizes &sizes = in.sizes;
    Block block(sizes.keys, sizes.heads / sizes.group, false, Products::ROWS);
    u32 batch = block.batch, begin = sizes.begin(block);
    int t = threadIdx.x % 4;
    auto fetch = [&](int stage, u32 head, u32 first) {
        Products::fetch(tiles.first[stage], in.q.head(batch, head), in.q.s2, first, sizes.queries, sizes.width);
        Products::fetch(tiles.second[stage], grad.head(batch, head), grad.s2, first, sizes.queries, sizes.width);
        if (threadIdx.x < QUERIES) {
            size_t at = sizes.at(batch, head, first + threadIdx.x);
            bool there = first + threadIdx.x < sizes.queries;
            copy_async<4>(&largest[stage][threadIdx.x], maxima + at, there);
            copy_async<4>(&share[stage][threadIdx.x], shares + at, there);
            copy_async<4>(&average[stage][threadIdx.x], averages + at, there && dk.to);
        }
    };
    float unit = in.unit();
    Left<D, T> key_rows, value_rows;
    load_left(key_rows, in.k.head(batch, block.head), in.k.s2, block, sizes.keys, sizes.width);
    const auto &left = Products::keep(0, key_rows);
    load_left(value_rows, in.v.head(batch, block.head), in.v.s2, block, sizes.keys, sizes.width);
    const auto &value_left = Products::keep(1, value_rows);
    float keys[D / 8][4] = {}, values[D / 8][4] = {};
    u32 head = block.head * sizes.group, last = head + sizes.group, first = begin;
    if (begin >= sizes.queries) head = last; // no query sees these keys
    if (head < last) fetch(0, head, first);
    for (int stage = 0; head < last; stage ^= 1) {
        Products::wait_for_tile(); // and nobody reads the other stage any more
        u32 next = first + QUERIES < sizes.queries ? first + QUERIES : begin, its_head = head + (next == begin);
        if (its_head < last) fetch(stage ^ 1, its_head, next);
        auto &queries = tiles.first[stage], &gradients = tiles.second[stage];
        bool seen = Products::ROWS == 64 || !sizes.causal || first + QUERIES > block.first_of_group();
        for (int from = 0; seen && from < QUERIES; from += AT_ONCE) {
            float p[N][4] = {}, dp[N][4] = {};
            Products::both(p, left, queries, dp, value_left, gradients, from);
            auto column = [&](int n, int e) { return from + n * 8 + 2 * t + e % 2; };
            auto place = [&](int n, int e) { return Seen{first + column(n, e), block.row[e / 2]}; };
            auto slope = [&](int n, int e, float derivative) {
                dp[n][e] = (dp[n][e] - average[stage][column(n, e)]) * derivative;
            };
            bool edge = first + from + AT_ONCE > sizes.queries || sizes.is_edge(first + from, block.first(), 16);
            in.score(p, batch, head, edge, place, slope);
#pragma unroll
            for (int n = 0; n < N; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int at = column(n, e);
                    float base = in.base(largest[stage][at]);
                    p[n][e] = power_of_two(fmaf(p[n][e], unit, -base)) * share[stage][at];
                    dp[n][e] = gradient(p[n][e], dp[n][e]);
                }
            }
            Left<16, T> weights[N / 2];
            as_weights(weights, p);
            if (dv.to) Products::add(values, weights, gradients, from);
            as_weights(weights, dp);
            if (dk.to) Products::add(keys, weights, queries, from);
        }
        head = its_head, first = next;
    }
    if (dk.to) dk.store<T>(keys, block, sizes.keys, sizes.width);
    if (dv.to) dv.store<T>(values, block, sizes.keys, sizes.width);
}

#define OUTPUT(x) void *x, size_t x##0, size_t x##1, size_t x##2, int x##_wide
#define STORED(x) {x, x##0, x##1, x##2, x##_wide}
// Launch bounds of either kernel. Without a number of blocks, ptxas decides itself how few registers are enough, which for
// queries of 16 bits in narrow heads are too few: they spilled.
#define FLASH(kind, Products, T, D, threads, of_queries_bounds, of_keys_bounds)                    \
    extern "C" __global__ void __launch_bounds__ of_queries_bounds flash_queries_##kind(          \
        OUTPUT(dq), float *averages, const float *maxima, const float *shares, const T *grad,     \
        size_t g0, size_t g1, size_t g2, const float *output, size_t o0, size_t o1, size_t o2,    \
        ATTENTION(T)) {                                                                           \
        static_assert(threads == 2 * Products<D, T>::ROWS, "a warp has 16 rows");                 \
        of_queries<Products<D, T>, D, T>(STORED(dq), averages, maxima, shares,                    \
                                         {grad, g0, g1, g2}, {output, o0, o1, o2}, ATTENDED);     \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__ of_keys_bounds flash_keys_##kind(                \
        OUTPUT(dk), OUTPUT(dv), const float *averages, const float *maxima,                       \
        const float *shares, const T *grad, size_t g0, size_t g1, size_t g2, ATTENTION(T)) {      \
        of_keys<Products<D, T>, D, T>(STORED(dk), STORED(dv), averages, maxima, shares,           \
                                      {grad, g0, g1, g2}, ATTENDED);                              \
    }
#define FLASH_WARPS(t, T)                                                                         \
    FLASH(64_##t, OfWarps, T, 64, 128, (128, 3), (128, 3)) FLASH(128_##t, OfWarps, T, 128, 128, (128), (128, 1))
OF_F16(FLASH_WARPS(f16, f16))
OF_BF16(FLASH_WARPS(bf16, bf16))
OF_F32(FLASH(64_f32, OfWarps, float, 64, 128, (128), (128, 1))
           FLASH(64_tf32_f32, OfWarps, tf32, 64, 128, (128), (128, 1)))
OF_F32(FLASH(128_f32, OfWarps, float, 128, 128, (128, 1), (128, 1))
           FLASH(128_tf32_f32, OfWarps, tf32, 128, 128, (128, 1), (128, 1)))
#ifdef HOPPER
template <int D, class T> using OfGroups = Groups<D, T, D == 64 ? 3 : 2>;
#define FLASH_GROUPS(t, T)                                                                        \
    FLASH(groups_64_##t, OfGroups, T, 64, 384, (384), (384, 1))                                   \
    FLASH(groups_128_##t, OfGroups, T, 128, 256, (256), (256, 1))
OF_F16(FLASH_GROUPS(f16, f16))
OF_BF16(FLASH_GROUPS(bf16, bf16))
#endif
