//! Batch norm over ranks.

use candle_amp::{GradScaler, Result, dist, nn, ops};
use candle_core::{DType, Tensor, Var};
use candle_nn::ModuleT;

use super::{cpu, on_ranks};
use crate::util::{assert_close, assert_same, random};

/// What a layer computes of `x`, with the loss `sum(y * factors)`.
struct Computed {
    y: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    running: [Tensor; 2],
}

fn compute(
    x: &Tensor,
    factors: &Tensor,
    channels_last: bool,
    convert: impl Fn(nn::BatchNorm) -> nn::BatchNorm,
) -> Result<Computed> {
    let c = if channels_last { x.dims()[x.rank() - 1] } else { x.dim(1)? };
    let varmap = nn::VarMap::new();
    let norm = nn::batch_norm(c, 1e-3, nn::var_builder(&varmap, x.dtype(), &cpu()))?;
    let norm = convert(if channels_last { norm.channels_last() } else { norm });
    let (weight, bias) = norm.weight_and_bias().expect("affine");
    let (weight, bias) = (weight.clone(), bias.clone());
    let data = varmap.data().lock().unwrap();
    data["weight"].set(&random(5, c, DType::F32))?;
    data["bias"].set(&random(6, c, DType::F32))?;
    drop(data);
    let x = Var::from_tensor(x)?;
    let y = norm.forward_t(x.as_tensor(), true)?;
    let mut scaler = GradScaler::disabled();
    let loss = ops::sum(&ops::mul(&y, factors)?.to_dtype(DType::F32)?)?;
    scaler.scale(&loss)?.backward()?;
    let gradient =
        |var: &Tensor| Ok::<_, candle_amp::Error>(scaler.grad(var)?.expect("a gradient"));
    Ok(Computed {
        dx: gradient(&x)?,
        dweight: gradient(&weight)?,
        dbias: gradient(&bias)?,
        running: [norm.running_mean().copy()?, norm.running_var().copy()?],
        y: y.detach(),
    })
}

fn compare(shape: [usize; 4], parts: &[usize], dtype: DType, channels_last: bool) -> Result<()> {
    // A mean far from zero, which a sum of squares would not survive.
    let x = (random(1, shape.as_slice(), dtype).affine(1.0, 30.0))?;
    let factors = random(2, shape.as_slice(), dtype);
    let alone = compute(&x, &factors, channels_last, |norm| norm)?;
    let start = |rank: usize| parts[..rank].iter().sum::<usize>();
    let all = on_ranks(parts.len(), |communicator| {
        let rank = communicator.rank();
        let part = |whole: &Tensor| whole.narrow(0, start(rank), parts[rank])?.contiguous();
        let convert = |norm| dist::sync_batch_norm(norm, communicator.clone());
        compute(&part(&x)?, &part(&factors)?, channels_last, convert)
    })?;
    let what = |name: &str| format!("{name}, {dtype:?}, {parts:?}, channels last {channels_last}");
    let joined =
        |get: fn(&Computed) -> &Tensor| Tensor::cat(&all.iter().map(get).collect::<Vec<_>>(), 0);
    let summed = |get: fn(&Computed) -> &Tensor| -> Result<Tensor> {
        let mut sum = get(&all[0]).clone();
        for other in &all[1..] {
            sum = (sum + get(other))?;
        }
        Ok(sum)
    };
    // What is rounded to a 16-bit dtype may differ by its last bit.
    let epsilon = |dtype: DType| if dtype == DType::F32 { 64.0 } else { 1.0 };
    assert_eq!(alone.y.dtype(), dtype);
    assert_close(&what("y"), &joined(|c| &c.y)?, &alone.y, dtype, epsilon(dtype));
    assert_close(&what("dx"), &joined(|c| &c.dx)?, &alone.dx, dtype, epsilon(dtype));
    assert_close(&what("dweight"), &summed(|c| &c.dweight)?, &alone.dweight, DType::F32, 64.0);
    assert_close(&what("dbias"), &summed(|c| &c.dbias)?, &alone.dbias, DType::F32, 64.0);
    for computed in &all {
        for (at, name) in ["running mean", "running variance"].into_iter().enumerate() {
            assert_close(&what(name), &computed.running[at], &alone.running[at], DType::F32, 4.0);
            assert_same(&what(name), &computed.running[at], &all[0].running[at]);
        }
    }
    Ok(())
}

#[test]
fn ranks_compute_what_one_computes_of_the_whole_batch() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for parts in [&[6][..], &[3, 3], &[1, 2, 3], &[2, 1, 1, 2]] {
            compare([6, 5, 3, 4], parts, dtype, false)?;
            compare([6, 3, 4, 5], parts, dtype, true)?;
        }
    }
    Ok(())
}

#[test]
fn one_value_a_rank_is_enough_and_none_is_taken_as_none() -> Result<()> {
    compare([2, 3, 1, 1], &[1, 1], DType::F32, false)?;
    compare([4, 3, 2, 1], &[0, 4], DType::F32, false)
}

#[test]
fn with_rectifiers_and_in_evaluation_it_is_the_layer_it_was() -> Result<()> {
    let x = random(1, (4, 3, 2, 2), DType::F32);
    let residual = random(2, (4, 3, 2, 2), DType::F32);
    let layer = || nn::batch_norm(3, 1e-3, nn::var_builder(&nn::VarMap::new(), DType::F32, &cpu()));
    let alone = layer()?.forward_relu_t(&x, Some(&residual), true)?;
    on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let norm = dist::sync_batch_norm(layer()?, communicator.clone());
        let part = |whole: &Tensor| whole.narrow(0, 2 * rank, 2)?.contiguous();
        let y = norm.forward_relu_t(&part(&x)?, Some(&part(&residual)?), true)?;
        assert_close("relu", &y, &part(&alone)?, DType::F32, 16.0);
        let six = layer()?.forward_relu6_t(&x, true)?;
        let norm = dist::sync_batch_norm(layer()?, communicator);
        let y = norm.forward_relu6_t(&part(&x)?, true)?;
        assert_close("relu6", &y, &part(&six)?, DType::F32, 16.0);
        let evaluated = layer()?.forward_t(&x, false)?;
        let fresh = dist::sync_batch_norm(layer()?, std::sync::Arc::new(dist::Single));
        assert_same("evaluation", &fresh.forward_t(&x, false)?, &evaluated);
        Ok(())
    })?;
    Ok(())
}
