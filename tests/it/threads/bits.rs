//! Bits do not depend on the number of threads.

use candle_amp::ops::RecurrentWeights;
use candle_amp::optim::{AdamW, AdamWConfig, Lamb, LambConfig, Lion, LionConfig, Sgd, SgdConfig};
use candle_amp::{GradScaler, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::rnn::Direction;
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose2dConfig};

use crate::cases;
use crate::util::{FLOATS, random, to_vec};

type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + Sync>;

/// The bits of a tensor, NaN and the signs of zeros included.
fn bits(tensor: &Tensor) -> Vec<u64> {
    to_vec(tensor).into_iter().map(f64::to_bits).collect()
}

/// The bits of `f` of `inputs`, and of their gradients.
fn run(inputs: &[Tensor], f: &dyn Fn(&[Tensor]) -> Result<Tensor>) -> Result<Vec<Vec<u64>>> {
    let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors)?;
    let weights = random(99, y.shape().clone(), y.dtype());
    let gradients = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
    let of_vars = vars.iter().filter_map(|var| gradients.get(var));
    Ok(std::iter::once(&y).chain(of_vars).map(bits).collect())
}

/// Runs `f` in private pools of several sizes. The sizes with other results than one thread has.
fn differing<R: PartialEq + Send>(f: impl Fn() -> Result<R> + Sync) -> Vec<usize> {
    let results = [1, 2, 3, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        (threads, pool.install(&f).unwrap())
    });
    let others = results.iter().filter(|(_, result)| *result != results[0].1);
    others.map(|(threads, _)| *threads).collect()
}

#[test]
fn every_operator_has_the_same_bits() {
    for dtype in FLOATS {
        let all = || {
            let of = |case: cases::Case| {
                let inputs = case.inputs.iter().map(|x| x.to_dtype(dtype));
                let inputs = inputs.collect::<Result<Vec<_>>>()?;
                Ok((case.op.name().to_string(), case.name, run(&inputs, &case.f)?))
            };
            cases::all().into_iter().map(of).collect::<Result<Vec<_>>>()
        };
        assert_eq!(differing(all), [0; 0], "{dtype:?}");
    }
}

/// The weights of a recurrent layer, and the bias beside the first.
fn recurrent(t: &[Tensor]) -> RecurrentWeights<'_> {
    let (b_ih, direction) = (Some(&t[2]), Direction::Forward);
    RecurrentWeights { w_ih: &t[0], w_hh: &t[1], b_ih, b_hh: None, direction }
}

/// Sizes that threads share: products that are cut up or not, fewer and more images than threads, long rows.
fn large() -> Vec<(&'static str, Vec<Vec<usize>>, Function)> {
    fn of(
        name: &'static str,
        dims: &[&[usize]],
        f: impl Fn(&[Tensor]) -> Result<Tensor> + Sync + 'static,
    ) -> (&'static str, Vec<Vec<usize>>, Function) {
        (name, dims.iter().map(|dims| dims.to_vec()).collect(), Box::new(f))
    }
    let conv = |padding, stride, groups| {
        let config = Conv2dConfig { padding, stride, groups, ..Default::default() };
        move |t: &[Tensor]| ops::conv2d(&t[0], &t[1], t.get(2), config)
    };
    let last = |padding, stride| {
        let config = Conv2dConfig { padding, stride, ..Default::default() };
        move |t: &[Tensor]| ops::channels_last::conv2d(&t[0], &t[1], None, config)
    };
    let targets = |n: usize, classes: usize| {
        let ids = (0..n).map(|i| (i * i % classes) as u32).collect::<Vec<_>>();
        Tensor::from_vec(ids, n, &Device::Cpu)
    };
    vec![
        of("matmul, parts of long sums", &[&[300, 600], &[600, 40]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul, a rest", &[&[257, 900], &[900, 5]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul of a row", &[&[1, 1100], &[1100, 1300]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul of two rows", &[&[2, 1100], &[1100, 1001]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul, two of them", &[&[2, 200, 700], &[2, 700, 33]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul, four of them", &[&[4, 200, 700], &[4, 700, 33]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul, broadcast", &[&[4, 1, 150, 70], &[3, 70, 130]], |t| ops::matmul(&t[0], &t[1])),
        of("linear", &[&[3, 67, 600], &[130, 600], &[130]], |t| {
            ops::linear(&t[0], &t[1], Some(&t[2]))
        }),
        of("conv2d, one image", &[&[1, 40, 33, 31], &[44, 40, 3, 3], &[44]], conv(1, 1, 1)),
        of("conv2d, two images", &[&[2, 64, 20, 21], &[96, 64, 3, 3]], conv(1, 1, 1)),
        of("conv2d, four images", &[&[4, 64, 20, 21], &[96, 64, 3, 3]], conv(1, 1, 1)),
        of("conv2d, stride 2", &[&[2, 64, 20, 21], &[96, 64, 3, 3]], conv(1, 2, 1)),
        of("conv2d, pointwise", &[&[2, 600, 20, 21], &[40, 600, 1, 1]], conv(0, 1, 1)),
        of("conv2d, long sums", &[&[1, 600, 9, 21], &[130, 600, 3, 3]], conv(1, 1, 1)),
        of("conv2d, groups", &[&[2, 48, 20, 21], &[96, 24, 3, 3]], conv(1, 1, 2)),
        of("conv2d, depthwise", &[&[2, 48, 20, 21], &[48, 1, 3, 3]], conv(1, 1, 48)),
        of("conv2d of few channels", &[&[5, 3, 20, 31], &[70, 3, 3, 3]], conv(1, 1, 1)),
        of("conv2d of few channels, last", &[&[5, 20, 31, 3], &[70, 3, 3, 3]], last(1, 1)),
        of("conv2d, channels last", &[&[2, 20, 21, 64], &[96, 64, 3, 3]], last(1, 1)),
        of("conv2d, last, stride 2", &[&[1, 20, 21, 64], &[96, 64, 3, 3]], last(1, 2)),
        // 8 or 16 columns are left over where a tile ends, which is elsewhere with more threads.
        of("conv2d, three images", &[&[3, 24, 13, 16], &[40, 24, 3, 3]], conv(1, 1, 1)),
        of("conv2d, five images", &[&[5, 24, 20, 21], &[40, 24, 3, 3], &[40]], conv(1, 2, 1)),
        of("conv2d, pointwise of 3", &[&[3, 70, 10, 20], &[24, 70, 1, 1]], conv(0, 1, 1)),
        of("conv2d, pointwise of 5", &[&[5, 70, 8, 17], &[33, 70, 1, 1]], conv(0, 2, 1)),
        of("conv2d, groups of 3", &[&[3, 24, 20, 21], &[48, 8, 3, 3]], conv(1, 1, 3)),
        of("conv2d, groups of 5", &[&[5, 32, 10, 28], &[32, 16, 3, 3]], conv(1, 2, 2)),
        of("conv2d, last, of 3", &[&[3, 13, 16, 24], &[40, 24, 3, 3]], last(1, 1)),
        of("conv2d, last, of 5", &[&[5, 20, 21, 24], &[40, 24, 3, 3]], last(1, 2)),
        of("matmul, 8 left over", &[&[200, 300], &[300, 136]], |t| ops::matmul(&t[0], &t[1])),
        of("matmul, 16 left over", &[&[3, 70, 300], &[3, 300, 80]], |t| ops::matmul(&t[0], &t[1])),
        of("conv1d", &[&[1, 40, 1203], &[44, 40, 5]], |t| {
            ops::conv1d(&t[0], &t[1], None, Conv1dConfig { padding: 2, ..Default::default() })
        }),
        of("conv_transpose2d", &[&[2, 64, 15, 14], &[64, 48, 3, 3]], |t| {
            let config = ConvTranspose2dConfig { stride: 2, padding: 1, ..Default::default() };
            ops::conv_transpose2d(&t[0], &t[1], None, config)
        }),
        of("sdpa", &[&[1, 2, 200, 600], &[1, 1, 210, 600], &[1, 1, 210, 33]], |t| {
            ops::sdpa(&t[0], &t[1], &t[2], None, true, 0.125)
        }),
        of("sdpa, many heads", &[&[2, 4, 150, 16], &[2, 4, 150, 16], &[2, 4, 150, 40]], |t| {
            ops::sdpa(&t[0], &t[1], &t[2], None, false, 0.25)
        }),
        of("lstm", &[&[37, 9, 24], &[37, 40], &[37, 40], &[160, 24], &[160, 40], &[160]], |t| {
            let (h, c) = ops::lstm(&t[0], &t[1], &t[2], recurrent(&t[3..]))?;
            ops::cat(&[&h, &c], 2)
        }),
        of("gru", &[&[37, 9, 24], &[37, 40], &[120, 24], &[120, 40], &[120]], |t| {
            ops::gru(&t[0], &t[1], recurrent(&t[2..]))
        }),
        of("sum", &[&[300_007]], |t| ops::sum(&t[0])),
        of("mean of rows", &[&[7, 50_001]], |t| ops::mean_dims(&t[0], 1)),
        of("mean of columns", &[&[50_001, 7]], |t| ops::mean_dims(&t[0], 0)),
        of("softmax", &[&[33, 5_001]], |t| ops::softmax(&t[0], 1)),
        of("layer_norm", &[&[333, 501], &[501], &[501]], |t| {
            ops::layer_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-5)
        }),
        of("rms_norm", &[&[333, 501], &[501]], |t| ops::rms_norm(&t[0], Some(&t[1]), 1e-5)),
        of("batch_norm", &[&[7, 11, 40, 41], &[11], &[11]], |t| {
            Ok(ops::batch_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-5)?.0)
        }),
        of("batch_norm, channels last", &[&[7, 40, 41, 11], &[11], &[11]], |t| {
            Ok(ops::channels_last::batch_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-5)?.0)
        }),
        of("group_norm", &[&[5, 12, 40, 41], &[12], &[12]], |t| {
            ops::group_norm(&t[0], 3, Some(&t[1]), Some(&t[2]), 1e-5)
        }),
        of("max_pool2d", &[&[5, 12, 40, 41]], |t| ops::max_pool2d(&t[0], 3, 2, 1)),
        of("avg_pool2d", &[&[5, 12, 40, 41]], |t| ops::avg_pool2d(&t[0], 3, 2, 1)),
        of("upsample", &[&[5, 12, 20, 21]], |t| ops::upsample_bilinear2d(&t[0], 37, 50, false)),
        of("embedding", &[&[301, 130]], move |t| ops::embedding(&targets(2_000, 301)?, &t[0])),
        of("cross_entropy", &[&[203, 1_031]], move |t| {
            ops::cross_entropy_smoothed(&t[0], &targets(203, 1_031)?, 0.1)
        }),
        of("linear_cross_entropy", &[&[203, 70], &[1_031, 70], &[1_031]], move |t| {
            ops::linear_cross_entropy(&t[0], &t[1], Some(&t[2]), &targets(203, 1_031)?)
        }),
        of("mse", &[&[300_007], &[300_007]], |t| ops::mse(&t[0], &t[1])),
        of("gelu_tanh", &[&[300_007]], |t| ops::gelu_tanh(&t[0])),
    ]
}

#[test]
fn large_operators_have_the_same_bits() {
    let mut failures = Vec::new();
    for dtype in FLOATS {
        for (name, dims, f) in large() {
            let inputs: Vec<Tensor> =
                (0..).zip(&dims).map(|(i, dims)| random(i, dims.clone(), dtype)).collect();
            let threads = differing(|| run(&inputs, &*f));
            if !threads.is_empty() {
                failures.push(format!("{name}, {dtype:?}: {threads:?} threads"));
            }
        }
    }
    assert!(failures.is_empty(), "other bits than one thread has: {failures:#?}");
}

/// Steps of every optimizer, with clipping by the norm: of a large tensor that all threads share, and of small ones.
#[test]
fn optimizers_have_the_same_bits() {
    let run = |which: usize| -> candle_amp::Result<Vec<Vec<u64>>> {
        let dims = [vec![300_007], vec![7, 11], vec![1], vec![130, 70]];
        let vars: Vec<Var> = (0..)
            .zip(dims)
            .map(|(seed, dims)| Ok(Var::from_tensor(&random(seed, dims, DType::F32))?))
            .collect::<candle_amp::Result<_>>()?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        let loss = || {
            let terms = vars.iter().map(|var| ops::mean(&ops::mul(var, &ops::tanh(var)?)?));
            let terms = terms.collect::<Result<Vec<_>>>()?;
            terms.iter().skip(1).try_fold(terms[0].clone(), |sum, term| ops::add(&sum, term))
        };
        macro_rules! steps {
            ($opt:expr) => {{
                let mut opt = $opt?;
                for _ in 0..3 {
                    scaler.scale(&loss()?)?.backward()?;
                    scaler.clip_grad_norm(0.01)?;
                    scaler.step(&mut opt)?;
                    scaler.update()?;
                }
            }};
        }
        match which {
            0 => steps!(Sgd::new(vars.clone(), SgdConfig { momentum: 0.9, ..Default::default() })),
            1 => steps!(AdamW::new(vars.clone(), AdamWConfig::default())),
            2 => steps!(Lion::new(vars.clone(), LionConfig::default())),
            _ => steps!(Lamb::new(vars.clone(), LambConfig::default())),
        }
        Ok(vars.iter().map(|var| bits(var)).collect())
    };
    for which in 0..4 {
        let threads = differing(|| run(which).map_err(candle_core::Error::wrap));
        assert_eq!(threads, [0; 0], "optimizer {which}");
    }
}
