//! Products large enough that threads share them: of small whole numbers, so that sums are exact in any
//! order.

use candle_core::{DType, Device, Error, Result, Tensor, WithDType};
use half::{bf16, f16};
use rand::Rng;

use super::{Sharing, gemm};
use crate::kernels::gemm::micro::{InstructionSet, MatrixView, with_words};
use crate::kernels::gemm::tests::generator;

/// `(rows, columns)` of whole numbers, which begin on a cache line or off it; some of them `rare`.
fn whole<T: WithDType>(
    rng: &mut impl Rng,
    [rows, columns]: [usize; 2],
    on_line: bool,
    rare: Option<(i32, f64)>,
) -> Result<Tensor> {
    let mut data = vec![T::zero(); rows * columns + 64];
    let start = data.as_ptr().align_offset(64) + if on_line { 0 } else { 8 };
    data.fill_with(|| {
        let rare = rare.filter(|(_, often)| rng.random_bool(*often)).map(|(rare, _)| rare);
        let sign = [-1, 1][rng.random_range(0..2)];
        T::from_f64(rare.map_or_else(|| rng.random_range(-3..=3), |rare| sign * rare).into())
    });
    let len = data.len();
    let data = Tensor::from_vec(data, len, &Device::Cpu)?;
    data.narrow(0, start, rows * columns)?.reshape((rows, columns))
}

/// What is read where it lies is what packing would have written, and what reaches into a neighbour is
/// packed.
#[test]
fn sides_are_read_where_they_lie_if_they_are_whole() {
    let data: Vec<_> = (0..32 * 96 + 64).map(|i| bf16::from_bits(i as u16)).collect();
    let start = data.as_ptr().align_offset(64);
    let view = |from: usize, lines: usize, depth: usize, line_stride: usize| MatrixView {
        data: &data[start + from..],
        lines,
        depth,
        line_stride,
        depth_stride: 1,
    };
    let whole = view(0, 32, 70, 96);
    let (words, stride) = whole.as_packed().expect("whole");
    assert_eq!(stride, 48);
    if InstructionSet::AmxBf16.is_runnable() {
        with_words([32 * 48], |[packed]| {
            whole.pack_lines(48, packed);
            for line in (0..32).map(|line| line * 48) {
                assert_eq!(words[line..line + 35], packed[line..line + 35]);
            }
        });
    }
    for [from, lines, depth, stride] in
        [[0, 32, 71, 96], [0, 31, 70, 96], [0, 16, 70, 80], [1, 16, 70, 96], [8, 16, 70, 96]]
    {
        let view = view(from, lines, depth, stride);
        assert!(view.as_packed().is_none(), "{from} {lines} {depth} {stride}");
    }
    let across = MatrixView { line_stride: 1, depth_stride: 96, ..whole };
    assert!(across.as_packed().is_none());
}

#[test]
fn threads_share_products_exactly() -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().map_err(Error::wrap)?;
    pool.install(products)
}

fn products() -> Result<()> {
    let mut rng = generator(67);
    // Of 10 and 17 bits, so that two and three terms are not zero, and rare enough for exact sums.
    let [two, three] = [(513, 1.0 / 32.0), (65537, 1.0 / 512.0)].map(Some);
    let isas = [
        (InstructionSet::Avx512Bf16, DType::BF16),
        (InstructionSet::AmxBf16, DType::BF16),
        (InstructionSet::AmxBf16x3, DType::F32),
        (InstructionSet::AmxBf16x3, DType::F16),
    ];
    for (which, (isa, dtype)) in isas.into_iter().enumerate() {
        if !isa.is_runnable() {
            continue;
        }
        // Whole blocks and not; sums of whole registers, of an odd number, and in two parts.
        let sizes = [
            [288, 1024, 300],
            [304, 1001, 272],
            [290, 1000, 310],
            [160, 8200, 70],
            [42, 8192, 200],
        ];
        for (size, [m, k, n]) in sizes.into_iter().enumerate() {
            let sharing = match dtype {
                DType::BF16 => Sharing::of([m, k, n], 1, isa),
                DType::F16 => Sharing::of([m, k, n], 2, isa),
                _ => Sharing::of([m, k, n], 3, isa),
            };
            let expected = if m >= n { Sharing::Rows } else { Sharing::Columns };
            assert_eq!(sharing, expected, "{isa:?} {dtype:?} {m} {k} {n}");
            // The stand-in for tile registers is slow: one case of each size.
            let one = (3 * which + size) % 8;
            for case in if isa.is_available() { 0..8 } else { one..one + 1 } {
                let [on_line, left_turned, right_turned] =
                    [case & 1, case & 2, case & 4].map(|bit| bit == 0);
                let mut view = |rows, columns, transposed: bool, rare| {
                    let dims = if transposed { [columns, rows] } else { [rows, columns] };
                    let view = match dtype {
                        DType::BF16 => whole::<bf16>(&mut rng, dims, on_line, None)?,
                        DType::F16 => whole::<f16>(&mut rng, dims, on_line, two)?,
                        _ => whole::<f32>(&mut rng, dims, on_line, rare)?,
                    };
                    if transposed { view.t() } else { Ok(view) }
                };
                let rare = [[two, two], [three, None], [None, three]][(case + m) % 3];
                let lhs = view(m, k, left_turned, rare[0])?;
                let rhs = view(k, n, right_turned, rare[1])?;
                let product = gemm::<f32>(&lhs, &rhs, None, isa)?.expect("finite");
                let [lhs, rhs] = [lhs.to_dtype(DType::F32)?, rhs.to_dtype(DType::F32)?];
                let reference = lhs.matmul(&rhs)?.flatten_all()?.to_vec1::<f32>()?;
                let what = format!("{isa:?} {dtype:?} {m} {k} {n}, case {case}");
                assert!(product.flatten_all()?.to_vec1::<f32>()? == reference, "{what}");
            }
        }
    }
    Ok(())
}
