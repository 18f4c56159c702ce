//! The CUDA side: one launch a pass for all tensors, up to [`ROWS`] of them. Nothing waits.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{Factor, Flag, Growth};
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, Table, address, address_mut};

static SOURCE: Source = Source { name: "update", code: include_str!("update.cu") };

/// Words of a row, and the rows of a launch.
const ROW: usize = 4;
const ROWS: usize = (Table::WORDS - 1) / ROW;
/// Elements of a block, as in the `.cu`.
const CHUNK: usize = 1 << 14;
const THREADS: usize = 256;
const ONE: Grid = Grid { blocks: [1, 1, 1], threads: THREADS, shared: 0 };

/// Launches `kernel` over `tensors`, once for every [`ROWS`]; `arguments` come after the table, for
/// the launch that starts at tensor `.1` and has `.2` blocks.
///
/// A block finds its row by `first_block`, and stays below that row's `len`.
fn each(
    gpu: &Gpu,
    kernel: &str,
    tensors: &[&Tensor],
    arguments: impl Fn(Launch, usize, usize) -> Result<Launch>,
) -> Result<()> {
    for (number, part) in tensors.chunks(ROWS).enumerate() {
        let (mut words, mut blocks) = (vec![part.len() as u64], 0);
        for tensor in part {
            let double = match tensor.dtype() {
                DType::F64 => 1,
                DType::F32 => 0,
                other => bail!("expected gradients in F32 or F64, found {other:?}"),
            };
            let len = tensor.elem_count();
            words.extend([blocks as u64, len as u64, address_mut(tensor)?, double]);
            blocks += len.div_ceil(CHUNK);
        }
        let launch = gpu.launch(&SOURCE, kernel)?.table(Table::new(&words));
        let grid = Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: 0 };
        arguments(launch, number * ROWS, blocks)?.run(grid)?;
    }
    Ok(())
}

/// Zeros, two for each gradient: its infinities and NaN.
fn counts(gpu: &Gpu, gradients: usize) -> Result<Tensor> {
    Tensor::zeros(2 * gradients, DType::U32, &gpu.device())
}

fn flags(counts: &Tensor) -> Vec<Flag> {
    let flag = |at| Flag { counts: counts.clone(), at };
    (0..counts.elem_count() / 2).map(flag).collect()
}

/// See [`super::unscale`].
pub(super) fn unscale(gpu: &Gpu, gradients: &[&Tensor], factor: &Factor) -> Result<Vec<Flag>> {
    let found = counts(gpu, gradients.len())?;
    let (state, inverse) = match factor {
        Factor::Host(inverse) => (None, *inverse),
        // The second of the state's words.
        Factor::Device(state) => (Some(state.narrow(0, 1, 1)?), 1.0),
    };
    each(gpu, "unscale", gradients, |launch, first, _| {
        let part = found.narrow(0, 2 * first, found.elem_count() - 2 * first)?;
        launch.read_or_null(state.as_ref())?.float(inverse).write(&part)
    })?;
    Ok(flags(&found))
}

/// See [`super::overflows_f16`].
pub(super) fn overflows_f16(gpu: &Gpu, gradients: &[&Tensor]) -> Result<Vec<Flag>> {
    let found = counts(gpu, gradients.len())?;
    each(gpu, "overflows_f16", gradients, |launch, first, _| {
        launch.write(&found.narrow(0, 2 * first, found.elem_count() - 2 * first)?)
    })?;
    Ok(flags(&found))
}

/// See [`super::norm`].
pub(super) fn norm(gpu: &Gpu, gradients: &[&Tensor]) -> Result<Tensor> {
    let blocks =
        |part: &[&Tensor]| -> usize { part.iter().map(|g| g.elem_count().div_ceil(CHUNK)).sum() };
    // One sum for every block of every launch.
    let sums = gpu.empty(blocks(gradients).max(1), DType::F64)?;
    each(gpu, "squares", gradients, |launch, first, own| {
        launch.write(&sums.narrow(0, blocks(&gradients[..first]), own.max(1))?)
    })?;
    let norm = gpu.empty((), DType::F32)?;
    let launch = gpu.launch(&SOURCE, "norm_of")?;
    launch.read(&sums)?.size(blocks(gradients)).write(&norm)?.run(ONE)?;
    Ok(norm)
}

/// See [`super::clip_norm`].
pub(super) fn clip_norm(gpu: &Gpu, gradients: &[&Tensor], norm: &Tensor, max: f64) -> Result<()> {
    each(gpu, "clip_norm", gradients, |launch, _, _| Ok(launch.read(norm)?.double(max)))
}

/// See [`super::clip_value`].
pub(super) fn clip_value(gpu: &Gpu, gradients: &[&Tensor], limit: f64) -> Result<()> {
    each(gpu, "clip_value", gradients, |launch, _, _| Ok(launch.double(limit)))
}

/// See [`super::any`].
pub(super) fn any(gpu: &Gpu, flags: &[&Flag]) -> Result<Tensor> {
    // Flags of one pass lie side by side: mostly this is one range.
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for flag in flags {
        let start = address(&flag.counts)? + 8 * flag.at as u64;
        match ranges.last_mut() {
            Some((first, len)) if *first + 4 * *len == start => *len += 2,
            _ => ranges.push((start, 2)),
        }
    }
    let mut found = Vec::new();
    for part in ranges.chunks(ROWS) {
        let mut words = vec![part.len() as u64];
        words.extend(part.iter().flat_map(|&(start, len)| [0, len, start, 0]));
        let one = gpu.empty(1, DType::U32)?;
        // It stays below each range's `len`.
        gpu.launch(&SOURCE, "any_of")?.table(Table::new(&words)).write(&one)?.run(ONE)?;
        found.push(one);
    }
    match found.as_slice() {
        [] => Tensor::zeros(1, DType::U32, &gpu.device()),
        [one] => Ok(one.clone()),
        // Over a thousand separate ranges: once more over what was found.
        several => {
            let twice: Vec<&Tensor> = several.iter().flat_map(|one| [one, one]).collect();
            let counts = Tensor::cat(&twice, 0)?;
            any(gpu, &self::flags(&counts).iter().collect::<Vec<_>>())
        }
    }
}

/// See [`super::DeviceScale`].
pub(super) fn upload(device: &Device, words: [u32; 4]) -> Result<Tensor> {
    Tensor::new(&words.map(f32::from_bits), device)
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
        .double(rule.growth_factor)
        .double(rule.backoff_factor)
        .int(int(rule.growth_interval))
        .int(int(rule.hysteresis))
        .float(rule.min_scale)
        .float(rule.max_scale)
        .run(Grid { blocks: [1, 1, 1], threads: 1, shared: 0 })
}
