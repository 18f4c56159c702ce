//! How far a method in 16 bits is from the same in F64, forward and backward, on inputs that 16 bits hold.

use candle_core::{DType, Device, Result, Tensor, Var};

use super::Row;
use crate::util::{epsilon, random, to_vec};

/// Uniform numbers of `dims`.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) dims: &'static [usize],
    pub(super) low: f64,
    pub(super) high: f64,
}

/// Better ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Verdict {
    /// No gradient, of a function that is constant nearly everywhere.
    Constant,
    Exact,
    /// Each element is within one epsilon of the exact one, relative to itself.
    OneRounding,
    /// Within 8 epsilons.
    FewRoundings,
    ManyRoundings,
    /// One of the three, by processor.
    Varies,
    /// Infinite or NaN, where 16 bits hold the exact result.
    NotFinite,
    /// No gradient, and no error.
    Silent,
    /// Not the derivative, in F64 either.
    Wrong,
    Error,
}

impl Verdict {
    pub(super) fn is_safe(self) -> bool {
        self <= Verdict::OneRounding
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Verdict::Constant => "none: it is 0",
            Verdict::Exact => "exact",
            Verdict::OneRounding => "one rounding",
            Verdict::FewRoundings => "few roundings",
            Verdict::ManyRoundings => "many roundings",
            Verdict::Varies => "varies",
            Verdict::NotFinite => "not finite",
            Verdict::Silent => "none, without an error",
            Verdict::Wrong => "wrong, in F32 too",
            Verdict::Error => "an error",
        }
    }
}

/// Of the result and of the gradient, the worst of all probes; the gradient's is `None` where the result has none.
pub(super) fn measure(row: &Row, dtype: DType) -> (Verdict, Option<Verdict>) {
    let all: Vec<_> = row.probes.iter().map(|probe| one(row, probe, dtype)).collect();
    let forward = all.iter().map(|(forward, _)| *forward).max().expect("a probe");
    (forward, all.iter().filter_map(|(_, gradient)| *gradient).max())
}

fn one(row: &Row, probe: &[Input], dtype: DType) -> (Verdict, Option<Verdict>) {
    let exact: Vec<Tensor> = (1..)
        .zip(probe)
        .map(|(seed, input)| {
            let unit = random(seed, input.dims, DType::F64);
            let (middle, reach) = ((input.low + input.high) / 2.0, (input.high - input.low) / 2.0);
            let x = unit.affine(reach, middle).and_then(|x| x.to_dtype(dtype));
            x.and_then(|x| x.to_dtype(DType::F64)).expect("numbers")
        })
        .collect();
    let run = |f: fn(&[Tensor]) -> Result<Tensor>, dtype: DType| -> Result<(Vec<Var>, Tensor)> {
        let of = |x: &Tensor| Var::from_tensor(&x.to_dtype(dtype)?);
        let vars = exact.iter().map(of).collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        Ok((vars, f(&tensors)?))
    };
    let (wide_vars, wide) = run(row.wide, DType::F64).expect("F64");
    let Ok((vars, y)) = run(row.f, dtype) else { return (Verdict::Error, None) };
    let forward = compare(&y, &wide, dtype);
    if !y.dtype().is_float() {
        return (forward, None);
    }
    let weights = random(99, y.shape(), DType::F64).to_dtype(dtype).expect("weights");
    let Some(gradients) = gradients(&vars, &y, &weights) else {
        return (forward, Some(Verdict::Error));
    };
    let wide_gradients = self::gradients(&wide_vars, &wide, &weights).expect("F64 too");
    let verdicts = gradients.iter().zip(&wide_gradients).enumerate().map(|(number, pair)| {
        let slopes = Slopes::of(row, &exact, number, &weights);
        match pair {
            (Some(gradient), Some(wide)) if slopes.are(wide) => compare(gradient, wide, dtype),
            (Some(_), _) => Verdict::Wrong,
            (None, _) if slopes.vanish() => Verdict::Constant,
            (None, _) => Verdict::Silent,
        }
    });
    (forward, verdicts.max())
}

/// The gradients of the weighted sum of `y`, which reach it as the weights; `None` if backward is an error.
fn gradients(vars: &[Var], y: &Tensor, weights: &Tensor) -> Option<Vec<Option<Tensor>>> {
    let weights = weights.to_dtype(y.dtype()).expect("weights");
    let loss = (y * weights).and_then(|y| y.sum_all()).expect("a loss");
    let store = loss.backward().ok()?;
    Some(vars.iter().map(|var| store.get(var).cloned()).collect())
}

/// Differences of the weighted sum over an element of an input, at some elements.
struct Slopes(Vec<(usize, f64)>);

impl Slopes {
    fn of(row: &Row, exact: &[Tensor], number: usize, weights: &Tensor) -> Self {
        let weights = weights.to_dtype(DType::F64).expect("weights");
        let step = f64::EPSILON.cbrt();
        let x = to_vec(&exact[number]);
        let value = |at: usize, by: f64| {
            let (mut inputs, mut x) = (exact.to_vec(), x.clone());
            x[at] += by;
            inputs[number] =
                Tensor::from_vec(x, exact[number].shape(), &Device::Cpu).expect("as many");
            to_vec(&((row.wide)(&inputs).expect("F64") * &weights).expect("weights"))
                .iter()
                .sum::<f64>()
        };
        let some = (0..x.len()).step_by(x.len().div_ceil(6));
        Self(some.map(|at| (at, (value(at, step) - value(at, -step)) / (2.0 * step))).collect())
    }

    fn are(&self, gradient: &Tensor) -> bool {
        let gradient = to_vec(gradient);
        self.0
            .iter()
            .all(|(at, slope)| (gradient[*at] - slope).abs() <= 1e-3 * slope.abs().max(0.1))
    }

    fn vanish(&self) -> bool {
        self.0.iter().all(|(_, slope)| *slope == 0.0)
    }
}

fn compare(actual: &Tensor, expected: &Tensor, dtype: DType) -> Verdict {
    // A BF16 instruction may flush what is below the smallest normal number.
    let (largest, least) = match dtype {
        DType::F16 => (65504.0, 2f64.powi(-24)),
        _ => (f64::from(half::bf16::MAX), 2f64.powi(-126)),
    };
    assert_eq!(actual.dims(), expected.dims());
    let off = |(a, e): (f64, f64)| {
        if a == e || (!a.is_finite() && e.abs() > largest) {
            return 0.0;
        }
        if a.is_finite() {
            (a - e).abs() / (epsilon(dtype) * e.abs() + least)
        } else {
            f64::INFINITY
        }
    };
    let worst = to_vec(actual).into_iter().zip(to_vec(expected)).map(off).fold(0.0, f64::max);
    match worst {
        0.0 => Verdict::Exact,
        0.0..=1.0 => Verdict::OneRounding,
        1.0..=8.0 => Verdict::FewRoundings,
        f64::INFINITY => Verdict::NotFinite,
        _ => Verdict::ManyRoundings,
    }
}
