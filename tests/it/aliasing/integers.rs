//! Class indices, ids, conditions and masks in every layout, and of sizes 0 and 1.

use std::rc::Rc;

use candle_amp::{Op, ops};
use candle_core::{DType, Device, Result, Tensor};

use super::layouts::{LAYOUTS, Layout};
use super::sizes::{Attempt, attempt, compare, cut, cuts};
use super::{Faults, outcome_of};
use crate::cases::Case;
use crate::util::{FLOATS, assert_same, random};

const INTEGERS: [DType; 3] = [DType::U8, DType::U32, DType::I64];

/// What takes integers first, and then numbers.
type Function = Rc<dyn Fn(&Tensor, &[Tensor]) -> Result<Tensor>>;

struct Taker {
    name: &'static str,
    integers: Tensor,
    dtypes: &'static [DType],
    dims: Vec<Vec<usize>>,
    f: Function,
}

fn taker(
    name: &'static str,
    integers: &Tensor,
    dims: &[&[usize]],
    f: impl Fn(&Tensor, &[Tensor]) -> Result<Tensor> + 'static,
) -> Taker {
    let dims = dims.iter().map(|dims| dims.to_vec()).collect();
    Taker { name, integers: integers.clone(), dtypes: &INTEGERS, dims, f: Rc::new(f) }
}

/// Integers from 1 on: what lies around a view is 0, or half of a number, so that reading it shows.
fn integers(dims: &[usize], most: usize) -> Tensor {
    let count: usize = dims.iter().product();
    let values = (0..count).map(|at| (1 + at * at % most) as f64).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

fn takers() -> Vec<Taker> {
    let targets = integers(&[6], 4);
    let batches = integers(&[2, 3], 4);
    let choice = integers(&[4, 6], 3);
    let choice = choice.lt(3f64).and_then(|x| x.to_dtype(DType::F64)).unwrap();
    let mask = choice.reshape((2, 3, 4)).unwrap();
    let mut all = vec![
        taker("embedding", &integers(&[3, 4, 2], 6), &[&[7, 5]], |ids, t| {
            ops::embedding(ids, &t[0])
        }),
        taker("cross_entropy", &targets, &[&[6, 5]], |y, t| ops::cross_entropy(&t[0], y)),
        taker("cross_entropy_smoothed", &targets, &[&[6, 5]], |y, t| {
            ops::cross_entropy_smoothed(&t[0], y, 0.1)
        }),
        taker("nll", &targets, &[&[6, 5]], |y, t| ops::nll(&t[0], y)),
        taker("linear_cross_entropy", &targets, &[&[6, 9], &[5, 9], &[5]], |y, t| {
            ops::linear_cross_entropy(&t[0], &t[1], Some(&t[2]), y)
        }),
        taker("linear_cross_entropy, 3-D", &batches, &[&[2, 3, 9], &[5, 9]], |y, t| {
            ops::linear_cross_entropy_smoothed(&t[0], &t[1], None, y, 0.1)
        }),
        taker("where_cond", &choice, &[&[4, 6], &[4, 6]], |c, t| ops::where_cond(c, &t[0], &t[1])),
        taker("where_cond, broadcast", &choice, &[&[2, 4, 6], &[6]], |c, t| {
            ops::where_cond(c, &t[0], &t[1])
        }),
        taker("binary_cross_entropy", &choice, &[&[4, 6]], |y, t| {
            ops::binary_cross_entropy(&ops::sigmoid(&t[0])?, y)
        }),
        taker("binary_cross_entropy_with_logit", &choice, &[&[4, 6]], |y, t| {
            ops::binary_cross_entropy_with_logit(&t[0], y)
        }),
    ];
    let heads: &[&[usize]] = &[&[2, 2, 3, 8], &[2, 2, 4, 8], &[2, 2, 4, 5]];
    type Attend = fn(&Tensor, &[Tensor]) -> Result<Tensor>;
    let attend: [(&str, Attend); 2] = [
        ("sdpa", |mask, t| ops::sdpa(&t[0], &t[1], &t[2], Some(&mask.unsqueeze(1)?), false, 0.5)),
        ("sdpa_softcapped", |mask, t| {
            let mask = mask.unsqueeze(1)?;
            ops::sdpa_softcapped(&t[0], &t[1], &t[2], Some(&mask), false, 0.5, 2.0)
        }),
    ];
    let masked = |(name, f)| Taker { dtypes: &[DType::U8], ..taker(name, &mask, heads, f) };
    all.extend(attend.map(masked));
    all
}

#[test]
fn integers_may_lie_in_any_layout() -> Result<()> {
    for Taker { name, integers, dtypes, dims, f } in takers() {
        for layout in LAYOUTS {
            let stored = layout.store(&integers)?;
            for &integer in dtypes {
                let view = layout.view(&stored.to_dtype(integer)?, integers.dims())?;
                let copy = view.force_contiguous()?;
                if !matches!(layout, Layout::First | Layout::Last) {
                    let wanted = integers.to_dtype(integer)?;
                    assert_same(&format!("{name}, {layout:?}"), &copy, &wanted);
                }
                for dtype in [DType::F32, DType::BF16] {
                    let numbers = (0..).zip(&dims).map(|(i, dims)| random(i, dims.clone(), dtype));
                    let numbers: Vec<Tensor> = numbers.collect();
                    let [got, expected] =
                        [&view, &copy].map(|integers| outcome_of(&numbers, |t| f(integers, t)));
                    let (got, expected) = (got?, expected?);
                    let what = format!("{name}, {layout:?}, {integer:?}, {dtype:?}");
                    assert_same(&what, &got.output, &expected.output);
                    for (number, gradients) in
                        got.gradients.iter().zip(&expected.gradients).enumerate()
                    {
                        let (Some(got), Some(expected)) = gradients else {
                            panic!("{what}: no gradient {number}");
                        };
                        assert_same(&format!("{what}, gradient {number}"), got, expected);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Beside numbers that are cut as well, or refused. Zeros are classes where there is but one.
#[test]
fn integers_may_be_of_size_0_and_1_or_are_refused() -> Result<()> {
    let (mut faults, mut taken) = (Faults::default(), 0);
    for Taker { name, integers, dtypes, dims, f } in takers() {
        let numbers = (0..).zip(&dims).map(|(i, dims)| random(i, dims.clone(), DType::F64));
        let all: Vec<Tensor> = std::iter::once(integers.clone()).chain(numbers).collect();
        for (old, new, only) in cuts(&all) {
            for (&integer, zeros) in dtypes.iter().flat_map(|dtype| [(dtype, false), (dtype, true)])
            {
                let mut all = all.clone();
                all[0] = if zeros { integers.zeros_like()? } else { integers.clone() };
                all[0] = all[0].to_dtype(integer)?;
                let all = cut(&all, old, new, only)?;
                let of = |integers: Tensor| {
                    let f = f.clone();
                    let f = Box::new(move |t: &[Tensor]| f(&integers, t));
                    // Of which operator, only the name below says.
                    Case { op: Op::Add, name, inputs: all[1..].to_vec(), f, roundings: 8.0 }
                };
                let (view, copy) = (of(all[0].clone()), of(all[0].force_contiguous()?));
                let exact = attempt(&copy, &copy.inputs, DType::F64, true);
                taken += usize::from(matches!(exact, Attempt::Taken(_)));
                let shapes: Vec<_> = all.iter().map(|x| x.dims().to_vec()).collect();
                for dtype in FLOATS {
                    for (case, copied) in [(&copy, true), (&view, false)] {
                        let got = attempt(case, &case.inputs, dtype, copied);
                        let what = format!("{name}, {integer:?} {zeros} {shapes:?}, {dtype:?}");
                        compare(&mut faults, &what, case, dtype, &got, &exact);
                    }
                }
            }
        }
    }
    faults.none();
    assert!(taken > 300, "{taken}");
    Ok(())
}
