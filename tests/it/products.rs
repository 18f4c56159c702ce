//! Every NaN of 16 bits, in every operand of every product: the results that depend on it are NaN, all others keep
//! their bits.

use candle_amp::backend;
use candle_amp::ops::{self, RecurrentWeights, channels_last};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::rnn::Direction;
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};
use half::{bf16, f16};

use crate::util::{epsilon, random, to_vec};

type Function = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// A product, one of whose operands has a NaN at each of `spots`.
struct Product {
    name: &'static str,
    dims: Vec<Vec<usize>>,
    operand: usize,
    spots: Vec<usize>,
    /// Whether it may be a Winograd convolution, which is taken again without tiles where a result is not finite: bits
    /// may differ then.
    winograd: bool,
    f: Function,
}

fn product(
    name: &'static str,
    dims: &[&[usize]],
    operand: usize,
    spots: impl IntoIterator<Item = usize>,
    f: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Product {
    let dims = dims.iter().map(|dims| dims.to_vec()).collect();
    let spots = spots.into_iter().collect();
    Product { name, dims, operand, spots, winograd: false, f: Box::new(f) }
}

impl Product {
    fn winograd(self) -> Self {
        Self { winograd: true, ..self }
    }
}

/// One element in every second row of a matrix, in its even columns.
fn in_rows(rows: usize, columns: usize) -> impl Iterator<Item = usize> {
    (0..rows).step_by(2).map(move |row| row * columns + 3 * row % columns / 2 * 2)
}

/// One element in every second column of a matrix, in its even rows.
fn in_columns(rows: usize, columns: usize) -> impl Iterator<Item = usize> {
    (0..columns).step_by(2).map(move |column| 3 * column % rows / 2 * 2 * columns + column)
}

fn matrices() -> Vec<Product> {
    let matmul = |t: &[Tensor]| ops::matmul(&t[0], &t[1]);
    let turned = |t: &[Tensor]| ops::matmul(&t[0].t()?, &t[1].t()?);
    let linear = |t: &[Tensor]| ops::linear(&t[0], &t[1], Some(&t[2]));
    let sizes = [
        ("matmul", 32, 32, 32),
        ("odd matmul", 48, 64, 33),
        ("large matmul", 514, 70, 65),
        ("long matmul", 40, 600, 36),
    ];
    let mut all = Vec::new();
    for (name, m, k, n) in sizes {
        all.push(product(name, &[&[m, k], &[k, n]], 0, in_rows(m, k), matmul));
        all.push(product(name, &[&[n, k], &[k, m]], 1, in_columns(k, m), matmul));
    }
    let (m, k, n) = (258, 70, 33);
    all.extend([
        product("transposed matmul", &[&[k, m], &[n, k]], 0, in_columns(k, m), turned),
        product("transposed matmul", &[&[k, n], &[m, k]], 1, in_rows(m, k), turned),
        product("matmul of a row", &[&[1, k], &[k, m]], 1, in_columns(k, m), matmul),
        product("batched matmul", &[&[m, 1, k], &[m, k, 5]], 0, in_rows(m, k), matmul),
        product("linear", &[&[2, m, k], &[n, k], &[n]], 0, in_rows(2 * m, k), linear),
        product("linear", &[&[n, k], &[m, k], &[m]], 1, in_rows(m, k), linear),
        product("linear", &[&[n, k], &[m, k], &[m]], 2, (0..m).step_by(2), linear),
    ]);
    all
}

/// Pixels of images of `h` by `w`, `apart` from each other, in an even channel of the `c`.
fn in_pixels(
    [n, c, h, w]: [usize; 4],
    apart: usize,
    last: bool,
) -> impl Iterator<Item = usize> + Clone {
    let pixels = (0..n * h * w).filter(move |at| at / w % h % apart == 2 && at % w % apart == 2);
    pixels.enumerate().map(move |(number, at)| {
        let (image, pixel, channel) = (at / (h * w), at % (h * w), 2 * number % c);
        if last { at * c + channel } else { (image * c + channel) * h * w + pixel }
    })
}

fn convolutions() -> Vec<Product> {
    let conv = |padding, stride, groups| {
        let config = Conv2dConfig { padding, stride, groups, ..Default::default() };
        move |t: &[Tensor]| ops::conv2d(&t[0], &t[1], t.get(2), config)
    };
    let last = |padding, stride, groups| {
        let config = Conv2dConfig { padding, stride, groups, ..Default::default() };
        move |t: &[Tensor]| channels_last::conv2d(&t[0], &t[1], t.get(2), config)
    };
    let transposed = |t: &[Tensor]| {
        let config = ConvTranspose2dConfig { padding: 1, stride: 2, ..Default::default() };
        ops::conv_transpose2d(&t[0], &t[1], None, config)
    };
    let conv1d = |t: &[Tensor]| {
        let config = Conv1dConfig { padding: 1, ..Default::default() };
        ops::conv1d(&t[0], &t[1], None, config)
    };
    let transposed1d = |t: &[Tensor]| {
        let config = ConvTranspose1dConfig { padding: 1, stride: 2, ..Default::default() };
        ops::conv_transpose1d(&t[0], &t[1], None, config)
    };
    let planar = in_pixels([2, 16, 63, 65], 5, false);
    let interleaved = in_pixels([2, 16, 63, 65], 5, true);
    let (x, x_last): (&[usize], &[usize]) = (&[2, 16, 63, 65], &[2, 63, 65, 16]);
    // One element of the weights of every second output channel.
    let in_filters = |size: usize| (0..258).step_by(2).map(move |o| o * size + 5 * o % size);
    let weights: &[usize] = &[258, 8, 3, 3];
    let images: &[&[usize]] = &[&[1, 8, 10, 11], weights];
    let images_last: &[&[usize]] = &[&[1, 10, 11, 8], weights];
    // Enough channels for F16 to be split into BF16, forward and backward.
    let x_wide: &[usize] = &[2, 33, 35, 32];
    let wide = in_pixels([2, 32, 33, 35], 5, true);
    let images_wide: &[&[usize]] = &[&[1, 10, 11, 32], &[258, 32, 3, 3]];
    vec![
        product("conv2d", &[x, &[17, 16, 3, 3], &[17]], 0, planar.clone(), conv(1, 1, 1))
            .winograd(),
        product("conv2d of weights", images, 1, in_filters(72), conv(1, 1, 1)).winograd(),
        product("conv2d, stride 2", &[x, &[17, 16, 3, 3]], 0, planar.clone(), conv(1, 2, 1))
            .winograd(),
        product("conv2d, 1x1", &[x, &[17, 16, 1, 1]], 0, planar.clone(), conv(0, 1, 1)),
        product(
            "conv2d of weights, 1x1",
            &[&[1, 40, 10, 11], &[258, 40, 1, 1]],
            1,
            in_rows(258, 40),
            conv(0, 1, 1),
        ),
        product("conv2d, groups", &[x, &[6, 8, 3, 3]], 0, planar.clone(), conv(1, 1, 2)),
        product("conv2d, depthwise", &[x, &[16, 1, 3, 3]], 0, planar.clone(), conv(1, 1, 16)),
        product("conv2d, last", &[x_last, &[17, 16, 3, 3]], 0, interleaved.clone(), last(1, 1, 1))
            .winograd(),
        product("conv2d of weights, last", images_last, 1, in_filters(72), last(1, 1, 1))
            .winograd(),
        product("conv2d, last, split", &[x_wide, &[32, 32, 3, 3]], 0, wide, last(1, 1, 1))
            .winograd(),
        product("conv2d of weights, last, split", images_wide, 1, in_filters(288), last(1, 1, 1))
            .winograd(),
        product("conv2d, last, 1x1", &[x_last, &[17, 16, 1, 1]], 0, interleaved, last(0, 1, 1)),
        product("conv_transpose2d", &[x, &[16, 9, 3, 3]], 0, planar, transposed),
        product(
            "conv1d",
            &[&[2, 16, 1301], &[17, 16, 3]],
            0,
            // Every eighth step, in an even channel.
            (0..160).map(|step| 2 * step % 16 * 1301 + 8 * step),
            conv1d,
        ),
        product("conv1d of weights", &[&[1, 8, 40], &[258, 8, 3]], 1, in_filters(24), conv1d),
        product(
            "conv_transpose1d",
            &[&[2, 16, 300], &[16, 9, 3]],
            0,
            (0..32).map(|row| row * 300 + 7 * row),
            transposed1d,
        ),
    ]
}

fn sequences() -> Vec<Product> {
    let sdpa = |t: &[Tensor]| ops::sdpa(&t[0], &t[1], &t[2], None, false, 0.25);
    let heads: &[&[usize]] = &[&[2, 66, 20, 16], &[2, 66, 40, 16], &[2, 66, 40, 24]];
    // Where a head has a NaN, the next has none.
    let in_heads = |size: usize| (0..132).step_by(2).map(move |head| head * size + 7 * head % size);
    let gru = |t: &[Tensor]| {
        let (w_ih, w_hh, direction) = (&t[2], &t[3], Direction::Forward);
        ops::gru(&t[0], &t[1], RecurrentWeights { w_ih, w_hh, b_ih: None, b_hh: None, direction })
    };
    let lstm = |t: &[Tensor]| {
        let (w_ih, w_hh, direction) = (&t[3], &t[4], Direction::Forward);
        let weights = RecurrentWeights { w_ih, w_hh, b_ih: None, b_hh: None, direction };
        let (h, c) = ops::lstm(&t[0], &t[1], &t[2], weights)?;
        ops::cat(&[&h, &c], 2)
    };
    vec![
        product("sdpa of q", heads, 0, in_rows(2 * 66 * 20, 16), sdpa),
        product("sdpa of k", heads, 1, in_heads(40 * 16), sdpa),
        product("sdpa of v", heads, 2, in_heads(40 * 24), sdpa),
        product("gru", &[&[66, 3, 8], &[66, 5], &[15, 8], &[15, 5]], 0, in_rows(66, 24), gru),
        product(
            "lstm",
            &[&[66, 3, 8], &[66, 5], &[66, 5], &[20, 8], &[20, 5]],
            0,
            in_rows(66, 24),
            lstm,
        ),
    ]
}

/// `x` with these bits at these places.
fn replaced(x: &Tensor, spots: &[usize], bits: &[u16]) -> Result<Tensor> {
    macro_rules! put {
        ($t:ty) => {{
            let mut values = x.flatten_all()?.to_vec1::<$t>()?;
            for (&spot, &bits) in spots.iter().zip(bits) {
                values[spot] = <$t>::from_bits(bits);
            }
            Tensor::from_vec(values, x.shape(), &Device::Cpu)
        }};
    }
    if x.dtype() == DType::F16 { put!(f16) } else { put!(bf16) }
}

/// The product, and the gradient of each operand.
fn run(product: &Product, inputs: &[Tensor]) -> Result<Vec<Vec<f64>>> {
    let vars = inputs.iter().map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = (product.f)(&tensors)?;
    let weights = random(99, y.shape(), y.dtype());
    let store = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
    let gradients = vars.iter().map(|var| to_vec(store.get(var).expect("a gradient")));
    Ok(std::iter::once(to_vec(&y)).chain(gradients).collect())
}

/// Every NaN of `dtype`, in the spots of the product, as many at a time as it has. What depends on them is what is NaN
/// in `F64`.
fn check(product: &Product, dtype: DType) -> Result<()> {
    let is_nan = |bits: &u16| match dtype {
        DType::F16 => f16::from_bits(*bits).is_nan(),
        _ => bf16::from_bits(*bits).is_nan(),
    };
    let nans: Vec<u16> = (0..=u16::MAX).filter(is_nan).collect();
    assert_eq!(nans.len(), if dtype == DType::F16 { 2046 } else { 254 });
    let shapes = (0..).zip(&product.dims);
    let plain: Vec<Tensor> = shapes.map(|(seed, dims)| random(seed, dims.clone(), dtype)).collect();
    // AMX takes F16 as sums of BF16, and what is not finite again without.
    let sets = backend::instruction_sets();
    let sets = [sets.loops, sets.f32_convolutions, sets.f32_products];
    let splits = dtype == DType::F16 && sets.contains(&"amx");
    let without = run(product, &plain)?;
    // In the last chunk too every spot has one.
    let mut nans = nans.into_iter().cycle().take(nans_in(dtype, product.spots.len()));
    let mut expected = None;
    loop {
        let bits: Vec<u16> = nans.by_ref().take(product.spots.len()).collect();
        if bits.is_empty() {
            return Ok(());
        }
        let mut inputs = plain.clone();
        inputs[product.operand] = replaced(&plain[product.operand], &product.spots, &bits)?;
        if expected.is_none() {
            let wide = inputs.iter().map(|x| x.to_dtype(DType::F64)).collect::<Result<Vec<_>>>()?;
            expected = Some(run(product, &wide)?);
        }
        let (got, expected) = (run(product, &inputs)?, expected.as_ref().expect("just made"));
        for (number, got) in got.iter().enumerate() {
            let what = if number == 0 { "the product" } else { "a gradient" };
            let what = format!("{}, {dtype:?}, {what} ({number})", product.name);
            let largest = without[number].iter().fold(0f64, |most, x| most.max(x.abs()));
            let again = product.winograd || splits;
            let error = if again { 8.0 * epsilon(dtype) * largest } else { 0.0 };
            for (at, got) in got.iter().enumerate() {
                let (exact, before) = (expected[number][at], without[number][at]);
                let right =
                    if exact.is_nan() { got.is_nan() } else { (got - before).abs() <= error };
                assert!(
                    right,
                    "{what}, element {at}: {got}, in F64 {exact}, without NaN {before}, bits from {:#x}",
                    bits[0]
                );
            }
        }
        let hit = expected[0].iter().filter(|y| y.is_nan()).count();
        assert!(hit >= product.spots.len().min(2) && hit < expected[0].len(), "{}", product.name);
    }
}

/// How many bits to take that each spot has one each time.
fn nans_in(dtype: DType, spots: usize) -> usize {
    (if dtype == DType::F16 { 2046usize } else { 254 }).next_multiple_of(spots)
}

fn check_all(products: Vec<Product>) -> Result<()> {
    for product in products {
        for dtype in [DType::F16, DType::BF16] {
            check(&product, dtype)?;
        }
    }
    Ok(())
}

#[test]
fn every_nan_goes_through_matrix_products() -> Result<()> {
    check_all(matrices())
}

#[test]
fn every_nan_goes_through_convolutions() -> Result<()> {
    check_all(convolutions())
}

#[test]
fn every_nan_goes_through_attention_and_recurrent_layers() -> Result<()> {
    check_all(sequences())
}
