//! Losses of pairs of elements.

use candle_amp::nn::{
    BceLoss, BceWithLogitsLoss, HuberLoss, KlDivLoss, L1Loss, MseLoss, Reduction, SmoothL1Loss,
};
use candle_amp::{Autocast, ops};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::{REDUCTIONS, double, gradient, near, weighted};
use crate::bad_input::assert_says;
use crate::util::{FLOATS, assert_close, random, to_vec};

/// A loss of two tensors, and what it is of two F64 ones by candle's operators.
struct Pair {
    name: &'static str,
    ours: fn(&Tensor, &Tensor, Reduction) -> Result<Tensor>,
    exact: fn(&Tensor, &Tensor) -> Result<Tensor>,
    /// Whether the first or the second are probabilities.
    probabilities: [bool; 2],
}

fn pairs() -> Vec<Pair> {
    fn bce(p: &Tensor, b: &Tensor) -> Result<Tensor> {
        let (other, absent) = (p.affine(-1.0, 1.0)?, b.affine(-1.0, 1.0)?);
        ((b * p.log()?)? + (absent * other.log()?)?)?.neg()
    }
    let plain = [false, false];
    vec![
        Pair {
            name: "mse",
            ours: |a, b, reduction| MseLoss { reduction }.forward(a, b),
            exact: |a, b| a.sub(b)?.sqr(),
            probabilities: plain,
        },
        Pair {
            name: "l1",
            ours: |a, b, reduction| L1Loss { reduction }.forward(a, b),
            exact: |a, b| a.sub(b)?.abs(),
            probabilities: plain,
        },
        Pair {
            name: "huber",
            ours: |a, b, reduction| HuberLoss { delta: 0.25, reduction }.forward(a, b),
            exact: |a, b| {
                let d = a.sub(b)?.abs()?;
                let far = d.affine(0.25, -0.25 * 0.125)?;
                d.gt(0.25)?.where_cond(&far, &(d.sqr()? * 0.5)?)
            },
            probabilities: plain,
        },
        Pair {
            name: "smooth l1",
            ours: |a, b, reduction| SmoothL1Loss { beta: 0.25, reduction }.forward(a, b),
            exact: |a, b| {
                let d = a.sub(b)?.abs()?;
                let far = d.affine(1.0, -0.125)?;
                d.gt(0.25)?.where_cond(&far, &(d.sqr()? * 2.0)?)
            },
            probabilities: plain,
        },
        Pair {
            name: "bce",
            ours: |a, b, reduction| BceLoss { reduction }.forward(a, b),
            exact: bce,
            probabilities: [true, true],
        },
        Pair {
            name: "bce with logits",
            ours: |a, b, reduction| {
                BceWithLogitsLoss { reduction, ..Default::default() }.forward(a, b)
            },
            exact: |a, b| bce(&a.neg()?.exp()?.affine(1.0, 1.0)?.recip()?, b),
            probabilities: [false, true],
        },
        Pair {
            name: "kl",
            ours: |a, b, reduction| KlDivLoss { reduction, log_target: false }.forward(a, b),
            exact: |a, b| b * b.log()?.sub(a)?,
            probabilities: [false, true],
        },
        Pair {
            name: "kl of logarithms",
            ours: |a, b, reduction| KlDivLoss { reduction, log_target: true }.forward(a, b),
            exact: |a, b| b.exp()? * b.sub(a)?,
            probabilities: plain,
        },
    ]
}

#[test]
fn losses_of_pairs_with_every_reduction() -> candle_amp::Result<()> {
    for Pair { name, ours, exact, probabilities } in pairs() {
        for (dtype, reduction) in FLOATS.into_iter().flat_map(|d| REDUCTIONS.map(|r| (d, r))) {
            let what = format!("{name} {dtype:?} {reduction:?}");
            let input = |seed, probability: bool| -> Result<Var> {
                // Strided, and of odd sizes.
                let x = random(seed, (3, 7), DType::F64).t()?;
                let x = if probability { x.affine(0.25, 0.5)? } else { x };
                Var::from_tensor(&x.to_dtype(dtype)?)
            };
            let (a, b) = (input(1, probabilities[0])?, input(2, probabilities[1])?);
            let loss = ours(&a, &b, reduction)?;
            let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
            assert_eq!(loss.dtype(), wide, "{what}");
            let (wide_a, wide_b) =
                (Var::from_tensor(&double(&a)?)?, Var::from_tensor(&double(&b)?)?);
            let terms = exact(&wide_a, &wide_b)?;
            let expected = match reduction {
                Reduction::Mean => terms.mean_all()?,
                Reduction::Sum => terms.sum_all()?,
                Reduction::None => terms,
            };
            assert_close(&what, &loss, &expected, wide, 16.0);
            if name != "bce" {
                let cast = Autocast::new(DType::F16).scope(|| ours(&a, &b, reduction))?;
                assert_close(&what, &cast, &expected, wide, 16.0);
            }
            let grads = weighted(&expected)?.backward()?;
            for (ours, exact) in [(&a, &wide_a), (&b, &wide_b)] {
                let expected = grads.get(exact).expect("a gradient");
                assert_close(&what, &gradient(&loss, ours)?, expected, dtype, 8.0);
            }
        }
        let empty = random(1, (0, 3), DType::F32);
        assert!(ours(&empty, &empty, Reduction::Mean).is_err());
        let sum = ours(&empty, &empty, Reduction::Sum)?;
        assert_eq!(to_vec(&sum), [0.0], "{name}");
        let other = random(2, (3, 3), DType::F32);
        assert_says(ours(&empty, &other, Reduction::None), &["target has shape"]);
    }
    // A scope of 16 bits refuses these, whatever becomes of them.
    let p = random(1, 5, DType::F32).affine(0.25, 0.5)?;
    for reduction in REDUCTIONS {
        let refused = Autocast::new(DType::BF16).scope(|| BceLoss { reduction }.forward(&p, &p));
        assert_says(refused, &["refuses"]);
    }
    Ok(())
}

#[test]
fn positive_targets_weigh_more() -> candle_amp::Result<()> {
    for (dtype, reduction) in FLOATS.into_iter().flat_map(|d| REDUCTIONS.map(|r| (d, r))) {
        let logits = Var::from_tensor(&(random(1, (7, 3), dtype) * 4.0)?)?;
        let target = random(2, (7, 3), dtype).affine(0.5, 0.5)?;
        let pos_weight = random(3, 3, DType::F32).affine(0.5, 1.5)?;
        let loss = BceWithLogitsLoss { pos_weight: Some(pos_weight.clone()), reduction };
        let value = loss.forward(&logits, &target)?;
        let (x, t) = (Var::from_tensor(&double(&logits)?)?, double(&target)?);
        let soft = |x: &Tensor| x.exp()?.affine(1.0, 1.0)?.log();
        let positive = t.broadcast_mul(&double(&pos_weight)?)?;
        let terms = ((positive * soft(&x.neg()?)?)? + (t.affine(-1.0, 1.0)? * soft(&x)?)?)?;
        let expected = match reduction {
            Reduction::Mean => terms.mean_all()?,
            Reduction::Sum => terms.sum_all()?,
            Reduction::None => terms,
        };
        let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
        let what = format!("{dtype:?} {reduction:?}");
        assert_close(&what, &value, &expected, wide, 16.0);
        let grads = weighted(&expected)?.backward()?;
        let gradient = gradient(&value, &logits)?;
        assert_close(&what, &gradient, grads.get(&x).expect("a gradient"), dtype, 8.0);
        let cast = Autocast::new(DType::BF16).scope(|| loss.forward(&logits, &target))?;
        assert_close(&what, &cast, &expected, wide, 16.0);
    }
    let logits = random(1, (7, 3), DType::F32);
    let weigh = |pos_weight: &Tensor, target: &Tensor| {
        let pos_weight = Some(pos_weight.clone());
        BceWithLogitsLoss { pos_weight, ..Default::default() }.forward(&logits, target)
    };
    let (one, tracked) = (Tensor::ones(3, DType::F32, &Device::Cpu)?, Var::from_tensor(&logits)?);
    assert_says(weigh(&logits.t()?, &logits), &["pos_weight has shape [3, 7]"]);
    assert_says(weigh(&one, &tracked), &["target is tracked"]);
    assert_says(weigh(&tracked, &logits), &["pos_weight is tracked"]);
    let integers = logits.ge(0f32)?;
    assert_close(
        "integers",
        &weigh(&one, &integers)?,
        &ops::binary_cross_entropy_with_logit(&logits, &integers)?,
        DType::F32,
        4.0,
    );
    Ok(())
}

/// PyTorch 2.15's numbers, in F64.
#[test]
fn losses_of_pairs_are_pytorchs() -> Result<()> {
    let logits = Var::new(&[0.5f64, -1.0, 2.0], &Device::Cpu)?;
    let target = Tensor::new(&[1f64, 0.25, 0.0], &Device::Cpu)?;
    let pos_weight = Some(Tensor::new(&[3f64, 0.5, 2.0], &Device::Cpu)?);
    let loss = BceWithLogitsLoss { pos_weight, ..Default::default() }.forward(&logits, &target)?;
    near("binary", &loss, &[1.316087646720579]);
    let expected = [-0.37754066879814535, 0.036774581232915236, 0.29359902599262744];
    near("its gradient", loss.backward()?.get(&logits).expect("a gradient"), &expected);

    let x = Tensor::new(&[0.5f64, -1.0, 2.0, 0.1], &Device::Cpu)?;
    let y = Tensor::new(&[1.0f64, 0.25, -0.5, 0.1], &Device::Cpu)?;
    let smooth = |reduction| SmoothL1Loss { beta: 0.75, reduction }.forward(&x, &y);
    near("smooth l1", &smooth(Reduction::Mean)?, &[0.7916666666666667]);
    near("each", &smooth(Reduction::None)?, &[0.16666666666666666, 0.875, 2.125, 0.0]);
    let student = Tensor::new(&[0.2f64, 0.5, 0.3], &Device::Cpu)?.log()?;
    let teacher = Tensor::new(&[0.5f64, 0.0, 0.5], &Device::Cpu)?;
    near("kl", &ops::kl_div(&student, &teacher)?, &[0.2378527259400243]);
    let each = KlDivLoss { reduction: Reduction::None, ..Default::default() };
    let expected = [0.4581453659370775, 0.0, 0.2554128118829954];
    near("each", &each.forward(&student, &teacher)?, &expected);
    assert_says(SmoothL1Loss { beta: 0.0, ..Default::default() }.forward(&x, &y), &["beta is 0"]);
    assert_says(HuberLoss { delta: 0.0, ..Default::default() }.forward(&x, &y), &["delta is 0"]);
    Ok(())
}

/// `ln(1 - p)` has the digits of a small `p`.
#[test]
fn probabilities_near_zero_keep_their_digits() -> Result<()> {
    let p = Tensor::new(&[1e-6f32, 1e-7, 2e-8, 0.3, 0.7], &Device::Cpu)?;
    let target = Var::zeros(5, DType::F32, &Device::Cpu)?;
    let loss = BceLoss { reduction: Reduction::None }.forward(&p, &target)?;
    let slope = to_vec(loss.sum_all()?.backward()?.get(&target).expect("a gradient"));
    for ((p, loss), slope) in to_vec(&p).into_iter().zip(to_vec(&loss)).zip(slope) {
        let expected = -(-p).ln_1p();
        let near = |a: f64, b: f64| (a - b).abs() <= 4.0 * f64::from(f32::EPSILON) * b.abs();
        assert!(near(loss, expected), "{p}: {loss} not {expected}");
        assert!(near(slope, -p.ln() - expected), "{p}: {slope}");
    }
    Ok(())
}
