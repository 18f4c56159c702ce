//! A captured step of a language model: embedding, attention, layer norm, LSTM, GRU, the cumulative sum, the fused head.

use candle_core::{DType, Device, Module, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{HERE, bits, config};
use crate::kernels::testing::devices::devices;
use crate::kernels::testing::own_process::in_own_process;
use crate::optim::{AdamW, AdamWConfig, GraphedStep, Masters, Optim};
use crate::random;
use crate::{Autocast, GradScaler, Parameters, Result, nn, ops};

const VOCABULARY: usize = 11;
const WIDTH: usize = 16;
const STEPS: u64 = 8;

struct Net {
    varmap: nn::VarMap,
    table: nn::Embedding,
    qkv: nn::Linear,
    norm: nn::LayerNorm,
    lstm: nn::LSTM,
    gru: nn::GRU,
    head: Tensor,
}

impl Net {
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let varmap = nn::VarMap::new();
        let vb = nn::var_builder(&varmap, dtype, device);
        Ok(Self {
            table: nn::embedding(VOCABULARY, WIDTH, vb.pp("table"))?,
            qkv: nn::linear(WIDTH, 3 * WIDTH, vb.pp("qkv"))?,
            norm: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            lstm: nn::lstm(WIDTH, WIDTH, Default::default(), vb.pp("lstm"))?,
            gru: nn::gru(WIDTH, WIDTH, Default::default(), vb.pp("gru"))?,
            head: vb.get_with_hints(
                (VOCABULARY, WIDTH),
                "head",
                candle_nn::Init::Randn { mean: 0.0, stdev: 0.1 },
            )?,
            varmap,
        })
    }

    fn loss(&self, ids: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.table.forward(ids)?;
        let attended = ops::sdpa_packed(&self.qkv.forward(&x)?, 2, true, 0.35)?;
        let x = self.norm.forward(&ops::add(&x, &ops::dropout(&attended, 0.25)?)?)?;
        let (x, _) = self.lstm.sequence(&x, None)?;
        let (x, _) = self.gru.sequence(&x, None)?;
        let x = ops::cumsum(&x, 1)?.flatten_to(1)?;
        ops::linear_cross_entropy(&x, &self.head, None, &targets.flatten_all()?)
    }
}

fn batch(step: u64, device: &Device) -> candle_core::Result<[Tensor; 2]> {
    let mut rng = ChaCha8Rng::seed_from_u64(step);
    let mut ids = || (0..3 * 5).map(|_| rng.random_range(0..VOCABULARY as u32)).collect();
    let [ids, targets]: [Vec<u32>; 2] = [ids(), ids()];
    Ok([Tensor::from_vec(ids, (3, 5), device)?, Tensor::from_vec(targets, (3, 5), device)?])
}

/// The bits of all losses, and of all weights after the last step.
type Trained = [Vec<Vec<u64>>; 2];

fn train(device: &Device, dtype: DType, amp: DType, graphed: bool) -> Result<Trained> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(3);
    let net = Net::new(dtype, device)?;
    let parameters = Parameters::from_varmap(&net.varmap);
    let adamw = AdamWConfig { lr: 0.01, ..Default::default() };
    let mut optimizer: AdamW = Optim::new(&parameters, adamw)?.with_masters(Masters::F32)?;
    let mut scaler = GradScaler::new(config())?;
    let amp = Autocast::new(amp);
    let mut step =
        GraphedStep::new(|inputs: &[Tensor]| amp.scope(|| net.loss(&inputs[0], &inputs[1])));
    let mut losses = Vec::new();
    for number in 0..STEPS {
        let inputs = batch(number, device)?;
        let (loss, outcome) = match graphed {
            true => step.run(&mut scaler, &mut optimizer, &inputs)?,
            false => step.eager(&mut scaler, &mut optimizer, &inputs)?,
        };
        assert!(!outcome.skipped()?);
        losses.push(bits(&loss)?);
    }
    assert_eq!(step.is_captured(), graphed && !device.is_cpu());
    let weights = parameters.vars().iter().map(|var| bits(var)).collect::<Result<_>>()?;
    Ok([losses, weights])
}

#[test]
fn a_graph_does_what_the_step_of_a_language_model_does_to_the_bit() -> Result<()> {
    let test =
        format!("{HERE}language::a_graph_does_what_the_step_of_a_language_model_does_to_the_bit");
    if !in_own_process(&test, &[]) {
        return Ok(());
    }
    for device in devices() {
        for (dtype, amp) in
            [(DType::F32, DType::BF16), (DType::F32, DType::F16), (DType::BF16, DType::BF16)]
        {
            let eager = train(&device, dtype, amp, false)?;
            assert_eq!(eager, train(&device, dtype, amp, true)?, "{dtype:?} {amp:?}");
            assert_ne!(eager[0][0], eager[0][7], "nothing was trained");
        }
    }
    Ok(())
}
