//! Operators as a user of the crate writes them, by candle's arithmetic.

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::{Cast, Op};
use candle_core::{Error, Result, Tensor};

use super::super::program::Row;
use super::{alone, pairs, row};

const EXPONENTIAL: Op = Op::user("user_exponential", Cast::Full);
const PRODUCT: Op = Op::user("user_product", Cast::Promote);

/// `exp(x)`, whose backward reads the output.
struct Exponential;

impl Operator for Exponential {
    type Saved = ();

    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        EXPONENTIAL
    }

    fn reads(&self, _: usize, _: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].exp()?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let output = ctx.output.expect("it is kept");
        Ok(vec![Some(Gradient::owned((output * ctx.gradient)?))])
    }
}

/// `a * b`, whose backward reads what forward saved.
struct Product;

impl Operator for Product {
    type Saved = [Tensor; 2];

    fn op(&self) -> Op {
        PRODUCT
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let saved = [inputs[0].clone(), inputs[1].clone()];
        Ok(((&inputs[0] * &inputs[1])?, saved))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let [a, b] = ctx.saved;
        let of = |input: usize, other: &Tensor| match ctx.wants[input] {
            Some(_) => Ok::<_, Error>(Some(Gradient::owned((ctx.gradient * other)?))),
            None => Ok(None),
        };
        Ok(vec![of(0, b)?, of(1, a)?])
    }
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(EXPONENTIAL),
            "user_exponential",
            alone,
            |t, _| apply(Exponential, &[&t[0]]),
            |tape, x, _| {
                tape.backward *= 3.0;
                x[0].each(|x| tape.kinked(x, &[], |x| (x.exp(), x.exp())))
            },
        )
        .rounded(),
        row(
            Some(PRODUCT),
            "user_product",
            |d, x| {
                let dims = d.dims(x);
                Some((vec![x, d.operand(&dims)?], vec![]))
            },
            |t, _| apply(Product, &[&t[0], &t[1]]),
            |tape, x, a| {
                tape.backward *= 3.0;
                pairs::mul(tape, x, a)
            },
        )
        .rounded(),
    ]
}
