//! Every operator as a function, with inputs: what the tests of gradients and of dtypes run through.

mod basic;
mod pointwise;
mod sequence;
mod sizes;
mod statistics;
#[path = "../../../src/kernels/activation/table.rs"]
pub(crate) mod table;
mod transformer;
mod vision;

use candle_amp::Op;
use candle_core::{DType, Device, Result, Tensor};

use crate::util::{random, to_vec};

pub(crate) use pointwise::ROWS;

type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An operator as a function of its differentiable inputs, and inputs for it.
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) name: &'static str,
    /// In `F64`, of values that every dtype has.
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) f: Function,
    /// How many roundings to its dtype a gradient may be away from the exact one, relative to the
    /// largest.
    pub(crate) roundings: f64,
}

impl Case {
    /// The operator on the inputs in `dtype`.
    pub(crate) fn output(&self, dtype: DType) -> Result<Tensor> {
        let cast = self.inputs.iter().map(|x| x.to_dtype(dtype)).collect::<Result<Vec<_>>>()?;
        (self.f)(&cast)
    }

    /// With `f` of each input: exact in every dtype, as the inputs are.
    pub(crate) fn on(mut self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Self {
        self.inputs = self.inputs.iter().map(|x| f(x).unwrap()).collect();
        self
    }

    /// With other than the 4 roundings that do for most (the output's gradient, the output where
    /// it is used, and the result are each rounded once): norms subtract two sums of such.
    pub(crate) fn within(self, roundings: f64) -> Self {
        Self { roundings, ..self }
    }
}

/// A file of this folder, and its cases.
type Family = (&'static str, fn() -> Vec<Case>);

const FAMILIES: [Family; 7] = [
    ("tests/it/cases/basic.rs", basic::cases),
    ("tests/it/cases/pointwise.rs", pointwise::cases),
    ("tests/it/cases/vision.rs", vision::cases),
    ("tests/it/cases/sequence.rs", sequence::cases),
    ("tests/it/cases/transformer.rs", transformer::cases),
    ("tests/it/cases/statistics.rs", statistics::cases),
    ("tests/it/cases/sizes.rs", sizes::cases),
];

/// Every case of every operator, each operator's plainest first.
pub(crate) fn all() -> Vec<Case> {
    FAMILIES.iter().flat_map(|(_, cases)| cases()).collect()
}

/// The file that has the cases of each operator.
pub(crate) fn files() -> Vec<(Op, &'static str)> {
    let ops = |(file, cases): &Family| {
        let file = *file;
        cases().into_iter().map(move |case| (case.op, file)).collect::<Vec<_>>()
    };
    FAMILIES.iter().flat_map(ops).collect()
}

pub(crate) fn case(
    op: Op,
    name: &'static str,
    dims: &[&[usize]],
    f: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    // Odd multiples of 1/128, none twice among 128: exact in every dtype, so that all dtypes see
    // the same inputs; and so far apart that a finite difference crosses no kink of a maximum.
    let inputs = dims.iter().enumerate().map(|(i, dims)| {
        let count = dims.iter().product();
        let order = to_vec(&random(7 + i as u64, 128, DType::F64).arg_sort_last_dim(true).unwrap());
        let values = (0..count).map(|at| (2.0 * order[at % 128] - 127.0) / 128.0).collect();
        Tensor::from_vec(values, *dims, &Device::Cpu).unwrap()
    });
    Case { op, name, inputs: inputs.collect(), f: Box::new(f), roundings: 4.0 }
}
