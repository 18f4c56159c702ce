// Losses: terms are summed in F64 across rows or blocks, and the mean rounded once. A target that is
// no class makes the loss and the gradients of its row NaN: to name it would be to wait for it.

template <class A> DEVICE A nan_of() { return infinity<A>() - infinity<A>(); }

// Every row's ln(sum(exp(x))), and its loss. Rows begin `apart` elements from each other: what is behind the classes
// is not read, and has no gradient.
template <class T>
DEVICE void cross_entropy(double *losses, Acc<T> *log_sums, const T *x, const u32 *targets, size_t rows,
                          size_t classes, size_t apart, double smoothing, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T>;
    Team team(size);
    for (size_t row = team.row; row < rows; row += team.teams) {
        const T *from = x + row * apart;
        LargestAndSum<A> all;
        A sum = A(0);
        auto add = [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(from + i, u);
            all.add(u);
#pragma unroll
            for (int k = 0; k < N; k++) sum += u[k];
        };
        along<V>(classes, true, team.rank, team.size, add, lead_of(from));
        all.join(team);
        // Without smoothing, the logits of other classes may be negative infinities.
        if (smoothing != 0) sum = team.reduce<Sum>(sum, A(0));
        if (team.rank == 0) {
            double log_sum = (double)all.largest + log((double)all.sum);
            u32 target = targets[row];
            double logit = target < classes ? (double)widen(from[target]) : nan_of<double>();
            double loss = log_sum - (1 - smoothing) * logit;
            if (smoothing != 0) loss -= smoothing * (double)sum / (double)classes;
            losses[row] = loss;
            // Apart, as their sum would be rounded to the last place of the larger.
            log_sums[row] = all.largest;
            log_sums[rows + row] = (A)log((double)all.sum);
        }
    }
}

// (softmax - target distribution) * scale / rows.
template <class T, class O>
DEVICE void cross_entropy_backward(O *dx, const T *x, const u32 *targets, const Acc<T> *log_sums,
                                   const Acc<T> *grad_scale, size_t rows, size_t classes, size_t apart,
                                   double smoothing, int size) {
    typedef Acc<T> A;
    constexpr int V = PACK<T, O>;
    Team team(size);
    A scale = *grad_scale / (A)rows, other = (A)(smoothing / (double)classes), rest = (A)(1 - smoothing);
    for (size_t row = team.row; row < rows; row += team.teams) {
        u32 target = targets[row];
        A largest = log_sums[row], log_sum = log_sums[rows + row], factor = target < classes ? scale : nan_of<A>();
        const T *from = x + row * apart;
        O *to = dx + row * apart;
        auto take = [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
            read(from + i, u);
#pragma unroll
            for (int k = 0; k < N; k++) {
                A p = exponential(u[k] - largest - log_sum);
                u[k] = ((i + k == target ? p - rest : p) - other) * factor;
            }
            write(to + i, u);
        };
        size_t lead = lead_of(from);
        along<V>(classes, aligned(to + lead), team.rank, team.size, take, lead);
        for (size_t i = classes + team.rank; i < apart; i += team.size) narrow(A(0), to[i]);
    }
}

// Minus the element of each row that its target names.
template <class T> DEVICE void pick(double *losses, const T *x, const u32 *targets, size_t rows, size_t classes) {
    for (size_t row = global_thread(); row < rows; row += global_threads()) {
        u32 target = targets[row];
        losses[row] = target < classes ? -(double)widen(x[row * classes + target]) : nan_of<double>();
    }
}

template <class O, class A>
DEVICE void pick_backward(O *dx, const u32 *targets, const A *grad_scale, size_t rows, size_t classes, int size) {
    constexpr int V = PACK<O>;
    Team team(size);
    A share = -*grad_scale / (A)rows;
    bool packed = aligned(dx) && classes % V == 0;
    for (size_t row = team.row; row < rows; row += team.teams) {
        u32 target = targets[row];
        A other = target < classes ? A(0) : nan_of<A>();
        along<V>(classes, packed, team.rank, team.size, [&](size_t i, auto width) {
            constexpr int N = decltype(width)::value;
            A u[N];
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = i + k == target ? share : other;
            write(dx + row * classes + i, u);
        });
    }
}

// One block: the sum of the terms over `count`.
template <class A> DEVICE void mean(A *y, const double *terms, size_t terms_count, size_t count) {
    double sum = 0;
    for (size_t i = threadIdx.x; i < terms_count; i += blockDim.x) sum += terms[i];
    sum = block_reduce<Sum>(sum, 0.0);
    if (threadIdx.x == 0) *y = (A)(sum / (double)count);
}

// Losses of two numbers, by their number in cuda.rs, as in pairwise.rs.
DEVICE float one_more(float x) { return log1pf(x); }
DEVICE double one_more(double x) { return log1p(x); }
template <class A> DEVICE A magnitude(A x) { return x < A(0) ? -x : x; }

template <class A> DEVICE A bounded_log(A x) {
    A log = logarithm(x);
    return log < A(-100) ? A(-100) : log;
}

template <class A> DEVICE A pair_loss(int kind, A delta, A a, A b) {
    if (kind == 0) return (a - b) * (a - b);
    if (kind == 1) {
        A d = magnitude(a - b);
        return d > delta ? delta * (d - A(0.5) * delta) : A(0.5) * d * d;
    }
    if (kind == 2) return -(b * bounded_log(a) + (A(1) - b) * bounded_log(A(1) - a));
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
        if (of_target) return bounded_log(A(1) - a) - bounded_log(a);
        A variance = a * (A(1) - a), least = A(1e-12);
        return (a - b) / (variance < least ? least : variance);
    }
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

template <class T, class O>
DEVICE void pairwise_backward(O *dx, const T *a, const T *b, const Acc<T> *grad_scale, size_t n, int kind,
                              int of_target, double width_) {
    typedef Acc<T> A;
    A delta = (A)width_, scale = *grad_scale / (A)n;
    bool packed = aligned(a) && aligned(b) && aligned(dx);
    along<PACK<T, O>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        A u[N], v[N];
        read(a + i, u);
        read(b + i, v);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = pair_slope(kind, of_target, delta, u[k], v[k]) * scale;
        write(dx + i, u);
    });
}

#define FORWARD(t, T)                                                                             \
    ROW_KERNEL cross_entropy_##t(double *losses, Acc<T> *log_sums, const T *x, const u32 *targets, \
                                 size_t rows, size_t classes, size_t apart, double smoothing,     \
                                 int team) {                                                      \
        cross_entropy(losses, log_sums, x, targets, rows, classes, apart, smoothing, team);       \
    }                                                                                             \
    KERNEL pick_##t(double *losses, const T *x, const u32 *targets, size_t rows, size_t classes) { \
        pick(losses, x, targets, rows, classes);                                                  \
    }                                                                                             \
    ROW_KERNEL pick_backward_##t(T *dx, const u32 *targets, const Acc<T> *scale, size_t rows,     \
                                 size_t classes, int team) {                                      \
        pick_backward(dx, targets, scale, rows, classes, team);                                   \
    }                                                                                             \
    KERNEL pairwise_##t(double *parts, const T *a, const T *b, size_t n, int kind, double delta) { \
        pairwise(parts, a, b, n, kind, delta);                                                    \
    }
#define BACKWARD(t, T, o, O)                                                                      \
    ROW_KERNEL cross_entropy_backward_##t##_##o(O *dx, const T *x, const u32 *targets,            \
                                                const Acc<T> *log_sums, const Acc<T> *scale,      \
                                                size_t rows, size_t classes, size_t apart,        \
                                                double smoothing, int team) {                     \
        cross_entropy_backward(dx, x, targets, log_sums, scale, rows, classes, apart, smoothing,  \
                               team);                                                             \
    }                                                                                             \
    KERNEL pairwise_backward_##t##_##o(O *dx, const T *a, const T *b, const Acc<T> *scale,        \
                                       size_t n, int kind, int of_target, double delta) {         \
        pairwise_backward(dx, a, b, scale, n, kind, of_target, delta);                            \
    }
EACH_FLOAT(FORWARD)
EACH_PAIR(BACKWARD)
ROW_KERNEL mean_f32(float *y, const double *terms, size_t terms_count, size_t count) {
    mean(y, terms, terms_count, count);
}
ROW_KERNEL mean_f64(double *y, const double *terms, size_t terms_count, size_t count) {
    mean(y, terms, terms_count, count);
}
