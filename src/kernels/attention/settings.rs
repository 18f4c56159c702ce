//! How an attention makes scores.

/// How scores are made of products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) scale: f64,
    /// Query `i` sees keys `0..=i`.
    pub(crate) causal: bool,
    /// The scaled scores go through `cap * tanh(score / cap)`, before the mask.
    pub(crate) softcap: Option<f64>,
}
