use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Matrix, Threads, cpu, gemm, portable, product};
use crate::kernels::cpu::testing::unless_miri;
use crate::kernels::elementwise::testing::on_device;

const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

pub(in crate::kernels) fn generator(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Uniform in -1..1, rounded to `dtype`.
pub(in crate::kernels) fn random(rng: &mut ChaCha8Rng, dims: &[usize], dtype: DType) -> Tensor {
    let data: Vec<f64> = (0..dims.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect();
    Tensor::from_vec(data, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// As [`random`], but one of eight is small: of any exponent under 2^-99, subnormal or zero.
pub(in crate::kernels) fn mixed(rng: &mut ChaCha8Rng, dims: &[usize], dtype: DType) -> Tensor {
    let mut number = |_| match rng.random_ratio(1, 8) {
        true => f32::from_bits(rng.random_range(0..28 << 23) | rng.random_range(0..2) << 31),
        false => rng.random_range(-1.0..1.0),
    };
    let data: Vec<f32> = (0..dims.iter().product()).map(&mut number).collect();
    Tensor::from_vec(data, dims, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Numbers of every exponent, with first, last and random bits below it, of both signs; and NaNs.
pub(in crate::kernels) fn every_exponent() -> Vec<f32> {
    let mut rng = generator(71);
    let mut numbers = Vec::new();
    for exponent in 0..=u8::MAX {
        for _ in 0..unless_miri(8, 1) {
            let random = rng.random_range(0..1u32 << 23);
            for fraction in [0, 1, 0x7fff, 0x8000, 0x7f_ffff, random] {
                let bits = u32::from(exponent) << 23 | fraction;
                numbers.extend([bits, bits | 1 << 31].map(f32::from_bits));
            }
        }
    }
    numbers
}

pub(in crate::kernels) fn doubles(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// A sum in F64, with what bounds its error in another format.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::kernels) struct Sum {
    pub(in crate::kernels) value: f64,
    magnitude: f64,
    terms: f64,
}

impl Sum {
    #[inline]
    pub(in crate::kernels) fn add(&mut self, term: f64) {
        self.value += term;
        self.magnitude += term.abs();
        self.terms += 1.;
    }

    /// The same sum, as exact as one of `terms` terms and this magnitude at least.
    pub(in crate::kernels) fn with_error_of(&self, magnitude: f64, terms: f64) -> Self {
        let magnitude = self.magnitude.max(magnitude + self.value.abs());
        Self { magnitude, terms: self.terms.max(terms), ..*self }
    }

    /// The same sum, as exact as one of `terms` terms and this magnitude, whatever its own.
    pub(in crate::kernels) fn as_exact_as(&self, magnitude: f64, terms: f64) -> Self {
        Self { magnitude: magnitude + self.value.abs(), terms, ..*self }
    }

    /// The largest error of the sum, in any order, in the arithmetic of a format with epsilon
    /// `epsilon`, and of its rounding to `out`.
    fn tolerance(&self, epsilon: f64, out: DType) -> f64 {
        let (relative, least) = match out {
            DType::F16 => (f16::EPSILON.to_f64(), f16::MIN_POSITIVE_SUBNORMAL.to_f64()),
            DType::BF16 => (bf16::EPSILON.to_f64(), 0.),
            DType::F32 => (f32::EPSILON.into(), 0.),
            _ => (f64::EPSILON, 0.),
        };
        self.terms * epsilon * self.magnitude + relative * self.value.abs() + least
    }
}

/// Checks a result, computed in F64 when one of `inputs` is, against the exact sums.
pub(in crate::kernels) fn check(actual: &Tensor, expected: &[Sum], inputs: &[DType], what: &str) {
    let wide = inputs.contains(&DType::F64);
    let epsilon = if wide { f64::EPSILON } else { f32::EPSILON.into() };
    assert!(actual.is_contiguous() && !actual.track_op(), "{what}");
    let values = doubles(actual);
    assert_eq!(values.len(), expected.len(), "{what}");
    for (index, (actual_value, sum)) in values.iter().zip(expected).enumerate() {
        let tolerance = sum.tolerance(epsilon, actual.dtype());
        let error = (actual_value - sum.value).abs();
        assert!(error <= tolerance, "{what} [{index}]: {actual_value}, not {sum:?} ({tolerance})");
    }
}

/// The product, one element after the other.
fn naive(lhs: &Tensor, rhs: &Tensor, bias: Option<&Tensor>) -> Vec<Sum> {
    let (m, k) = (lhs.dims()[lhs.rank() - 2], lhs.dims()[lhs.rank() - 1]);
    let n = rhs.dims()[rhs.rank() - 1];
    let batch: usize = lhs.dims()[..lhs.rank() - 2].iter().product();
    let (lhs, rhs, bias) = (doubles(lhs), doubles(rhs), bias.map(doubles));
    let mut sums = Vec::new();
    for b in 0..batch {
        for i in 0..m {
            for j in 0..n {
                let mut sum = Sum::default();
                for p in 0..k {
                    sum.add(lhs[(b * m + i) * k + p] * rhs[(b * k + p) * n + j]);
                }
                bias.iter().for_each(|bias| sum.add(bias[j]));
                sums.push(sum);
            }
        }
    }
    sums
}

fn compare(lhs: &Tensor, rhs: &Tensor, bias: Option<&Tensor>, out: DType) {
    let expected = naive(lhs, rhs, bias);
    let mut inputs = vec![lhs.dtype(), rhs.dtype()];
    inputs.extend(bias.map(Tensor::dtype));
    let what = format!("{:?} {:?} x {:?}, {inputs:?} to {out:?}", lhs.dims(), lhs.stride(), rhs);
    let actual = gemm(lhs, rhs, bias, out).unwrap();
    let reference = portable::gemm(lhs, rhs, bias, out).unwrap();
    assert_eq!((actual.dims(), actual.dtype()), (reference.dims(), out), "{what}");
    check(&actual, &expected, &inputs, &what);
    check(&reference, &expected, &inputs, &format!("portable {what}"));
}

/// Products that are cut up, on both sides, and parts of other sizes than the rest.
#[test]
fn threads_share_small_products() -> Result<()> {
    let mut rng = generator(41);
    for (m, k, n) in [
        (65, 513, 129),
        (70, 150, 101),
        (259, 33, 127),
        (40, 130, 300),
        (512, 64, 40),
        (16, 600, 111),
    ] {
        let lhs = random(&mut rng, &[k, m], DType::F32).t()?;
        let rhs = random(&mut rng, &[k, n], DType::F32);
        let bias = random(&mut rng, &[n], DType::F32);
        for bias in [None, Some(&bias)] {
            let results = [1, 2, 3, 7].map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let product = gemm(&lhs, &rhs, bias, DType::F32).unwrap();
                    [product, cpu::gemm::<f32>(&lhs, &rhs, bias).unwrap()].map(|y| doubles(&y))
                })
            });
            assert!(results.iter().all(|result| *result == results[0]), "{m} {k} {n}");
            compare(&lhs, &rhs, bias, DType::F32);
            let cut = cpu::gemm::<f32>(&lhs, &rhs, bias)?;
            check(&cut, &naive(&lhs, &rhs, bias), &[DType::F32], "cut up");
        }
    }
    Ok(())
}

/// One thread, several, and parts of a product have the same bits, with and without something to add to. The sizes are
/// at the edges of what the `gemm` crate adds up in its own ways.
#[test]
fn bits_do_not_depend_on_who_multiplies() -> Result<()> {
    let mut rng = generator(43);
    let pools = [1, 2, 3, 5]
        .map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let sides = [1, 2, 3, 4, 17, 40, 64, 65, 130, 257];
    for case in 0..80 {
        let lines = rng.random_range(120..1200);
        let other = sides[case % sides.len()];
        let least = (1 << 20) / (lines * other) + 1;
        let more = if other > 65 { 60 } else { 700 };
        let k = if case % 4 == 0 { least } else { rng.random_range(least..least + more) };
        let (m, n) = if case % 2 == 0 { (lines, other) } else { (other, lines) };
        let matrices = |rng: &mut _, rows: usize, columns: usize, transposed: bool| match transposed
        {
            true => random(rng, &[columns, rows], DType::F32).t(),
            false => Ok(random(rng, &[rows, columns], DType::F32)),
        };
        let (lhs, rhs) =
            (matrices(&mut rng, m, k, case % 3 == 0)?, matrices(&mut rng, k, n, case % 5 == 0)?);
        let [left, right] =
            [&lhs, &rhs].map(|x| x.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        let of = |threads: Threads| {
            let (left, right) = (Matrix::new(&left, m, k), Matrix::new(&right, k, n));
            let mut sums = vec![0.5f32; m * n];
            product(left, right, &mut sums, n, case % 7 < 3, threads);
            sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let expected = of(Threads::One);
        for pool in &pools {
            let same = pool.install(|| of(Threads::All)) == expected;
            assert!(same, "{m} x {k} x {n}, {} threads", pool.current_num_threads());
        }
        // Whole operands, by their strides.
        let whole = |bias: Option<&Tensor>| doubles(&cpu::gemm::<f32>(&lhs, &rhs, bias).unwrap());
        let bias = random(&mut rng, &[n], DType::F32);
        for bias in [None, Some(&bias)] {
            let expected = pools[0].install(|| whole(bias));
            for pool in &pools[1..] {
                assert!(pool.install(|| whole(bias)) == expected, "{m} x {k} x {n} {bias:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_product_beyond_memory_is_an_error() -> Result<()> {
    let one = Tensor::zeros((1, 1), DType::F32, &Device::Cpu)?;
    let tall = one.broadcast_as((1usize << 40, 1))?;
    let error = gemm(&tall, &tall.t()?, None, DType::F32).unwrap_err().to_string();
    assert!(error.contains("more elements than memory has addresses"), "{error}");
    Ok(())
}

#[test]
fn every_combination_of_dtypes() {
    let mut rng = generator(1);
    for left in DTYPES {
        for right in DTYPES {
            for out in DTYPES {
                let lhs = random(&mut rng, &[7, 33], left);
                let rhs = random(&mut rng, &[33, 17], right);
                let bias = random(&mut rng, &[17], out);
                compare(&lhs, &rhs, None, out);
                compare(&lhs, &rhs, Some(&bias), out);
            }
        }
    }
}

#[test]
fn odd_and_empty_sizes() {
    let mut rng = generator(2);
    let sizes = [0, 1, 3, 17, 33, 130];
    let triples = sizes.map(|m| sizes.map(|k| sizes.map(|n| (m, k, n))));
    for &(m, k, n) in triples.as_flattened().as_flattened() {
        let lhs = random(&mut rng, &[m, k], DType::F32);
        let rhs = random(&mut rng, &[k, n], DType::BF16);
        let bias = random(&mut rng, &[n], DType::F16);
        compare(&lhs, &rhs, Some(&bias), DType::F32);
        compare(&lhs, &rhs, None, DType::BF16);
    }
}

/// Those that are computed in blocks where vectors are wide, with a bias.
#[test]
fn transposed_operands_of_large_products() -> Result<()> {
    let mut rng = generator(9);
    for [m, k, n] in unless_miri(&[[130, 64, 130], [20, 300, 150]][..], &[]) {
        for dtype in [DType::F32, DType::F16] {
            let [left, right] = [[*m, *k], [*k, *n]].map(|dims| random(&mut rng, &dims, dtype));
            let bias = random(&mut rng, &[*n], DType::F32);
            let turn = |x: &Tensor| x.t()?.contiguous()?.t();
            compare(&turn(&left)?, &right, Some(&bias), dtype);
            compare(&left, &turn(&right)?, Some(&bias), dtype);
            compare(&turn(&left)?, &turn(&right)?, None, DType::F32);
        }
    }
    Ok(())
}

#[test]
fn strided_operands() -> Result<()> {
    let mut rng = generator(3);
    for dtype in DTYPES {
        let lhs = random(&mut rng, &[17, 3, 2, 7], dtype);
        let rhs = random(&mut rng, &[3, 2, 5, 17], dtype);
        // (3, 2, 7, 17) by (3, 2, 17, 5).
        compare(&lhs.permute((1, 2, 3, 0))?, &rhs.t()?, None, DType::F32);
        // A window on more rows and columns.
        let window = random(&mut rng, &[20, 40], dtype).narrow(0, 2, 9)?.narrow(1, 3, 17)?;
        compare(&window, &random(&mut rng, &[17, 4], dtype), None, dtype);
        compare(&window.t()?, &random(&mut rng, &[9, 4], dtype), None, dtype);
        // One matrix, or one row, for all.
        let shared = random(&mut rng, &[5, 7], dtype).t()?.broadcast_as((3, 7, 5))?;
        compare(&random(&mut rng, &[3, 4, 7], dtype), &shared, None, dtype);
        let row = random(&mut rng, &[1, 7], dtype).broadcast_as((4, 7))?;
        compare(&row, &random(&mut rng, &[7, 3], dtype), None, dtype);
        // Every second element of a bias.
        let bias = random(&mut rng, &[3, 2], dtype).narrow(1, 1, 1)?.squeeze(1)?;
        compare(&row, &random(&mut rng, &[7, 3], dtype), Some(&bias), dtype);
    }
    Ok(())
}

#[test]
fn long_sums_of_halves_do_not_saturate() -> Result<()> {
    let ones = Tensor::ones((3, 4096), DType::F16, &Device::Cpu)?;
    let sums = gemm(&ones, &ones.t()?, None, DType::F16)?;
    assert_eq!(doubles(&sums), [4096.; 9]);
    Ok(())
}

#[test]
fn nan_and_infinity_reach_their_row_or_column_alone() {
    for poison in [f64::NAN, f64::INFINITY] {
        for dtype in DTYPES {
            for (m, k, n) in [(1, 9, 1), (1, 33, 17), (17, 33, 1), (5, 1, 7), (50, 33, 40)] {
                let mut rng = generator(4);
                // Far from zero, so that a product with an infinity is one.
                let mut positive = |len| (0..len).map(|_| rng.random_range(0.5..1.0)).collect();
                let (mut lhs, rhs): (Vec<f64>, Vec<f64>) = (positive(m * k), positive(k * n));
                let row = m / 2;
                lhs[row * k + k / 2] = poison;
                let lhs = Tensor::from_vec(lhs, (m, k), &Device::Cpu).unwrap();
                let rhs = Tensor::from_vec(rhs, (k, n), &Device::Cpu).unwrap();
                let (lhs, rhs) = (lhs.to_dtype(dtype).unwrap(), rhs.to_dtype(dtype).unwrap());
                let by_row = doubles(&gemm(&lhs, &rhs, None, dtype).unwrap());
                let (rhs, lhs) = (lhs.t().unwrap(), rhs.t().unwrap());
                let by_col = doubles(&gemm(&lhs, &rhs, None, dtype).unwrap());
                for i in 0..m {
                    for j in 0..n {
                        for value in [by_row[i * n + j], by_col[j * m + i]] {
                            let same = value == poison || value.is_nan() && poison.is_nan();
                            assert!(if i == row { same } else { value.is_finite() });
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn zero_times_infinity_is_nan() -> Result<()> {
    let infinity = Tensor::full(f32::INFINITY, (1, 3), &Device::Cpu)?;
    let zero = Tensor::zeros((3, 2), DType::F16, &Device::Cpu)?;
    assert!(doubles(&gemm(&infinity, &zero, None, DType::F32)?).iter().all(|v| v.is_nan()));
    Ok(())
}

#[test]
fn old_scratch_is_not_read() -> Result<()> {
    let poisoned = Tensor::full(f32::NAN, (40, 40), &Device::Cpu)?.to_dtype(DType::BF16)?;
    gemm(&poisoned, &poisoned, None, DType::BF16)?;
    let mut rng = generator(5);
    let (lhs, rhs) = (random(&mut rng, &[9, 9], DType::F16), random(&mut rng, &[9, 9], DType::F16));
    compare(&lhs, &rhs, None, DType::F16);
    compare(&lhs.narrow(1, 0, 0)?, &rhs.narrow(0, 0, 0)?, None, DType::F16);
    Ok(())
}

#[test]
#[should_panic(expected = "reaches beyond its data")]
fn a_view_beyond_its_data_panics() {
    use super::{Matrix, Threads, product};
    let data = [1f32; 6];
    let wide = Matrix { row_stride: 4, ..Matrix::new(&data, 2, 3) };
    product(wide, Matrix::new(&data, 3, 2), &mut [0.; 4], 2, false, Threads::One);
}

/// Every instruction set that multiplies pairs, over sizes around the edges of blocks, both ways each operand can
/// lie in memory, and sums longer than a part.
#[test]
fn every_instruction_set_agrees_with_plain_loops() -> Result<()> {
    use super::packed;
    use crate::kernels::cpu::dtype::with_single;
    use crate::kernels::gemm::micro::InstructionSet;

    let mut rng = generator(31);
    let isas = [
        (InstructionSet::Avx512Bf16, DType::BF16),
        (InstructionSet::AmxBf16, DType::BF16),
        (InstructionSet::AmxBf16x3, DType::F32),
        (InstructionSet::AmxBf16x3, DType::F16),
    ];
    for (isa, stored) in isas.into_iter().filter(|(isa, _)| isa.is_runnable()) {
        let sizes = [
            [1, 1, 1],
            [4, 31, 5],
            [15, 32, 17],
            [16, 33, 16],
            [65, 64, 63],
            [300, 17, 70],
            [33, 1024, 33],
            [5, 8195, 6],
        ];
        for &[m, k, n] in unless_miri(&sizes[..], &sizes[1..2]) {
            let bias = random(&mut rng, &[n], DType::F32);
            for transposed in 0..4 {
                let (mut lhs, mut rhs) =
                    (mixed(&mut rng, &[m, k], stored), mixed(&mut rng, &[k, n], stored));
                if transposed & 1 > 0 {
                    lhs = lhs.t()?.contiguous()?.t()?;
                }
                if transposed & 2 > 0 {
                    rhs = rhs.t()?.contiguous()?.t()?;
                }
                let expected = naive(&lhs, &rhs, Some(&bias));
                let what = format!("{isa:?} {m} {k} {n}, transposed {transposed}");
                let inputs = [stored, DType::F32];
                let y = packed::gemm::<f32>(&lhs, &rhs, Some(&bias), isa)?.unwrap();
                check(&y, &expected, &inputs, &what);
                let y = with_single!(stored, O => {
                    packed::gemm::<O>(&lhs, &rhs, Some(&bias), isa)?.unwrap()
                });
                check(&y, &expected, &inputs, &what);
            }
        }
        if cfg!(miri) {
            continue;
        }
        // Batches: fewer than threads, and more; rows and columns of a larger tensor.
        for batch in [1, 7] {
            let (lhs, rhs) = (
                random(&mut rng, &[batch, 40, 50], stored),
                random(&mut rng, &[batch, 60, 40], stored),
            );
            let (lhs, rhs) = (lhs.narrow(2, 3, 37)?, rhs.narrow(1, 5, 37)?.narrow(2, 1, 21)?);
            let y = packed::gemm::<f32>(&lhs, &rhs, None, isa)?.unwrap();
            check(&y, &naive(&lhs, &rhs, None), &[stored], &format!("{isa:?}, {batch} matrices"));
        }
        // Infinity and NaN stay in their rows, whatever lies in the padding.
        let lhs = random(&mut rng, &[20, 40], DType::F32);
        let spoiled =
            lhs.slice_assign(&[3..4, 39..40], &Tensor::full(f32::INFINITY, (1, 1), &Device::Cpu)?)?;
        let rhs = random(&mut rng, &[40, 20], stored);
        let spoiled = spoiled.to_dtype(stored)?;
        let y = packed::gemm::<f32>(&spoiled, &rhs, None, isa)?;
        if stored != DType::BF16 {
            assert!(y.is_none(), "terms give NaN where infinity may be due");
            continue;
        }
        for (row, values) in y.unwrap().to_vec2::<f32>()?.into_iter().enumerate() {
            assert!(values.iter().all(|v| v.is_finite() != (row == 3)), "{isa:?}, row {row}");
        }
    }
    Ok(())
}

/// Single terms: what three terms leave out is 2^-23 of a product at most, and its last rounding 2^-24.
#[test]
fn planes_leave_out_less_than_f32_rounds() -> Result<()> {
    use super::packed;
    use crate::kernels::gemm::micro::InstructionSet;

    if !InstructionSet::AmxBf16x3.is_runnable() {
        return Ok(());
    }
    let mut rng = generator(91);
    let mut numbers = |dims: (usize, usize)| {
        let number = |_| rng.random_range(-2f32..2.0) * (rng.random_range(-40..40) as f32).exp2();
        Tensor::from_vec((0..dims.0 * dims.1).map(number).collect(), dims, &Device::Cpu)
    };
    let (lhs, rhs) = (numbers((257, 1))?, numbers((1, 131))?);
    let product =
        packed::gemm::<f32>(&lhs, &rhs, None, InstructionSet::AmxBf16x3)?.expect("finite");
    for (actual, expected) in doubles(&product).iter().zip(naive(&lhs, &rhs, None)) {
        let error = (actual - expected.value).abs();
        assert!(error <= 1.6 * f64::from(f32::EPSILON) * expected.value.abs(), "{actual}");
    }
    // Sums are kept by blocks of 32 terms, which F32 adds up one by one.
    let (lhs, rhs) =
        (random(&mut rng, &[64, 1280], DType::F32), random(&mut rng, &[1280, 64], DType::F32));
    let expected = naive(&lhs, &rhs, None);
    let error = |product: &Tensor| {
        let squares = doubles(product).into_iter().zip(&expected);
        squares.map(|(actual, sum)| (actual - sum.value).powi(2)).sum::<f64>().sqrt()
    };
    let bf16x3 = packed::gemm::<f32>(&lhs, &rhs, None, InstructionSet::AmxBf16x3)?.expect("finite");
    let [bf16x3, plain] = [bf16x3, cpu::gemm::<f32>(&lhs, &rhs, None)?].map(|y| error(&y));
    assert!(bf16x3 <= plain, "{bf16x3}, and {plain} without terms");
    Ok(())
}

/// Infinity, NaN and what BF16 rounds to infinity: the product is what it is without terms.
#[test]
fn products_of_what_is_not_finite_are_those_of_f32() -> Result<()> {
    let mut rng = generator(93);
    let rhs = random(&mut rng, &[40, 50], DType::F32);
    for (spoil, at) in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX].into_iter().zip(3..) {
        let spoil = Tensor::full(spoil, (1, 1), &Device::Cpu)?;
        let lhs = random(&mut rng, &[60, 40], DType::F32);
        let lhs = lhs.slice_assign(&[at..at + 1, 39..40], &spoil)?;
        for (lhs, rhs) in [(lhs.clone(), rhs.clone()), (rhs.t()?, lhs.t()?)] {
            let product = doubles(&gemm(&lhs, &rhs, None, DType::F32)?);
            for (actual, expected) in product.iter().zip(naive(&lhs, &rhs, None)) {
                let (value, epsilon) = (expected.value, f64::from(f32::EPSILON));
                let near = (actual - value).abs() <= expected.tolerance(epsilon, DType::F32);
                let same = *actual == value || actual.is_nan() && value.is_nan();
                assert!(same || value.is_finite() && near, "{spoil}: {actual}, not {value}");
            }
        }
    }
    Ok(())
}

/// As on the CPU, within what sums of another order differ by.
#[track_caller]
fn compare_on_gpus(lhs: &Tensor, rhs: &Tensor, bias: Option<&Tensor>, out: DType) {
    for gpu in crate::kernels::testing::devices::gpus() {
        let expected = naive(lhs, rhs, bias);
        let mut inputs = vec![lhs.dtype(), rhs.dtype()];
        inputs.extend(bias.map(Tensor::dtype));
        let what =
            format!("{:?} {:?} x {:?}, {inputs:?} to {out:?}", lhs.dims(), lhs.stride(), rhs);
        let [left, right] = [lhs, rhs].map(|operand| on_device(operand, &gpu));
        let bias = bias.map(|bias| on_device(bias, &gpu));
        let y = gemm(&left, &right, bias.as_ref(), out).unwrap();
        assert_eq!((y.dtype(), y.is_contiguous()), (out, true), "{what}");
        check(&y.to_device(&Device::Cpu).unwrap(), &expected, &inputs, &what);
    }
}

#[test]
fn gpus_take_every_combination_of_dtypes() {
    let mut rng = generator(11);
    for left in DTYPES {
        for right in DTYPES {
            for out in DTYPES {
                let lhs = random(&mut rng, &[7, 33], left);
                let rhs = random(&mut rng, &[33, 17], right);
                compare_on_gpus(&lhs, &rhs, None, out);
                for bias in DTYPES {
                    compare_on_gpus(&lhs, &rhs, Some(&random(&mut rng, &[17], bias)), out);
                }
            }
        }
    }
}

#[test]
fn gpus_take_odd_and_empty_sizes() {
    let mut rng = generator(12);
    let sizes = [0, 1, 3, 33];
    let triples = sizes.map(|m| sizes.map(|k| sizes.map(|n| (m, k, n))));
    for &(m, k, n) in triples.as_flattened().as_flattened() {
        for dtype in [DType::F32, DType::F16] {
            let (lhs, rhs) = (random(&mut rng, &[m, k], dtype), random(&mut rng, &[k, n], dtype));
            compare_on_gpus(&lhs, &rhs, Some(&random(&mut rng, &[n], dtype)), dtype);
            compare_on_gpus(&lhs, &rhs, None, DType::F32);
        }
    }
}

#[test]
fn gpus_read_operands_where_they_lie() -> Result<()> {
    let mut rng = generator(13);
    for dtype in DTYPES {
        let lhs = random(&mut rng, &[17, 3, 2, 7], dtype);
        let rhs = random(&mut rng, &[3, 2, 5, 17], dtype);
        compare_on_gpus(&lhs.permute((1, 2, 3, 0))?, &rhs.t()?, None, DType::F32);
        compare_on_gpus(&rhs.transpose(0, 1)?, &lhs.permute((2, 1, 0, 3))?, None, dtype);
        let window = random(&mut rng, &[20, 40], dtype).narrow(0, 2, 9)?.narrow(1, 3, 17)?;
        let bias = random(&mut rng, &[3, 4], dtype).narrow(1, 1, 1)?.squeeze(1)?;
        compare_on_gpus(&window, &random(&mut rng, &[17, 3], dtype), Some(&bias), dtype);
        compare_on_gpus(&window.t()?, &random(&mut rng, &[9, 4], dtype), None, dtype);
        let shared = random(&mut rng, &[5, 7], dtype).t()?.broadcast_as((3, 7, 5))?;
        compare_on_gpus(&random(&mut rng, &[3, 4, 7], dtype), &shared, None, dtype);
        let row = random(&mut rng, &[1, 7], dtype).broadcast_as((4, 7))?;
        compare_on_gpus(&row, &random(&mut rng, &[7, 3], dtype), None, dtype);
    }
    Ok(())
}

#[test]
fn long_sums_of_halves_do_not_saturate_on_gpus() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let ones = Tensor::ones((3, 4096), dtype, &Device::Cpu)?;
        compare_on_gpus(&ones, &ones.t()?, None, dtype);
    }
    Ok(())
}
