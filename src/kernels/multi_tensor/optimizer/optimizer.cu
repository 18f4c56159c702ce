// One step of an optimizer for many tensors in one launch. A block has a chunk of one tensor, which the table names,
// and a thread takes four elements at a time.
//
// Weight, gradient and states are read once, and weight and states written once. LAMB takes two launches, as its
// update needs norms over the whole tensor: it reads weight and moments twice. Arithmetic is F32 (F64 for F64). The
// table says in which dtype each tensor is stored and how the exact weight is kept. These are branches, not
// templates: all threads of a block take the same one, memory is the limit anyway, and kernels for every combination
// would take long to compile.
//
// The operations are those of rule.rs, in its order, and so give the same bits as the CPU. Exceptions are LAMB's
// norms, which are summed in another order, and bias corrections after a skipped step, which use the GPU's F64 `pow`.
// Whether a step is skipped is read here, from a flag on the device, and skipped steps are counted here. So the host
// does not wait, and a step can be captured in a graph.

enum Kind { F32 = 0, F16 = 1, BF16 = 2, F64 = 3 };
enum Keep { ITSELF = 0, MASTER = 1, REMAINDER = 2, STOCHASTIC = 3 };

// What differs from step to step. A captured step reads it from memory that the host rewrites before each replay.
struct PerStep {
    u64 seed, step;
    double settings[10];
};

struct Row {
    u64 first_block, len;
    u64 variable, master, state[3], gradient;
    // Four bits each: variable, how its exact value is kept, three states, gradient. Then whether
    // all addresses are multiples of 16.
    u64 kinds;
    u64 slot;
    PerStep per_step;
    Multiplier by; // the gradient
};

DEVICE int field(u64 kinds, int at) { return (int)(kinds >> (4 * at)) & 15; }
enum Field { VARIABLE, KEEP, STATE, GRADIENT = 5, ALIGNED };

// ---- Rounding: rounding.rs.

struct Key { u32 a, b; };

DEVICE Key key_of(u64 seed, u64 number) {
    u64 z = seed + (number + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return {(u32)z, (u32)(z >> 32)};
}

DEVICE u32 random_bits(Key key, size_t element) {
    if (element >> 32) key = key_of((u64)key.a << 32 | key.b, element >> 32);
    u32 x = (u32)element ^ key.a;
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + key.b) * 0x846ca68bu;
    return x ^ (x >> 16);
}

DEVICE void at_random(float value, u32 random, bf16 &to) {
    u32 bits = __float_as_uint(value);
    to.bits = (u16)((bits + (random >> 16)) >> 16);
    if ((bits & 0x7fffffff) >= 0x7f800000 || (to.bits & 0x7fff) >= 0x7f80) narrow(value, to);
}

DEVICE void at_random(float value, u32 random, f16 &to) {
    u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffff;
    u32 normal = (magnitude + (random >> 19)) & ~0x1fffu;
    if (normal >= (127 + 16) << 23) normal = magnitude; // up is infinity: to nearest
    float unit = 1.f / 16777216.f, count = __uint_as_float(magnitude) * 16777216.f;
    float rounded = __uint_as_float(normal);
    if (magnitude < (127 - 14) << 23) {
        float whole = (float)(int)count;
        rounded = (whole + ((float)(random >> 8) * unit < count - whole ? 1.f : 0.f)) * unit;
    }
    u32 result = magnitude < 0x7f800000 ? __float_as_uint(rounded) : magnitude;
    narrow(__uint_as_float(result | (bits & 0x80000000)), to);
}

DEVICE float rebuild(bf16 rounded, u16 rest) {
    u32 high = (u32)rounded.bits << 16;
    float value = __uint_as_float(high);
    return __uint_as_float(value != value ? high | rest : high + (u32)(int)(short)rest);
}

DEVICE void split(float value, bf16 &rounded, u16 &rest) {
    u32 bits = __float_as_uint(value);
    u16 high = (u16)(bits >> 16);
    u16 quiet = (high & 0x7f) == 0 ? high | 0x40 : high;
    rounded.bits = value != value ? quiet : (u16)((bits + 0x8000) >> 16);
    rest = (u16)bits;
}

// ---- Four elements, or fewer at the end, of a plane.

static constexpr int N = 4;

// 16 bytes are the most that one access moves.
template <class T> struct __align__(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Four { T at[N]; };

template <class T> DEVICE Four<T> load_raw(u64 base, size_t i, int n, bool vector) {
    const T *from = (const T *)base + i;
    Four<T> four;
    if (vector && n == N) return *(const Four<T> *)from;
    for (int j = 0; j < N; j++) four.at[j] = j < n ? from[j] : T();
    return four;
}

template <class T> DEVICE void store_raw(u64 base, size_t i, int n, bool vector, const Four<T> &four) {
    T *to = (T *)base + i;
    if (vector && n == N) store_run<N>(to, four.at);
    else for (int j = 0; j < n; j++) to[j] = four.at[j];
}

template <class T, class A> DEVICE void load_as(u64 base, size_t i, int n, bool vector, A (&x)[N]) {
    Four<T> four = load_raw<T>(base, i, n, vector);
    for (int j = 0; j < N; j++) x[j] = (A)widen(four.at[j]);
}

template <class A> DEVICE void load(u64 base, int kind, size_t i, int n, bool vector, A (&x)[N]) {
    if (kind == F32) load_as<float>(base, i, n, vector, x);
    else if (kind == BF16) load_as<bf16>(base, i, n, vector, x);
    else if (kind == F16) load_as<f16>(base, i, n, vector, x);
    else load_as<double>(base, i, n, vector, x);
}

template <class T, class A> DEVICE void store_as(u64 base, size_t i, int n, bool vector, const A (&x)[N]) {
    Four<T> four;
    for (int j = 0; j < N; j++) narrow(x[j], four.at[j]);
    store_raw(base, i, n, vector, four);
}

template <class T, class A>
DEVICE void store_at_random(u64 base, size_t i, int n, bool vector, Key key, const A (&x)[N]) {
    Four<T> four;
    for (int j = 0; j < N; j++) at_random((float)x[j], random_bits(key, i + j), four.at[j]);
    store_raw(base, i, n, vector, four);
}

template <class A> DEVICE void load_weight(const Row &row, size_t i, int n, A (&w)[N]) {
    bool vector = field(row.kinds, ALIGNED);
    int keep = field(row.kinds, KEEP);
    if (keep == MASTER) {
        load_as<A>(row.master, i, n, vector, w);
    } else if (keep == REMAINDER) {
        Four<bf16> high = load_raw<bf16>(row.variable, i, n, vector);
        Four<u16> low = load_raw<u16>(row.master, i, n, vector);
        for (int j = 0; j < N; j++) w[j] = rebuild(high.at[j], low.at[j]);
    } else {
        load(row.variable, field(row.kinds, VARIABLE), i, n, vector, w);
    }
}

template <class A> DEVICE void store_weight(const Row &row, u64 seed, size_t i, int n, const A (&w)[N]) {
    bool vector = field(row.kinds, ALIGNED), brain = field(row.kinds, VARIABLE) == BF16;
    int keep = field(row.kinds, KEEP);
    if (keep == ITSELF) {
        store_as<A>(row.variable, i, n, vector, w);
    } else if (keep == MASTER) {
        store_as<A>(row.master, i, n, vector, w);
        if (brain) store_as<bf16>(row.variable, i, n, vector, w);
        else store_as<f16>(row.variable, i, n, vector, w);
    } else if (keep == REMAINDER) {
        Four<bf16> high;
        Four<u16> low;
        for (int j = 0; j < N; j++) split((float)w[j], high.at[j], low.at[j]);
        store_raw(row.variable, i, n, vector, high);
        store_raw(row.master, i, n, vector, low);
    } else {
        Key key = key_of(seed, 0);
        if (brain) store_at_random<bf16>(row.variable, i, n, vector, key, w);
        else store_at_random<f16>(row.variable, i, n, vector, key, w);
    }
}

template <class A>
DEVICE void load_gradient(const Row &row, const Factors<A> &multiplied, size_t i, int n, A (&g)[N]) {
    load(row.gradient, field(row.kinds, GRADIENT), i, n, field(row.kinds, ALIGNED), g);
    for (int j = 0; j < N; j++) g[j] = multiplied(g[j]);
}

template <class A> DEVICE void load_state(const Row &row, int at, size_t i, int n, A (&x)[N]) {
    load(row.state[at], field(row.kinds, STATE + at), i, n, field(row.kinds, ALIGNED), x);
}

template <class A> DEVICE void store_state(const Row &row, u64 seed, int at, size_t i, int n, const A (&x)[N]) {
    bool vector = field(row.kinds, ALIGNED);
    if (field(row.kinds, STATE + at) == BF16) {
        store_at_random<bf16>(row.state[at], i, n, vector, key_of(seed, at + 1), x);
    } else {
        store_as<A>(row.state[at], i, n, vector, x);
    }
}

// ---- The rules: rule.rs.

DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double fused(double a, double b, double c) { return fma(a, b, c); }

template <class A> DEVICE A lerp(A a, A b, double share) {
    A part = (A)share;
    return share < 0.5 ? fused(part, b - a, a) : fused(part - (A)1, b - a, b);
}

template <class A> DEVICE void moments(A &m, A &v, A g, double beta1, double beta2) {
    m = lerp(m, g, 1.0 - beta1);
    v = fused((A)(1.0 - beta2) * g, g, v * (A)beta2);
}

// `1 - beta^step`.
DEVICE double correction_of(double beta, double step) { return 1.0 - pow(beta, step); }

// Settings in the order of cuda.rs. `steps` is the number of this step, `skips` of those that were
// skipped: where none was, what the host worked out holds.
template <class A> struct Sgd {
    static constexpr int STATES = 1;
    A step, momentum, decay, fresh, kept, sign;
    bool nesterov, buffered;
    DEVICE Sgd(const PerStep &now, u64 skips) {
        const double *s = now.settings;
        bool first = s[6] != 0.0 || now.step - skips == 1;
        step = (A)-s[0], momentum = (A)s[1], decay = (A)s[3];
        fresh = (A)(first ? 1.0 : 1.0 - s[2]), kept = first ? (A)0 : momentum;
        nesterov = s[4] != 0.0, sign = s[5] != 0.0 ? (A)-1 : (A)1, buffered = s[1] != 0.0;
    }
    DEVICE void run(A &w, A g, A &b, A &, A &) const {
        g = fused(decay, w, sign * g);
        if (buffered) {
            b = fused(fresh, g, kept * b);
            g = nesterov ? fused(momentum, b, g) : b;
        }
        w = fused(step, g, w);
    }
};

template <class A> struct AdamW {
    static constexpr int STATES = 3;
    A keep, eps, step, correction, sign;
    double beta1, beta2;
    bool amsgrad;
    DEVICE AdamW(const PerStep &now, u64 skips) {
        const double *s = now.settings;
        double size = s[4], root2 = s[5];
        if (skips > 0) {
            double taken = (double)(now.step - skips);
            size = s[6] / correction_of(s[1], taken), root2 = sqrt(correction_of(s[2], taken));
        }
        keep = (A)s[0], beta1 = s[1], beta2 = s[2], eps = (A)s[3];
        step = (A)-size, correction = (A)root2;
        amsgrad = s[7] != 0.0, sign = s[8] != 0.0 ? (A)-1 : (A)1;
    }
    DEVICE void run(A &w, A g, A &m, A &v, A &top) const {
        moments(m, v, sign * g, beta1, beta2);
        if (amsgrad) top = top >= v || top != top ? top : v;
        A largest = amsgrad ? top : v;
        w = w * keep + step * m / (root(largest) / correction + eps);
    }
};

template <class A> struct Lion {
    static constexpr int STATES = 1;
    A step, keep, beta1, beta2, fresh1, fresh2, sign;
    DEVICE Lion(const PerStep &now, u64) {
        const double *s = now.settings;
        step = (A)-s[0], keep = (A)s[1], beta1 = (A)s[2], beta2 = (A)s[3];
        fresh1 = (A)(1.0 - s[2]), fresh2 = (A)(1.0 - s[3]), sign = s[4] != 0.0 ? (A)-1 : (A)1;
    }
    DEVICE void run(A &w, A g, A &m, A &, A &) const {
        g = sign * g;
        A toward = fused(fresh1, g, m * beta1);
        A direction = toward > (A)0 ? (A)1 : toward < (A)0 ? (A)-1 : toward;
        w = fused(step, direction, w * keep);
        m = fused(fresh2, g, m * beta2);
    }
};

template <class A> struct Average {
    static constexpr int STATES = 0;
    double share;
    DEVICE Average(const PerStep &now, u64) : share(now.settings[0]) {}
    DEVICE void run(A &w, A g, A &, A &, A &) const { w = lerp(w, g, share); }
};

template <class A> struct Lamb {
    A lr, decay, eps, correction1, correction2, sign;
    double beta1, beta2, rate;
    DEVICE Lamb(const PerStep &now, u64 skips) {
        const double *s = now.settings;
        double first = s[5], second = s[6];
        if (skips > 0) {
            double taken = (double)(now.step - skips);
            first = correction_of(s[2], taken), second = sqrt(correction_of(s[3], taken));
        }
        rate = s[0], decay = (A)s[1], beta1 = s[2], beta2 = s[3], eps = (A)s[4];
        correction1 = (A)first, correction2 = (A)second, sign = s[7] != 0.0 ? (A)-1 : (A)1;
    }
    DEVICE A direction(A w, A m, A v) const {
        return fused(decay, w, m / correction1 / (root(v) / correction2 + eps));
    }
};

// ---- The kernels.

// Whether the step is skipped; then its first block counts that. `skips` is null where nothing was
// or can be skipped.
DEVICE bool skipped(const Row &row, const u32 *skip, u32 *skips) {
    if (skip == nullptr || *skip == 0) return false;
    if (blockIdx.x == row.first_block && threadIdx.x == 0) skips[row.slot] += 1;
    return true;
}

DEVICE u64 skips_of(const Row &row, const u32 *skips) { return skips == nullptr ? 0 : skips[row.slot]; }

template <class A, class Rule>
DEVICE void step(const Table<Row> &table, const u32 *skip, u32 *skips, const PerStep *captured) {
    u32 number = table.row();
    const Row &row = table.rows[number];
    if (skipped(row, skip, skips)) return;
    const PerStep &now = captured ? captured[number] : row.per_step;
    const Rule rule(now, skips_of(row, skips));
    const Factors<A> multiplied(row.by);
    size_t start = start_of(row), end = end_of(row);
    for (size_t i = start + threadIdx.x * N; i < end; i += blockDim.x * N) {
        int n = end - i < N ? (int)(end - i) : N;
        A w[N], g[N], s[3][N];
        load_weight(row, i, n, w);
        load_gradient(row, multiplied, i, n, g);
        for (int k = 0; k < Rule::STATES; k++)
            if (row.state[k]) load_state(row, k, i, n, s[k]);
        for (int j = 0; j < N; j++) rule.run(w[j], g[j], s[0][j], s[1][j], s[2][j]);
        for (int k = 0; k < Rule::STATES; k++)
            if (row.state[k]) store_state(row, now.seed, k, i, n, s[k]);
        store_weight(row, now.seed, i, n, w);
    }
}

#define RULE_IN(suffix, A, name, Rule)                                                               \
    KERNEL name##_##suffix(const __grid_constant__ Table<Row> table, const u32 *skip, u32 *skips,      \
                           const PerStep *captured) {                                                \
        step<A, Rule<A>>(table, skip, skips, captured);                                              \
    }
#define RULE(name, Rule) OF_F32(RULE_IN(f32, float, name, Rule)) OF_F64(RULE_IN(f64, double, name, Rule))

// A program compiles the rules it uses, each when it is first used.
#if !defined(ONLY) || ONLY == 0
RULE(sgd, Sgd)
#endif
#if !defined(ONLY) || ONLY == 1
RULE(adamw, AdamW)
#endif
#if !defined(ONLY) || ONLY == 2
RULE(lion, Lion)
#endif
#if !defined(ONLY) || ONLY == 3
RULE(average, Average)
#endif

// LAMB, first: the moments, and each block's sums of squares of the weight and of the update.
template <class A>
DEVICE void lamb_moments(const Table<Row> &table, const u32 *skip, u32 *skips, const PerStep *captured, double *squares) {
    u32 number = table.row();
    const Row &row = table.rows[number];
    if (skipped(row, skip, skips)) return;
    const PerStep &now = captured ? captured[number] : row.per_step;
    const Lamb<A> rule(now, skips_of(row, skips));
    const Factors<A> multiplied(row.by);
    size_t start = start_of(row), end = end_of(row);
    double weight = 0.0, update = 0.0;
    for (size_t i = start + threadIdx.x * N; i < end; i += blockDim.x * N) {
        int n = end - i < N ? (int)(end - i) : N;
        A w[N], g[N], m[N], v[N];
        load_weight(row, i, n, w);
        load_gradient(row, multiplied, i, n, g);
        load_state(row, 0, i, n, m);
        load_state(row, 1, i, n, v);
        for (int j = 0; j < N; j++) moments(m[j], v[j], rule.sign * g[j], rule.beta1, rule.beta2);
        for (int j = 0; j < n; j++) {
            double x = (double)w[j], y = (double)rule.direction(w[j], m[j], v[j]);
            weight += x * x, update += y * y;
        }
        store_state(row, now.seed, 0, i, n, m);
        store_state(row, now.seed, 1, i, n, v);
    }
    weight = block_reduce<Sum>(weight, 0.0);
    update = block_reduce<Sum>(update, 0.0);
    if (threadIdx.x == 0) squares[2 * (size_t)blockIdx.x] = weight, squares[2 * (size_t)blockIdx.x + 1] = update;
}

// Then: the update, as long as the trust ratio says. Every block adds up its row's sums by itself, in
// one order.
template <class A>
DEVICE void lamb_update(const Table<Row> &table, const u32 *skip, u32 *skips, const PerStep *captured, const double *squares) {
    u32 number = table.row();
    const Row &row = table.rows[number];
    if (skip != nullptr && *skip != 0) return;
    const PerStep &now = captured ? captured[number] : row.per_step;
    const Lamb<A> rule(now, skips_of(row, skips));
    double weight = 0.0, update = 0.0;
    for (u64 b = threadIdx.x; b < (row.len + CHUNK - 1) / CHUNK; b += blockDim.x) {
        weight += squares[2 * (row.first_block + b)], update += squares[2 * (row.first_block + b) + 1];
    }
    weight = sqrt(block_reduce<Sum>(weight, 0.0));
    update = sqrt(block_reduce<Sum>(update, 0.0));
    bool adapt = now.settings[8] != 0.0, clip = now.settings[9] != 0.0;
    double ratio = adapt && weight > 0.0 && update > 0.0 ? weight / update : 1.0;
    if (clip) ratio = fmin(ratio, 1.0);
    A factor = (A)(-rule.rate * ratio);
    size_t start = start_of(row), end = end_of(row);
    for (size_t i = start + threadIdx.x * N; i < end; i += blockDim.x * N) {
        int n = end - i < N ? (int)(end - i) : N;
        A w[N], m[N], v[N];
        load_weight(row, i, n, w);
        load_state(row, 0, i, n, m);
        load_state(row, 1, i, n, v);
        for (int j = 0; j < N; j++) w[j] = fused(factor, rule.direction(w[j], m[j], v[j]), w[j]);
        store_weight(row, now.seed, i, n, w);
    }
}

#define LAMB(suffix, A)                                                                              \
    KERNEL lamb_moments_##suffix(                                                                    \
        const __grid_constant__ Table<Row> table, const u32 *skip, u32 *skips,                      \
        const PerStep *captured, double *squares) {                                                  \
        lamb_moments<A>(table, skip, skips, captured, squares);                                      \
    }                                                                                                \
    KERNEL lamb_update_##suffix(                                                                     \
        const __grid_constant__ Table<Row> table, const u32 *skip, u32 *skips,                      \
        const PerStep *captured, const double *squares) {                                            \
        lamb_update<A>(table, skip, skips, captured, squares);                                       \
    }

#if !defined(ONLY) || ONLY == 4
OF_F32(LAMB(f32, float))
OF_F64(LAMB(f64, double))
#endif

// ---- The remainder, on its own: the F32 that a BF16 weight and its remainder hold.
#if !defined(ONLY) || ONLY == 5
KERNEL rebuild_bf16(const bf16 *rounded, const u16 *rest, float *to, size_t len) {
    for (size_t i = global_thread(); i < len; i += global_threads()) to[i] = rebuild(rounded[i], rest[i]);
}
#endif
