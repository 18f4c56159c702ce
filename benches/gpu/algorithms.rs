//! The algorithms that the crate chooses, as it logs them.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// How often each was chosen, by pass and name.
pub(crate) type Chosen = BTreeMap<[String; 2], u64>;

/// Runs `f`, and counts what this thread's operators choose in it.
pub(crate) fn chosen<T>(f: impl FnOnce() -> T) -> (T, Chosen) {
    let listener = Listener::default();
    let chosen = listener.0.clone();
    let result = tracing::subscriber::with_default(listener, f);
    let mut chosen = chosen.lock().unwrap_or_else(PoisonError::into_inner);
    // A convolution on a GPU chooses twice: the device first.
    chosen.retain(|[_, algorithm], _| algorithm != "cuda");
    (result, mem::take(&mut chosen))
}

#[derive(Default)]
struct Listener(Arc<Mutex<Chosen>>);

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "candle_amp::algorithm"
    }

    fn event(&self, event: &Event<'_>) {
        #[derive(Default)]
        struct Names([String; 2]);
        impl Visit for Names {
            fn record_str(&mut self, field: &Field, value: &str) {
                match field.name() {
                    "pass" => self.0[0] = value.to_owned(),
                    "algorithm" => self.0[1] = value.to_owned(),
                    _ => {}
                }
            }

            fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
        }
        let mut names = Names::default();
        event.record(&mut names);
        let mut chosen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *chosen.entry(names.0).or_default() += 1;
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use anyhow::Result;
    use candle_amp::{GradScaler, nn, ops};
    use candle_core::{DType, Device, Tensor, Var};

    use super::*;

    /// In a process of its own: tracing turns a line of the log off where another thread, to which nobody listens, is about to
    /// log it first.
    #[test]
    fn each_pass_of_a_convolution_is_counted() -> Result<()> {
        const TEST: &str = "algorithms::tests::each_pass_of_a_convolution_is_counted";
        const MARK: &str = "CANDLE_AMP_TEST_PROCESS";
        if env::var_os(MARK).is_none() {
            let mut again = Command::new(env::current_exe()?);
            let output = again.args(["--exact", "--nocapture", TEST]).env(MARK, TEST).output()?;
            let text =
                String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("1 passed"), "{text}");
            return Ok(());
        }
        let weight = Var::ones((2, 2, 3, 3), DType::F32, &Device::Cpu)?;
        let x = Var::ones((1, 2, 6, 6), DType::F32, &Device::Cpu)?;
        let step = || -> Result<()> {
            let y = ops::conv2d(&x, &weight, None, nn::Conv2dConfig::default())?;
            let y = ops::conv2d(&y, &weight, None, nn::Conv2dConfig::default())?;
            Ok(GradScaler::disabled().scale(&ops::sum(&y)?)?.backward()?)
        };
        step()?;
        let (result, all) = chosen(step);
        result?;
        let count = |pass: &str| -> u64 {
            all.iter().filter(|([of, _], _)| of == pass).map(|(_, count)| count).sum()
        };
        let passes = ["conv forward", "conv dgrad", "conv wgrad"];
        assert_eq!(passes.map(count), [2, 2, 2], "{all:?}");
        assert!(all.keys().all(|[_, algorithm]| !algorithm.is_empty()), "{all:?}");
        let (nothing, none) = chosen(|| Tensor::ones(3, DType::F32, &Device::Cpu));
        nothing?;
        assert!(none.is_empty(), "{none:?}");
        Ok(())
    }
}
