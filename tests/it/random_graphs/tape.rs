//! Scalars in `F64` that remember how they were made: the oracle of gradients, which knows no operator and no tensor.
//!
//! Each scalar is computed eight times. Lane 0 is exact, to `F64`. In the other seven every result is moved at
//! random by what the arithmetic under test may round it by, forward and backward. How far they spread is how far
//! rounding carries a result: Monte Carlo arithmetic (Parker, 1997), here with errors as large as they can be. A
//! bound of worst cases would grow by a factor an operator, and say nothing after ten of them.

use candle_core::DType;

pub(super) const LANES: usize = 8;
pub(super) type Lanes = [f64; LANES];

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scalar(u32);

struct Node {
    value: Lanes,
    /// Where its edges end; they begin where those of the node before end.
    edges: usize,
    /// What gradients that arrive here are rounded by, relative to the sum of their absolute values.
    rounding: f64,
    /// The smallest number above zero of the dtype.
    least: f64,
}

struct Edge {
    from: u32,
    slope: Lanes,
    /// How far a gradient of 1 may be off after it has been through here.
    noise: f64,
}

pub(super) struct Tape {
    nodes: Vec<Node>,
    edges: Vec<Edge>,
    bits: u64,
    /// What each forward result is rounded by, relative to the terms it is added up from.
    pub(super) forward: f64,
    /// The same for each product of a gradient with a derivative.
    pub(super) backward: f64,
    /// Why what was computed is no good for a comparison.
    pub(super) trouble: Option<&'static str>,
}

pub(super) fn spread(lanes: &Lanes) -> f64 {
    lanes.iter().fold(0.0, |most: f64, lane| most.max((lane - lanes[0]).abs()))
}

pub(super) fn epsilon(dtype: DType) -> f64 {
    crate::util::epsilon(dtype)
}

impl Tape {
    pub(super) fn new() -> Self {
        let (nodes, edges) = (Vec::new(), Vec::new());
        Self {
            nodes,
            edges,
            bits: 0x9e37_79b9_7f4a_7c15,
            forward: 0.0,
            backward: 0.0,
            trouble: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Forgets all but the first `len` scalars.
    pub(super) fn truncate(&mut self, len: usize) {
        self.nodes.truncate(len);
        self.edges.truncate(self.nodes.last().map_or(0, |node| node.edges));
        self.trouble = None;
    }

    /// From 1/2 to 1, up or down; 0 for the exact lane.
    fn noise(&mut self) -> Lanes {
        self.bits ^= self.bits << 13;
        self.bits ^= self.bits >> 7;
        self.bits ^= self.bits << 17;
        let mixed = self.bits.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let mut noise = [0.0; LANES];
        for (lane, noise) in noise.iter_mut().enumerate().skip(1) {
            let byte = (mixed >> (8 * lane)) as u8;
            let size = 0.5 + f64::from(byte & 0x7f) / 254.0;
            *noise = if byte & 0x80 == 0 { size } else { -size };
        }
        noise
    }

    fn push(&mut self, mut value: Lanes, error: f64, rounding: f64, least: f64) -> Scalar {
        if error > 0.0 {
            let noise = self.noise();
            for (value, noise) in value.iter_mut().zip(noise) {
                *value += noise * error;
            }
        }
        self.nodes.push(Node { value, edges: self.edges.len(), rounding, least });
        Scalar(self.nodes.len() as u32 - 1)
    }

    pub(super) fn lanes(&self, x: Scalar) -> &Lanes {
        &self.nodes[x.0 as usize].value
    }

    pub(super) fn value(&self, x: Scalar) -> f64 {
        self.lanes(x)[0]
    }

    pub(super) fn constant(&mut self, value: f64) -> Scalar {
        self.push([value; LANES], 0.0, 0.0, 0.0)
    }

    /// A variable of `dtype`, which its gradient is rounded to.
    pub(super) fn leaf(&mut self, value: f64, dtype: DType) -> Scalar {
        self.push([value; LANES], 0.0, epsilon(dtype), least(dtype))
    }

    /// The same value, which no gradient goes through.
    pub(super) fn cut(&mut self, x: Scalar) -> Scalar {
        self.push(*self.lanes(x), 0.0, 0.0, 0.0)
    }

    /// The same value as a tensor of `dtype` holds it; gradients that arrive are rounded too.
    pub(super) fn round(&mut self, x: Scalar, dtype: DType, exact: bool) -> Scalar {
        let (value, epsilon, least) = (*self.lanes(x), epsilon(dtype), least(dtype));
        self.edges.push(Edge { from: x.0, slope: [1.0; LANES], noise: 0.0 });
        let error = if exact { 0.0 } else { epsilon * value[0].abs() + least };
        self.push(value, error, epsilon, least)
    }

    /// A copy of `x` in `dtype`, whose gradient goes back as it comes.
    pub(super) fn rounded(&mut self, x: Scalar, dtype: DType) -> Scalar {
        let value = *self.lanes(x);
        self.edges.push(Edge { from: x.0, slope: [1.0; LANES], noise: 0.0 });
        self.push(value, epsilon(dtype) * value[0].abs() + least(dtype), 0.0, 0.0)
    }

    /// A function of one scalar, given with its derivative.
    pub(super) fn map(&mut self, x: Scalar, f: impl Fn(f64) -> (f64, f64)) -> Scalar {
        let both = self.lanes(x).map(f);
        let slope = both.map(|(_, slope)| slope);
        let noise = self.backward * slope[0].abs().max(1.0);
        self.edges.push(Edge { from: x.0, slope, noise });
        let error = self.forward * both[0].0.abs();
        self.push(both.map(|(value, _)| value), error, 0.0, 0.0)
    }

    /// A function that is linear on either side of `kinks`, which must not be near.
    pub(super) fn kinked(
        &mut self,
        x: Scalar,
        kinks: &[f64],
        f: impl Fn(f64) -> (f64, f64),
    ) -> Scalar {
        for kink in kinks {
            self.keep_away(x, *kink);
        }
        self.map(x, f)
    }

    /// `Σ factor · x`.
    pub(super) fn linear(&mut self, terms: &[(Scalar, f64)]) -> Scalar {
        let (mut value, mut size) = ([0.0; LANES], 0.0);
        for (x, factor) in terms {
            let lanes = *self.lanes(*x);
            value.iter_mut().zip(lanes).for_each(|(value, x)| *value += factor * x);
            size += (factor * lanes[0]).abs();
            let noise = if factor.abs() == 1.0 { 0.0 } else { self.backward * factor.abs() };
            self.edges.push(Edge { from: x.0, slope: [*factor; LANES], noise });
        }
        self.push(value, self.forward * size, 0.0, 0.0)
    }

    pub(super) fn sum(&mut self, terms: &[Scalar]) -> Scalar {
        self.linear(&terms.iter().map(|x| (*x, 1.0)).collect::<Vec<_>>())
    }

    pub(super) fn mean(&mut self, terms: &[Scalar]) -> Scalar {
        let part = 1.0 / terms.len() as f64;
        self.linear(&terms.iter().map(|x| (*x, part)).collect::<Vec<_>>())
    }

    pub(super) fn sub(&mut self, a: Scalar, b: Scalar) -> Scalar {
        self.linear(&[(a, 1.0), (b, -1.0)])
    }

    /// `Σ a · b`.
    pub(super) fn dot(&mut self, pairs: &[(Scalar, Scalar)]) -> Scalar {
        let (mut value, mut size) = ([0.0; LANES], 0.0);
        for (a, b) in pairs {
            let (left, right) = (*self.lanes(*a), *self.lanes(*b));
            for (lane, value) in value.iter_mut().enumerate() {
                *value += left[lane] * right[lane];
            }
            size += (left[0] * right[0]).abs();
            let backward = self.backward;
            self.edges.push(Edge { from: a.0, slope: right, noise: backward * right[0].abs() });
            self.edges.push(Edge { from: b.0, slope: left, noise: backward * left[0].abs() });
        }
        self.push(value, self.forward * size, 0.0, 0.0)
    }

    pub(super) fn mul(&mut self, a: Scalar, b: Scalar) -> Scalar {
        self.dot(&[(a, b)])
    }

    pub(super) fn div(&mut self, a: Scalar, b: Scalar) -> Scalar {
        self.require(self.value(b).abs() > 0.4, "a small divisor");
        let reciprocal = self.map(b, |b| (1.0 / b, -1.0 / (b * b)));
        self.mul(a, reciprocal)
    }

    /// The larger one, which must be that by far.
    pub(super) fn max(&mut self, terms: &[Scalar]) -> Scalar {
        let mut order = terms.to_vec();
        order.sort_by(|a, b| self.value(*b).total_cmp(&self.value(*a)));
        for second in order.get(1).into_iter().filter(|second| **second != order[0]) {
            let gap = self.value(order[0]) - self.value(*second);
            let both = spread(self.lanes(order[0])) + spread(self.lanes(*second));
            self.require(gap > 0.0 && gap > 8.0 * both, "two maxima");
        }
        self.require(order.len() < 2 || order[0] != order[1], "two maxima");
        order[0]
    }

    /// Notes if rounding may move `x` to the other side of `kink`.
    pub(super) fn keep_away(&mut self, x: Scalar, kink: f64) {
        let distance = (self.value(x) - kink).abs();
        self.require(distance > 0.0 && distance > 8.0 * spread(self.lanes(x)), "a kink");
    }

    pub(super) fn require(&mut self, holds: bool, otherwise: &'static str) {
        if !holds {
            self.trouble = Some(otherwise);
        }
    }

    /// The derivatives of `loss` in `of`, rounded to the dtype of each and to F32, and the largest gradient on the way
    /// that is a tensor of `F16`.
    pub(super) fn gradients(&mut self, loss: Scalar, of: &[Scalar]) -> (Vec<[Lanes; 2]>, f64) {
        let mut gradients = vec![[0.0; LANES]; self.nodes.len()];
        let mut wide = vec![[0.0; LANES]; self.nodes.len()];
        let mut sizes = vec![0.0; self.nodes.len()];
        gradients[loss.0 as usize] = [1.0; LANES];
        sizes[loss.0 as usize] = 1.0;
        let mut largest = 0.0f64;
        for at in (0..=loss.0 as usize).rev() {
            if gradients[at] == [0.0; LANES] {
                continue;
            }
            let (rounding, least) = (self.nodes[at].rounding, self.nodes[at].least);
            if rounding > 0.0 {
                let (noise, error) = (self.noise(), rounding * sizes[at] + least);
                let narrow = epsilon(DType::F32).min(rounding) * sizes[at];
                wide[at] = gradients[at];
                wide[at].iter_mut().zip(noise).for_each(|(lane, noise)| *lane += noise * narrow);
                gradients[at]
                    .iter_mut()
                    .zip(noise)
                    .for_each(|(lane, noise)| *lane += noise * error);
                if rounding == epsilon(DType::F16) {
                    largest = largest.max(sizes[at]);
                }
            }
            let gradient = gradients[at];
            let first = if at == 0 { 0 } else { self.nodes[at - 1].edges };
            for edge in first..self.nodes[at].edges {
                let noise = self.noise();
                let Edge { from, slope, noise: size } = &self.edges[edge];
                let (from, error) = (*from as usize, size * gradient[0].abs());
                for lane in 0..LANES {
                    gradients[from][lane] += gradient[lane] * slope[lane] + noise[lane] * error;
                }
                sizes[from] += (gradient[0] * slope[0]).abs();
            }
        }
        let both = |x: &Scalar| [gradients[x.0 as usize], wide[x.0 as usize]];
        (of.iter().map(both).collect(), largest)
    }
}

fn least(dtype: DType) -> f64 {
    if dtype == DType::F16 { 2f64.powi(-24) } else { 0.0 }
}
