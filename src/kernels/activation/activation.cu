// Curves and their slopes, as in curves.rs: computed in the type of the arithmetic, rounded once. Which
// curve is the same for a whole launch; alpha and scale are what some take.

DEVICE float tangent(float x) { return tanhf(x); }
DEVICE double tangent(double x) { return tanh(x); }
DEVICE float less_one(float x) { return expm1f(x); }
DEVICE double less_one(double x) { return expm1(x); }
DEVICE float one_more(float x) { return log1pf(x); }
DEVICE double one_more(double x) { return log1p(x); }
DEVICE float magnitude(float x) { return fabsf(x); }
DEVICE double magnitude(double x) { return fabs(x); }
// The probability that a normal number is below x.
DEVICE float probability(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
DEVICE double probability(double x) { return 0.5 * erfc(x * -0.70710678118654752); }

template <class A> DEVICE A sigmoid(A x) { return A(1) / (A(1) + exponential(-x)); }

// NaN stays NaN.
template <class A> DEVICE A limit(A x, A low, A high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

template <class A> DEVICE A hard_sigmoid(A x) { return limit(x * A(1.0 / 6) + A(0.5), A(0), A(1)); }

template <class A> struct Curve {
    A alpha, scale;
};

#define CURVE(Name, VALUE, SLOPE)                                                                 \
    template <class A> struct Name : Curve<A> {                                                   \
        DEVICE A value(A x) const { return VALUE; }                                               \
        DEVICE A slope(A x) const { return SLOPE; }                                               \
    };

constexpr double GELU_INNER = 0.79788456080286536, GELU_CUBE = 0.044715, DENSITY_AT_0 = 0.39894228040143268;

template <class A> DEVICE A gelu_tangent(A x) { return tangent(A(GELU_INNER) * (x + A(GELU_CUBE) * x * x * x)); }

template <class A> DEVICE A gelu_slope(A x) {
    A t = gelu_tangent(x);
    A inner = A(GELU_INNER) * (A(1) + A(3 * GELU_CUBE) * x * x);
    return A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * inner;
}

template <class A> DEVICE A silu_slope(A x) {
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
template <class A> DEVICE A mish_slope(A x) {
    x = limit(x, A(-1e4), A(20));
    A n = mish_odds(x);
    A share = A(1) / (n + A(2));
    return n * share + x * (A(4) * (n + A(1)) * share * share) * sigmoid(x);
}

CURVE(Gelu, A(0.5) * x * (A(1) + gelu_tangent(x)), gelu_slope(x))
CURVE(GeluErf, x * probability(x), probability(x) + x * (A(DENSITY_AT_0) * exponential(A(-0.5) * x * x)))
CURVE(Silu, x * sigmoid(x), silu_slope(x))
CURVE(Sigmoid, sigmoid(x), sigmoid(x) * sigmoid(-x)) // not s (1 - s), which is zero where s rounds to 1
CURVE(Tanh, tangent(x), (A(1) - tangent(x)) * (A(1) + tangent(x)))
CURVE(Relu6, limit(x, A(0), A(6)), x <= A(0) || x >= A(6) ? A(0) : A(1))
CURVE(Relu2, x <= A(0) ? A(0) : x * x, x <= A(0) ? A(0) : x + x)
CURVE(HardSigmoid, hard_sigmoid(x), inside(x, A(-3), A(3), A(1.0 / 6)))
CURVE(HardSwish, x * hard_sigmoid(x), hard_sigmoid(x) + limit(x, A(-3), A(3)) * inside(x, A(-3), A(3), A(1.0 / 6)))
CURVE(Mish, x * mish_gate(x), mish_slope(x))
CURVE(Elu, this->scale * (x > A(0) ? x : this->alpha * less_one(x)),
      this->scale * (x > A(0) ? A(1) : this->alpha * exponential(x)))
CURVE(LeakyRelu, x > A(0) ? x : this->alpha * x, x > A(0) ? A(1) : this->alpha)
CURVE(Softplus, (x < A(0) ? A(0) : x) + one_more(exponential(-magnitude(x))), sigmoid(x))
CURVE(Exp, exponential(x), exponential(x))
CURVE(Log, logarithm(x), A(1) / x)

template <class T, class C> DEVICE void values(T *y, const T *x, size_t n, C curve) {
    along<PACK<T>>(n, aligned(x) && aligned(y), global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N];
        read(x + i, u);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = curve.value(u[k]);
        write(y + i, u);
    });
}

template <class T, class C> DEVICE void slopes(T *dx, const T *x, const T *grad, size_t n, C curve) {
    bool packed = aligned(x) && aligned(grad) && aligned(dx);
    along<PACK<T>>(n, packed, global_thread(), global_threads(), [&](size_t i, auto width) {
        constexpr int N = decltype(width)::value;
        Acc<T> u[N], g[N];
        read(x + i, u);
        read(grad + i, g);
#pragma unroll
        for (int k = 0; k < N; k++) u[k] = curve.slope(u[k]) * g[k];
        write(dx + i, u);
    });
}

// Calls f with the curve, by its number in cuda.rs.
template <class A, class F> DEVICE void with_curve(int curve, double alpha, double scale, const F &f) {
    Curve<A> parameters = {(A)alpha, (A)scale};
    switch (curve) {
    case 0: return f(Gelu<A>{parameters});
    case 1: return f(GeluErf<A>{parameters});
    case 2: return f(Silu<A>{parameters});
    case 3: return f(Sigmoid<A>{parameters});
    case 4: return f(Tanh<A>{parameters});
    case 5: return f(Relu6<A>{parameters});
    case 6: return f(Relu2<A>{parameters});
    case 7: return f(HardSigmoid<A>{parameters});
    case 8: return f(HardSwish<A>{parameters});
    case 9: return f(Mish<A>{parameters});
    case 10: return f(Elu<A>{parameters});
    case 11: return f(LeakyRelu<A>{parameters});
    case 12: return f(Softplus<A>{parameters});
    case 13: return f(Exp<A>{parameters});
    case 14: return f(Log<A>{parameters});
    }
}

#define CURVES(t, T)                                                                              \
    KERNEL value_##t(T *y, const T *x, size_t n, int curve, double alpha, double scale) {         \
        with_curve<Acc<T>>(curve, alpha, scale, [&](auto c) { values(y, x, n, c); });             \
    }                                                                                             \
    KERNEL slope_##t(T *dx, const T *x, const T *grad, size_t n, int curve, double alpha,         \
                     double scale) {                                                              \
        with_curve<Acc<T>>(curve, alpha, scale, [&](auto c) { slopes(dx, x, grad, n, c); });      \
    }
EACH_FLOAT(CURVES)

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
            A share = sigmoid(gate[k]), slope = up[k] * share * (gate[k] * (A(1) - share) + A(1));
            up[k] = g[k] * (gate[k] * share);
            gate[k] = g[k] * slope;
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
