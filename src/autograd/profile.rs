//! How long each operator takes, forward and backward.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Shape, Tensor};

thread_local! {
    /// The profile that this thread takes.
    static RECORDER: RefCell<Option<Recorder>> = const { RefCell::new(None) };
}

struct Recorder {
    device: Device,
    began: Instant,
    /// How many operators are running, each within the one before.
    depth: usize,
    rows: Vec<ProfileRow>,
}

/// One run of an operator, forward or backward, in a [`Profile`].
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileRow {
    /// The operator's name: [`Op::name`](crate::Op::name).
    pub name: &'static str,
    /// Whether it ran backward.
    pub backward: bool,
    /// When it began, since the profile did.
    pub start: Duration,
    /// Forward, from the casts of its inputs to its place in the graph; backward, until its gradients are added to others.
    pub duration: Duration,
    /// How many other rows it is within: the backward of a checkpoint runs operators forward and backward.
    pub depth: usize,
    /// The shape of each input.
    pub input_shapes: Vec<Shape>,
    /// In backward, whether each input got a gradient; empty in forward.
    pub wanted: Vec<bool>,
    /// The dtype of the output, and of its gradient.
    pub output: DType,
    /// The shape of the output, and of its gradient.
    pub output_shape: Shape,
    /// How a convolution, a product or attention was computed, by the names that
    /// [`Autocast::trace`](crate::Autocast::trace) lists; of two products in backward, the second one.
    pub algorithm: Option<&'static str>,
}

/// When each operator ran and for how long, from [`profile`].
#[derive(Clone, Debug)]
pub struct Profile {
    began: Instant,
    duration: Duration,
    rows: Vec<ProfileRow>,
}

impl Profile {
    /// When it began.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// How long it took, operators and all else.
    pub fn duration(&self) -> Duration {
        self.duration
    }

    /// The operators in the order they began. One that failed has no row.
    pub fn rows(&self) -> &[ProfileRow] {
        &self.rows
    }
}

/// Whether this thread takes a profile.
pub(crate) fn is_active() -> bool {
    RECORDER.with_borrow(Option::is_some)
}

/// Runs `f`, and measures the crate's operators that run in it on this thread, forward and backward: to see where the time of
/// a training step goes.
///
/// candle's own operators leave no row, nor do optimizers. What runs in a profile within this one has its rows there alone.
///
/// # Synchronisation
///
/// Waits for `device` before and after each operator: a GPU would otherwise still be working when the host has gone on. So a step
/// takes longer than without a profile. On a CPU the measuring costs about a tenth of a microsecond an operator.
///
/// # Errors
///
/// Those of waiting for `device`, which operators within `f` return too.
///
/// # Examples
///
/// ```
/// use candle_amp::{GradScaler, diagnostics::profile, ops};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::ones((4, 4), DType::F32, &Device::Cpu)?;
/// let mut scaler = GradScaler::disabled();
/// let (result, profile) = profile(&Device::Cpu, || {
///     let loss = ops::sum(&ops::matmul(&w, &w)?)?;
///     scaler.scale(&loss)?.backward()
/// })?;
/// result?;
/// let rows: Vec<_> = profile.rows().iter().map(|row| (row.name, row.backward)).collect();
/// assert_eq!(rows, [("matmul", false), ("sum", false), ("sum", true), ("matmul", true)]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
pub fn profile<T>(device: &Device, f: impl FnOnce() -> T) -> Result<(T, Profile)> {
    /// Puts the outer recorder back, on panic too.
    struct Outer(Option<Recorder>);
    impl Drop for Outer {
        fn drop(&mut self) {
            RECORDER.set(self.0.take());
        }
    }
    device.synchronize()?;
    let began = Instant::now();
    let recorder = Recorder { device: device.clone(), began, depth: 0, rows: Vec::new() };
    let outer = Outer(RECORDER.replace(Some(recorder)));
    let result = f();
    let recorder = RECORDER.take();
    drop(outer);
    device.synchronize()?;
    let duration = began.elapsed();
    let mut rows = recorder.map_or_else(Vec::new, |recorder| recorder.rows);
    rows.sort_by_key(|row| (row.start, row.depth));
    Ok((result, Profile { began, duration, rows }))
}

/// An operator that is being measured.
pub(super) struct Timer {
    start: Instant,
    depth: usize,
}

impl Timer {
    /// Begins to measure, if this thread takes a profile.
    pub(super) fn start() -> Result<Option<Self>> {
        let device = RECORDER.with_borrow(|recorder| recorder.as_ref().map(|r| r.device.clone()));
        let Some(device) = device else { return Ok(None) };
        device.synchronize()?;
        Ok(RECORDER.with_borrow_mut(|recorder| {
            let recorder = recorder.as_mut()?;
            recorder.depth += 1;
            Some(Self { start: Instant::now(), depth: recorder.depth - 1 })
        }))
    }

    /// Ends it: of the operator `name` with this `output` or, where it ran backward, its gradient, when there is word of
    /// which inputs were `wanted`.
    pub(super) fn stop(
        self,
        name: &'static str,
        output: &Tensor,
        input_shapes: Vec<Shape>,
        wanted: Option<Vec<bool>>,
        algorithm: Option<&'static str>,
    ) -> Result<()> {
        let device = RECORDER.with_borrow(|recorder| recorder.as_ref().map(|r| r.device.clone()));
        device.map_or(Ok(()), |device| device.synchronize())?;
        let duration = self.start.elapsed();
        RECORDER.with_borrow_mut(|recorder| {
            if let Some(Recorder { began, rows, .. }) = recorder {
                rows.push(ProfileRow {
                    name,
                    backward: wanted.is_some(),
                    start: self.start.duration_since(*began),
                    duration,
                    depth: self.depth,
                    input_shapes,
                    wanted: wanted.unwrap_or_default(),
                    output: output.dtype(),
                    output_shape: output.shape().clone(),
                    algorithm,
                });
            }
        });
        Ok(())
    }
}

impl Drop for Timer {
    /// After an error too.
    fn drop(&mut self) {
        RECORDER.with_borrow_mut(|recorder| {
            if let Some(recorder) = recorder {
                recorder.depth = self.depth;
            }
        });
    }
}
