//! Many tensors, shared among the threads of the CPU.

use candle_core::Result;
use rayon::prelude::*;

/// Elements a task.
pub(in crate::kernels) const TASK: usize = 1 << 16;

/// Tasks a thread, at least, where tensors are tasks: the last one to end keeps others waiting.
const FAIR: usize = 8;

/// Who works on a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::kernels) enum By {
    /// All threads, on tasks of it.
    All,
    /// The thread that called.
    One,
}

/// What `work` returns for each of `items`, in their order.
///
/// Those of a task's elements, or of few beside all the others, share the threads; a larger one has
/// them all to itself, and ends before the next begins. No thread begins with one before it has ended with
/// another, so that none ever holds the locks of two.
pub(in crate::kernels) fn share<T: Sync, R: Send>(
    items: &[T],
    elements: impl Fn(&T) -> usize,
    work: impl Fn(&T, By) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let all: usize = items.iter().map(&elements).sum();
    let few = TASK.max(all / (FAIR * rayon::current_num_threads()));
    let large = |item| (elements(item) > few).then(|| work(item, By::All)).transpose();
    let mut results = items.iter().map(large).collect::<Result<Vec<_>>>()?;
    if results.iter().any(Option::is_none) {
        let small = items.par_iter().zip(&mut results).filter(|(_, result)| result.is_none());
        small.try_for_each(|(item, result)| {
            *result = Some(work(item, By::One)?);
            Ok::<_, candle_core::Error>(())
        })?;
    }
    Ok(results.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(threads: usize, sizes: &[usize]) -> Vec<(usize, By)> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let work = |&size: &usize, by| Ok((size, by));
        pool.install(|| share(sizes, |&size| size, work)).unwrap()
    }

    #[test]
    fn results_are_in_order_and_large_ones_have_all_threads() {
        let mut sizes = vec![TASK + 1; 40];
        sizes[7] = 12 * TASK;
        sizes[23] = 1;
        // A thread's tasks are of 51 / 24 parts of a task, or more.
        for (number, (size, by)) in on(3, &sizes).into_iter().enumerate() {
            assert_eq!(size, sizes[number]);
            assert_eq!(by, if number == 7 { By::All } else { By::One });
        }
        let large = [TASK, TASK + 1].map(|size| on(1, &[size])[0].1);
        assert_eq!(large, [By::One, By::All]);
        assert!(on(2, &[]).is_empty());
    }

    #[test]
    fn an_error_is_returned() {
        for wrong in [3, 3 * TASK] {
            let work = |&size: &usize, _| match size == wrong {
                true => candle_core::bail!("wrong"),
                false => Ok(size),
            };
            let result = share(&[1, 2 * TASK, 3, 3 * TASK], |&size| size, work);
            assert_eq!(result.unwrap_err().to_string().lines().next(), Some("wrong"));
        }
    }
}
