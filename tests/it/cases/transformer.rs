//! Norms of rows, embedding, attention.

use candle_amp::{Op, ops};
use candle_core::{DType, Device, Result, Tensor};

use super::{Case, case};
use crate::util::random;

/// With the first input, cosines and sines of angles of the given shape.
fn turn(
    t: &[Tensor],
    rope: fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    angles: &[usize],
) -> Result<Tensor> {
    let angles = random(3, angles, DType::F64).to_device(t[0].device())?;
    // As exact as the input needs them.
    let dtype = if t[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    rope(&t[0], &angles.cos()?.to_dtype(dtype)?, &angles.sin()?.to_dtype(dtype)?)
}

pub(super) fn cases() -> Vec<Case> {
    let ids = |ids: &[i64], dims: &[usize]| {
        Tensor::new(ids, &Device::Cpu).unwrap().reshape(dims).unwrap()
    };
    // One number three times, one never.
    let named = ids(&[2, 0, 2, 4, 1, 2], &[2, 3]);
    let many = ids(&(0..70).map(|i| i % 7 % 3).collect::<Vec<_>>(), &[70]);
    let one = ids(&[0], &[1, 1]).to_dtype(DType::U8).unwrap();
    let keep = Tensor::new(&[[1u8, 0, 1, 1], [0, 1, 1, 0], [1, 1, 0, 0]], &Device::Cpu).unwrap();
    let embed = |ids: &Tensor, t: &[Tensor]| -> Result<Tensor> {
        ops::embedding(&ids.to_device(t[0].device())?, &t[0])
    };
    let attend = |t: &[Tensor], mask: Option<&Tensor>, causal| -> Result<Tensor> {
        ops::sdpa(&t[0], &t[1], &t[2], mask, causal, 0.75)
    };
    vec![
        case(Op::LayerNorm, "affine", &[&[2, 3, 9], &[9], &[9]], |t| {
            ops::layer_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-3)
        })
        .within(6.0),
        case(Op::LayerNorm, "plain", &[&[5, 7]], |t| ops::layer_norm(&t[0], None, None, 1e-3))
            .within(6.0),
        case(Op::LayerNorm, "bias only", &[&[5, 7], &[7]], |t| {
            ops::layer_norm(&t[0], None, Some(&t[1]), 1e-3)
        })
        .within(6.0),
        case(Op::LayerNorm, "one a row", &[&[5, 1], &[1], &[1]], |t| {
            ops::layer_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-3)
        })
        .within(6.0),
        case(Op::LayerNorm, "past a panel", &[&[67, 3], &[3]], |t| {
            ops::layer_norm(&t[0], Some(&t[1]), None, 1e-3)
        })
        .within(6.0),
        case(Op::RmsNorm, "weight", &[&[2, 3, 9], &[9]], |t| {
            ops::rms_norm(&t[0], Some(&t[1]), 1e-3)
        })
        .within(6.0),
        case(Op::RmsNorm, "plain", &[&[70, 3]], |t| ops::rms_norm(&t[0], None, 1e-3)).within(6.0),
        case(Op::GroupNorm, "affine", &[&[2, 4, 3, 2], &[4], &[4]], |t| {
            ops::group_norm(&t[0], 2, Some(&t[1]), Some(&t[2]), 1e-3)
        })
        .within(6.0),
        case(Op::GroupNorm, "plain", &[&[3, 6]], |t| ops::group_norm(&t[0], 2, None, None, 1e-3))
            .within(6.0),
        case(Op::GroupNorm, "past a run", &[&[1, 2, 70], &[2]], |t| {
            ops::group_norm(&t[0], 1, Some(&t[1]), None, 1e-3)
        })
        .within(6.0),
        case(Op::Embedding, "named twice", &[&[5, 4]], move |t| embed(&named, t)),
        case(Op::Embedding, "past a panel", &[&[3, 2]], move |t| embed(&many, t)),
        case(Op::Embedding, "one", &[&[1, 1]], move |t| embed(&one, t)),
        case(Op::Rope, "halves", &[&[2, 3, 5, 6]], |t| turn(t, ops::rope, &[7, 3])),
        case(Op::Rope, "neighbours", &[&[2, 3, 5, 6]], |t| turn(t, ops::rope_i, &[2, 5, 3])),
        case(Op::Rope, "positions first", &[&[2, 5, 3, 6]], |t| turn(t, ops::rope_thd, &[2, 6, 3])),
        case(Op::Rope, "one pair", &[&[1, 1, 1, 2]], |t| turn(t, ops::rope, &[1, 1])),
        case(Op::Sdpa, "plain", &[&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]], move |t| {
            attend(t, None, false)
        }),
        case(Op::Sdpa, "causal, grouped", &[&[1, 4, 5, 3], &[1, 2, 5, 3], &[1, 2, 5, 2]], {
            move |t| attend(t, None, true)
        }),
        case(Op::Sdpa, "one", &[&[1, 1, 1, 1], &[1, 1, 1, 1], &[1, 1, 1, 1]], move |t| {
            attend(t, None, false)
        }),
        case(Op::Sdpa, "past a block", &[&[1, 1, 67, 2], &[1, 1, 67, 2], &[1, 1, 67, 1]], {
            move |t| attend(t, None, true)
        }),
        case(Op::Sdpa, "packed", &[&[2, 5, 18]], |t| ops::sdpa_packed(&t[0], 3, true, 0.7)),
        case(Op::Sdpa, "packed, one", &[&[1, 1, 3]], |t| ops::sdpa_packed(&t[0], 1, false, 0.7)),
        case(Op::Sdpa, "choice", &[&[2, 2, 3, 4], &[2, 1, 4, 4], &[2, 1, 4, 3]], move |t| {
            attend(t, Some(&keep.to_device(t[0].device())?), false)
        }),
        case(Op::Sdpa, "added", &[&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3], &[2, 1, 5]], {
            move |t| attend(t, Some(&t[3]), true)
        }),
        case(Op::Sdpa, "soft cap", &[&[1, 2, 3, 4], &[1, 2, 5, 4], &[1, 2, 5, 3]], |t| {
            ops::sdpa_softcapped(&t[0], &t[1], &t[2], None, false, 2.0, 1.5)
        }),
    ]
}
