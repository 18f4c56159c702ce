//! A graph as a list of steps, which can be run, interpreted, made smaller and printed.

use std::fmt;

use candle_amp::Op;
use candle_core::{DType, Result, Tensor};

use super::array::Array;
use super::draft::Draft;
use super::tape::Tape;

/// Inputs and settings of an operator.
pub(super) type Call = (Vec<usize>, Vec<usize>);

/// An operator: how to draw a call of it, how to run that, and what it should be.
pub(super) struct Row {
    /// `None` for candle's own.
    pub(super) op: Option<Op>,
    pub(super) name: &'static str,
    /// A call on a value of the draft, or on views of it, and other values.
    pub(super) draw: fn(&mut Draft, usize) -> Option<Call>,
    pub(super) run: fn(&[Tensor], &[usize]) -> Result<Tensor>,
    /// On the oracle's scalars. Nothing here may come from the crate or from candle.
    pub(super) reference: fn(&mut Tape, &[Array], &[usize]) -> Array,
    /// Whether it moves or selects, and rounds nothing.
    pub(super) exact: bool,
    /// Whether inputs after the first may have any dtype.
    pub(super) mixed: bool,
    /// Whether backward reads numbers that were rounded to the dtype of the output.
    pub(super) rounded: bool,
    /// Whether no gradient goes through.
    pub(super) cuts: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Scope {
    /// Of an active autocast.
    pub(super) autocast: Option<DType>,
    pub(super) no_grad: bool,
}

#[derive(Clone)]
pub(super) enum Kind {
    Leaf {
        dims: Vec<usize>,
        dtype: DType,
        values: Vec<f64>,
        variable: bool,
    },
    Call(&'static Row, Vec<usize>),
    /// `checkpoint` of these steps on the first input; the others are captured. The steps number the inputs first,
    /// then themselves, and the last is the result.
    Checkpoint(Vec<Step>),
}

#[derive(Clone)]
pub(super) struct Step {
    pub(super) kind: Kind,
    /// Numbers of earlier steps.
    pub(super) inputs: Vec<usize>,
    pub(super) scope: Scope,
}

/// How gradients are asked for.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(super) enum Way {
    /// `loss.backward()` of each loss.
    Candle,
    /// The same of the sum of the losses.
    CandleOfSum,
    /// `scaler.scale(&loss)?.backward()?` of each loss, which frees the graph.
    Scaler,
    ScalerOfSum,
    /// With the graph kept, twice.
    Retained,
    /// Of two forward passes, collected together.
    Accumulated,
    /// candle's, and a scaler's of the same graph.
    CandleThenScaler,
    /// Each loss twice at once, on two threads that share the graph.
    TwoThreads,
    /// The same by two scalers.
    TwoScalers,
    /// Forward on one thread, backward on another.
    OtherThread,
}

impl Way {
    /// Those of every program.
    pub(super) const PLAIN: [Way; 3] = [Way::Candle, Way::Scaler, Way::Retained];
    /// Those of some.
    pub(super) const OTHERS: [Way; 7] = [
        Way::CandleOfSum,
        Way::ScalerOfSum,
        Way::Accumulated,
        Way::CandleThenScaler,
        Way::TwoThreads,
        Way::TwoScalers,
        Way::OtherThread,
    ];
}

#[derive(Clone)]
pub(super) struct Program {
    pub(super) steps: Vec<Step>,
    /// Numbers of steps whose result is one number, in the order they go back.
    pub(super) losses: Vec<usize>,
    pub(super) ways: Vec<Way>,
    /// Of the scaler, as a power of two.
    pub(super) scale: i32,
    /// What backward is called in, which changes nothing.
    pub(super) around: Scope,
}

impl Program {
    /// Whether operators of the crate alone have made it, and reshapes, and no loss is part of another.
    pub(super) fn is_whole(&self) -> bool {
        let own = |step: &Step| match &step.kind {
            Kind::Leaf { .. } | Kind::Checkpoint(_) => true,
            // Its two results are joined by candle.
            Kind::Call(row, _) => row.name != "lstm" && (row.op.is_some() || row.name == "reshape"),
        };
        let view = |step: &Step| matches!(&step.kind, Kind::Call(row, _) if row.op.is_none());
        let used = |loss: &usize| self.steps.iter().any(|step| step.inputs.contains(loss));
        let apart = |loss: &usize| !view(&self.steps[*loss]) && !used(loss);
        self.steps.iter().all(own) && self.losses.iter().all(apart)
    }
}

impl Step {
    pub(super) fn is_leaf(&self) -> bool {
        matches!(self.kind, Kind::Leaf { .. })
    }

    pub(super) fn is_variable(&self) -> bool {
        matches!(self.kind, Kind::Leaf { variable: true, .. })
    }

    fn print(&self, f: &mut fmt::Formatter<'_>, number: usize, indent: &str) -> fmt::Result {
        let inputs: Vec<String> = self.inputs.iter().map(|input| format!("v{input}")).collect();
        write!(f, "{indent}v{number} = ")?;
        match &self.kind {
            Kind::Leaf { dims, dtype, values, variable } => {
                let what = if *variable { "variable" } else { "constant" };
                writeln!(f, "{what} {dtype:?} {dims:?} {values:?}")
            }
            Kind::Call(row, args) => {
                let owner = if row.op.is_some() { "" } else { "candle " };
                write!(f, "{owner}{}({})", row.name, inputs.join(", "))?;
                if !args.is_empty() {
                    write!(f, " {args:?}")?;
                }
                if let Some(dtype) = self.scope.autocast {
                    write!(f, ", in autocast {dtype:?}")?;
                }
                if self.scope.no_grad {
                    write!(f, ", in no_grad")?;
                }
                writeln!(f)
            }
            Kind::Checkpoint(body) => {
                let scope = self.scope.autocast.map(|dtype| format!(", in autocast {dtype:?}"));
                let (x, rest) = inputs.split_first().expect("a checkpoint has an input");
                let captured = rest.iter().enumerate().map(|(i, v)| format!("v{} is {v}", i + 1));
                let captured: Vec<String> = captured.collect();
                let scope = scope.unwrap_or_default();
                writeln!(f, "checkpoint of v0 at {x}; {}{scope}", captured.join(", "))?;
                for (at, step) in body.iter().enumerate() {
                    step.print(f, self.inputs.len() + at, &format!("{indent}    "))?;
                }
                Ok(())
            }
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, step) in self.steps.iter().enumerate() {
            step.print(f, number, "    ")?;
        }
        let losses: Vec<String> = self.losses.iter().map(|loss| format!("v{loss}")).collect();
        let (losses, ways, scale) = (losses.join(", "), &self.ways, self.scale);
        write!(f, "    losses, in this order: {losses}; backward by {ways:?}, scale 2^{scale}")?;
        if let Some(dtype) = self.around.autocast {
            write!(f, ", in autocast {dtype:?}")?;
        }
        if self.around.no_grad {
            write!(f, ", in no_grad")?;
        }
        Ok(())
    }
}
