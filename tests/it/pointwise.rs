//! Activations, arithmetic and losses beside candle_nn's, where those are right.

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, Cast, GradScaler, Op, Policy, nn, ops};
use candle_core::{DType, Device, Module, Result, Tensor, Var};

use crate::util::{FLOATS, assert_close, assert_same, random, seeded, to_vec};

const CPU: Device = Device::Cpu;

#[test]
fn activations_are_candles() -> Result<()> {
    use candle_nn::Activation as Theirs;
    let x = (random(1, (5, 34), DType::F32) * 5.0)?;
    for theirs in [
        Theirs::Gelu,
        Theirs::NewGelu,
        Theirs::Relu,
        Theirs::Relu2,
        Theirs::Relu6,
        Theirs::Silu,
        Theirs::Sigmoid,
        Theirs::HardSigmoid,
        Theirs::Swiglu,
        Theirs::Swish,
        Theirs::Mish,
        Theirs::HardSwish,
        Theirs::Elu(0.5),
        Theirs::LeakyRelu(0.1),
        Theirs::GeluPytorchTanh,
    ] {
        let ours = nn::Activation::from(theirs).forward(&x)?;
        assert_close(&format!("{theirs:?}"), &ours, &theirs.forward(&x)?, DType::F32, 8.0);
    }
    for (count, x) in [(None, x.clone()), (Some(34), x)] {
        let varmap = nn::VarMap::new();
        let vb = nn::VarBuilder::from_varmap(&varmap, DType::F32, &CPU);
        let ours = nn::prelu(count, vb.clone())?;
        let theirs = candle_nn::prelu(count, vb)?;
        assert_close("prelu", &ours.forward(&x)?, &theirs.forward(&x)?, DType::F32, 2.0);
        assert_eq!(
            (ours.weight().dims(), ours.is_scalar()),
            (theirs.weight().dims(), theirs.is_scalar())
        );
    }
    Ok(())
}

/// PyTorch's `threshold_backward` and `hardtanh_backward` compare NaN with the ends, and pass its gradient on.
#[test]
fn relus_pass_on_the_gradient_of_nan() -> Result<()> {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let relus: [Function; 5] = [
        ops::relu,
        ops::relu6,
        |x| ops::add_relu(x, &x.zeros_like()?),
        |x| {
            let shape = (x.elem_count(), 1);
            let zeros = Tensor::zeros(shape, x.dtype(), &CPU)?;
            // Normalised, zeros are zeros.
            Ok(ops::batch_norm_relu(&zeros, None, None, Some(&x.reshape(shape)?), 1.0)?.0)
        },
        |x| {
            let zeros = Tensor::zeros((2, x.elem_count()), x.dtype(), &CPU)?;
            ops::batch_norm_relu6(&zeros, None, Some(x), 1.0)?.0.narrow(0, 0, 1)
        },
    ];
    for (number, relu) in relus.into_iter().enumerate() {
        for dtype in FLOATS {
            let x =
                Tensor::new(&[f64::NAN, -1.0, 0.0, 2.0, -0.0, f64::NEG_INFINITY, f64::NAN], &CPU)?;
            let x = Var::from_tensor(&x.to_dtype(dtype)?)?;
            let y = relu(&x)?.flatten_all()?;
            let weights = Tensor::arange(1f64, 8.0, &CPU)?.to_dtype(dtype)?;
            let store = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
            let expected = [1.0, 0.0, 0.0, 4.0, 0.0, 0.0, 7.0];
            assert_eq!(to_vec(store.get(&x).unwrap()), expected, "{number} {dtype:?}");
        }
    }
    Ok(())
}

/// `v` as it is, or with `READS` what the default says of an operator.
struct Same<const READS: bool>;

impl<const READS: bool> Operator for Same<READS> {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("same", Cast::Keep)
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        READS
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::shared(ctx.gradient.clone()))])
    }
}

/// An optimizer's step between forward and backward is an error only where backward reads what it wrote.
#[test]
fn operators_say_which_inputs_backward_reads() -> candle_amp::Result<()> {
    type Function = fn(&Tensor) -> Result<Tensor>;
    let operators: [(&str, Function, bool); 17] = [
        ("relu", ops::relu, false),
        ("add_relu", |x| ops::add_relu(x, x), false),
        ("dropout", |x| ops::dropout(x, 0.5), false),
        ("flatten", ops::flatten, false),
        ("add", |x| ops::add(x, x), false),
        ("cat", |x| ops::cat(&[x, x], 0), false),
        ("mean", |x| ops::mean_dims(x, 1), false),
        ("stack", |x| ops::stack(&[x, x], 0), false),
        ("broadcast_as", |x| ops::broadcast_as(x, (2, 3, 4)), false),
        ("cumsum", |x| ops::cumsum(x, 0), false),
        ("index_select", |x| ops::index_select(x, &Tensor::new(&[1u32, 1], &CPU)?, 0), false),
        ("norm", ops::norm, true),
        ("silu", ops::silu, true),
        ("mul", |x| ops::mul(x, x), true),
        ("mul by a constant", |x| ops::mul(x, &x.detach().ones_like()?), false),
        ("a user's", |x| apply(Same::<true>, &[x]), true),
        ("a user's that reads nothing", |x| apply(Same::<false>, &[x]), false),
    ];
    for (name, f, reads) in operators {
        let w = Var::from_tensor(&random(1, (3, 4), DType::F32))?;
        let old = ops::sum(&f(&w)?)?;
        let mut scaler = GradScaler::disabled();
        let mut sgd = Sgd::new(vec![w.clone()], SgdConfig::default())?;
        scaler.scale(&ops::sum(&w)?)?.backward()?;
        assert!(!scaler.step(&mut sgd)?.skipped()?);
        scaler.update()?;
        assert_eq!(scaler.scale(&old)?.backward().is_err(), reads, "{name}");
    }
    Ok(())
}

#[test]
fn losses_are_candles() -> Result<()> {
    let (a, b) = (random(1, (7, 5), DType::F32), random(2, (7, 5), DType::F32));
    let classes = Tensor::new(&[0u32, 4, 2, 2, 1, 3, 0], &CPU)?;
    let certain = b.ge(0f32)?;
    let close = |what, ours: Tensor, theirs: Tensor| {
        assert_close(what, &ours, &theirs, DType::F32, 8.0);
    };
    use candle_nn::loss as theirs;
    close("mse", nn::loss::mse(&a, &b)?, theirs::mse(&a, &b)?);
    close("huber", nn::loss::huber(&a, &b, 0.5)?, theirs::huber(&a, &b, 0.5)?);
    let log = ops::log_softmax(&a, 1)?;
    close("nll", nn::loss::nll(&log, &classes)?, theirs::nll(&log, &classes)?);
    let (ours, theirs) =
        (nn::loss::cross_entropy(&a, &classes)?, theirs::cross_entropy(&a, &classes)?);
    close("cross entropy", ours, theirs);
    let ours = nn::loss::binary_cross_entropy_with_logit(&a, &certain)?;
    let certain = certain.to_dtype(DType::F32)?;
    close("bce", ours, candle_nn::loss::binary_cross_entropy_with_logit(&a, &certain)?);
    let ours = nn::loss::binary_cross_entropy(&ops::sigmoid(&a)?, &certain)?;
    close("bce", ours, candle_nn::loss::binary_cross_entropy_with_logit(&a, &certain)?);
    Ok(())
}

#[test]
fn autocast_refuses_binary_cross_entropy_and_says_what_to_use() -> Result<()> {
    let p = random(1, 8, DType::F32).affine(0.4, 0.5)?;
    let loss = |amp: &Autocast| amp.scope(|| ops::binary_cross_entropy(&p, &p));
    let error = loss(&Autocast::new(DType::F16)).unwrap_err().to_string();
    assert!(error.contains("F16 refuses `binary_cross_entropy`"), "{error}");
    assert!(error.contains("binary_cross_entropy_with_logit"), "{error}");
    assert!(loss(&Autocast::disabled()).is_ok());
    assert!(loss(&Autocast::new(DType::F32)).is_ok());
    let policy = Policy::default().with(Op::BinaryCrossEntropy, Cast::Full);
    assert!(loss(&Autocast::new(DType::F16).with_policy(policy)).is_ok());
    Ok(())
}

#[test]
fn what_is_broadcast_gets_a_gradient_that_does_not_saturate() -> Result<()> {
    for dtype in FLOATS {
        let x = Tensor::ones((4096, 3), dtype, &CPU)?;
        let gradient = |f: fn(&Tensor, &Tensor) -> Result<Tensor>| {
            let bias = Var::ones(3, dtype, &CPU)?;
            let store = ops::sum(&f(&x, &bias)?)?.backward()?;
            Ok::<_, candle_core::Error>(to_vec(store.get(&bias).unwrap()))
        };
        assert_eq!(gradient(ops::add)?, [4096.0; 3], "{dtype:?}");
        assert_eq!(gradient(ops::sub)?, [-4096.0; 3], "{dtype:?}");
        assert_eq!(gradient(ops::mul)?, [4096.0; 3], "{dtype:?}");
        assert_eq!(gradient(ops::div)?, [-4096.0; 3], "{dtype:?}");
        assert_eq!(gradient(ops::maximum)?, [2048.0; 3], "{dtype:?}");
        assert_eq!(gradient(|x, b| ops::minimum(&(x + 1.0)?, b))?, [4096.0; 3], "{dtype:?}");
        assert_eq!(gradient(|x, b| ops::where_cond(&x.eq(1f64)?, b, x))?, [4096.0; 3], "{dtype:?}");
        let slope = Var::ones(1, dtype, &CPU)?;
        let store = ops::sum(&ops::prelu(&x.neg()?, &slope)?)?.backward()?;
        assert_eq!(to_vec(store.get(&slope).unwrap()), [-3.0 * 4096.0], "{dtype:?}");
    }
    Ok(())
}

#[test]
fn parts_of_every_dtype_are_joined_in_the_widest() -> Result<()> {
    let part = |dtype| Var::from_tensor(&random(3, (2, 2), dtype));
    let (half, full) = (part(DType::BF16)?, part(DType::F32)?);
    assert!(ops::cat(&[&half, &full], 0).is_err(), "outside a scope they must agree");
    let y = Autocast::new(DType::BF16).scope(|| ops::cat(&[&half, &full], 0))?;
    assert_eq!((y.dtype(), y.dims()), (DType::F32, &[4, 2][..]));
    let store = ops::sum(&y)?.backward()?;
    for var in [&half, &full] {
        let gradient = store.get(var).unwrap();
        assert_eq!((gradient.dtype(), to_vec(gradient)), (var.dtype(), vec![1.0; 4]));
    }
    Ok(())
}

#[test]
fn errors_say_what_would_do() {
    let message = |result: Result<Tensor>| result.unwrap_err().to_string();
    let t = |dims: &[usize]| random(1, dims, DType::F32);
    for (got, expected) in [
        (
            message(ops::mul(&t(&[2, 3]), &t(&[2]))),
            "mul: b has shape [2], expected one that broadcasts with that of a, [2, 3]",
        ),
        (
            message(ops::where_cond(&t(&[2]), &t(&[2]), &t(&[2]))),
            "where_cond: condition is F32, expected U8, U32 or I64, as comparisons give",
        ),
        (
            message(ops::where_cond(&t(&[2]).gt(0f32).unwrap(), &t(&[3]), &t(&[1]))),
            "condition has shape [2], expected one that broadcasts with that of the others, [3]",
        ),
        (message(ops::swiglu(&t(&[2, 3]))), "an even last dimension"),
        (message(ops::prelu(&t(&[2, 3]), &t(&[2]))), "one element, or one a channel of x, [2, 3]"),
        (message(ops::cat(&[], 0)), "cat was given no tensors"),
        (
            message(ops::cat(&[&t(&[2, 3]), &t(&[2, 2])], 0)),
            "expected [2, 3], that of the first, but for dimension 0",
        ),
        (
            message(ops::huber(&t(&[2]), &t(&[2]), 0.0)),
            "delta is 0, expected a finite number above 0",
        ),
        (message(ops::mse(&t(&[2]), &t(&[1, 2]))), "mse: target has shape [1, 2], expected [2]"),
    ] {
        assert!(got.contains(expected), "{got}");
    }
    let integers = Tensor::new(&[1u32, 2], &CPU).unwrap();
    let error = message(ops::silu(&integers));
    assert!(error.contains("silu: x is U32, expected F16, BF16, F32 or F64"), "{error}");
}

#[test]
fn dropout_of_nothing_is_its_input_and_draws_nothing() -> Result<()> {
    let x = random(9, (3, 5), DType::F32);
    let _fork = seeded(3);
    assert_eq!(ops::dropout(&x, 0.0)?.id(), x.id());
    let after = ops::dropout(&x, 0.5)?;
    candle_amp::random::manual_seed(3);
    assert_same("what is drawn next", &ops::dropout(&x, 0.5)?, &after);
    // Nor where the policy casts it.
    let amp = Autocast::new(DType::BF16).allow(Op::Dropout);
    candle_amp::random::manual_seed(3);
    let cast = amp.scope(|| ops::dropout(&x, 0.0))?;
    assert_same("cast", &cast, &x.to_dtype(DType::BF16)?);
    assert_same("what is drawn next", &ops::dropout(&x, 0.5)?, &after);
    Ok(())
}
