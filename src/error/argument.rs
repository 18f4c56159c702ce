//! Errors of arguments and settings.

use candle_core::{DType, DeviceLocation, Shape};

/// An argument does not fit: its value, shape, dtype, device or name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArgumentError {
    /// A setting outside its range.
    #[error("{name} is {got}, expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// The value given.
        got: f64,
        /// The values that would do.
        expected: &'static str,
    },
    /// Two settings that contradict each other.
    #[error("{low_name} {low} is above {high_name} {high}")]
    Order {
        /// The setting that should be lower.
        low_name: &'static str,
        /// Its value.
        low: f64,
        /// The setting that should be higher.
        high_name: &'static str,
        /// Its value.
        high: f64,
    },
    /// Shapes that do not fit an operator or each other.
    #[error("{op}: {name} has shape {got:?}, expected {expected}")]
    Shape {
        /// The operator.
        op: &'static str,
        /// The argument at fault.
        name: &'static str,
        /// Its shape.
        got: Shape,
        /// What would do.
        expected: String,
    },
    /// A dtype that an operator does not take.
    #[error("{op}: {name} is {got:?}, expected {expected}")]
    DType {
        /// The operator.
        op: &'static str,
        /// The argument at fault.
        name: &'static str,
        /// Its dtype.
        got: DType,
        /// What would do.
        expected: String,
    },
    /// Arguments on different devices.
    #[error("{op}: {name} is on {got:?} and the first argument on {expected:?}: move one of them")]
    Device {
        /// The operator.
        op: &'static str,
        /// The argument at fault.
        name: &'static str,
        /// Its device.
        got: DeviceLocation,
        /// The device of the first argument.
        expected: DeviceLocation,
    },
    /// One name for two variables.
    #[error("parameter name `{name}` appears twice: names must be unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
}
