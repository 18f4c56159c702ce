//! Convolution, batch norm, pooling.

use candle_amp::Op;
use candle_amp::ops::{self, channels_last};
use candle_core::{DType, Result, Tensor};
use candle_nn::Conv2dConfig;

use super::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    let config = |stride, padding, dilation, groups| Conv2dConfig {
        stride,
        padding,
        dilation,
        groups,
        ..Default::default()
    };
    let conv = |config| move |t: &[Tensor]| ops::conv2d(&t[0], &t[1], t.get(2), config);
    let conv_last =
        |config| move |t: &[Tensor]| channels_last::conv2d(&t[0], &t[1], t.get(2), config);
    let statistics = |t: &[Tensor]| -> Result<[Tensor; 2]> {
        let dtype = if t[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let of = |values: [f64; 3]| Tensor::new(&values, t[0].device())?.to_dtype(dtype);
        Ok([of([0.25, -0.5, 0.125])?, of([0.5, 2.0, 1.5])?])
    };
    let eval = move |t: &[Tensor]| {
        let [mean, var] = statistics(t)?;
        ops::batch_norm_eval(&t[0], &mean, &var, t.get(1), t.get(2), 1e-3)
    };
    vec![
        case(Op::Conv2d, "3x3", &[&[2, 3, 6, 5], &[4, 3, 3, 3], &[4]], conv(config(1, 1, 1, 1))),
        case(Op::Conv2d, "stride 2", &[&[3, 2, 7, 6], &[3, 2, 3, 3]], conv(config(2, 1, 1, 1))),
        case(Op::Conv2d, "1x1 stride 2", &[&[2, 3, 5, 4], &[4, 3, 1, 1]], conv(config(2, 0, 1, 1))),
        case(Op::Conv2d, "groups", &[&[2, 4, 5, 5], &[6, 2, 3, 3], &[6]], conv(config(1, 2, 1, 2))),
        case(Op::Conv2d, "dilated", &[&[1, 2, 8, 7], &[2, 2, 3, 2]], conv(config(1, 1, 2, 1))),
        case(Op::BatchNorm, "train", &[&[4, 3, 2, 5], &[3], &[3]], |t| {
            Ok(ops::batch_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-3)?.0)
        })
        .within(6.0),
        case(Op::BatchNorm, "train, plain", &[&[6, 3]], |t| {
            Ok(ops::batch_norm(&t[0], None, None, 1e-3)?.0)
        })
        .within(6.0),
        case(Op::BatchNorm, "train, bias only", &[&[6, 3], &[3]], |t| {
            Ok(ops::batch_norm(&t[0], None, Some(&t[1]), 1e-3)?.0)
        }),
        case(Op::BatchNormRelu, "train", &[&[4, 3, 2, 5], &[3], &[3]], |t| {
            Ok(ops::batch_norm_relu(&t[0], Some(&t[1]), Some(&t[2]), None, 1e-3)?.0)
        })
        .within(6.0),
        case(Op::BatchNormRelu, "residual", &[&[4, 3, 2, 5], &[4, 3, 2, 5], &[3], &[3]], |t| {
            let (weight, bias) = (Some(&t[2]), Some(&t[3]));
            Ok(ops::batch_norm_relu(&t[0], weight, bias, Some(&t[1]), 1e-3)?.0)
        })
        .within(6.0),
        // Of which some are above six.
        case(Op::BatchNormRelu6, "train", &[&[4, 3, 2, 5], &[3], &[3]], |t| {
            let weight = (&t[1] * 8.0)?;
            Ok(ops::batch_norm_relu6(&t[0], Some(&weight), Some(&t[2]), 1e-3)?.0)
        })
        .within(6.0),
        case(Op::BatchNorm, "eval", &[&[4, 3, 2, 5], &[3], &[3]], eval),
        case(Op::MaxPool2d, "2/2", &[&[2, 2, 6, 4]], |t| ops::max_pool2d(&t[0], 2, 2, 0)),
        case(Op::MaxPool2d, "3/2/1", &[&[1, 2, 7, 5]], |t| ops::max_pool2d(&t[0], 3, 2, 1)),
        case(Op::MaxPool2d, "oblong", &[&[1, 2, 7, 5]], |t| {
            ops::max_pool2d(&t[0], (3, 2), (1, 2), (1, 0))
        }),
        case(Op::AvgPool2d, "3/2/1", &[&[2, 2, 7, 5]], |t| ops::avg_pool2d(&t[0], 3, 2, 1)),
        case(Op::AvgPool2d, "2/1", &[&[1, 3, 4, 5]], |t| ops::avg_pool2d(&t[0], 2, 1, 0)),
        case(Op::AvgPool2d, "adaptive", &[&[2, 2, 7, 5]], |t| {
            ops::adaptive_avg_pool2d(&t[0], (3, 4))
        }),
        case(Op::AvgPool2d, "adaptive, up", &[&[1, 2, 3, 4]], |t| {
            ops::adaptive_avg_pool2d(&t[0], 5)
        }),
        case(Op::AvgPool2d, "adaptive, last", &[&[2, 7, 5, 2]], |t| {
            channels_last::adaptive_avg_pool2d(&t[0], (3, 4))
        }),
        case(Op::MaxPool2d, "adaptive", &[&[2, 2, 7, 5]], |t| {
            ops::adaptive_max_pool2d(&t[0], (3, 4))
        }),
        case(Op::MaxPool2d, "adaptive, up", &[&[1, 2, 3, 4]], |t| {
            ops::adaptive_max_pool2d(&t[0], 5)
        }),
        case(Op::MaxPool2d, "adaptive, last", &[&[2, 7, 5, 2]], |t| {
            channels_last::adaptive_max_pool2d(&t[0], (3, 4))
        }),
        case(Op::GlobalAvgPool2d, "global", &[&[2, 3, 5, 7]], |t| ops::global_avg_pool2d(&t[0])),
        case(
            Op::Conv2d,
            "last",
            &[&[2, 6, 5, 3], &[4, 3, 3, 3], &[4]],
            conv_last(config(1, 1, 1, 1)),
        ),
        case(Op::Conv2d, "last, stride 2, groups", &[&[2, 7, 6, 4], &[6, 2, 3, 3]], {
            conv_last(config(2, 1, 1, 2))
        }),
        case(Op::Conv2d, "last, dilated", &[&[1, 8, 7, 2], &[2, 2, 3, 2], &[2]], {
            conv_last(config(1, 1, 2, 1))
        }),
        case(Op::BatchNorm, "last, train", &[&[4, 2, 5, 3], &[3], &[3]], |t| {
            Ok(channels_last::batch_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-3)?.0)
        })
        .within(6.0),
        case(
            Op::BatchNormRelu,
            "last, residual",
            &[&[4, 2, 5, 3], &[4, 2, 5, 3], &[3], &[3]],
            |t| {
                let (weight, bias) = (Some(&t[2]), Some(&t[3]));
                Ok(channels_last::batch_norm_relu(&t[0], weight, bias, Some(&t[1]), 1e-3)?.0)
            },
        )
        .within(6.0),
        case(Op::BatchNormRelu6, "last, train", &[&[4, 2, 5, 3], &[3], &[3]], |t| {
            let weight = (&t[1] * 9.0)?;
            Ok(channels_last::batch_norm_relu6(&t[0], Some(&weight), Some(&t[2]), 1e-3)?.0)
        })
        .within(6.0),
        case(Op::BatchNorm, "last, eval", &[&[4, 2, 5, 3], &[3], &[3]], move |t| {
            let [mean, var] = statistics(t)?;
            channels_last::batch_norm_eval(&t[0], &mean, &var, t.get(1), t.get(2), 1e-3)
        }),
        case(Op::MaxPool2d, "last", &[&[1, 7, 5, 2]], |t| {
            channels_last::max_pool2d(&t[0], (3, 2), (1, 2), (1, 0))
        }),
        case(Op::AvgPool2d, "last", &[&[2, 7, 5, 2]], |t| {
            channels_last::avg_pool2d(&t[0], 3, 2, 1)
        }),
        case(Op::GlobalAvgPool2d, "last", &[&[2, 5, 7, 3]], |t| {
            channels_last::global_avg_pool2d(&t[0])
        }),
        case(Op::Flatten, "flatten", &[&[2, 3, 2, 2]], |t| ops::flatten(&t[0])),
    ]
}
