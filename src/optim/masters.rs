//! How 16-bit variables are kept.

/// How a 16-bit variable keeps its exact value between steps. `F32` and `F64` variables are their own.
///
/// | | bytes per parameter, variable included | for | the exact value |
/// |---|---|---|---|
/// | `F32` | 6 | F16, BF16 | an `F32` master |
/// | `Remainder` | 4 | BF16 | the variable and 16 bits more |
/// | `Stochastic` | 2 | F16, BF16 | the variable, right on average |
///
/// `F32` and `Remainder` train the same `F32` value, bit for bit, from the same gradients. `F32`
/// rounds it to nearest even; `Remainder` to nearest, ties away from zero: one number in 2¹⁷ differs,
/// by the last bit. (65,537 `F32` numbers round to each even `BF16` where ties go to even: one too
/// many for 16 bits.)
///
/// Whoever writes a variable (`Var::set`, a checkpoint) must say so, by
/// [`reload_masters`](super::Optim::reload_masters) or by loading the optimizer's state after it. With `F32` a step that
/// would undo such a write is [`StaleMaster`](crate::error::OptimizerError::StaleMaster), if it was this crate that wrote. With
/// `Remainder` nothing can tell: the next step adds the bits of the value before, at most half the last bit of the variable.
///
/// `Stochastic` rounds up or down at random, up as often as the value is close to the upper number.
/// Plain rounding loses every update below half the variable's last bit; this way they add up on
/// average, and the noise of a step is that of one rounding. The random bits come from the crate's
/// generator, [`random`](crate::random), one draw a step; on several ranks from its seed and the number of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Masters {
    /// `F32` masters.
    #[default]
    F32,
    /// `BF16` variables and the 16 bits that make them `F32`.
    Remainder,
    /// No master: the variable is rounded at random.
    Stochastic,
}
