//! Methods of `candle_core::Tensor`.

use candle_core::{DType, Device, Result, Tensor};

use super::measure::Input;
use super::{Row, Section};

/// More elements than a sum in 16 bits can count.
const N: usize = 4099;

pub(super) const fn input(dims: &'static [usize], low: f64, high: f64) -> Input {
    Input { dims, low, high }
}

pub(super) fn row(
    method: &'static str,
    probes: &[&[Input]],
    f: fn(&[Tensor]) -> Result<Tensor>,
    instead: &'static str,
    why: &'static str,
) -> Row {
    let probes = probes.iter().map(|probe| probe.to_vec()).collect();
    Row { method, probes, f, wide: f, instead, why, varies: false }
}

const X: Input = input(&[N], -4.0, 4.0);
const POSITIVE: Input = input(&[N], 0.1, 4.0);
/// No whole numbers, nor halfway between.
const BETWEEN: Input = input(&[N], 1.1, 1.4);
const NEGATIVE: Input = input(&[N], -60.0, -4.0);
/// So near each other, and of one sign, that a sum in 16 bits stops growing.
const ONES: Input = input(&[3, N], 0.75, 1.0);
/// Squares of these overflow F16.
const LARGE: Input = input(&[3, N], 200.0, 400.0);
const MATRIX: Input = input(&[64, 65], -4.0, 4.0);
const OTHER: Input = input(&[64, 65], -4.0, 4.0);
/// Repeated so often that the sum of its gradients shows.
const TALL: Input = input(&[N, 3], 0.5, 4.0);
const LINE: Input = input(&[3], 0.5, 4.0);

/// `count` numbers below `size`.
fn ids(count: usize, size: usize) -> Result<Tensor> {
    Tensor::new((0..count).map(|at| (at % size) as u32).collect::<Vec<_>>(), &Device::Cpu)
}

pub(super) fn sections() -> Vec<Section> {
    vec![
        ("Functions of one number", pointwise()),
        ("Arithmetic on two tensors", pairs()),
        ("Products", products()),
        ("Sums, statistics and extrema", reductions()),
        ("Indexing", indexing()),
        ("Views, copies and joins", moves()),
        ("Comparisons and order", order()),
    ]
}

fn pointwise() -> Vec<Row> {
    const SLOPE: &str = "the derivative is made of several 16-bit results";
    vec![
        row(
            "x.abs()",
            &[&[X]],
            |t| t[0].abs(),
            "",
            "at 0 the gradient is 1; `ops::abs` gives 0, as PyTorch does",
        ),
        row("x.neg()", &[&[X]], |t| t[0].neg(), "", "turns a sign"),
        row(
            "x * 3.0 + 0.1",
            &[&[X]],
            |t| t[0].affine(3.0, 0.1),
            "`ops::affine(x, 3.0, 0.1)`",
            "in F32 it would be rounded once",
        ),
        row(
            "x.sqr()",
            &[&[X]],
            |t| t[0].sqr(),
            "",
            "overflows F16 from 256 on; `ops::square` is F32 under autocast",
        ),
        row(
            "x.sqrt()",
            &[&[POSITIVE]],
            |t| t[0].sqrt(),
            "",
            "the derivative has two roundings, within an epsilon together",
        ),
        row(
            "x.recip()",
            &[&[POSITIVE]],
            |t| t[0].recip(),
            "",
            "the derivative has two roundings, within an epsilon together",
        ),
        row("x.powf(e)", &[&[POSITIVE]], |t| t[0].powf(2.5), "`ops::powf`", SLOPE),
        row(
            "x.exp()",
            &[&[X]],
            |t| t[0].exp(),
            "",
            "overflows F16 above 11.09; `ops::exp` is F32 under autocast",
        ),
        row(
            "x.log()",
            &[&[POSITIVE]],
            |t| t[0].log(),
            "",
            "16 bits are coarse where it is steep; `ops::log` is F32 under autocast",
        ),
        row(
            "x.sin()",
            &[&[X]],
            |t| t[0].sin(),
            "",
            "the derivative has two roundings, within an epsilon together",
        ),
        row(
            "x.cos()",
            &[&[X]],
            |t| t[0].cos(),
            "",
            "the derivative has two roundings, within an epsilon together",
        ),
        row("x.erf()", &[&[X]], |t| t[0].erf(), "`ops::erf`", SLOPE),
        row(
            "x.tanh()",
            &[&[X]],
            |t| t[0].tanh(),
            "`ops::tanh`",
            "1 less a rounded square: near ±1 nothing of the derivative is left",
        ),
        row(
            "x.gelu()",
            &[&[X], &[input(&[N], 30.0, 60.0)]],
            |t| t[0].gelu(),
            "`ops::gelu_tanh`",
            "a cube in 16 bits overflows F16 above 40; constants of six digits",
        ),
        row("x.gelu_erf()", &[&[X]], |t| t[0].gelu_erf(), "`ops::gelu_erf`", SLOPE),
        row(
            "x.relu()",
            &[&[X]],
            |t| t[0].relu(),
            "",
            "at 0 the gradient is 1; `ops::relu` gives 0, as PyTorch does",
        ),
        row(
            "x.silu()",
            &[&[X], &[NEGATIVE]],
            |t| t[0].silu(),
            "`ops::silu`",
            "exponentials in 16 bits",
        ),
        row(
            "x.elu(a)",
            &[&[X]],
            |t| t[0].elu(1.0),
            "`ops::elu`",
            "the derivative is made of the rounded result",
        ),
        row(
            "x.clamp(a, b)",
            &[&[X]],
            |t| t[0].clamp(-1.0, 1.5),
            "",
            "selects; at a bound the gradient is halved",
        ),
        row("x.floor()", &[&[BETWEEN]], |t| t[0].floor(), "", "rounds to a whole number"),
        row("x.ceil()", &[&[BETWEEN]], |t| t[0].ceil(), "", "rounds to a whole number"),
        row("x.round()", &[&[BETWEEN]], |t| t[0].round(), "", "rounds to a whole number"),
        row("x.sign()", &[&[BETWEEN]], |t| t[0].sign(), "", "-1, 0 or 1"),
    ]
}

fn pairs() -> Vec<Row> {
    const SUMS: &str = "the gradient of what is repeated is summed in 16 bits";
    vec![
        row(
            "a + b",
            &[&[MATRIX, OTHER]],
            |t| &t[0] + &t[1],
            "",
            "rounded once; of one dtype and shape only",
        ),
        row(
            "a - b",
            &[&[MATRIX, OTHER]],
            |t| &t[0] - &t[1],
            "",
            "rounded once; of one dtype and shape only",
        ),
        row(
            "a * b",
            &[&[MATRIX, OTHER]],
            |t| &t[0] * &t[1],
            "",
            "rounded once; of one dtype and shape only",
        ),
        row(
            "a / b",
            &[&[POSITIVE, POSITIVE]],
            |t| &t[0] / &t[1],
            "`ops::div`",
            "the divisor's gradient has three roundings, and its square may overflow",
        ),
        row("a.maximum(b)", &[&[MATRIX, OTHER]], |t| t[0].maximum(&t[1]), "", "selects"),
        row("a.minimum(b)", &[&[MATRIX, OTHER]], |t| t[0].minimum(&t[1]), "", "selects"),
        row(
            "a.broadcast_add(b)",
            &[&[TALL, LINE]],
            |t| t[0].broadcast_add(&t[1]),
            "`ops::add`",
            SUMS,
        ),
        row(
            "a.broadcast_sub(b)",
            &[&[TALL, LINE]],
            |t| t[0].broadcast_sub(&t[1]),
            "`ops::sub`",
            SUMS,
        ),
        row(
            "a.broadcast_mul(b)",
            &[&[TALL, LINE]],
            |t| t[0].broadcast_mul(&t[1]),
            "`ops::mul`",
            SUMS,
        ),
        row(
            "a.broadcast_div(b)",
            &[&[TALL, LINE]],
            |t| t[0].broadcast_div(&t[1]),
            "`ops::div`",
            SUMS,
        ),
        row(
            "a.broadcast_maximum(b)",
            &[&[TALL, LINE]],
            |t| t[0].broadcast_maximum(&t[1]),
            "`ops::maximum`",
            SUMS,
        ),
        row(
            "a.broadcast_minimum(b)",
            &[&[TALL, LINE]],
            |t| t[0].broadcast_minimum(&t[1]),
            "`ops::minimum`",
            SUMS,
        ),
        row(
            "a.pow(b)",
            &[&[POSITIVE, X]],
            |t| t[0].pow(&t[1]),
            "`ops::exp(&ops::mul(&b, &ops::log(&a)?)?)` in a scope",
            "a logarithm rounded to 16 bits; NaN for a negative base",
        ),
        row(
            "c.where_cond(a, b)",
            &[&[MATRIX, OTHER]],
            |t| {
                Tensor::from_vec(
                    (0..64 * 65).map(|at| u8::from(at % 3 == 0)).collect(),
                    (64, 65),
                    &Device::Cpu,
                )?
                .where_cond(&t[0], &t[1])
            },
            "",
            "selects; `ops::where_cond` broadcasts",
        ),
    ]
}

fn products() -> Vec<Row> {
    const LEFT: Input = input(&[3, N], 0.5, 1.0);
    const RIGHT: Input = input(&[N, 2], 0.5, 1.0);
    vec![
        row(
            "a.matmul(b)",
            &[&[LEFT, RIGHT], &[RIGHT, input(&[2, 3], 0.5, 1.0)]],
            |t| t[0].matmul(&t[1]),
            "`ops::matmul`",
            "candle has no BF16 product on a CPU; dtypes must agree",
        )
        .varies(),
        row(
            "a.broadcast_matmul(b)",
            &[&[input(&[2, 3, 65], 0.5, 1.0), input(&[65, 4], 0.5, 1.0)]],
            |t| t[0].broadcast_matmul(&t[1]),
            "`ops::matmul`",
            "as `matmul`; and the gradient of what is repeated is summed in 16 bits",
        )
        .varies(),
        row(
            "a.dot(b)",
            &[&[input(&[N], 0.75, 1.0), input(&[N], 0.75, 1.0)]],
            |t| t[0].dot(&t[1]),
            "`ops::matmul`",
            "a product, and a sum in 16 bits",
        ),
        row(
            "a.mv(b)",
            &[&[LEFT, input(&[N], 0.5, 1.0)]],
            |t| t[0].mv(&t[1]),
            "`ops::matmul`",
            "as `matmul`",
        )
        .varies(),
    ]
}

fn reductions() -> Vec<Row> {
    const SUM: &str = "summed in 16 bits";
    vec![
        row("x.sum_all()", &[&[ONES]], |t| t[0].sum_all(), "`ops::sum`", SUM),
        row("x.sum(dims)", &[&[ONES]], |t| t[0].sum(1), "`ops::sum_dims`", SUM),
        row("x.sum_keepdim(dims)", &[&[ONES]], |t| t[0].sum_keepdim(1), "`ops::sum_keepdim`", SUM),
        row("x.mean_all()", &[&[ONES]], |t| t[0].mean_all(), "`ops::mean`", SUM),
        row("x.mean(dims)", &[&[ONES]], |t| t[0].mean(1), "`ops::mean_dims`", SUM),
        row(
            "x.mean_keepdim(dims)",
            &[&[ONES]],
            |t| t[0].mean_keepdim(1),
            "`ops::mean_keepdim`",
            SUM,
        ),
        row(
            "x.var(dim)",
            &[&[ONES], &[LARGE]],
            |t| t[0].var(1),
            "`ops::var_dims`",
            "mean and squares are summed in 16 bits; squares overflow F16",
        ),
        row(
            "x.var_keepdim(dim)",
            &[&[ONES]],
            |t| t[0].var_keepdim(1),
            "`ops::var_keepdim`",
            "as `var`",
        ),
        row(
            "x.norm()",
            &[&[ONES], &[input(&[9], 200.0, 400.0)]],
            |t| t[0].norm(),
            "`ops::norm`",
            "squares overflow F16, and are summed in 16 bits; the gradient at 0 is NaN",
        ),
        row(
            "x.log_sum_exp(dims)",
            &[&[ONES]],
            |t| t[0].log_sum_exp(1),
            "`ops::log_sum_exp`",
            "exponentials are summed in 16 bits; NaN where all are -∞",
        ),
        row(
            "x.cumsum(dim)",
            &[&[input(&[2, 1031], 0.75, 1.0)]],
            |t| t[0].cumsum(1),
            "`ops::cumsum`",
            "a product with a triangle of ones: memory for the square of the length, NaN around an infinity, and not in BF16 on most CPUs",
        ).varies(),
        row(
            "x.max(dim)",
            &[&[MATRIX]],
            |t| t[0].max(0),
            "",
            "selects; if several are the largest, each gets the whole gradient; panics on a dimension of size 1 that `broadcast_as` made",
        ),
        row("x.max_keepdim(dim)", &[&[MATRIX]], |t| t[0].max_keepdim(0), "", "as `max`"),
        row("x.max_all()", &[&[input(&[7], -4.0, 4.0)]], |t| t[0].max_all(), "", "as `max`"),
        row("x.min(dim)", &[&[MATRIX]], |t| t[0].min(0), "", "as `max`"),
        row("x.min_keepdim(dim)", &[&[MATRIX]], |t| t[0].min_keepdim(0), "", "as `max`"),
        row("x.min_all()", &[&[input(&[7], -4.0, 4.0)]], |t| t[0].min_all(), "", "as `max`"),
    ]
}

fn indexing() -> Vec<Row> {
    const SUMS: &str = "an element that is named often gets a gradient summed in 16 bits";
    const TABLE: Input = input(&[3, 2], -4.0, 4.0);
    const SOURCE: Input = input(&[N, 2], 0.75, 1.0);
    vec![
        row(
            "x.index_select(ids, dim)",
            &[&[TABLE]],
            |t| t[0].index_select(&ids(N, 3)?, 0),
            "`ops::index_select`",
            SUMS,
        ),
        row(
            "x.embedding(ids)",
            &[&[TABLE]],
            |t| t[0].embedding(&ids(N, 3)?),
            "`ops::embedding`",
            SUMS,
        ),
        row(
            "x.gather(ids, dim)",
            &[&[TABLE]],
            |t| t[0].gather(&ids(2 * N, 3)?.reshape((N, 2))?, 0),
            "`ops::gather`",
            SUMS,
        ),
        row(
            "x.index_add(ids, s, dim)",
            &[&[TABLE, SOURCE]],
            |t| t[0].index_add(&ids(N, 3)?, &t[1], 0),
            "`ops::scatter_add`, of ids broadcast to the source",
            "what is added is summed in 16 bits",
        ),
        row(
            "x.scatter_add(ids, s, dim)",
            &[&[SOURCE, SOURCE]],
            |t| t[0].scatter_add(&ids(2 * N, 3)?.reshape((N, 2))?, &t[1], 0),
            "`ops::scatter_add`",
            "elements of `x` that something is added to get a gradient of 0, and backward is an error if `s` has another size than `x`; summed in 16 bits",
        ),
        row(
            "x.scatter(ids, s, dim)",
            &[&[TABLE, input(&[2, 2], -4.0, 4.0)]],
            |t| t[0].scatter(&ids(4, 2)?.reshape((2, 2))?, &t[1], 0),
            "`ops::where_cond(&mask, &s, &x)`, of `s` moved to its place",
            "elements of `x` that are overwritten get a gradient all the same",
        ),
        row(
            "x.slice_scatter(s, dim, start)",
            &[&[MATRIX, input(&[3, 65], -4.0, 4.0)]],
            |t| t[0].slice_scatter(&t[1], 0, 5),
            "",
            "moves",
        ),
        row(
            "x.slice_assign(ranges, s)",
            &[&[MATRIX, input(&[3, 65], -4.0, 4.0)]],
            |t| t[0].slice_assign(&[5..8, 0..65], &t[1]),
            "",
            "moves",
        ),
        row("x.narrow(dim, start, len)", &[&[MATRIX]], |t| t[0].narrow(0, 5, 9), "", "moves"),
        row("x.get(i)", &[&[MATRIX]], |t| t[0].get(3), "", "moves"),
        row("x.get_on_dim(dim, i)", &[&[MATRIX]], |t| t[0].get_on_dim(1, 3), "", "moves"),
        row("x.chunk(n, dim)", &[&[MATRIX]], |t| Ok(t[0].chunk(4, 0)?[1].clone()), "", "moves"),
    ]
}

fn moves() -> Vec<Row> {
    const MOVES: &str = "moves";
    const REPEATS: &str = "the gradient is summed over the repeats in 16 bits";
    vec![
        row("x.reshape(shape)", &[&[MATRIX]], |t| t[0].reshape((65, 64)), "", MOVES),
        row("x.flatten_all()", &[&[MATRIX]], |t| t[0].flatten_all(), "", MOVES),
        row("x.squeeze(dim)", &[&[input(&[N, 1], -4.0, 4.0)]], |t| t[0].squeeze(1), "", MOVES),
        row("x.unsqueeze(dim)", &[&[X]], |t| t[0].unsqueeze(0), "", MOVES),
        row("x.transpose(a, b)", &[&[MATRIX]], |t| t[0].transpose(0, 1), "", MOVES),
        row("x.permute(dims)", &[&[MATRIX]], |t| t[0].permute((1, 0)), "", MOVES),
        row("x.t()", &[&[MATRIX]], |t| t[0].t(), "", MOVES),
        row("x.contiguous()", &[&[MATRIX]], |t| t[0].t()?.contiguous(), "", MOVES),
        row("x.copy()", &[&[MATRIX]], |t| t[0].copy(), "", MOVES),
        row("x.to_device(device)", &[&[MATRIX]], |t| t[0].to_device(&Device::Cpu), "", MOVES),
        row(
            "x.to_dtype(dtype)",
            &[&[MATRIX]],
            |t| t[0].to_dtype(DType::F64),
            "",
            "the gradient is rounded to the dtype of `x`, once",
        ),
        row(
            "x.flip(dims)",
            &[&[MATRIX]],
            |t| t[0].flip(&[0]),
            "",
            "moves, by `index_select`, but names each element once",
        ),
        row("x.roll(shift, dim)", &[&[MATRIX]], |t| t[0].roll(3, 0), "", MOVES),
        row(
            "x.unfold(dim, size, step)",
            &[&[MATRIX]],
            |t| t[0].unfold(0, 3, 1),
            "`ops::stack` of `narrow`, or a convolution",
            "its backward is that of a reshape",
        ),
        row(
            "Tensor::cat(parts, dim)",
            &[&[MATRIX, OTHER]],
            |t| Tensor::cat(t, 0),
            "",
            "moves; `ops::cat` promotes under autocast",
        ),
        row(
            "Tensor::stack(parts, dim)",
            &[&[MATRIX, OTHER]],
            |t| Tensor::stack(t, 1),
            "",
            "moves; `ops::stack` promotes under autocast",
        ),
        row(
            "Tensor::meshgrid(parts, xy)",
            &[&[LINE, input(&[N], 0.5, 4.0)]],
            |t| Ok(Tensor::meshgrid(t, false)?[0].clone()),
            "`ops::broadcast_as`",
            REPEATS,
        ),
        row(
            "x.pad_with_zeros(dim, l, r)",
            &[&[MATRIX]],
            |t| t[0].pad_with_zeros(0, 2, 3),
            "",
            MOVES,
        ),
        row(
            "x.pad_with_same(dim, l, r)",
            &[&[MATRIX]],
            |t| t[0].pad_with_same(0, 40, 40),
            "`ops::cat` with `ops::broadcast_as` of the edges",
            "the gradient of an edge is summed in 16 bits",
        ),
        row(
            "x.repeat(shape)",
            &[&[LINE]],
            |t| t[0].repeat((N, 1)),
            "`ops::broadcast_as`, then `reshape`",
            REPEATS,
        ),
        row(
            "x.broadcast_as(shape)",
            &[&[LINE]],
            |t| t[0].broadcast_as((N, 3)),
            "`ops::broadcast_as`; `ops::add` and the like broadcast by themselves",
            REPEATS,
        ),
        row("x.expand(shape)", &[&[LINE]], |t| t[0].expand((N, 3)), "`ops::broadcast_as`", REPEATS),
        row(
            "x.broadcast_left(shape)",
            &[&[LINE]],
            |t| t[0].broadcast_left(N),
            "`ops::broadcast_as`",
            REPEATS,
        ),
    ]
}

fn order() -> Vec<Row> {
    vec![
        row("x.argmax(dim)", &[&[MATRIX]], |t| t[0].argmax(0), "", "integers"),
        row("x.argmin(dim)", &[&[MATRIX]], |t| t[0].argmin(0), "", "integers"),
        row(
            "x.arg_sort_last_dim(asc)",
            &[&[input(&[3, 5], -4.0, 4.0)]],
            |t| t[0].arg_sort_last_dim(true),
            "",
            "integers",
        ),
        row(
            "x.sort_last_dim(asc)",
            &[&[input(&[3, 5], -4.0, 4.0)]],
            |t| Ok(t[0].sort_last_dim(true)?.0),
            "",
            "moves, by `gather`, but names each element once",
        ),
        row(
            "a.gt(b)",
            &[&[MATRIX, OTHER]],
            |t| t[0].gt(&t[1]),
            "",
            "0 or 1 in `U8`; so are `eq`, `ne`, `lt`, `ge`, `le`",
        ),
    ]
}
