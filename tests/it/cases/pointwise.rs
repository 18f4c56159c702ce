//! Functions of one number, arithmetic on two tensors.

use candle_amp::{Op, ops, random as generator};
use candle_core::{Result, Tensor};

use super::table::pointwise;
use super::{Case, case};

/// A row of the table of pointwise operators, with the parameters that it has in tests.
pub(crate) struct Row {
    pub(crate) op: Op,
    pub(crate) name: &'static str,
    /// Its name in PyTorch.
    pub(crate) torch: &'static str,
    /// Whether it takes numbers from -4 to 4, not from 1 to 2 alone.
    wide: bool,
    f: fn(&Tensor) -> Result<Tensor>,
}

macro_rules! rows {
    ([] $(
        $(#[$doc:meta])* $name:ident => $op:ident ($($parameter:ident: $type:ty = $sample:literal),*),
        $policy:tt,
        { torch: $torch:literal, reference: $reference:literal, inputs: $low:literal, $high:literal; $($rest:tt)* },
        $arithmetic:tt;
    )*) => {
        pub(crate) const ROWS: &[Row] = &[$(Row {
            op: Op::$op,
            name: stringify!($name),
            torch: $torch,
            wide: $low <= -4.0 && $high >= 4.0,
            f: |x| ops::$name(x, $($sample),*),
        }),*];
    };
}
pointwise!(rows []);

impl Row {
    /// In a shape past a block, as far as a function's ends; of one number; and as long as several blocks.
    fn cases(&'static self) -> [Case; 3] {
        let sized = |name, dims: &[usize]| case(self.op, name, &[dims], |t| (self.f)(&t[0]));
        let on = |case: Case, wide: f64| match self.wide {
            true => case.on(|x| x * wide),
            false => case.on(|x| x.abs()? + 1.0),
        };
        [
            on(sized(self.name, &[5, 7, 31]), 4.0),
            on(sized("one element", &[1, 1]), 1.0),
            on(sized("past a block", &[3, 1031]), 1.0),
        ]
    }
}

pub(super) fn cases() -> Vec<Case> {
    ROWS.iter().flat_map(Row::cases).chain(others()).collect()
}

fn others() -> Vec<Case> {
    vec![
        case(Op::Relu, "relu", &[&[4, 9]], |t| ops::relu(&t[0])),
        case(Op::Dropout, "dropout", &[&[8, 9]], |t| {
            let _fork = generator::fork_rng_guard();
            generator::manual_seed(5);
            ops::dropout(&t[0], 0.25)
        }),
        case(Op::Add, "add", &[&[4, 9], &[4, 9]], |t| ops::add(&t[0], &t[1])),
        case(Op::Add, "twice the same", &[&[4, 9]], |t| ops::add(&t[0], &t[0])),
        case(Op::AddRelu, "add_relu", &[&[4, 9], &[4, 9]], |t| {
            // A third, so that no sum is 0, where the gradient is anybody's choice.
            ops::add_relu(&t[0], &(&t[1] + 1.0 / 3.0)?)
        }),
        case(Op::Prelu, "a slope a channel", &[&[2, 3, 5], &[3]], |t| ops::prelu(&t[0], &t[1])),
        case(Op::Prelu, "one slope", &[&[7, 5], &[1]], |t| ops::prelu(&t[0], &t[1])),
        case(Op::Swiglu, "swiglu", &[&[3, 10]], |t| ops::swiglu(&t[0])),
        case(Op::Sub, "sub", &[&[4, 9], &[4, 9]], |t| ops::sub(&t[0], &t[1])),
        case(Op::Sub, "broadcast", &[&[4, 1, 3], &[5, 1]], |t| ops::sub(&t[0], &t[1])),
        case(Op::Mul, "mul", &[&[4, 9], &[4, 9]], |t| ops::mul(&t[0], &t[1])),
        case(Op::Mul, "by itself", &[&[4, 9]], |t| ops::mul(&t[0], &t[0])),
        case(Op::Mul, "broadcast", &[&[9], &[4, 9]], |t| ops::mul(&t[0], &t[1])),
        case(Op::Div, "div", &[&[4, 9], &[4, 9]], |t| ops::div(&t[0], &away_from_0(&t[1])?)),
        case(Op::Div, "broadcast", &[&[4, 9], &[4, 1]], |t| ops::div(&t[0], &away_from_0(&t[1])?)),
        case(Op::Add, "bias", &[&[4, 9], &[9]], |t| ops::add(&t[0], &t[1])),
        case(Op::Add, "both broadcast", &[&[4, 1], &[1, 9]], |t| ops::add(&t[0], &t[1])),
        case(Op::Add, "a number", &[&[4, 9], &[]], |t| ops::add(&t[0], &t[1])),
        case(Op::Maximum, "maximum", &[&[4, 9], &[4, 9]], |t| ops::maximum(&t[0], &apart(&t[1])?)),
        case(Op::Maximum, "broadcast", &[&[4, 1, 3], &[5, 1]], |t| {
            ops::maximum(&t[0], &apart(&t[1])?)
        }),
        case(Op::Minimum, "minimum", &[&[4, 9], &[4, 9]], |t| ops::minimum(&t[0], &apart(&t[1])?)),
        case(Op::Minimum, "broadcast", &[&[9], &[4, 9]], |t| ops::minimum(&t[0], &apart(&t[1])?)),
        case(Op::WhereCond, "where_cond", &[&[4, 9], &[4, 9]], |t| {
            ops::where_cond(&t[0].gt(0f64)?, &t[0], &t[1])
        }),
        case(Op::WhereCond, "broadcast", &[&[4, 1], &[]], |t| {
            ops::where_cond(&t[0].lt(0f64)?, &t[0], &t[1])
        }),
        case(Op::WhereCond, "numbers", &[&[], &[]], |t| {
            ops::where_cond(&t[0].le(0f64)?, &t[0], &t[1])
        }),
        case(Op::Cat, "cat", &[&[4, 2], &[4, 3]], |t| ops::cat(&[&t[0], &t[1]], 1)),
        case(Op::Cat, "five", &[&[1, 2], &[3, 2], &[2, 2], &[1, 2], &[1, 2]], |t| {
            ops::cat(&t.iter().collect::<Vec<_>>(), 0)
        }),
    ]
}

/// Even multiples of 1/128, so that none is equal to an input, where the gradient is shared.
fn apart(x: &Tensor) -> Result<Tensor> {
    x + 1.0 / 128.0
}

fn away_from_0(x: &Tensor) -> Result<Tensor> {
    ops::add(x, &(x.ones_like()? * 1.5)?)
}
