//! The table of pointwise operators: functions of one number, applied to every element of a tensor.
//!
//! A row is all that is said of an operator, but for its line in `activation.cu`. Whoever needs a column gives
//! [`pointwise`] a macro, which is called with whatever it was given in brackets, and with every row:
//!
//! - `kernels/activation/pointwise.rs` has a variant of each, and its number in `activation.cu`;
//! - `kernels/activation/functions.rs` computes it on a CPU, and `portable.rs` by candle's operators;
//! - `autocast/policy.rs` has its rules;
//! - `ops/activation.rs` has its function, documented, with an example;
//! - the tests have its inputs, its values and derivatives in F64, and those at the edges;
//! - `docs/operators.md` has its line.
//!
//! The columns:
//!
//! ```text
//! /// What it computes: the documentation of its function.
//! name => Variant (parameter: type = value in tests, ...),
//!     { rule: the crate's own, pytorch: that of PyTorch's CUDA lists, reason: "why the crate has its own" },
//!     {
//!         torch: "its name in PyTorch, or nothing", reference: "what to compare with",
//!         // Inputs of the tests, which hold -4 to 4, or at least 1 to 2.
//!         inputs: lowest, highest; example: x, result;
//!         value: [at -∞, 0, ∞, NaN]; derivative: [at -∞, 0, ∞, NaN];
//!     },
//!     {
//!         cpu: |x| value, derivative; // of a number of the generic type `A`
//!         candle: |x| value, derivative; // of a tensor, in F32 or F64
//!         f64: |x| value, derivative; // of an F64, for tests: written otherwise where it can be
//!         kinks: [where the derivative jumps]; exact: whether the result is never rounded;
//!     };
//! ```
//!
//! Longer arithmetic is a function in `functions.rs`, in `portable.rs`, and of the tests in
//! `tests/it/random_graphs/rows/activations.rs`.

macro_rules! pointwise {
    ($callback:ident [$($given:tt)*]) => { $callback! { [$($given)*]
    /// `x Φ(x)`, where `Φ` is the normal distribution, by the approximation
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`: candle's `gelu`, not that of PyTorch, which is [`gelu_erf`].
    gelu_tanh => GeluTanh (),
        { rule: FullMath, pytorch: Keep, reason: "a cube and a tangent need F32; the result fits 16 bits" },
        {
            torch: "gelu", reference: "`torch.nn.functional.gelu` with `approximate=\"tanh\"`; `candle_core::Tensor::gelu`",
            inputs: -12.0, 12.0; example: 1.0, 0.841192;
            value: [NAN, 0.0, INF, NAN]; derivative: [NAN, 0.5, NAN, NAN];
        },
        {
            cpu: |x| gelu_tanh(x), gelu_tanh_derivative(x);
            candle: |x| gelu_tanh(x)?, gelu_tanh_derivative(x)?;
            f64: |x| 0.5 * x * (1.0 + gelu_tangent(x).0), 0.5 * (1.0 + gelu_tangent(x).0 + x * gelu_tangent(x).1);
            kinks: []; exact: false;
        };
    /// `x Φ(x)`, where `Φ` is the normal distribution: PyTorch's `gelu`, not that of candle, which is [`gelu_tanh`].
    gelu_erf => GeluErf (),
        { rule: FullMath, pytorch: Keep, reason: "a tail near zero needs F32; the result fits 16 bits" },
        {
            torch: "gelu", reference: "`torch.nn.functional.gelu`; `candle_core::Tensor::gelu_erf`",
            inputs: -12.0, 12.0; example: 1.0, 0.841345;
            value: [NAN, 0.0, INF, NAN]; derivative: [NAN, 0.5, NAN, NAN];
        },
        {
            cpu: |x| x * x.normal_probability(), x.normal_probability() + x * (A::of(DENSITY_AT_0) * x.bell());
            candle: |x| (x * probability(x)?)?, (probability(x)? + (x * density(x)?)?)?;
            f64: |x| x * normal(x).0, normal(x).0 + x * normal(x).1; kinks: []; exact: false;
        };
    /// `x σ(x)`, where `σ(x) = 1 / (1 + exp(-x))`; also known as swish.
    silu => Silu (),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "silu", reference: "`torch.nn.functional.silu`",
            inputs: -12.0, 12.0; example: 1.0, 0.731059;
            value: [NAN, 0.0, INF, NAN]; derivative: [NAN, 0.5, NAN, NAN];
        },
        {
            cpu: |x| x * sigmoid(x), silu_derivative(x);
            candle: |x| (x * sigmoid(x)?)?, silu_derivative(x)?;
            f64: |x| x * sigmoid(x).0, sigmoid(x).0 + x * sigmoid(x).1; kinks: []; exact: false;
        };
    /// `1 / (1 + exp(-x))`.
    sigmoid => Sigmoid (),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "sigmoid", reference: "`torch.sigmoid`",
            inputs: -12.0, 12.0; example: 1.0, 0.731059;
            value: [0.0, 0.5, 1.0, NAN]; derivative: [0.0, 0.25, 0.0, NAN];
        },
        {
            // Not s (1 - s), which is zero where s rounds to 1.
            cpu: |x| sigmoid(x), sigmoid(x) * sigmoid(-x);
            candle: |x| sigmoid(x)?, (sigmoid(x)? * sigmoid(&x.neg()?)?)?;
            f64: |x| sigmoid(x).0, sigmoid(x).1; kinks: []; exact: false;
        };
    /// The hyperbolic tangent.
    tanh => Tanh (),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "tanh", reference: "`torch.tanh`",
            inputs: -12.0, 12.0; example: 1.0, 0.761594;
            value: [-1.0, 0.0, 1.0, NAN]; derivative: [0.0, 1.0, 0.0, NAN];
        },
        {
            cpu: |x| x.hyperbolic_tangent(), { let y = x.hyperbolic_tangent(); (A::one() - y) * (A::one() + y) };
            candle: |x| x.tanh()?, x.tanh()?.sqr()?.affine(-1.0, 1.0)?;
            f64: |x| x.tanh(), 1.0 - x.tanh().powi(2); kinks: []; exact: false;
        };
    /// `min(max(x, 0), 6)`; NaN stays NaN, and its gradient is passed on.
    relu6 => Relu6 (),
        { rule: Keep, pytorch: Keep, reason: "selects, never rounds" },
        {
            torch: "relu6", reference: "`torch.nn.functional.relu6`",
            inputs: -12.0, 12.0; example: 7.0, 6.0;
            value: [0.0, 0.0, 6.0, NAN]; derivative: [0.0, 0.0, 0.0, 1.0];
        },
        {
            // Not "1 where x is inside", which a NaN is not.
            cpu: |x| limit(x, A::zero(), A::of(6.0)),
                if x <= A::zero() || x >= A::of(6.0) { A::zero() } else { A::one() };
            candle: |x| clamped(x, 0.0, 6.0)?,
                { let outside = (x.le(0.0)? + x.ge(6.0)?)?; outside.where_cond(&x.zeros_like()?, &x.ones_like()?)? };
            f64: |x| x.clamp(0.0, 6.0), f64::from(x > 0.0 && x < 6.0); kinks: [0.0, 6.0]; exact: true;
        };
    /// `max(x, 0)²`; NaN stays NaN.
    relu2 => Relu2 (),
        { rule: Keep, pytorch: Keep, reason: "a square, rounded once; it overflows F16 from 256 on" },
        {
            torch: "", reference: "So et al., [Primer](https://arxiv.org/abs/2109.08668)",
            inputs: -12.0, 12.0; example: 3.0, 9.0;
            value: [0.0, 0.0, INF, NAN]; derivative: [0.0, 0.0, INF, NAN];
        },
        {
            cpu: |x| if x <= A::zero() { A::zero() } else { x * x }, if x <= A::zero() { A::zero() } else { x + x };
            candle: |x| relu(x)?.sqr()?, (relu(x)? * 2.0)?;
            f64: |x| x.max(0.0).powi(2), 2.0 * x.max(0.0); kinks: []; exact: false;
        };
    /// `min(max(x / 6 + 1/2, 0), 1)`.
    hard_sigmoid => HardSigmoid (),
        { rule: FullMath, pytorch: Keep, reason: "rounded once; the result fits 16 bits" },
        {
            torch: "hardsigmoid", reference: "`torch.nn.functional.hardsigmoid`",
            inputs: -12.0, 12.0; example: 1.5, 0.75;
            value: [0.0, 0.5, 1.0, NAN]; derivative: [0.0, 1.0 / 6.0, 0.0, 0.0];
        },
        {
            cpu: |x| hard_sigmoid(x), inside(x, A::of(-3.0), A::of(3.0), A::of(1.0 / 6.0));
            candle: |x| hard_sigmoid(x)?, inside(x, -3.0, 3.0, 1.0 / 6.0)?;
            f64: |x| (x / 6.0 + 0.5).clamp(0.0, 1.0), if x.abs() < 3.0 { 1.0 / 6.0 } else { 0.0 };
            kinks: [-3.0, 3.0]; exact: false;
        };
    /// `x hard_sigmoid(x)`.
    hard_swish => HardSwish (),
        { rule: FullMath, pytorch: Keep, reason: "rounded once; the result fits 16 bits" },
        {
            torch: "hardswish", reference: "`torch.nn.functional.hardswish`",
            inputs: -12.0, 12.0; example: 1.5, 1.125;
            value: [NAN, 0.0, INF, NAN]; derivative: [0.0, 0.5, 1.0, NAN];
        },
        {
            cpu: |x| x * hard_sigmoid(x), hard_swish_derivative(x);
            candle: |x| (x * hard_sigmoid(x)?)?, hard_swish_derivative(x)?;
            f64: |x| x * (x / 6.0 + 0.5).clamp(0.0, 1.0), if x.abs() < 3.0 { x / 3.0 + 0.5 } else { f64::from(x > 0.0) };
            kinks: [-3.0, 3.0]; exact: false;
        };
    /// `x tanh(softplus(x))`.
    mish => Mish (),
        { rule: FullMath, pytorch: Keep, reason: "exponentials need F32; the result fits 16 bits" },
        {
            torch: "mish", reference: "`torch.nn.functional.mish`",
            inputs: -12.0, 12.0; example: 1.0, 0.865098;
            value: [NAN, 0.0, INF, NAN]; derivative: [0.0, 0.6, 1.0, NAN];
        },
        {
            cpu: |x| mish(x), mish_derivative(x);
            candle: |x| (x * mish_gate(x)?)?, mish_derivative(x)?;
            f64: |x| mish(x).0, mish(x).1; kinks: []; exact: false;
        };
    /// `ln(1 + exp(x))`.
    softplus => Softplus (),
        { rule: FullMath, pytorch: Full, reason: "an exponential and a logarithm need F32; the result fits 16 bits" },
        {
            torch: "softplus", reference: "`torch.nn.functional.softplus`",
            inputs: -12.0, 12.0; example: 1.0, 1.313262;
            value: [0.0, LN_2, INF, NAN]; derivative: [0.0, 0.5, 1.0, NAN];
        },
        {
            cpu: |x| (if x < A::zero() { A::zero() } else { x }) + (-x.abs()).exponential().log_of_one_more(),
                sigmoid(x);
            candle: |x| (relu(x)? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?, sigmoid(x)?;
            f64: |x| x.exp().ln_1p(), sigmoid(x).0; kinks: []; exact: false;
        };
    /// `x` above 0, `alpha (exp(x) - 1)` below.
    elu => Elu (alpha: f64 = 0.75),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "elu", reference: "`torch.nn.functional.elu`",
            inputs: -12.0, 12.0; example: -1.0, -0.474090;
            value: [-0.75, 0.0, INF, NAN]; derivative: [0.0, 0.75, 1.0, NAN];
        },
        {
            cpu: |x| elu(x, alpha), if x > A::zero() { A::one() } else { alpha * x.exponential() };
            candle: |x| elu(x, alpha)?, elu_derivative(x, alpha)?;
            f64: |x| elu(x, alpha).0, elu(x, alpha).1; kinks: [0.0]; exact: false;
        };
    /// `gamma` times [`elu`] with `alpha`.
    ///
    /// Klambauer et al., [Self-Normalizing Neural Networks](https://arxiv.org/abs/1706.02515), has
    /// `alpha` 1.6732632423543772 and `gamma` 1.0507009873554805.
    selu => Selu (alpha: f32 = 1.5, gamma: f32 = 1.0625),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "selu", reference: "`torch.nn.functional.selu`",
            inputs: -12.0, 12.0; example: -1.0, -1.007442;
            value: [-1.59375, 0.0, INF, NAN]; derivative: [0.0, 1.59375, 1.0625, NAN];
        },
        {
            cpu: |x| gamma * elu(x, alpha), gamma * if x > A::zero() { A::one() } else { alpha * x.exponential() };
            candle: |x| (elu(x, alpha)? * gamma)?, (elu_derivative(x, alpha)? * gamma)?;
            f64: |x| gamma * elu(x, alpha).0, gamma * elu(x, alpha).1; kinks: [0.0]; exact: false;
        };
    /// `x` above 0, `negative_slope x` below.
    leaky_relu => LeakyRelu (negative_slope: f64 = 0.25),
        { rule: Keep, pytorch: Keep, reason: "selects and scales once" },
        {
            torch: "leaky_relu", reference: "`torch.nn.functional.leaky_relu`",
            inputs: -12.0, 12.0; example: -2.0, -0.5;
            value: [-INF, 0.0, INF, NAN]; derivative: [0.25, 0.25, 1.0, 0.25];
        },
        {
            cpu: |x| if x > A::zero() { x } else { negative_slope * x },
                if x > A::zero() { A::one() } else { negative_slope };
            candle: |x| x.gt(0.0)?.where_cond(x, &(x * negative_slope)?)?,
                x.gt(0.0)?.where_cond(&x.ones_like()?, &(x.zeros_like()? + negative_slope)?)?;
            f64: |x| if x > 0.0 { x } else { negative_slope * x }, if x > 0.0 { 1.0 } else { negative_slope };
            kinks: [0.0]; exact: false;
        };
    /// `exp(x)`.
    exp => Exp (),
        { rule: Full, pytorch: Full, reason: "exp(x) overflows F16 above 11.09" },
        {
            torch: "exp", reference: "`torch.exp`",
            inputs: -6.0, 6.0; example: 1.0, 2.718282;
            value: [0.0, 1.0, INF, NAN]; derivative: [0.0, 1.0, INF, NAN];
        },
        {
            cpu: |x| x.exponential(), x.exponential();
            candle: |x| x.exp()?, x.exp()?;
            f64: |x| x.exp(), x.exp(); kinks: []; exact: false;
        };
    /// The natural logarithm.
    log => Log (),
        { rule: Full, pytorch: Full, reason: "16 bits are coarse where a logarithm is steep" },
        {
            torch: "log", reference: "`torch.log`",
            inputs: 0.01, 12.0; example: 2.0, 0.693147;
            value: [NAN, -INF, INF, NAN]; derivative: [0.0, INF, 0.0, NAN];
        },
        {
            cpu: |x| x.ln(), A::one() / x;
            candle: |x| x.log()?, x.recip()?;
            f64: |x| x.ln(), 1.0 / x; kinks: []; exact: false;
        };
    /// `x²`.
    square => Square (),
        { rule: Full, pytorch: Full, reason: "squares overflow F16 from 256 on" },
        {
            torch: "pow", reference: "`torch.square`; `candle_core::Tensor::sqr`",
            inputs: -12.0, 12.0; example: 3.0, 9.0;
            value: [INF, 0.0, INF, NAN]; derivative: [-INF, 0.0, INF, NAN];
        },
        {
            cpu: |x| x * x, x + x;
            candle: |x| x.sqr()?, (x * 2.0)?;
            f64: |x| x * x, 2.0 * x; kinks: []; exact: false;
        };
    /// `√x`.
    sqrt => Sqrt (),
        { rule: FullMath, pytorch: Keep, reason: "half the exponent; result fits 16 bits" },
        {
            torch: "sqrt", reference: "`torch.sqrt`",
            inputs: 0.01, 12.0; example: 9.0, 3.0;
            value: [NAN, 0.0, INF, NAN]; derivative: [NAN, INF, 0.0, NAN];
        },
        {
            cpu: |x| x.sqrt(), A::of(0.5) / x.sqrt();
            candle: |x| x.sqrt()?, (x.sqrt()?.recip()? * 0.5)?;
            f64: |x| x.sqrt(), 0.5 / x.sqrt(); kinks: []; exact: false;
        };
    /// `1 / √x`.
    rsqrt => Rsqrt (),
        { rule: Full, pytorch: Full, reason: "16 bits are coarse where it is steep" },
        {
            torch: "rsqrt", reference: "`torch.rsqrt`",
            inputs: 0.05, 12.0; example: 4.0, 0.5;
            value: [NAN, INF, 0.0, NAN]; derivative: [NAN, -INF, 0.0, NAN];
        },
        {
            cpu: |x| A::one() / x.sqrt(), { let y = A::one() / x.sqrt(); A::of(-0.5) * y * y * y };
            candle: |x| x.sqrt()?.recip()?, { let y = x.sqrt()?.recip()?; ((y.sqr()? * &y)? * -0.5)? };
            f64: |x| 1.0 / x.sqrt(), -0.5 / (x * x.sqrt()); kinks: []; exact: false;
        };
    /// `1 / x`.
    recip => Recip (),
        { rule: Full, pytorch: Full, reason: "1 / x overflows F16 below 2 to the -16" },
        {
            torch: "reciprocal", reference: "`torch.reciprocal`",
            inputs: 0.05, 12.0; example: 4.0, 0.25;
            value: [0.0, INF, 0.0, NAN]; derivative: [0.0, -INF, 0.0, NAN];
        },
        {
            cpu: |x| A::one() / x, { let y = A::one() / x; -(y * y) };
            candle: |x| x.recip()?, x.recip()?.sqr()?.neg()?;
            f64: |x| 1.0 / x, -1.0 / (x * x); kinks: []; exact: false;
        };
    /// `|x|`. The gradient at 0, and of NaN, is 0.
    abs => Abs (),
        { rule: Keep, pytorch: Keep, reason: "drops a sign, never rounds" },
        {
            torch: "abs", reference: "`torch.abs`",
            inputs: -12.0, 12.0; example: -2.0, 2.0;
            value: [INF, 0.0, INF, NAN]; derivative: [-1.0, 0.0, 1.0, 0.0];
        },
        {
            cpu: |x| x.abs(), if x > A::zero() { A::one() } else if x < A::zero() { -A::one() } else { A::zero() };
            candle: |x| x.abs()?, (x.gt(0.0)?.to_dtype(x.dtype())? - x.lt(0.0)?.to_dtype(x.dtype())?)?;
            f64: |x| x.abs(), x.signum(); kinks: [0.0]; exact: true;
        };
    /// `-x`.
    neg => Neg (),
        { rule: Keep, pytorch: Keep, reason: "turns a sign, never rounds" },
        {
            torch: "neg", reference: "`torch.neg`",
            inputs: -12.0, 12.0; example: 2.0, -2.0;
            value: [INF, 0.0, -INF, NAN]; derivative: [-1.0, -1.0, -1.0, -1.0];
        },
        {
            cpu: |x| -x, -A::one();
            candle: |x| x.neg()?, (x.zeros_like()? - 1.0)?;
            f64: |x| -x, -1.0; kinks: []; exact: true;
        };
    /// `mul x + add`.
    affine => Affine (mul: f64 = -0.75, add: f64 = 0.3),
        { rule: Keep, pytorch: Keep, reason: "scales and shifts, rounded once" },
        {
            torch: "mul", reference: "`x * mul + add` in PyTorch, rounded once; `candle_core::Tensor::affine`",
            inputs: -12.0, 12.0; example: 2.0, -1.2;
            value: [INF, 0.3, -INF, NAN]; derivative: [-0.75, -0.75, -0.75, -0.75];
        },
        {
            cpu: |x| mul * x + add, mul;
            candle: |x| x.affine(mul, add)?, (x.zeros_like()? + mul)?;
            f64: |x| mul * x + add, mul; kinks: []; exact: false;
        };
    /// `min(max(x, min), max)`: `max` everywhere, if it is below `min`. NaN stays NaN, and a bound that is NaN makes
    /// all of it NaN.
    ///
    /// The gradient is passed on where `min <= x <= max`, the bounds included, and is 0 elsewhere and for NaN.
    clamp => Clamp (min: f64 = -0.75, max: f64 = 1.25),
        { rule: Keep, pytorch: Keep, reason: "selects; rounds nothing but its bounds" },
        {
            torch: "clamp", reference: "`torch.clamp`",
            inputs: -12.0, 12.0; example: 3.0, 1.25;
            value: [-0.75, 0.0, 1.25, NAN]; derivative: [0.0, 1.0, 0.0, 0.0];
        },
        {
            cpu: |x| clamp(x, min, max), if x >= min && x <= max { A::one() } else { A::zero() };
            candle: |x| clamp(x, min, max)?, (x.ge(min)? * x.le(max)?)?.to_dtype(x.dtype())?;
            f64: |x| x.clamp(min, max), f64::from((min..=max).contains(&x)); kinks: [min, max]; exact: false;
        };
    /// `x` to the power of `exponent`: NaN where `x` is below 0 and `exponent` no integer; 1 where `exponent` is 0.
    ///
    /// The derivative is `exponent x^(exponent - 1)`, and 0 where `exponent` is 0.
    powf => Powf (exponent: f64 = 2.5),
        { rule: Full, pytorch: Full, reason: "powers outgrow F16" },
        {
            torch: "pow", reference: "`torch.pow` of a tensor and a number; `candle_core::Tensor::powf`",
            inputs: 0.05, 4.0; example: 4.0, 32.0;
            value: [INF, 0.0, INF, NAN]; derivative: [INF, 0.0, INF, NAN];
        },
        {
            cpu: |x| x.powf(exponent),
                if exponent == A::zero() { A::zero() } else { exponent * x.powf(exponent - A::one()) };
            candle: |x| x.powf(exponent)?,
                if exponent == 0.0 { x.zeros_like()? } else { (x.powf(exponent - 1.0)? * exponent)? };
            f64: |x| x.powf(exponent), exponent * x.powf(exponent - 1.0); kinks: []; exact: false;
        };
    /// The sine of `x` radians.
    sin => Sin (),
        { rule: FullMath, pytorch: Keep, reason: "an angle is reduced in F32; the result fits 16 bits" },
        {
            torch: "sin", reference: "`torch.sin`",
            inputs: -12.0, 12.0; example: 1.0, 0.841471;
            value: [NAN, 0.0, NAN, NAN]; derivative: [NAN, 1.0, NAN, NAN];
        },
        {
            cpu: |x| x.sin(), x.cos();
            candle: |x| x.sin()?, x.cos()?;
            f64: |x| x.sin(), x.cos(); kinks: []; exact: false;
        };
    /// The cosine of `x` radians.
    cos => Cos (),
        { rule: FullMath, pytorch: Keep, reason: "an angle is reduced in F32; the result fits 16 bits" },
        {
            torch: "cos", reference: "`torch.cos`",
            inputs: -12.0, 12.0; example: 1.0, 0.540302;
            value: [NAN, 1.0, NAN, NAN]; derivative: [NAN, 0.0, NAN, NAN];
        },
        {
            cpu: |x| x.cos(), -x.sin();
            candle: |x| x.cos()?, x.sin()?.neg()?;
            f64: |x| x.cos(), -x.sin(); kinks: []; exact: false;
        };
    /// The error function, `2/√π` times the integral of `exp(-t²)` from 0 to `x`.
    erf => Erf (),
        { rule: FullMath, pytorch: Keep, reason: "a polynomial needs F32; the result fits 16 bits" },
        {
            torch: "erf", reference: "`torch.erf`",
            inputs: -4.0, 4.0; example: 1.0, 0.842701;
            value: [-1.0, 0.0, 1.0, NAN]; derivative: [0.0, FRAC_2_SQRT_PI, 0.0, NAN];
        },
        {
            cpu: |x| x.error_function(), A::of(FRAC_2_SQRT_PI) * (-x * x).exponential();
            candle: |x| x.erf()?, (x.sqr()?.neg()?.exp()? * FRAC_2_SQRT_PI)?;
            f64: |x| erf(x), FRAC_2_SQRT_PI * (-x * x).exp(); kinks: []; exact: false;
        };
    /// `ln(1 + x)`, without the cancellation near 0.
    log1p => Log1p (),
        { rule: Full, pytorch: Full, reason: "16 bits are coarse where a logarithm is steep" },
        {
            torch: "log1p", reference: "`torch.log1p`",
            inputs: -0.9, 12.0; example: 1.0, 0.693147;
            value: [NAN, 0.0, INF, NAN]; derivative: [0.0, 1.0, 0.0, NAN];
        },
        {
            cpu: |x| log1p(x), A::one() / (A::one() + x);
            candle: |x| log1p(x)?, (x + 1.0)?.recip()?;
            f64: |x| x.ln_1p(), 1.0 / (1.0 + x); kinks: []; exact: false;
        };
    /// `exp(x) - 1`, without the cancellation near 0.
    expm1 => Expm1 (),
        { rule: Full, pytorch: Full, reason: "exp(x) - 1 overflows F16 above 11.09" },
        {
            torch: "expm1", reference: "`torch.expm1`",
            inputs: -6.0, 6.0; example: 1.0, 1.718282;
            value: [-1.0, 0.0, INF, NAN]; derivative: [0.0, 1.0, INF, NAN];
        },
        {
            cpu: |x| if x > A::one() { x.exponential() - A::one() } else { exp_less_one(x) }, x.exponential();
            candle: |x| {
                let half = (x * 0.5)?.tanh()?;
                x.le(1.0)?.where_cond(&((&half + &half)? / half.affine(-1.0, 1.0)?)?, &(x.exp()? - 1.0)?)?
            }, x.exp()?;
            f64: |x| x.exp_m1(), x.exp(); kinks: []; exact: false;
        };
    } };
}
pub(crate) use pointwise;
