//! Every operator on variables that others write all the time, one tensor given for all inputs of its shape.

use candle_amp::ops;
use candle_core::{DType, Var};

use super::{beside_writers, rounds, watched};
use crate::cases;

#[test]
fn every_operator_reads_a_storage_once() {
    let rounds = rounds(2, 6);
    let name = move |number: u64| {
        let all = cases::all();
        let case = &all[(number as usize / rounds).min(all.len() - 1)];
        format!("{} ({})", case.op.name(), case.name)
    };
    watched(name, move |progress| {
        for case in cases::all() {
            // One variable for each shape.
            let mut variables: Vec<Var> = Vec::new();
            let mut inputs = Vec::new();
            for input in &case.inputs {
                let known = variables.iter().find(|var| var.dims() == input.dims()).cloned();
                let variable = known.unwrap_or_else(|| {
                    let value = input.to_dtype(DType::F32).unwrap();
                    variables.push(Var::from_tensor(&value).unwrap());
                    variables[variables.len() - 1].clone()
                });
                inputs.push(variable.as_tensor().clone());
            }
            beside_writers(&progress, &variables, || {
                for _ in 0..rounds {
                    // What the writers do may make a backward an error, as may two inputs that must
                    // differ: what matters is that it ends.
                    let output = (case.f)(&inputs);
                    let _ = output.and_then(|output| ops::sum(&output)?.backward());
                    // Not once a case: beside so many writers, one of an LSTM takes seconds on a busy machine.
                    progress.step();
                }
            });
        }
    });
}
