//! Products large enough that threads share them: of small whole numbers, so that sums are exact in any
//! order.

use candle_core::{DType, Device, Error, Result, Tensor};
use half::bf16;
use rand::Rng;

use super::{Sharing, gemm};
use crate::kernels::gemm::tests::generator;
use crate::kernels::panel::{Side, Unit, with_cells};

/// `(rows, columns)` of whole numbers, which begin on a cache line or off it.
fn whole(rng: &mut impl Rng, rows: usize, columns: usize, on_line: bool) -> Result<Tensor> {
    let mut data = vec![bf16::ZERO; rows * columns + 64];
    let start = data.as_ptr().align_offset(64) + if on_line { 0 } else { 8 };
    data.fill_with(|| bf16::from_f32(rng.random_range(-3_i8..=3).into()));
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
    let side = |from: usize, lines: usize, depth: usize, line_stride: usize| Side {
        data: &data[start + from..],
        lines,
        depth,
        line_stride,
        depth_stride: 1,
    };
    let whole = side(0, 32, 70, 96);
    let (cells, stride) = whole.in_place().expect("whole");
    assert_eq!(stride, 48);
    with_cells([32 * 48], |[packed]| {
        whole.pack_lines(48, packed);
        for line in (0..32).map(|line| line * 48) {
            assert_eq!(cells[line..line + 35], packed[line..line + 35]);
        }
    });
    for [from, lines, depth, stride] in
        [[0, 32, 71, 96], [0, 31, 70, 96], [0, 16, 70, 80], [1, 16, 70, 96], [8, 16, 70, 96]]
    {
        let side = side(from, lines, depth, stride);
        assert!(side.in_place().is_none(), "{from} {lines} {depth} {stride}");
    }
    let across = Side { line_stride: 1, depth_stride: 96, ..whole };
    assert!(across.in_place().is_none());
}

#[test]
fn threads_share_products_exactly() -> Result<()> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().map_err(Error::wrap)?;
    pool.install(products)
}

fn products() -> Result<()> {
    let mut rng = generator(67);
    for unit in [Unit::Dot, Unit::Tiles].into_iter().filter(|unit| unit.is_available()) {
        // Whole blocks and not; sums of whole registers, of an odd number, and in two parts.
        for [m, k, n] in
            [[288, 1024, 300], [304, 1001, 272], [290, 1000, 310], [160, 8200, 70], [70, 8192, 160]]
        {
            let sharing = Sharing::of([m, k, n], unit);
            let expected = if m >= n { Sharing::Rows } else { Sharing::Columns };
            assert_eq!(sharing, expected, "{unit:?} {m} {k} {n}");
            for case in 0..8 {
                let [on_line, left_turned, right_turned] =
                    [case & 1, case & 2, case & 4].map(|bit| bit == 0);
                let side = |rng: &mut _, rows, columns, turned| match turned {
                    true => whole(rng, columns, rows, on_line)?.t(),
                    false => whole(rng, rows, columns, on_line),
                };
                let lhs = side(&mut rng, m, k, left_turned)?;
                let rhs = side(&mut rng, k, n, right_turned)?;
                let product = gemm::<f32>(&lhs, &rhs, None, unit)?;
                let [lhs, rhs] = [lhs.to_dtype(DType::F32)?, rhs.to_dtype(DType::F32)?];
                let reference = lhs.matmul(&rhs)?.flatten_all()?.to_vec1::<f32>()?;
                let what = format!("{unit:?} {m} {k} {n}, case {case}");
                assert!(product.flatten_all()?.to_vec1::<f32>()? == reference, "{what}");
            }
        }
    }
    Ok(())
}
