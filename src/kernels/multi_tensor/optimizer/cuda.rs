//! Optimizer steps on CUDA: the host side of `optimizer.cu`.
//!
//! Tensors are grouped by formulas and by arithmetic, F32 or F64; nearly always that is one group. A launch has a table
//! of up to [`TensorList::ROWS`] tensors among its arguments, so many small tensors take few launches. LAMB takes two,
//! because its update needs norms over a whole tensor. The first writes sums of squares, and the second reads them.
//!
//! Nothing waits for the device: kernels read there whether the step is skipped, and count skipped steps. Each formula
//! is a program of its own, so only those in use are compiled.

use candle_core::{DType, Error, Result, Tensor};

use super::rule::Rule;
use super::slot::{Master, Skip, Slot};
use crate::error::bail;
use crate::kernels::capture;
use crate::kernels::cuda::{Gpu, Grid, Many, Source, address, address_mut};

macro_rules! source {
    ($name:literal, $only:literal) => {
        Source {
            name: concat!("optimizer_", $name),
            code: concat!("#define ONLY ", $only, "\n", include_str!("optimizer.cu")),
        }
    };
}

static SGD: Source = source!("sgd", 0);
static ADAMW: Source = source!("adamw", 1);
static LION: Source = source!("lion", 2);
static AVERAGE: Source = source!("average", 3);
static LAMB: Source = source!("lamb", 4);
static REBUILD: Source = source!("rebuild", 5);

/// Of as many words per tensor as `Row` in the `.cu`.
type TensorList = Many<{ 2 + ROW }>;
/// Those words but for the first two: addresses, kinds and place, what a captured step reads anew, and the multiplier.
const ROW: usize = 6 + 2 + capture::ROW + 4;

/// One step of every slot, all on `gpu`.
pub(super) fn step(gpu: &Gpu, slots: &[Slot<'_>], skip: Option<Skip<'_>>) -> Result<()> {
    // By formulas and arithmetic; nearly always that is one group.
    let kind = |slot: &Slot<'_>| (kernel(slot.rule), slot.variable.dtype() == DType::F64);
    let mut left: Vec<(usize, &Slot<'_>)> = slots.iter().enumerate().collect();
    while let Some(&(_, first)) = left.first() {
        let wanted = kind(first);
        let (chosen, others): (Vec<_>, _) =
            left.into_iter().partition(|(_, slot)| kind(slot) == wanted);
        for rows in chosen.chunks(TensorList::ROWS) {
            launch(gpu, first.rule, wanted.1, rows, skip)?;
        }
        left = others;
    }
    Ok(())
}

fn kernel(rule: Rule) -> &'static str {
    match rule {
        Rule::Sgd(_) => "sgd",
        Rule::AdamW(_) => "adamw",
        Rule::Lion(_) => "lion",
        Rule::Average(_) => "average",
        Rule::LambMoments(_) | Rule::LambUpdate(..) => "lamb",
    }
}

fn launch(
    gpu: &Gpu,
    rule: Rule,
    double: bool,
    slots: &[(usize, &Slot<'_>)],
    skip: Option<Skip<'_>>,
) -> Result<()> {
    let mut rows = TensorList::new();
    for &(number, slot) in slots {
        let place = skip.map_or(number, |skip| skip.places[number]);
        rows.add(slot.variable.elem_count(), &row(slot, place)?);
    }
    let (table, grid) = rows.table();
    let numbers = slots.iter().map(|&(number, _)| number);
    let per_step = slots.iter().flat_map(|(_, slot)| per_step(slot.rule, slot.seed));
    let captured = capture::rows(numbers.collect(), per_step)? as usize;
    let suffix = if double { "f64" } else { "f32" };
    // Every tensor of a row has as many elements as its `len`: `Slot` says so.
    let start = |source, name: &'static str, table| {
        let launch = gpu.launch(source, [name, suffix])?.table(table);
        let launch = launch.read_or_null(skip.and_then(|skip| skip.flag))?;
        Ok::<_, Error>(launch.write_or_null(skip.map(|skip| skip.counts))?.size(captured))
    };
    match rule {
        Rule::Sgd(_) => start(&SGD, "sgd", table)?.run(grid),
        Rule::AdamW(_) => start(&ADAMW, "adamw", table)?.run(grid),
        Rule::Lion(_) => start(&LION, "lion", table)?.run(grid),
        Rule::Average(_) => start(&AVERAGE, "average", table)?.run(grid),
        Rule::LambMoments(_) | Rule::LambUpdate(..) => {
            // Two for every block, that block's own.
            let squares = gpu.empty(2 * grid.blocks[0], DType::F64)?;
            start(&LAMB, "lamb_moments", table.clone())?.write(&squares)?.run(grid)?;
            start(&LAMB, "lamb_update", table)?.read(&squares)?.run(grid)
        }
    }
}

/// The row of the table: `Row` in the `.cu`, after its first two words.
fn row(slot: &Slot<'_>, place: usize) -> Result<[u64; ROW]> {
    let (keep, master) = match slot.master {
        Master::Itself => (0, None),
        Master::Full(master) => (1, Some(master)),
        Master::Remainder(rest) => (2, Some(rest)),
        Master::Stochastic => (3, None),
    };
    let mut states = [(0, 0); 3];
    for (number, state) in slot.states.iter().enumerate() {
        let Some(place) = states.get_mut(number) else { bail!("more than three states") };
        *place = (address_mut(state)?, code(state)?);
    }
    let variable = address_mut(slot.variable)?;
    let master = master.map_or(Ok(0), address_mut)?;
    let gradient = address(slot.gradient)?;
    let addresses = [variable, master, states[0].0, states[1].0, states[2].0, gradient];
    let aligned = u64::from(addresses.iter().all(|address| address % 16 == 0));
    let fields = [
        code(slot.variable)?,
        keep,
        states[0].1,
        states[1].1,
        states[2].1,
        code(slot.gradient)?,
        aligned,
    ];
    let kinds = fields.iter().rev().fold(0, |kinds, field| kinds << 4 | field);
    let mut row = [0; ROW];
    let words = addresses.into_iter().chain([kinds, place as u64]);
    let words = words.chain(per_step(slot.rule, slot.seed)).chain(slot.by.words()?);
    row.iter_mut().zip(words).for_each(|(place, word)| *place = word);
    Ok(row)
}

fn code(tensor: &Tensor) -> Result<u64> {
    Ok(match tensor.dtype() {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F64 => 3,
        other => bail!("no optimizer reads {other:?}"),
    })
}

/// `PerStep` in the `.cu`.
pub(super) fn per_step(rule: Rule, seed: u64) -> [u64; capture::ROW] {
    let (step, settings) = settings(rule);
    let mut words = [0; capture::ROW];
    (words[0], words[1]) = (seed, step);
    words[2..].copy_from_slice(&settings.map(f64::to_bits));
    words
}

/// The number of the step, and the settings in the order in which the `.cu` reads them.
fn settings(rule: Rule) -> (u64, [f64; 10]) {
    let fill = |numbers: &[f64], flags: &[bool]| {
        let flags = flags.iter().map(|&flag| f64::from(u8::from(flag)));
        let mut settings = [0.0; 10];
        let places = settings.iter_mut().zip(numbers.iter().copied().chain(flags));
        places.for_each(|(place, setting)| *place = setting);
        settings
    };
    match rule {
        Rule::Sgd(r) => {
            let numbers = [r.lr, r.momentum, r.dampening, r.weight_decay];
            (r.step, fill(&numbers, &[r.nesterov, r.maximize, r.first]))
        }
        Rule::AdamW(r) => {
            let numbers = [r.keep, r.beta1, r.beta2, r.eps, r.step_size, r.correction, r.lr];
            (r.step, fill(&numbers, &[r.amsgrad, r.maximize]))
        }
        Rule::Lion(r) => (0, fill(&[r.lr, r.keep, r.beta1, r.beta2], &[r.maximize])),
        Rule::Average(share) => (0, fill(&[share], &[])),
        Rule::LambMoments(r) | Rule::LambUpdate(r, _) => {
            let numbers =
                [r.lr, r.weight_decay, r.beta1, r.beta2, r.eps, r.correction1, r.correction2];
            (r.step, fill(&numbers, &[r.maximize, r.adapt, r.clip]))
        }
    }
}

/// See [`super::rebuild`].
pub(super) fn rebuild(gpu: &Gpu, rounded: &Tensor, rest: &Tensor) -> Result<Tensor> {
    let (rounded, rest) = (rounded.detach().contiguous()?, rest.contiguous()?);
    let exact = gpu.empty(rounded.shape(), DType::F32)?;
    let len = rounded.elem_count();
    // Every thread stays below `len`, which all three have.
    let launch = gpu.launch(&REBUILD, "rebuild_bf16")?;
    launch.read(&rounded)?.read(&rest)?.write(&exact)?.size(len).run(Grid::over(len, 1))?;
    Ok(exact)
}
