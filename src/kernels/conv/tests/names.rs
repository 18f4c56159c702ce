//! Tests the names by which a trace says which algorithm computed a pass.

use super::*;
use crate::kernels::choice::algorithm::take;
use crate::kernels::conv::algorithm::Algorithm;
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
    let (geometry, f32) = (geometry(1, 1, 1, 1), DType::F32);
    for (c_in, expected) in [(32, names.winograd), (3, names.few_channels)] {
        let x = random(&mut rng, &[2, c_in, 32, 32], f32);
        let weight = random(&mut rng, &[32, c_in, 3, 3], f32);
        let grad = random(&mut rng, &[2, 32, 32, 32], f32);
        let shape = Shape::new(x.dims(), weight.dims(), geometry).unwrap();
        let Some(InstructionSet::F32(_)) = packed::isa(PassKind::Forward, [&x, &weight], &shape)
        else {
            continue; // by AMX
        };
        assert_eq!(by(forward(&x, &weight, None, geometry, f32)), expected);
        assert_eq!(by(wgrad(&x, &grad, weight.dims(), geometry, f32)), expected);
        let dx = dgrad(&grad, &weight, None, x.dims(), geometry, f32);
        assert!(by(dx) == names.winograd || c_in == 3);
        let mut numbers = values(&x);
        numbers[77] = f64::INFINITY;
        let x = of(numbers, x.dims(), f32);
        assert_eq!(by(forward(&x, &weight, None, geometry, f32)), names.packed);
        assert_eq!(by(wgrad(&x, &grad, weight.dims(), geometry, f32)), names.packed);
    }
}

/// A kernel as large as the image leaves one pixel, and a product of whole images; not so with padding, or in groups.
#[test]
fn a_kernel_as_large_as_the_image_is_a_product() {
    let of = |dims: [usize; 4]| Tensor::zeros(&dims, DType::F32, &Device::Cpu).unwrap();
    for (padding, groups, product) in [(0, 1, true), (1, 1, false), (0, 2, false)] {
        let (x, weight) = ([3, 6, 4, 5], [8, 6 / groups, 4, 5]);
        let shape = Shape::new(&x, &weight, geometry(1, padding, 1, groups)).unwrap();
        let (x, weight, grad) = (of(x), of(weight), of(shape.out_dims()));
        for (pass, operands) in [
            (PassKind::Forward, [&x, &weight]),
            (PassKind::Dgrad, [&grad, &weight]),
            (PassKind::Wgrad, [&x, &grad]),
        ] {
            let algorithm = Algorithm::of(pass, operands, None, &shape);
            assert_eq!(matches!(algorithm, Algorithm::Product), product);
        }
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
