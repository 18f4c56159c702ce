//! Tests convolutions whose kernel is as large as the image.

use super::*;
use crate::kernels::conv::algorithm::Algorithm;
use crate::kernels::cuda::PassKind;

/// One product of all elements of each image.
#[test]
fn kernels_as_large_as_the_image() {
    let mut rng = generator(17);
    for (dims, c_out) in
        [([5, 7, 4, 4], 9), ([33, 3, 2, 5], 1), ([1, 1, 3, 1], 4), ([2, 40, 1, 6], 17)]
    {
        for (stride, dtype) in [(1, DType::F32), (3, DType::BF16), (1, DType::F16)] {
            let x = random(&mut rng, &dims, dtype);
            let bias = random(&mut rng, &[c_out], DType::F32);
            for weights in [dtype, DType::BF16] {
                let weight = random(&mut rng, &[c_out, dims[1], dims[2], dims[3]], weights);
                compare(&x, &weight, Some(&bias), dtype, geometry(stride, 0, 1, 1), dtype);
            }
        }
    }
}

/// A kernel as large as the image leaves one pixel, and a product of whole images; not so with padding, in groups, or with
/// channels last.
#[test]
fn a_kernel_as_large_as_the_image_is_a_product() {
    let of = |dims: [usize; 4]| Tensor::zeros(&dims, DType::F32, &Device::Cpu).unwrap();
    let first = geometry(1, 0, 1, 1);
    for (geometry, image, product) in [
        (first, [4, 5], true),
        (geometry(3, 0, 1, 1), [1, 5], true),
        (geometry(1, 1, 1, 1), [4, 5], false),
        (geometry(1, 0, 1, 2), [4, 5], false),
        (turned(first), [4, 5], false),
    ] {
        let weight = of([8, 6 / geometry.groups, image[0], image[1]]);
        let dims = match geometry.format {
            Format::ChannelsFirst => [3, 6, image[0], image[1]],
            Format::ChannelsLast => [3, image[0], image[1], 6],
        };
        let shape = Shape::new(&dims, weight.dims(), geometry).unwrap();
        let (x, grad) = (of(dims), of(shape.out_dims()));
        for (pass, operands) in [
            (PassKind::Forward, [&x, &weight]),
            (PassKind::Dgrad, [&grad, &weight]),
            (PassKind::Wgrad, [&x, &grad]),
        ] {
            for bias in [None, Some(&of([1, 1, 1, 8]))] {
                let algorithm = Algorithm::of(pass, operands, bias, &shape);
                let is_product = matches!(algorithm, Algorithm::Product);
                assert_eq!(is_product, product, "{}, {shape:?}", pass.name());
            }
        }
    }
}
