//! Packed products on every processor: where there is no AMX, in the stand-in for its registers.

#![allow(unsafe_code)]

use std::ops::Range;

use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Bf16Terms, InstructionSet, MatrixView, PackedGemm, split};
use crate::kernels::cpu::testing::unless_miri;
use crate::kernels::cpu::vector::{Vector, Vectors, with_vectors};
use crate::kernels::gemm::tests::every_exponent;

/// What is packed, an element at a time: vectors are compared with this.
trait Single: Bf16Terms {
    /// The terms, in upper halves, and zeros for those that it has not.
    fn terms(self) -> [u32; 3];
}

impl Single for bf16 {
    fn terms(self) -> [u32; 3] {
        [u32::from(self.to_bits()) << 16, 0, 0]
    }
}

impl Single for f16 {
    fn terms(self) -> [u32; 3] {
        let [first, second, _] = self.to_f32().terms();
        [first, second, 0]
    }
}

impl Single for f32 {
    fn terms(self) -> [u32; 3] {
        let nearest = |x: f32| {
            let up = if x.is_nan() { 0 } else { 0x8000 };
            x.to_bits().wrapping_add(up) & !0xffff
        };
        let first = nearest(self);
        let rest = self - f32::from_bits(first);
        let second = nearest(rest);
        [first, second, (rest - f32::from_bits(second)).to_bits() & !0xffff]
    }
}

/// The words of lines of `depth` elements, and of lines of zeros up to whole blocks of 16:
/// `(line, 16 words, term, word)`.
fn pack_singly<T: Single>(elements: &[T], depth: usize) -> Vec<u32> {
    let mut words = Vec::new();
    let lines = elements.chunks(depth);
    let missing = lines.len().next_multiple_of(16) - lines.len();
    for line in lines.chain(std::iter::repeat_n(&[][..], missing)) {
        let terms: Vec<_> = line.iter().map(|x| x.terms()).collect();
        for first in (0..depth).step_by(32) {
            for term in 0..T::COUNT {
                let of = |k: usize| terms.get(first + k).map_or(0, |terms| terms[term]);
                words.extend((0..16).map(|word| match T::COUNT {
                    1 => of(2 * word) >> 16 | of(2 * word + 1),
                    _ => of(word) >> 16 | of(word + 16),
                }));
            }
        }
    }
    words
}

/// The instruction sets of this processor.
fn sets() -> impl Iterator<Item = Vectors> {
    Vectors::ALL.into_iter().filter(|set| set.is_available())
}

/// `left` and `right`, both lines of 32 elements, packed and multiplied: `(line of left, line of right)`.
fn multiply<T: Bf16Terms>(left: &[T], right: &[T], isa: InstructionSet) -> Vec<f32> {
    let view = |data| MatrixView {
        data,
        lines: data.len() / 32,
        depth: 32,
        line_stride: 32,
        depth_stride: 1,
    };
    let (left, right) = (view(left), view(right));
    // Elements of 16 words are packed; without AMX, pairs are multiplied by rows of 8.
    let words = left.words();
    let of = |lines: usize| vec![0; lines.next_multiple_of(16) * words];
    let mut packed = [of(left.lines), of(right.lines)];
    left.pack_lines(words, &mut packed[0]);
    right.pack_blocks(&mut packed[1]);
    let gemm = PackedGemm {
        left: &packed[0],
        left_block: isa.rows() * words,
        left_row: words,
        left_step: 1,
        left_starts: &[0],
        right: &packed[1],
        right_block: 16 * words,
        right_step: 16,
        right_starts: &[0],
        rows: left.lines,
        columns: right.lines,
        depth: words,
        terms: T::COUNT,
        row_panels: false,
    };
    sums(&gemm, isa)
}

fn sums(gemm: &PackedGemm<'_>, isa: InstructionSet) -> Vec<f32> {
    let mut sums = vec![0f32; gemm.rows * gemm.columns];
    gemm.multiply(isa, |tile| tile.add_to(&mut sums, gemm.columns));
    sums
}

/// A row's bits do not depend on the rows that are computed with it: threads may cut them anywhere.
#[test]
fn sums_do_not_depend_on_their_neighbours() {
    const WORDS: usize = 24;
    let isa = InstructionSet::AmxBf16;
    if !isa.is_runnable() {
        return;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let mut words = |count: usize| -> Vec<u32> {
        let mut half = || u32::from(bf16::from_f32(rng.random_range(-1.0..1.0)).to_bits());
        (0..count).map(|_| half() | half() << 16).collect()
    };
    for [lines, columns] in [[40, 16], [24, 33], [70, 20], [48, 64]] {
        let (left, right) = (words(lines * WORDS), words(columns.next_multiple_of(16) * WORDS));
        let of = |rows: Range<usize>, columns: usize, sums: &mut [f32]| {
            // Rows of words, up to a whole block.
            let mut part = left[rows.start * WORDS..rows.end * WORDS].to_vec();
            part.resize(rows.len().next_multiple_of(16) * WORDS, 0);
            let gemm = PackedGemm {
                left: &part,
                left_block: 16 * WORDS,
                left_row: WORDS,
                left_step: 1,
                left_starts: &[0],
                right: &right,
                right_block: 16 * WORDS,
                right_step: 16,
                right_starts: &[0],
                rows: rows.len(),
                columns,
                depth: WORDS,
                terms: 1,
                row_panels: false,
            };
            gemm.add_to(isa, sums, columns);
        };
        // Of no power of two.
        let earlier: Vec<f32> =
            (0..lines * columns).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        let mut whole = earlier.clone();
        of(0..lines, columns, &mut whole);
        assert_ne!(whole, earlier);
        for cut in [16, 32, lines - 8].into_iter().filter(|&cut| cut < lines) {
            let mut parts = earlier.clone();
            let (above, below) = parts.split_at_mut(cut * columns);
            of(0..cut, columns, above);
            of(cut..lines, columns, below);
            let bits = |sums: &[f32]| sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>();
            assert!(bits(&whole) == bits(&parts), "{lines} x {columns}, cut at {cut}");
        }
    }
}

/// The bits that a third term has under 2^-110 would be OR-ed into the element 16 before it.
#[test]
fn a_small_number_leaves_the_others_alone() {
    let isa = InstructionSet::AmxBf16x3;
    if !isa.is_runnable() {
        return;
    }
    let ones = [1f32; 16 * 32];
    let small = every_exponent().into_iter().filter(|x| x.abs() < 1e-30);
    for (n, x) in small.enumerate().step_by(unless_miri(1, 101)) {
        let mut left = ones;
        left[n % 16 * 32 + n % 32] = x;
        for (sums, turned) in
            [(multiply(&left, &ones, isa), false), (multiply(&ones, &left, isa), true)]
        {
            for (i, sum) in sums.iter().enumerate() {
                let line = if turned { i % 16 } else { i / 16 };
                let expected = if line == n % 16 { 31.0 } else { 32.0 };
                assert_eq!(*sum, expected, "{x:e} at {n}, sum {i}");
            }
        }
    }
}

/// An element keeps its value to within 2^-126, and what is not finite shows.
#[test]
fn terms_add_up_to_the_element() {
    let numbers = every_exponent();
    let (vectors, []) = numbers.as_chunks::<16>() else { unreachable!("whole vectors") };
    for set in sets() {
        for x in vectors.iter().step_by(unless_miri(1, 16)) {
            let mut terms = [[0f32; 16]; 3];
            // SAFETY: the features of the set; 16 lanes.
            with_vectors!(set, V => unsafe {
                let split: [V; 3] = split(V::load(x.as_ptr()));
                for (term, places) in split.into_iter().zip(&mut terms) {
                    term.store(places.as_mut_ptr());
                }
            });
            for (i, &x) in x.iter().enumerate() {
                let terms = terms.each_ref().map(|term| term[i]);
                assert!(terms.map(f32::to_bits) == x.terms(), "{set:?} {x:e} {terms:?}");
                assert!(terms.iter().all(|term| term.to_bits() & 0xffff == 0), "{x:e}");
                let sum: f64 = terms.iter().map(|term| f64::from(*term)).sum();
                let error = (sum - f64::from(x)).abs();
                match x.is_finite() && terms[0].is_finite() {
                    true => assert!(error < f64::from(f32::MIN_POSITIVE), "{x:e}"),
                    false => assert!(terms[..2].iter().any(|term| !term.is_finite()), "{x:e}"),
                }
            }
        }
    }
}

/// Each instruction set packs what one element at a time gives, both ways a matrix can lie in memory and both ways it
/// can be packed. Sizes are any, other elements lie beside, and the memory has any values.
fn packs_what_single_elements_give<T: Single>(numbers: &[T], other: T) {
    let sizes = [[16, 32], [1, 1], [5, 31], [16, 33], [17, 2], [33, 70], [70, 40]];
    let whole = (0..unless_miri(numbers.len() / 512, 1)).map(|part| (part * 512, sizes[0]));
    let edges =
        unless_miri(&sizes[1..], &sizes[1..5]).iter().map(|size| (numbers.len() / 3, *size));
    for (first, [lines, depth]) in whole.chain(edges) {
        let elements = &numbers[first..first + lines * depth];
        let expected = pack_singly(elements, depth);
        for (set, gap, turned) in sets()
            .flat_map(|set| [(set, 0, false), (set, 3, false), (set, 0, true), (set, 5, true)])
        {
            let [line_stride, depth_stride] =
                if turned { [1, lines + gap] } else { [depth + gap, 1] };
            let mut data = vec![other; (lines - 1) * line_stride + (depth - 1) * depth_stride + 1];
            for (i, x) in elements.iter().enumerate() {
                data[i / depth * line_stride + i % depth * depth_stride] = *x;
            }
            let view = MatrixView { data: &data, lines, depth, line_stride, depth_stride };
            let what = format!("{set:?}, {} terms, {lines} by {depth}, {gap}, {turned}", T::COUNT);
            let (rows, words) = (lines.next_multiple_of(16), view.words());
            assert_eq!(expected.len(), rows * words);
            let stride = words + gap;
            let mut out = vec![!0; rows * stride];
            // SAFETY: the features of the set.
            with_vectors!(set, V => unsafe { view.pack_tiles::<V>(true, stride, &mut out) });
            for (line, expected) in out.chunks(stride).zip(expected.chunks(words)) {
                let (line, beyond) = line.split_at(words);
                assert!(line == expected && beyond.iter().all(|word| *word == !0), "{what}");
            }
            let mut out = vec![!0; rows * words];
            // SAFETY: as above.
            with_vectors!(set, V => unsafe { view.pack_tiles::<V>(false, words, &mut out) });
            for (block, expected) in out.chunks(16 * words).zip(expected.chunks(16 * words)) {
                let same = |i: usize| block[i] == expected[i % 16 * words + i / 16];
                assert!((0..16 * words).all(same), "{what}");
            }
        }
    }
}

#[test]
fn vectors_pack_what_single_elements_give() {
    let numbers = every_exponent();
    packs_what_single_elements_give(&numbers, f32::NAN);
    let bits = || (0..=u16::MAX).step_by(unless_miri(3, 31));
    let half: Vec<_> = bits().map(f16::from_bits).collect();
    packs_what_single_elements_give(&half, f16::NAN);
    let brain: Vec<_> = bits().map(bf16::from_bits).collect();
    packs_what_single_elements_give(&brain, bf16::NAN);
}

/// Each line of `left` times lines of ones.
fn times_ones<T: Bf16Terms>(left: &[T], one: T, isa: InstructionSet) -> Vec<f32> {
    multiply(left, &[one; 16 * 32], isa)
}

/// A line for each NaN, at another place each time, among ones.
fn nans<T: Copy>(patterns: impl Iterator<Item = T>, one: T) -> Vec<T> {
    let line = |(n, nan): (usize, T)| (0..32).map(move |k| if k == n % 32 { nan } else { one });
    patterns.enumerate().flat_map(line).collect()
}

#[test]
fn every_nan_makes_its_sums_nan() {
    if !InstructionSet::AmxBf16x3.is_runnable() {
        return;
    }
    let half = (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_nan());
    let brain = (0..=u16::MAX).map(bf16::from_bits).filter(|x| x.is_nan());
    let single = every_exponent().into_iter().filter(|x| x.is_nan());
    let (half, brain) = (nans(half, f16::ONE), nans(brain, bf16::ONE));
    let single = nans(single, 1f32);
    assert_eq!((half.len(), brain.len()), (2046 * 32, 254 * 32));
    let isas = [InstructionSet::Avx512Bf16, InstructionSet::AmxBf16]
        .into_iter()
        .filter(|isa| isa.is_runnable());
    let mut all = vec![
        (InstructionSet::AmxBf16x3, times_ones(&half, f16::ONE, InstructionSet::AmxBf16x3)),
        (InstructionSet::AmxBf16x3, times_ones(&single, 1.0, InstructionSet::AmxBf16x3)),
    ];
    all.extend(isas.map(|isa| (isa, times_ones(&brain, bf16::ONE, isa))));
    for (isa, sums) in all {
        let finite = sums.iter().position(|sum| !sum.is_nan());
        assert_eq!(finite, None, "{isa:?}");
    }
}
