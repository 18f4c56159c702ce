//! Every instruction set of this processor against plain loops.

use half::bf16;

use super::*;
use crate::kernels::gemm::micro::InstructionSet;

/// Sizes around the edges of tiles, blocks, lines and parts: images, output channels, kernel, geometry.
pub(super) fn edges() -> Vec<([usize; 4], usize, usize, Geometry)> {
    let small = [
        ([2, 2, 1, 1], 2, 1, geometry(1, 0, 1, 1)),
        ([1, 2, 3, 5], 3, 2, geometry(1, 1, 1, 1)),
        ([1, 4, 3, 4], 2, 2, geometry(2, 1, 1, 2)),
    ];
    if cfg!(miri) {
        return small.to_vec();
    }
    let all = [
        ([3, 3, 5, 33], 17, 3, geometry(1, 1, 1, 1)),
        ([5, 3, 37, 32], 19, 3, geometry(1, 1, 1, 1)),
        ([2, 4, 60, 29], 70, 3, geometry(1, 2, 1, 1)),
        ([19, 1, 6, 50], 9, 3, geometry(1, 0, 1, 1)),
        ([2, 2, 3, 46], 8, 3, geometry(1, 0, 1, 1)),
        // First layers, of both formats.
        ([3, 2, 9, 28], 29, 3, geometry(1, 2, 1, 1)),
        ([4, 3, 11, 18], 16, 3, geometry(1, 0, 1, 1)),
        ([2, 16, 32, 32], 16, 3, geometry(1, 1, 1, 1)),
        ([5, 33, 8, 8], 15, 3, geometry(1, 1, 1, 1)),
        ([37, 5, 7, 7], 9, 3, geometry(1, 1, 1, 1)),
        ([2, 4, 3, 70], 4, 3, geometry(2, 1, 1, 2)),
        ([3, 6, 15, 17], 34, 3, geometry(2, 1, 1, 1)),
        ([2, 31, 9, 16], 8, 1, geometry(2, 0, 1, 1)),
        ([2, 4, 19, 11], 3, 5, geometry(3, 2, 2, 1)),
        ([2, 8, 12, 12], 8, 3, geometry(1, 3, 2, 4)),
        ([2, 40, 40, 31], 6, 2, geometry(1, 0, 1, 1)),
        ([2, 20, 40, 31], 33, 3, geometry(1, 1, 1, 1)),
        ([3, 5, 2, 2], 530, 3, geometry(1, 1, 1, 1)),
        ([40, 18, 4, 4], 20, 3, geometry(1, 1, 1, 1)),
        // Groups of two blocks of output channels, of odd channels, and rows that are shifted.
        ([3, 32, 8, 8], 160, 1, geometry(1, 0, 1, 2)),
        ([3, 32, 8, 8], 144, 1, geometry(1, 0, 1, 2)),
        ([3, 6, 7, 7], 150, 3, geometry(1, 1, 1, 2)),
        ([2, 18, 9, 32], 22, 3, geometry(1, 1, 1, 2)),
        ([2, 6, 9, 34], 10, 3, geometry(1, 1, 1, 2)),
        ([2, 6, 9, 32], 5, 3, geometry(1, 2, 2, 1)),
        // Two blocks of channels and of output channels, and results that are far from the nearest cache.
        ([4, 136, 8, 8], 80, 3, geometry(1, 1, 1, 1)),
        ([2, 64, 12, 12], 80, 3, geometry(1, 1, 1, 1)),
        ([2, 3, 16, 32], 520, 3, geometry(1, 1, 1, 1)),
        // Rows of padding alone.
        ([1, 8, 9, 9], 8, 3, geometry(1, 66, 1, 1)),
    ];
    [&small[..], &all].concat()
}

/// Every instruction set of this processor, and the products that stand in where there is none, on sizes around
/// the edges of tiles, blocks, lines and parts.
#[test]
fn every_instruction_set_agrees_with_plain_loops() -> Result<()> {
    let of_bf16 = [InstructionSet::Avx512Bf16, InstructionSet::AmxBf16];
    let of_bf16 = of_bf16.into_iter().filter(|isa| isa.is_runnable());
    let isas: Vec<_> = InstructionSet::of_f32().chain(of_bf16).collect();
    let mut rng = generator(21);
    for (dims, c_out, kernel, geometry) in edges() {
        let weight_dims = [c_out, dims[1] / geometry.groups, kernel, kernel];
        let shape = Shape::new(&dims, &weight_dims, geometry)?;
        let x = random(&mut rng, &dims, DType::BF16);
        let weight = random(&mut rng, &weight_dims, DType::BF16);
        let grad = random(&mut rng, &shape.out_dims(), DType::BF16);
        let bias = random(&mut rng, &[c_out], DType::F32);
        let (xs, ws, gs, bs) = (doubles(&x), doubles(&weight), doubles(&grad), doubles(&bias));
        let [mut y, dx, dw] = plain_loops(&shape, [&xs, &ws, &gs]);
        y.iter_mut().enumerate().for_each(|(i, y)| y.add(bs[i / shape.pixels() % c_out]));
        let inputs = [DType::BF16, DType::F32];
        let last = Shape { geometry: turned(geometry), ..shape };
        let by_tiles = tolerant([&y, &dx, &dw], [&xs, &ws, &gs], &shape);
        let by_tiles_last = tolerant([&y, &dx, &dw], [&xs, &ws, &gs], &last);
        let exact = [y, dx, dw];
        for &isa in &isas {
            let of = |by_tiles: &[Vec<Sum>; 3], shape: &Shape| {
                let sums = if isa.is_f32() { by_tiles } else { &exact };
                winograd::tolerant_of_large(sums.clone(), [&xs, &ws, &gs], shape, isa)
            };
            let [y, dx, dw] = &of(&by_tiles, &shape);
            let what = format!("{isa:?} {shape:?}");
            let single = packed::forward::<f32>(&x, &weight, Some(&bias), &shape, isa)?;
            check(&single, y, &inputs, &what);
            let half = packed::forward::<bf16>(&x, &weight, Some(&bias), &shape, isa)?;
            check(&half, y, &inputs, &what);
            let back = packed::dgrad::<f32>(&grad, &weight, None, &shape, isa)?;
            check(&back, dx, &inputs, &what);
            let back = packed::dgrad::<bf16>(&grad, &weight, None, &shape, isa)?;
            check(&back, dx, &inputs, &what);
            let dweight = packed::wgrad(&x, &grad, &shape, isa)?;
            check(&dweight, dw, &inputs, &what);

            let what = format!("channels last, {what}");
            let [y, dx, dw] = &of(&by_tiles_last, &last);
            let [x, grad] = [to_nhwc(&x)?, to_nhwc(&grad)?];
            let shape = Shape::new(x.dims(), &weight_dims, turned(geometry))?;
            let single = packed::forward::<f32>(&x, &weight, Some(&bias), &shape, isa)?;
            check(&to_nchw(&single)?, y, &inputs, &what);
            let half = packed::forward::<bf16>(&x, &weight, Some(&bias), &shape, isa)?;
            check(&to_nchw(&half)?, y, &inputs, &what);
            let back = packed::dgrad::<f32>(&grad, &weight, None, &shape, isa)?;
            check(&to_nchw(&back)?, dx, &inputs, &what);
            let back = packed::dgrad::<bf16>(&grad, &weight, None, &shape, isa)?;
            check(&to_nchw(&back)?, dx, &inputs, &what);
            let dweight = packed::wgrad(&x, &grad, &shape, isa)?;
            check(&dweight, dw, &inputs, &what);
        }
        let what = format!("no instruction set {shape:?}");
        let [y, dx, dw] = &exact;
        check(
            &super::super::cpu::forward::<bf16>(&x, &weight, Some(&bias), &shape)?,
            y,
            &inputs,
            &what,
        );
        let back = super::super::cpu::dgrad::<bf16>(&grad, &weight, None, &shape)?;
        check(&back, dx, &inputs, &what);
        check(&super::super::cpu::wgrad::<f32>(&x, &grad, &shape)?, dw, &inputs, &what);
    }
    Ok(())
}
