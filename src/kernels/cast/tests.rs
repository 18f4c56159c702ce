use candle_core::Tensor;

use super::*;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::gpus;

/// Of one, odd, around a pack, past a block.
const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 7], [31, 33], [4, 16], [2, 1025], [9, 1023]];

#[test]
fn gpus_cast_every_pair_of_dtypes_exactly() {
    for from in DTYPES {
        for to in DTYPES {
            for shape in SHAPES {
                let (x, view) = (random(&shape, from, 1), strided(&shape, from, 2));
                let transposed = x.t().unwrap();
                let repeated = view.unsqueeze(1).unwrap();
                let repeated = repeated.broadcast_as((shape[0], 3, shape[1])).unwrap();
                assert_gpus_agree(&[&x, &view, &transposed, &repeated], 0.0, |all| {
                    all.iter().map(|x| cast(x, to)).collect()
                });
                assert_gpus_agree(&[&x], 0.0, |x| {
                    let dst = Tensor::zeros(&shape, to, x[0].device())?;
                    cast_into(&dst, &x[0])?;
                    Ok(vec![dst])
                });
            }
        }
    }
}

#[test]
fn gpus_round_edges_as_the_cpu_does() {
    let inf = f64::INFINITY;
    let edges =
        vec![65504.0, 65519.0, 65520.0, -1e30, 3e-8, 2.9e-8, 6e-5, -0.0, inf, -inf, f64::NAN];
    for from in [DType::F32, DType::F64] {
        for to in DTYPES {
            assert_gpus_agree(&[&of(edges.clone(), &[11], from)], 0.0, |x| {
                Ok(vec![cast(&x[0], to)?])
            });
        }
    }
}

/// Pairs of every two dtypes and many lengths, more of them than a launch takes, one of them at an
/// address that is no multiple of 16.
#[test]
fn gpus_cast_many_as_each_alone() -> Result<()> {
    for device in gpus() {
        let mut pairs = Vec::new();
        for number in 0..900usize {
            let (from, to) = (DTYPES[number % 4], DTYPES[number / 4 % 4]);
            let len = [1, 33, 1025, (1 << 14) + 3][if number < 16 { 3 } else { number % 3 }];
            let src = random(&[len], from, number as u64).to_device(&device)?;
            pairs.push((Tensor::zeros(len, to, &device)?, src));
        }
        let whole = random(&[1030], DType::F32, 5).to_device(&device)?;
        pairs.push((Tensor::zeros(1029, DType::BF16, &device)?, whole.narrow(0, 1, 1029)?));
        cast_all(&pairs.iter().map(|(dst, src)| (dst, src)).collect::<Vec<_>>())?;
        for (dst, src) in &pairs {
            assert_eq!(values(dst), values(&cast(src, dst.dtype())?), "{src:?}");
        }
    }
    Ok(())
}
