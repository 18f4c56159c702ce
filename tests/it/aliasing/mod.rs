//! Every operator with inputs that share memory, lie in every layout, have sizes of 0 and 1, and hold numbers that are
//! not ordinary: forward and backward, against the same computation on fresh contiguous copies, and in `F64`.

mod integers;
mod layouts;
mod sizes;
mod special_pairs;
mod specials;

use candle_amp::{GradScaler, ScaleConfig};
use candle_core::{DType, Result, Tensor, Var};

use crate::cases::Case;
use crate::util::{epsilon, random, to_vec};

/// An output, and the gradient of each variable that was asked for.
struct Outcome {
    output: Tensor,
    gradients: Vec<Option<Tensor>>,
}

/// What is wrong, all of it: one fault shows in many cases.
#[derive(Default)]
struct Faults(Vec<String>);

impl Faults {
    fn note(&mut self, what: String) {
        self.0.push(what);
    }

    fn none(&self) {
        let first: Vec<&str> = self.0.iter().take(60).map(String::as_str).collect();
        assert!(self.0.is_empty(), "{} faults:\n{}", self.0.len(), first.join("\n"));
    }
}

/// A number that depends on every element of `y`, differently.
fn weigh(y: &Tensor) -> Result<Tensor> {
    let weights = random(99, y.shape(), DType::F64);
    (y.to_dtype(DType::F64)? * weights)?.sum_all()
}

/// The operator on `inputs`, and the gradients of its weighted output in `roots`.
fn outcome(case: &Case, inputs: &[Tensor], roots: &[Var], scaled: bool) -> Result<Outcome> {
    let output = (case.f)(inputs)?;
    let loss = weigh(&output)?;
    let gradients = if scaled {
        let mut scaler = GradScaler::new(ScaleConfig::constant(8.0))?;
        scaler.scale(&loss)?.backward()?;
        roots.iter().map(|root| Ok(scaler.grad(root)?)).collect::<Result<_>>()?
    } else {
        let store = loss.backward()?;
        roots.iter().map(|root| store.get(root).cloned()).collect()
    };
    Ok(Outcome { output: output.detach(), gradients })
}

/// Variables of their own, contiguous, with these values.
fn fresh(values: &[Tensor]) -> Result<Vec<Var>> {
    values.iter().map(|x| Var::from_tensor(&x.force_contiguous()?.detach())).collect()
}

/// The operator on fresh copies of `inputs`.
fn on_copies(case: &Case, inputs: &[Tensor]) -> Result<Outcome> {
    let roots = fresh(inputs)?;
    let inputs: Vec<Tensor> = roots.iter().map(|root| root.as_tensor().clone()).collect();
    outcome(case, &inputs, &roots, false)
}

/// What `f` gives for variables of these values, and its gradients.
fn outcome_of(values: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<Outcome> {
    let roots = fresh(values)?;
    let inputs: Vec<Tensor> = roots.iter().map(|root| root.as_tensor().clone()).collect();
    let output = f(&inputs)?;
    let store = weigh(&output)?.backward()?;
    let gradients = roots.iter().map(|root| store.get(root).cloned()).collect();
    Ok(Outcome { output: output.detach(), gradients })
}

/// Views of `roots` as the inputs of an operator.
type Views<'a> = dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + 'a;

/// What the gradients of the inputs are for `roots`, in `F64`, and how large their parts are.
fn pulled_back(
    roots: &[Tensor],
    views: &Views<'_>,
    gradients: &[Option<Tensor>],
) -> Result<Vec<(Vec<f64>, f64)>> {
    let wide = |x: &Tensor| Var::from_tensor(&x.detach().to_dtype(DType::F64)?);
    let wide = roots.iter().map(wide).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = wide.iter().map(|root| root.as_tensor().clone()).collect();
    let pull = |size: bool| -> Result<Vec<Vec<f64>>> {
        let mut sums = Vec::new();
        for (view, gradient) in views(&tensors)?.iter().zip(gradients) {
            if let Some(gradient) = gradient {
                let gradient = gradient.to_dtype(DType::F64)?;
                let gradient = if size { gradient.abs()? } else { gradient };
                sums.push((view * gradient)?.sum_all()?);
            }
        }
        let store = Tensor::stack(&sums, 0)?.sum_all()?.backward()?;
        let zeros = |root: &Var| vec![0.0; root.elem_count()];
        Ok(wide.iter().map(|root| store.get(root).map_or_else(|| zeros(root), to_vec)).collect())
    };
    let sizes = pull(true)?;
    let largest = sizes.iter().map(|sizes| sizes.iter().copied().fold(0.0, f64::max));
    Ok(pull(false)?.into_iter().zip(largest).collect())
}

/// Checks an operator on `views` of `roots` against fresh copies of the same numbers.
fn check(
    what: &str,
    case: &Case,
    roots: &[Tensor],
    views: &Views<'_>,
    same_bits: bool,
) -> Result<()> {
    let roots = fresh(roots)?;
    let tensors: Vec<Tensor> = roots.iter().map(|root| root.as_tensor().clone()).collect();
    let copies = on_copies(case, &views(&tensors)?)?;
    let expected = pulled_back(&tensors, views, &copies.gradients)?;
    for scaled in [false, true] {
        let got = outcome(case, &views(&tensors)?, &roots, scaled)?;
        let by = if scaled { "the scaler" } else { "candle" };
        let (now, before) = (to_vec(&got.output), to_vec(&copies.output));
        assert_eq!(got.output.dims(), copies.output.dims(), "{what}: dimensions");
        assert_eq!(got.output.dtype(), copies.output.dtype(), "{what}: dtype");
        let largest = before.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let error = match same_bits {
            true => 0.0,
            false => case.roundings * epsilon(got.output.dtype()) * largest,
        };
        for (at, (now, before)) in now.iter().zip(&before).enumerate() {
            assert!((now - before).abs() <= error, "{what}, output {at}: {now} is not {before}");
        }
        for (number, (gradient, (exact, size))) in got.gradients.iter().zip(&expected).enumerate() {
            let what = format!("{what}, root {number}, by {by}");
            let Some(gradient) = gradient else {
                assert!(exact.iter().all(|x| *x == 0.0), "{what}: no gradient");
                continue;
            };
            assert_eq!(gradient.dims(), roots[number].dims(), "{what}: dimensions");
            // Each part may be rounded as often as those of the copies, and each sum of them once more.
            let dtype = roots[number].dtype();
            let uses = exact.len().max(1) as f64;
            let terms =
                (case.inputs.iter().map(|x| x.elem_count()).sum::<usize>() as f64 / uses).max(2.0);
            let error = (2.0 * case.roundings + terms) * epsilon(dtype) * size;
            for (at, (got, exact)) in to_vec(gradient).into_iter().zip(exact).enumerate() {
                assert!((got - exact).abs() <= error, "{what}, element {at}: {got} is not {exact}");
            }
        }
    }
    Ok(())
}
