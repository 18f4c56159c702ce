//! Every method of every instruction set beside the same on arrays.
#![allow(unsafe_code)]

use std::array::from_fn;

use half::{bf16, f16};
use rand::Rng;

use super::{Vector, Vectors, with_vectors};
use crate::kernels::cpu::testing::unless_miri;
use crate::kernels::gemm::tests::generator;

/// Numbers of every kind, sixteen of them: random bits, so that infinities, NaN and subnormals are among them.
fn numbers(rng: &mut impl Rng) -> [f32; 16] {
    from_fn(|_| match rng.random_range(0..8) {
        0 => f32::from_bits(rng.random()),
        1 => [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -0.0][rng.random_range(0..4)],
        2 => f32::from_bits(rng.random_range(0..1 << 23)),
        _ => rng.random_range(-100f32..100.0),
    })
}

/// A run of lanes, which may be none or all.
fn run(rng: &mut impl Rng) -> u16 {
    let first = rng.random_range(0..=16);
    let count = rng.random_range(0..=16 - first);
    (((1u32 << count) - 1) << first) as u16
}

fn masked<T: Copy>(x: [T; 16], other: [T; 16], mask: u16) -> [T; 16] {
    from_fn(|i| if mask >> i & 1 == 1 { x[i] } else { other[i] })
}

/// The same bits, where NaN is any NaN: which one an addition of two gives is not said.
fn assert_same(actual: [f32; 16], expected: [f32; 16], what: &str) {
    for (i, (actual, expected)) in actual.into_iter().zip(expected).enumerate() {
        let same = actual.to_bits() == expected.to_bits() || actual.is_nan() && expected.is_nan();
        assert!(same, "{what}, lane {i}: {actual} instead of {expected}");
    }
}

/// The same bits, of NaN too.
fn assert_bits(actual: [f32; 16], expected: [u32; 16], what: &str) {
    assert_eq!(actual.map(f32::to_bits), expected, "{what}");
}

/// Calls `f` with each instruction set that the processor has.
fn for_each_set(mut f: impl FnMut(Vectors)) {
    Vectors::ALL.into_iter().filter(|set| set.is_available()).for_each(&mut f);
}

/// `f` of vectors, in an array.
macro_rules! lanes {
    ($set:expr, $V:ident => $vector:expr) => {{
        let mut out = [0f32; 16];
        // SAFETY: the features of the set; 16 lanes.
        with_vectors!($set, $V => unsafe { $vector.store(out.as_mut_ptr()) });
        out
    }};
}

#[test]
fn arithmetic_is_lane_by_lane() {
    let mut rng = generator(81);
    for_each_set(|set| {
        for _ in 0..unless_miri(200, 4) {
            let (a, b) = (numbers(&mut rng), numbers(&mut rng));
            let [x, y] = [a.as_ptr(), b.as_ptr()];
            let add = lanes!(set, V => V::load(x).add(V::load(y)));
            assert_same(add, from_fn(|i| a[i] + b[i]), "add");
            let sub = lanes!(set, V => V::load(x).sub(V::load(y)));
            assert_same(sub, from_fn(|i| a[i] - b[i]), "sub");
            let mul = lanes!(set, V => V::load(x).mul(V::load(y)));
            assert_same(mul, from_fn(|i| a[i] * b[i]), "mul");
            let c = numbers(&mut rng);
            let sum = lanes!(set, V => V::load(x).mul_add(V::load(y), V::load(c.as_ptr())));
            assert_same(sum, from_fn(|i| a[i].mul_add(b[i], c[i])), "mul_add");
            let or = lanes!(set, V => V::load(x).or(V::load(y)));
            assert_same(or, from_fn(|i| f32::from_bits(a[i].to_bits() | b[i].to_bits())), "or");
            assert_bits(
                lanes!(set, V => V::load(x).upper()),
                from_fn(|i| a[i].to_bits() & !0xffff),
                "upper",
            );
            let up = lanes!(set, V => V::load(x).shift_up());
            assert_bits(up, from_fn(|i| a[i].to_bits() << 16), "shift_up");
            let down = lanes!(set, V => V::load(x).shift_down());
            assert_bits(down, from_fn(|i| a[i].to_bits() >> 16), "shift_down");
            let nearest = lanes!(set, V => V::load(x).nearest_bf16());
            let up = |x: f32| if x.is_nan() { 0 } else { 0x8000 };
            let expected = from_fn(|i| (a[i].to_bits() + up(a[i])) & !0xffff);
            assert_bits(nearest, expected, "nearest_bf16");
            assert_same(lanes!(set, V => V::splat(a[3])), [a[3]; 16], "splat");
            assert_same(lanes!(set, V => V::zero()), [0.0; 16], "zero");
        }
    });
}

#[test]
fn lanes_are_picked_and_exchanged() {
    let mut rng = generator(82);
    for_each_set(|set| {
        let rows: [[f32; 16]; 16] = from_fn(|_| numbers(&mut rng));
        let (a, b) = (rows[0], rows[1]);
        let both: Vec<f32> = a.into_iter().chain(b).collect();
        let [x, y] = [a.as_ptr(), b.as_ptr()];
        let evens = lanes!(set, V => V::load(x).evens(V::load(y)));
        assert_same(evens, from_fn(|i| both[2 * i]), "evens");
        let odds = lanes!(set, V => V::load(x).odds(V::load(y)));
        assert_same(odds, from_fn(|i| both[2 * i + 1]), "odds");
        let low = lanes!(set, V => V::load(x).lower_halves(V::load(y)));
        let halves = |i: usize| [both[2 * i].to_bits(), both[2 * i + 1].to_bits()];
        let expected = from_fn(|i| halves(i)[0] & 0xffff | halves(i)[1] << 16);
        assert_bits(low, expected, "lower_halves");
        let high = lanes!(set, V => V::load(x).upper_halves(V::load(y)));
        let expected = from_fn(|i| halves(i)[0] >> 16 | halves(i)[1] & !0xffff);
        assert_bits(high, expected, "upper_halves");
        for half in 0..2 {
            let turns = lanes!(set, V => V::load(x).interleave(V::load(y))[half]);
            assert_same(turns, from_fn(|i| [a, b][i % 2][8 * half + i / 2]), "interleave");
        }
        for column in 0..16 {
            let turned =
                lanes!(set, V => V::transpose(rows.map(|row| V::load(row.as_ptr())))[column]);
            assert_same(turned, from_fn(|i| rows[i][column]), "transpose");
        }
    });
}

/// Elements beyond a mask lie beyond a slice, and are not touched.
#[test]
fn masks_bound_what_is_read_and_written() {
    let mut rng = generator(83);
    for_each_set(|set| {
        for _ in 0..unless_miri(300, 8) {
            let (x, before, mask) = (numbers(&mut rng), numbers(&mut rng), run(&mut rng));
            let (from, halves) = (x.as_ptr(), x.map(f16::from_f32));
            let rounded = x.map(bf16::from_f32);
            let loaded = lanes!(set, V => V::load_masked(from, mask));
            assert_same(loaded, masked(x, [0.0; 16], mask), "load_masked");
            let loaded = lanes!(set, V => V::load_bf16(rounded.as_ptr(), mask));
            assert_same(loaded, masked(rounded.map(f32::from), [0.0; 16], mask), "load_bf16");
            let loaded = lanes!(set, V => V::load_f16(halves.as_ptr(), mask));
            assert_same(loaded, masked(halves.map(f32::from), [0.0; 16], mask), "load_f16");

            let mut out = before;
            // SAFETY: the features of the set; 16 places.
            with_vectors!(set, V => unsafe { V::load(from).store_masked(out.as_mut_ptr(), mask) });
            assert_same(out, masked(x, before, mask), "store_masked");
            let mut out = before.map(bf16::from_f32);
            // SAFETY: as above.
            with_vectors!(set, V => unsafe { V::load(from).store_bf16(out.as_mut_ptr(), mask) });
            let expected = masked(rounded, before.map(bf16::from_f32), mask);
            assert!(out.map(bf16::to_bits) == expected.map(bf16::to_bits), "{x:?} {mask:x}");
            let mut out = before.map(f16::from_f32);
            // SAFETY: as above.
            with_vectors!(set, V => unsafe { V::load(from).store_f16(out.as_mut_ptr(), mask) });
            let expected = masked(halves, before.map(f16::from_f32), mask).map(f32::from);
            assert_same(out.map(f32::from), expected, "store_f16");

            // SAFETY: as above.
            let finite = with_vectors!(set, V => unsafe { V::load(from).is_finite(mask) });
            let expected = (0..16).all(|i| mask >> i & 1 == 0 || x[i].is_finite());
            assert_eq!(finite, expected, "{x:?} {mask:x}");
            let mut pair = [bf16::ZERO; 32];
            with_vectors!(set, V => {
                // SAFETY: as above; 32 places.
                unsafe { V::store_bf16_pair([V::load(from), V::load(before.as_ptr())], pair.as_mut_ptr()) }
            });
            let expected = rounded.into_iter().chain(before.map(bf16::from_f32));
            assert!(pair.into_iter().map(bf16::to_bits).eq(expected.map(bf16::to_bits)));
        }
    });
}

/// As [`masks_bound_what_is_read_and_written`], of 32 elements.
#[test]
fn masks_bound_pairs() {
    let mut rng = generator(85);
    for_each_set(|set| {
        for _ in 0..unless_miri(300, 8) {
            let mut elements = || -> [bf16; 32] { from_fn(|_| bf16::from_bits(rng.random())) };
            let (x, before) = (elements(), elements());
            let first = rng.random_range(0..=32);
            let mask = (((1u64 << rng.random_range(0..=32 - first)) - 1) << first) as u32;
            let inside = |i: usize| mask >> i & 1 == 1;
            let loaded = lanes!(set, V => V::load_pairs(x.as_ptr(), mask));
            let bits = |i: usize| if inside(i) { u32::from(x[i].to_bits()) } else { 0 };
            assert_bits(loaded, from_fn(|i| bits(2 * i) | bits(2 * i + 1) << 16), "load_pairs");
            let mut out = before;
            with_vectors!(set, V => {
                // SAFETY: the features of the set; 32 elements and places.
                unsafe { V::load_pairs(x.as_ptr(), u32::MAX).store_pairs(out.as_mut_ptr(), mask) }
            });
            for (i, out) in out.into_iter().enumerate() {
                let expected = if inside(i) { x[i] } else { before[i] };
                assert_eq!(out.to_bits(), expected.to_bits(), "store_pairs, {i} of {mask:x}");
            }
        }
    });
}

/// Masked lanes may lie on a page that is not there: here, beyond the ends of an exact slice.
#[test]
fn products_of_every_shape_agree_with_loops() {
    let mut rng = generator(84);
    for_each_set(|set| {
        macro_rules! check {
            ($rows:literal, $count:literal, $left:literal, $add:literal) => {
                for &depth in unless_miri(&[1usize, 2, 7, 48][..], &[1, 2]) {
                    let step = if $left == 1 { $rows } else { 1 };
                    let len = ($rows - 1) * $left + (depth - 1) * step + 1;
                    let mut random = |len: usize| -> Vec<f32> {
                        (0..len).map(|_| rng.random_range(-1f32..1.0)).collect()
                    };
                    let (left, right) = (random(len), random(depth * 16 * $count));
                    let before = random($rows * 16 * $count);
                    let mut out = before.clone();
                    let columns = 16 * $count;
                    let (l, r, o) = (left.as_ptr(), right.as_ptr(), out.as_mut_ptr());
                    // SAFETY: the features of the set; matrices of these sizes.
                    with_vectors!(set, V => unsafe {
                        V::multiply::<$rows, $count, $left, $add>((l, step), (r, columns), depth, (o, columns))
                    });
                    for (i, actual) in out.into_iter().enumerate() {
                        let (row, column) = (i / columns, i % columns);
                        let terms = (0..depth).map(|k| {
                            f64::from(left[row * $left + k * step])
                                * f64::from(right[k * columns + column])
                        });
                        let start = if $add { f64::from(before[i]) } else { 0.0 };
                        let expected = start + terms.sum::<f64>();
                        let bound = f64::from(f32::EPSILON) * (depth + 1) as f64 * (depth + 1) as f64;
                        assert!((f64::from(actual) - expected).abs() <= bound, "{actual} {expected}");
                    }
                }
            };
        }
        check!(6, 1, 1, false);
        check!(6, 1, 1, true);
        check!(8, 1, 1, false);
        check!(8, 2, 1, false);
        check!(8, 3, 1, false);
        check!(16, 1, 48, true);
        check!(8, 1, 48, true);
        check!(8, 2, 48, true);
        check!(8, 3, 48, true);
    });
}
