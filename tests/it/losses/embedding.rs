//! Losses of embeddings.

use candle_amp::Autocast;
use candle_amp::nn::{CosineEmbeddingLoss, Reduction, TripletMarginLoss};
use candle_core::{D, DType, Device, Result, Tensor, Var};

use super::{REDUCTIONS, double, gradient, near, weighted};
use crate::bad_input::assert_says;
use crate::util::{FLOATS, assert_absolute, assert_close, random, to_vec};

const ANCHOR: [[f64; 3]; 3] = [[0.5, -1.0, 2.0], [0.25, -0.75, 1.5], [1.0, 2.0, -1.0]];
const POSITIVE: [[f64; 3]; 3] = [[1.25, -0.5, 0.75], [0.5, -1.5, 2.5], [1.0, 2.0, -1.0]];
/// Close to the positive; far from both; equal to both.
const NEGATIVE: [[f64; 3]; 3] = [[1.5, -0.5, 1.0], [3.5, -4.5, 2.5], [1.0, 2.0, -1.0]];

fn var(rows: &[[f64; 3]], dtype: DType) -> Result<Var> {
    let rows = Tensor::new(rows.as_flattened(), &Device::Cpu)?.reshape(((), 3))?;
    Var::from_tensor(&rows.to_dtype(dtype)?)
}

/// PyTorch 2.15's numbers, in F64; of zeros and of equal embeddings too.
#[test]
fn cosine_embedding_loss_is_pytorchs() -> Result<()> {
    let a = [[0.5, -1.0, 2.0], [0.25, -0.75, 1.5], [0.0, 0.0, 0.0], [1.0, 2.0, -1.0]];
    let b = [[1.25, -0.5, 0.75], [0.5, -1.5, 2.5], [1.0, 0.5, -0.25], [1.0, 2.0, -1.0]];
    let (a, b) = (var(&a, DType::F64)?, var(&b, DType::F64)?);
    let loss = |reduction| CosineEmbeddingLoss { margin: 0.25, reduction };
    for dtype in [DType::I64, DType::F32, DType::F64] {
        let target = Tensor::new(&[1i64, -1, 1, -1], &Device::Cpu)?.to_dtype(dtype)?;
        let mean = loss(Reduction::Mean).forward(&a, &b, &target)?;
        near("mean", &mean, &[0.6883744077208139]);
        near("sum", &loss(Reduction::Sum).forward(&a, &b, &target)?, &[2.7534976308832557]);
        let each = loss(Reduction::None).forward(&a, &b, &target)?;
        near("each", &each, &[0.2566080583251992, 0.7468895725582233, 1.0, 0.7499999999998334]);
        let grads = mean.backward()?;
        let (da, db) = (grads.get(&a).expect("a gradient"), grads.get(&b).expect("a gradient"));
        let da = to_vec(da);
        let expected = [
            -0.0707992325404606,
            0.0,
            0.017699808135100817,
            0.0032507268670452193,
            -0.009752180601135654,
            -0.005417878111684274,
        ];
        near("first", &Tensor::new(&da[..6], &Device::Cpu)?, &expected);
        // Large, but finite. PyTorch's 1e-12 is an F32, 4e-9 less.
        let scaled: Vec<f64> = da[6..].iter().map(|x| x / 218217.8906718711).collect();
        let expected = [-1.0, -0.5, 0.25, 0.0, 0.0, 0.0];
        let (scaled, expected) =
            (Tensor::new(scaled, &Device::Cpu)?, Tensor::new(&expected, &Device::Cpu)?);
        assert_absolute("of zeros", &scaled, &expected, 4e-9);
        let expected = [
            0.06241511289746715,
            0.03167334087337892,
            -0.08290962758029699,
            -0.0017801599509952026,
            0.005340479852985608,
            0.003560319902001771,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
        ];
        near("second", db, &expected);
    }
    Ok(())
}

#[test]
fn triplet_margin_loss_is_pytorchs() -> Result<()> {
    let third = 0.19245008972987526;
    for (swap, mean, each, gradients) in [
        (
            false,
            0.3470346113585292,
            [0.5411038340755876, 0.0, 0.5],
            [
                ([0.06000084454710308, 0.002963515788253143, 0.04814675768591678], 0.0),
                ([0.1622212048354319, 0.10814739779187856, -0.27036925151299496], -third),
                ([-0.22222204938253498, -0.1111109135801317, 0.22222249382707818], third),
            ],
        ),
        (
            true,
            0.7291838414540305,
            [1.6875515243620915, 0.0, 0.5],
            [
                ([-0.1622212048354319, -0.10814739779187856, 0.27036925151299496], third / 2.0),
                ([0.3979234652300049, 0.10814645497906572, -0.03466699111842195], -1.5 * third),
                ([-0.235702260394573, 9.428128128295434e-07, -0.235702260394573], third),
            ],
        ),
    ] {
        let loss = |reduction| TripletMarginLoss { margin: 0.5, swap, reduction };
        let [a, p, n] = [&ANCHOR, &POSITIVE, &NEGATIVE].map(|rows| var(rows, DType::F64));
        let (a, p, n) = (a?, p?, n?);
        let value = loss(Reduction::Mean).forward(&a, &p, &n)?;
        near("mean", &value, &[mean]);
        near("each", &loss(Reduction::None).forward(&a, &p, &n)?, &each);
        let grads = value.backward()?;
        for (of, (first, last)) in [&a, &p, &n].into_iter().zip(gradients) {
            let expected = [first, [0.0; 3], [last; 3]].concat();
            near("gradient", grads.get(of).expect("a gradient"), &expected);
        }
    }
    Ok(())
}

/// Of 16-bit embeddings the numbers of F64, in a scope or not, and gradients in their dtype.
#[test]
fn embeddings_are_compared_in_f32() -> candle_amp::Result<()> {
    for (dtype, reduction) in FLOATS.into_iter().flat_map(|d| REDUCTIONS.map(|r| (d, r))) {
        let what = format!("{dtype:?} {reduction:?}");
        let wide = if dtype == DType::F64 { dtype } else { DType::F32 };
        // Transposed, of odd sizes, and with squares beyond F16.
        let input = |seed| Var::from_tensor(&(random(seed, (7, 5), dtype).t()? * 300.0)?);
        let (a, b, c) = (input(1)?, input(2)?, input(3)?);
        let (wide_a, wide_b, wide_c) = (double(&a)?, double(&b)?, double(&c)?);
        let target = Tensor::new(&[1i64, -1, 1, -1, 0], &Device::Cpu)?;
        let cosine = CosineEmbeddingLoss { margin: -0.5, reduction };
        let triplet = TripletMarginLoss { margin: 64.0, swap: true, reduction };
        let exact = |a: &Tensor, b: &Tensor, c: Option<&Tensor>| -> Result<Tensor> {
            let dot = |a: &Tensor, b: &Tensor| (a * b)?.sum(D::Minus1);
            let above = |x: Tensor| x.maximum(0.0);
            let terms = match c {
                None => {
                    let cosine = (dot(a, b)? / (dot(a, a)? * dot(b, b)?)?.sqrt()?)?;
                    let masks = [1.0, -1.0]
                        .map(|sign| target.to_dtype(DType::F64)?.eq(sign)?.to_dtype(DType::F64));
                    let [alike, apart] = masks;
                    ((alike? * cosine.affine(-1.0, 1.0)?)? + (apart? * above((cosine + 0.5)?)?)?)?
                }
                Some(c) => {
                    let distance = |a: &Tensor, b: &Tensor| {
                        let gap = (a.sub(b)? + 1e-6)?;
                        dot(&gap, &gap)?.sqrt()
                    };
                    let far = distance(a, c)?.minimum(&distance(b, c)?)?;
                    above(((distance(a, b)? - far)? + 64.0)?)?
                }
            };
            match reduction {
                Reduction::Mean => terms.mean_all(),
                Reduction::Sum => terms.sum_all(),
                Reduction::None => Ok(terms),
            }
        };
        for triple in [false, true] {
            let ours = || match triple {
                true => triplet.forward(&a, &b, &c),
                false => cosine.forward(&a, &b, &target),
            };
            let (x, y) = (Var::from_tensor(&wide_a)?, Var::from_tensor(&wide_b)?);
            let expected = exact(&x, &y, triple.then_some(&wide_c))?;
            let value = ours()?;
            assert_eq!(value.dtype(), wide, "{what}");
            assert_close(&what, &value, &expected, wide, 32.0);
            let cast = Autocast::new(DType::F16).scope(ours)?;
            assert_close(&what, &cast, &expected, wide, 32.0);
            let grads = weighted(&expected)?.backward()?;
            for (ours, exact) in [(&a, &x), (&b, &y)] {
                let expected = grads.get(exact).expect("a gradient");
                assert_close(&what, &gradient(&value, ours)?, expected, dtype, 32.0);
            }
        }
    }
    Ok(())
}

#[test]
fn embeddings_that_do_not_fit_are_named() -> Result<()> {
    let (x, y) = (random(1, (4, 3), DType::F32), random(2, (4, 2), DType::F32));
    let target = Tensor::new(&[1i64, -1, 1], &Device::Cpu)?;
    let cosine = CosineEmbeddingLoss::default();
    assert_says(cosine.forward(&x, &y, &target), &["cosine_embedding_loss: input2", "[4, 3]"]);
    assert_says(cosine.forward(&x, &x, &target), &["target has shape [3]", "[4]"]);
    let triplet = TripletMarginLoss::default();
    assert_says(triplet.forward(&x, &x, &y), &["triplet_margin_loss: negative"]);
    let half = x.to_dtype(DType::F16)?;
    assert_says(triplet.forward(&x, &half, &x), &["positive is F16", "F32 as the first"]);
    let none = TripletMarginLoss { margin: 0.0, ..triplet };
    assert_says(none.forward(&x, &x, &x), &["margin is 0"]);
    let empty = x.narrow(0, 0, 0)?;
    assert_says(triplet.forward(&empty, &empty, &empty), &["at least one element"]);
    Ok(())
}
