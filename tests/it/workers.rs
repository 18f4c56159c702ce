use std::panic::catch_unwind;
use std::thread;

use candle_amp::{on_workers, ops};
use candle_core::{Device, Error, Result, Tensor, Var};

use crate::util::to_vec;

#[test]
fn a_loop_is_on_one_of_as_many_threads_and_stays_there() {
    let outside = (rayon::current_thread_index(), thread::current().id());
    let [inside, nested] = on_workers(|| {
        let here = || (rayon::current_thread_index(), thread::current().id());
        [here(), on_workers(here)]
    });
    assert_eq!(outside.0, None);
    assert!(inside.0.is_some() && inside.1 != outside.1);
    assert_eq!(nested, inside);
    assert_eq!(on_workers(rayon::current_num_threads), rayon::current_num_threads());
}

/// Each call has threads of its own: one that waits for another's would never end.
#[test]
fn calls_side_by_side_do_not_wait_for_each_other() {
    let count = 2 * rayon::current_num_threads();
    let barrier = std::sync::Barrier::new(count);
    thread::scope(|scope| {
        (0..count).for_each(|_| {
            scope.spawn(|| on_workers(|| barrier.wait()));
        });
    });
}

#[test]
fn a_panic_is_the_callers() {
    assert!(catch_unwind(|| on_workers(|| panic!("on a worker"))).is_err());
    assert_eq!(on_workers(|| 7), 7);
}

#[test]
fn results_are_those_of_any_thread() -> Result<()> {
    let values: Vec<f32> =
        (0..300 * 200).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 97.0).collect();
    let x = Var::from_tensor(&Tensor::from_vec(values, (300, 200), &Device::Cpu)?)?;
    let step = || {
        let y = ops::softmax(&ops::matmul(&x, &x.t()?)?, 1)?;
        let gradients = ops::mean(&ops::mul(&y, &y)?)?.backward()?;
        Ok::<_, Error>((to_vec(&y), gradients.get(&x).map(to_vec)))
    };
    assert_eq!(on_workers(step)?, step()?);
    Ok(())
}
