//! What an image costs each network: counted in a forward pass, not written down.

use candle_amp::{Autocast, Parameters, diagnostics::TraceRow, ops};
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap, var_builder::SimpleBackend};

use super::{Architecture, Model, SIDE};
use crate::common::progress::count;

#[derive(Debug)]
pub(super) struct Cost {
    pub(super) parameters: usize,
    /// Two for each multiply-add, forward.
    pub(super) flops: usize,
    /// What backward keeps, under autocast to `F32` (none) and to `BF16`.
    pub(super) saved_bytes: [usize; 2],
}

impl Cost {
    pub(super) fn of(architecture: Architecture) -> Result<Self> {
        let ((model, parameters), device) = (blank(architecture)?, Device::Cpu);
        let x = Tensor::zeros((1, 3, SIDE, SIDE), DType::F32, &device)?;
        let y = Tensor::zeros(1, DType::U32, &device)?;
        let mut flops = 0;
        let mut saved_bytes = [0; 2];
        let scopes = [Autocast::disabled(), Autocast::new(DType::BF16)];
        for (amp, saved) in scopes.iter().zip(&mut saved_bytes) {
            let (loss, trace) = amp.trace(|| ops::cross_entropy(&model.forward(&x, true)?, &y));
            loss?;
            flops = trace.rows().iter().map(|row| 2 * multiply_adds(row)).sum();
            *saved = trace.saved_bytes();
        }
        Ok(Self { parameters, flops, saved_bytes })
    }
}

/// A network of zeros, and how many parameters it has.
pub(super) fn blank(architecture: Architecture) -> Result<(Model, usize)> {
    let varmap = VarMap::new();
    let zeros = Box::new(Zeros(varmap.clone()));
    let vb = VarBuilder::from_backend(zeros, DType::F32, Device::Cpu);
    let model = Model::new(architecture, vb, false)?;
    let vars = Parameters::from_varmap(&varmap).vars();
    Ok((model, vars.iter().map(|var| var.elem_count()).sum()))
}

fn multiply_adds(row: &TraceRow) -> usize {
    products(row.op.name(), &row.input_shapes, &row.output_shape)
}

/// The multiply-adds of an operator that networks spend their time in; those of others are not counted.
pub(crate) fn products(name: &str, inputs: &[Shape], output: &Shape) -> usize {
    let (input, outputs) = (|i: usize| inputs[i].dims(), output.elem_count());
    match name {
        // An output is a sum over one filter: the weight but for its first dimension.
        "conv2d" | "linear" => outputs * input(1)[1..].iter().product::<usize>(),
        // Scores, and what they weigh: queries, keys and values come as one tensor.
        "sdpa" => 2 * outputs * input(0)[1],
        _ => 0,
    }
}

/// Makes variables of zeros, which take no time: counting needs only their shapes.
struct Zeros(VarMap);

impl SimpleBackend for Zeros {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        let var = Var::zeros(s, dtype, dev)?;
        let tensor = var.as_tensor().clone();
        let mut data = self.0.data().lock().unwrap_or_else(|error| error.into_inner());
        data.insert(name.to_owned(), var);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("variable `{name}` has no shape to be made with")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// A table of every network.
pub(crate) fn list() -> Result<String> {
    let head = ["model", "parameters", "MFLOPs", "f32 KiB", "bf16 KiB", "paper"];
    let mut rows = vec![head.map(str::to_owned)];
    for architecture in Architecture::all() {
        let Cost { parameters, flops, saved_bytes } = Cost::of(architecture)?;
        let [single, half] = saved_bytes.map(|bytes| count(bytes.div_ceil(1024)).to_string());
        let (parameters, flops) = (count(parameters), format!("{:.1}", flops as f64 / 1e6));
        let paper = architecture.paper().to_owned();
        rows.push([architecture.to_string(), parameters.to_string(), flops, single, half, paper]);
    }
    let mut text = String::new();
    for [name, parameters, flops, single, half, paper] in rows {
        let row = format!("{name:<19} {parameters:>10} {flops:>8} {single:>8} {half:>9}  {paper}");
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text.push_str("\nFor one image: FLOPs forward, two for each multiply-add; activations that backward keeps.\n");
    Ok(text)
}
