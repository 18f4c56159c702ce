//! The crate's optimizers and masters where a `candle_nn::Optimizer` is asked for.

/// An optimizer of this crate ([`Optim`](crate::optim::Optim), [`MasterWeights`](crate::MasterWeights)) as a
/// `candle_nn::Optimizer`: borrowed by its `as_candle()`, or owned, where generic code makes its own.
///
/// ```
/// use candle_amp::optim::{AdamW, AdamWConfig, AsCandle};
/// use candle_core::{DType, Device, Var};
/// use candle_nn::Optimizer;
///
/// fn train<O: Optimizer>(w: &Var, config: O::Config) -> candle_core::Result<()> {
///     O::new(vec![w.clone()], config)?.backward_step(&w.sum_all()?)
/// }
/// let w = Var::ones(1, DType::F32, &Device::Cpu)?;
/// train::<AsCandle<AdamW>>(&w, AdamWConfig { lr: 0.5, ..Default::default() })?;
/// assert!((w.to_vec1::<f32>()?[0] - 0.495).abs() < 1e-6); // 1 - 0.5 * 0.01 - 0.5
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct AsCandle<'a, T>(Held<'a, T>);

#[derive(Debug)]
enum Held<'a, T> {
    Owned(T),
    Borrowed(&'a mut T),
}

impl<'a, T> AsCandle<'a, T> {
    pub(crate) fn new(optimizer: &'a mut T) -> Self {
        Self(Held::Borrowed(optimizer))
    }

    pub(crate) fn owned(optimizer: T) -> Self {
        Self(Held::Owned(optimizer))
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &T {
        match &self.0 {
            Held::Owned(owned) => owned,
            Held::Borrowed(borrowed) => borrowed,
        }
    }

    /// The optimizer inside.
    pub fn inner_mut(&mut self) -> &mut T {
        match &mut self.0 {
            Held::Owned(owned) => owned,
            Held::Borrowed(borrowed) => borrowed,
        }
    }
}
