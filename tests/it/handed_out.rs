//! What masters load, hand out, print and miss.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{GradScaler, MasterVars, ops};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Init;

use crate::bad_input::assert_says;
use crate::util::{assert_same, random as values};

const CPU: Device = Device::Cpu;

#[test]
fn integers_of_a_file_are_not_taken_for_floats_nor_floats_for_integers() -> candle_amp::Result<()> {
    let name = format!("candle-amp-handed-out-{}.safetensors", std::process::id());
    let file = std::env::temp_dir().join(name);
    let save = |tensors: [(&str, Tensor); 2]| {
        candle_core::safetensors::save(&tensors.into_iter().collect(), &file)
    };
    let (ids, w) = (Tensor::new(&[7u32, 2], &CPU)?, values(1, 2, DType::F32));
    save([("ids", ids.clone()), ("w", w.clone())])?;
    let masters = MasterVars::from_safetensors(&[&file], DType::BF16, &CPU)?;
    let vb = masters.var_builder();
    vb.get_unchecked_dtype("ids", DType::U32)?;
    vb.get(2, "w")?;
    for (tensors, says) in [
        ([("ids", w.clone()), ("w", w.clone())], "`ids` in F32, and it is U32"),
        ([("ids", ids.clone()), ("w", ids.clone())], "`w` in U32, and it is F32"),
    ] {
        save(tensors)?;
        let message = masters.load(&file).unwrap_err().to_string();
        assert!(message.contains(says), "{message}");
        assert_same("w", masters.parameters().vars()[0].as_tensor(), &w);
    }
    std::fs::remove_file(file).unwrap();
    Ok(())
}

#[test]
fn a_variable_that_was_handed_out_in_two_dtypes_goes_back_after_a_refresh() -> candle_amp::Result<()>
{
    let masters = MasterVars::new(DType::F16, &CPU);
    let vb = masters.var_builder();
    let half = vb.get(3, "head.bias")?;
    let full = vb.get_unchecked_dtype("head.bias", DType::F32)?;
    masters.refresh()?;
    let square = |x: &Tensor| ops::sum(&ops::mul(x, x)?);
    let loss = (square(&half)?.to_dtype(DType::F32)? + square(&full)?)?;
    GradScaler::disabled().scale(&loss)?.backward()?;
    Ok(())
}

#[test]
fn a_step_without_a_refresh_is_noticed_before_the_first_refresh_too() -> candle_amp::Result<()> {
    let masters = MasterVars::new(DType::BF16, &CPU);
    let w = masters.var_builder().get_with_hints(3, "head.bias", Init::Const(1.5))?;
    let mut sgd = Sgd::new(masters.parameters(), SgdConfig { lr: 0.25, ..Default::default() })?;
    let mut scaler = GradScaler::disabled();
    let loss = || ops::sum(&ops::mul(&w, &w)?);
    scaler.scale(&loss()?)?.backward()?;
    scaler.step(&mut sgd)?;
    scaler.update()?;
    assert_says(scaler.scale(&loss()?)?.backward(), &["`head.bias`", "was not rewritten from it"]);
    Ok(())
}

#[test]
fn its_debug_output_names_what_was_handed_out() -> Result<()> {
    let masters = MasterVars::new(DType::BF16, &CPU);
    let _w = masters.var_builder().get(3, "head.bias")?;
    let text = format!("{masters:?}");
    assert!(text.contains("BF16") && text.contains("head.bias"), "{text}");
    Ok(())
}

#[test]
fn a_loss_of_all_variables_misses_none() -> Result<()> {
    let masters = MasterVars::new(DType::BF16, &CPU);
    let w = masters.var_builder().get(3, "head.bias")?;
    let missing = masters.missing(&ops::sum(&w)?);
    assert!(missing.is_empty());
    assert_eq!(missing.to_string(), "all 1 variables get a gradient");
    Ok(())
}
