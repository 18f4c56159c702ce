//! The program as two ranks that `mpirun` starts.

use anyhow::{Context, Result};

use crate::common::mpirun::{assert_near, run};

const PROGRAM: &str = "tests::program";

/// The losses that the program ends with.
fn losses(text: &str) -> Result<[f64; 2]> {
    let loss = |name: &str| {
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
        let loss = lines.next().with_context(|| format!("no {name} in {text}"))?;
        assert_eq!(lines.next(), None, "printed once: {text}");
        anyhow::Ok(loss.trim().parse::<f64>()?)
    };
    Ok([loss("train loss")?, loss("held-out loss")?])
}

#[test]
fn two_ranks_train_as_one() -> Result<()> {
    let train = |ranks, more: &str| {
        losses(&run(PROGRAM, &format!("--smoke --lr 1e-2 --steps 20 {more}"), ranks)?)
    };
    let alone = train(1, "--precision f32")?;
    assert!(alone[0] < 3.8, "it learns: {alone:?}");
    let two = train(2, "--precision f32")?;
    for (own, expected) in two.into_iter().zip(alone) {
        assert_near("a loss", own, expected, 1e-3);
    }
    // Clipped by the norm of all parts.
    let half = "--precision f16 --master-weights";
    assert_eq!(train(2, half)?, train(2, &format!("{half} --sharded"))?);
    Ok(())
}
