//! Tests the names by which a trace says which algorithm computed a pass.

use super::*;
use crate::kernels::choice::algorithm::take;
use crate::kernels::conv::packed;
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::cuda::PassKind;
use crate::kernels::elementwise::testing::{of, values};
use crate::kernels::gemm::micro::InstructionSet;

/// The algorithm of a pass that has run.
fn by(pass: Result<Tensor>) -> &'static str {
    pass.unwrap();
    take().unwrap()
}

/// Winograd's tiles and first layers leave an infinity to others.
#[test]
fn a_pass_is_called_by_what_computed_it() {
    let Some(vectors) = Vectors::widest() else { return };
    let (names, mut rng) = (vectors.names(), generator(15));
    let f32 = DType::F32;
    let passes = [(32, 1, names.winograd), (32, 2, names.winograd), (3, 1, names.few_channels)];
    for ((c_in, stride, expected), last) in passes.into_iter().flat_map(|p| [(p, false), (p, true)])
    {
        let geometry = geometry(stride, 1, 1, 1);
        let geometry = if last { turned(geometry) } else { geometry };
        let image = |x: Tensor| if last { to_nhwc(&x).unwrap() } else { x };
        let x = image(random(&mut rng, &[2, c_in, 32, 32], f32));
        let weight = random(&mut rng, &[32, c_in, 3, 3], f32);
        let grad = image(random(&mut rng, &[2, 32, 32 / stride, 32 / stride], f32));
        let shape = Shape::new(x.dims(), weight.dims(), geometry).unwrap();
        // Others are AMX's.
        let is_f32 = |pass, operands| {
            matches!(packed::isa(pass, operands, &shape), Some(InstructionSet::F32(_)))
        };
        if !is_f32(PassKind::Forward, [&x, &weight]) {
            continue;
        }
        let of_weight = is_f32(PassKind::Wgrad, [&x, &grad]);
        assert_eq!(by(forward(&x, &weight, None, geometry, f32)), expected);
        if of_weight {
            assert_eq!(by(wgrad(&x, &grad, weight.dims(), geometry, f32)), expected);
        }
        let dx = dgrad(&grad, &weight, None, x.dims(), geometry, f32);
        assert!(by(dx) == names.winograd || c_in == 3);
        let mut numbers = values(&x);
        numbers[77] = f64::INFINITY;
        let x = of(numbers, x.dims(), f32);
        assert_eq!(by(forward(&x, &weight, None, geometry, f32)), names.packed);
        if of_weight {
            assert_eq!(by(wgrad(&x, &grad, weight.dims(), geometry, f32)), names.packed);
        }
    }
}

/// Larger tiles compute with operands of one dtype of 16 bits, and leave an infinity to others.
#[test]
fn passes_over_16_bit_operands_are_called_by_what_computed_them() {
    let Some(vectors) = Vectors::widest() else { return };
    let (names, mut rng, geometry) = (vectors.names(), generator(17), geometry(1, 1, 1, 1));
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::BF16);
    for (left, right, large) in [
        (bf16, bf16, true),
        (f16, f16, true),
        (bf16, f32, false),
        (f32, f16, false),
        (f16, bf16, false),
    ] {
        let x = random(&mut rng, &[8, 64, 24, 24], left);
        let weight = random(&mut rng, &[64, 64, 3, 3], right);
        let grad = random(&mut rng, &[8, 64, 24, 24], right);
        let shape = Shape::new(x.dims(), weight.dims(), geometry).unwrap();
        if packed::isa(PassKind::Forward, [&x, &weight], &shape).is_some_and(|isa| isa.is_amx()) {
            continue;
        }
        let large =
            |by: &str| assert_eq!(by == names.large_tiles, large, "{by} {left:?} {right:?}");
        for out in [left, f32] {
            large(by(forward(&x, &weight, None, geometry, out)));
            large(by(dgrad(&x, &weight, None, x.dims(), geometry, out)));
            large(by(wgrad(&x, &grad, weight.dims(), geometry, out)));
        }
        let mut numbers = values(&x);
        numbers[77] = f64::INFINITY;
        let x = of(numbers, x.dims(), left);
        assert!(by(forward(&x, &weight, None, geometry, left)).starts_with("packed, "));
        assert!(by(wgrad(&x, &grad, weight.dims(), geometry, left)).starts_with("packed, "));
    }
}

/// Infinite weights are for loops that meet no padding.
#[test]
fn a_depthwise_gradient_is_called_by_what_computed_it() {
    let mut rng = generator(16);
    let x = random(&mut rng, &[2, 16, 9, 9], DType::F32);
    let geometry = geometry(2, 1, 1, 16);
    for (weight, im2col) in [(0.5f32, false), (f32::INFINITY, true)] {
        let weight = Tensor::full(weight, (16, 1, 3, 3), &Device::Cpu).unwrap();
        let grad = forward(&x, &weight, None, geometry, DType::F32).unwrap();
        let dx = dgrad(&grad, &weight, None, x.dims(), geometry, DType::F32);
        assert_eq!(by(dx) == "im2col", im2col);
    }
}
