//! Masters: any candle optimizer over half variables is that optimizer over F32 ones, rounded.

use candle_amp::{GradScaler, MasterWeights, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, SGD};

use crate::util::{assert_same, random, to_vec};

fn half_follows_full<O: Optimizer>(config: impl Fn() -> O::Config) -> candle_amp::Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let half = Var::from_tensor(&random(1, (5, 4), dtype))?;
        let full = Var::from_tensor(&half.detach().to_dtype(DType::F32)?)?;
        let mut masters = MasterWeights::<O>::new(vec![half.clone()], config())?;
        let mut plain = O::new(vec![full.clone()], config())?;
        // The cast to F32 hands the gradient back in half, where 65536 is infinite.
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        for step in 0..20 {
            let x = random(100 + step, (3, 5), dtype);
            let loss = ops::sum(&ops::matmul(&x, &half)?.to_dtype(DType::F32)?)?;
            scaler.scale(&loss)?.backward()?;
            let gradient = scaler.grad(&half)?.expect("a gradient");
            assert!(!scaler.step(&mut masters)?.skipped()?);
            scaler.update()?;
            let mut store = candle_core::backprop::GradStore::default();
            store.insert(&full, gradient);
            plain.step(&store)?;
            assert_same("master", masters.master(&half).expect("a master"), &full);
            assert_same("half", &half, &full.to_dtype(dtype)?);
        }
    }
    Ok(())
}

#[test]
fn every_candle_optimizer_can_be_wrapped() -> candle_amp::Result<()> {
    half_follows_full::<SGD>(|| 1e-4)?;
    half_follows_full::<AdamW>(|| ParamsAdamW { lr: 1e-4, ..Default::default() })
}

/// candle's AdamW alone: F16 variables become NaN, BF16 ones never move.
#[test]
fn masters_train_where_half_variables_alone_do_not() -> candle_amp::Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let config = || ParamsAdamW { lr: 1e-4, weight_decay: 0.0, ..Default::default() };
        let run =
            |step: &mut dyn FnMut(&candle_core::Tensor) -> Result<()>, w: &Var| -> Result<f64> {
                for _ in 0..1000 {
                    step(&w.to_dtype(DType::F32)?.sum_all()?)?;
                }
                Ok(to_vec(w)[0])
            };
        let w = Var::ones(1, dtype, &Device::Cpu)?;
        let mut masters = MasterWeights::<AdamW>::new(vec![w.clone()], config())?;
        let trained = run(&mut |loss| masters.backward_step(loss), &w)?;
        assert!((trained - 0.9).abs() < 0.004, "{dtype:?}: {trained}");
        let w = Var::ones(1, dtype, &Device::Cpu)?;
        let mut raw = AdamW::new(vec![w.clone()], config())?;
        let raw = run(&mut |loss| raw.backward_step(loss), &w)?;
        assert!(!(0.5..0.95).contains(&raw), "{dtype:?}: candle's own trains now: {raw}");
    }
    Ok(())
}

#[test]
fn full_variables_pass_through_and_repeated_ones_count_once() -> candle_amp::Result<()> {
    let full = Var::ones(2, DType::F32, &Device::Cpu)?;
    let double = Var::ones(2, DType::F64, &Device::Cpu)?;
    let half = Var::ones(2, DType::F16, &Device::Cpu)?;
    let int = Var::ones(2, DType::U32, &Device::Cpu)?;
    let vars = vec![full.clone(), half.clone(), double.clone(), half.clone(), int.clone()];
    let mut masters = MasterWeights::<SGD>::new(vars, 0.5)?;
    assert_eq!(masters.master(&full).map(|m| m.id()), Some(full.id()));
    assert_eq!(masters.master(&double).map(|m| m.id()), Some(double.id()));
    assert_eq!(masters.master(&half).map(|m| m.dtype()), Some(DType::F32));
    assert!(masters.master(&int).is_none());
    let sum = |var: &Var| var.to_dtype(DType::F64)?.sum_all();
    let loss = (sum(&full)? + (sum(&double)? + sum(&half)?)?)?;
    masters.backward_step(&loss)?;
    for var in [&full, &double, &half] {
        assert_eq!(to_vec(var), [0.5, 0.5], "{:?}", var.dtype());
    }
    Ok(())
}

#[test]
fn a_master_written_by_hand_reaches_its_variable_on_refresh() -> candle_amp::Result<()> {
    let half = Var::from_tensor(&random(1, 5, DType::BF16))?;
    let full = Var::from_tensor(&random(2, 5, DType::F32))?;
    let masters = MasterWeights::<SGD>::new(vec![half.clone(), full.clone()], 0.5)?;
    let (before, written) = (to_vec(&full), random(3, 5, DType::F32));
    masters.master(&half).expect("it has one").set(&written)?;
    let loss = ops::sum(&ops::mul(&half, &half)?)?;
    masters.refresh()?;
    assert_eq!(to_vec(&half), to_vec(&written.to_dtype(DType::BF16)?));
    assert_eq!(to_vec(&full), before);
    let message = loss.backward().unwrap_err().to_string();
    assert!(message.contains("in place"), "{message}");
    Ok(())
}

#[test]
fn it_serves_where_a_candle_optimizer_is_asked_for() -> Result<()> {
    fn train<O: Optimizer>(opt: &mut O, w: &Var) -> Result<f64> {
        opt.set_learning_rate(0.25);
        opt.backward_step(&w.to_dtype(DType::F32)?.sum_all()?)?;
        Ok(opt.learning_rate())
    }
    let w = Var::ones(1, DType::F16, &Device::Cpu)?;
    let mut masters = MasterWeights::<SGD>::new(vec![w.clone()], 1.0)?;
    assert_eq!(train(&mut masters.as_candle(), &w)?, 0.25);
    assert_eq!(to_vec(&w), [0.75]);
    assert_eq!(masters.learning_rate(), 0.25);
    let mut owned = candle_amp::optim::AsCandle::<MasterWeights<SGD>>::new(vec![w.clone()], 1.0)?;
    train(&mut owned, &w)?;
    assert_eq!(to_vec(&w), [0.5]);
    Ok(())
}
