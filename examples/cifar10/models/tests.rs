use candle_amp::{Autocast, GradScaler, Parameters, ScaleConfig, nn, ops, random};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;

use super::cost::{Cost, blank};
use super::*;

/// What PyTorch counts for the definitions that are usual for CIFAR-10.
const PARAMETERS: &[(&str, usize)] = &[
    ("mlp", 1_841_162),
    ("resnet8", 78_042),
    // The paper's narrow ones have no projections, and 2,752 less: 0.27, 0.46, 0.66, 0.85 and 1.7 million.
    ("resnet20", 269_722 + 2_752),
    ("resnet32", 464_154 + 2_752),
    ("resnet44", 658_586 + 2_752),
    ("resnet56", 853_018 + 2_752),
    ("resnet110", 1_727_962 + 2_752),
    ("resnet18", 11_173_962),
    ("resnet34", 21_282_122),
    ("resnet50", 23_520_842),
    ("resnet101", 42_512_970),
    ("resnet152", 58_156_618),
    ("preact-resnet18", 11_171_146),
    ("preact-resnet34", 21_279_306),
    ("preact-resnet50", 23_509_066),
    ("preact-resnet101", 42_501_194),
    ("preact-resnet152", 58_144_842),
    ("vgg11", 9_231_114),
    ("vgg13", 9_416_010),
    ("vgg16", 14_728_266),
    ("vgg19", 20_040_522),
    ("senet18", 11_260_354),
    ("googlenet", 6_166_250),
    ("densenet-cifar", 1_000_618),
    ("densenet121", 6_956_298),
    ("densenet169", 12_493_322),
    ("densenet201", 18_104_330),
    ("densenet161", 26_482_378),
    ("resnext29-32x4d", 4_774_218),
    ("resnext29-2x64d", 9_128_778),
    ("resnext29-4x64d", 27_104_586),
    ("resnext29-8x64d", 89_598_282),
    ("dpn26", 11_574_842),
    ("dpn92", 34_236_634),
    ("mobilenet", 3_217_226),
    ("mobilenet-v2", 2_296_922),
    ("shufflenet-g2", 887_582),
    ("shufflenet-g3", 862_768),
    ("shufflenet-v2-x0.5", 352_042),
    ("shufflenet-v2-x1", 1_263_854),
    ("shufflenet-v2-x1.5", 2_488_874),
    ("shufflenet-v2-x2", 5_338_026),
    // Without a convolution that others make and never use.
    ("efficientnet-b0", 3_599_686 - 1_088),
    ("regnetx-200mf", 2_321_946),
    ("regnetx-400mf", 4_779_338),
    ("regnety-400mf", 5_714_362),
    ("dla-simple", 15_142_970),
    ("dla", 16_291_386),
    // 5,717,416 with the patches, positions and classes of ImageNet.
    ("vit-tiny", 5_717_416 - 720 * 192 - 132 * 192 - 990 * 193),
    // Without the 24 biases of the first layer.
    ("airbench", 1_972_792 - 24),
];

fn named(name: &str) -> Architecture {
    name.parse().unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn networks_have_the_parameters_of_pytorchs() -> Result<()> {
    let names: Vec<_> = PARAMETERS.iter().map(|&(name, _)| name).collect();
    assert_eq!(names.join(", "), super::names());
    for &(name, expected) in PARAMETERS {
        assert_eq!(blank(named(name))?.1, expected, "{name}");
    }
    Ok(())
}

/// Weights of a network, in `F32`. Norms shift by `shift` standard deviations, so that rounding moves few numbers across
/// the bend of a relu: each that it does changes gradients by more than rounding.
fn weights(architecture: Architecture, shift: f32) -> Result<VarMap> {
    let varmap = VarMap::new();
    random::manual_seed(1);
    Model::new(architecture, nn::var_builder(&varmap, DType::F32, &Device::Cpu), false)?;
    for (name, var) in Parameters::from_varmap(&varmap).iter() {
        if name.ends_with("norm.bias") {
            var.set(&Tensor::full(shift, var.shape(), &Device::Cpu)?)?;
        }
    }
    Ok(varmap)
}

/// A network of given weights.
struct Twin {
    model: Model,
    parameters: Parameters,
}

impl Twin {
    fn new(architecture: Architecture, varmap: &VarMap, channels_last: bool) -> Result<Self> {
        let dtype = varmap.all_vars()[0].dtype();
        let vb = nn::var_builder(varmap, dtype, &Device::Cpu);
        let model = Model::new(architecture, vb, channels_last)?;
        Ok(Self { model, parameters: Parameters::from_varmap(varmap) })
    }

    /// The logits of a training step, and the gradient of each variable, in `F64`.
    fn step(&self, amp: &Autocast, x: &Tensor, y: &Tensor) -> candle_amp::Result<Vec<Tensor>> {
        random::manual_seed(2);
        let logits = amp.scope(|| self.model.forward(x, true))?;
        let loss = ops::cross_entropy(&logits, y)?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(256.))?;
        scaler.scale(&loss)?.backward()?;
        let mut all = vec![logits.to_dtype(DType::F64)?];
        for (name, var) in self.parameters.iter() {
            let Some(gradient) = scaler.grad(var)? else { panic!("no gradient of {name}") };
            all.push(gradient.to_dtype(DType::F64)?);
        }
        Ok(all)
    }
}

fn norm(x: &Tensor) -> Result<f64> {
    x.sqr()?.sum_all()?.to_scalar::<f64>().map(f64::sqrt)
}

/// Relative errors of a step.
struct Errors {
    logits: f64,
    /// Of all gradients together.
    gradients: f64,
    /// Of the gradient of each variable.
    each: Vec<f64>,
}

/// Of a variable's gradient that is smaller than this part of them all, rounding is compared with the part: sums in it
/// cancel, behind a norm above all, and the rounding of their terms stays.
const SMALL: f64 = 0.1;

impl Errors {
    fn new(got: &[Tensor], exact: &[Tensor]) -> Result<Self> {
        let pairs = got.iter().zip(exact);
        let pairs = pairs.map(|(got, exact)| Ok([norm(&(got - exact)?)?, norm(exact)?]));
        let pairs = pairs.collect::<Result<Vec<[f64; 2]>>>()?;
        let (logits, vars) = (pairs[0], &pairs[1..]);
        let root = |part: usize| vars.iter().map(|pair| pair[part].powi(2)).sum::<f64>().sqrt();
        let [difference, size] = [root(0), root(1)];
        let each = vars.iter().map(|var| var[0] / var[1].max(SMALL * size));
        Ok(Self {
            logits: logits[0] / logits[1],
            gradients: difference / size,
            each: each.collect(),
        })
    }
}

/// A network, the smallest that has its blocks: the side of its images, and how many convolutions and other products
/// lie between image and loss.
type Smallest = (&'static str, usize, f64);

/// Where rounding makes another number of a window the largest, the gradient goes there instead.
const WITH_MAX_POOLS: [Smallest; 3] =
    [("vgg11", 32, 9.), ("googlenet", 16, 22.), ("airbench", 32, 8.)];
const WITHOUT: [Smallest; 19] = [
    ("mlp", 32, 3.),
    ("resnet8", 32, 8.),
    ("resnet50", 16, 50.),
    ("preact-resnet18", 16, 18.),
    ("preact-resnet50", 16, 50.),
    ("senet18", 16, 18.),
    ("densenet-cifar", 16, 121.),
    ("resnext29-32x4d", 8, 29.),
    ("dpn26", 16, 26.),
    ("mobilenet", 32, 28.),
    ("mobilenet-v2", 16, 53.),
    ("shufflenet-g2", 16, 50.),
    ("shufflenet-v2-x0.5", 16, 50.),
    ("efficientnet-b0", 32, 50.),
    ("regnetx-200mf", 8, 41.),
    ("regnety-400mf", 8, 68.),
    ("dla-simple", 16, 33.),
    ("dla", 16, 34.),
    ("vit-tiny", 32, 24.),
];

/// Networks with fewer negative numbers: with norms that shift by 2, numbers that rounding moves across the bend of a relu
/// are most of the error. With norms that shift by 3, hardly a number is negative, and networks would not show a wrong
/// gradient of relu in 16 bits.
const FEW_NEGATIVE: [&str; 3] = ["preact-resnet18", "preact-resnet50", "dla-simple"];

/// A norm undoes what layers before it did to the size of an error, so logits of any depth are within two epsilon of
/// 16 bits; in `F32`, where sums are no more exact than their terms, within sixteen. Errors of gradients come from each
/// product, and independent ones add up as a root does: within four epsilon, or sixteen, times the root of the products. Of
/// maxima, an epsilon for each product is the part whose gradient may go elsewhere: the error is its root. Without
/// them, the gradient of each variable has twice that bound: a wrong one must not hide behind larger ones.
fn check(&(name, side, depth): &Smallest, maxima: bool) -> anyhow::Result<()> {
    let _fork = random::fork_rng_guard();
    let shift = if FEW_NEGATIVE.contains(&name) { 3. } else { 2. };
    let varmap = weights(named(name), shift)?;
    let wide = VarMap::new();
    for (name, var) in varmap.data().lock().expect("no thread has panicked").iter() {
        let var = Var::from_tensor(&var.to_dtype(DType::F64)?)?;
        wide.data().lock().expect("no thread has panicked").insert(name.clone(), var);
    }
    let init = nn::Init::Randn { mean: 0., stdev: 1. };
    let images = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
    let x = images.get_with_hints((2, 3, side, side), "x", init)?.detach();
    let y = Tensor::new(&[3u32, 7], &Device::Cpu)?;
    let exact = Twin::new(named(name), &wide, false)?;
    let exact = exact.step(&Autocast::disabled(), &x.to_dtype(DType::F64)?, &y)?;
    for (dtype, eps, channels_last) in [
        (DType::F32, f64::from(f32::EPSILON), false),
        (DType::F16, 2f64.powi(-10), false),
        (DType::BF16, 2f64.powi(-7), false),
        (DType::F32, f64::from(f32::EPSILON), true),
    ] {
        let amp = match dtype {
            DType::F32 => Autocast::disabled(),
            dtype => Autocast::new(dtype),
        };
        let twin = Twin::new(named(name), &varmap, channels_last)?;
        let Errors { logits, gradients, each } = Errors::new(&twin.step(&amp, &x, &y)?, &exact)?;
        let what = format!("{name}, {dtype:?}, channels last: {channels_last}");
        let units = if dtype == DType::F32 { [16., 16.] } else { [2., 4.] };
        assert!(logits < units[0] * eps, "{what}: logits {logits}");
        let roundings = units[1] * depth.sqrt() * eps;
        let bound = if maxima { (depth * eps).sqrt().max(roundings) } else { roundings };
        assert!(gradients < bound, "{what}: gradients {gradients}");
        for (name, error) in twin.parameters.names().zip(each).filter(|_| !maxima) {
            assert!(error < 2. * bound, "{what}: the gradient of {name} {error}");
        }
    }
    Ok(())
}

/// A few of them, or all where `CANDLE_AMP_NETWORKS=all` asks for that.
fn check_all(networks: &[Smallest], maxima: bool) -> anyhow::Result<()> {
    const SAMPLE: [&str; 7] =
        ["mlp", "resnet8", "mobilenet-v2", "shufflenet-v2-x0.5", "vit-tiny", "vgg11", "airbench"];
    let all = std::env::var("CANDLE_AMP_NETWORKS").is_ok_and(|value| value == "all");
    let mut chosen = networks.iter().filter(|network| all || SAMPLE.contains(&network.0));
    chosen.try_for_each(|network| check(network, maxima))
}

#[test]
fn networks_are_as_exact_as_their_dtype() -> anyhow::Result<()> {
    check_all(&WITHOUT[..10], false)
}

#[test]
fn other_networks_are_as_exact_as_their_dtype() -> anyhow::Result<()> {
    check_all(&WITHOUT[10..], false)?;
    check_all(&WITH_MAX_POOLS, true)
}

#[test]
fn costs_are_counted_by_hand() -> Result<()> {
    let Cost { parameters, flops, saved_bytes } = Cost::of(named("mlp"))?;
    assert_eq!(parameters, 1_841_162);
    assert_eq!(flops, 2 * (3072 * 512 + 512 * 512 + 512 * 10));
    // The image, two relus, the logits, and the target.
    let kept = 3072 + 512 + 512 + 10;
    assert_eq!(saved_bytes, [4 * kept + 4, 2 * kept + 4]);
    let vgg = Cost::of(named("vgg11"))?;
    // Pixels, times inputs and outputs of each convolution.
    let convs = [(1024, 3, 64), (256, 64, 128), (64, 128, 256), (64, 256, 256), (16, 256, 512)];
    let convs = convs.into_iter().chain([(16, 512, 512), (4, 512, 512), (4, 512, 512)]);
    let products: usize = convs.map(|(pixels, from, to)| 9 * pixels * from * to).sum();
    assert_eq!(vgg.flops, 2 * (products + 512 * 10));
    Ok(())
}

#[test]
fn a_prepared_airbench_begins_as_it_should() -> anyhow::Result<()> {
    let _fork = random::fork_rng_guard();
    random::manual_seed(4);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::BF16, &Device::Cpu);
    let architecture = named("airbench");
    Model::new(architecture, vb, false)?;
    let parameters = Parameters::from_varmap(&varmap);
    let images = Tensor::randn(0f32, 1., (20, 3, 8, 8), &Device::Cpu)?;
    architecture.prepare(&parameters, || Ok(images.clone()))?;

    let trained: Vec<String> = parameters.trainable().names().map(str::to_owned).collect();
    let is_frozen = |name: &&str| !trained.iter().any(|trained| trained == name);
    let frozen: Vec<&str> = parameters.names().filter(is_frozen).collect();
    assert_eq!(frozen.len(), 7, "{frozen:?}");
    assert!(frozen.contains(&"whitening.weight") && frozen.contains(&"block3.2.norm.weight"));
    for (name, var) in parameters.iter() {
        let first = match name {
            "whitening.weight" => whitening::filters(&images)?.to_dtype(DType::BF16)?,
            "block2.1.weight" => {
                let kernel = |at| f32::from(u8::from(at % (65 * 9) == 4));
                let values: Vec<f32> = (0..64 * 64 * 9).map(kernel).collect();
                Tensor::from_vec(values, (64, 64, 3, 3), &Device::Cpu)?.to_dtype(DType::BF16)?
            }
            _ => continue,
        };
        let begins = var.narrow(0, 0, first.dim(0)?)?;
        let difference = (begins.to_dtype(DType::F32)? - first.to_dtype(DType::F32)?)?;
        assert_eq!(difference.abs()?.max_all()?.to_scalar::<f32>()?, 0., "{name}");
    }
    Ok(())
}
