//! Checks, norms, scaling and clipping of gradients on CUDA: the host side of `multi_tensor.cu`.
//!
//! A launch has a table among its arguments, with the address, length, dtype and factors of up to [`TensorList::ROWS`]
//! gradients. So many small tensors take few launches, and the table needs no copy to the device.
//!
//! Nothing waits for the device. What a pass finds stays there, in two counts for each gradient. [`any`] makes one flag
//! of several counts. A norm takes one more launch, in which one block adds up the F64 sums of all blocks, in one
//! order.

use candle_core::{DType, Device, Result, Tensor};

use super::found::{DeviceFoundInf, Norm};
use super::multiplier::{Growth, Multiplier, ScaledGradient, tensors};
use crate::error::bail;
use crate::kernels::cuda::{Gpu, Grid, Launch, Many, Source, address, address_mut};
use crate::kernels::ordered;

static SOURCE: Source = Source { name: "multi_tensor", code: include_str!("multi_tensor.cu") };

/// Of as many words per tensor as `Row` in the `.cu`.
type TensorList = Many<8>;
/// As `Range`.
type Ranges = Many<3>;
const ONE: Grid = Grid { blocks: [1, 1, 1], threads: Grid::THREADS, shared: 0 };

/// Launches `kernel` over `gradients`, once for every [`TensorList::ROWS`]; `arguments` come after the
/// table, for the launch that starts at gradient `.1` and has `.2` blocks.
fn each(
    gpu: &Gpu,
    kernel: &'static str,
    gradients: &[ScaledGradient<'_>],
    arguments: impl Fn(Launch, usize, usize) -> Result<Launch>,
) -> Result<()> {
    for (number, part) in gradients.chunks(TensorList::ROWS).enumerate() {
        let mut rows = TensorList::new();
        for (gradient, by) in part {
            let double = match gradient.dtype() {
                DType::F64 => 1,
                DType::F32 => 0,
                other => bail!("expected gradients in F32 or F64, found {other:?}"),
            };
            let [a, b, c, d] = by.words()?;
            rows.add(gradient.elem_count(), &[address_mut(gradient)?, double, a, b, c, d]);
        }
        let (table, grid) = rows.table();
        if grid.blocks[0] == 0 {
            continue; // all of them are empty
        }
        let launch = gpu.launch(&SOURCE, kernel)?.table(table);
        arguments(launch, number * TensorList::ROWS, grid.blocks[0])?.run(grid)?;
    }
    Ok(())
}

/// What is multiplied already.
fn as_they_are<'a>(gradients: &[&'a Tensor]) -> Vec<ScaledGradient<'a>> {
    gradients.iter().map(|gradient| (*gradient, &Multiplier::ONE)).collect()
}

/// Zeros, two for each gradient: its infinities and NaN.
fn counts(gpu: &Gpu, gradients: usize) -> Result<Tensor> {
    gpu.zeros(2 * gradients, DType::U32)
}

fn flags(counts: &Tensor) -> Vec<DeviceFoundInf> {
    let flag = |at| DeviceFoundInf { counts: counts.clone(), at };
    (0..counts.elem_count() / 2).map(flag).collect()
}

/// The counts of the rows from `first` on.
fn counts_from(counts: &Tensor, first: usize) -> Result<Tensor> {
    counts.narrow(0, 2 * first, counts.elem_count() - 2 * first)
}

/// See [`super::check`].
pub(super) fn check(gpu: &Gpu, gradients: &[ScaledGradient<'_>]) -> Result<Vec<DeviceFoundInf>> {
    let found = counts(gpu, gradients.len())?;
    each(gpu, "check", gradients, |launch, first, _| launch.write(&counts_from(&found, first)?))?;
    Ok(flags(&found))
}

/// See [`super::apply_scale`].
pub(super) fn apply_scale(gpu: &Gpu, gradients: &[ScaledGradient<'_>]) -> Result<()> {
    each(gpu, "apply_scale", gradients, |launch, _, _| Ok(launch))
}

/// See [`super::overflows_f16`].
pub(super) fn overflows_f16(gpu: &Gpu, gradients: &[&Tensor]) -> Result<Vec<DeviceFoundInf>> {
    let found = counts(gpu, gradients.len())?;
    each(gpu, "overflows_f16", &as_they_are(gradients), |launch, first, _| {
        launch.write(&counts_from(&found, first)?)
    })?;
    Ok(flags(&found))
}

/// See [`super::norm`].
pub(super) fn norm(
    gpu: &Gpu,
    gradients: &[ScaledGradient<'_>],
) -> Result<(Norm, Vec<DeviceFoundInf>)> {
    let blocks = |part: &[&Tensor]| -> usize {
        part.iter().map(|gradient| TensorList::blocks_of(gradient.elem_count())).sum()
    };
    let (all, found) = (tensors(gradients), counts(gpu, gradients.len())?);
    // One sum for every block of every launch.
    let sums = gpu.empty(blocks(&all).max(1), DType::F64)?;
    each(gpu, "squares", gradients, |launch, first, own| {
        let sums = sums.narrow(0, blocks(&all[..first]), own.max(1))?;
        launch.write(&counts_from(&found, first)?)?.write(&sums)
    })?;
    let (exact, rounded) = (gpu.empty((), DType::F64)?, gpu.empty((), DType::F32)?);
    let launch = gpu.launch(&SOURCE, "norm_of")?;
    launch.read(&sums)?.size(blocks(&all)).write(&exact)?.write(&rounded)?.run(ONE)?;
    Ok((Norm { exact, rounded }, flags(&found)))
}

/// See [`super::clip_value`].
pub(super) fn clip_value(gpu: &Gpu, gradients: &[&Tensor], limit: f64) -> Result<()> {
    each(gpu, "clip_value", &as_they_are(gradients), |launch, _, _| Ok(launch.double(limit)))
}

/// See [`super::any`].
pub(super) fn any(gpu: &Gpu, flags: &[&DeviceFoundInf]) -> Result<Tensor> {
    // Flags of one pass lie side by side: mostly this is one range.
    let mut ranges: Vec<(u64, usize)> = Vec::new();
    let mut pass = None;
    for flag in flags {
        let counts = match pass {
            Some((id, counts)) if id == flag.counts.id() => counts,
            _ => {
                let counts = address(&flag.counts)?;
                pass = Some((flag.counts.id(), counts));
                counts
            }
        };
        let start = counts + 8 * flag.at as u64;
        match ranges.last_mut() {
            Some((first, len)) if *first + 4 * *len as u64 == start => *len += 2,
            _ => ranges.push((start, 2)),
        }
    }
    let mut found = Vec::new();
    for part in ranges.chunks(Ranges::ROWS) {
        let mut rows = Ranges::new();
        part.iter().for_each(|&(start, len)| rows.add(len, &[start]));
        let one = gpu.empty(1, DType::U32)?;
        // It stays below each range's `len`.
        let (table, _) = rows.table();
        gpu.launch(&SOURCE, "any_of")?.table(table).write(&one)?.run(ONE)?;
        found.push(one);
    }
    match found.as_slice() {
        [] => gpu.zeros(1, DType::U32),
        [one] => Ok(one.clone()),
        // Over a thousand separate ranges: once more over what was found.
        several => {
            let twice: Vec<&Tensor> = several.iter().flat_map(|one| [one, one]).collect();
            let counts = gpu.ordered(|| Tensor::cat(&twice, 0))?;
            any(gpu, &self::flags(&counts).iter().collect::<Vec<_>>())
        }
    }
}

/// See [`super::DeviceScale`].
pub(super) fn upload(device: &Device, words: [u32; 5]) -> Result<Tensor> {
    ordered(device, || Tensor::new(&words.map(f32::from_bits), device))
}

/// See [`super::DeviceScale::update`].
pub(super) fn update_scale(
    gpu: &Gpu,
    state: &Tensor,
    found: &Tensor,
    log: &Tensor,
    rule: &Growth,
) -> Result<()> {
    let int = |x: u32| i32::from_ne_bytes(x.to_ne_bytes());
    let launch = gpu.launch(&SOURCE, "update_scale")?.write(state)?.read(found)?.write(log)?;
    launch
        .size(log.elem_count())
        .double(rule.growth_factor)
        .double(rule.backoff_factor)
        .int(int(rule.growth_interval))
        .int(int(rule.hysteresis))
        .float(rule.min_scale)
        .float(rule.max_scale)
        .run(Grid { blocks: [1, 1, 1], threads: 1, shared: 0 })
}
