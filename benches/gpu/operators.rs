//! Operators one by one, forward and backward, in the sizes of the networks that are measured.
//!
//! A second row of each compares it with what the card can do: with a copy, or with a large matrix product.

use std::cell::RefCell;

use anyhow::Result;
use candle_amp::ops::{self, RecurrentWeights};
use candle_amp::{Op, autograd, nn, no_grad};
use candle_amp_benches::precision::Precision;
use candle_amp_benches::{loss_with, tracked};
use candle_core::{DType, Device, Module, Result as CandleResult, Tensor, Var};
use candle_nn::rnn::Direction;
use serde::Serialize;

use crate::steps::TrainingStep;

/// An operator, and its sizes. PyTorch's side builds the same from these.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "operator", rename_all = "snake_case")]
pub(crate) enum Operator {
    /// Images of `size` by `size`, channels last, and a square kernel; padded to keep the size.
    Conv {
        batch: usize,
        channels: usize,
        outs: usize,
        size: usize,
        kernel: usize,
        stride: usize,
    },
    /// Causal, of as many heads of keys as of queries.
    Attention {
        batch: usize,
        heads: usize,
        length: usize,
        width: usize,
    },
    LayerNorm {
        rows: usize,
        width: usize,
    },
    /// In training, channels last, with the ReLU after it.
    BatchNorm {
        batch: usize,
        channels: usize,
        size: usize,
    },
    GroupNorm {
        batch: usize,
        channels: usize,
        size: usize,
        groups: usize,
    },
    CrossEntropy {
        rows: usize,
        classes: usize,
    },
    /// The product with the classes' weights, and its cross entropy.
    Head {
        rows: usize,
        width: usize,
        classes: usize,
    },
    /// With a bias.
    Linear {
        rows: usize,
        ins: usize,
        outs: usize,
    },
    /// `hot`: of one row, by all numbers.
    Embedding {
        numbers: usize,
        rows: usize,
        width: usize,
        hot: bool,
    },
    /// Of F32 numbers, to the precision's dtype.
    Cast {
        elements: usize,
    },
    /// By its approximation with `tanh`.
    Gelu {
        elements: usize,
    },
    /// Over the last dimension.
    Softmax {
        rows: usize,
        width: usize,
    },
    /// Channels last, of windows of 2x2 that do not overlap.
    MaxPool {
        batch: usize,
        channels: usize,
        size: usize,
    },
    /// With a probability of 0.1.
    Dropout {
        elements: usize,
    },
    /// As many features as units, with both biases.
    Lstm {
        batch: usize,
        length: usize,
        width: usize,
    },
}

/// What of an operator is timed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pass {
    Forward,
    /// Forward, and backward to the input and the weights.
    Both,
    /// Backward alone, to the input and the weights: again and again through the graph of one forward.
    Backward,
    /// The same to the input alone.
    Dgrad,
    /// The same to the weights alone.
    Wgrad,
}

use Operator::{
    Attention, BatchNorm, Cast, Conv, CrossEntropy, Dropout, Embedding, Gelu, GroupNorm, Head,
    LayerNorm, Linear, Lstm, MaxPool, Softmax,
};

/// Runs forward once.
pub(crate) type Forward = Box<dyn Fn() -> CandleResult<Tensor>>;

/// An operator with its inputs.
pub(crate) struct Applied {
    pub(crate) forward: Forward,
    /// The inputs that get a gradient in the pass.
    pub(crate) wanted: Vec<Tensor>,
}

/// An operator that only has its input cast.
struct Casted;

impl autograd::Operator for Casted {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("cast", candle_amp::Cast::Lower)
    }

    fn forward(&self, inputs: &[Tensor]) -> CandleResult<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(
        &self,
        ctx: &autograd::Backward<'_, ()>,
    ) -> CandleResult<Vec<Option<autograd::Gradient>>> {
        Ok(vec![Some(autograd::Gradient::owned(ctx.gradient.copy()?))])
    }
}

impl Pass {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Both => "forward+backward",
            Self::Backward => "backward",
            Self::Dgrad => "dgrad",
            Self::Wgrad => "wgrad",
        }
    }

    /// Whether forward is none of it.
    fn is_backward(self) -> bool {
        matches!(self, Self::Backward | Self::Dgrad | Self::Wgrad)
    }

    fn wants_input(self) -> bool {
        matches!(self, Self::Both | Self::Backward | Self::Dgrad)
    }

    fn wants_weight(self) -> bool {
        matches!(self, Self::Both | Self::Backward | Self::Wgrad)
    }
}

impl Operator {
    /// Multiplications and additions, or bytes that must be read and written, in a forward pass.
    fn work(self, element: usize) -> (f64, &'static str) {
        let flops = |of: usize| (2e-12 * of as f64, "TFLOP/s");
        let bytes = |elements: usize| (1e-9 * (elements * element) as f64, "GB/s");
        match self {
            Conv { batch, channels, outs, size, kernel, stride } => {
                flops(batch * outs * (size / stride).pow(2) * channels * kernel.pow(2))
            }
            // Half of the scores, by two products.
            Attention { batch, heads, length, width } => {
                flops(batch * heads * length.pow(2) * width)
            }
            LayerNorm { rows, width } | Softmax { rows, width } => bytes(2 * rows * width),
            Gelu { elements } | Dropout { elements } => bytes(2 * elements),
            // A quarter is left.
            MaxPool { batch, channels, size } => bytes(batch * channels * size.pow(2) / 4 * 5),
            BatchNorm { batch, channels, size } | GroupNorm { batch, channels, size, .. } => {
                bytes(2 * batch * channels * size.pow(2))
            }
            CrossEntropy { rows, classes } => bytes(rows * classes),
            Head { rows, width, classes } => flops(rows * width * classes),
            Linear { rows, ins, outs } => flops(rows * ins * outs),
            // Four gates, of the features and of the state.
            Lstm { batch, length, width } => flops(batch * length * 8 * width.pow(2)),
            Embedding { numbers, width, .. } => bytes(2 * numbers * width),
            Cast { elements } => (1e-9 * (elements * (4 + element)) as f64, "GB/s"),
        }
    }

    /// Bytes that backward must read and write, over those of forward: gradients and inputs are as large as outputs.
    /// `None` of products.
    fn backward_bytes(self, element: usize) -> Option<f64> {
        match self {
            // What forward read, the gradient of what it wrote, and that of what it read.
            LayerNorm { .. }
            | BatchNorm { .. }
            | GroupNorm { .. }
            | Gelu { .. }
            | Softmax { .. } => Some(3.0 / 2.0),
            // The same, of which one has a quarter.
            MaxPool { .. } => Some(9.0 / 5.0),
            // Gradients alone.
            Dropout { .. } => Some(1.0),
            // The logits, and their gradient.
            CrossEntropy { .. } => Some(2.0),
            // The gradient of what was looked up, and that of all rows, in F32.
            Embedding { numbers, rows, .. } => {
                let table = (rows * size_of::<f32>()) as f64 / (numbers * element) as f64;
                Some((1.0 + table) / 2.0)
            }
            Conv { .. }
            | Attention { .. }
            | Head { .. }
            | Linear { .. }
            | Lstm { .. }
            | Cast { .. } => None,
        }
    }

    /// What is got through in a second.
    pub(crate) fn amount(self, pass: Pass, precision: Precision) -> Option<(f64, &'static str)> {
        let element = precision.dtype().size_in_bytes();
        let (amount, unit) = self.work(element);
        let backward = match unit {
            // Each gradient of a product is a product of as much work.
            "TFLOP/s" => 2.0,
            _ => self.backward_bytes(element).unwrap_or(0.0),
        };
        let passes = match pass {
            Pass::Forward => 1.0,
            Pass::Both => 1.0 + backward,
            Pass::Backward => backward,
            Pass::Dgrad | Pass::Wgrad => backward / 2.0,
        };
        Some((amount * passes, unit))
    }

    pub(crate) fn shrink(&mut self) {
        match self {
            Conv { batch, channels, outs, size, .. } => {
                (*batch, *channels, *outs, *size) = (2, 8, 8, 8);
            }
            Attention { batch, heads, length, width } => {
                (*batch, *heads, *length, *width) = (1, 2, 16, 16);
            }
            LayerNorm { rows, width } | Softmax { rows, width } => (*rows, *width) = (4, 16),
            BatchNorm { batch, channels, size } | MaxPool { batch, channels, size } => {
                (*batch, *channels, *size) = (2, 8, 4);
            }
            GroupNorm { batch, channels, size, groups } => {
                (*batch, *channels, *size, *groups) = (2, 8, 4, 4);
            }
            CrossEntropy { rows, classes } => (*rows, *classes) = (4, 17),
            Head { rows, width, classes } => (*rows, *width, *classes) = (4, 16, 17),
            Linear { rows, ins, outs } => (*rows, *ins, *outs) = (4, 16, 24),
            Embedding { numbers, rows, width, .. } => (*numbers, *rows, *width) = (80, 17, 16),
            Cast { elements } | Gelu { elements } | Dropout { elements } => *elements = 1025,
            Lstm { batch, length, width } => (*batch, *length, *width) = (2, 3, 16),
        }
    }

    /// Runs the pass once.
    pub(crate) fn step(
        self,
        pass: Pass,
        precision: Precision,
        device: &Device,
    ) -> Result<TrainingStep> {
        let Applied { forward, .. } = self.applied(pass, precision.dtype(), device)?;
        let run = move || {
            let all = || precision.autocast().scope(&forward);
            // Parameters of a norm are variables in any case: without backward there is to be no graph.
            if pass == Pass::Forward { no_grad(all) } else { all() }
        };
        let y = run()?;
        // Handed to backward as they are: a sum would read all of the result.
        let ones = Tensor::ones(y.shape(), y.dtype(), device)?;
        drop(y);
        let mut scaler = candle_amp::GradScaler::disabled();
        if pass.is_backward() {
            let loss = loss_with(&[&run()?], vec![ones])?;
            return Ok(Box::new(move || {
                scaler.scale(&loss)?.retain_graph().backward()?;
                scaler.zero_grad();
                Ok(())
            }));
        }
        Ok(Box::new(move || {
            let y = run()?;
            if pass != Pass::Forward {
                let loss = loss_with(&[&y], vec![ones.clone()])?;
                scaler.scale(&loss)?.backward()?;
                scaler.zero_grad();
            }
            Ok(())
        }))
    }

    /// The operator, applied to inputs of its own.
    pub(crate) fn applied(self, pass: Pass, dtype: DType, device: &Device) -> Result<Applied> {
        let draw = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype);
        let wanted = RefCell::new(Vec::new());
        let noted = |tensor: Tensor| {
            wanted.borrow_mut().push(tensor.clone());
            tensor
        };
        let input = |shape: &[usize]| match pass.wants_input() {
            true => tracked(&draw(shape)?).map(noted),
            false => draw(shape),
        };
        let weight = |shape: &[usize]| match pass.wants_weight() {
            true => Ok(noted(Var::from_tensor(&draw(shape)?)?.into_inner())),
            false => draw(shape),
        };
        let numbers = |count: usize, below: usize| {
            let numbers = (0..count).map(|i| (i * 7919 % below) as u32);
            Tensor::new(numbers.collect::<Vec<_>>(), device)
        };
        let norm_vars = nn::VarMap::new();
        let norm_vb = nn::var_builder(&norm_vars, DType::F32, device);
        let forward: Forward = match self {
            Conv { batch, channels, outs, size, kernel, stride } => {
                let x = input(&[batch, size, size, channels])?;
                let w = weight(&[outs, channels, kernel, kernel])?;
                let config = nn::Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
                Box::new(move || ops::channels_last::conv2d(&x, &w, None, config))
            }
            Attention { batch, heads, length, width } => {
                let draw = || input(&[batch, heads, length, width]);
                let (q, k, v) = (draw()?, draw()?, draw()?);
                let scale = 1.0 / (width as f64).sqrt();
                Box::new(move || ops::sdpa(&q, &k, &v, None, true, scale))
            }
            LayerNorm { rows, width } => {
                let (x, w, b) = (input(&[rows, width])?, weight(&[width])?, weight(&[width])?);
                Box::new(move || ops::layer_norm(&x, Some(&w), Some(&b), 1e-5))
            }
            BatchNorm { batch, channels, size } => {
                let x = input(&[batch, size, size, channels])?;
                let norm = nn::batch_norm(channels, 1e-5, norm_vb)?.channels_last();
                Box::new(move || norm.forward_relu_t(&x, None, true))
            }
            GroupNorm { batch, channels, size, groups } => {
                let x = input(&[batch, channels, size, size])?;
                let norm = nn::group_norm(groups, channels, 1e-5, norm_vb)?;
                Box::new(move || norm.forward(&x))
            }
            CrossEntropy { rows, classes } => {
                let (x, y) = (input(&[rows, classes])?, numbers(rows, classes)?);
                Box::new(move || ops::cross_entropy(&x, &y))
            }
            Head { rows, width, classes } => {
                let (x, w) = (input(&[rows, width])?, weight(&[classes, width])?);
                let y = numbers(rows, classes)?;
                Box::new(move || ops::linear_cross_entropy(&x, &w, None, &y))
            }
            Linear { rows, ins, outs } => {
                let (x, w, b) = (input(&[rows, ins])?, weight(&[outs, ins])?, weight(&[outs])?);
                Box::new(move || ops::linear(&x, &w, Some(&b)))
            }
            Embedding { numbers: count, rows, width, hot } => {
                let table = weight(&[rows, width])?;
                let ids = numbers(count, if hot { 1 } else { rows })?;
                Box::new(move || ops::embedding(&ids, &table))
            }
            Gelu { elements } => {
                let x = input(&[elements])?;
                Box::new(move || ops::gelu_tanh(&x))
            }
            Softmax { rows, width } => {
                let x = input(&[rows, width])?;
                Box::new(move || ops::softmax(&x, 1))
            }
            MaxPool { batch, channels, size } => {
                let x = input(&[batch, size, size, channels])?;
                Box::new(move || ops::channels_last::max_pool2d(&x, 2, 2, 0))
            }
            Dropout { elements } => {
                let x = input(&[elements])?;
                Box::new(move || ops::dropout(&x, 0.1))
            }
            Lstm { batch, length, width } => {
                let x = input(&[batch, length, width])?;
                let (h0, c0) = (draw(&[batch, width])?, draw(&[batch, width])?);
                let (w_ih, w_hh) = (weight(&[4 * width, width])?, weight(&[4 * width, width])?);
                let (b_ih, b_hh) = (weight(&[4 * width])?, weight(&[4 * width])?);
                Box::new(move || {
                    let weights = RecurrentWeights {
                        w_ih: &w_ih,
                        w_hh: &w_hh,
                        b_ih: Some(&b_ih),
                        b_hh: Some(&b_hh),
                        direction: Direction::Forward,
                    };
                    Ok(ops::lstm(&x, &h0, &c0, weights)?.0)
                })
            }
            Cast { elements } => {
                let x = Tensor::randn(0f32, 1.0, elements, device)?;
                Box::new(move || autograd::apply(Casted, &[&x]))
            }
        };
        let mut wanted = wanted.take();
        if matches!(self, BatchNorm { .. } | GroupNorm { .. }) && pass.wants_weight() {
            for name in ["weight", "bias"] {
                wanted.extend(
                    norm_vars.data().lock().unwrap().get(name).map(|var| var.as_tensor().clone()),
                );
            }
        }
        Ok(Applied { forward, wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a row's unit, what a pass gets through.
    fn amount(operator: Operator, pass: Pass) -> (f64, &'static str) {
        operator.amount(pass, Precision::Bf16).expect("every pass has an amount")
    }

    #[test]
    fn backward_does_what_its_gradients_take() {
        let conv = Conv { batch: 2, channels: 3, outs: 5, size: 8, kernel: 3, stride: 1 };
        let forward = 2e-12 * (2 * 5 * 64 * 3 * 9) as f64;
        for (pass, times) in [
            (Pass::Forward, 1.0),
            (Pass::Dgrad, 1.0),
            (Pass::Wgrad, 1.0),
            (Pass::Backward, 2.0),
            (Pass::Both, 3.0),
        ] {
            assert_eq!(amount(conv, pass), (forward * times, "TFLOP/s"), "{pass:?}");
        }
        let bytes = |operator, pass| {
            let (amount, unit) = amount(operator, pass);
            assert_eq!(unit, "GB/s");
            (amount * 1e9).round() as usize
        };
        let norm = LayerNorm { rows: 10, width: 8 };
        assert_eq!(bytes(norm, Pass::Forward), 2 * 80 * 2);
        assert_eq!(bytes(norm, Pass::Backward), 3 * 80 * 2);
        assert_eq!(bytes(norm, Pass::Both), 5 * 80 * 2);
        let loss = CrossEntropy { rows: 10, classes: 8 };
        assert_eq!(bytes(loss, Pass::Both), 3 * 80 * 2);
        // Read and written in BF16; a gradient of BF16, and one of F32 for all rows.
        let table = Embedding { numbers: 10, rows: 100, width: 8, hot: false };
        assert_eq!(bytes(table, Pass::Forward), 2 * 80 * 2);
        assert_eq!(bytes(table, Pass::Backward), 80 * 2 + 800 * 4);
    }

    /// Through one graph as often as asked: nothing of it is freed or written over.
    #[test]
    fn backward_alone_runs_again_and_again() -> Result<()> {
        let mut conv = Conv { batch: 1, channels: 1, outs: 1, size: 1, kernel: 3, stride: 1 };
        let mut attention = Attention { batch: 1, heads: 1, length: 1, width: 1 };
        conv.shrink();
        attention.shrink();
        for (operator, pass) in [
            (conv, Pass::Dgrad),
            (conv, Pass::Wgrad),
            (conv, Pass::Backward),
            (attention, Pass::Backward),
        ] {
            let mut step = operator.step(pass, Precision::F32, &Device::Cpu)?;
            for _ in 0..3 {
                step()?;
            }
        }
        Ok(())
    }
}
