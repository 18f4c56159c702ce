use std::panic::catch_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use candle_amp::{backend::on_workers, ops};
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

/// What threads keep is gone when the call returns, not later, while the process may be exiting.
#[test]
fn threads_have_ended_with_all_that_is_theirs() {
    static GONE: AtomicUsize = AtomicUsize::new(0);
    struct Kept;
    impl Drop for Kept {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(20));
            GONE.fetch_add(1, Ordering::Relaxed);
        }
    }
    thread_local!(static KEPT: Kept = const { Kept });
    let keep = || on_workers(|| rayon::broadcast(|_| KEPT.with(|_| ())).len());
    let count = keep();
    assert_eq!(GONE.load(Ordering::Relaxed), count);
    let panicked = catch_unwind(|| on_workers(|| KEPT.with(|_| panic!("on a worker"))));
    assert!(panicked.is_err());
    assert_eq!(GONE.load(Ordering::Relaxed), count + 1);
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
