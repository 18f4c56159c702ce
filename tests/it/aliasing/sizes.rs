//! Each dimension of size 0 and 1, alone and with all that have to agree.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Result, Tensor};

use super::{Faults, Outcome, fresh, on_copies, outcome};
use crate::cases::{self, Case};
use crate::util::{FLOATS, epsilon, to_vec};

/// The inputs with every dimension of `old` elements cut to `new`, or only one of them.
pub(super) fn cut(
    inputs: &[Tensor],
    old: usize,
    new: usize,
    only: Option<(usize, usize)>,
) -> Result<Vec<Tensor>> {
    let one = |(at, x): (usize, &Tensor)| {
        let dims = x.dims().to_vec();
        let mut x = x.clone();
        for (dim, &size) in dims.iter().enumerate() {
            if size == old && only.is_none_or(|only| only == (at, dim)) {
                x = x.narrow(dim, 0, new.min(size))?;
            }
        }
        Ok(x)
    };
    inputs.iter().enumerate().map(one).collect()
}

/// An old size, a new one, and which dimension of which input alone has it, if only one has.
type Cut = (usize, usize, Option<(usize, usize)>);

/// Each size of these inputs, and each dimension alone, to 0 and to 1.
pub(super) fn cuts(inputs: &[Tensor]) -> Vec<Cut> {
    let sizes: BTreeSet<usize> = inputs.iter().flat_map(|x| x.dims().to_vec()).collect();
    let mut cuts = Vec::new();
    for new in [0, 1] {
        cuts.extend(sizes.iter().map(|&old| (old, new, None)));
        for (at, x) in inputs.iter().enumerate() {
            cuts.extend((0..x.rank()).map(|dim| (x.dims()[dim], new, Some((at, dim)))));
        }
    }
    cuts
}

pub(super) enum Attempt {
    Taken(Outcome),
    Refused(String),
    Panicked,
}

/// The operator on views that were cut, as they are or copied.
pub(super) fn attempt(case: &Case, inputs: &[Tensor], dtype: DType, copy: bool) -> Attempt {
    let cast = |x: &Tensor| x.to_dtype(dtype).expect("CPU tensors are cast");
    let inputs: Vec<Tensor> = inputs.iter().map(cast).collect();
    let run = || match copy {
        true => on_copies(case, &inputs),
        false => {
            // A part of something larger, so that what lies after it is memory of its own.
            let roots = fresh(&inputs)?;
            let wide = |root: &candle_core::Var| match root.rank() {
                0 => Ok(root.as_tensor().clone()),
                _ => Tensor::cat(&[root.as_tensor(), root.as_tensor()], 0)?.narrow(
                    0,
                    0,
                    root.dim(0)?,
                ),
            };
            let views = roots.iter().map(wide).collect::<Result<Vec<_>>>()?;
            outcome(case, &views, &roots, false)
        }
    };
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(outcome)) => Attempt::Taken(outcome),
        Ok(Err(error)) => {
            Attempt::Refused(error.to_string().lines().next().unwrap_or("").to_owned())
        }
        Err(_) => Attempt::Panicked,
    }
}

fn same(faults: &mut Faults, what: &str, got: &Tensor, exact: &Tensor, error: f64) {
    if got.dims() != exact.dims() {
        return faults.note(format!("{what}: {:?}, not {:?}", got.dims(), exact.dims()));
    }
    let (got, exact) = (to_vec(got), to_vec(exact));
    let largest = exact.iter().filter(|x| x.is_finite()).fold(0.0f64, |most, x| most.max(x.abs()));
    for (at, (got, exact)) in got.iter().zip(&exact).enumerate() {
        let equal = got == exact || got.is_nan() && exact.is_nan();
        let near = (got - exact).abs() <= error * largest.max(0.25);
        if !equal && !near {
            return faults.note(format!("{what}, {at}: {got} is not {exact}"));
        }
    }
}

pub(super) fn compare(
    faults: &mut Faults,
    what: &str,
    case: &Case,
    dtype: DType,
    got: &Attempt,
    exact: &Attempt,
) {
    let error = 2.0 * case.roundings * epsilon(dtype);
    match (got, exact) {
        (Attempt::Panicked, _) => faults.note(format!("{what}: it panicked")),
        (Attempt::Refused(_), Attempt::Refused(_)) | (_, Attempt::Panicked) => {}
        (Attempt::Refused(error), _) => faults.note(format!("{what}: {error}, but not in F64")),
        (_, Attempt::Refused(error)) => faults.note(format!("{what}: taken, but in F64 {error}")),
        (Attempt::Taken(got), Attempt::Taken(exact)) => {
            same(faults, &format!("{what}, output"), &got.output, &exact.output, error);
            for (number, both) in got.gradients.iter().zip(&exact.gradients).enumerate() {
                let what = format!("{what}, gradient {number}");
                match both {
                    (Some(gradient), Some(exact)) => same(faults, &what, gradient, exact, error),
                    (None, None) => {}
                    _ => faults.note(format!("{what}: there in one dtype alone")),
                }
            }
        }
    }
}

#[test]
fn each_dimension_may_be_of_size_0_and_1_or_is_refused() -> Result<()> {
    let mut faults = Faults::default();
    for case in cases::all() {
        for (old, new, only) in cuts(&case.inputs) {
            let inputs = cut(&case.inputs, old, new, only)?;
            let shapes: Vec<_> = inputs.iter().map(|x| x.dims().to_vec()).collect();
            let exact = attempt(&case, &inputs, DType::F64, true);
            for dtype in FLOATS {
                for copy in [true, false] {
                    let got = attempt(&case, &inputs, dtype, copy);
                    let what = format!("{:?} {}, {shapes:?}, {dtype:?}", case.op, case.name);
                    compare(&mut faults, &what, &case, dtype, &got, &exact);
                }
            }
        }
    }
    faults.none();
    Ok(())
}
