//! Packed products on every processor: where there is no AMX, in the stand-in for its registers.

use half::{bf16, f16};
use rand::Rng;

use super::{Bf16Terms, InstructionSet, MatrixView, PackedGemm};
use crate::kernels::gemm::tests::generator;

/// An element in the three terms that [`crate::kernels::gemm::micro::bf16x3`] gives, one at a time.
fn split_one(x: f32) -> [u32; 3] {
    let nearest = |x: f32| {
        let up = if x.is_nan() { 0 } else { 0x8000 };
        x.to_bits().wrapping_add(up) & !0xffff
    };
    let first = nearest(x);
    let rest = x - f32::from_bits(first);
    let second = nearest(rest);
    [first, second, (rest - f32::from_bits(second)).to_bits() & !0xffff]
}

/// The words of lines of 32 elements each, in three terms: `(line, term, word)`.
fn pack_portably(lines: &[[f32; 32]]) -> Vec<u32> {
    let pack = |line: &[f32; 32]| {
        let split = line.map(split_one);
        let word = move |i: usize| split[i % 16][i / 16] >> 16 | split[i % 16 + 16][i / 16];
        (0..48).map(word)
    };
    lines.iter().flat_map(pack).collect()
}

/// What `left` and `right`, both `(line, 48)`, give: `(line of left, line of right)`.
fn multiply_portably(left: &[[f32; 32]], right: &[[f32; 32]]) -> Vec<f32> {
    let words = pack_portably(right);
    let blocks = words.chunks(16 * 48);
    let turned = blocks.flat_map(|block| (0..48 * 16).map(|i| block[i % 16 * 48 + i / 16]));
    let right_cells: Vec<u32> = turned.collect();
    let gemm = PackedGemm {
        left: &pack_portably(left),
        left_block: 16 * 48,
        left_row: 48,
        left_step: 1,
        left_starts: &[0],
        right: &right_cells,
        right_block: 16 * 48,
        right_step: 16,
        right_starts: &[0],
        rows: left.len(),
        columns: right.len(),
        depth: 48,
        terms: 3,
        row_panels: false,
    };
    sums(&gemm, InstructionSet::AmxBf16x3)
}

fn sums(gemm: &PackedGemm<'_>, isa: InstructionSet) -> Vec<f32> {
    let mut sums = vec![0f32; gemm.rows * gemm.columns];
    gemm.multiply(isa, |tile| tile.add_to(&mut sums, gemm.columns));
    sums
}

/// Numbers of every exponent, with first, last and random bits below it, of both signs; and NaNs.
fn every_exponent() -> Vec<f32> {
    let mut rng = generator(71);
    let mut numbers = Vec::new();
    for exponent in 0..=u8::MAX {
        for _ in 0..8 {
            let random = rng.random_range(0..1u32 << 23);
            for fraction in [0, 1, 0x7fff, 0x8000, 0x7f_ffff, random] {
                let bits = u32::from(exponent) << 23 | fraction;
                numbers.extend([bits, bits | 1 << 31].map(f32::from_bits));
            }
        }
    }
    numbers
}

/// The bits that a third term has under 2^-110 would be OR-ed into the element 16 before it.
#[test]
fn a_small_number_leaves_the_others_alone() {
    let ones = [[1f32; 32]; 16];
    let small = every_exponent().into_iter().filter(|x| x.abs() < 1e-30);
    for (n, x) in small.enumerate() {
        let mut left = ones;
        left[n % 16][n % 32] = x;
        for (sums, turned) in
            [(multiply_portably(&left, &ones), false), (multiply_portably(&ones, &left), true)]
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
    for x in every_exponent() {
        let terms = split_one(x).map(f32::from_bits);
        assert!(terms.iter().all(|term| term.to_bits() & 0xffff == 0), "{x:e}");
        let sum: f64 = terms.iter().map(|term| f64::from(*term)).sum();
        match x.is_finite() && terms[0].is_finite() {
            true => assert!((sum - f64::from(x)).abs() < f64::from(f32::MIN_POSITIVE), "{x:e}"),
            false => assert!(terms[..2].iter().any(|term| !term.is_finite()), "{x:e}"),
        }
    }
}

/// What the vector instructions pack is what one element at a time gives, both ways it can lie in memory.
#[test]
fn vectors_pack_what_single_elements_give() {
    if !InstructionSet::Avx512F32.is_available() {
        return;
    }
    let numbers = every_exponent();
    let (lines, _) = numbers.as_chunks::<32>();
    for lines in lines.chunks(16) {
        let data = lines.as_flattened();
        let expected = pack_portably(lines);
        let view =
            MatrixView { data, lines: lines.len(), depth: 32, line_stride: 32, depth_stride: 1 };
        let mut packed = vec![0; 16 * 48];
        view.pack_lines(48, &mut packed);
        assert!(packed.starts_with(&expected));

        let turned: Vec<f32> =
            (0..data.len()).map(|i| lines[i % lines.len()][i / lines.len()]).collect();
        let view = MatrixView { data: &turned, line_stride: 1, depth_stride: lines.len(), ..view };
        view.pack_lines(48, &mut packed);
        assert!(packed.starts_with(&expected));
        let mut blocks = vec![0; 16 * 48];
        view.pack_blocks(&mut blocks);
        let in_blocks = (0..16 * 48).all(|i| packed[i % 16 * 48 + i / 16] == blocks[i]);
        assert!(in_blocks);
    }
}

/// Each line of `left` times lines of ones.
fn times_ones<T: Bf16Terms>(left: &[T], one: T, isa: InstructionSet) -> Vec<f32> {
    let lines = left.len() / 32;
    let view =
        |data, lines| MatrixView { data, lines, depth: 32, line_stride: 32, depth_stride: 1 };
    let ones = vec![one; 16 * 32];
    let (left, right) = (view(left, lines), view(&ones, 16));
    // Elements of 16 words are packed; without AMX, pairs are multiplied by rows of 8.
    let words = left.words();
    let mut packed = [vec![0; lines.next_multiple_of(16) * words], vec![0; 16 * words]];
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
        rows: lines,
        columns: 16,
        depth: words,
        terms: T::COUNT,
        row_panels: false,
    };
    sums(&gemm, isa)
}

/// A line for each NaN, at another place each time, among ones.
fn nans<T: Copy>(patterns: impl Iterator<Item = T>, one: T) -> Vec<T> {
    let line = |(n, nan): (usize, T)| (0..32).map(move |k| if k == n % 32 { nan } else { one });
    patterns.enumerate().flat_map(line).collect()
}

#[test]
fn every_nan_makes_its_sums_nan() {
    if !InstructionSet::Avx512F32.is_available() {
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
