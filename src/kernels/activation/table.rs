//! The table of pointwise operators: functions of one number, applied to every element of a tensor.
//!
//! A row is all that is said of an operator, but for its arithmetic. Whoever needs a column gives
//! [`pointwise`] a macro, which is called with whatever it was given in brackets, and with every row:
//!
//! - `kernels/activation/mod.rs` has a variant of each, and its number in `activation.cu`;
//! - `autocast/policy.rs` has its rules;
//! - `ops/activation.rs` has its function, documented, with an example;
//! - the tests have its inputs, and its values and derivatives at the edges;
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
//!         inputs: lowest, highest; // of the tests; they hold -4 to 4, or at least 1 to 2
//!         example: x, result;
//!         value: [at -∞, 0, ∞, NaN];
//!         derivative: [at -∞, 0, ∞, NaN];
//!     };
//! ```
//!
//! The arithmetic is written by hand: `functions.rs` for the CPU, `activation.cu` for CUDA, and
//! `portable.rs` by candle's operators, for other devices and as what the tests compare with.

macro_rules! pointwise {
    ($callback:ident [$($given:tt)*]) => { $callback! { [$($given)*]
    /// `x Φ(x)`, where `Φ` is the normal distribution, by the approximation
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`: candle's `gelu`, not that of PyTorch, which is [`gelu_erf`].
    gelu_tanh => GeluTanh (),
        { rule: FullMath, pytorch: Keep, reason: "a cube and a tangent need F32; the result fits 16 bits" },
        {
            torch: "gelu", reference: "`torch.nn.functional.gelu` with `approximate=\"tanh\"`; `candle_core::Tensor::gelu`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.841192;
            value: [NAN, 0.0, INF, NAN];
            derivative: [NAN, 0.5, NAN, NAN];
        };
    /// `x Φ(x)`, where `Φ` is the normal distribution: PyTorch's `gelu`, not that of candle, which is [`gelu_tanh`].
    gelu_erf => GeluErf (),
        { rule: FullMath, pytorch: Keep, reason: "a tail near zero needs F32; the result fits 16 bits" },
        {
            torch: "gelu", reference: "`torch.nn.functional.gelu`; `candle_core::Tensor::gelu_erf`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.841345;
            value: [NAN, 0.0, INF, NAN];
            derivative: [NAN, 0.5, NAN, NAN];
        };
    /// `x σ(x)`, where `σ(x) = 1 / (1 + exp(-x))`; also known as swish.
    silu => Silu (),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "silu", reference: "`torch.nn.functional.silu`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.731059;
            value: [NAN, 0.0, INF, NAN];
            derivative: [NAN, 0.5, NAN, NAN];
        };
    /// `1 / (1 + exp(-x))`.
    sigmoid => Sigmoid (),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "sigmoid", reference: "`torch.sigmoid`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.731059;
            value: [0.0, 0.5, 1.0, NAN];
            derivative: [0.0, 0.25, 0.0, NAN];
        };
    /// The hyperbolic tangent.
    tanh => Tanh (),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "tanh", reference: "`torch.tanh`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.761594;
            value: [-1.0, 0.0, 1.0, NAN];
            derivative: [0.0, 1.0, 0.0, NAN];
        };
    /// `min(max(x, 0), 6)`; NaN stays NaN, and its gradient is passed on.
    relu6 => Relu6 (),
        { rule: Keep, pytorch: Keep, reason: "selects, never rounds" },
        {
            torch: "relu6", reference: "`torch.nn.functional.relu6`",
            inputs: -12.0, 12.0;
            example: 7.0, 6.0;
            value: [0.0, 0.0, 6.0, NAN];
            derivative: [0.0, 0.0, 0.0, 1.0];
        };
    /// `max(x, 0)²`; NaN stays NaN.
    relu2 => Relu2 (),
        { rule: Keep, pytorch: Keep, reason: "a square, rounded once; it overflows F16 from 256 on" },
        {
            torch: "", reference: "So et al., [Primer](https://arxiv.org/abs/2109.08668)",
            inputs: -12.0, 12.0;
            example: 3.0, 9.0;
            value: [0.0, 0.0, INF, NAN];
            derivative: [0.0, 0.0, INF, NAN];
        };
    /// `min(max(x / 6 + 1/2, 0), 1)`.
    hard_sigmoid => HardSigmoid (),
        { rule: FullMath, pytorch: Keep, reason: "rounded once; the result fits 16 bits" },
        {
            torch: "hardsigmoid", reference: "`torch.nn.functional.hardsigmoid`",
            inputs: -12.0, 12.0;
            example: 1.5, 0.75;
            value: [0.0, 0.5, 1.0, NAN];
            derivative: [0.0, 1.0 / 6.0, 0.0, 0.0];
        };
    /// `x hard_sigmoid(x)`.
    hard_swish => HardSwish (),
        { rule: FullMath, pytorch: Keep, reason: "rounded once; the result fits 16 bits" },
        {
            torch: "hardswish", reference: "`torch.nn.functional.hardswish`",
            inputs: -12.0, 12.0;
            example: 1.5, 1.125;
            value: [NAN, 0.0, INF, NAN];
            derivative: [0.0, 0.5, 1.0, NAN];
        };
    /// `x tanh(softplus(x))`.
    mish => Mish (),
        { rule: FullMath, pytorch: Keep, reason: "exponentials need F32; the result fits 16 bits" },
        {
            torch: "mish", reference: "`torch.nn.functional.mish`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.865098;
            value: [NAN, 0.0, INF, NAN];
            derivative: [0.0, 0.6, 1.0, NAN];
        };
    /// `ln(1 + exp(x))`.
    softplus => Softplus (),
        { rule: FullMath, pytorch: Full, reason: "an exponential and a logarithm need F32; the result fits 16 bits" },
        {
            torch: "softplus", reference: "`torch.nn.functional.softplus`",
            inputs: -12.0, 12.0;
            example: 1.0, 1.313262;
            value: [0.0, LN_2, INF, NAN];
            derivative: [0.0, 0.5, 1.0, NAN];
        };
    /// `x` above 0, `alpha (exp(x) - 1)` below.
    elu => Elu (alpha: f64 = 0.75),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "elu", reference: "`torch.nn.functional.elu`",
            inputs: -12.0, 12.0;
            example: -1.0, -0.474090;
            value: [-0.75, 0.0, INF, NAN];
            derivative: [0.0, 0.75, 1.0, NAN];
        };
    /// `gamma` times [`elu`] with `alpha`.
    ///
    /// Klambauer et al., [Self-Normalizing Neural Networks](https://arxiv.org/abs/1706.02515), has
    /// `alpha` 1.6732632423543772 and `gamma` 1.0507009873554805.
    selu => Selu (alpha: f32 = 1.5, gamma: f32 = 1.0625),
        { rule: FullMath, pytorch: Keep, reason: "an exponential needs F32; the result fits 16 bits" },
        {
            torch: "selu", reference: "`torch.nn.functional.selu`",
            inputs: -12.0, 12.0;
            example: -1.0, -1.007442;
            value: [-1.59375, 0.0, INF, NAN];
            derivative: [0.0, 1.59375, 1.0625, NAN];
        };
    /// `x` above 0, `negative_slope x` below.
    leaky_relu => LeakyRelu (negative_slope: f64 = 0.25),
        { rule: Keep, pytorch: Keep, reason: "selects and scales once" },
        {
            torch: "leaky_relu", reference: "`torch.nn.functional.leaky_relu`",
            inputs: -12.0, 12.0;
            example: -2.0, -0.5;
            value: [-INF, 0.0, INF, NAN];
            derivative: [0.25, 0.25, 1.0, 0.25];
        };
    /// `exp(x)`.
    exp => Exp (),
        { rule: Full, pytorch: Full, reason: "exp(x) overflows F16 above 11.09" },
        {
            torch: "exp", reference: "`torch.exp`",
            inputs: -6.0, 6.0;
            example: 1.0, 2.718282;
            value: [0.0, 1.0, INF, NAN];
            derivative: [0.0, 1.0, INF, NAN];
        };
    /// The natural logarithm.
    log => Log (),
        { rule: Full, pytorch: Full, reason: "16 bits are coarse where a logarithm is steep" },
        {
            torch: "log", reference: "`torch.log`",
            inputs: 0.01, 12.0;
            example: 2.0, 0.693147;
            value: [NAN, -INF, INF, NAN];
            derivative: [0.0, INF, 0.0, NAN];
        };
    /// `x²`.
    square => Square (),
        { rule: Full, pytorch: Full, reason: "squares overflow F16 from 256 on" },
        {
            torch: "pow", reference: "`torch.square`; `candle_core::Tensor::sqr`",
            inputs: -12.0, 12.0;
            example: 3.0, 9.0;
            value: [INF, 0.0, INF, NAN];
            derivative: [-INF, 0.0, INF, NAN];
        };
    /// `√x`.
    sqrt => Sqrt (),
        { rule: FullMath, pytorch: Keep, reason: "half the exponent; result fits 16 bits" },
        {
            torch: "sqrt", reference: "`torch.sqrt`",
            inputs: 0.01, 12.0;
            example: 9.0, 3.0;
            value: [NAN, 0.0, INF, NAN];
            derivative: [NAN, INF, 0.0, NAN];
        };
    /// `1 / √x`.
    rsqrt => Rsqrt (),
        { rule: Full, pytorch: Full, reason: "16 bits are coarse where it is steep" },
        {
            torch: "rsqrt", reference: "`torch.rsqrt`",
            inputs: 0.05, 12.0;
            example: 4.0, 0.5;
            value: [NAN, INF, 0.0, NAN];
            derivative: [NAN, -INF, 0.0, NAN];
        };
    /// `1 / x`.
    recip => Recip (),
        { rule: Full, pytorch: Full, reason: "1 / x overflows F16 below 2 to the -16" },
        {
            torch: "reciprocal", reference: "`torch.reciprocal`",
            inputs: 0.05, 12.0;
            example: 4.0, 0.25;
            value: [0.0, INF, 0.0, NAN];
            derivative: [0.0, -INF, 0.0, NAN];
        };
    /// `|x|`. The gradient at 0, and of NaN, is 0.
    abs => Abs (),
        { rule: Keep, pytorch: Keep, reason: "drops a sign, never rounds" },
        {
            torch: "abs", reference: "`torch.abs`",
            inputs: -12.0, 12.0;
            example: -2.0, 2.0;
            value: [INF, 0.0, INF, NAN];
            derivative: [-1.0, 0.0, 1.0, 0.0];
        };
    /// `-x`.
    neg => Neg (),
        { rule: Keep, pytorch: Keep, reason: "turns a sign, never rounds" },
        {
            torch: "neg", reference: "`torch.neg`",
            inputs: -12.0, 12.0;
            example: 2.0, -2.0;
            value: [INF, 0.0, -INF, NAN];
            derivative: [-1.0, -1.0, -1.0, -1.0];
        };
    /// `mul x + add`.
    affine => Affine (mul: f64 = -0.5, add: f64 = 0.25),
        { rule: Keep, pytorch: Keep, reason: "scales and shifts, rounded once" },
        {
            torch: "mul", reference: "`x * mul + add` in PyTorch, rounded once; `candle_core::Tensor::affine`",
            inputs: -12.0, 12.0;
            example: 2.0, -0.75;
            value: [INF, 0.25, -INF, NAN];
            derivative: [-0.5, -0.5, -0.5, -0.5];
        };
    /// `min(max(x, min), max)`: `max` everywhere, if it is below `min`. NaN stays NaN, and a bound that is NaN makes
    /// all of it NaN.
    ///
    /// The gradient is passed on where `min <= x <= max`, the bounds included, and is 0 elsewhere and for NaN.
    clamp => Clamp (min: f64 = -1.5, max: f64 = 2.5),
        { rule: Keep, pytorch: Keep, reason: "selects; rounds nothing but its bounds" },
        {
            torch: "clamp", reference: "`torch.clamp`",
            inputs: -12.0, 12.0;
            example: 3.0, 2.5;
            value: [-1.5, 0.0, 2.5, NAN];
            derivative: [0.0, 1.0, 0.0, 0.0];
        };
    /// `x` to the power of `exponent`: NaN where `x` is below 0 and `exponent` no integer; 1 where `exponent` is 0.
    ///
    /// The derivative is `exponent x^(exponent - 1)`, and 0 where `exponent` is 0.
    powf => Powf (exponent: f64 = 2.5),
        { rule: Full, pytorch: Full, reason: "powers outgrow F16" },
        {
            torch: "pow", reference: "`torch.pow` of a tensor and a number; `candle_core::Tensor::powf`",
            inputs: 0.05, 4.0;
            example: 4.0, 32.0;
            value: [INF, 0.0, INF, NAN];
            derivative: [INF, 0.0, INF, NAN];
        };
    /// The sine of `x` radians.
    sin => Sin (),
        { rule: FullMath, pytorch: Keep, reason: "an angle is reduced in F32; the result fits 16 bits" },
        {
            torch: "sin", reference: "`torch.sin`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.841471;
            value: [NAN, 0.0, NAN, NAN];
            derivative: [NAN, 1.0, NAN, NAN];
        };
    /// The cosine of `x` radians.
    cos => Cos (),
        { rule: FullMath, pytorch: Keep, reason: "an angle is reduced in F32; the result fits 16 bits" },
        {
            torch: "cos", reference: "`torch.cos`",
            inputs: -12.0, 12.0;
            example: 1.0, 0.540302;
            value: [NAN, 1.0, NAN, NAN];
            derivative: [NAN, 0.0, NAN, NAN];
        };
    /// The error function, `2/√π` times the integral of `exp(-t²)` from 0 to `x`.
    erf => Erf (),
        { rule: FullMath, pytorch: Keep, reason: "a polynomial needs F32; the result fits 16 bits" },
        {
            torch: "erf", reference: "`torch.erf`",
            inputs: -4.0, 4.0;
            example: 1.0, 0.842701;
            value: [-1.0, 0.0, 1.0, NAN];
            derivative: [0.0, FRAC_2_SQRT_PI, 0.0, NAN];
        };
    /// `ln(1 + x)`, without the cancellation near 0.
    log1p => Log1p (),
        { rule: Full, pytorch: Full, reason: "16 bits are coarse where a logarithm is steep" },
        {
            torch: "log1p", reference: "`torch.log1p`",
            inputs: -0.9, 12.0;
            example: 1.0, 0.693147;
            value: [NAN, 0.0, INF, NAN];
            derivative: [0.0, 1.0, 0.0, NAN];
        };
    } };
}
pub(crate) use pointwise;
