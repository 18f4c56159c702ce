//! An LSTM language model: truncated backpropagation through time, the state handed from piece to piece.

use candle_amp::nn::{self, Embedding, LSTM, LSTMConfig, LSTMState, Linear, Module};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::run::Run;

const VOCABULARY: usize = 50;
const WIDTH: usize = 64;
const PIECES: usize = 4;

struct LanguageModel {
    tokens: Embedding,
    lstm: LSTM,
    head: Linear,
}

impl LanguageModel {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            tokens: nn::embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            lstm: nn::lstm(WIDTH, WIDTH, LSTMConfig::default(), vb.pp("lstm"))?,
            head: nn::linear(WIDTH, VOCABULARY, vb.pp("head"))?,
        })
    }

    fn forward(&self, x: &Tensor, state: Option<&LSTMState>) -> Result<(Tensor, LSTMState)> {
        let (x, state) = self.lstm.sequence(&self.tokens.forward(x)?, state)?;
        Ok((self.head.forward(&x)?, state))
    }
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = LanguageModel::new(run.vb())?;
    let config = AdamWConfig { lr: 5e-3, ..Default::default() };
    let mut adamw = AdamW::new(run.initialised()?, config)?;
    for (x, following) in run.tokens(VOCABULARY as u32, 8, PIECES * 16)? {
        let (mut state, mut total) = (None, Tensor::new(0f32, x.device())?);
        for (x, following) in x.chunk(PIECES, 1)?.iter().zip(following.chunk(PIECES, 1)?) {
            let (loss, last) = run.amp.scope(|| {
                let (logits, last) = model.forward(x, state.as_ref())?;
                let loss = ops::cross_entropy(&logits.transpose(1, 2)?, &following)?;
                Result::Ok((loss, last))
            })?;
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
