//! Blocked products by every set of vectors that the processor has, also those that the choice does not take.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::DType;
use rand::Rng;

use super::pack::Side;
use super::progress::Progress;
use super::{Product, Task, cut, is_faster, tasks, tile};
use crate::kernels::cpu::testing::unless_miri;
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::gemm::Matrix;
use crate::kernels::gemm::tests::{generator, mixed};

/// Rows, terms and columns: at the edges of tiles, parts and blocks, with either side shared.
const SHAPES: [[usize; 3]; 13] = [
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
    [150, 20, 160],
    [320, 17, 300],
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

/// Words of panels, of lines and terms in any order in memory, and none beside them.
#[test]
fn lines_are_packed_term_by_term() {
    let mut rng = generator(93);
    for vectors in Vectors::ALL.into_iter().filter(|vectors| vectors.is_available()) {
        for width in tile::size(vectors) {
            for (lines, terms) in
                [(1, 1), (5, 40), (16, 16), (24, 33), (33, 17), (96, 20), (61, 64)]
            {
                for (down, along) in
                    [(terms + 3, 1), (1, lines + 2), (2 * terms, 2), (0, 1), (1, 0)]
                {
                    let data = numbers(&mut rng, lines * down + terms * along + 1);
                    let side = Matrix {
                        data: &data[..],
                        rows: lines,
                        cols: terms,
                        row_stride: down,
                        col_stride: along,
                    };
                    // From a line and a term on, as a part of a block has them.
                    let (first, start) = (lines / (2 * width) * width, terms / 3);
                    let (lines, depth) = (first..lines, start..terms);
                    let side = Side::new(side, width);
                    let len = side.len(&lines, &depth);
                    let mut words = vec![7.5f32; len + 32];
                    side.pack(vectors, lines.clone(), depth.clone(), &mut words[16..16 + len]);
                    let (before, words) = words.split_at(16);
                    let (words, after) = words.split_at(len);
                    assert!(
                        before.iter().chain(after).all(|&word| word == 7.5),
                        "{vectors:?} {width}"
                    );
                    for (place, &word) in words.iter().enumerate() {
                        let (panel, place) =
                            (place / (width * depth.len()), place % (width * depth.len()));
                        let line = lines.start + panel * width + place % width;
                        let term = depth.start + place / width;
                        let expected =
                            if line < lines.end { data[line * down + term * along] } else { 0.0 };
                        assert_eq!(
                            word.to_bits(),
                            expected.to_bits(),
                            "{vectors:?} {width}: {line}, {term}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn blocks_are_for_what_they_are_faster_for() {
    let plain = [false, false];
    for vectors in Vectors::ALL {
        let wide = vectors.hold_squares();
        for (sizes, turned, expected) in [
            ([2048, 1024, 256], plain, !wide),
            ([2048, 1024, 256], [true, false], true),
            ([2048, 1024, 256], [false, true], true),
            ([2048, 64, 256], [false, true], !wide),
            ([2048, 64, 256], [true, true], !wide),
            ([4160, 768, 192], [true, true], !wide),
            ([200, 200, 200], plain, true),
            ([2, 512, 2048], [false, true], true),
            ([7, 512, 2048], [true, false], false),
            ([7, 512, 2048], plain, false),
            ([4, 128, 2048], [false, true], false),
            ([1, 2048, 2048], [false, true], false),
            ([64, 512, 512], [true, false], !wide),
            ([2048, 1024, 127], [true, true], false),
            ([128, 31, 128], [true, true], false),
        ] {
            let faster = is_faster(vectors, sizes, || turned);
            assert_eq!(faster, expected, "{vectors:?} {sizes:?} {turned:?}");
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
    // As they are, and in the opposite order in memory.
    let turned = |data: &[f32], rows: usize| -> Vec<f32> {
        let columns = data.len() / rows;
        (0..data.len()).map(|at| data[at % rows * columns + at / rows]).collect()
    };
    let (left_turned, right_turned) = (turned(&left, m), turned(&right, k));
    let plain = [Matrix::new(&left[..], m, k), Matrix::new(&right[..], k, n)];
    let turned =
        [Matrix::new(&left_turned[..], k, m).t(), Matrix::new(&right_turned[..], n, k).t()];
    let available = || Vectors::ALL.into_iter().filter(|vectors| vectors.is_available());
    for (vectors, sides) in available().flat_map(|set| [(set, plain), (set, turned)]) {
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
