//! A tiny model in every precision, fed with what data should never have.

use candle_amp::optim::{Sgd, SgdConfig, Step};
use candle_amp::{Autocast, GradScaler, MasterWeights, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::for_each_seed;
use crate::util::to_vec;

/// Two layers: 3 features, 4 in between, 1 out.
struct Net([Var; 4]);

impl Net {
    fn new(rng: &mut ChaCha8Rng, dtype: DType) -> Self {
        Self([&[4, 3][..], &[4], &[1, 4], &[1]].map(|shape| {
            let len = shape.iter().product::<usize>();
            let values: Vec<f64> = (0..len).map(|_| rng.random_range(-0.5..0.5)).collect();
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
            Var::from_tensor(&tensor.to_dtype(dtype).unwrap()).unwrap()
        }))
    }

    /// The same weights, in `F64`.
    fn twin(&self) -> Self {
        let twin = |var: &Var| Var::from_tensor(&var.to_dtype(DType::F64).unwrap()).unwrap();
        Self([0, 1, 2, 3].map(|at| twin(&self.0[at])))
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let [w1, b1, w2, b2] = &self.0;
        let dtype = w1.dtype();
        let (x, y) = (x.to_dtype(dtype)?, y.to_dtype(dtype)?);
        let h = ops::relu(&ops::linear(&x, w1, Some(b1))?)?;
        let loss = ops::mse(&ops::linear(&h, w2, Some(b2))?, &y)?;
        // Half models have an F32 loss already.
        Ok(loss)
    }

    fn values(&self) -> Vec<f64> {
        self.0.iter().flat_map(|var| to_vec(var)).collect()
    }
}

/// An input, now and then with something in it that no arithmetic survives.
fn batch(rng: &mut ChaCha8Rng, len: usize) -> (Vec<f64>, bool) {
    let mut values: Vec<f64> = (0..len).map(|_| rng.random_range(-1.0..1.0)).collect();
    if rng.random_bool(0.7) {
        return (values, true);
    }
    let faults = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 0.0, 1e-41, 1e-6, 6e4, 1e30, 3e38];
    let fault = faults[rng.random_range(0..faults.len())];
    values[rng.random_range(0..len)] = fault;
    (values, fault.abs() <= 1.0)
}

/// Steps, and tells whether it was skipped.
fn run_with<S: Step>(
    rng: &mut ChaCha8Rng,
    net: &Net,
    mut optimizer: S,
    compute: Option<DType>,
    lr: Option<f64>,
) {
    let amp = compute.map_or_else(Autocast::disabled, Autocast::new);
    let config = ScaleConfig {
        init_scale: 2f32.powi(rng.random_range(0..24)),
        growth_interval: rng.random_range(1..6),
        hysteresis: rng.random_range(1..3),
        ..Default::default()
    };
    let mut scaler = GradScaler::new(config).unwrap();
    let twin = net.twin();
    // A step of plain SGD on what a clean batch gives can be followed in F64.
    let mut follow = lr.is_some() && compute.is_none() && net.0[0].dtype() == DType::F32;
    for step in 0..12 {
        let ((x, good_x), (y, good_y)) = (batch(rng, 6), batch(rng, 2));
        let (x, y) = (
            Tensor::from_vec(x, (2, 3), &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap(),
            Tensor::from_vec(y, (2, 1), &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap(),
        );
        let before = net.values();
        let loss = amp.scope(|| net.loss(&x, &y)).unwrap();
        scaler.scale(&loss).and_then(|scaled| scaled.backward()).unwrap();
        if rng.random_bool(0.3) {
            scaler.clip_grad_norm(1.0).unwrap();
            follow = false;
        }
        let outcome = scaler.step(&mut optimizer).unwrap();
        let skipped = outcome.skipped().unwrap();
        scaler.update().unwrap();
        let after = net.values();
        // A step of finite gradients may be too long for F16: 65520 is infinite there.
        let narrow = net.0[0].dtype() == DType::F16;
        let sound = |w: &f64| w.is_finite() || narrow && w.is_infinite();
        assert!(after.iter().all(sound), "step {step}: {after:?}");
        assert!(!skipped || after == before, "step {step} was skipped, and moved the weights");
        if skipped {
            continue;
        }
        follow &= good_x && good_y;
        if let (true, Some(lr)) = (follow, lr) {
            let exact = twin.loss(&x, &y).unwrap().backward().unwrap();
            for var in &twin.0 {
                let Some(gradient) = exact.get(var) else { continue };
                var.set(&(var.as_tensor() - (gradient * lr).unwrap()).unwrap()).unwrap();
            }
            // Sums of at most 4 products a layer, twice, and one rounding a step.
            let tolerance = 64.0 * f64::from(f32::EPSILON) * f64::from(step + 1);
            for (got, expected) in after.iter().zip(twin.values()) {
                assert!((got - expected).abs() <= tolerance, "step {step}: {got}, not {expected}");
            }
        }
    }
}

fn run(rng: &mut ChaCha8Rng) {
    const LR: f64 = 1e-2;
    let stored = [DType::F32, DType::F32, DType::F16, DType::BF16][rng.random_range(0..4)];
    let compute = match stored {
        DType::F32 => [None, Some(DType::F16), Some(DType::BF16)][rng.random_range(0..3)],
        _ => None,
    };
    let net = Net::new(rng, stored);
    let vars = net.0.to_vec();
    match rng.random_range(0..4) {
        0 => {
            let config = SgdConfig { lr: LR, momentum: 0.9, ..Default::default() };
            run_with(rng, &net, Sgd::new(vars, config).unwrap(), compute, None);
        }
        1 => {
            let config = ParamsAdamW { lr: LR, ..Default::default() };
            let optimizer = MasterWeights::<AdamW>::new(vars, config).unwrap();
            run_with(rng, &net, optimizer, compute, None);
        }
        2 => {
            run_with(rng, &net, SGD::new(vars, LR).unwrap(), compute, Some(LR));
        }
        _ => {
            let config = SgdConfig { lr: LR, ..Default::default() };
            run_with(rng, &net, Sgd::new(vars, config).unwrap(), compute, Some(LR));
        }
    }
}

#[test]
fn no_data_makes_a_weight_nan() {
    for_each_seed("training", run);
}
