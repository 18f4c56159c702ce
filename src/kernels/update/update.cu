// Gradients between backward and the step, many tensors a launch; and the loss scale itself.
//
// Gradients are F32 or F64, and so is the arithmetic.

struct Row { u64 first_block, len, address, is_double; };

static constexpr u64 WORDS = 4064;
static constexpr u64 ROWS = (WORDS - 1) / 4;

struct Table {
    u64 count;
    Row rows[ROWS];
    u64 rest[WORDS - 1 - 4 * ROWS];
};

static constexpr size_t CHUNK = 1 << 14;

// The row whose blocks this one is among: the last that starts at it or before.
DEVICE u32 row_of(const Table &table) {
    u32 low = 0, high = (u32)table.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.rows[middle].first_block <= blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

// Calls `f(element)` for every element of this block's chunk, and stores what it made of them.
template <bool WRITE, class T, class F> DEVICE void each_of(const Row &row, F &f) {
    T *x = (T *)row.address;
    size_t start = (blockIdx.x - row.first_block) * CHUNK;
    size_t end = row.len - start < CHUNK ? row.len : start + CHUNK;
    size_t packs = aligned(x) ? (end - start) / Pack<T>::LEN : 0;
    for (size_t p = threadIdx.x; p < packs; p += blockDim.x) {
        T *at = x + start + p * Pack<T>::LEN;
        Pack<T> pack = load_pack(at);
        for (int j = 0; j < Pack<T>::LEN; j++) f(pack.at[j]);
        if (WRITE) store_pack(at, pack);
    }
    for (size_t i = start + packs * Pack<T>::LEN + threadIdx.x; i < end; i += blockDim.x) {
        T one = x[i];
        f(one);
        if (WRITE) x[i] = one;
    }
}

template <bool WRITE, class F> DEVICE void each(const Row &row, F &f) {
    if (row.is_double) each_of<WRITE, double>(row, f);
    else each_of<WRITE, float>(row, f);
}

DEVICE bool is_nan(float x) { return x != x; }
DEVICE bool is_nan(double x) { return x != x; }
// What is not finite differs from itself minus itself: inf - inf is NaN.
template <class T> DEVICE bool is_finite(T x) { return x - x == (T)0; }

struct Unscale {
    float inverse;
    u32 infinite, nan;
    template <class T> DEVICE void operator()(T &x) {
        x *= inverse;
        if (!is_finite(x)) is_nan(x) ? nan++ : infinite++;
    }
};

// Multiplies by `*inverse_at`, or by `inverse` where that is null, and counts infinities and NaN of
// each row: found[2 * row], found[2 * row + 1].
KERNEL unscale(const __grid_constant__ Table table, const float *inverse_at, float inverse, u32 *found) {
    u32 number = row_of(table);
    Unscale op = {inverse_at != nullptr ? *inverse_at : inverse, 0, 0};
    each<true>(table.rows[number], op);
    // Integers: the sum is the same in any order. A clean step adds nothing.
    if (op.infinite > 0) atomicAdd(found + 2 * number, op.infinite);
    if (op.nan > 0) atomicAdd(found + 2 * number + 1, op.nan);
}

struct RoundsToInfinity {
    u32 count;
    // The largest half and half a step.
    template <class T> DEVICE void operator()(T &x) {
        if (is_finite(x) && (x >= (T)65520 || x <= (T)-65520)) count++;
    }
};

// Counts, as `unscale`, the finite numbers that would be infinite in F16.
KERNEL overflows_f16(const __grid_constant__ Table table, u32 *found) {
    u32 number = row_of(table);
    RoundsToInfinity op = {0};
    each<false>(table.rows[number], op);
    if (op.count > 0) atomicAdd(found + 2 * number, op.count);
}

struct Squares {
    double sum;
    template <class T> DEVICE void operator()(T &x) { sum += (double)x * (double)x; }
};

// Each block's sum of squares, in F64.
KERNEL squares(const __grid_constant__ Table table, double *sums) {
    Squares op = {0.0};
    each<false>(table.rows[row_of(table)], op);
    double sum = block_reduce<Sum>(op.sum, 0.0);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The root of their sum. One block.
KERNEL norm_of(const double *sums, size_t len, float *to) {
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < len; i += blockDim.x) sum += sums[i];
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) *to = (float)sqrt(sum);
}

struct Multiply {
    double factor;
    template <class T> DEVICE void operator()(T &x) { x *= (T)factor; }
};

// Multiplies by `min(1, max_norm / (norm + 1e-6))`; nothing is read or written where that is 1.
KERNEL clip_norm(const __grid_constant__ Table table, const float *norm, double max_norm) {
    Multiply op = {max_norm / ((double)*norm + 1e-6)};
    // Not `!(factor < 1)`: a NaN norm must reach the gradients.
    if (op.factor >= 1.0) return;
    each<true>(table.rows[row_of(table)], op);
}

struct Clamp {
    double limit;
    // Comparisons: NaN stays.
    template <class T> DEVICE void operator()(T &x) {
        x = x > (T)limit ? (T)limit : x < (T)-limit ? (T)-limit : x;
    }
};

KERNEL clip_value(const __grid_constant__ Table table, double limit) {
    Clamp op = {limit};
    each<true>(table.rows[row_of(table)], op);
}

// 1 where one of the table's ranges of u32 holds anything but zeros, else 0. One block; a row is a
// range.
KERNEL any_of(const __grid_constant__ Table table, u32 *to) {
    u32 found = 0;
    for (u64 r = 0; r < table.count; r++) {
        const u32 *range = (const u32 *)table.rows[r].address;
        for (u64 i = threadIdx.x; i < table.rows[r].len; i += blockDim.x) found |= range[i];
    }
    found = __syncthreads_or(found != 0);
    if (threadIdx.x == 0) *to = found != 0;
}

// The rule of scale.rs. One thread.
struct Scale {
    float scale, inverse;
    u32 growth_tracker, hysteresis_tracker;
};

DEVICE float moved(float scale, double factor, float lowest, float highest) {
    float to = (float)((double)scale * factor);
    return to < lowest ? lowest : to > highest ? highest : to;
}

KERNEL update_scale(Scale *state, const u32 *found, u32 *log, double growth_factor, double backoff_factor,
                    int growth_interval, int hysteresis, float min_scale, float max_scale) {
    Scale s = *state;
    *log = *found;
    u32 clean_steps = s.growth_tracker == 0xffffffffu ? s.growth_tracker : s.growth_tracker + 1;
    if (*found != 0) {
        if (s.hysteresis_tracker != 0xffffffffu && s.hysteresis_tracker + 1 < (u32)hysteresis) s.hysteresis_tracker += 1;
        else s.scale = moved(s.scale, backoff_factor, min_scale, max_scale);
        s.growth_tracker = 0;
    } else if (clean_steps >= (u32)growth_interval) {
        s.scale = moved(s.scale, growth_factor, min_scale, max_scale);
        s.growth_tracker = s.hysteresis_tracker = 0;
    } else {
        s.growth_tracker = clean_steps;
    }
    s.inverse = (float)(1.0 / (double)s.scale);
    *state = s;
}
