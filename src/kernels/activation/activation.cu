// Pointwise operators and their derivatives, as functions.rs has them for a CPU (but GELU by tanh, which is a sigmoid
// here): computed in the type of the arithmetic, rounded once. A line is POINTWISE(name, value of x, derivative at x);
// `a` and `b` are an operator's parameters, if it has any. Their order is that of table.rs: a line's number chooses
// the operator, which is the same for a whole launch. A thread reads a pack, branches to the operator, and writes the
// pack, so that reading and writing are compiled once per dtype.

DEVICE float less_one(float x) { return expm1f(x); }
DEVICE double less_one(double x) { return expm1(x); }
DEVICE float one_more(float x) { return log1pf(x); }
DEVICE double one_more(double x) { return log1p(x); }
DEVICE float magnitude(float x) { return fabsf(x); }
DEVICE double magnitude(double x) { return fabs(x); }
DEVICE float sine(float x) { return sinf(x); }
DEVICE double sine(double x) { return sin(x); }
DEVICE float cosine(float x) { return cosf(x); }
DEVICE double cosine(double x) { return cos(x); }
DEVICE float power(float x, float y) { return powf(x, y); }
DEVICE double power(double x, double y) { return pow(x, y); }
DEVICE float error_function(float x) { return erff(x); }
DEVICE double error_function(double x) { return erf(x); }
// The probability that a normal number is below x.
DEVICE float probability(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
DEVICE double probability(double x) { return 0.5 * erfc(x * -0.70710678118654752); }

// NaN stays NaN.
template <class A> DEVICE A limit(A x, A low, A high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

// NaN stays NaN, and a bound that is NaN makes it one.
template <class A> DEVICE A clamp(A x, A low, A high) {
    x = x >= low || x != x ? x : low;
    return x <= high || x != x ? x : high;
}

template <class A> DEVICE A cube(A x) { return x * x * x; }

template <class A> DEVICE A hard_sigmoid(A x) { return limit(x * A(1.0 / 6) + A(0.5), A(0), A(1)); }

constexpr double GELU_INNER = 0.79788456080286536, GELU_CUBE = 0.044715, DENSITY_AT_0 = 0.39894228040143268,
                 TWO_BY_ROOT_PI = 1.1283791670955126;

// The sigmoid of x, and what is left to 1: by one exponential, and neither cancels.
template <class A> struct Shares {
    A share, rest;
    DEVICE explicit Shares(A x) {
        A e = exponential(-magnitude(x)), larger = A(1) / (A(1) + e);
        share = x < A(0) ? e * larger : larger, rest = x < A(0) ? larger : e * larger;
    }
};

// (1 + tanh(u)) / 2 is the sigmoid of 2 u.
template <class A> DEVICE Shares<A> gelu_shares(A x) {
    return Shares<A>(A(2 * GELU_INNER) * (x + A(GELU_CUBE) * x * x * x));
}

template <class A> DEVICE A gelu_derivative(A x) {
    Shares<A> of = gelu_shares(x);
    A inner = A(2 * GELU_INNER) * (A(1) + A(3 * GELU_CUBE) * x * x);
    return of.share + x * (of.share * of.rest) * inner;
}

template <class A> DEVICE A silu_derivative(A x) {
    A s = sigmoid(x);
    return s * (A(1) + x * (A(1) - s));
}

template <class A> DEVICE A inside(A x, A low, A high, A value) { return x > low && x < high ? value : A(0); }

// n such that tanh(ln(1 + exp(x))) is n / (n + 2); limited where the quotient is 1 already.
template <class A> DEVICE A mish_odds(A x) {
    A e = exponential(limit(x, A(-1e4), A(20)));
    return e * (e + A(2));
}

template <class A> DEVICE A mish_gate(A x) {
    A n = mish_odds(x);
    return n / (n + A(2));
}

// Limited where the second term is 0, which it would not be once it is multiplied by x.
template <class A> DEVICE A mish_derivative(A x) {
    x = limit(x, A(-1e4), A(20));
    A n = mish_odds(x);
    A share = A(1) / (n + A(2));
    return n * share + x * (A(4) * (n + A(1)) * share * share) * sigmoid(x);
}

template <int NUMBER, class A> struct Function;

#define POINTWISE(Name, VALUE, DERIVATIVE)                                                        \
    template <class A> struct Function<__LINE__ - FIRST, A> {                                     \
        A a, b;                                                                                   \
        DEVICE A value(A x) const { return VALUE; }                                               \
        DEVICE A derivative(A x) const { return DERIVATIVE; }                                     \
    };

// A line each, so that a row's line numbers it.
constexpr int FIRST = __LINE__ + 1;
POINTWISE(GeluTanh, x * gelu_shares(x).share, gelu_derivative(x))
POINTWISE(GeluErf, x * probability(x), probability(x) + x * (A(DENSITY_AT_0) * exponential(A(-0.5) * x * x)))
POINTWISE(Silu, x * sigmoid(x), silu_derivative(x))
POINTWISE(Sigmoid, sigmoid(x), sigmoid(x) * sigmoid(-x)) // not s (1 - s), which is zero where s rounds to 1
POINTWISE(Tanh, tangent(x), (A(1) - tangent(x)) * (A(1) + tangent(x)))
POINTWISE(Relu6, limit(x, A(0), A(6)), x <= A(0) || x >= A(6) ? A(0) : A(1)) // a NaN is not outside
POINTWISE(Relu2, x <= A(0) ? A(0) : x * x, x <= A(0) ? A(0) : x + x)
POINTWISE(HardSigmoid, hard_sigmoid(x), inside(x, A(-3), A(3), A(1.0 / 6)))
POINTWISE(HardSwish, x * hard_sigmoid(x), hard_sigmoid(x) + limit(x, A(-3), A(3)) * inside(x, A(-3), A(3), A(1.0 / 6)))
POINTWISE(Mish, x * mish_gate(x), mish_derivative(x))
POINTWISE(Softplus, (x < A(0) ? A(0) : x) + one_more(exponential(-magnitude(x))), sigmoid(x))
POINTWISE(Elu, x > A(0) ? x : a * less_one(x), x > A(0) ? A(1) : a * exponential(x))
POINTWISE(Selu, b * (x > A(0) ? x : a * less_one(x)), b * (x > A(0) ? A(1) : a * exponential(x)))
POINTWISE(LeakyRelu, x > A(0) ? x : a * x, x > A(0) ? A(1) : a)
POINTWISE(Exp, exponential(x), exponential(x))
POINTWISE(Log, logarithm(x), A(1) / x)
POINTWISE(Square, x * x, x + x)
POINTWISE(Sqrt, root(x), A(0.5) / root(x))
POINTWISE(Rsqrt, A(1) / root(x), A(-0.5) * cube(A(1) / root(x)))
POINTWISE(Recip, A(1) / x, -((A(1) / x) * (A(1) / x)))
POINTWISE(Abs, magnitude(x), x > A(0) ? A(1) : x < A(0) ? A(-1) : A(0))
POINTWISE(Neg, -x, A(-1))
POINTWISE(Affine, a * x + b, a)
POINTWISE(Clamp, clamp(x, a, b), x >= a && x <= b ? A(1) : A(0))
POINTWISE(Powf, power(x, a), a == A(0) ? A(0) : a * power(x, a - A(1)))
POINTWISE(Sin, sine(x), cosine(x))
POINTWISE(Cos, cosine(x), -sine(x))
POINTWISE(Erf, error_function(x), A(TWO_BY_ROOT_PI) * exponential(-x * x))
POINTWISE(Log1p, one_more(x), A(1) / (A(1) + x))
POINTWISE(Expm1, less_one(x), exponential(x))
constexpr int FUNCTIONS = __LINE__ - FIRST;

// Calls f with the function of that number.
template <class A, int NUMBER = 0, class F> DEVICE void with_function(int number, A a, A b, const F &f) {
    if constexpr (NUMBER < FUNCTIONS) {
        if (number == NUMBER) return f(Function<NUMBER, A>{a, b});
        with_function<A, NUMBER + 1>(number, a, b, f);
    }
}

template <class T> DEVICE void values(T *y, const T *x, size_t n, int number, Acc<T> a, Acc<T> b) {
    along<PACK<T>>(n, aligned(x) && aligned(y), global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N];
        read(x + i, u);
        with_function(number, a, b, [&](auto function) {
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = function.value(u[k]);
        });
        write(y + i, u);
    });
}

template <class T>
DEVICE void derivatives(T *dx, const T *x, const T *grad, size_t n, int number, Acc<T> a, Acc<T> b) {
    bool packed = aligned(x) && aligned(grad) && aligned(dx);
    along<PACK<T>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N], g[N];
        read(x + i, u);
        read(grad + i, g);
        with_function(number, a, b, [&](auto function) {
#pragma unroll
            for (int k = 0; k < N; k++) u[k] = function.derivative(u[k]) * g[k];
        });
        write(dx + i, u);
    });
}

#define POINTWISE_KERNELS(t, T)                                                                   \
    KERNEL value_##t(T *y, const T *x, size_t n, int number, double a, double b) {                \
        values(y, x, n, number, (Acc<T>)a, (Acc<T>)b);                                            \
    }                                                                                             \
    KERNEL derivative_##t(T *dx, const T *x, const T *grad, size_t n, int number, double a,       \
                          double b) {                                                             \
        derivatives(dx, x, grad, n, number, (Acc<T>)a, (Acc<T>)b);                                \
    }
EACH_FLOAT(POINTWISE_KERNELS)

// silu(gate) * up: rows of x are `width` gates and as many that they gate.
template <class T> DEVICE void swiglu(T *y, const T *x, size_t n, size_t width) {
    constexpr int V = PACK<T>;
    bool packed = aligned(x) && aligned(y) && width % V == 0;
    along<V>(n, packed, global_thread(), global_threads(), [&](size_t i, auto w) {
        constexpr int N = decltype(w)::value;
        Acc<T> gate[N], up[N];
        const T *from = x + i + i / width * width;
        read(from, gate);
        read(from + width, up);
#pragma unroll
        for (int k = 0; k < N; k++) gate[k] = gate[k] * sigmoid(gate[k]) * up[k];
        write(y + i, gate);
    });
}

template <class T> DEVICE void swiglu_backward(T *dx, const T *x, const T *grad, size_t n, size_t width) {
    typedef Acc<T> A;
    constexpr int V = PACK<T>;
    bool packed = aligned(x) && aligned(grad) && aligned(dx) && width % V == 0;
    along<V>(n, packed, global_thread(), global_threads(), [&](size_t i, auto w) {
        constexpr int N = decltype(w)::value;
        A gate[N], up[N], g[N];
        size_t at = i + i / width * width;
        read(x + at, gate);
        read(x + at + width, up);
        read(grad + i, g);
#pragma unroll
        for (int k = 0; k < N; k++) {
            A share = sigmoid(gate[k]), derivative = up[k] * share * (gate[k] * (A(1) - share) + A(1));
            up[k] = g[k] * (gate[k] * share);
            gate[k] = g[k] * derivative;
        }
        write(dx + at, gate);
        write(dx + at + width, up);
    });
}

// A leaky relu with a slope for each channel of (outer, channels, inner), or one for all.
template <bool BACK, class T>
DEVICE void prelu(T *y, const T *x, const T *grad, const Acc<T> *weight, size_t n, size_t channels, size_t inner) {
    typedef Acc<T> A;
    constexpr int V = PACK<T>;
    bool packed = aligned(x) && aligned(y) && (!BACK || aligned(grad)) && (channels == 1 || inner % V == 0);
    along<V>(n, packed, global_thread(), global_threads(), [&](size_t i, auto w) {
        constexpr int N = decltype(w)::value;
        A u[N], g[N];
        A slope = weight[channels == 1 ? 0 : i / inner % channels];
        read(x + i, u);
        if (BACK) read(grad + i, g);
#pragma unroll
        for (int k = 0; k < N; k++) {
            A value = BACK ? g[k] : u[k];
            u[k] = u[k] > A(0) ? value : slope * value;
        }
        write(y + i, u);
    });
}

// min(x, 0) * grad, to be summed.
template <class T> DEVICE void prelu_terms(Acc<T> *y, const T *x, const T *grad, size_t n) {
    bool packed = aligned(x) && aligned(grad) && aligned(y);
    along<PACK<T>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto w) {
        constexpr int N = decltype(w)::value;
        Acc<T> u[N], g[N];
        read(x + i, u);
        read(grad + i, g);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = u[k] > Acc<T>(0) ? Acc<T>(0) : u[k] * g[k];
        write(y + i, u);
    });
}

#define GATED(t, T)                                                                               \
    KERNEL swiglu_##t(T *y, const T *x, size_t n, size_t width) { swiglu(y, x, n, width); }       \
    KERNEL swiglu_backward_##t(T *dx, const T *x, const T *grad, size_t n, size_t width) {        \
        swiglu_backward(dx, x, grad, n, width);                                                   \
    }                                                                                             \
    KERNEL prelu_##t(T *y, const T *x, const Acc<T> *weight, size_t n, size_t channels,           \
                     size_t inner) {                                                              \
        prelu<false>(y, x, x, weight, n, channels, inner);                                        \
    }                                                                                             \
    KERNEL prelu_backward_##t(T *dx, const T *x, const T *grad, const Acc<T> *weight, size_t n,   \
                              size_t channels, size_t inner) {                                    \
        prelu<true>(dx, x, grad, weight, n, channels, inner);                                     \
    }                                                                                             \
    KERNEL prelu_terms_##t(Acc<T> *y, const T *x, const T *grad, size_t n) {                      \
        prelu_terms(y, x, grad, n);                                                               \
    }
EACH_FLOAT(GATED)
