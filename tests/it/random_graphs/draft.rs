//! Draws programs, step by step: each is interpreted at once, and taken back where rounding errors would say more
//! than the crate does.

use candle_core::DType;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::interpret::{DTYPES, Value, cast_of, evaluate, fits};
use super::program::{Kind, Program, Row, Scope, Step, Way};
use super::rows::{named, rows};
use super::tape::{Tape, spread};

/// The most elements of a tensor.
const LARGEST: usize = 48;
const VARIABLES: usize = 8;

pub(super) struct Draft {
    pub(super) rng: ChaCha8Rng,
    tape: Tape,
    steps: Vec<Step>,
    values: Vec<Value>,
    scope: Scope,
    /// What leaves are drawn from.
    dtypes: Vec<DType>,
    /// Whether only the crate's operators are drawn.
    whole: bool,
}

impl Draft {
    pub(super) fn dims(&self, value: usize) -> Vec<usize> {
        self.values[value].array.dims.clone()
    }

    pub(super) fn range(&mut self, from: usize, below: usize) -> usize {
        self.rng.random_range(from..below)
    }

    pub(super) fn chance(&mut self, p: f64) -> bool {
        self.rng.random_bool(p)
    }

    pub(super) fn is_f64(&self) -> bool {
        self.dtypes == [DType::F64]
    }

    fn count(&self, value: usize) -> usize {
        self.values[value].array.at.len()
    }

    /// Adds a step, and casts before it that the dtypes agree where they must.
    pub(super) fn push(&mut self, name: &str, inputs: &[usize], args: &[usize]) -> Option<usize> {
        self.push_row(named(name), inputs.to_vec(), args.to_vec())
    }

    fn push_row(
        &mut self,
        row: &'static Row,
        mut inputs: Vec<usize>,
        args: Vec<usize>,
    ) -> Option<usize> {
        let dtypes: Vec<DType> = inputs.iter().map(|&i| self.values[i].dtype).collect();
        let cast = cast_of(row, self.scope, &dtypes)?;
        if !fits(row, cast, &dtypes) {
            let to = DTYPES.iter().position(|dtype| *dtype == dtypes[0])?;
            for input in inputs.iter_mut().skip(1) {
                if self.values[*input].dtype != dtypes[0] {
                    *input = self.push("to_dtype", &[*input], &[to])?;
                }
            }
        }
        self.add(Step { kind: Kind::Call(row, args), inputs, scope: self.scope })
    }

    fn add(&mut self, step: Step) -> Option<usize> {
        let inputs: Vec<Value> = step.inputs.iter().map(|&i| self.values[i].clone()).collect();
        let value = evaluate(&mut self.tape, &step, &inputs)?;
        let lanes = value.array.at.iter().map(|x| self.tape.lanes(*x));
        let tame = lanes.clone().all(|lanes| lanes[0].abs() <= 6.0 && spread(lanes) <= 0.25);
        if self.tape.trouble.is_some() || !tame || value.array.at.len() > LARGEST {
            return None;
        }
        self.steps.push(step);
        self.values.push(value);
        Some(self.steps.len() - 1)
    }

    /// Multiples of 1/64 from -2 to 2, which every dtype has.
    fn leaf(&mut self, dims: &[usize], variable: bool) -> Option<usize> {
        let count: usize = dims.iter().product();
        let values =
            (0..count).map(|_| f64::from(self.rng.random_range(-127..=127)) / 64.0).collect();
        let dtype = self.dtypes[self.rng.random_range(0..self.dtypes.len())];
        self.leaf_of(dims, dtype, values, variable)
    }

    fn leaf_of(
        &mut self,
        dims: &[usize],
        dtype: DType,
        values: Vec<f64>,
        variable: bool,
    ) -> Option<usize> {
        let kind = Kind::Leaf { dims: dims.to_vec(), dtype, values, variable };
        self.add(Step { kind, inputs: vec![], scope: Scope::default() })
    }

    /// A constant of such values, as exact as may be.
    pub(super) fn constant(&mut self, dims: &[usize], values: Vec<f64>) -> Option<usize> {
        let dtype = if self.is_f64() { DType::F64 } else { DType::F32 };
        self.leaf_of(dims, dtype, values, false)
    }

    /// `value`, reshaped if it has other dimensions.
    pub(super) fn reshaped(&mut self, value: usize, dims: &[usize]) -> Option<usize> {
        if self.dims(value) == dims {
            return Some(value);
        }
        self.push("reshape", &[value], dims)
    }

    /// `value` in some shape of this rank that `fits`.
    pub(super) fn ranked(
        &mut self,
        value: usize,
        rank: usize,
        fits: impl Fn(&[usize]) -> bool,
    ) -> Option<usize> {
        let now = self.dims(value);
        if now.len() == rank && fits(&now) && self.chance(0.7) {
            return Some(value);
        }
        for _ in 0..6 {
            let (mut left, mut dims) = (self.count(value), vec![1; rank]);
            let mut factor = 2;
            while left > 1 {
                match left % factor {
                    0 => {
                        dims[self.range(0, rank)] *= factor;
                        left /= factor;
                    }
                    _ => factor += 1,
                }
            }
            if fits(&dims) {
                return self.reshaped(value, &dims);
            }
        }
        None
    }

    /// A value of these dimensions: one there is, one there is as a view, or a new one.
    pub(super) fn operand(&mut self, dims: &[usize]) -> Option<usize> {
        let count: usize = dims.iter().product();
        if count > LARGEST {
            return None;
        }
        let fits: Vec<usize> =
            (0..self.steps.len()).filter(|&at| self.count(at) == count).collect();
        if !fits.is_empty() && self.chance(0.6) {
            let value = fits[self.range(0, fits.len())];
            if dims.len() == 2 && self.chance(0.25) {
                let turned = self.reshaped(value, &[dims[1], dims[0]])?;
                return self.push("transpose", &[turned], &[0, 1]);
            }
            return self.reshaped(value, dims);
        }
        let variables = self.steps.iter().filter(|step| step.is_variable()).count();
        let variable = variables < VARIABLES && self.chance(0.8);
        self.leaf(dims, variable)
    }

    /// A value, the latest most likely.
    fn pick(&mut self) -> usize {
        let last = self.steps.len();
        loop {
            let back = if self.chance(0.6) { 6.min(last) } else { last };
            let at = last - 1 - self.range(0, back);
            if self.count(at) > 1 || self.chance(0.1) {
                return at;
            }
        }
    }

    /// Adds an operator drawn from all, or leaves all as it was.
    fn grow(&mut self) -> bool {
        let (steps, scalars) = (self.steps.len(), self.tape.len());
        let row = &rows()[self.rng.random_range(0..rows().len())];
        if self.whole && row.op.is_none() && row.name != "reshape" {
            return false;
        }
        let x = self.pick();
        let drawn = (row.draw)(self, x);
        let done = drawn.and_then(|(inputs, args)| self.push_row(row, inputs, args));
        if done.is_none() {
            self.steps.truncate(steps);
            self.values.truncate(steps);
            self.tape.truncate(scalars);
        }
        done.is_some()
    }

    /// A loss of `value`: the sum of its elements, each times another number.
    fn loss(&mut self, value: usize) -> Option<usize> {
        let dims = self.dims(value);
        let weights =
            (0..self.count(value)).map(|_| f64::from(self.rng.random_range(-64..=64)) / 64.0);
        let weights: Vec<f64> = weights.collect();
        let weights = self.constant(&dims, weights)?;
        let candles = !self.whole && self.chance(0.3);
        let (mul, sum) = if candles { ("candle_mul", "sum_all") } else { ("mul", "sum") };
        let product = self.push(mul, &[value, weights], &[])?;
        let loss = self.push(sum, &[product], &[])?;
        match self.values[loss].dtype {
            DType::F32 | DType::F64 => Some(loss),
            _ => self.push("to_dtype", &[loss], &[2]),
        }
    }
}

/// The program of this seed.
pub(super) fn draw(seed: u64) -> Program {
    draw_with(seed, false)
}

/// The same, and whether checkpoints may capture what others have computed.
pub(super) fn draw_with(seed: u64, captures: bool) -> Program {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let dtypes = match rng.random_range(0..10) {
        0 | 1 => vec![DType::F64],
        2 => vec![DType::F16],
        3 => vec![DType::BF16],
        4 => vec![DType::F32, DType::BF16],
        5 => vec![DType::F32, DType::F16],
        6 => vec![DType::F16, DType::BF16, DType::F32],
        _ => vec![DType::F32],
    };
    let autocast = match rng.random_range(0..6) {
        0 => Some(DType::F16),
        1 => Some(DType::BF16),
        2 => Some(DType::F32),
        _ => None,
    };
    let size = rng.random_range(5..=60);
    let whole = rng.random_bool(0.3);
    let (tape, scope) = (Tape::new(), Scope { autocast, no_grad: false });
    let mut draft = Draft { rng, tape, steps: vec![], values: vec![], scope, dtypes, whole };
    for dims in [&[4, 6][..], &[2, 3, 4]] {
        draft.leaf(dims, true).expect("leaves are tame");
    }
    let mut attempts = 0;
    while operators(&draft.steps) < size && attempts < 40 * size {
        attempts += 1;
        if draft.chance(0.08) {
            let other = [None, Some(DType::F16), Some(DType::BF16)][draft.range(0, 3)];
            draft.scope.autocast = if draft.chance(0.5) { autocast } else { other };
        }
        draft.scope.no_grad = draft.chance(0.02);
        draft.grow();
    }
    draft.scope.no_grad = false;
    let losses = losses(&mut draft);
    let (mut rest, mut ways) = (Way::OTHERS.to_vec(), Way::PLAIN.to_vec());
    ways.push(rest.swap_remove(draft.range(0, rest.len())));
    if draft.chance(0.3) {
        ways.push(rest.swap_remove(draft.range(0, rest.len())));
    }
    let scale = draft.range(0, 12) as i32;
    let autocast = [None, Some(DType::F16), Some(DType::BF16)][draft.range(0, 3)];
    let around = match draft.chance(0.5) {
        true => Scope { autocast, no_grad: draft.chance(0.5) },
        false => Scope::default(),
    };
    let program = Program { steps: draft.steps, losses, ways, scale, around };
    super::blocks::with_checkpoints(program, &mut draft.rng, captures)
}

/// How many steps are no leaves.
pub(super) fn operators(steps: &[Step]) -> usize {
    steps.iter().filter(|step| !step.is_leaf()).count()
}

/// One to three losses, which are sums over all that nobody has used.
fn losses(draft: &mut Draft) -> Vec<usize> {
    let count = 1 + draft.range(0, 3);
    let used = |draft: &Draft, at: usize| draft.steps.iter().any(|step| step.inputs.contains(&at));
    let tracked = (0..draft.steps.len()).rev().filter(|&at| draft.values[at].tracked);
    let mut ends: Vec<usize> = tracked.collect();
    ends.sort_by_key(|&at| used(draft, at));
    let unused = ends.iter().filter(|&&at| !used(draft, at)).count();
    ends.truncate(unused.max(count));
    let mut losses: Vec<usize> = Vec::new();
    for end in ends {
        let (steps, scalars) = (draft.steps.len(), draft.tape.len());
        let value = &draft.values[end];
        let whole = value.array.at.len() == 1 && matches!(value.dtype, DType::F32 | DType::F64);
        let loss = if whole { Some(end) } else { draft.loss(end) };
        let done = match loss {
            Some(loss) if losses.len() < count => {
                losses.push(loss);
                true
            }
            Some(loss) => joined(draft, &mut losses, loss).is_some(),
            None => false,
        };
        if !done {
            draft.steps.truncate(steps);
            draft.values.truncate(steps);
            draft.tape.truncate(scalars);
        }
    }
    losses.shuffle(&mut draft.rng);
    losses
}

/// Adds a loss to one of those there are.
fn joined(draft: &mut Draft, losses: &mut [usize], loss: usize) -> Option<()> {
    let (at, candles) = (draft.range(0, losses.len()), !draft.whole && draft.chance(0.5));
    let loss = draft.reshaped(loss, &draft.dims(losses[at]))?;
    losses[at] =
        draft.push(if candles { "candle_add" } else { "add" }, &[losses[at], loss], &[])?;
    Some(())
}
