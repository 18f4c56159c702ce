//! Single operators of the usual zoo, forward and backward, as they are in the middle of a network.

use std::cmp::Reverse;

use anyhow::Context;
use candle_amp::GradScaler;
use candle_amp::nn::rnn::Direction;
use candle_amp::nn::{Conv2dConfig, ConvTranspose2dConfig};
use candle_amp::ops::{self, RecurrentWeights};
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::precision::Precision;
use candle_amp_benches::zoo::{noise, tokens};
use candle_amp_benches::{loss_with, tracked};
use candle_core::{DType, Device, Result, Tensor, Var};
use serde::{Deserialize, Serialize};

/// An operator, and all of its sizes but the batch.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub(crate) enum Operator {
    /// A convolution, `kernel / 2` padded.
    Conv { from: usize, to: usize, size: usize, kernel: usize, stride: usize, groups: usize },
    /// A transposed convolution of 4x4 that doubles the size.
    ConvTranspose { from: usize, to: usize, size: usize },
    /// Two images of so many channels, one upon the other.
    Cat { channels: usize, size: usize },
    /// Dropping a tenth of `(rows, width)`.
    Dropout { rows: usize, width: usize },
    /// Layer norm of `(rows, width)`.
    LayerNorm { rows: usize, width: usize },
    /// The exact GELU of `(rows, width)`.
    GeluErf { rows: usize, width: usize },
    /// Softmax of `(rows, width)` along one of its dimensions; the batch counts as the first.
    Softmax { rows: usize, width: usize, dim: usize },
    /// Attention, not causal.
    Attention { heads: usize, context: usize, width: usize },
    /// One layer over a sequence.
    Lstm { context: usize, width: usize },
    /// One layer over a sequence.
    Gru { context: usize, width: usize },
    /// Rows of a table.
    Embedding { vocabulary: usize, context: usize, width: usize },
    /// The mean over `rows` of `(rows, width)`.
    MeanMiddle { rows: usize, width: usize },
    /// Relu of a view of `(rows, width)`, those two swapped.
    ReluTransposed { rows: usize, width: usize },
}

impl Operator {
    /// Those of inputs, and those of parameters, which are F32 in every precision.
    fn shapes(self, batch: usize) -> [Vec<Vec<usize>>; 2] {
        match self {
            Self::Conv { from, to, size, kernel, groups, .. } => {
                let weight = vec![to, from / groups, kernel, kernel];
                [vec![vec![batch, from, size, size]], vec![weight]]
            }
            Self::ConvTranspose { from, to, size } => {
                [vec![vec![batch, from, size, size]], vec![vec![from, to, 4, 4]]]
            }
            Self::Cat { channels, size } => [vec![vec![batch, channels, size, size]; 2], vec![]],
            Self::Attention { heads, context, width } => {
                [vec![vec![batch, heads, context, width]; 3], vec![]]
            }
            Self::Lstm { context, width } => [vec![vec![batch, context, width]], gates(4, width)],
            Self::Gru { context, width } => [vec![vec![batch, context, width]], gates(3, width)],
            Self::Embedding { vocabulary, width, .. } => [vec![], vec![vec![vocabulary, width]]],
            Self::LayerNorm { rows, width } => {
                [vec![vec![batch, rows, width]], vec![vec![width]; 2]]
            }
            Self::Dropout { rows, width }
            | Self::GeluErf { rows, width }
            | Self::Softmax { rows, width, .. }
            | Self::MeanMiddle { rows, width }
            | Self::ReluTransposed { rows, width } => [vec![vec![batch, rows, width]], vec![]],
        }
    }

    /// Images, which have three channels, need no gradient.
    fn wants_gradient(self) -> bool {
        !matches!(self, Self::Conv { from: 3, .. })
    }

    /// What one call does, of inputs and parameters in the order of `shapes`.
    fn forward(self, batch: usize) -> Result<Forward> {
        Ok(match self {
            Self::Conv { kernel, stride, groups, .. } => {
                let config =
                    Conv2dConfig { padding: kernel / 2, stride, groups, ..Default::default() };
                Box::new(move |x, w| ops::conv2d(&x[0], &w[0], None, config))
            }
            Self::ConvTranspose { .. } => {
                let config = ConvTranspose2dConfig { padding: 1, stride: 2, ..Default::default() };
                Box::new(move |x, w| ops::conv_transpose2d(&x[0], &w[0], None, config))
            }
            Self::Cat { .. } => Box::new(|x, _| ops::cat(&[&x[0], &x[1]], 1)),
            Self::Dropout { .. } => Box::new(|x, _| ops::dropout(&x[0], 0.1)),
            Self::LayerNorm { .. } => {
                Box::new(|x, w| ops::layer_norm(&x[0], Some(&w[0]), Some(&w[1]), 1e-5))
            }
            Self::GeluErf { .. } => Box::new(|x, _| ops::gelu_erf(&x[0])),
            Self::Softmax { dim, .. } => Box::new(move |x, _| ops::softmax(&x[0], dim)),
            Self::Attention { width, .. } => {
                let scale = (width as f64).powf(-0.5);
                Box::new(move |x, _| ops::sdpa(&x[0], &x[1], &x[2], None, false, scale))
            }
            Self::Lstm { width, .. } => {
                let zeros = Tensor::zeros((batch, width), DType::F32, &Device::Cpu)?;
                Box::new(move |x, w| Ok(ops::lstm(&x[0], &zeros, &zeros, recurrent(w))?.0))
            }
            Self::Gru { width, .. } => {
                let zeros = Tensor::zeros((batch, width), DType::F32, &Device::Cpu)?;
                Box::new(move |x, w| ops::gru(&x[0], &zeros, recurrent(w)))
            }
            Self::Embedding { vocabulary, context, .. } => {
                let tokens = tokens(vocabulary, (batch, context), 0, &Device::Cpu)?;
                Box::new(move |_, w| ops::embedding(&tokens, &w[0]))
            }
            Self::MeanMiddle { .. } => Box::new(|x, _| ops::mean_dims(&x[0], 1)),
            Self::ReluTransposed { .. } => Box::new(|x, _| ops::relu(&x[0].transpose(1, 2)?)),
        })
    }
}

type Forward = Box<dyn Fn(&[Tensor], &[Var]) -> Result<Tensor>>;

/// Two weights and two biases, of so many gates.
fn gates(gates: usize, width: usize) -> Vec<Vec<usize>> {
    let (weight, bias) = (vec![gates * width, width], vec![gates * width]);
    vec![weight.clone(), weight, bias.clone(), bias]
}

fn recurrent(w: &[Var]) -> RecurrentWeights<'_> {
    let (b_ih, b_hh) = (Some(w[2].as_tensor()), Some(w[3].as_tensor()));
    RecurrentWeights { w_ih: &w[0], w_hh: &w[1], b_ih, b_hh, direction: Direction::Forward }
}

/// An operator with what it is given, and the gradient of what it returns.
struct Case {
    inputs: Vec<Tensor>,
    parameters: Vec<Var>,
    forward: Forward,
    precision: Precision,
    gradient: Tensor,
}

impl Case {
    /// `input` makes inputs of values.
    fn new(
        operator: Operator,
        batch: usize,
        precision: Precision,
        input: impl Fn(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let forward = operator.forward(batch)?;
        let [inputs, parameters] = operator.shapes(batch).map(|shapes| {
            let values = |(i, shape): (usize, Vec<usize>)| noise(shape, i, &Device::Cpu);
            shapes.into_iter().enumerate().map(values).collect::<Result<Vec<_>>>()
        });
        let input = |values: &Tensor| input(&values.to_dtype(precision.dtype())?);
        let inputs = inputs?.iter().map(input).collect::<Result<Vec<_>>>()?;
        let parameters = parameters?.iter().map(parameter).collect::<Result<Vec<_>>>()?;
        let y = precision.autocast().scope(|| forward(&inputs, &parameters))?;
        let gradient = laid_out_as(&y, &noise(y.shape(), 9, &Device::Cpu)?.to_dtype(y.dtype())?)?;
        Ok(Self { inputs, parameters, forward, precision, gradient })
    }

    /// Forward and backward; what forward returns.
    fn run(&self, scaler: &mut GradScaler) -> anyhow::Result<Tensor> {
        let y =
            self.precision.autocast().scope(|| (self.forward)(&self.inputs, &self.parameters))?;
        let loss = loss_with(&[&y], vec![self.gradient.clone()])?;
        scaler.scale(&loss)?.backward()?;
        Ok(y)
    }
}

/// `x` in the order of memory that `y` has.
fn laid_out_as(y: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut order: Vec<usize> = (0..y.rank()).collect();
    order.sort_by_key(|&dim| Reverse(y.stride()[dim]));
    let mut back = order.clone();
    order.iter().enumerate().for_each(|(place, &dim)| back[dim] = place);
    x.permute(order)?.contiguous()?.permute(back)
}

/// A variable of the size that parameters have in a network.
fn parameter(values: &Tensor) -> Result<Var> {
    Var::from_tensor(&(values * 0.1)?)
}

pub(crate) fn runner(
    operator: Operator,
    batch: usize,
    precision: Precision,
) -> anyhow::Result<Runner> {
    let input = |x: &Tensor| if operator.wants_gradient() { tracked(x) } else { Ok(x.clone()) };
    let case = Case::new(operator, batch, precision, input)?;
    let mut scaler = precision.scaler();
    Ok(Box::new(move || {
        seconds(|| {
            case.run(&mut scaler)?;
            scaler.zero_grad();
            Ok(())
        })
    }))
}

/// The mean squares of what the operator returns and of all gradients, which must be PyTorch's too.
pub(crate) fn check(
    operator: Operator,
    batch: usize,
    precision: Precision,
) -> anyhow::Result<Vec<(String, f64)>> {
    let input = |x: &Tensor| Ok(Var::from_tensor(x)?.into_inner());
    let case = Case::new(operator, batch, precision, input)?;
    let mut scaler = precision.scaler();
    let mut numbers = vec![("output".to_string(), mean_square(&case.run(&mut scaler)?)?)];
    let inputs = if operator.wants_gradient() { case.inputs.as_slice() } else { &[] };
    let leaves = inputs.iter().chain(case.parameters.iter().map(Var::as_tensor));
    for (i, leaf) in leaves.enumerate() {
        let gradient = scaler.grad(leaf)?.context("a leaf without a gradient")?;
        numbers.push((format!("gradient {}", i + 1), mean_square(&gradient)?));
    }
    Ok(numbers)
}

fn mean_square(x: &Tensor) -> Result<f64> {
    x.to_dtype(DType::F64)?.sqr()?.mean_all()?.to_scalar()
}
