//! A multi-layer perceptron: two hidden layers, which see no neighbourhoods. It is fast, and the
//! accuracy that convolutions have to beat.

use candle_amp::nn::{Activation, SequentialT, seq_t};
use candle_core::Result;

use super::net::Net;
use crate::data::{CLASSES, PIXELS};

pub(super) const PAPER: &str = "";

const WIDTH: usize = 512;

pub(super) fn mlp(net: &Net) -> Result<SequentialT> {
    Ok(seq_t()
        .add(net.flatten())
        .add(net.pp("1").linear(PIXELS, WIDTH)?)
        .add(Activation::Relu)
        .add(net.pp("2").linear(WIDTH, WIDTH)?)
        .add(Activation::Relu)
        .add(net.pp("head").linear(WIDTH, CLASSES)?))
}
