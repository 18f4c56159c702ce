// Attention forward without the scores in memory, on tensor cores: a block has 64 queries of one head, or more,
// each of its warps 16 of them, and goes through the keys a tile at a time. Scores, softmax and sums
// are F32, exponents those of two; probabilities, relative to the largest score so far, are rounded to the
// inputs' dtype for the second product. Tri Dao, FlashAttention-2.
//
// The output is divided by the sum of what was multiplied, the rounded probabilities, so that it is a mean of the
// values whatever the rounding: backward needs that, of the output before it is rounded.

template <class Products, int D, class T>
DEVICE void flash(const Output &out, float *unrounded, float *maxima, float *shares, const Attention<T> &in) {
    constexpr int KEYS = Products::TILE_ROWS;
    auto &tiles = Products::tiles();
    const Sizes &sizes = in.sizes;
    // The last queries first: with `causal`, they see the most.
    Block block(sizes.queries, sizes.heads, true, Products::ROWS);
    u32 batch = block.batch, head = block.head, shared = head / sizes.group;
    int t = threadIdx.x % 4;
    Left<D, T> query_rows;
    load_left(query_rows, in.q.head(batch, head), in.q.s2, block, sizes.queries, sizes.width);
    const auto &left = Products::keep_for_scores(query_rows);

    // `base`: what exponents are relative to. It is rounded, so that nothing may be made relative to another one.
    float sum[2] = {0, 0}, most[2] = {-infinity<float>(), -infinity<float>()}, base[2] = {0, 0};
    float result[D / 8][4] = {}, rounded_sum[4] = {};
    u32 one;
    if constexpr (IS_WIDE<T>) {
        one = __float_as_uint(1);
    } else {
        one = pack<T>(1, 1);
    }
    auto fetch = [&](int stage, u32 first) {
        Products::fetch(tiles.first[stage], in.k.head(batch, shared), in.k.s2, first, sizes.keys, sizes.width);
        Products::fetch(tiles.second[stage], in.v.head(batch, shared), in.v.s2, first, sizes.keys, sizes.width);
    };
    u32 end = sizes.end(block.after()), end_of_group = sizes.end(block.after_group());
    float unit = in.unit();
    fetch(0, 0);
    int stage = 0;
    for (u32 first = 0; first < end; first += KEYS, stage ^= 1) {
        Products::wait_for_tile(); // and nobody reads the other stage any more
        u32 next = first + KEYS;
        if (next < end) fetch(stage ^ 1, next);
        if (Products::ROWS > 64 && first >= end_of_group) continue;

        float p[KEYS / 8][4] = {}, largest[2] = {most[0], most[1]};
        Products::scores(p, left, tiles.first[stage]);
        auto place = [&](int n, int e) { return Seen{block.row[e / 2], first + n * 8 + 2 * t + e % 2}; };
        in.score(p, batch, head, sizes.is_edge(block.first(), first, KEYS), place, [](int, int, float) {});
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) largest[e / 2] = fmaxf(largest[e / 2], p[n][e]); // NaN is in the sum
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int offset = 1; offset < 4; offset *= 2) {
                largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], offset));
            }
            float before = most[i] == -infinity<float>() ? most[i] : base[i];
            base[i] = in.base(in.largest(largest[i]));
            float shrink = power_of_two(before - base[i]);
            sum[i] *= shrink, rounded_sum[2 * i] *= shrink;
            most[i] = largest[i];
#pragma unroll
            for (int n = 0; n < D / 8; n++) result[n][2 * i] *= shrink, result[n][2 * i + 1] *= shrink;
        }
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[n][e] = power_of_two(fmaf(p[n][e], unit, -base[e / 2]));
                sum[e / 2] += p[n][e];
            }
        }
        Left<16, T> weights[KEYS / 16];
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            as_left(weights[step], p[2 * step], p[2 * step + 1]);
#pragma unroll
            for (auto &part : weights[step].at) multiply_to_nearest<T>(rounded_sum, part, one, one);
        }
        Products::add(result, weights, tiles.second[stage], 0);
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] = row_sum(sum[i]);
        bool hidden = sum[i] == 0;
        float share = hidden ? 0.f : 1 / rounded_sum[2 * i];
#pragma unroll
        for (int n = 0; n < D / 8; n++) result[n][2 * i] *= share, result[n][2 * i + 1] *= share;
        if (t > 0 || block.row[i] >= sizes.queries) continue;
        size_t at = sizes.at(batch, head, block.row[i]);
        maxima[at] = in.largest(most[i]), shares[at] = hidden ? 0.f : 1 / sum[i];
    }
    out.store<T>(result, block, sizes.queries, sizes.width);
    Output{unrounded, out.s0, out.s1, out.s2, 1}.store<T>(result, block, sizes.queries, sizes.width);
}

#define FLASH(name, Products, T, D, threads, blocks)                                              \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(                           \
        T *out, float *unrounded, size_t o0, size_t o1, size_t o2, float *maxima, float *shares,  \
        ATTENTION(T)) {                                                                           \
        static_assert(threads == 2 * Products<D, T>::ROWS, "a warp has 16 rows");                 \
        flash<Products<D, T>, D, T>({out, o0, o1, o2, 0}, unrounded, maxima, shares, ATTENDED);   \
    }
#define FLASH_WARPS(t, T)                                                                         \
    FLASH(flash_64_##t, OfWarps, T, 64, 128, 3) FLASH(flash_128_##t, OfWarps, T, 128, 128, 3)
OF_F16(FLASH_WARPS(f16, f16))
OF_BF16(FLASH_WARPS(bf16, bf16))
OF_F32(FLASH(flash_64_f32, OfWarps, float, 64, 128, 2) FLASH(flash_64_tf32_f32, OfWarps, tf32, 64, 128, 3))
OF_F32(FLASH(flash_128_f32, OfWarps, float, 128, 128, 2) FLASH(flash_128_tf32_f32, OfWarps, tf32, 128, 128, 2))
#ifdef HOPPER
// Two blocks of narrow heads fit into a multiprocessor: one may multiply while the other one computes exponentials.
template <int D, class T> using OfGroups = Groups<D, T, D == 64 ? 2 : 3>;
#define FLASH_GROUPS(t, T)                                                                        \
    FLASH(flash_groups_64_##t, OfGroups, T, 64, 256, 2) FLASH(flash_groups_128_##t, OfGroups, T, 128, 384, 1)
OF_F16(FLASH_GROUPS(f16, f16))
OF_BF16(FLASH_GROUPS(bf16, bf16))
#endif
