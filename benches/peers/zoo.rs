//! Steps of the zoo's networks.

use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::precision::Precision;
use candle_amp_benches::zoo::{Network, Training};
use candle_core::Device;

pub(crate) fn network(network: Network, precision: Precision) -> anyhow::Result<Runner> {
    let mut training = Training::new(network, precision, &Device::Cpu)?;
    Ok(Box::new(move || {
        seconds(|| {
            training.step()?;
            Ok(())
        })
    }))
}

/// How many parameters there are, and the losses of so many steps from known values on, which must be
/// PyTorch's too.
pub(crate) fn check(
    network: Network,
    precision: Precision,
    steps: usize,
) -> anyhow::Result<Vec<(String, f64)>> {
    let mut training = Training::new(network, precision, &Device::Cpu)?;
    training.set_known_values()?;
    let mut numbers = vec![("parameters".to_string(), training.parameter_count() as f64)];
    for i in 1..=steps {
        let loss = training.step()?.to_scalar::<f32>()?;
        numbers.push((format!("loss {i}"), f64::from(loss)));
    }
    Ok(numbers)
}
