//! Convolutions and pools, and the functions of `candle_nn`.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Activation, Module, loss, ops as nn, rotary_emb};

use super::measure::Input;
use super::rows::{input, row};
use super::{Row, Section};

const IMAGES: Input = input(&[2, 3, 12, 12], 0.5, 1.0);
const X: Input = input(&[4099], -4.0, 4.0);
const LONG: Input = input(&[3, 4099], -0.5, 0.5);

pub(super) fn sections() -> Vec<Section> {
    vec![
        ("Convolutions, pools and interpolation", images()),
        ("`candle_nn::ops` and `Activation`", functions()),
        ("`candle_nn::ops`: softmax and norms", norms()),
        ("`candle_nn::loss`", losses()),
        ("`candle_nn::rotary_emb`", rotary()),
    ]
}

fn images() -> Vec<Row> {
    const CONV: &str =
        "the weight's gradient is a convolution in 16 bits; none in BF16 on most CPUs";
    const LINE: Input = input(&[2, 3, 40], 0.5, 1.0);
    const WEIGHT: Input = input(&[4, 3, 3], 0.5, 1.0);
    const BACK: Input = input(&[3, 4, 3], 0.5, 1.0);
    vec![
        row(
            "x.conv1d(..)",
            &[&[LINE, WEIGHT]],
            |t| t[0].conv1d(&t[1], 1, 1, 1, 1),
            "`ops::conv1d`",
            "on a CPU the weight's gradient is wrong for a batch of two or more",
        )
        .varies(),
        row(
            "x.conv2d(..)",
            &[&[IMAGES, input(&[4, 3, 3, 3], 0.5, 1.0)]],
            |t| t[0].conv2d(&t[1], 1, 1, 1, 1),
            "`ops::conv2d`",
            CONV,
        )
        .varies(),
        row(
            "x.conv_transpose1d(..)",
            &[&[LINE, BACK]],
            |t| t[0].conv_transpose1d(&t[1], 1, 0, 1, 1, 1),
            "`ops::conv_transpose1d`",
            "candle has no backward of it",
        )
        .varies(),
        row(
            "x.conv_transpose2d(..)",
            &[&[IMAGES, input(&[3, 4, 3, 3], 0.5, 1.0)]],
            |t| t[0].conv_transpose2d(&t[1], 1, 0, 1, 1),
            "`ops::conv_transpose2d`",
            CONV,
        )
        .varies(),
        row(
            "x.avg_pool2d(k)",
            &[&[IMAGES]],
            |t| t[0].avg_pool2d(3),
            "`ops::avg_pool2d`",
            "windows that overlap have no backward",
        ),
        row(
            "x.max_pool2d(k)",
            &[&[IMAGES]],
            |t| t[0].max_pool2d(3),
            "`ops::max_pool2d`",
            "the gradient is divided by the size of the window; windows that overlap have no backward",
        ),
        row(
            "x.upsample_nearest1d(n)",
            &[&[LINE]],
            |t| t[0].upsample_nearest1d(80),
            "`ops::upsample_nearest1d`",
            "only by whole factors; drops gradients of other uses that came before",
        )
        .varies(),
        row(
            "x.upsample_nearest2d(h, w)",
            &[&[IMAGES]],
            |t| t[0].upsample_nearest2d(24, 24),
            "`ops::upsample_nearest2d`",
            "as `upsample_nearest1d`",
        )
        .varies(),
        row(
            "x.upsample_bilinear2d(h, w, corners)",
            &[&[IMAGES]],
            |t| t[0].upsample_bilinear2d(24, 24, false),
            "`ops::upsample_bilinear2d`",
            "candle has no backward of it",
        ),
        row(
            "candle_nn::ops::pixel_shuffle(x, n)",
            &[&[input(&[1, 4, 5, 5], -4.0, 4.0)]],
            |t| nn::pixel_shuffle(&t[0], 2),
            "",
            "moves; also in `ops`",
        ),
        row(
            "candle_nn::ops::pixel_unshuffle(x, n)",
            &[&[input(&[1, 1, 8, 8], -4.0, 4.0)]],
            |t| nn::pixel_unshuffle(&t[0], 2),
            "",
            "moves; also in `ops`",
        ),
        row(
            "candle_nn::ops::replication_pad2d(x, 1)",
            &[&[input(&[1, 1, 8, 8], -4.0, 4.0)]],
            |t| nn::replication_pad2d(&t[0], 1),
            "",
            "moves; the gradient of an edge is a sum of few; also in `ops`",
        ),
    ]
}

fn functions() -> Vec<Row> {
    const STEPS: &str = "several steps, each rounded to 16 bits";
    vec![
        row(
            "candle_nn::ops::sigmoid(x)",
            &[&[X]],
            |t| nn::sigmoid(&t[0]),
            "`ops::sigmoid`",
            "the derivative is made of the rounded result",
        ),
        row(
            "candle_nn::ops::hard_sigmoid(x)",
            &[&[X]],
            |t| nn::hard_sigmoid(&t[0]),
            "`ops::hard_sigmoid`",
            STEPS,
        ),
        row("candle_nn::ops::mish(x)", &[&[X]], |t| nn::mish(&t[0]), "`ops::mish`", STEPS),
        row("candle_nn::ops::silu(x)", &[&[X]], |t| nn::silu(&t[0]), "`ops::silu`", STEPS),
        row(
            "candle_nn::ops::swiglu(x)",
            &[&[input(&[64, 64], -4.0, 4.0)]],
            |t| nn::swiglu(&t[0]),
            "`ops::swiglu`",
            STEPS,
        ),
        row(
            "candle_nn::ops::leaky_relu(x, a)",
            &[&[X]],
            |t| nn::leaky_relu(&t[0], 0.01),
            "",
            "two products, of which one is 0",
        ),
        row(
            "candle_nn::ops::selu(x, a, g)",
            &[&[X]],
            |t| nn::selu(&t[0], 1.6733, 1.0507),
            "`ops::selu`",
            "takes F32 alone",
        )
        .against(|t| t[0].relu()),
        row(
            "Activation::NewGelu",
            &[&[X]],
            |t| Activation::NewGelu.forward(&t[0]),
            "`ops::gelu_tanh`",
            STEPS,
        ),
        row(
            "Activation::Relu2",
            &[&[X]],
            |t| Activation::Relu2.forward(&t[0]),
            "",
            "`ops::square` of `ops::relu` in F32 under autocast",
        ),
        row("Activation::Relu6", &[&[X]], |t| Activation::Relu6.forward(&t[0]), "", "selects"),
        row(
            "Activation::HardSwish",
            &[&[X]],
            |t| Activation::HardSwish.forward(&t[0]),
            "`ops::hard_swish`",
            STEPS,
        ),
    ]
}

fn norms() -> Vec<Row> {
    const CUTS: &str = "fused: has no backward";
    const SLOW: &str =
        "computes in F32, and cuts nothing; the weight's gradient is summed in 16 bits";
    const TALL: Input = input(&[4099, 5], 0.5, 4.0);
    const WEIGHT: Input = input(&[5], 0.5, 1.5);
    vec![
        row(
            "candle_nn::ops::softmax(x, dim)",
            &[&[LONG]],
            |t| nn::softmax(&t[0], 1),
            "`ops::softmax`",
            "exponentials are summed in 16 bits",
        ),
        row(
            "candle_nn::ops::softmax_last_dim(x)",
            &[&[LONG]],
            |t| nn::softmax_last_dim(&t[0]),
            "`ops::softmax`",
            CUTS,
        ),
        row(
            "candle_nn::ops::log_softmax(x, dim)",
            &[&[LONG]],
            |t| nn::log_softmax(&t[0], 1),
            "`ops::log_softmax`",
            "exponentials are summed in 16 bits",
        ),
        row(
            "candle_nn::ops::rms_norm(x, w, eps)",
            &[&[TALL, WEIGHT]],
            |t| nn::rms_norm(&t[0], &t[1], 1e-3),
            "`ops::rms_norm`",
            CUTS,
        )
        .against(|t| nn::rms_norm_slow(&t[0], &t[1], 1e-3)),
        row(
            "candle_nn::ops::rms_norm_slow(x, w, eps)",
            &[&[TALL, WEIGHT]],
            |t| nn::rms_norm_slow(&t[0], &t[1], 1e-3),
            "`ops::rms_norm`",
            SLOW,
        ),
        row(
            "candle_nn::ops::layer_norm(x, w, b, eps)",
            &[&[TALL, WEIGHT, WEIGHT]],
            |t| nn::layer_norm(&t[0], &t[1], &t[2], 1e-3),
            "`ops::layer_norm`",
            CUTS,
        )
        .against(|t| nn::layer_norm_slow(&t[0], &t[1], &t[2], 1e-3)),
        row(
            "candle_nn::ops::layer_norm_slow(x, w, b, eps)",
            &[&[TALL, WEIGHT, WEIGHT]],
            |t| nn::layer_norm_slow(&t[0], &t[1], &t[2], 1e-3),
            "`ops::layer_norm`",
            SLOW,
        ),
    ]
}

fn classes(count: usize) -> Result<Tensor> {
    Tensor::new((0..count).map(|at| (at % 5) as u32).collect::<Vec<_>>(), &Device::Cpu)
}

fn losses() -> Vec<Row> {
    const MEAN: &str = "a mean in 16 bits, and a 16-bit loss cannot be scaled";
    const LOGITS: Input = input(&[4099, 5], -4.0, 4.0);
    const LEFT: Input = input(&[4099], 1.0, 1.5);
    const RIGHT: Input = input(&[4099], 0.0, 0.5);
    vec![
        row(
            "candle_nn::loss::cross_entropy(x, t)",
            &[&[LOGITS]],
            |t| loss::cross_entropy(&t[0], &classes(4099)?),
            "`ops::cross_entropy`",
            MEAN,
        ),
        row(
            "candle_nn::loss::nll(x, t)",
            &[&[LOGITS]],
            |t| loss::nll(&t[0], &classes(4099)?),
            "`ops::nll`",
            MEAN,
        ),
        row(
            "candle_nn::loss::mse(x, t)",
            &[&[LEFT, RIGHT]],
            |t| loss::mse(&t[0], &t[1]),
            "`ops::mse`",
            MEAN,
        ),
        row(
            "candle_nn::loss::huber(x, t, delta)",
            &[&[LEFT, RIGHT]],
            |t| loss::huber(&t[0], &t[1], 0.7),
            "`ops::huber`",
            MEAN,
        ),
        row(
            "candle_nn::loss::binary_cross_entropy_with_logit(x, t)",
            &[&[LEFT, RIGHT]],
            |t| loss::binary_cross_entropy_with_logit(&t[0], &t[1]),
            "`ops::binary_cross_entropy_with_logit`",
            MEAN,
        ),
    ]
}

/// Cosines and sines of angles, in the dtype of `x`.
fn angles(x: &Tensor) -> Result<[Tensor; 2]> {
    let angles = (Tensor::arange(0f64, 15.0, &Device::Cpu)? * 0.1)?.reshape((5, 3))?;
    // Exact in every dtype, so that all see the same.
    let of = |turned: Tensor| -> Result<Tensor> {
        (turned * 64.0)?.round()?.affine(1.0 / 64.0, 0.0)?.to_dtype(x.dtype())
    };
    Ok([of(angles.cos()?)?, of(angles.sin()?)?])
}

fn rotary() -> Vec<Row> {
    const CUTS: &str = "fused: has no backward";
    const STEPS: &str = "products and their sum are rounded to 16 bits";
    const X: Input = input(&[2, 3, 5, 6], -4.0, 4.0);
    const FIRST: Input = input(&[2, 5, 3, 6], -4.0, 4.0);
    type Rope = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;
    fn turned(t: &[Tensor], rope: Rope) -> Result<Tensor> {
        let [cos, sin] = angles(&t[0])?;
        rope(&t[0], &cos, &sin)
    }
    vec![
        row(
            "candle_nn::rotary_emb::rope(x, cos, sin)",
            &[&[X]],
            |t| turned(t, rotary_emb::rope),
            "`ops::rope`",
            CUTS,
        ),
        row(
            "candle_nn::rotary_emb::rope_i(x, cos, sin)",
            &[&[X]],
            |t| turned(t, rotary_emb::rope_i),
            "`ops::rope_i`",
            CUTS,
        ),
        row(
            "candle_nn::rotary_emb::rope_thd(x, cos, sin)",
            &[&[FIRST]],
            |t| turned(t, rotary_emb::rope_thd),
            "`ops::rope_thd`",
            CUTS,
        ),
        row(
            "candle_nn::rotary_emb::rope_slow(x, cos, sin)",
            &[&[X]],
            |t| turned(t, rotary_emb::rope_slow),
            "`ops::rope`",
            STEPS,
        ),
        row(
            "candle_nn::rotary_emb::rope_i_slow(x, cos, sin)",
            &[&[X]],
            |t| turned(t, rotary_emb::rope_i_slow),
            "`ops::rope_i`",
            STEPS,
        ),
    ]
}
