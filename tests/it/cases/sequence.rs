//! Convolution of sequences, transposed convolution, resampling, recurrent networks.

use candle_amp::ops::{self, RecurrentWeights, channels_last};
use candle_amp::{Cast, Op, nn};
use candle_core::{Result, Tensor};
use candle_nn::rnn::Direction;

use super::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    [convolutions(), transposed(), with_channels_last(), resampling(), candles(), recurrent()]
        .into_iter()
        .flatten()
        .collect()
}

fn convolutions() -> Vec<Case> {
    let conv = |stride, padding, dilation, groups| {
        let config = nn::Conv1dConfig { stride, padding, dilation, groups, ..Default::default() };
        move |t: &[Tensor]| ops::conv1d(&t[0], &t[1], t.get(2), config)
    };
    vec![
        case(Op::Conv1d, "3", &[&[2, 3, 9], &[4, 3, 3], &[4]], conv(1, 1, 1, 1)),
        case(Op::Conv1d, "stride 2", &[&[3, 2, 8], &[3, 2, 3]], conv(2, 1, 1, 1)),
        case(Op::Conv1d, "groups, dilated", &[&[2, 4, 9], &[6, 2, 3], &[6]], conv(1, 0, 2, 2)),
        case(Op::Conv1d, "a channel each", &[&[2, 3, 7], &[3, 1, 3]], conv(1, 1, 1, 3)),
        case(Op::Conv1d, "1", &[&[1, 1, 1], &[1, 1, 1], &[1]], conv(1, 0, 1, 1)),
        case(Op::Conv1d, "longer than x", &[&[2, 2, 2], &[3, 2, 5]], conv(1, 3, 1, 1)),
        // Several tiles of columns.
        case(Op::Conv1d, "long", &[&[1, 2, 1100], &[2, 2, 3]], conv(1, 1, 1, 1)),
    ]
}

fn transposed() -> Vec<Case> {
    let one = |stride, padding, output_padding, dilation, groups| {
        let config =
            nn::ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups };
        move |t: &[Tensor]| ops::conv_transpose1d(&t[0], &t[1], t.get(2), config)
    };
    let two = |stride, padding, output_padding, dilation| {
        let config = nn::ConvTranspose2dConfig { padding, output_padding, stride, dilation };
        move |t: &[Tensor]| ops::conv_transpose2d(&t[0], &t[1], t.get(2), config)
    };
    let grouped = |stride, groups| {
        let config = nn::ConvTranspose2dConfig { padding: 1, stride, ..Default::default() };
        move |t: &[Tensor]| ops::conv_transpose2d_grouped(&t[0], &t[1], t.get(2), config, groups)
    };
    let (op1, op2) = (Op::ConvTranspose1d, Op::ConvTranspose2d);
    vec![
        case(op2, "groups", &[&[2, 4, 3, 4], &[4, 3, 3, 3], &[6]], grouped(2, 2)),
        case(op2, "a channel each", &[&[2, 3, 3, 4], &[3, 1, 3, 2], &[3]], grouped(1, 3)),
        case(op2, "groups, last", &[&[2, 3, 4, 4], &[4, 3, 3, 3], &[6]], |t| {
            let config = nn::ConvTranspose2dConfig { stride: 2, ..Default::default() };
            ops::channels_last::conv_transpose2d_grouped(&t[0], &t[1], t.get(2), config, 2)
        }),
        case(op1, "3", &[&[2, 3, 7], &[3, 4, 3], &[4]], one(1, 1, 0, 1, 1)),
        case(op1, "stride 2", &[&[2, 3, 5], &[3, 2, 3], &[2]], one(2, 1, 1, 1, 1)),
        case(op1, "groups, dilated", &[&[2, 4, 5], &[4, 3, 3], &[6]], one(2, 0, 0, 2, 2)),
        case(op1, "padded far", &[&[1, 2, 5], &[2, 3, 2]], one(1, 2, 0, 1, 1)),
        case(op1, "room for more", &[&[2, 2, 3], &[2, 2, 3], &[2]], one(2, 1, 5, 4, 1)),
        case(op1, "1", &[&[1, 1, 1], &[1, 1, 1], &[1]], one(1, 0, 0, 1, 1)),
        case(op1, "far apart", &[&[1, 2, 1], &[2, 2, 2], &[2]], one(2, 3, 0, 7, 1)),
        case(op1, "far strides", &[&[2, 3, 2], &[3, 2, 3]], one(40, 1, 0, 1, 1)),
        // Most of its pixels are the bias alone, whose gradient is a sum of 231.
        case(op2, "far strides", &[&[1, 2, 2, 3], &[2, 2, 2, 3], &[2]], two(9, 0, 0, 1))
            .within(16.0),
        case(op2, "3x3", &[&[2, 3, 4, 5], &[3, 4, 3, 3], &[4]], two(1, 1, 0, 1)),
        case(op2, "stride 2", &[&[2, 3, 3, 4], &[3, 2, 3, 3], &[2]], two(2, 1, 1, 1)),
        case(op2, "oblong, dilated", &[&[1, 2, 3, 3], &[2, 2, 2, 3]], two(1, 1, 0, 2)),
        case(op2, "room for more", &[&[2, 2, 2, 3], &[2, 2, 2, 2], &[2]], two(1, 0, 1, 1)),
        case(op2, "1", &[&[1, 1, 1, 1], &[1, 1, 1, 1]], two(3, 0, 0, 1)),
    ]
}

fn with_channels_last() -> Vec<Case> {
    let conv = |stride, padding, dilation, groups| {
        let config = nn::Conv1dConfig { stride, padding, dilation, groups, ..Default::default() };
        move |t: &[Tensor]| channels_last::conv1d(&t[0], &t[1], t.get(2), config)
    };
    let one = |stride, padding, output_padding, dilation, groups| {
        let config =
            nn::ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups };
        move |t: &[Tensor]| channels_last::conv_transpose1d(&t[0], &t[1], t.get(2), config)
    };
    let two = |stride, padding, output_padding, dilation| {
        let config = nn::ConvTranspose2dConfig { padding, output_padding, stride, dilation };
        move |t: &[Tensor]| channels_last::conv_transpose2d(&t[0], &t[1], t.get(2), config)
    };
    let (op1, op2) = (Op::ConvTranspose1d, Op::ConvTranspose2d);
    vec![
        case(Op::Conv1d, "last", &[&[2, 9, 3], &[4, 3, 3], &[4]], conv(1, 1, 1, 1)),
        case(Op::Conv1d, "last, groups", &[&[2, 9, 4], &[6, 2, 3], &[6]], conv(2, 1, 2, 2)),
        case(Op::Conv1d, "last, wide", &[&[1, 7, 33], &[18, 33, 2]], conv(1, 0, 1, 1)),
        case(op1, "last", &[&[2, 5, 3], &[3, 2, 3], &[2]], one(2, 1, 1, 1, 1)),
        case(op1, "last, groups", &[&[2, 5, 4], &[4, 3, 3], &[6]], one(2, 0, 0, 2, 2)),
        case(op1, "last, room for more", &[&[2, 3, 2], &[2, 2, 3]], one(2, 1, 5, 4, 1)),
        case(op1, "last, far apart", &[&[1, 1, 2], &[2, 2, 2], &[2]], one(2, 3, 0, 7, 1)),
        case(op1, "last, far strides", &[&[2, 2, 3], &[3, 2, 3]], one(40, 1, 0, 1, 1)),
        case(op2, "last", &[&[2, 3, 4, 3], &[3, 2, 3, 3], &[2]], two(2, 1, 1, 1)),
        case(op2, "last, oblong", &[&[1, 3, 4, 2], &[2, 5, 2, 3], &[5]], two(1, 1, 0, 2)),
        case(op2, "last, room for more", &[&[2, 2, 3, 2], &[2, 3, 2, 2]], two(1, 0, 1, 1)),
        case(op2, "last, wide", &[&[1, 3, 2, 33], &[33, 18, 2, 2], &[18]], two(2, 0, 0, 1)),
    ]
}

fn resampling() -> Vec<Case> {
    let one = |size| move |t: &[Tensor]| ops::upsample_nearest1d(&t[0], size);
    let two = |h, w| move |t: &[Tensor]| ops::upsample_nearest2d(&t[0], h, w);
    let linear = |h, w, corners| move |t: &[Tensor]| ops::upsample_bilinear2d(&t[0], h, w, corners);
    let scaled = |h, w, corners| {
        move |t: &[Tensor]| ops::upsample_bilinear2d_with_scale(&t[0], h, w, corners)
    };
    let (op1, op2, op3) = (Op::UpsampleNearest1d, Op::UpsampleNearest2d, Op::UpsampleBilinear2d);
    vec![
        case(op1, "twice", &[&[2, 3, 5]], one(10)),
        case(op1, "no whole ratio", &[&[2, 3, 5]], one(13)),
        case(op1, "down", &[&[2, 3, 7]], one(3)),
        case(op1, "of 1", &[&[1, 1, 1]], one(4)),
        case(op2, "twice", &[&[2, 3, 3, 4]], two(6, 8)),
        case(op2, "no whole ratio", &[&[1, 2, 5, 4]], two(7, 3)),
        case(op3, "twice", &[&[2, 3, 3, 4]], linear(6, 8, false)),
        case(op3, "corners", &[&[2, 3, 3, 4]], linear(6, 9, true)),
        case(op3, "to 1", &[&[1, 2, 3, 4]], linear(1, 1, true)),
        case(op3, "the same size", &[&[1, 2, 3, 4]], linear(3, 4, false)),
        case(op3, "down", &[&[1, 2, 5, 7]], linear(2, 3, false)),
        case(op3, "scaled", &[&[1, 2, 5, 4]], scaled(1.7, 2.4, false)),
        case(op3, "scaled, corners", &[&[1, 2, 5, 4]], scaled(1.7, 2.4, true)),
        case(op3, "scaled to the same size", &[&[1, 2, 3, 4]], scaled(1.1, 1.2, false)),
        case(op3, "scaled to the same width", &[&[1, 2, 3, 4]], scaled(1.9, 1.2, false)),
        case(op3, "scaled to the same height", &[&[1, 2, 3, 4]], scaled(1.3, 0.6, false)),
    ]
}

/// candle's own, which are handed out as they are.
fn candles() -> Vec<Case> {
    let named = |name| Op::user(name, Cast::Keep);
    let (shuffle, unshuffle) = (named("pixel_shuffle"), named("pixel_unshuffle"));
    let pad = named("replication_pad2d");
    vec![
        case(shuffle, "by 2", &[&[2, 12, 3, 2]], |t| ops::pixel_shuffle(&t[0], 2)),
        case(shuffle, "by 1", &[&[1, 3, 2, 2]], |t| ops::pixel_shuffle(&t[0], 1)),
        case(unshuffle, "by 2", &[&[2, 3, 4, 6]], |t| ops::pixel_unshuffle(&t[0], 2)),
        case(unshuffle, "by 3", &[&[1, 2, 3, 3]], |t| ops::pixel_unshuffle(&t[0], 3)),
        case(pad, "by 1", &[&[2, 3, 4, 5]], |t| ops::replication_pad2d(&t[0], 1)),
        case(pad, "by 0", &[&[2, 3, 4, 5]], |t| ops::replication_pad2d(&t[0], 0)),
        case(pad, "of 1", &[&[1, 2, 1, 1]], |t| ops::replication_pad2d(&t[0], 1)),
    ]
}

/// Weights, and the biases there are.
fn weights(t: &[Tensor], biases: [bool; 2], direction: Direction) -> RecurrentWeights<'_> {
    let mut rest = t.iter();
    let [w_ih, w_hh] = [0, 1].map(|_| rest.next().expect("a case has its weights"));
    let [b_ih, b_hh] = biases.map(|has| if has { rest.next() } else { None });
    RecurrentWeights { w_ih, w_hh, b_ih, b_hh, direction }
}

fn recurrent() -> Vec<Case> {
    // Both results, so that both have a gradient.
    let lstm = |biases, direction| {
        move |t: &[Tensor]| -> Result<Tensor> {
            let (h, c) = ops::lstm(&t[0], &t[1], &t[2], weights(&t[3..], biases, direction))?;
            Tensor::cat(&[h, c], 2)
        }
    };
    let gru = |biases, direction| {
        move |t: &[Tensor]| ops::gru(&t[0], &t[1], weights(&t[2..], biases, direction))
    };
    use Direction::{Backward, Forward};
    let of_lstm: &[&[usize]] = &[&[2, 4, 3], &[2, 5], &[2, 5], &[20, 3], &[20, 5], &[20], &[20]];
    let of_gru: &[&[usize]] = &[&[2, 4, 3], &[2, 5], &[15, 3], &[15, 5], &[15], &[15]];
    let one_lstm: &[&[usize]] = &[&[1, 1, 1], &[1, 1], &[1, 1], &[4, 1], &[4, 1], &[4], &[4]];
    let one_gru: &[&[usize]] = &[&[1, 1, 1], &[1, 1], &[3, 1], &[3, 1], &[3], &[3]];
    vec![
        case(Op::Lstm, "both biases", of_lstm, lstm([true, true], Forward)),
        case(Op::Lstm, "no bias", &of_lstm[..5], lstm([false, false], Forward)),
        case(Op::Lstm, "backward", &of_lstm[..6], lstm([false, true], Backward)),
        case(Op::Lstm, "of 1", one_lstm, lstm([true, true], Forward)),
        case(Op::Gru, "both biases", of_gru, gru([true, true], Forward)),
        case(Op::Gru, "no bias", &of_gru[..4], gru([false, false], Forward)),
        case(Op::Gru, "backward", &of_gru[..5], gru([false, true], Backward)),
        case(Op::Gru, "of 1", one_gru, gru([true, true], Forward)),
    ]
}
