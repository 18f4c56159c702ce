//! Stacks of layers without a struct, in both layouts.

use candle_amp::nn::{
    self, Activation, AvgPool2d, Dropout, GlobalAvgPool2d, MaxPool2d, Module, ModuleT, VarMap,
};
use candle_amp::{Autocast, GradScaler, Parameters, ops, random as generator};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::util::{FLOATS, assert_close, assert_same, random, seeded};

/// Convolution, norm, activation, pools, flatten, linear; the same weights in either layout.
fn stack(varmap: &VarMap, last: bool) -> Result<nn::SequentialT> {
    let vb = nn::var_builder(varmap, DType::F32, &Device::Cpu);
    let config = nn::Conv2dConfig { padding: 1, ..Default::default() };
    let conv = nn::conv2d_no_bias(3, 6, 3, config, vb.pp("conv"))?;
    let norm = nn::batch_norm(6, 1e-5, vb.pp("norm"))?;
    let (max, avg) = (MaxPool2d::new(3).with_stride(2).with_padding(1), AvgPool2d::new((1, 2)));
    let out = nn::linear(6 * 4 * 2, 5, vb.pp("out"))?;
    let model = match last {
        true => nn::seq_t().add(conv.channels_last()).add(norm.channels_last()),
        false => nn::seq_t().add(conv).add(norm),
    };
    let model = model.add(Activation::Relu);
    let model = match last {
        true => model.add(max.channels_last()).add(avg.channels_last()),
        false => model.add(max).add(avg),
    };
    let model = match last {
        true => model.add(nn::Flatten::new().channels_last()),
        false => model.add(nn::Flatten::new()),
    };
    Ok(nn::seq_t().add(model.add(Dropout::new(0.5))).add(out))
}

#[test]
fn a_stack_is_its_layers_in_both_layouts() -> candle_amp::Result<()> {
    let _fork = seeded(1);
    let varmap = VarMap::new();
    let (first, last) = (stack(&varmap, false)?, stack(&varmap, true)?);
    assert_eq!((first.len(), nn::seq_t().is_empty()), (2, true));
    let x = random(1, (4, 3, 7, 9), DType::F32);
    let parameters = Parameters::from_varmap(&varmap);
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let config = nn::Conv2dConfig { padding: 1, ..Default::default() };
    let conv = nn::conv2d_no_bias(3, 6, 3, config, vb.pp("conv"))?;
    let norm = nn::batch_norm(6, 1e-5, vb.pp("norm"))?;
    let out = nn::linear(6 * 4 * 2, 5, vb.pp("out"))?;
    let by_hand = |x: &Tensor, train: bool| -> Result<Tensor> {
        let y = ops::relu(&norm.forward_t(&conv.forward(x)?, train)?)?;
        let y = ops::avg_pool2d(&ops::max_pool2d(&y, 3, 2, 1)?, (1, 2), (1, 2), 0)?;
        let y = ops::flatten(&y)?;
        out.forward(&if train { ops::dropout(&y, 0.5)? } else { y })
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let amp = Autocast::new(dtype);
        // Dropout draws by position, and flattened positions are the same in both layouts.
        let run = |train: bool, f: &dyn Fn() -> Result<Tensor>| -> candle_amp::Result<_> {
            generator::manual_seed(5);
            let y = amp.scope(f)?;
            let mut scaler = GradScaler::disabled();
            if train {
                let loss = ops::sum(&ops::square(&y.to_dtype(DType::F32)?)?)?;
                scaler.scale(&loss)?.backward()?;
            }
            let vars = parameters.vars();
            let gradients: Vec<_> =
                vars.iter().map(|v| scaler.grad(v)).collect::<candle_amp::Result<_>>()?;
            Ok((y, gradients))
        };
        let turned = x.permute((0, 2, 3, 1))?;
        for train in [true, false] {
            let hand = run(train, &|| by_hand(&x, train))?;
            let stacked = run(train, &|| first.forward_t(&x, train))?;
            let in_last = run(train, &|| last.forward_t(&turned, train))?;
            if dtype == DType::F32 && !train {
                assert_close("evaluation", &stacked.0, &hand.0, dtype, 4.0);
            }
            assert_close("channels last", &in_last.0, &stacked.0, dtype, 32.0);
            for ((a, b), c) in stacked.1.iter().zip(&in_last.1).zip(&hand.1) {
                match (a, b, c) {
                    (Some(a), Some(b), Some(c)) => {
                        assert_same("by hand", a, c);
                        assert_close("channels last", b, a, dtype, 64.0);
                    }
                    (None, None, None) => assert!(!train),
                    _ => panic!("a gradient is missing"),
                }
            }
        }
    }
    Ok(())
}

/// Flatten and concatenation, and their gradients, are those of channels first.
#[test]
fn flatten_and_cat_know_the_layout() -> Result<()> {
    for dtype in FLOATS {
        for shape in [&[2, 3, 4, 5][..], &[2, 3, 7], &[2, 3], &[3], &[0, 3, 2, 2]] {
            let var = Var::from_tensor(&random(1, shape, dtype))?;
            let order: Vec<usize> = match shape.len() {
                rank @ 3.. => [0].into_iter().chain(2..rank).chain([1]).collect(),
                rank => (0..rank).collect(),
            };
            let last = Var::from_tensor(&var.permute(order.as_slice())?.contiguous()?)?;
            let (a, b) = (ops::flatten(&var)?, ops::channels_last::flatten(&last)?);
            assert_same("flatten", &b, &a);
            let of = |y: &Tensor| ops::sum(&ops::square(&ops::tanh(y)?)?)?.backward();
            let (a, b) = (of(&a)?, of(&b)?);
            let expected = a.get(&var).expect("a gradient").permute(order)?;
            assert_same("its gradient", b.get(&last).expect("a gradient"), &expected);
        }
        let (a, b) = (random(1, (2, 3, 4, 5), dtype), random(2, (2, 6, 4, 5), dtype));
        let turn = |x: &Tensor| x.permute((0, 2, 3, 1));
        let first = ops::cat(&[&a, &b], 1)?;
        let last = ops::channels_last::cat(&[&turn(&a)?, &turn(&b)?])?;
        assert_eq!(first.dims(), [2, 9, 4, 5]);
        assert_same("cat", &last, &turn(&first)?);
    }
    let x = random(3, (2, 3, 4, 4), DType::F32);
    let (a, b) = (GlobalAvgPool2d::default(), GlobalAvgPool2d::new().channels_last());
    let same = b.forward(&x.permute((0, 2, 3, 1))?)?;
    assert_close("global", &same, &a.forward(&x)?, DType::F32, 4.0);
    assert!(MaxPool2d::new(0).forward(&x).is_err() && AvgPool2d::new(5).forward(&x).is_err());
    Ok(())
}
