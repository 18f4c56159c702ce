// Losses of rows of classes, and of pairs of elements; cuda.rs says which launches they take.
//
// Cross entropy has a warp or a block for each row, and reads the logits once. Each thread keeps the largest logit
// and the sum of exponentials relative to it (online softmax), and the team joins them. It writes the row's loss in
// F64 and its log-sum-exp, but no softmax. Backward reads the logits once more, recomputes the softmax and writes the
// gradient; a thread reads an element before it writes it, so that both may have one buffer. Pairwise losses are
// element-wise: a thread takes packs of 16 bytes.
//
// Elements are widened to F32 (F64 for F64). The sums of a row have that type, and so has the sum of each 64 terms of a
// thread in a pairwise loss. Across rows, threads of a pairwise loss, and blocks, sums are F64, and the mean is rounded
// once. A target that is neither a class nor ignored makes the loss and the gradients of its row NaN: naming it in an
// error would make the host wait.

template <class A> DEVICE A nan_of() { return infinity<A>() - infinity<A>(); }

// How the rows of a class loss count: weights of the classes or none, and the target of rows that do not count.
template <class A> struct Classes {
    const A *weights;
    size_t classes, ignored;

    // The weight of a row, 0 where it does not count, NaN where its target is no class.
    DEVICE A weight(u32 target) const {
        if (target == ignored) return A(0);
        if (target >= classes) return nan_of<A>();
        return weights ? weights[target] : A(1);
    }
};

// Every row's ln(sum(exp(x))), its loss, and its weight if that is asked for. Rows begin `apart` elements from each
// other: what is behind the classes is not read, and has no gradient.
template <class T>
DEVICE void cross_entropy(double *losses, double *row_weights, Acc<T> *log_sums, const T *x, const u32 *targets,
                          Classes<Acc<T>> of, size_t rows, size_t apart, double smoothing, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T>;
    Team team(size);
    const A *weights = smoothing != 0 ? of.weights : nullptr;
    for (size_t row = team.row; row < rows; row += team.teams) {
        const T *from = x + row * apart;
        LargestAndSum<A> all;
        A sum = A(0), mass = A(0);
        auto add = [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(from + i, u);
            all.add(u);
#pragma unroll
            for (int k = 0; k < N; k++) sum += weights ? u[k] * weights[i + k] : u[k];
            for (int k = 0; weights && k < N; k++) mass += weights[i + k];
        };
        along<V>(of.classes, true, team.rank, team.size, add, lead_of(from));
        all.join(team);
        // Without smoothing, the logits of other classes may be negative infinities.
        if (smoothing != 0) sum = team.reduce<Sum>(sum, A(0));
        if (weights) mass = team.reduce<Sum>(mass, A(0));
        if (team.rank == 0) {
            double log_sum = (double)all.largest + log((double)all.sum);
            u32 target = targets[row];
            bool counts = target != of.ignored;
            double logit = target < of.classes ? (double)widen(from[target]) : nan_of<double>();
            double weight = of.weight(target), spread = smoothing / (double)of.classes;
            double loss = log_sum - (1 - smoothing) * logit;
            if (of.weights) {
                loss = (1 - smoothing) * weight * (log_sum - logit);
                if (smoothing != 0) loss += spread * ((double)mass * log_sum - (double)sum);
            } else if (smoothing != 0) {
                loss -= smoothing * (double)sum / (double)of.classes;
            }
            losses[row] = counts ? loss : 0;
            if (row_weights) row_weights[row] = weight;
            // Apart, as their sum would be rounded to the last place of the larger.
            log_sums[row] = all.largest;
            log_sums[rows + row] = (A)log((double)all.sum);
        }
    }
}

// What a row's gradient is multiplied by: the gradient of its loss, `stride` from that of the next row's, over the
// total, a tensor or a count.
template <class A> struct Scale {
    const A *gradient, *total;
    size_t stride;
    double count;

    DEVICE A of(size_t row) const { return gradient[row * stride] / (total ? *total : (A)count); }
};

// (softmax * mass - target distribution) * scale, where mass is the sum of the target distribution.
template <class T, class O>
DEVICE void cross_entropy_backward(O *dx, const T *x, const u32 *targets, const Acc<T> *log_sums,
                                   Classes<Acc<T>> of, Scale<Acc<T>> scale, size_t rows, size_t apart,
                                   double smoothing, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, O>;
    Team team(size);
    A other = (A)(smoothing / (double)of.classes), rest = (A)(1 - smoothing), sum = A(0);
    bool weighs = of.weights && smoothing != 0;
    if (weighs) {
        for (size_t i = team.rank; i < of.classes; i += team.size) sum += of.weights[i];
        sum = team.reduce<Sum>(sum, A(0));
    }
    for (size_t row = team.row; row < rows; row += team.teams) {
        u32 target = targets[row];
        bool counts = target != of.ignored;
        A largest = log_sums[row], log_sum = log_sums[rows + row], weight = of.weight(target), more = rest * weight;
        A factor = counts && target >= of.classes ? nan_of<A>() : scale.of(row);
        A mass = of.weights ? more + other * sum : A(1);
        const T *from = x + row * apart;
        O *to = dx + row * apart;
        auto take = [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(from + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A p = exponential(u[k] - largest - log_sum) * mass;
                A every = weighs ? other * of.weights[i + k] : other;
                A d = ((i + k == target ? p - more : p) - every) * factor;
                u[k] = counts ? d : A(0);
            }
            write(to + i, u);
        };
        size_t lead = lead_of(from);
        along<V>(of.classes, aligned(to + lead), team.rank, team.size, take, lead);
        for (size_t i = of.classes + team.rank; i < apart; i += team.size) narrow(A(0), to[i]);
    }
}

// Minus the element of each row that its target names, times its weight, which is written too if it is asked for.
template <class T>
DEVICE void pick(double *losses, double *row_weights, const T *x, const u32 *targets, Classes<Acc<T>> of,
                 size_t rows) {
    for (size_t row = global_thread(); row < rows; row += global_threads()) {
        u32 target = targets[row];
        double weight = of.weight(target), loss = 0;
        if (target != of.ignored) {
            loss = target < of.classes ? -(double)widen(x[row * of.classes + target]) * weight : nan_of<double>();
        }
        losses[row] = loss;
        if (row_weights) row_weights[row] = weight;
    }
}

template <class O, class A>
DEVICE void pick_backward(O *dx, const u32 *targets, Classes<A> of, Scale<A> scale, size_t rows, int size) {
    constexpr int V = PACK<O>;
    Team team(size);
    bool packed = aligned(dx) && of.classes % V == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        u32 target = targets[row];
        bool counts = target != of.ignored;
        A share = counts ? -scale.of(row) * of.weight(target) : A(0);
        A other = counts && target >= of.classes ? nan_of<A>() : A(0);
        along<V>(of.classes, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = i + k == target ? share : other;
            write(dx + row * of.classes + i, u);
        });
    }
}

// One block: the sum of the terms over that of the weights, which it writes too, or where there are none over `count`.
template <class A>
DEVICE void mean(A *y, A *total, const double *terms, const double *weights, size_t terms_count, double count) {
    double sum = 0, all = 0;
    for (size_t i = threadIdx.x; i < terms_count; i += blockDim.x) {
        sum += terms[i];
        if (weights) all += weights[i];
    }
    sum = block_reduce<Sum>(sum, 0.0);
    if (weights) count = block_reduce<Sum>(all, 0.0);
    if (threadIdx.x == 0) {
        *y = (A)(sum / count);
        if (weights) *total = (A)count;
    }
}

// Targets as U32: `ignored` as `as`, and what no U32 below it is as the largest.
KERNEL targets_i64(u32 *y, const long long *x, size_t n, size_t ignored, size_t as) {
    for (size_t i = global_thread(); i < n; i += global_threads()) {
        u64 target = (u64)x[i];
        y[i] = target == ignored ? (u32)as : target >= as ? 0xffffffffu : (u32)target;
    }
}

// Losses of two numbers, by their number in cuda.rs, as in pairwise.rs.
DEVICE float one_more(float x) { return log1pf(x); }
DEVICE double one_more(double x) { return log1p(x); }
template <class A> DEVICE A magnitude(A x) { return x < A(0) ? -x : x; }

template <class A> DEVICE A bounded(A log) { return log < A(-100) ? A(-100) : log; }
template <class A> DEVICE A bounded_log(A x) { return bounded(logarithm(x)); }

template <class A> DEVICE A pair_loss(int kind, A delta, A a, A b) {
    if (kind == 0) return (a - b) * (a - b);
    if (kind == 1) {
        A d = magnitude(a - b);
        return d > delta ? delta * (d - A(0.5) * delta) : A(0.5) * d * d;
    }
    if (kind == 2) return -(b * bounded_log(a) + (A(1) - b) * bounded(one_more(-a)));
    if (kind == 4) return magnitude(a - b);
    if (kind == 5) return (b == A(0) ? b : b * logarithm(b)) - b * a;
    if (kind == 6) return exponential(b) * (b - a);
    return (a < A(0) ? A(0) : a) - a * b + one_more(exponential(-magnitude(a)));
}

template <class A> DEVICE A pair_slope(int kind, bool of_target, A delta, A a, A b) {
    if (kind == 0) return A(2) * (of_target ? b - a : a - b);
    if (kind == 1) {
        A d = a - b;
        d = d > delta ? delta : d;
        d = d < -delta ? -delta : d;
        return of_target ? -d : d;
    }
    if (kind == 2) {
        if (of_target) return bounded(one_more(-a)) - bounded_log(a);
        A variance = a * (A(1) - a), least = A(1e-12);
        return (a - b) / (variance < least ? least : variance);
    }
    if (kind == 4) {
        A d = of_target ? b - a : a - b;
        return d > A(0) ? A(1) : d < A(0) ? A(-1) : d;
    }
    if (kind == 5) return of_target ? logarithm(b) + A(1) - a : -b;
    if (kind == 6) return of_target ? exponential(b) * (b - a + A(1)) : -exponential(b);
    return of_target ? -a : A(1) / (A(1) + exponential(-a)) - b;
}

// A block adds up the terms of its elements: 64 of a thread in the type of the arithmetic.
template <class T>
DEVICE void pairwise(double *parts, const T *a, const T *b, size_t n, int kind, double width_) {
    typedef Acc<T> A;
    A delta = (A)width_, sum = A(0);
    double total = 0;
    int held = 0;
    along<PACK<T>>(n, aligned(a) && aligned(b), global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        A u[N], v[N];
        read(a + i, u);
        read(b + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) sum += pair_loss(kind, delta, u[k], v[k]);
        if ((held += N) >= 64) total += sum, sum = A(0), held = 0;
    });
    total = block_reduce<Sum>(total + sum, 0.0);
    if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

template <class T> DEVICE void pairwise_terms(Acc<T> *y, const T *a, const T *b, size_t n, int kind, double width_) {
    typedef Acc<T> A;
    along<PACK<T>>(n, aligned(a) && aligned(b), global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        A u[N], v[N];
        read(a + i, u);
        read(b + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = pair_loss(kind, (A)width_, u[k], v[k]);
        write(y + i, u);
    });
}

// The gradient of the loss, over `count`: that of each element's loss if `each` is set.
template <class T, class O>
DEVICE void pairwise_backward(O *dx, const T *a, const T *b, const Acc<T> *gradient, int each, double count,
                              size_t n, int kind, int of_target, double width_) {
    typedef Acc<T> A;
    A delta = (A)width_, scale = *gradient / (A)count;
    bool packed = aligned(a) && aligned(b) && aligned(dx);
    along<PACK<T, O>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        A u[N], v[N];
        read(a + i, u);
        read(b + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) {
            u[k] = pair_slope(kind, of_target, delta, u[k], v[k]) * (each ? gradient[i + k] : scale);
        }
        write(dx + i, u);
    });
}

#define FORWARD(t, T)                                                                             \
    ROW_KERNEL cross_entropy_##t(double *losses, double *row_weights, Acc<T> *log_sums,           \
                                 const T *x, const u32 *targets, const Acc<T> *weights,           \
                                 size_t rows, size_t classes, size_t ignored, size_t apart,       \
                                 double smoothing, int team) {                                    \
        Classes<Acc<T>> of = {weights, classes, ignored};                                         \
        cross_entropy(losses, row_weights, log_sums, x, targets, of, rows, apart, smoothing,      \
                      team);                                                                      \
    }                                                                                             \
    KERNEL pick_##t(double *losses, double *row_weights, const T *x, const u32 *targets,          \
                    const Acc<T> *weights, size_t rows, size_t classes, size_t ignored) {         \
        Classes<Acc<T>> of = {weights, classes, ignored};                                         \
        pick(losses, row_weights, x, targets, of, rows);                                          \
    }                                                                                             \
    ROW_KERNEL pick_backward_##t(T *dx, const u32 *targets, const Acc<T> *weights,                \
                                 const Acc<T> *gradient, const Acc<T> *total, size_t rows,        \
                                 size_t classes, size_t ignored, size_t stride, double count,     \
                                 int team) {                                                      \
        Classes<Acc<T>> of = {weights, classes, ignored};                                         \
        Scale<Acc<T>> scale = {gradient, total, stride, count};                                   \
        pick_backward(dx, targets, of, scale, rows, team);                                        \
    }                                                                                             \
    KERNEL pairwise_##t(double *parts, const T *a, const T *b, size_t n, int kind, double delta) { \
        pairwise(parts, a, b, n, kind, delta);                                                    \
    }                                                                                             \
    KERNEL pairwise_terms_##t(Acc<T> *y, const T *a, const T *b, size_t n, int kind,              \
                              double delta) {                                                     \
        pairwise_terms(y, a, b, n, kind, delta);                                                  \
    }
#define BACKWARD(t, T, o, O)                                                                      \
    ROW_KERNEL cross_entropy_backward_##t##_##o(                                                  \
        O *dx, const T *x, const u32 *targets, const Acc<T> *log_sums, const Acc<T> *weights,     \
        const Acc<T> *gradient, const Acc<T> *total, size_t rows, size_t classes, size_t ignored, \
        size_t stride, double count, size_t apart, double smoothing, int team) {                  \
        Classes<Acc<T>> of = {weights, classes, ignored};                                         \
        Scale<Acc<T>> scale = {gradient, total, stride, count};                                   \
        cross_entropy_backward(dx, x, targets, log_sums, of, scale, rows, apart, smoothing,       \
                               team);                                                             \
    }                                                                                             \
    KERNEL pairwise_backward_##t##_##o(O *dx, const T *a, const T *b, const Acc<T> *gradient,     \
                                       int each, double count, size_t n, int kind, int of_target, \
                                       double delta) {                                            \
        pairwise_backward(dx, a, b, gradient, each, count, n, kind, of_target, delta);            \
    }
EACH_FLOAT(FORWARD)
EACH_PAIR(BACKWARD)
ROW_KERNEL mean_f32(float *y, float *total, const double *terms, const double *weights,
                    size_t terms_count, double count) {
    mean(y, total, terms, weights, terms_count, count);
}
ROW_KERNEL mean_f64(double *y, double *total, const double *terms, const double *weights,
                    size_t terms_count, double count) {
    mean(y, total, terms, weights, terms_count, count);
}
