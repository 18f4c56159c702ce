//! Tests convolutions whose kernel is as large as the image.

use super::*;
use crate::kernels::conv::algorithm::Algorithm;
use crate::kernels::cuda::PassKind;

/// One product of all numbers of each image.
#[test]
fn kernels_as_large_as_the_image() {
    let mut rng = generator(17);
    for (dims, c_out) in
        [([5, 7, 4, 4], 9), ([33, 3, 2, 5], 1), ([1, 1, 3, 1], 4), ([2, 40, 1, 6], 17)]
    {
        for (stride, dtype) in [(1, DType::F32), (3, DType::BF16), (1, DType::F16)] {
            let x = random(&mut rng, &dims, dtype);
            let weight = random(&mut rng, &[c_out, dims[1], dims[2], dims[3]], dtype);
            let bias = random(&mut rng, &[c_out], DType::F32);
            compare(&x, &weight, Some(&bias), dtype, geometry(stride, 0, 1, 1), dtype);
        }
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
