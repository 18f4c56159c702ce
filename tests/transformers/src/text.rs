//! Language models.

use candle_amp::ops;
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Config as LlamaConfig, Llama};
use candle_transformers::models::{bert, distilbert, t5};

use crate::harness::{CPU, Loss, Outcome, Truth, check};

const TOKENS: [[u32; 5]; 2] = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]];

/// Each token from itself: a model that has got anything to learn with can learn it.
fn token_loss(logits: &Tensor) -> Result<Tensor> {
    let targets = Tensor::new(&TOKENS, &CPU)?.flatten_all()?;
    ops::cross_entropy(&logits.flatten(0, 1)?, &targets)
}

fn bert(vb: VarBuilder<'static>) -> Result<Loss> {
    let config = bert::Config {
        vocab_size: 11,
        hidden_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 16,
        max_position_embeddings: 7,
        ..Default::default()
    };
    let model = bert::BertForMaskedLM::load(vb, &config)?;
    let tokens = Tensor::new(&TOKENS, &CPU)?;
    Ok(Box::new(move || token_loss(&model.forward(&tokens, &tokens.zeros_like()?, None)?)))
}

fn distilbert(vb: VarBuilder<'static>) -> Result<Loss> {
    let config = serde_json::json!({
        "vocab_size": 11, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16,
        "activation": "gelu", "max_position_embeddings": 7, "initializer_range": 0.02,
        "pad_token_id": 0,
    });
    let config: distilbert::Config = serde_json::from_value(config).expect("a configuration");
    let model = distilbert::DistilBertForMaskedLM::load(vb, &config)?;
    let tokens = Tensor::new(&TOKENS, &CPU)?;
    let mask = Tensor::zeros((1, 1, 1, 5), DType::U8, &CPU)?;
    Ok(Box::new(move || token_loss(&model.forward(&tokens, &mask)?)))
}

fn llama_config(tie_word_embeddings: bool) -> LlamaConfig {
    LlamaConfig {
        hidden_size: 8,
        intermediate_size: 16,
        vocab_size: 11,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 7,
        tie_word_embeddings,
    }
}

fn llama(vb: VarBuilder<'static>, tied: bool) -> Result<Loss> {
    let config = llama_config(tied);
    let model = Llama::load(vb.clone(), &config)?;
    let mut cache = Cache::new(false, vb.dtype(), &config, &CPU)?;
    let tokens = Tensor::new(&TOKENS, &CPU)?;
    let next = Tensor::new(&[7u32, 8], &CPU)?;
    Ok(Box::new(move || ops::cross_entropy(&model.forward(&tokens, 0, &mut cache)?, &next)))
}

fn t5(vb: VarBuilder<'static>) -> Result<Loss> {
    let config = t5::Config {
        vocab_size: 11,
        d_model: 8,
        d_kv: 4,
        d_ff: 16,
        num_layers: 2,
        num_heads: 2,
        relative_attention_num_buckets: 8,
        ..Default::default()
    };
    let dtype = vb.dtype();
    let mut model = t5::T5EncoderModel::load(vb, &config)?;
    let tokens = Tensor::new(&TOKENS, &CPU)?;
    let target = Tensor::arange(0f32, 80., &CPU)?.sin()?.reshape((2, 5, 8))?.to_dtype(dtype)?;
    Ok(Box::new(move || ops::mse(&model.forward(&tokens)?, &target)))
}

const TRAINS: [Outcome; 3] = [Outcome::Trains; 3];

/// All but the last layer is behind candle's fused layer norm. In half the mask is `0 * -inf`,
/// from the lowest number of F32.
#[test]
fn bert_trains_its_last_layer_in_f32_only() {
    let truth = Truth {
        variables: 43,
        reached: 2,
        is_reached: |name| name.starts_with("cls.predictions.decoder."),
        whole: true,
        outcomes: [Outcome::Trains, Outcome::NotANumber, Outcome::NotANumber],
    };
    check(&truth, &bert);
}

/// As BERT. The last layer's weight is the embedding's, which is cut off where it is first used.
/// In half the attention is F32, and multiplied with half values.
#[test]
fn distilbert_trains_its_last_layer_in_f32_only() {
    let truth = Truth {
        variables: 41,
        reached: 2,
        is_reached: |name| name.contains("word_embeddings") || name == "vocab_projector.bias",
        whole: false,
        outcomes: [
            Outcome::Trains,
            Outcome::Fails("dtype mismatch in matmul, lhs: F32, rhs: F16"),
            Outcome::Fails("dtype mismatch in matmul, lhs: F32, rhs: BF16"),
        ],
    };
    check(&truth, &distilbert);
}

/// The last norm is candle's fused RMS norm.
#[test]
fn llama_trains_its_head() {
    let truth = Truth {
        variables: 21,
        reached: 1,
        is_reached: |name| name == "lm_head.weight",
        whole: true,
        outcomes: TRAINS,
    };
    check(&truth, &|vb| llama(vb, false));
}

/// One variable, which the head reaches and the embedding does not.
#[test]
fn llama_with_tied_embeddings_trains_them_by_half() {
    let truth = Truth {
        variables: 20,
        reached: 1,
        is_reached: |name| name == "model.embed_tokens.weight",
        whole: false,
        outcomes: TRAINS,
    };
    check(&truth, &|vb| llama(vb, true));
}

/// Its norm is written out. `softmax_last_dim` cuts off what decides where to look.
#[test]
fn t5_encoder_trains_all_but_queries_and_keys() {
    let truth = Truth {
        variables: 19,
        reached: 14,
        is_reached: |name| {
            !["q.weight", "k.weight", "relative_attention_bias.weight"]
                .iter()
                .any(|cut| name.ends_with(&format!(".{cut}")))
        },
        whole: false,
        outcomes: TRAINS,
    };
    check(&truth, &t5);
}
