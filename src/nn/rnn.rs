//! Recurrent layers.

use candle_core::{DType, Device, Result, Tensor, TensorId};
use candle_nn::VarBuilder;

use super::padding::Padding;
use crate::ops::{self, RecurrentWeights};

pub use candle_nn::rnn::{Direction, GRUConfig, LSTMConfig, RNN};

/// The states an LSTM is left in by a step, each `(b, n)`.
#[derive(Clone, Debug)]
pub struct LSTMState {
    /// The hidden state, which is the output.
    pub h: Tensor,
    /// The cell state.
    pub c: Tensor,
    origin: Option<Origin>,
}

impl LSTMState {
    /// A state to start from.
    pub fn new(h: Tensor, c: Tensor) -> Self {
        Self { h, c, origin: None }
    }

    /// The hidden state, which is the output.
    pub fn h(&self) -> &Tensor {
        &self.h
    }

    /// The cell state.
    pub fn c(&self) -> &Tensor {
        &self.c
    }

    /// The same numbers without the graph that made them: how a long sequence is trained piece by piece.
    /// Backward from the next piece ends here.
    ///
    /// # References
    ///
    /// `torch.Tensor.detach`.
    pub fn detach(&self) -> Self {
        Self::new(self.h.detach(), self.c.detach())
    }
}

/// The state a GRU is left in by a step, `(b, n)`.
#[derive(Clone, Debug)]
pub struct GRUState {
    /// The state, which is the output.
    pub h: Tensor,
    origin: Option<Origin>,
}

impl GRUState {
    /// A state to start from.
    pub fn new(h: Tensor) -> Self {
        Self { h, origin: None }
    }

    /// The state, which is the output.
    pub fn h(&self) -> &Tensor {
        &self.h
    }

    /// As [`LSTMState::detach`].
    pub fn detach(&self) -> Self {
        Self::new(self.h.detach())
    }
}

/// The step of a sequence a state is from: where all are wanted, as one tensor, they are there
/// already, and need not be put together again, forward and backward.
#[derive(Clone, Debug)]
struct Origin {
    /// The states after all steps, `(b, t, n)`.
    all: Tensor,
    step: usize,
    /// Of the state, which is public, and may since have been replaced.
    h: TensorId,
}

impl Origin {
    fn new(all: &Tensor, step: usize, h: &Tensor) -> Option<Self> {
        Some(Self { all: all.clone(), step, h: h.id() })
    }
}

/// `state`, or zeros.
fn start<R: RNN>(layer: &R, state: Option<&R::State>, batch: usize) -> Result<R::State> {
    state.map_or_else(|| layer.zero_state(batch), |state| Ok(state.clone()))
}

/// One step of a sequence, `(b, n)`.
fn at(sequence: &Tensor, step: usize) -> Result<Tensor> {
    sequence.narrow(1, step, 1)?.squeeze(1)?.contiguous()
}

/// States as a sequence, `(b, t, n)`.
fn stack(states: &[(&Tensor, &Option<Origin>)]) -> Result<Tensor> {
    let first = states.first().and_then(|(_, origin)| origin.as_ref());
    if let Some(first) = first {
        let follows = |(i, (h, origin)): (usize, &(&Tensor, &Option<Origin>))| {
            origin.as_ref().is_some_and(|origin| {
                let same = origin.all.id() == first.all.id() && origin.h == h.id();
                same && origin.step == first.step + i
            })
        };
        if states.iter().enumerate().all(follows) {
            return first.all.narrow(1, first.step, states.len());
        }
    }
    Tensor::stack(&states.iter().map(|(h, _)| *h).collect::<Vec<_>>(), 1)
}

/// What both layers are made of.
#[derive(Clone, Debug)]
struct RnnWeights {
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Option<Tensor>,
    b_hh: Option<Tensor>,
    hidden_dim: usize,
    device: Device,
    dtype: DType,
}

impl RnnWeights {
    fn weights(&self, direction: Direction) -> RecurrentWeights<'_> {
        let Self { w_ih, w_hh, b_ih, b_hh, .. } = self;
        let (b_ih, b_hh) = (b_ih.as_ref(), b_hh.as_ref());
        RecurrentWeights { w_ih, w_hh, b_ih, b_hh, direction }
    }

    fn zeros(&self, batch_dim: usize) -> Result<Tensor> {
        Tensor::zeros((batch_dim, self.hidden_dim), self.dtype, &self.device)
    }
}

/// [`ops::lstm`] with its weights `weight_ih_l0 (4 n, in)` and `weight_hh_l0 (4 n, n)`, and biases
/// `bias_ih_l0` and `bias_hh_l0`, `(4 n)`.
///
/// `seq` and `seq_init` of [`RNN`] are one operator over all steps; a graph of steps overflows the
/// stack of a thread in candle's backward. To hand all their states on, use `states_to_tensor`,
/// which costs nothing: the gradient of each state taken by itself is as large as the sequence.
///
/// As candle_nn's, `step`, `seq` and `seq_init` run forward also where the configuration says
/// [`Direction::Backward`], which only names the weights (`weight_ih_l0_reverse`): the input is
/// reversed by the caller. [`sequence`](Self::sequence) does as the configuration says.
///
/// # References
///
/// `torch.nn.LSTM` of one layer and one direction, with `batch_first=True`.
#[derive(Clone, Debug)]
pub struct LSTM {
    parameters: RnnWeights,
    config: LSTMConfig,
}

impl LSTM {
    /// A layer of `hidden_dim` units.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(
        in_dim: usize,
        hidden_dim: usize,
        config: LSTMConfig,
        vb: VarBuilder,
    ) -> Result<Self> {
        let direction = match config.direction {
            Direction::Forward => "",
            Direction::Backward => "_reverse",
        };
        let name = |what: &str| format!("{what}_l{}{direction}", config.layer_idx);
        let rows = 4 * hidden_dim;
        let bias = |what, init| vb.get_with_hints(rows, &name(what), init);
        let parameters = RnnWeights {
            w_ih: vb.get_with_hints((rows, in_dim), &name("weight_ih"), config.w_ih_init)?,
            w_hh: vb.get_with_hints((rows, hidden_dim), &name("weight_hh"), config.w_hh_init)?,
            b_ih: config.b_ih_init.map(|init| bias("bias_ih", init)).transpose()?,
            b_hh: config.b_hh_init.map(|init| bias("bias_hh", init)).transpose()?,
            hidden_dim,
            device: vb.device().clone(),
            dtype: vb.dtype(),
        };
        Ok(Self { parameters, config })
    }

    /// Initial values, layer number, direction.
    pub fn config(&self) -> &LSTMConfig {
        &self.config
    }

    /// The hidden states after all steps of `x (b, t, in)`, `(b, t, n)`, in the configured direction,
    /// and the state after the step run last; from `state`, or zeros.
    ///
    /// # Errors
    ///
    /// Those of [`ops::lstm`].
    pub fn sequence(&self, x: &Tensor, state: Option<&LSTMState>) -> Result<(Tensor, LSTMState)> {
        let (batch, steps, _) = x.dims3()?;
        let start = start(self, state, batch)?;
        let weights = self.parameters.weights(self.config.direction);
        let (h, c) = ops::lstm(x, &start.h, &start.c, weights)?;
        let last = match self.config.direction {
            Direction::Backward => 0,
            Direction::Forward => steps.saturating_sub(1),
        };
        let last = match steps {
            0 => start,
            _ => LSTMState::new(at(&h, last)?, at(&c, last)?),
        };
        Ok((h, last))
    }

    /// As [`sequence`](Self::sequence), for a batch of sequences of these `lengths`, padded to one: PyTorch's packed
    /// sequences.
    ///
    /// Nothing depends on the padding, NaN neither. After the end of a sequence the hidden states are 0. The state
    /// returned is that at its end or, where the configuration says [`Direction::Backward`], at its beginning; the run
    /// begins at its end then.
    ///
    /// # Shapes
    ///
    /// `x (b, t, in)`, `b` lengths from 1 to `t` → `(b, t, n)`, and a state of `(b, n)`.
    ///
    /// # Precision
    ///
    /// That of [`ops::lstm`].
    ///
    /// # Errors
    ///
    /// Another number of lengths; one that is 0 or larger than `t`; those of [`ops::lstm`].
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_amp::nn::{self, VarMap};
    /// use candle_core::{DType, Device, Tensor};
    ///
    /// let vb = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let lstm = nn::lstm(1, 5, Default::default(), vb)?;
    /// let short = Tensor::new(&[[[1f32], [2.0]]], &Device::Cpu)?;
    /// let padded = Tensor::new(&[[[1f32], [2.0], [f32::NAN]], [[3.0], [4.0], [5.0]]], &Device::Cpu)?;
    /// let (h, state) = lstm.padded_sequence(&padded, &[2, 3], None)?;
    /// let (_, of_short) = lstm.sequence(&short, None)?;
    /// let difference = (state.h().get(0)? - of_short.h().get(0)?)?.abs()?.max(0)?;
    /// assert!(difference.to_scalar::<f32>()? < 1e-6);
    /// assert_eq!(h.get(0)?.get(2)?.to_vec1::<f32>()?, [0.0; 5]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # References
    ///
    /// `torch.nn.utils.rnn.pack_padded_sequence`, `pad_packed_sequence`.
    pub fn padded_sequence(
        &self,
        x: &Tensor,
        lengths: &[usize],
        state: Option<&LSTMState>,
    ) -> Result<(Tensor, LSTMState)> {
        let reverse = matches!(self.config.direction, Direction::Backward);
        let padding = Padding::new("lstm", x, lengths, reverse)?;
        let start = start(self, state, lengths.len())?;
        // The operator runs forward, over reversed sequences: their ends are at different steps.
        let weights = self.parameters.weights(Direction::Forward);
        let x = padding.inside(&padding.reversed(x)?)?;
        let (h, c) = ops::lstm(&x, &start.h, &start.c, weights)?;
        let last = LSTMState::new(padding.last(&h)?, padding.last(&c)?);
        Ok((padding.inside(&padding.reversed(&h)?)?, last))
    }
}

impl RNN for LSTM {
    type State = LSTMState;

    fn zero_state(&self, batch_dim: usize) -> Result<LSTMState> {
        let zeros = self.parameters.zeros(batch_dim)?;
        Ok(LSTMState::new(zeros.clone(), zeros))
    }

    fn step(&self, input: &Tensor, state: &LSTMState) -> Result<LSTMState> {
        let weights = self.parameters.weights(Direction::Forward);
        let (h, c) = ops::lstm(&input.unsqueeze(1)?, &state.h, &state.c, weights)?;
        Ok(LSTMState::new(h.squeeze(1)?, c.squeeze(1)?))
    }

    fn seq_init(&self, input: &Tensor, init_state: &LSTMState) -> Result<Vec<LSTMState>> {
        let weights = self.parameters.weights(Direction::Forward);
        let (h, c) = ops::lstm(input, &init_state.h, &init_state.c, weights)?;
        let state = |step| {
            let of_step = at(&h, step)?;
            let origin = Origin::new(&h, step, &of_step);
            Ok(LSTMState { h: of_step, c: at(&c, step)?, origin })
        };
        (0..h.dim(1)?).map(state).collect()
    }

    /// The hidden states, `(b, t, n)`.
    fn states_to_tensor(&self, states: &[LSTMState]) -> Result<Tensor> {
        stack(&states.iter().map(|state| (&state.h, &state.origin)).collect::<Vec<_>>())
    }
}

/// An LSTM of `hidden_dim` units.
///
/// # Initial values
///
/// Those of the configuration. Its default is candle_nn's: weights uniform, of standard deviation `sqrt(2 / fan_in)`, and biases
/// of 0. PyTorch's are uniform within `1 / sqrt(hidden_dim)` of 0.
///
/// # Errors
///
/// Those of the builder.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{self, RNN};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarMap;
///
/// let vb = nn::var_builder(&VarMap::new(), DType::BF16, &Device::Cpu);
/// let lstm = nn::lstm(3, 5, Default::default(), vb)?;
/// let x = Tensor::ones((2, 7, 3), DType::BF16, &Device::Cpu)?;
/// let states = lstm.seq(&x)?;
/// assert_eq!(states.len(), 7);
/// assert_eq!(lstm.states_to_tensor(&states)?.dims(), [2, 7, 5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn lstm(in_dim: usize, hidden_dim: usize, config: LSTMConfig, vb: VarBuilder) -> Result<LSTM> {
    LSTM::new(in_dim, hidden_dim, config, vb)
}

/// [`ops::gru`] with its weights `weight_ih_l0 (3 n, in)` and `weight_hh_l0 (3 n, n)`, and biases
/// `bias_ih_l0` and `bias_hh_l0`, `(3 n)`.
///
/// `seq` and `seq_init` of [`RNN`] are one operator over all steps, as those of [`LSTM`].
///
/// # References
///
/// `torch.nn.GRU` of one layer, with `batch_first=True`.
#[derive(Clone, Debug)]
pub struct GRU {
    parameters: RnnWeights,
    config: GRUConfig,
}

impl GRU {
    /// A layer of `hidden_dim` units.
    ///
    /// # Errors
    ///
    /// Those of the builder.
    pub fn new(
        in_dim: usize,
        hidden_dim: usize,
        config: GRUConfig,
        vb: VarBuilder,
    ) -> Result<Self> {
        let rows = 3 * hidden_dim;
        let bias = |name, init| vb.get_with_hints(rows, name, init);
        let parameters = RnnWeights {
            w_ih: vb.get_with_hints((rows, in_dim), "weight_ih_l0", config.w_ih_init)?,
            w_hh: vb.get_with_hints((rows, hidden_dim), "weight_hh_l0", config.w_hh_init)?,
            b_ih: config.b_ih_init.map(|init| bias("bias_ih_l0", init)).transpose()?,
            b_hh: config.b_hh_init.map(|init| bias("bias_hh_l0", init)).transpose()?,
            hidden_dim,
            device: vb.device().clone(),
            dtype: vb.dtype(),
        };
        Ok(Self { parameters, config })
    }

    /// Initial values.
    pub fn config(&self) -> &GRUConfig {
        &self.config
    }

    /// The states after all steps of `x (b, t, in)`, `(b, t, n)`, and the last; from `state`, or
    /// zeros.
    ///
    /// # Errors
    ///
    /// Those of [`ops::gru`].
    pub fn sequence(&self, x: &Tensor, state: Option<&GRUState>) -> Result<(Tensor, GRUState)> {
        let (batch, steps, _) = x.dims3()?;
        let start = start(self, state, batch)?;
        let h = ops::gru(x, &start.h, self.parameters.weights(Direction::Forward))?;
        let last = match steps.checked_sub(1) {
            Some(last) => GRUState::new(at(&h, last)?),
            None => start,
        };
        Ok((h, last))
    }

    /// As [`LSTM::padded_sequence`].
    ///
    /// # Errors
    ///
    /// As there; those of [`ops::gru`].
    pub fn padded_sequence(
        &self,
        x: &Tensor,
        lengths: &[usize],
        state: Option<&GRUState>,
    ) -> Result<(Tensor, GRUState)> {
        let padding = Padding::new("gru", x, lengths, false)?;
        let start = start(self, state, lengths.len())?;
        let weights = self.parameters.weights(Direction::Forward);
        let h = ops::gru(&padding.inside(x)?, &start.h, weights)?;
        Ok((padding.inside(&h)?, GRUState::new(padding.last(&h)?)))
    }
}

impl RNN for GRU {
    type State = GRUState;

    fn zero_state(&self, batch_dim: usize) -> Result<GRUState> {
        Ok(GRUState::new(self.parameters.zeros(batch_dim)?))
    }

    fn step(&self, input: &Tensor, state: &GRUState) -> Result<GRUState> {
        let weights = self.parameters.weights(Direction::Forward);
        Ok(GRUState::new(ops::gru(&input.unsqueeze(1)?, &state.h, weights)?.squeeze(1)?))
    }

    fn seq_init(&self, input: &Tensor, init_state: &GRUState) -> Result<Vec<GRUState>> {
        let h = ops::gru(input, &init_state.h, self.parameters.weights(Direction::Forward))?;
        let state = |step| {
            let of_step = at(&h, step)?;
            let origin = Origin::new(&h, step, &of_step);
            Ok(GRUState { h: of_step, origin })
        };
        (0..h.dim(1)?).map(state).collect()
    }

    /// The states side by side, `(b, t n)`: candle_nn concatenates those of a GRU, and stacks those
    /// of an LSTM.
    fn states_to_tensor(&self, states: &[GRUState]) -> Result<Tensor> {
        stack(&states.iter().map(|state| (&state.h, &state.origin)).collect::<Vec<_>>())?
            .flatten_from(1)
    }
}

/// A GRU of `hidden_dim` units.
///
/// # Initial values
///
/// As those of [`lstm`].
///
/// # Errors
///
/// Those of the builder.
///
/// # Examples
///
/// A long sequence in two pieces. `states_to_tensor` has the states side by side, as candle_nn's has for a GRU:
///
/// ```
/// use candle_amp::nn::{self, RNN, VarMap};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
/// let gru = nn::gru(3, 5, Default::default(), vb)?;
/// let x = Tensor::ones((2, 7, 3), DType::F32, &Device::Cpu)?;
/// let (states, last) = gru.sequence(&x, None)?;
/// assert_eq!(states.dims(), [2, 7, 5]);
/// let (more, _) = gru.sequence(&x, Some(&last.detach()))?; // backward ends here
/// assert_eq!(more.dims(), [2, 7, 5]);
/// assert_eq!(gru.states_to_tensor(&gru.seq(&x)?)?.dims(), [2, 35]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gru(in_dim: usize, hidden_dim: usize, config: GRUConfig, vb: VarBuilder) -> Result<GRU> {
    GRU::new(in_dim, hidden_dim, config, vb)
}
