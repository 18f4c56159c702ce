//! What a transformer is made of: against candle_nn, where candle cuts gradients, in training, and
//! given what does not fit.

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, Parameters, nn, ops, random as generator};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{Module, VarBuilder, VarMap};

use crate::util::{FLOATS, assert_close, assert_same, random, seeded, to_vec};

const CPU: Device = Device::Cpu;

#[track_caller]
fn close(what: &str, ours: Result<Tensor>, theirs: Result<Tensor>) {
    assert_close(what, &ours.unwrap(), &theirs.unwrap(), DType::F32, 16.0);
}

#[track_caller]
fn assert_says<T>(result: Result<T>, parts: &[&str]) {
    let Err(error) = result else { panic!("expected an error that says {parts:?}") };
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

/// Moves every variable off its initial value, which would hide a weight of one.
fn shake(varmap: &VarMap) -> Result<()> {
    for (seed, (_, var)) in (50..).zip(Parameters::from_varmap(varmap).iter()) {
        var.set(&random(seed, var.shape(), DType::F32))?;
    }
    Ok(())
}

#[test]
fn layers_compute_what_candle_nn_computes_from_the_same_variables() -> Result<()> {
    let _fork = seeded(1);
    let varmap = VarMap::new();
    let ours = nn::var_builder(&varmap, DType::F32, &CPU);
    let theirs = VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
    let no_mean = nn::LayerNormConfig { eps: 1e-3, remove_mean: false, affine: true };
    let norm = nn::layer_norm(6, 1e-3, ours.pp("norm"))?;
    let plain = nn::layer_norm_no_bias(6, 1e-3, ours.pp("plain"))?;
    let biased = nn::layer_norm(6, no_mean, ours.pp("biased"))?;
    let rms = nn::rms_norm(6, 1e-3, ours.pp("rms"))?;
    let group = nn::group_norm(2, 4, 1e-3, ours.pp("group"))?;
    let table = nn::embedding(5, 6, ours.pp("table"))?;
    shake(&varmap)?;
    let x = random(1, (3, 5, 6), DType::F32);
    for x in [x.clone(), x.transpose(0, 1)?] {
        let other = candle_nn::layer_norm(6, 1e-3, theirs.pp("norm"))?;
        close("layer_norm", norm.forward(&x), other.forward(&x));
        let other = candle_nn::layer_norm_no_bias(6, 1e-3, theirs.pp("plain"))?;
        close("layer_norm_no_bias", plain.forward(&x), other.forward(&x));
        let other = candle_nn::layer_norm(6, no_mean, theirs.pp("biased"))?;
        close("layer_norm with its mean", biased.forward(&x), other.forward(&x));
        let other = candle_nn::rms_norm(6, 1e-3, theirs.pp("rms"))?;
        close("rms_norm", rms.forward(&x), other.forward(&x));
        close("rms_norm, forward_diff", rms.forward_diff(&x), other.forward_diff(&x));
        close("rms_norm, inner", rms.clone().into_inner().forward(&x), other.forward(&x));
    }
    let image = random(2, (2, 4, 3, 5), DType::F32);
    let other = candle_nn::group_norm(2, 4, 1e-3, theirs.pp("group"))?;
    close("group_norm", group.forward(&image), other.forward(&image));
    let other = candle_nn::embedding(5, 6, theirs.pp("table"))?;
    let ids = Tensor::new(&[[3u32, 0], [3, 4]], &CPU)?;
    assert_same("embedding", &table.forward(&ids)?, &other.forward(&ids)?);
    let names: Vec<_> = Parameters::from_varmap(&varmap).names().map(String::from).collect();
    let expected = ["biased.bias", "biased.weight", "group.bias", "group.weight", "norm.bias"];
    let more = ["norm.weight", "plain.weight", "rms.weight", "table.weight"];
    assert_eq!(names, [&expected[..], &more].concat());
    Ok(())
}

#[test]
fn functions_compute_what_candle_nn_computes() -> Result<()> {
    let x = random(1, (2, 3, 7, 8), DType::F32);
    let (alpha, beta) = (random(2, 8, DType::F32), random(3, 8, DType::F32));
    let theirs = candle_nn::ops::softmax_last_dim(&x);
    close("softmax_last_dim", nn::ops::softmax_last_dim(&x), theirs);
    let theirs = candle_nn::ops::layer_norm(&x, &alpha, &beta, 1e-3);
    close("layer_norm", nn::ops::layer_norm(&x, &alpha, &beta, 1e-3), theirs);
    let theirs = candle_nn::ops::layer_norm_slow(&x, &alpha, &beta, 1e-3);
    close("layer_norm_slow", nn::ops::layer_norm_slow(&x, &alpha, &beta, 1e-3), theirs);
    let theirs = candle_nn::ops::rms_norm(&x, &alpha, 1e-3);
    close("rms_norm", nn::ops::rms_norm(&x, &alpha, 1e-3), theirs);
    let theirs = candle_nn::ops::rms_norm_slow(&x, &alpha, 1e-3);
    close("rms_norm_slow", nn::ops::rms_norm_slow(&x, &alpha, 1e-3), theirs);

    use candle_nn::rotary_emb as theirs;
    use nn::rotary_emb as ours;
    // More positions than needed where all batches share them; candle reads others then.
    for dims in [&[9, 4][..], &[2, 7, 4]] {
        let angles = random(4, dims, DType::F32);
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        close("rope", ours::rope(&x, &cos, &sin), theirs::rope(&x, &cos, &sin));
        close("rope_i", ours::rope_i(&x, &cos, &sin), theirs::rope_i(&x, &cos, &sin));
        let (x, thd) = (&x, x.transpose(1, 2)?.contiguous()?);
        close("rope_thd", ours::rope_thd(&thd, &cos, &sin), theirs::rope_thd(&thd, &cos, &sin));
        if dims.len() == 2 {
            close("rope_slow", ours::rope_slow(x, &cos, &sin), theirs::rope_slow(x, &cos, &sin));
            let slow = theirs::rope_i_slow(x, &cos, &sin);
            close("rope_i_slow", ours::rope_i_slow(x, &cos, &sin), slow);
        }
    }
    Ok(())
}

/// candle's own attention runs on Metal alone: this is its documentation, in its operators.
#[test]
fn attention_computes_what_candle_documents() -> Result<()> {
    let q = random(1, (2, 4, 5, 8), DType::F32);
    let k = random(2, (2, 2, 6, 8), DType::F32);
    let v = random(3, (2, 2, 6, 3), DType::F32);
    let mask = random(4, (2, 4, 5, 6), DType::F32);
    let tile = |x: &Tensor| {
        let (b, h, n, d) = x.dims4()?;
        x.unsqueeze(2)?.broadcast_as((b, h, 2, n, d))?.reshape((b, h * 2, n, d))
    };
    for cap in [1f32, 2.5] {
        let scores = (q.matmul(&tile(&k)?.t()?.contiguous()?)? * 0.4)?;
        let scores = match cap {
            1.0 => scores,
            cap => ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?,
        };
        let p = candle_nn::ops::softmax(&(scores + &mask)?, D::Minus1)?;
        let ours = nn::ops::sdpa(&q, &k, &v, Some(&mask), false, 0.4, cap);
        close("sdpa", ours, p.matmul(&tile(&v)?));
    }
    Ok(())
}

/// A query beside cached keys is the last one, and sees them all.
#[test]
fn a_single_query_sees_all_cached_keys() -> Result<()> {
    let x = |seed, positions| random(seed, (2, 4, positions, 8), DType::F32);
    let (q, k, v) = (x(1, 1), x(2, 6), x(3, 6));
    let causal = nn::ops::sdpa(&q, &k, &v, None, true, 0.4, 1.0)?;
    close("one query", Ok(causal), nn::ops::sdpa(&q, &k, &v, None, false, 0.4, 1.0));
    let refused = nn::ops::sdpa(&x(4, 2), &k, &v, None, true, 0.4, 1.0);
    assert_says(refused, &["2 queries and 6 keys", "give a mask"]);
    Ok(())
}

/// candle's fused operators leave every variable below them without a gradient, and say nothing.
#[test]
fn packed_attention_is_attention_of_the_parts() -> Result<()> {
    for dtype in FLOATS {
        let qkv = Var::from_tensor(&random(1, (2, 7, 3 * 4 * 5), dtype))?;
        let part = |i| qkv.reshape((2, 7, 3, 4, 5))?.get_on_dim(2, i)?.transpose(1, 2);
        let y = ops::sdpa(&part(0)?, &part(1)?, &part(2)?, None, true, 0.4)?;
        let expected = y.transpose(1, 2)?.flatten_from(2)?;
        let y = ops::sdpa_packed(&qkv, 4, true, 0.4)?;
        assert_same("output", &y, &expected);
        let weights = random(2, y.shape(), dtype);
        let gradient = |y: &Tensor| -> Result<Tensor> {
            let store = ops::sum(&ops::mul(y, &weights)?)?.backward()?;
            Ok(store.get(&qkv).expect("a gradient").clone())
        };
        assert_same("gradient", &gradient(&y)?, &gradient(&expected)?);
    }
    Ok(())
}

#[test]
fn gradients_go_through_where_candle_cuts_them() -> Result<()> {
    let x = Var::from_tensor(&random(1, (1, 2, 3, 4), DType::F32))?;
    let (weight, bias) = (Tensor::ones(4, DType::F32, &CPU)?, random(2, 4, DType::F32));
    let (cos, sin) = (random(3, (3, 2), DType::F32), random(4, (3, 2), DType::F32));
    type Function<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let pairs: [(&str, Function, Function); 5] = [
        ("softmax_last_dim", &candle_nn::ops::softmax_last_dim, &nn::ops::softmax_last_dim),
        ("layer_norm", &|x| candle_nn::ops::layer_norm(x, &weight, &bias, 1e-5), &|x| {
            nn::ops::layer_norm(x, &weight, &bias, 1e-5)
        }),
        ("rms_norm", &|x| candle_nn::ops::rms_norm(x, &weight, 1e-5), &|x| {
            nn::ops::rms_norm(x, &weight, 1e-5)
        }),
        ("rope", &|x| candle_nn::rotary_emb::rope(x, &cos, &sin), &|x| {
            nn::rotary_emb::rope(x, &cos, &sin)
        }),
        ("rope_i", &|x| candle_nn::rotary_emb::rope_i(x, &cos, &sin), &|x| {
            nn::rotary_emb::rope_i(x, &cos, &sin)
        }),
    ];
    for (name, theirs, ours) in pairs {
        close(name, ours(&x), theirs(&x));
        let gradient = |y: Tensor| y.sqr()?.sum_all()?.backward();
        assert!(gradient(theirs(&x)?)?.get(&x).is_none(), "candle's {name} learnt to: drop this");
        let gradient = gradient(ours(&x)?)?.get(&x).cloned();
        assert!(to_vec(&gradient.expect(name)).iter().any(|&g| g != 0.0), "{name}");
    }
    Ok(())
}

#[test]
fn long_sums_do_not_saturate() -> Result<()> {
    for dtype in FLOATS {
        let ones = |dims: &[usize]| Var::ones(dims, dtype, &CPU);
        // Rows of 1 and -1, and a gradient of ones.
        let rows = Tensor::new(&[[1f32, -1.0]], &CPU)?.to_dtype(dtype)?.broadcast_as((4096, 2))?;
        let (weight, bias) = (ones(&[2])?, ones(&[2])?);
        let y = ops::layer_norm(&rows, Some(&weight), Some(&bias), 0.0)?;
        let grads = ops::sum(&y)?.backward()?;
        assert_eq!(to_vec(grads.get(&weight).unwrap()), [4096.0, -4096.0], "{dtype:?}");
        assert_eq!(to_vec(grads.get(&bias).unwrap()), [4096.0; 2], "{dtype:?}");
        let grads = ops::sum(&ops::rms_norm(&rows, Some(&weight), 0.0)?)?.backward()?;
        assert_eq!(to_vec(grads.get(&weight).unwrap()), [4096.0, -4096.0], "{dtype:?}");
        let image = rows.t()?.reshape((1, 2, 64, 64))?;
        let y = ops::group_norm(&image, 1, Some(&weight), Some(&bias), 0.0)?;
        let grads = ops::sum(&y)?.backward()?;
        assert_eq!(to_vec(grads.get(&weight).unwrap()), [4096.0, -4096.0], "{dtype:?}");
        assert_eq!(to_vec(grads.get(&bias).unwrap()), [4096.0; 2], "{dtype:?}");
        let table = ones(&[3, 2])?;
        let ids = Tensor::ones((64, 64), DType::I64, &CPU)?;
        let grads = ops::sum(&ops::embedding(&ids, &table)?)?.backward()?;
        let expected = [0.0, 0.0, 4096.0, 4096.0, 0.0, 0.0];
        assert_eq!(to_vec(grads.get(&table).unwrap()), expected, "{dtype:?}");
        let (q, kv) = (ones(&[1, 1, 4096, 1])?, ones(&[1, 1, 1, 1])?);
        assert_eq!(to_vec(&ops::sdpa(&kv, &q, &q, None, false, 1.0)?), [1.0], "{dtype:?}");
        let grads = ops::sum(&ops::sdpa(&q, &kv, &kv, None, false, 1.0)?)?.backward()?;
        assert_eq!(to_vec(grads.get(&kv).unwrap()), [4096.0], "{dtype:?}");
    }
    Ok(())
}

#[test]
fn ids_of_every_dtype_name_the_same_rows() -> Result<()> {
    let table = random(1, (5, 3), DType::BF16);
    let ids = Tensor::new(&[[4u32, 0, 2], [2, 2, 1]], &CPU)?;
    let expected = table.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 3))?;
    for dtype in [DType::U8, DType::U32, DType::I64] {
        let ids = ids.to_dtype(dtype)?;
        assert_same("embedding", &ops::embedding(&ids, &table)?, &expected);
        let turned = ops::embedding(&ids.t()?, &table)?;
        assert_same("embedding of a view", &turned, &expected.transpose(0, 1)?.contiguous()?);
    }
    assert_eq!(ops::embedding(&Tensor::new(3u32, &CPU)?, &table)?.dims(), [3]);
    // Autocast leaves the table in F32, and its gradient too.
    let table = Var::from_tensor(&random(1, (5, 3), DType::F32))?;
    let y = Autocast::new(DType::F16).scope(|| ops::embedding(&ids, &table))?;
    assert_eq!(y.dtype(), DType::F32);
    Ok(())
}

/// Self-attention with rotary positions between norms, and a head tied to nothing.
struct Block {
    table: nn::Embedding,
    before: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
    after: nn::RmsNorm,
    head: nn::Linear,
    angles: Tensor,
}

impl Block {
    const HEADS: usize = 2;
    const WIDTH: usize = 16;

    fn new(vb: VarBuilder) -> Result<Self> {
        let width = Self::WIDTH;
        let pairs = width / Self::HEADS / 2;
        let angles = (0..8 * pairs).map(|i| (i / pairs) as f32 / 10f32.powi((i % pairs) as i32));
        Ok(Self {
            table: nn::embedding(6, width, vb.pp("table"))?,
            before: nn::layer_norm(width, 1e-5, vb.pp("before"))?,
            qkv: nn::linear(width, 3 * width, vb.pp("qkv"))?,
            out: nn::linear(width, width, vb.pp("out"))?,
            after: nn::rms_norm(width, 1e-5, vb.pp("after"))?,
            head: nn::linear(width, 6, vb.pp("head"))?,
            angles: Tensor::from_iter(angles, &CPU)?.reshape((8, pairs))?,
        })
    }

    fn loss(&self, ids: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let width = Self::WIDTH;
        let x = self.table.forward(ids)?;
        let qkv = self.qkv.forward(&self.before.forward(&x)?)?;
        let qkv = qkv.reshape((b, t, 3 * Self::HEADS, width / Self::HEADS))?.transpose(1, 2)?;
        let part = |i: usize| qkv.narrow(1, i * Self::HEADS, Self::HEADS);
        let (cos, sin) = (self.angles.cos()?, self.angles.sin()?);
        let (q, k) = (ops::rope(&part(0)?, &cos, &sin)?, ops::rope_i(&part(1)?, &cos, &sin)?);
        let scale = 1.0 / ((width / Self::HEADS) as f64).sqrt();
        let y = ops::sdpa(&q, &k, &part(2)?, None, true, scale)?;
        let y = self.out.forward(&y.transpose(1, 2)?.reshape((b, t, width))?)?;
        let y = self.after.forward(&ops::add(&x, &y.to_dtype(x.dtype())?)?)?;
        ops::cross_entropy(&self.head.forward(&y)?.reshape((b * t, 6))?, targets)
    }
}

#[test]
fn an_attention_block_learns_in_every_precision() -> candle_amp::Result<()> {
    let _fork = seeded(2);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for masters in [false, true] {
            generator::manual_seed(3);
            let varmap = VarMap::new();
            let storage = if masters { dtype } else { DType::F32 };
            let block = Block::new(nn::var_builder(&varmap, storage, &CPU))?;
            let parameters = Parameters::from_varmap(&varmap);
            // What comes next is what came two before, which a token alone does not tell.
            let token = |i: usize| [1u32, 4, 2, 0, 5, 3, 3, 1, 0][(i / 8 * 3 + i % 8 % 2) % 9];
            let ids = Tensor::from_iter((0..64).map(token), &CPU)?.reshape((8, 8))?;
            let targets = Tensor::from_iter((0..64).map(|i| token(i / 8 * 8 + (i + 1) % 2)), &CPU)?;
            let config = SgdConfig { lr: 0.2, momentum: 0.9, ..Default::default() };
            let mut opt = Sgd::new(parameters.vars(), config)?;
            let (mut scaler, amp) = (GradScaler::default(), Autocast::new(dtype));
            let mut losses = Vec::new();
            for _ in 0..30 {
                let loss = amp.scope(|| block.loss(&ids, &targets))?;
                losses.push(loss.to_scalar::<f32>()?);
                scaler.scale(&loss)?.backward()?;
                assert_eq!(scaler.missing(&parameters), [""; 0], "{dtype:?}");
                let _ = scaler.step(&mut opt)?;
                scaler.update()?;
            }
            let (first, last) = (losses[0], losses[29]);
            assert!(last < 0.2 * first, "{dtype:?}, masters {masters}: {first} to {last}");
        }
    }
    Ok(())
}

#[test]
fn old_names_of_a_checkpoint_are_found() -> Result<()> {
    let (gamma, beta) = (random(1, 4, DType::F32), random(2, 4, DType::F32));
    let stored = [("gamma".to_string(), gamma.clone()), ("beta".to_string(), beta.clone())];
    let vb = VarBuilder::from_tensors(stored.into_iter().collect(), DType::F32, &CPU);
    let norm = nn::layer_norm(4, 1e-5, vb)?;
    assert_same("gamma", norm.weight(), &gamma);
    assert_same("beta", norm.bias().unwrap(), &beta);
    Ok(())
}

#[test]
fn what_does_not_fit_is_said() -> Result<()> {
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    let half = |dims: &[usize]| random(1, dims, DType::F16);
    let x = t(&[3, 4]);
    assert_says(ops::layer_norm(&x, Some(&t(&[3])), None, 1e-5), &["layer_norm: weight", "[4]"]);
    assert_says(ops::layer_norm(&x, None, Some(&t(&[1, 4])), 1e-5), &["layer_norm: bias", "[4]"]);
    assert_says(ops::rms_norm(&t(&[3, 0]), None, 1e-5), &["rms_norm: x", "one element a row"]);
    assert_says(ops::rms_norm(&x, None, -1.0), &["eps is -1", "not below zero"]);
    let ids = Tensor::new(&[1u32, 2], &CPU)?;
    assert_says(ops::layer_norm(&ids, None, None, 1e-5), &["x is U32", "F16, BF16, F32 or F64"]);
    assert_says(ops::group_norm(&x, 3, None, None, 1e-5), &["group_norm: x", "3 | c"]);
    assert_says(ops::group_norm(&x, 0, None, None, 1e-5), &["num_groups is 0", "at least 1"]);
    let norm = nn::GroupNorm::new(t(&[4]), t(&[4]), 4, 3, 1e-5);
    assert_says(norm, &["num_groups is 3", "divisor"]);
    let norm = nn::GroupNorm::new(t(&[4]), t(&[4]), 4, 2, 1e-5)?;
    assert_says(norm.forward(&t(&[1, 6, 2])), &["group_norm: x has shape [1, 6, 2]", "(n, 4, …)"]);

    let table = t(&[5, 2]);
    assert_says(ops::embedding(&ids, &t(&[5])), &["embedding: table", "(rows, d)"]);
    assert_says(ops::embedding(&x, &table), &["embedding: ids is F32", "U8, U32 or I64"]);
    assert_says(ops::embedding(&ids, &ids), &["embedding: table is U32"]);
    let wrong = Tensor::new(&[[0i64, 4, 1], [3, 5, -1]], &CPU)?;
    assert_says(ops::embedding(&wrong, &table), &["the id at [1, 1] is 5", "one of 5 rows"]);
    assert_says(ops::embedding(&wrong.t()?, &table), &["the id at [1, 1] is 5"]);
    let negative = Tensor::new(&[0i64, i64::from(u32::MAX) + 1, -1], &CPU)?;
    assert_says(ops::embedding(&negative, &table), &["the id at [1] is 4294967296"]);
    assert_says(ops::embedding(&negative.narrow(0, 2, 1)?, &table), &["the id at [0] is -1"]);

    let x = t(&[2, 3, 5, 4]);
    let (cos, short) = (t(&[5, 2]), t(&[4, 2]));
    assert_says(ops::rope(&t(&[5, 4]), &cos, &cos), &["rope: x", "(b, h, t, d), d even"]);
    assert_says(ops::rope(&t(&[1, 1, 5, 3]), &cos, &cos), &["rope: x", "d even"]);
    assert_says(ops::rope_thd(&t(&[1, 1, 5, 3]), &cos, &cos), &["rope: x", "(b, t, h, d)"]);
    assert_says(ops::rope(&x, &short, &short), &["rope: cos", "5 positions at least"]);
    assert_says(ops::rope(&x, &t(&[3, 5, 2]), &cos), &["rope: cos", "(2, positions, 2)"]);
    assert_says(ops::rope(&x, &cos, &t(&[6, 2])), &["rope: sin", "both cos and sin"]);
    assert_says(ops::rope(&x, &ids, &cos), &["rope: cos is U32"]);

    let (q, k) = (t(&[2, 4, 5, 3]), t(&[2, 2, 6, 3]));
    let sdpa = |q: &Tensor, k: &Tensor, v: &Tensor| ops::sdpa(q, k, v, None, false, 1.0);
    assert_says(sdpa(&t(&[4, 5, 3]), &k, &k), &["sdpa: q", "(b, h, t, d)"]);
    assert_says(sdpa(&q, &t(&[2, 3, 6, 3]), &k), &["sdpa: k", "h_kv | 4"]);
    assert_says(sdpa(&q, &t(&[2, 2, 6, 4]), &k), &["sdpa: k", "(2, h_kv, s, 3)"]);
    assert_says(sdpa(&q, &k, &t(&[2, 2, 5, 3])), &["sdpa: v", "(2, 2, 6, dv)"]);
    assert_says(sdpa(&q, &half(&[2, 2, 6, 3]), &k), &["sdpa: k is F16", "Autocast"]);
    assert_says(ops::sdpa(&q, &k, &k, None, false, f64::NAN), &["scale is NaN", "finite"]);
    let capped = ops::sdpa_softcapped(&q, &k, &k, None, false, 1.0, 0.0);
    assert_says(capped, &["softcap is 0", "above zero"]);
    let packed = |qkv: &[usize], heads| ops::sdpa_packed(&t(qkv), heads, false, 1.0);
    assert_says(packed(&[2, 3, 16], 2), &["sdpa: qkv has shape [2, 3, 16]", "3 · 2 heads · d"]);
    assert_says(packed(&[2, 3], 1), &["sdpa: qkv has shape [2, 3]"]);
    assert_says(packed(&[2, 3, 6], 0), &["heads is 0, expected at least 1"]);
    let masked = |mask: &Tensor| ops::sdpa(&q, &k, &k, Some(mask), false, 1.0);
    assert_says(masked(&t(&[4, 6])), &["sdpa: mask", "[2, 4, 5, 6]"]);
    assert_says(masked(&t(&[1, 2, 4, 5, 6])), &["sdpa: mask", "broadcasts"]);
    assert_says(masked(&Tensor::ones((5, 6), DType::U32, &CPU)?), &["mask is U32", "1 attends"]);
    masked(&half(&[4, 1, 6])).map(drop)
}
