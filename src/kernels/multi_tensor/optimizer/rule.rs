//! The arithmetic of every optimizer, an element at a time, in the order its documentation gives.
//!
//! Settings are `f64`, and rounded to the type of the arithmetic where they meet an element. A sum
//! with a product is one fused multiply-add wherever PyTorch's CPU kernels have one, so that bits
//! are theirs. The compiler may fuse nothing else, so a result is the same on every processor; one
//! without the instruction is slow.

use crate::kernels::cpu::dtype::Real;

/// What one step does to one tensor: an optimizer's settings, worked out for the step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd(Sgd),
    AdamW(AdamW),
    Lion(Lion),
    /// The moments, and the norms of the weight and of the update: what LAMB does first.
    LambMoments(Lamb),
    /// The update, as long as the trust ratio says.
    LambUpdate(Lamb, f64),
    /// Moves by this share towards the "gradient", which is the tensor that is averaged.
    Average(f64),
}

/// PyTorch's `torch.optim.SGD`. State: the momentum buffer, or nothing where momentum is 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sgd {
    pub(crate) lr: f64,
    pub(crate) momentum: f64,
    pub(crate) dampening: f64,
    pub(crate) weight_decay: f64,
    pub(crate) nesterov: bool,
    pub(crate) maximize: bool,
    /// The number of this step, from 1: on a GPU, of those that were tried.
    pub(crate) step: u64,
    /// No step came before: the momentum buffer starts as the gradient, undampened.
    pub(crate) first: bool,
}

/// PyTorch's `torch.optim.AdamW`. State: both moments, with AMSGrad the largest second one too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdamW {
    pub(crate) lr: f64,
    /// As [`Sgd::step`].
    pub(crate) step: u64,
    /// `1 - lr * weight_decay`.
    pub(crate) keep: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    /// `lr / (1 - beta1^step)`.
    pub(crate) step_size: f64,
    /// `sqrt(1 - beta2^step)`.
    pub(crate) correction: f64,
    pub(crate) amsgrad: bool,
    pub(crate) maximize: bool,
}

/// State: the momentum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lion {
    pub(crate) lr: f64,
    /// `1 - lr * weight_decay`.
    pub(crate) keep: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) maximize: bool,
}

/// State: both moments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lamb {
    pub(crate) lr: f64,
    /// As [`Sgd::step`].
    pub(crate) step: u64,
    pub(crate) weight_decay: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    /// `1 - beta1^step`.
    pub(crate) correction1: f64,
    /// `sqrt(1 - beta2^step)`.
    pub(crate) correction2: f64,
    pub(crate) maximize: bool,
    /// Whether the trust ratio applies to this tensor.
    pub(crate) adapt: bool,
    /// Whether the trust ratio ends at 1.
    pub(crate) clip: bool,
}

/// Sums of squares, of the weight and of the update.
pub(crate) type Squares = [f64; 2];

impl Rule {
    /// What is left to do, after a pass with these sums of squares over the whole tensor.
    pub(super) fn next(self, squares: Squares) -> Option<Rule> {
        let Rule::LambMoments(lamb) = self else { return None };
        let [weight, update] = squares.map(f64::sqrt);
        let ratio = if lamb.adapt && weight > 0.0 && update > 0.0 { weight / update } else { 1.0 };
        Some(Rule::LambUpdate(lamb, if lamb.clip { ratio.min(1.0) } else { ratio }))
    }

    /// Whether it writes the weight.
    pub(super) fn writes_weight(self) -> bool {
        !matches!(self, Rule::LambMoments(_))
    }

    /// Whether it reads the gradient and writes the state.
    pub(super) fn reads_gradient(self) -> bool {
        !matches!(self, Rule::LambUpdate(..))
    }

    /// One step on a block: all slices are as long as `w`, those of the states the rule has not are
    /// empty. `g` is multiplied by both of `by` where it is read, not before: memory that is read
    /// beside other memory costs less.
    #[inline(always)]
    pub(super) fn run<T: Real>(
        self,
        w: &mut [T],
        g: &[T],
        by: [T; 2],
        states: [&mut [T]; 3],
    ) -> Squares {
        let [a, b, c] = states;
        match self {
            Rule::Sgd(rule) => rule.run(w, g, by, a),
            Rule::AdamW(rule) => rule.run(w, g, by, [a, b, c]),
            Rule::Lion(rule) => rule.run(w, g, by, a),
            Rule::LambMoments(rule) => return rule.moments(w, g, by, a, b),
            Rule::LambUpdate(rule, ratio) => rule.update(w, a, b, ratio),
            Rule::Average(share) => {
                for (w, g) in w.iter_mut().zip(g) {
                    *w = lerp(*w, multiplied(*g, by), share);
                }
            }
        }
        [0.0; 2]
    }
}

#[inline(always)]
fn multiplied<T: Real>(g: T, [inverse, clip]: [T; 2]) -> T {
    g * inverse * clip
}

/// `a` moved by `share` of the way to `b`, as PyTorch's `lerp`.
#[inline(always)]
fn lerp<T: Real>(a: T, b: T, share: f64) -> T {
    let part = T::of(share);
    if share < 0.5 { part.mul_add(b - a, a) } else { (part - T::one()).mul_add(b - a, b) }
}

#[inline(always)]
fn sign<T: Real>(maximize: bool) -> T {
    if maximize { -T::one() } else { T::one() }
}

impl Sgd {
    #[inline(always)]
    fn run<T: Real>(self, w: &mut [T], g: &[T], by: [T; 2], buffer: &mut [T]) {
        let [step, momentum, decay] = [-self.lr, self.momentum, self.weight_decay].map(T::of);
        let sign = sign::<T>(self.maximize);
        if self.momentum == 0.0 {
            for (w, g) in w.iter_mut().zip(g) {
                *w = step.mul_add(decay.mul_add(*w, sign * multiplied(*g, by)), *w);
            }
            return;
        }
        let fresh = T::of(if self.first { 1.0 } else { 1.0 - self.dampening });
        let kept = if self.first { T::zero() } else { momentum };
        let nesterov = self.nesterov;
        for ((w, b), g) in w.iter_mut().zip(buffer).zip(g) {
            let g = decay.mul_add(*w, sign * multiplied(*g, by));
            *b = fresh.mul_add(g, kept * *b);
            let toward = if nesterov { momentum.mul_add(*b, g) } else { *b };
            *w = step.mul_add(toward, *w);
        }
    }
}

/// Adam's moments after gradient `g`: [`lerp`], and PyTorch's `mul`, `addcmul`.
#[inline(always)]
fn moments<T: Real>(m: &mut T, v: &mut T, g: T, beta1: f64, beta2: f64) {
    *m = lerp(*m, g, 1.0 - beta1);
    *v = (T::of(1.0 - beta2) * g).mul_add(g, *v * T::of(beta2));
}

impl AdamW {
    #[inline(always)]
    fn run<T: Real>(self, w: &mut [T], g: &[T], by: [T; 2], [m, v, top]: [&mut [T]; 3]) {
        let (keep, sign) = (T::of(self.keep), sign::<T>(self.maximize));
        if self.amsgrad {
            for ((((w, m), v), top), g) in w.iter_mut().zip(m).zip(v).zip(top).zip(g) {
                moments(m, v, sign * multiplied(*g, by), self.beta1, self.beta2);
                *top = if *top >= *v || top.is_nan() { *top } else { *v };
                *w = *w * keep + self.change(*m, *top);
            }
        } else {
            for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
                moments(m, v, sign * multiplied(*g, by), self.beta1, self.beta2);
                *w = *w * keep + self.change(*m, *v);
            }
        }
    }

    #[inline(always)]
    fn change<T: Real>(self, m: T, v: T) -> T {
        let [eps, correction, step] = [self.eps, self.correction, -self.step_size].map(T::of);
        step * m / (v.sqrt() / correction + eps)
    }
}

impl Lion {
    #[inline(always)]
    fn run<T: Real>(self, w: &mut [T], g: &[T], by: [T; 2], m: &mut [T]) {
        let [step, keep, beta1, beta2] = [-self.lr, self.keep, self.beta1, self.beta2].map(T::of);
        let [fresh1, fresh2] = [1.0 - self.beta1, 1.0 - self.beta2].map(T::of);
        let sign = sign::<T>(self.maximize);
        for ((w, m), g) in w.iter_mut().zip(m).zip(g) {
            let g = sign * multiplied(*g, by);
            let toward = fresh1.mul_add(g, *m * beta1);
            // NaN has no sign, and must not look like a step.
            let direction = if toward == T::zero() || toward.is_nan() {
                toward
            } else {
                T::one().copysign(toward)
            };
            *w = step.mul_add(direction, *w * keep);
            *m = fresh2.mul_add(g, *m * beta2);
        }
    }
}

impl Lamb {
    /// The Adam step with the decay, before it is scaled.
    #[inline(always)]
    fn direction<T: Real>(self, w: T, m: T, v: T) -> T {
        let [decay, eps, correction1, correction2] =
            [self.weight_decay, self.eps, self.correction1, self.correction2].map(T::of);
        decay.mul_add(w, m / correction1 / (v.sqrt() / correction2 + eps))
    }

    #[inline(always)]
    fn moments<T: Real>(self, w: &[T], g: &[T], by: [T; 2], m: &mut [T], v: &mut [T]) -> Squares {
        let sign = sign::<T>(self.maximize);
        // Sixteen sums side by side, so that the loop vectorises.
        let mut squares = [[0f64; 16]; 2];
        let len = w.len();
        let (g, m, v) = (&g[..len], &mut m[..len], &mut v[..len]);
        for i in 0..len {
            let g = sign * multiplied(g[i], by);
            moments(&mut m[i], &mut v[i], g, self.beta1, self.beta2);
        }
        let mut add = |i: usize, lane: usize| {
            let (w, update) = (w[i].to_double(), self.direction(w[i], m[i], v[i]).to_double());
            squares[0][lane] += w * w;
            squares[1][lane] += update * update;
        };
        let whole = len - len % 16;
        for start in (0..whole).step_by(16) {
            (0..16).for_each(|lane| add(start + lane, lane));
        }
        (whole..len).for_each(|i| add(i, i - whole));
        squares.map(|lanes| lanes.iter().sum())
    }

    #[inline(always)]
    fn update<T: Real>(self, w: &mut [T], m: &[T], v: &[T], ratio: f64) {
        let step = T::of(-self.lr * ratio);
        for ((w, m), v) in w.iter_mut().zip(m).zip(v) {
            *w = step.mul_add(self.direction(*w, *m, *v), *w);
        }
    }
}
