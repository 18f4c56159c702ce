//! Blocked products by every set of vectors that the processor has, also those that the choice does not take.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::DType;
use rand::Rng;

use super::progress::Progress;
use super::{Product, Task, cut, tasks};
use crate::kernels::cpu::testing::unless_miri;
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::gemm::Matrix;
use crate::kernels::gemm::tests::{generator, mixed};

/// Rows, terms and columns: at the edges of tiles, parts and blocks, with either side shared.
const SHAPES: [[usize; 3]; 11] = [
    [1, 1, 1],
    [6, 16, 16],
    [16, 20, 48],
    [7, 17, 33],
    [80, 385, 47],
    [47, 384, 81],
    [5, 1300, 200],
    [200, 1536, 5],
    [150, 90, 150],
    [13, 2000, 13],
    [60, 1700, 100],
];

fn numbers(rng: &mut rand_chacha::ChaCha8Rng, count: usize) -> Vec<f32> {
    mixed(rng, &[count], DType::F32).to_vec1().unwrap()
}

/// The result, in rows that are `columns + 3` elements apart, of which those beyond stay 0.5.
fn multiply(
    vectors: Vectors,
    [left, right]: [Matrix<'_, f32>; 2],
    accumulate: bool,
    threads: usize,
) -> Vec<f32> {
    let stride = right.cols + 3;
    let mut sums = vec![0.5f32; left.rows * stride];
    let product = Product { left, right, out: (sums.as_mut_ptr(), stride), accumulate };
    // SAFETY: rows of that many elements, all of them initialised.
    let run = || unsafe { product.run(vectors, threads) };
    match threads {
        // On this thread, which may be unwinding.
        1 => run(),
        _ => rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run),
    }
    sums
}

#[test]
fn every_set_of_vectors_agrees_with_f64_by_any_number_of_threads() {
    let mut rng = generator(91);
    for &[m, k, n] in unless_miri(&SHAPES[..], &[[7, 70, 17]]) {
        // In either order in memory, with gaps in both directions, or of one line that is all of them.
        let layouts = [[0, 1], [1, 0], [0, 0], [1, 1], [2, 2], [3, 3]];
        for &layouts in unless_miri(&layouts[..], &layouts[..2]) {
            let strides = |rows: usize, columns: usize, layout| match layout {
                0 => (columns + 1, 1),
                1 => (1, rows + 2),
                2 => (2 * columns, 2),
                _ => (0, 1),
            };
            let (down, along) = (strides(m, k, layouts[0]), strides(k, n, layouts[1]));
            let left = numbers(&mut rng, 2 * (m + 2) * (k + 1));
            let right = numbers(&mut rng, 2 * (k + 2) * (n + 1));
            let matrix = |data, rows, cols, (row_stride, col_stride)| Matrix {
                data,
                rows,
                cols,
                row_stride,
                col_stride,
            };
            let left: Matrix<'_, f32> = matrix(&left[..], m, k, down);
            let right: Matrix<'_, f32> = matrix(&right[..], k, n, along);
            let at = |matrix: &Matrix<'_, f32>, i: usize, j: usize| {
                f64::from(matrix.data[i * matrix.row_stride + j * matrix.col_stride])
            };
            for vectors in Vectors::ALL.into_iter().filter(|vectors| vectors.is_available()) {
                for accumulate in [false, true] {
                    let sums = multiply(vectors, [left, right], accumulate, 1);
                    for (place, &sum) in sums.iter().enumerate() {
                        let (i, j) = (place / (n + 3), place % (n + 3));
                        if j >= n {
                            assert_eq!(sum, 0.5, "{vectors:?} {m} {k} {n}: beyond a row");
                            continue;
                        }
                        let terms = (0..k).map(|p| at(&left, i, p) * at(&right, p, j));
                        let start = if accumulate { 0.5 } else { 0.0 };
                        let expected = start + terms.clone().sum::<f64>();
                        let magnitude = start + terms.map(f64::abs).sum::<f64>();
                        let tolerance = f64::from(f32::EPSILON) * (k + 1) as f64 * magnitude
                            + k as f64 * f64::from(f32::from_bits(1));
                        let error = (f64::from(sum) - expected).abs();
                        assert!(error <= tolerance, "{vectors:?} {m} {k} {n} {layouts:?}: {i} {j}");
                    }
                    for threads in unless_miri(&[2, 3, 8][..], &[2]) {
                        let bits = |sums: Vec<f32>| sums.into_iter().map(f32::to_bits);
                        let other = multiply(vectors, [left, right], accumulate, *threads);
                        assert!(bits(other).eq(bits(sums.clone())), "{m} {k} {n}, {threads}");
                    }
                }
            }
        }
    }
}

/// What is not finite, next to zeros that fill panels up, reaches its own row and column alone.
#[test]
fn nan_and_infinity_stay_in_their_row_and_column() {
    let (m, k, n) = (20, 40, 37);
    let mut rng = generator(92);
    let [mut left, mut right] = [m * k, k * n]
        .map(|count| (0..count).map(|_| rng.random_range(0.5..1.0f32)).collect::<Vec<_>>());
    left[19 * k + 3] = f32::INFINITY;
    right[7 * n + 36] = f32::NAN;
    for vectors in Vectors::ALL.into_iter().filter(|vectors| vectors.is_available()) {
        let sides = [Matrix::new(&left[..], m, k), Matrix::new(&right[..], k, n)];
        for (place, sum) in multiply(vectors, sides, false, 2).into_iter().enumerate() {
            let (i, j) = (place / (n + 3), place % (n + 3));
            let expected = j < n && (i == 19 || j == 36);
            assert_eq!(!sum.is_finite(), expected, "{vectors:?}: {i}, {j} is {sum}");
            assert_eq!(sum.is_nan(), j == 36, "{vectors:?}: {i}, {j} is {sum}");
        }
    }
}

/// Threads wait for earlier tasks alone: those that one needs are before it, and a slot is packed again only when
/// every part has been multiplied by what it had.
#[test]
fn no_task_needs_a_later_one() {
    for (ahead, slots) in [(0, 1), (1, 3)] {
        let (mut packed, mut multiplied) = ([0; 7], [0; 5]);
        for task in tasks(7, ahead, 2, 5) {
            match task {
                Task::Pack { block, .. } => {
                    assert!(multiplied.iter().all(|&done| block < slots || done > block - slots));
                    packed[block] += 1;
                }
                Task::Multiply { block, part } => {
                    assert_eq!((packed[block], multiplied[part]), (2, block));
                    multiplied[part] += 1;
                }
            }
        }
        assert_eq!((packed, multiplied), ([2; 7], [7; 5]));
    }
    assert_eq!(cut(100, 3, 16), [0..48, 48..96, 96..100]);
    assert_eq!(cut(13, 0, 6), cut(13, 1, 16));
}

/// A task that needs one that panicked ends, rather than wait for ever, and the panic is the one that is seen. A thread
/// that unwinds can multiply.
#[test]
fn a_panic_ends_those_that_wait() {
    let (progress, begun) = (Progress::new(1, 1, 1, 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let prepare = || begun.store(true, Ordering::Relaxed);
            progress.multiply([0, 0], prepare, |()| panic!("of what is not packed"));
        });
        while !begun.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let run = || progress.pack(0, || panic!("in a task"));
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        waiting.join().unwrap();
    });

    struct AtTheEnd<'a>(&'a AtomicBool);
    impl Drop for AtTheEnd<'_> {
        fn drop(&mut self) {
            let (left, right) = ([2f32; 8 * 20], [3f32; 20 * 16]);
            let mut available = Vectors::ALL.into_iter().filter(|vectors| vectors.is_available());
            let all_right = available.all(|vectors| {
                let sides = [Matrix::new(&left[..], 8, 20), Matrix::new(&right[..], 20, 16)];
                multiply(vectors, sides, false, 1)[0] == 120.0
            });
            self.0.store(all_right, Ordering::Relaxed);
        }
    }
    let right = AtomicBool::new(false);
    let unwind = || {
        let _at_the_end = AtTheEnd(&right);
        panic!("before the end");
    };
    assert!(catch_unwind(AssertUnwindSafe(unwind)).is_err());
    assert!(right.into_inner());
}
