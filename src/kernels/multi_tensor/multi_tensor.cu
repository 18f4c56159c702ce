// Gradients between backward and the step, many tensors per launch: check, norm, clip. Also updates the loss scale.
//
// A table in the launch's arguments has a row per tensor (many.cuh). Each block has one chunk of one tensor, so a model
// of many small tensors takes a few launches instead of one per tensor. Gradients are F32 or F64, and so is the
// arithmetic.
//
// A row also has the factors that its gradient is yet to be multiplied by: the inverse scale and the clipping factor.
// Kernels apply them to what they read, so `check` and `squares` write no gradient. `apply_scale` and `clip_value` do.
//
// Results do not depend on the order of blocks. Counts of infinities and NaN are integers, which atomics may add in any
// order. Squares are summed in F64, block by block, and one more block adds these sums.
//
// Nothing waits for the host. `update_scale` changes the scale on the device, and logs whether the step overflowed, for
// the host to read later.

struct Row {
    u64 first_block, len, address, is_double;
    Multiplier by;
};

// Packs that a thread asks for before it uses the first: one for each of a multiprocessor's threads is just what
// memory has under way at its full rate.
constexpr int AHEAD = 4;

// Calls `f(element)` for every element of this block's chunk, multiplied, and stores what it made of
// them.
template <bool WRITE, class T, class F> DEVICE void each_of(const Row &row, F &f) {
    T *x = (T *)row.address;
    Factors<T> multiplied(row.by);
    size_t start = start_of(row), end = end_of(row);
    size_t packs = aligned(x) ? (end - start) / Pack<T>::LEN : 0;
    for (size_t p = threadIdx.x; p < packs; p += AHEAD * blockDim.x) {
        T *at = x + start + p * Pack<T>::LEN;
        size_t apart = blockDim.x * Pack<T>::LEN;
        Pack<T> pack[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; r++)
            if (p + r * blockDim.x < packs) pack[r] = load_pack(at + r * apart);
#pragma unroll
        for (int r = 0; r < AHEAD; r++) {
            if (p + r * blockDim.x >= packs) break;
            for (int j = 0; j < Pack<T>::LEN; j++) f(pack[r].at[j] = multiplied(pack[r].at[j]));
            if (WRITE) store_pack(at + r * apart, pack[r]);
        }
    }
    for (size_t i = start + packs * Pack<T>::LEN + threadIdx.x; i < end; i += blockDim.x) {
        T one = multiplied(x[i]);
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

struct NonFinite {
    u32 infinite, nan;
    template <class T> DEVICE void operator()(T x) {
        if (!is_finite(x)) is_nan(x) ? nan++ : infinite++;
    }
    // Integers: the sum is the same in any order. A clean step adds nothing.
    DEVICE void add_to(u32 *found, u32 row) const {
        if (infinite > 0) atomicAdd(found + 2 * row, infinite);
        if (nan > 0) atomicAdd(found + 2 * row + 1, nan);
    }
};

// Counts infinities and NaN of each row: found[2 * row], found[2 * row + 1].
KERNEL check(const __grid_constant__ Table<Row> table, u32 *found) {
    u32 number = table.row();
    NonFinite op = {0, 0};
    each<false>(table.rows[number], op);
    op.add_to(found, number);
}

struct Nothing {
    template <class T> DEVICE void operator()(T) {}
};

// Multiplies, in place; nothing is read or written where that changes nothing.
KERNEL apply_scale(const __grid_constant__ Table<Row> table) {
    const Row &row = table.rows[table.row()];
    Factors<double> by(row.by);
    if (by.inverse == 1.0 && by.clip == 1.0) return;
    Nothing op;
    each<true>(row, op);
}

struct RoundsToInfinity {
    u32 count;
    // The largest F16 and half a step.
    template <class T> DEVICE void operator()(T &x) {
        if (is_finite(x) && (x >= (T)65520 || x <= (T)-65520)) count++;
    }
};

// Counts, as `check`, the finite numbers that would be infinite in F16.
KERNEL overflows_f16(const __grid_constant__ Table<Row> table, u32 *found) {
    u32 number = table.row();
    RoundsToInfinity op = {0};
    each<false>(table.rows[number], op);
    if (op.count > 0) atomicAdd(found + 2 * number, op.count);
}

// The square of an F32 is exact in F64, so that one rounding is that of two instructions.
DEVICE double plus_square(double sum, float x) { return fma((double)x, (double)x, sum); }
DEVICE double plus_square(double sum, double x) { return sum + x * x; }

struct Squares {
    double sum;
    NonFinite found;
    template <class T> DEVICE void operator()(T x) {
        sum = plus_square(sum, x);
        found(x);
    }
};

// Each block's sum of squares, in F64; and what `check` counts.
KERNEL squares(const __grid_constant__ Table<Row> table, u32 *found, double *sums) {
    u32 number = table.row();
    Squares op = {0.0, {0, 0}};
    each<false>(table.rows[number], op);
    op.found.add_to(found, number);
    double sum = block_reduce<Sum>(op.sum, 0.0);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The root of their sum, and that rounded. One block.
KERNEL norm_of(const double *sums, size_t len, double *exact, float *rounded) {
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < len; i += blockDim.x) sum += sums[i];
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) {
        *exact = sqrt(sum);
        *rounded = (float)*exact;
    }
}

struct Clamp {
    double limit;
    // Comparisons: NaN stays.
    template <class T> DEVICE void operator()(T &x) {
        x = x > (T)limit ? (T)limit : x < (T)-limit ? (T)-limit : x;
    }
};

KERNEL clip_value(const __grid_constant__ Table<Row> table, double limit) {
    Clamp op = {limit};
    each<true>(table.rows[table.row()], op);
}

struct Range { u64 first_block, len, address; };

// 1 where one of the table's ranges of u32 holds anything but zeros, else 0. One block.
KERNEL any_of(const __grid_constant__ Table<Range> table, u32 *to) {
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
    u32 updates;
};

DEVICE float moved(float scale, double factor, float lowest, float highest) {
    float to = (float)((double)scale * factor);
    return to < lowest ? lowest : to > highest ? highest : to;
}

KERNEL update_scale(Scale *state, const u32 *found, u32 *log, size_t log_length, double growth_factor,
                    double backoff_factor, int growth_interval, int hysteresis, float min_scale, float max_scale) {
    Scale s = *state;
    log[s.updates++ % log_length] = *found;
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
