//! Functions of one number, arithmetic on two tensors.

use candle_amp::{Op, ops, random as generator};
use candle_core::Tensor;

use super::{Case, case};

pub(super) fn cases() -> Vec<Case> {
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
        curve(Op::Gelu, "gelu", ops::gelu),
        curve(Op::GeluErf, "gelu_erf", ops::gelu_erf),
        curve(Op::Silu, "silu", ops::silu),
        curve(Op::Sigmoid, "sigmoid", ops::sigmoid),
        curve(Op::Tanh, "tanh", ops::tanh),
        curve(Op::Relu6, "relu6", ops::relu6),
        curve(Op::Relu2, "relu2", ops::relu2),
        curve(Op::HardSigmoid, "hard_sigmoid", ops::hard_sigmoid),
        curve(Op::HardSwish, "hard_swish", ops::hard_swish),
        curve(Op::Mish, "mish", ops::mish),
        curve(Op::Softplus, "softplus", ops::softplus),
        curve(Op::Exp, "exp", ops::exp),
        case(Op::Log, "log", &[&[4, 9]], |t| ops::log(&t[0])).on(|x| x.abs()? + 1.0),
        case(Op::Elu, "elu", &[&[4, 9]], |t| ops::elu(&t[0], 0.75)),
        case(Op::Elu, "selu", &[&[4, 9]], |t| ops::selu(&t[0], 1.673_263_2, 1.050_701)),
        case(Op::LeakyRelu, "leaky_relu", &[&[4, 9]], |t| ops::leaky_relu(&t[0], 0.2)),
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
        case(Op::Cat, "cat", &[&[4, 2], &[4, 3]], |t| ops::cat(&[&t[0], &t[1]], 1)),
        case(Op::Cat, "five", &[&[1, 2], &[3, 2], &[2, 2], &[1, 2], &[1, 2]], |t| {
            ops::cat(&t.iter().collect::<Vec<_>>(), 0)
        }),
    ]
}

/// Of four times the input, to reach a curve's ends, in a shape past a block boundary.
fn curve(op: Op, name: &'static str, f: fn(&Tensor) -> candle_core::Result<Tensor>) -> Case {
    case(op, name, &[&[5, 7, 31]], move |t| f(&t[0])).on(|x| x * 4.0)
}

fn away_from_0(x: &Tensor) -> candle_core::Result<Tensor> {
    ops::add(x, &(x.ones_like()? * 1.5)?)
}
