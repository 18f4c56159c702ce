//! Models that cannot be edited: half copies of F32 masters through a `VarBuilder`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_amp::diagnostics::MissingReason;
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, MasterVars, Parameters, ScaleConfig, ops, random};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{
    AdamW, Embedding, Init, LayerNormConfig, Linear, Module, ModuleT, Optimizer, ParamsAdamW, SGD,
    VarBuilder, VarMap,
};

use crate::util::{assert_close, assert_same, random as values, to_vec};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];
const CPU: Device = Device::Cpu;

/// A file of its own, removed at the end.
struct TempFile(PathBuf);

impl TempFile {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("candle-amp-{}-{count}.safetensors", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A model of candle's layers only, with tied weights: tokens in, logits over tokens out.
struct Model {
    embedding: Embedding,
    up: Linear,
    down: Linear,
}

impl Model {
    fn new(vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            embedding: candle_nn::embedding(7, 6, vb.pp("embedding"))?,
            up: candle_nn::linear(6, 10, vb.pp("up"))?,
            down: candle_nn::linear_no_bias(10, 6, vb.pp("down"))?,
        })
    }

    fn loss(&self) -> Result<Tensor> {
        let tokens = Tensor::new(&[0u32, 3, 1, 6, 3], &CPU)?;
        let next = Tensor::new(&[3u32, 1, 6, 3, 0], &CPU)?;
        let x = self.embedding.forward(&tokens)?;
        let x = (self.down.forward(&self.up.forward(&x)?.tanh()?)? + x)?;
        ops::cross_entropy(&x.matmul(&self.embedding.embeddings().t()?)?, &next)
    }
}

/// Reads a model's masters, initialised from `seed`.
fn initialised(seed: u64, dtype: DType) -> Result<(MasterVars, Model)> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(seed);
    let masters = MasterVars::new(dtype, &CPU);
    let model = Model::new(masters.var_builder())?;
    Ok((masters, model))
}

#[test]
fn the_same_seed_gives_the_same_masters_in_every_dtype() -> Result<()> {
    let (full, _) = initialised(3, DType::F32)?;
    let names = ["down.weight", "embedding.weight", "up.bias", "up.weight"];
    assert_eq!(full.parameters().names().collect::<Vec<_>>(), names);
    for dtype in HALVES {
        let (half, model) = initialised(3, dtype)?;
        for ((name, a), (_, b)) in half.parameters().iter().zip(full.parameters().iter()) {
            assert_same(name, a, b);
        }
        assert_same(
            "half",
            model.up.weight(),
            &full.varmap().data().lock().unwrap()["up.weight"].to_dtype(dtype)?,
        );
        let (other, _) = initialised(4, dtype)?;
        assert_ne!(
            to_vec(&other.parameters().vars()[0]),
            to_vec(&half.parameters().vars()[0]),
            "the seed says nothing"
        );
    }
    Ok(())
}

#[test]
fn gradients_arrive_in_f32_on_the_masters_by_either_backward() -> candle_amp::Result<()> {
    let (twin, full) = initialised(1, DType::F32)?;
    let expected = full.loss()?.backward()?;
    let expected = |name: &str| {
        let var = twin.varmap().data().lock().unwrap()[name].clone();
        expected.get(&var).unwrap().clone()
    };
    for dtype in HALVES {
        let (masters, model) = initialised(1, dtype)?;
        let loss = model.loss()?;
        assert_eq!(loss.dtype(), DType::F32);
        let plain = loss.backward()?;
        let again = loss.backward()?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        scaler.scale(&loss)?.backward()?;
        for (name, var) in masters.parameters().iter() {
            let what = format!("{name}, {dtype:?}");
            let gradient = plain.get(var).unwrap();
            assert_eq!(gradient.dtype(), DType::F32, "{what}");
            assert_same(&what, again.get(var).unwrap(), gradient);
            // A rounding for the weight, and one for each of the operators in front and behind.
            assert_close(&what, gradient, &expected(name), dtype, 16.0);
            let scaled = scaler.grad(var)?.unwrap();
            assert_close(&format!("{what}, scaled"), &scaled, &expected(name), dtype, 16.0);
        }
    }
    Ok(())
}

#[test]
fn tied_weights_are_one_variable_with_one_gradient() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let masters = MasterVars::new(DType::BF16, &CPU);
    let vb = masters.var_builder();
    let (a, b) = (vb.get((2, 2), "w")?, vb.get((2, 2), "w")?);
    assert_eq!(a.id(), b.id());
    let full = vb.to_dtype(DType::F32).get((2, 2), "w")?;
    assert!(full.is_variable(), "asked for in F32 it is the variable itself");
    assert_eq!(masters.parameters().len(), 1);
    let sum = ((&a + &b)?.to_dtype(DType::F32)? + (&full * 3.0)?)?.sum_all()?;
    let gradient = sum.backward()?.get(&masters.parameters().vars()[0]).unwrap().clone();
    assert_same("gradient", &gradient, &(full.ones_like()? * 5.0)?);
    Ok(())
}

/// Every master's half copy is that master, rounded.
#[track_caller]
fn assert_fresh(masters: &MasterVars, model: &Model) -> Result<()> {
    let data = masters.varmap().data().lock().unwrap().clone();
    let handed = [
        ("embedding.weight", model.embedding.embeddings()),
        ("up.weight", model.up.weight()),
        ("up.bias", model.up.bias().unwrap()),
        ("down.weight", model.down.weight()),
    ];
    for (name, half) in handed {
        assert_same(name, half, &data[name].to_dtype(half.dtype())?);
    }
    Ok(())
}

#[test]
fn a_bound_optimizer_trains_as_the_f32_twin_does_and_refreshes() -> candle_amp::Result<()> {
    let config = || ParamsAdamW { lr: 0.02, ..Default::default() };
    let train = |masters: &MasterVars, model: &Model| -> candle_amp::Result<Vec<f32>> {
        let mut adamw = AdamW::new(masters.parameters().vars(), config())?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        let mut losses = Vec::new();
        for _ in 0..30 {
            let loss = model.loss()?;
            losses.push(loss.to_scalar::<f32>()?);
            scaler.scale(&loss)?.backward()?;
            let outcome = scaler.step(&mut masters.bind(&mut adamw))?;
            assert!(!outcome.skipped()?);
            scaler.update()?;
            assert_fresh(masters, model)?;
        }
        Ok(losses)
    };
    let (masters, model) = initialised(5, DType::F32)?;
    let full = train(&masters, &model)?;
    assert!(full[29] < 0.2 * full[0], "{full:?}");
    for dtype in HALVES {
        let (masters, model) = initialised(5, dtype)?;
        let half = train(&masters, &model)?;
        let tolerance = 4.0 * crate::util::epsilon(dtype) as f32;
        assert!((half[0] - full[0]).abs() < tolerance * full[0], "{dtype:?}: {half:?}");
        assert!(half[29] < 0.2 * half[0], "{dtype:?}: {half:?}");
    }
    Ok(())
}

#[test]
fn a_skipped_step_changes_neither_masters_nor_copies() -> candle_amp::Result<()> {
    let (masters, model) = initialised(6, DType::F16)?;
    let mut sgd = SGD::new(masters.parameters().vars(), 0.1)?;
    let before: Vec<Tensor> =
        masters.parameters().vars().iter().map(|var| var.copy()).collect::<Result<_>>()?;
    let mut scaler = GradScaler::default();
    scaler.scale(&(model.loss()? * 1e30)?)?.backward()?; // infinite in F16
    assert!(scaler.step(&mut masters.bind(&mut sgd))?.skipped()?);
    scaler.update()?;
    for (var, before) in masters.parameters().vars().iter().zip(&before) {
        assert_same("master", var, before);
    }
    assert_fresh(&masters, &model)?;
    Ok(())
}

#[test]
fn each_of_several_optimizers_refreshes_its_own_part() -> candle_amp::Result<()> {
    let (masters, model) = initialised(7, DType::BF16)?;
    let all = masters.parameters();
    let (body, tied) =
        (all.filter(|n| n != "embedding.weight"), all.filter(|n| n.starts_with("emb")));
    let mut adamw = AdamW::new(body.vars(), ParamsAdamW::default())?;
    let mut sgd = SGD::new(tied.vars(), 0.5)?;
    let mut scaler = GradScaler::disabled();
    for _ in 0..2 {
        scaler.scale(&model.loss()?)?.backward()?;
        let _ = scaler.step(&mut masters.bind(&mut body.bind(&mut adamw)))?;
        assert_fresh(&masters, &model)?;
        let _ = scaler.step(&mut masters.bind(&mut tied.bind(&mut sgd)))?;
        assert_fresh(&masters, &model)?;
        scaler.update()?;
    }
    Ok(())
}

#[test]
fn an_optimizer_on_its_own_needs_a_refresh() -> Result<()> {
    let (masters, model) = initialised(8, DType::F16)?;
    let mut sgd = SGD::new(masters.parameters().vars(), 0.5)?;
    let stale = to_vec(model.up.weight());
    sgd.backward_step(&model.loss()?)?;
    assert_eq!(to_vec(model.up.weight()), stale);
    masters.refresh()?;
    assert_ne!(to_vec(model.up.weight()), stale);
    assert_fresh(&masters, &model)
}

#[track_caller]
fn assert_stale<T>(result: candle_amp::Result<T>, name: &str) {
    let Err(error) = result else { panic!("backward through an old graph went through") };
    let message = error.to_string();
    let expected = format!("computed from `{name}` before its last refresh");
    assert!(message.contains(&expected), "{message}");
}

#[test]
fn backward_through_a_graph_from_before_a_step_is_an_error() -> candle_amp::Result<()> {
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let (masters, model) = initialised(9, dtype)?;
        let mut sgd = SGD::new(masters.parameters().vars(), 0.1)?;
        let mut scaler = GradScaler::disabled();
        let loss = model.loss()?;
        scaler.scale(&loss)?.backward()?;
        let _ = scaler.step(&mut masters.bind(&mut sgd))?;
        scaler.update()?;
        assert_stale(scaler.scale(&loss)?.backward(), "down.weight");
        // candle's own backward, of a loss of this crate's.
        assert_stale(loss.backward().map_err(candle_amp::Error::from), "down.weight");
        // A loss made now, of activations made then.
        let late = (&loss * 2.0)?;
        assert_stale(scaler.scale(&late)?.backward(), "down.weight");
        // Nothing of it is left behind, and a new graph is fine, as often as one likes.
        let loss = model.loss()?;
        let first = loss.backward()?;
        scaler.scale(&loss)?.retain_graph().backward()?;
        scaler.scale(&loss)?.backward()?;
        for (name, var) in masters.parameters().iter() {
            let once = first.get(var).unwrap();
            let twice = scaler.grad(var)?.unwrap();
            assert_close(name, &twice, &(once * 2.0)?, dtype, 8.0);
        }
    }
    Ok(())
}

#[test]
fn only_what_a_step_rewrote_makes_a_graph_stale() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    let masters = MasterVars::new(DType::BF16, &CPU);
    let vb = masters.var_builder();
    let (a, b) = (vb.get((2, 2), "a")?, vb.get((2, 2), "b")?);
    let all = masters.parameters();
    let (of_a, of_b) = (all.filter(|n| n == "a"), all.filter(|n| n == "b"));
    let mut scaler = GradScaler::disabled();
    let sum = |t: &Tensor| ops::sum(t);
    let (loss_a, loss_b) = (sum(&a.sqr()?)?, sum(&b.sqr()?)?);
    scaler.scale(&loss_a)?.backward()?;
    let mut sgd = SGD::new(of_a.vars(), 0.1)?;
    let _ = scaler.step(&mut masters.bind(&mut of_a.bind(&mut sgd)))?;
    // Nothing that `loss_b` depends on has moved.
    scaler.scale(&loss_b)?.retain_graph().backward()?;
    // An old graph of `b` beside a new one of `a`.
    scaler.scale(&(sum(&a.sqr()?)? + &loss_b)?)?.retain_graph().backward()?;
    let mut sgd = SGD::new(of_b.vars(), 0.1)?;
    let _ = scaler.step(&mut masters.bind(&mut of_b.bind(&mut sgd)))?;
    scaler.update()?;
    assert_stale(scaler.scale(&(sum(&a.sqr()?)? + &loss_b)?)?.backward(), "b");
    Ok(())
}

#[test]
fn what_a_model_derives_when_it_is_built_may_be_a_view_and_not_a_copy() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    let masters = MasterVars::new(DType::F16, &CPU);
    let w = masters.var_builder().get((2, 3), "w")?;
    let (view, copy) = (w.t()?.unsqueeze(0)?, (w.as_ref() + 1.0)?);
    let mut sgd = SGD::new(masters.parameters().vars(), 0.1)?;
    let mut scaler = GradScaler::disabled();
    for _ in 0..2 {
        scaler.scale(&ops::sum(&view.sqr()?)?)?.backward()?;
        let _ = scaler.step(&mut masters.bind(&mut sgd))?;
        scaler.update()?;
        assert_same("view", &view.squeeze(0)?.t()?, &w);
    }
    assert_stale(scaler.scale(&ops::sum(&copy.sqr()?)?)?.backward(), "w");
    Ok(())
}

#[test]
fn per_name_rules_choose_what_stays_full() -> Result<()> {
    let masters = MasterVars::new(DType::F16, &CPU).dtypes(|name, dtype| {
        if name.ends_with("bias") || name.contains("norm") { DType::F32 } else { dtype }
    });
    let vb = masters.var_builder();
    let dtype = |name: &str| vb.get(3, name).map(|t| (t.dtype(), t.is_variable()));
    assert_eq!(dtype("norm.weight")?, (DType::F32, true));
    assert_eq!(dtype("proj.bias")?, (DType::F32, true));
    assert_eq!(dtype("proj.weight")?, (DType::F16, false));
    // What the rule is given has running statistics in F32 already.
    assert_eq!(dtype("bn.running_var")?, (DType::F32, true));
    let all_half = MasterVars::new(DType::F16, &CPU).dtypes(|_, _| DType::F16);
    assert_eq!(all_half.var_builder().get(3, "running_var")?.dtype(), DType::F16);
    // A part of the model in another dtype, as the model itself asks.
    assert_eq!(vb.to_dtype(DType::BF16).get(3, "proj.weight")?.dtype(), DType::BF16);
    assert_eq!(vb.to_dtype(DType::F64).get(3, "double")?.dtype(), DType::F64);
    let stored = masters.varmap().data().lock().unwrap().clone();
    assert_eq!(stored["proj.weight"].dtype(), DType::F32);
    assert_eq!(stored["double"].dtype(), DType::F64);
    Ok(())
}

#[test]
fn running_statistics_are_written_to_where_they_are_saved() -> Result<()> {
    let masters = MasterVars::new(DType::BF16, &CPU);
    let norm = candle_nn::batch_norm(3, 1e-5, masters.var_builder())?;
    let x = values(1, (8, 3), DType::BF16);
    norm.forward_t(&x, true)?;
    let file = TempFile::new();
    masters.save(&file.0)?;
    let saved = candle_core::safetensors::load(&file.0, &CPU)?;
    let mean = (x.to_dtype(DType::F32)?.mean(0)? * 0.1)?;
    assert_close("running mean", &saved["running_mean"], &mean, DType::F32, 8.0);
    assert_same("what the layer has", norm.running_mean(), &saved["running_mean"]);
    assert_eq!(masters.parameters().buffers().count(), 2);
    Ok(())
}

#[test]
fn initial_values_are_sane_where_a_model_names_none() -> Result<()> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(1);
    let masters = MasterVars::new(DType::F32, &CPU);
    let vb = masters.var_builder();
    let matrix = to_vec(&vb.get((40, 50), "proj")?);
    let variance = matrix.iter().map(|x| x * x).sum::<f64>() / matrix.len() as f64;
    // Of 2000 draws; its standard deviation is 0.02² sqrt(2 / 2000).
    assert!((variance / 4e-4 - 1.0).abs() < 5.0 * 0.0316, "{variance}");
    assert_eq!(to_vec(&vb.get(2, "norm.weight")?), [1.0; 2]);
    assert_eq!(to_vec(&vb.get(2, "norm.bias")?), [0.0; 2]);
    assert_eq!(to_vec(&vb.get((), "gate.weight")?), [0.0]);
    let hinted = vb.get_with_hints((2, 1), "scale", Init::Const(3.0))?;
    assert_eq!(to_vec(&hinted), [3.0; 2]);
    let candles = MasterVars::new(DType::F32, &CPU)
        .init(|name, init| Some(if name == "lora_b" { Init::Const(0.0) } else { init }));
    assert_eq!(to_vec(&candles.var_builder().get((1, 2), "lora_b")?), [0.0; 2]);
    Ok(())
}

#[test]
fn a_varmap_and_its_masters_are_the_same_variables() -> candle_amp::Result<()> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let twin = Model::new(vb)?;
    let masters = MasterVars::from_varmap(&varmap, DType::BF16, &CPU);
    let model = Model::new(masters.var_builder())?;
    assert_fresh(&masters, &model)?;
    assert_eq!(varmap.all_vars().len(), 4, "nothing was added");
    let mut sgd = SGD::new(varmap.all_vars(), 0.1)?;
    let mut scaler = GradScaler::disabled();
    scaler.scale(&model.loss()?)?.backward()?;
    let _ = scaler.step(&mut masters.bind(&mut sgd))?;
    // The map's own model moved too.
    assert_same("twin", &twin.up.weight().to_dtype(DType::BF16)?, model.up.weight());

    let half = VarMap::new();
    VarBuilder::from_varmap(&half, DType::F16, &CPU).get(2, "w")?;
    let masters = MasterVars::from_varmap(&half, DType::F16, &CPU);
    let error = masters.var_builder().get(2, "w").unwrap_err().to_string();
    assert!(error.contains("`w` is a F16 variable: a master must be F32"), "{error}");
    Ok(())
}

#[test]
fn safetensors_round_trip_in_f32() -> candle_amp::Result<()> {
    let (masters, model) = initialised(11, DType::BF16)?;
    let file = TempFile::new();
    masters.save(&file.0)?;
    for (name, tensor) in candle_core::safetensors::load(&file.0, &CPU)? {
        assert_eq!(tensor.dtype(), DType::F32, "{name}");
    }
    let loss = model.loss()?.to_scalar::<f32>()?;

    let loaded = MasterVars::from_safetensors(&[&file.0], DType::BF16, &CPU)?;
    let again = Model::new(loaded.var_builder())?;
    assert_eq!(again.loss()?.to_scalar::<f32>()?, loss);

    // Into a model that exists, half copies too.
    let (other, into) = initialised(12, DType::BF16)?;
    assert_ne!(into.loss()?.to_scalar::<f32>()?, loss);
    other.load(&file.0)?;
    assert_eq!(into.loss()?.to_scalar::<f32>()?, loss);
    assert_fresh(&other, &into)?;
    Ok(())
}

#[test]
fn a_file_that_does_not_fit_is_an_error_and_changes_nothing() -> candle_amp::Result<()> {
    let file = TempFile::new();
    let save = |tensors: &[(&str, Tensor)]| {
        candle_core::safetensors::save(&tensors.iter().cloned().collect(), &file.0)
    };
    // Half files are read, and widened; integers stay.
    let ids = Tensor::new(&[1u32, 2], &CPU)?;
    let w = values(1, (2, 2), DType::F16);
    save(&[("w", w.clone()), ("ids", ids.clone()), ("unused", ids.clone())])?;
    let masters = MasterVars::from_safetensors(&[&file.0], DType::F16, &CPU)?;
    let vb = masters.var_builder();
    assert!(vb.contains_tensor("w") && !vb.contains_tensor("v"));
    assert_same("half", &vb.get((2, 2), "w")?, &w);
    assert_eq!(masters.parameters().vars()[0].dtype(), DType::F32);
    assert_same("ids", &vb.get_unchecked_dtype("ids", DType::U32)?, &ids);
    let error = |result: Result<Tensor>| result.unwrap_err().to_string();
    assert!(error(vb.get((2, 2), "v")).contains("no file has `v`"));
    assert!(error(vb.get((2, 3), "w")).contains("[2, 3], and is [2, 2]"));
    assert!(error(vb.get(3, "unused")).contains("the file has `unused` as [2]"));
    assert!(error(vb.get_unchecked("v")).contains("has no shape"));

    let twice = MasterVars::from_safetensors(&[&file.0, &file.0], DType::F16, &CPU);
    assert!(twice.unwrap_err().to_string().contains("appears twice"));

    let part = MasterVars::from_safetensors(&[&file.0], DType::F16, &CPU)?
        .init(|name, init| name.starts_with("head.").then_some(init));
    let vb = part.var_builder();
    assert!(vb.get(2, "head.bias").is_ok() && vb.get(2, "haed.bias").is_err());

    let before = to_vec(&masters.parameters().vars()[0]);
    save(&[("w", values(2, (2, 2), DType::F32))])?; // no `ids`
    assert!(masters.load(&file.0).unwrap_err().to_string().contains("no `ids`"));
    save(&[("ids", ids), ("w", values(2, (2, 3), DType::F32))])?;
    assert!(masters.load(&file.0).unwrap_err().to_string().contains("`w` as [2, 3]"));
    assert_eq!(to_vec(&masters.parameters().vars()[0]), before);
    Ok(())
}

#[test]
fn missing_gradients_are_named_with_what_can_be_known() -> candle_amp::Result<()> {
    let _fork = random::fork_rng_guard();
    let masters = MasterVars::new(DType::F16, &CPU);
    let vb = masters.var_builder();
    let layer = |name: &str| candle_nn::linear_no_bias(4, 4, vb.pp(name));
    let (first, unused) = (layer("first")?, layer("unused")?);
    let norm = candle_nn::layer_norm(4, LayerNormConfig::default(), vb.pp("norm"))?;
    let (head, pooler) = (layer("head")?, layer("pooler")?);
    let spare = Var::zeros(1, DType::F32, &CPU)?;
    masters.varmap().data().lock().unwrap().insert("spare".into(), spare);

    let x = values(1, (3, 4), DType::F16);
    let cut = norm.forward(&first.forward(&x)?)?;
    let loss = ops::mean(&head.forward(&cut)?)?;
    let missing = masters.missing(&loss);
    let why = |later| MissingReason::NotReached { later };
    let expected = [
        ("first.weight", why(true)),
        ("unused.weight", why(true)),
        ("norm.weight", why(true)),
        ("norm.bias", why(true)),
        ("pooler.weight", why(false)),
        ("spare", MissingReason::NotAskedFor),
    ];
    assert_eq!(missing.iter().collect::<Vec<_>>(), expected);
    let text = missing.to_string();
    assert!(text.starts_with("6 of 7 variables get no gradient"), "{text}");
    assert!(
        text.contains(
            "asked for later:\n  pooler.weight\nNever asked for by the model:\n  spare\n"
        ),
        "{text}"
    );
    assert!(text.contains("The first it asked for that gets a gradient is head.weight."), "{text}");
    assert!(text.contains("candle_nn::LayerNorm with a bias"), "{text}");

    // It is what the scaler finds.
    let mut scaler = GradScaler::disabled();
    scaler.scale(&loss)?.backward()?;
    let parameters: Parameters = masters.parameters();
    let mut names: Vec<_> = missing.names().collect();
    names.sort_unstable();
    assert_eq!(names, scaler.missing(&parameters));

    // Without the cut.
    let all = [&first, &unused, &head, &pooler];
    let sum = all.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))?;
    let missing = masters.missing(&ops::mean(&sum)?);
    assert_eq!(missing.names().collect::<Vec<_>>(), ["norm.weight", "norm.bias", "spare"]);
    let nothing = masters.missing(&ops::mean(&x)?);
    assert_eq!(nothing.len(), 7);
    assert!(!nothing.to_string().contains("The first"), "{nothing}");
    Ok(())
}

#[test]
fn a_step_without_a_refresh_is_an_error_at_the_next_backward() -> candle_amp::Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let (masters, model) = initialised(9, dtype)?;
        let config = SgdConfig { lr: 0.1, ..Default::default() };
        let mut sgd = Sgd::new(masters.parameters(), config)?;
        let mut scaler = GradScaler::disabled();
        let mut step = |refresh: bool, bind: bool| {
            scaler.zero_grad();
            scaler.scale(&model.loss()?)?.backward()?;
            match bind {
                true => scaler.step(&mut masters.bind(&mut sgd))?,
                false => scaler.step(&mut sgd)?,
            };
            scaler.update()?;
            if refresh { masters.refresh().map_err(candle_amp::Error::from) } else { Ok(()) }
        };
        for (refresh, bind) in
            [(true, false), (false, true), (true, true), (true, false), (false, false)]
        {
            step(refresh, bind)?;
        }
        let error = step(true, true).expect_err("no refresh").to_string();
        assert!(
            error.contains("was not rewritten from it: the model would never change"),
            "{error}"
        );
        let before = to_vec(model.up.weight());
        masters.refresh()?;
        assert_ne!(to_vec(model.up.weight()), before);
        step(false, true)?;
    }
    Ok(())
}

/// A rule may look into the variables that there are: nothing is locked while it is asked.
#[test]
fn the_rule_for_initial_values_may_look_at_others() -> Result<()> {
    let varmap = VarMap::new();
    let others = varmap.clone();
    let masters = MasterVars::from_varmap(&varmap, DType::BF16, &CPU).init(move |_, init| {
        let count = others.all_vars().len();
        Some(if count == 0 { init } else { Init::Const(count as f64) })
    });
    let (asked, answer) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let vb = masters.var_builder();
        let all = ["a", "b", "c"].map(|name| to_vec(&vb.get(2, name).unwrap()));
        asked.send(all).unwrap();
    });
    let all = answer.recv_timeout(std::time::Duration::from_secs(60)).expect("an answer in time");
    assert_eq!(all, [[0.0; 2], [1.0; 2], [2.0; 2]]);
    Ok(())
}
