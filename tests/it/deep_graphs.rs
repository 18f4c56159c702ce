//! Graphs that are deeper than recursion could walk.

use candle_amp::autograd::checkpoint;
use candle_amp::{GradScaler, no_grad, ops};
use candle_core::{DType, Device, Result, Tensor, Var};

/// Far more than a test thread's 2 MiB of stack have room for, at 16 bytes a frame.
const DEPTH: usize = 150_000;

fn w() -> Result<Var> {
    Var::new(&[1f32, -1.0, 1.0], &Device::Cpu)
}

/// `w` to the power of `depth + 1`.
fn chain(w: &Tensor, depth: usize) -> Result<Tensor> {
    (0..depth).try_fold(w.clone(), |x, _| ops::mul(&x, w))
}

/// `w`: every second operator is candle's, so that candle has to walk them all.
fn alternating(w: &Tensor, depth: usize) -> Result<Tensor> {
    (0..depth / 2).try_fold(w.clone(), |x, _| ops::affine(&x, 1.0, 0.0)?.affine(-1.0, 0.0))
}

fn expected(depth: usize) -> [f32; 3] {
    let power = (depth + 1) as f32;
    let sign = if depth.is_multiple_of(2) { 1.0 } else { -1.0 };
    [power, power * sign, power]
}

fn gradient(loss: &Tensor, w: &Var) -> candle_amp::Result<Vec<f32>> {
    let mut scaler = GradScaler::disabled();
    scaler.scale(loss)?.backward()?;
    Ok(scaler.grad(w)?.expect("a gradient").to_vec1()?)
}

#[test]
fn a_scaler_walks_a_deep_graph() -> candle_amp::Result<()> {
    let w = w()?;
    let x = chain(&w, DEPTH)?;
    assert_eq!(gradient(&ops::sum(&x)?, &w)?, expected(DEPTH));
    Ok(())
}

/// A million: `cargo test --test it -- --ignored a_million`.
#[test]
#[ignore = "takes a gigabyte or two"]
fn a_million_operators_of_both_kinds_go_back() -> candle_amp::Result<()> {
    let w = w()?;
    let x = alternating(&w, 1_000_000)?;
    assert_eq!(gradient(&ops::sum(&x)?, &w)?, [1.0; 3]);
    Ok(())
}

/// A million: `cargo test --test it -- --ignored a_million`.
#[test]
#[ignore = "takes a gigabyte or two"]
fn a_million_operators_go_back_and_are_dropped() -> candle_amp::Result<()> {
    let w = w()?;
    let x = chain(&w, 1_000_000)?;
    assert_eq!(gradient(&ops::sum(&x)?, &w)?, expected(1_000_000));
    drop(x);
    drop(chain(&w, 1_000_000)?); // with all that it has saved
    Ok(())
}

/// candle walks the part that it can, and the scaler the rest.
#[test]
fn a_deep_graph_may_have_operators_of_candle_on_top() -> candle_amp::Result<()> {
    let w = w()?;
    let (deep, other) = (chain(&w, DEPTH)?, chain(&w, 10_000)?);
    let loss = (((&deep + &other)? * 2.0)? + w.as_tensor())?.sum_all()?;
    let sums = expected(DEPTH).into_iter().zip(expected(10_000)).map(|(a, b)| 2.0 * (a + b) + 1.0);
    assert_eq!(gradient(&loss, &w)?, sums.collect::<Vec<_>>());
    Ok(())
}

#[test]
fn a_node_above_and_below_what_candle_sees_gets_all_its_gradients() -> candle_amp::Result<()> {
    let w = w()?;
    // The middle has a shallow consumer, which candle sees, and one at the end of a chain, which it does not.
    let middle = chain(&w, 100)?;
    let deep = (0..10_000).try_fold(middle.clone(), |x, _| ops::mul(&x, &w))?;
    let loss = ((ops::relu(&middle)? * 3.0)? + deep)?.sum_all()?;
    // Powers of w, where relu passes those above zero.
    let passes = [1.0, if 101 % 2 == 0 { 1.0 } else { 0.0 }, 1.0];
    let all: Vec<f32> =
        (0..3).map(|i| 3.0 * passes[i] * expected(100)[i] + expected(10_100)[i]).collect();
    assert_eq!(gradient(&loss, &w)?, all);
    Ok(())
}

/// candle recurses through both kinds: on a stack that has room.
#[test]
fn a_scaler_has_candle_walk_a_deep_graph_that_alternates() -> candle_amp::Result<()> {
    let (w, depth) = (w()?, 100_000);
    assert_eq!(gradient(&ops::sum(&alternating(&w, depth)?)?, &w)?, [1.0; 3]);
    let x = Var::new(&[1f32, 2.0, 3.0], &Device::Cpu)?;
    let block = ops::sum(&checkpoint(move |x| ops::mul(&alternating(&w, depth)?, x), &x)?)?;
    assert_eq!(gradient(&block, &x)?, [1.0, -1.0, 1.0]);
    Ok(())
}

#[test]
fn what_candle_cannot_walk_is_an_error() -> candle_amp::Result<()> {
    let w = w()?;
    let x = chain(&w, DEPTH)?;
    for loss in [ops::sum(&x)?, (&x * 2.0)?.sum_all()?] {
        let error = loss.backward().expect_err("its recursion would end the process").to_string();
        assert!(error.contains("too deep") && error.contains("scaler.scale(&loss)"), "{error}");
    }
    // Below the cut is an operator of candle's, so that the scaler needs candle there.
    let mixed = chain(&(w.as_tensor() * 1.0)?, 10_000)?;
    let mut scaler = GradScaler::disabled();
    let error = scaler.scale(&ops::sum(&mixed)?)?.backward().expect_err("candle has to walk it");
    assert!(error.to_string().contains("too deep"), "{error}");
    assert!(scaler.grad(&w)?.is_none());
    // What is as deep as candle can walk goes through candle as before.
    let loss = ops::sum(&chain(&w, 2_500)?)?;
    let gradient = loss.backward()?.get(&w).expect("a gradient").to_vec1::<f32>()?;
    assert_eq!(gradient, expected(2_500));
    Ok(())
}

#[test]
fn a_deep_graph_is_dropped_without_recursion() -> Result<()> {
    let w = w()?;
    drop(chain(&w, DEPTH)?);
    // With an operator of candle's between each two.
    let mixed = (0..DEPTH / 2).try_fold(w.as_tensor().clone(), |x, _| ops::relu(&x)? * 1.0);
    drop(mixed?);
    // A tree whose every node has three inputs, and one with more inputs than candle's operators have.
    let wide = (0..DEPTH / 8)
        .try_fold(w.as_tensor().clone(), |x, _| ops::cat(&[&x, &x, &w, &w], 0)?.narrow(0, 0, 3));
    drop(wide?);
    Ok(())
}

#[test]
fn a_checkpoint_finds_the_variables_of_a_deep_block() -> candle_amp::Result<()> {
    let (w, x) = (w()?, Tensor::ones(3, DType::F32, &Device::Cpu)?);
    let block = {
        let w = w.clone();
        move |x: &Tensor| ops::mul(&chain(&w, 20_000)?, x)
    };
    let loss = || ops::sum(&checkpoint(block.clone(), &x)?);
    assert_eq!(gradient(&loss()?, &w)?, expected(20_000));
    let loss = loss()?;
    let by_candle = loss.backward()?.get(&w).expect("a gradient").to_vec1::<f32>()?;
    assert_eq!(by_candle, expected(20_000));
    assert!(!no_grad(|| checkpoint(block, &x))?.track_op());
    Ok(())
}
