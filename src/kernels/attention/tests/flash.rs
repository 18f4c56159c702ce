//! The kernels on tensor cores against F64, and with them every other device at their sizes.

use candle_core::IndexOp;

use super::super::flash::{self, Products};
use super::super::{Algorithm, backward_packed};
use super::*;
use crate::kernels::choice::tf32::set_allow_tf32;
use crate::kernels::cuda::Gpu;
use crate::kernels::testing::devices::{devices, gpus};
use crate::kernels::testing::own_process::in_own_process;

/// `b, h, h_kv, t, s, d, dv`: around blocks of queries and keys, for kernels of both widths.
const SIZES: [[usize; 7]; 5] = [
    [2, 2, 2, 63, 65, 64, 64],
    [1, 4, 2, 64, 64, 40, 40],
    [1, 2, 1, 130, 130, 8, 8],
    [1, 1, 1, 65, 63, 128, 128],
    [1, 2, 2, 130, 63, 72, 72],
];
/// Past the largest block.
const LARGE: [usize; 7] = [1, 2, 1, 195, 200, 128, 128];
const SMALL: [usize; 7] = [1, 2, 1, 70, 66, 8, 8];
const FLOATS: [DType; 3] = [DType::F16, DType::BF16, DType::F32];
/// For what F32 itself is not as good at: large scores, and values far from zero.
const HALF_PRECISION: [DType; 2] = [DType::F16, DType::BF16];

/// Epsilons of the inputs' dtype, relative to the largest and to 1. Of 16 bits what is multiplied, and the result, are within
/// half of one; of F32 sums round, too.
fn slack(dtype: DType) -> f64 {
    if dtype == DType::F32 { 16.0 } else { 2.0 }
}

type Wants = [Option<DType>; 3];

type Way = (Device, Option<Products>);

/// Each device, by each kind of products that it may use.
fn ways() -> Vec<Way> {
    let of = |device: Device| match Gpu::of(&device) {
        None => vec![(device, None)],
        Some(gpu) => match Products::of(gpu, DType::F16).unwrap() {
            Products::OfWarps => vec![(device, Some(Products::OfWarps))],
            Products::OfGroups => [Products::OfWarps, Products::OfGroups]
                .map(|products| (device.clone(), Some(products)))
                .to_vec(),
        },
    };
    devices().into_iter().flat_map(of).collect()
}

/// Kernels count rows in 32 bits.
#[test]
fn more_rows_than_kernels_count_are_for_products() -> Result<()> {
    for device in gpus() {
        let Some(gpu) = Gpu::of(&device) else { continue };
        let row = Tensor::zeros((1, 1, 1, 8), DType::F16, &device)?;
        let fits = |[t, s]: [usize; 2]| {
            let (q, k) = (row.broadcast_as((1, 1, t, 8))?, row.broadcast_as((1, 1, s, 8))?);
            flash::fits(gpu, &q, &k, &k)
        };
        let most = i32::MAX as usize;
        assert_eq!(
            [fits([most, most])?, fits([most + 1, 1])?, fits([1, most + 1])?],
            [true, false, false]
        );
    }
    Ok(())
}

/// By such products, where there is a choice for this tensor.
fn products_for(products: Option<Products>, q: &Tensor) -> Option<(&Gpu, Products)> {
    let products = if q.dtype() == DType::F32 { Products::OfWarps } else { products? };
    Some((Gpu::of(q.device())?, products))
}

/// [`forward`], by such products.
fn forward_by(
    products: Option<Products>,
    [q, k, v]: [&Tensor; 3],
    mask: Option<&Tensor>,
    settings: Settings,
) -> (Tensor, Kept) {
    match products_for(products, q) {
        Some((gpu, products)) if flash::fits(gpu, q, k, v).unwrap() => {
            flash::forward(gpu, products, [q, k, v], mask, settings, false).unwrap()
        }
        _ => forward(q, k, v, mask, settings).unwrap(),
    }
}

/// The gradients there, and back on the CPU.
fn on(
    (device, products): &Way,
    all: &[Tensor; 4],
    mask: Option<&Tensor>,
    settings: Settings,
    [dq, dk, dv]: Wants,
) -> [Option<Tensor>; 3] {
    let [q, k, v, grad] = &all.each_ref().map(|x| on_device(x, device));
    let mask = mask.map(|mask| on_device(mask, device));
    if let Some(gpu) = Gpu::of(device) {
        let able = gpu.compute_capability().unwrap() >= (8, 0);
        assert_eq!(flash::fits(gpu, q, k, v).unwrap(), able);
    }
    let mask = mask.as_ref();
    let kept = &forward_by(*products, [q, k, v], mask, settings).1;
    let saved = Saved { q, k, v, mask, kept, grad };
    let [dq, dk, dv] = match (products_for(*products, q), &kept.unrounded) {
        (Some((gpu, products)), Some(output)) => {
            flash::backward(gpu, products, saved, output, settings, [dq, dk, dv, None]).unwrap()
        }
        _ => {
            let [dq, dk, dv, _] = backward(saved, settings, [dq, dk, dv, None]).unwrap();
            [dq, dk, dv]
        }
    };
    let home = |x: Option<Tensor>| x.map(|x| x.to_device(&Device::Cpu).unwrap());
    [home(dq), home(dk), home(dv)]
}

/// The gradients in F64.
fn exact(all: &[Tensor; 4], mask: Option<&Tensor>, settings: Settings) -> [Vec<f64>; 3] {
    let mask = mask.map(|mask| if mask.dtype() == DType::U8 { mask.clone() } else { double(mask) });
    let [_, oracle] = gradients(&all.each_ref().map(double), mask.as_ref(), settings, DType::F64);
    std::array::from_fn(|i| values(oracle[i].as_ref().unwrap()))
}

/// On every device, by all products there, within [`slack`].
#[track_caller]
fn assert_exact(all: &[Tensor; 4], mask: Option<&Tensor>, settings: Settings, wants: Wants) {
    let expected = exact(all, mask, settings);
    for way in ways() {
        if all[0].dtype() == DType::F32 && way.1 == Some(Products::OfGroups) {
            continue; // those of warps again
        }
        let actual = on(&way, all, mask, settings, wants);
        for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let actual = actual.as_ref().unwrap();
            assert_eq!((Some(actual.dtype()), actual.dims()), (wants[i], all[i].dims()));
            let one = of(vec![1.0], &[1], actual.dtype());
            let actual = Tensor::cat(&[actual.flatten_all().unwrap(), one], 0).unwrap();
            let padded = [expected.as_slice(), &[1.0]].concat();
            assert_within(&actual, &padded, all[0].dtype(), slack(all[0].dtype()));
        }
    }
}

/// As of [`masks`], and those that hide all from every third query.
fn more_masks(sizes: [usize; 7], dtype: DType) -> Vec<Option<Tensor>> {
    let [_, _, _, t, s, ..] = sizes;
    let keep = (0..t * s).map(|i| f64::from(i / s % 3 > 0 && i % 5 != 1)).collect();
    let keep = of(keep, &[t, s], DType::F32);
    let hide = [keep.to_dtype(DType::U8).unwrap(), keep.log().unwrap()];
    masks_of_every_kind(sizes, dtype).into_iter().chain(hide.map(Some)).collect()
}

#[test]
fn gradients_are_those_of_f64() {
    for dtype in FLOATS {
        for sizes in SIZES {
            let scale = 1.0 / (sizes[5] as f64).sqrt();
            let [q, k, v, grad] = inputs(sizes, dtype);
            let [b, h, _, t, .., d] = sizes;
            // Rows that start at odd elements, which are copied.
            let odd = random(&[b, h, t, d + 1], dtype, 7).narrow(3, 1, d).unwrap();
            let grads = [grad, odd];
            let masks = [None, None].into_iter().chain(more_masks(sizes, dtype));
            let cases = masks.zip([PLAIN, CAUSAL, CAPPED].into_iter().cycle());
            for (i, (mask, settings)) in cases.enumerate() {
                let all = [q.clone(), k.clone(), v.clone(), grads[i / 3 % 2].clone()];
                let wants = [dtype, DType::F32, dtype, DType::F32];
                let wants: Wants = std::array::from_fn(|at| Some(wants[at + i % 2]));
                assert_exact(&all, mask.as_ref(), Settings { scale, ..settings }, wants);
            }
        }
    }
}

/// Outputs, in both dtypes, and the two numbers per query.
#[test]
fn outputs_are_those_of_f64() {
    for dtype in FLOATS {
        for sizes in SIZES.into_iter().chain([LARGE]) {
            let scale = 1.0 / (sizes[5] as f64).sqrt();
            let [q, k, v, _] = inputs(sizes, dtype);
            let masks = more_masks(sizes, dtype).into_iter().skip(1).step_by(2);
            let masks = [None, None].into_iter().chain(masks);
            let cases = masks.zip([PLAIN, CAUSAL, CAPPED].into_iter().cycle());
            for (mask, settings) in cases {
                let settings = Settings { scale, ..settings };
                let expected = naive(&q, &k, &v, mask.as_ref(), settings);
                let oracle = forward(&q, &k, &v, mask.as_ref(), settings).unwrap().1;
                for (device, products) in ways() {
                    let [q, k, v] = &[&q, &k, &v].map(|x| on_device(x, &device));
                    let mask = mask.as_ref().map(|mask| on_device(mask, &device));
                    let (out, kept) = forward_by(products, [q, k, v], mask.as_ref(), settings);
                    let home = |x: &Tensor| x.to_device(&Device::Cpu).unwrap();
                    assert_within(&home(&out), &expected, dtype, slack(dtype));
                    if let Some(unrounded) = &kept.unrounded {
                        assert_eq!(unrounded.dtype(), DType::F32);
                        assert_within(&home(unrounded), &expected, dtype, slack(dtype));
                    }
                    for (actual, expected) in
                        [(&kept.max, &oracle.max), (&kept.inverse_sum, &oracle.inverse_sum)]
                    {
                        assert_within(&home(actual), &values(expected), DType::F32, 64.0);
                    }
                }
            }
        }
    }
}

/// Past the largest block, of queries that see fewer keys or more than there are in it.
#[test]
fn gradients_of_several_blocks_are_those_of_f64() {
    let cases = [(DType::F16, 128, CAUSAL), (DType::BF16, 64, CAPPED), (DType::F32, 128, CAUSAL)];
    for (dtype, d, settings) in cases {
        for [t, s] in [[195, 130], [66, 200]] {
            let sizes = [1, 2, 1, t, s, d, d];
            let settings = Settings { scale: 1.0 / (d as f64).sqrt(), ..settings };
            let hide = more_masks(sizes, dtype).into_iter().nth(6).flatten();
            let mask = hide.filter(|_| settings.softcap.is_some());
            assert_exact(&inputs(sizes, dtype), mask.as_ref(), settings, [Some(dtype); 3]);
        }
    }
}

/// They round the same: sums in F32 alone have another order.
#[test]
fn gradients_by_all_products_are_nearly_the_same() {
    let settings = Settings { scale: 0.125, ..CAUSAL };
    for dtype in HALF_PRECISION {
        let all = inputs([1, 2, 1, 70, 66, 64, 64], dtype);
        for ways in ways().chunk_by(|a, b| a.0.same_device(&b.0)) {
            let by = |way| on(way, &all, None, settings, [Some(DType::F32); 3]);
            let [first, others] = [&ways[..1], &ways[1..]].map(|ways| ways.iter().map(by));
            let first: Vec<_> = first.flatten().flatten().collect();
            for other in others {
                for (first, other) in first.iter().zip(other.into_iter().flatten()) {
                    let count = epsilon(dtype) / epsilon(DType::F32) / 16.0;
                    assert_within(&other, &values(first), DType::F32, count);
                }
            }
        }
    }
}

#[test]
fn the_algorithm_is_the_cards() {
    for device in devices() {
        let Some(gpu) = Gpu::of(&device) else { continue };
        let (sixteen, wide) = match gpu.compute_capability().unwrap() {
            (9, 0) => ("flash, wgmma", "flash"),
            capability if capability >= (8, 0) => ("flash", "flash"),
            _ => ("products", "products"),
        };
        let name = |dtype, width| {
            let sizes = [1, 2, 1, 70, 66, width, width];
            let [q, k, v, _] = inputs(sizes, dtype).map(|x| on_device(&x, &device));
            Algorithm::of(&q, &k, &v).unwrap().name()
        };
        assert_eq!([name(DType::F16, 8), name(DType::BF16, 128)], [sixteen; 2]);
        assert_eq!([name(DType::F16, 12), name(DType::BF16, 136)], ["products"; 2]);
        assert_eq!([name(DType::F32, 4), name(DType::F32, 128)], [wide; 2]);
        assert_eq!(
            [name(DType::F32, 6), name(DType::F32, 132), name(DType::F64, 8)],
            ["products"; 3]
        );
    }
}

/// As near to F64 as 10 bits are, and no nearer.
#[test]
fn f32_is_rounded_to_tf32_where_that_is_allowed() {
    const TEST: &str =
        "kernels::attention::tests::flash::f32_is_rounded_to_tf32_where_that_is_allowed";
    if gpus().is_empty() || !in_own_process(TEST, &[]) {
        return;
    }
    set_allow_tf32(true);
    for width in [64, 128] {
        let all = inputs([1, 2, 1, 70, 66, width, width], DType::F32);
        let settings = Settings { scale: 0.125, ..CAUSAL };
        let expected = exact(&all, None, settings);
        for device in gpus() {
            let actual = on(&(device, None), &all, None, settings, [Some(DType::F32); 3]);
            for (actual, expected) in actual.iter().zip(&expected) {
                let actual = actual.as_ref().unwrap();
                assert_within(actual, expected, DType::F16, 4.0);
                let largest = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                let errors = values(actual).into_iter().zip(expected).map(|(a, e)| (a - e).abs());
                assert!(errors.fold(0.0, f64::max) > 1e-5 * largest);
            }
        }
    }
}

/// With a sum over the rounded output, they would be off by 40 epsilons, and by 60 in F16.
#[test]
fn gradients_of_values_far_from_zero_are_as_good() {
    for dtype in HALF_PRECISION {
        let [q, k, v, grad] = inputs([1, 2, 2, 65, 65, 64, 64], dtype);
        let v = (v.to_dtype(DType::F32).unwrap() + 200.0).unwrap().to_dtype(dtype).unwrap();
        let settings = Settings { scale: 0.125, ..PLAIN };
        assert_exact(&[q, k, v, grad], None, settings, [Some(DType::F32); 3]);
    }
}

/// The largest product has the smallest score.
#[test]
fn a_negative_scale_turns_scores_around() {
    for dtype in HALF_PRECISION {
        let settings = Settings { scale: -4.0, ..PLAIN };
        assert_exact(&inputs(SMALL, dtype), None, settings, [Some(DType::F32); 3]);
    }
}

#[test]
fn gradients_that_nobody_wants_change_no_other() {
    for way in ways() {
        for dtype in FLOATS {
            let all = inputs(SMALL, dtype);
            let some = |wants| {
                let got = on(&way, &all, None, CAPPED, wants);
                got.map(|got| got.as_ref().map(values))
            };
            let want = Some(dtype);
            let complete = some([want; 3]);
            for wants in [[want, None, None], [None, want, None], [None, None, want], [None; 3]] {
                for ((got, want), expected) in some(wants).into_iter().zip(wants).zip(&complete) {
                    assert_eq!(got, want.and(expected.clone()));
                }
            }
        }
    }
}

#[test]
fn nan_reaches_its_query_and_every_key_it_sees() {
    for way in ways() {
        for dtype in FLOATS {
            let mut all = inputs(SMALL, dtype);
            let [_, heads, _, queries, _, width, _] = SMALL;
            let mut q = values(&all[0]);
            q[(queries + 65) * width] = f64::NAN; // in the second head's second block
            all[0] = of(q, &[1, heads, queries, width], dtype);
            let [dq, dk, dv] = on(&way, &all, None, PLAIN, [Some(dtype); 3]);
            for (row, dq) in values(&dq.unwrap()).chunks(width).enumerate() {
                assert!(dq.iter().all(|x| x.is_nan() == (row == queries + 65)), "{row} {dq:?}");
            }
            for gradient in [dk, dv] {
                assert!(values(&gradient.unwrap()).iter().all(|x| x.is_nan()));
            }
            // An infinite value does not weigh on its own gradient.
            let mut all = inputs(SMALL, dtype);
            let [_, _, _, _, keys, width, _] = SMALL;
            let mut v = values(&all[2]);
            v[65 * width] = f64::INFINITY;
            all[2] = of(v, &[1, 1, keys, width], dtype);
            let [dq, dk, dv] = on(&way, &all, None, PLAIN, [Some(dtype); 3]);
            assert!(values(&dq.unwrap()).iter().all(|x| x.is_nan()));
            assert!(values(&dk.unwrap()).iter().all(|x| x.is_nan()));
            assert!(values(&dv.unwrap()).iter().all(|x| x.is_finite()));
            // Nor does an infinite key that no query takes: there are none after the last.
            let mut all = inputs(SMALL, dtype);
            let mut change = |at: usize, change: &dyn Fn(usize, f64) -> f64| {
                let numbers = values(&all[at]).into_iter().enumerate();
                let changed = numbers.map(|(i, x)| change(i, x)).collect();
                all[at] = of(changed, all[at].dims(), dtype);
            };
            change(0, &|i, x| if i % width == 0 { x.abs() + 0.5 } else { x });
            change(1, &|i, x| if i == 5 * width { f64::NEG_INFINITY } else { x });
            let [_, _, dv] = on(&way, &all, None, PLAIN, [Some(dtype); 3]);
            assert!(values(&dv.unwrap()).iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn packed_gradients_are_those_of_the_parts() {
    for device in devices() {
        for (dtype, d) in [(DType::F16, 8), (DType::BF16, 72), (DType::F16, 5), (DType::F32, 8)] {
            let there = |dims: &[usize], seed| on_device(&random(dims, dtype, seed), &device);
            let qkv = there(&[2, 70, 3, 2, d], 1);
            let [q, k, v] =
                &[0, 1, 2].map(|i| qkv.i((.., .., i)).unwrap().transpose(1, 2).unwrap());
            let grad = &there(&[2, 70, 2, d], 2).transpose(1, 2).unwrap();
            let kept = &forward(q, k, v, None, CAUSAL).unwrap().1;
            let saved = Saved { q, k, v, mask: None, kept, grad };
            for want in [dtype, DType::F32, DType::F64] {
                let joined = backward_packed(saved, CAUSAL, want).unwrap();
                assert_eq!((joined.dtype(), joined.dims()), (want, &[2, 70, 3 * 2 * d][..]));
                assert!(joined.is_contiguous());
                let wants = [Some(want), Some(want), Some(want), None];
                let parts = backward(saved, CAUSAL, wants).unwrap().into_iter().flatten();
                let parts: Vec<_> = parts.map(|part| part.transpose(1, 2).unwrap()).collect();
                let expected = Tensor::stack(&parts, 2).unwrap();
                let home = |x: &Tensor| values(&x.to_device(&Device::Cpu).unwrap());
                assert_eq!(home(&joined), home(&expected));
            }
        }
    }
}
