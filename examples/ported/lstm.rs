//! An LSTM language model: truncated backpropagation through time, the state handed from piece to piece.
//! `pytorch/lstm.py` is the original.
//!
//! Look at `state`: it is detached in one call. The loss takes a class for each step, as PyTorch's does.

use candle_amp::nn::{self, Module};
use candle_amp::ops;
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_core::{Result, Tensor};

use crate::run::Run;

const VOCABULARY: usize = 50;
const WIDTH: usize = 64;
const PIECES: usize = 4;

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let vb = run.vb();
    let tokens = nn::embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?;
    let lstm = nn::lstm(WIDTH, WIDTH, Default::default(), vb.pp("lstm"))?;
    let head = nn::linear(WIDTH, VOCABULARY, vb.pp("head"))?;
    let config = AdamWConfig { lr: 5e-3, ..Default::default() };
    let mut adamw = AdamW::new(run.initialised()?, config)?;
    for (x, targets) in run.tokens(VOCABULARY, 8, PIECES * 16)? {
        let (mut state, mut total) = (None, Tensor::new(0f32, x.device())?);
        for (x, targets) in x.chunk(PIECES, 1)?.iter().zip(targets.chunk(PIECES, 1)?) {
            let amp = run.amp.enter();
            let (h, last) = lstm.sequence(&tokens.forward(x)?, state.as_ref())?;
            let loss = ops::cross_entropy(&head.forward(&h)?.transpose(1, 2)?, &targets)?;
            drop(amp);
            run.scaler.scale(&loss)?.backward()?;
            run.scaler.clip_grad_norm(0.25)?;
            let _ = run.scaler.step(&mut adamw)?;
            run.scaler.update()?;
            state = Some(last.detach());
            total = (total + loss.detach() / PIECES as f64)?;
        }
        run.report(&total)?;
    }
    Ok(())
}
