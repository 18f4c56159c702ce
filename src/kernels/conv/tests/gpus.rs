//! GPUs against the CPU.

use std::sync::Mutex;

use super::*;
use crate::error::lock::lock;
use crate::kernels::capture;
use crate::kernels::choice::algorithm::fallbacks;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::testing::{assert_gpus_agree, epsilon, values};
use crate::kernels::testing::devices::gpus;
use crate::kernels::testing::own_process::in_own_process;

/// Held by tests that change how weight gradients are written or algorithms chosen, and by those that check them.
static SET: Mutex<()> = Mutex::new(());

#[test]
fn gpus_agree() {
    let _held = lock(&SET);
    crate::kernels::choice::cudnn::set_cudnn_f32_weight_gradients(true);
    let mut rng = generator(31);
    let uneven = Geometry { padding: (0, 2), ..geometry(2, 0, 1, 1) };
    for (dims, c_out, kernel, geometry) in [
        ([1, 1, 1, 1], 1, [1, 1], geometry(1, 0, 1, 1)),
        ([3, 3, 9, 11], 5, [3, 3], geometry(1, 1, 1, 1)),
        ([2, 8, 16, 16], 16, [3, 3], geometry(2, 1, 1, 1)),
        ([2, 6, 8, 9], 4, [1, 1], geometry(1, 0, 1, 1)),
        ([3, 8, 8, 8], 5, [1, 1], geometry(1, 0, 1, 1)), // images are matrices
        ([3, 8, 9, 8], 6, [1, 1], geometry(2, 0, 1, 2)),
        ([2, 4, 7, 7], 6, [3, 3], geometry(1, 2, 2, 2)),
        ([2, 3, 8, 7], 3, [3, 3], geometry(1, 1, 1, 3)), // a channel per group
        ([2, 2, 9, 9], 6, [5, 3], geometry(2, 2, 1, 2)),
        ([2, 3, 1, 70], 4, [1, 5], uneven),
        ([1, 1, 12, 12], 3, [4, 4], geometry(3, 0, 1, 1)),
        // Whole packs of channels.
        ([2, 16, 6, 5], 24, [3, 3], geometry(1, 1, 1, 1)),
        ([2, 16, 5, 5], 16, [3, 2], geometry(2, 1, 1, 2)),
        ([2, 16, 3, 5], 8, [1, 1], geometry(1, 0, 1, 2)),
        ([2, 24, 7, 6], 24, [3, 3], geometry(2, 1, 1, 24)),
        ([2, 8, 6, 5], 16, [3, 3], geometry(1, 2, 2, 8)),
    ] {
        let weight_dims = [c_out, dims[1] / geometry.groups, kernel[0], kernel[1]];
        let shape = Shape::new(&dims, &weight_dims, geometry).unwrap();
        for dtype in DTYPES {
            let x = random(&mut rng, &dims, dtype);
            let weight = random(&mut rng, &weight_dims, dtype);
            let grad = random(&mut rng, &shape.out_dims(), dtype);
            // Biases wider than 16 bits, and like all else, which cuDNN adds by itself.
            let outs = DTYPES.map(|out| (out, DType::F32)).into_iter().chain([(dtype, dtype)]);
            for (out, of_bias) in outs {
                let bias = random(&mut rng, &[c_out], of_bias);
                let back_bias = random(&mut rng, &[dims[1]], of_bias);
                let inputs = [&x, &weight, &grad, &bias, &back_bias];
                let half = out == DType::F16 || out == DType::BF16;
                let single = if dtype == DType::F64 { 1.0 } else { f32::EPSILON.into() };
                let wide = if out == DType::F64 { single / f64::EPSILON } else { 1.0 };
                assert_gpus_agree(&inputs, if half { 1.0 } else { 32.0 * wide.max(1.0) }, |t| {
                    let (x, weight, grad) = (&t[0], &t[1], &t[2]);
                    Ok(vec![
                        forward(x, weight, None, geometry, out)?,
                        forward(x, weight, Some(&t[3]), geometry, out)?,
                        dgrad(grad, weight, None, &dims, geometry, out)?,
                        dgrad(grad, weight, Some(&t[4]), &dims, geometry, out)?,
                        wgrad(x, grad, &weight_dims, geometry, out)?,
                        forward_last(x, weight, None, geometry, out)?,
                        forward_last(x, weight, Some(&t[3]), geometry, out)?,
                        input_gradient_last(grad, weight, None, &dims, geometry, out)?,
                        input_gradient_last(grad, weight, Some(&t[4]), &dims, geometry, out)?,
                        weight_gradient_last(x, grad, &weight_dims, geometry, out)?,
                    ])
                });
            }
        }
    }
}

/// By cuDNN, unless `set_cudnn_f32_weight_gradients` is on; all other algorithms write F32.
#[test]
fn a_weight_gradient_of_halves_is_rounded_to_them_once_by_cudnn() -> Result<()> {
    let _held = lock(&SET);
    let mut rng = generator(33);
    let geometry = geometry(1, 1, 1, 1);
    for (device, dtype) in gpus().iter().flat_map(|d| [DType::F16, DType::BF16].map(|t| (d, t))) {
        let x = random(&mut rng, &[3, 8, 9, 7], dtype);
        let grad = random(&mut rng, &[3, 16, 9, 7], dtype);
        let dims = [16, 8, 3, 3];
        let expected = values(&wgrad(&x, &grad, &dims, geometry, DType::F32)?);
        let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
        let (x, grad) = (x.to_device(device)?, grad.to_device(device)?);
        for exact in [false, true] {
            crate::kernels::choice::cudnn::set_cudnn_f32_weight_gradients(exact);
            for dw in [
                wgrad(&x, &grad, &dims, geometry, DType::F32)?,
                weight_gradient_last(&x, &grad, &dims, geometry, DType::F32)?,
            ] {
                let rounded = dw.to_dtype(dtype)?.to_dtype(DType::F32)?;
                let by_cudnn = Gpu::of(device).is_some_and(|gpu| gpu.has_convolutions());
                assert_eq!(values(&rounded) == values(&dw), by_cudnn && !exact, "{dtype:?}");
                let isa = if by_cudnn && !exact { dtype } else { DType::F32 };
                let within = largest * (epsilon(isa) + 32.0 * epsilon(DType::F32));
                for (dw, expected) in values(&dw).into_iter().zip(&expected) {
                    assert!((dw - expected).abs() <= within, "{dw} {expected} {dtype:?} {exact}");
                }
            }
        }
    }
    crate::kernels::choice::cudnn::set_cudnn_f32_weight_gradients(false);
    Ok(())
}

/// In both formats and every dtype, which adds the bias and may write F32. F32 itself, which tensor cores would round, goes to
/// engines without them.
#[test]
fn convolutions_go_to_the_graph_api() -> Result<()> {
    use crate::kernels::choice::algorithm::take;
    let _held = lock(&SET);
    let mut rng = generator(36);
    let (geometry, dims, w_dims) = (geometry(1, 1, 1, 1), [2, 8, 6, 7], [16, 8, 3, 3]);
    for device in gpus() {
        let by_cudnn = Gpu::of(&device).is_some_and(|gpu| gpu.has_convolutions());
        if !(is_emulated(&device)? && by_cudnn) {
            continue;
        }
        for dtype in [DType::F16, DType::BF16, DType::F32] {
            let mut on = |dims: &[usize]| random(&mut rng, dims, dtype).to_device(&device);
            let (x, weight, grad) = (on(&dims)?, on(&w_dims)?, on(&[2, 16, 6, 7])?);
            let (bias, back_bias) = (on(&[16])?, on(&[8])?);
            let by = match dtype {
                DType::F32 => "cudnn graph, engine 3, no tensor cores",
                _ => "cudnn graph, engine 2, tensor cores",
            };
            let expect = || assert_eq!(take(), Some(by), "{dtype:?}");
            for exact in [false, true] {
                crate::kernels::choice::cudnn::set_cudnn_f32_weight_gradients(exact);
                forward(&x, &weight, Some(&bias), geometry, dtype)?;
                expect();
                forward_last(&x, &weight, Some(&bias), geometry, dtype)?;
                expect();
                dgrad(&grad, &weight, Some(&back_bias), &dims, geometry, dtype)?;
                expect();
                input_gradient_last(&grad, &weight, Some(&back_bias), &dims, geometry, dtype)?;
                expect();
                for out in [dtype, DType::F32] {
                    wgrad(&x, &grad, &w_dims, geometry, out)?;
                    expect();
                    weight_gradient_last(&x, &grad, &w_dims, geometry, out)?;
                    expect();
                }
            }
            crate::kernels::choice::cudnn::set_cudnn_f32_weight_gradients(false);
        }
    }
    Ok(())
}

/// Whoever measures takes the fastest engine that may run, and not the heuristic's first. An emulated GPU's clock says that
/// the two differ.
#[test]
fn engines_of_the_graph_api_are_measured() -> Result<()> {
    use crate::kernels::choice::algorithm::take;
    use crate::kernels::choice::cudnn::set_cudnn_benchmark;
    let test = "kernels::conv::tests::gpus::engines_of_the_graph_api_are_measured";
    if gpus().is_empty() || !in_own_process(test, &[]) {
        return Ok(());
    }
    let mut rng = generator(37);
    let (geometry, dims, w_dims) = (geometry(1, 1, 1, 1), [2, 8, 6, 7], [16, 8, 3, 3]);
    for device in gpus() {
        let by_cudnn = Gpu::of(&device).is_some_and(|gpu| gpu.has_convolutions());
        if !(is_emulated(&device)? && by_cudnn) {
            continue;
        }
        let mut on = |dims: &[usize]| random(&mut rng, dims, DType::BF16);
        let (x, weight, grad) = (on(&dims), on(&w_dims), on(&[2, 16, 6, 7]));
        let (bias, back_bias) = (on(&[16]), on(&[8]));
        let inputs = [&x, &weight, &grad, &bias, &back_bias];
        let by = |engine: &str| {
            // The second time, the choice is known.
            for _ in 0..2 {
                assert_gpus_agree(&inputs, 1.0, |t| {
                    let expect = |result: Tensor| {
                        let by = take();
                        assert!(result.device().is_cpu() || by == Some(engine), "{by:?}");
                        result
                    };
                    let (w, b, of) = (&t[1], Some(&t[4]), DType::BF16);
                    Ok(vec![
                        expect(forward_last(&t[0], w, Some(&t[3]), geometry, of)?),
                        expect(input_gradient_last(&t[2], w, b, &dims, geometry, of)?),
                        expect(weight_gradient_last(&t[0], &t[2], &w_dims, geometry, of)?),
                    ])
                });
            }
        };
        let (x, on_gpu) = (on(&[3, 6, 7, 8]).to_device(&device)?, weight.to_device(&device)?);
        let (turned, Some(gpu)) = (turned(geometry), Gpu::of(&device)) else { continue };
        let run = |x: &Tensor| forward(x, &on_gpu, None, turned, DType::BF16).map(drop);
        let few = x.narrow(0, 0, 2)?;
        by("cudnn graph, engine 2, tensor cores");
        run(&few)?; // a handle and this engine's scratch memory, which a capture cannot make
        set_cudnn_benchmark(true);
        by("cudnn graph, engine 3, no tensor cores");
        // Measuring waits, which ends a capture: there, a new shape goes to the heuristic's first.
        run(&few)?;
        assert_eq!(take(), Some("cudnn graph, engine 3, no tensor cores"));
        let (captured, _) = capture::record(Some((8, 0)), || gpu.capture(|| Ok(run(&x)?)));
        captured.expect("nothing waits");
        assert_eq!(take(), Some("cudnn graph, engine 2, tensor cores"));
        // That is not remembered as what was measured; what was measured is, in a capture too.
        run(&x)?;
        assert_eq!(take(), Some("cudnn graph, engine 3, no tensor cores"));
        let (captured, _) = capture::record(Some((8, 0)), || gpu.capture(|| Ok(run(&x)?)));
        captured.expect("nothing waits");
        assert_eq!(take(), Some("cudnn graph, engine 3, no tensor cores"));
        set_cudnn_benchmark(false);
        by("cudnn graph, engine 2, tensor cores");
    }
    Ok(())
}

/// cuDNN and cuBLASLt may say at any step that they do not support something. An emulated GPU's do so by chance.
#[test]
fn gpus_agree_whatever_their_libraries_do_not_support() -> Result<()> {
    let test = "kernels::conv::tests::gpus::gpus_agree_whatever_their_libraries_do_not_support";
    const SEED: &str = "EMULATED_GPU_REFUSE";
    if gpus().is_empty() {
        return Ok(());
    }
    let seeds = ["1", "2", "3", "4"];
    if !seeds.iter().any(|seed| in_own_process(test, &[(SEED, seed)])) {
        return Ok(());
    }
    let mut rng = generator(34);
    for round in 0..12 {
        crate::kernels::choice::cudnn::set_cudnn_benchmark(round % 2 == 1);
        let dtype = DTYPES[round % DTYPES.len()];
        let [channels, size] = [8 + round, 5 + round / 4];
        let (dims, w_dims) = ([2, channels, size, 7], [6, channels, 3, 3]);
        let geometry = geometry(1, 1, 1, 1);
        let (x, weight) = (random(&mut rng, &dims, dtype), random(&mut rng, &w_dims, dtype));
        let grad = random(&mut rng, &[2, 6, size, 7], dtype);
        let bias = random(&mut rng, &[6], dtype);
        let rows = random(&mut rng, &[channels, 6], dtype);
        for _ in 0..2 {
            // The second time, what was refused is known.
            assert_gpus_agree(&[&x, &weight, &grad, &bias, &rows], 32.0, |t| {
                Ok(vec![
                    forward(&t[0], &t[1], None, geometry, dtype)?,
                    forward(&t[0], &t[1], Some(&t[3]), geometry, dtype)?,
                    dgrad(&t[2], &t[1], None, &dims, geometry, dtype)?,
                    wgrad(&t[0], &t[2], &w_dims, geometry, dtype)?,
                    forward_last(&t[0], &t[1], Some(&t[3]), geometry, dtype)?,
                    crate::kernels::gemm::gemm(&t[4].t()?, &t[4], Some(&t[3]), dtype)?,
                ])
            });
        }
    }
    let counted = |pass: &str| fallbacks().iter().any(|f| f.pass == pass && f.count > 0);
    for device in gpus() {
        let (emulated, gpu) = (is_emulated(&device)?, Gpu::of(&device));
        assert!(!emulated || counted("gemm"), "{:?}", fallbacks());
        let by_cudnn = emulated && gpu.is_some_and(|gpu| gpu.has_convolutions());
        assert!(!by_cudnn || ["conv forward", "conv dgrad", "conv wgrad"].into_iter().all(counted));
    }
    Ok(())
}

/// Counts warnings.
struct Warnings(std::sync::atomic::AtomicUsize);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, of: &tracing::Metadata<'_>) -> bool {
        *of.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn what_cudnn_does_not_support_is_remembered_and_logged_once() -> Result<()> {
    let test =
        "kernels::conv::tests::gpus::what_cudnn_does_not_support_is_remembered_and_logged_once";
    if gpus().is_empty() || !in_own_process(test, &[("EMULATED_GPU_REFUSE", "all")]) {
        return Ok(());
    }
    for device in gpus() {
        let by_cudnn = Gpu::of(&device).is_some_and(|gpu| gpu.has_convolutions());
        if !(is_emulated(&device)? && by_cudnn) {
            continue;
        }
        let mut rng = generator(35);
        let dims = [2, 8, 5, 7];
        let x = random(&mut rng, &dims, DType::F16).to_device(&device)?;
        let weight = random(&mut rng, &[6, 8, 3, 3], DType::F16).to_device(&device)?;
        let warnings = tracing::Dispatch::new(Warnings(std::sync::atomic::AtomicUsize::new(0)));
        let count = |rounds: usize| -> Result<usize> {
            tracing::dispatcher::with_default(&warnings, || {
                for _ in 0..rounds {
                    let y = forward(&x, &weight, None, geometry(1, 1, 1, 1), DType::F16)?;
                    wgrad(&x, &y, &[6, 8, 3, 3], geometry(1, 1, 1, 1), DType::F16)?;
                }
                let seen = warnings.downcast_ref::<Warnings>().expect("made above");
                Ok(seen.0.load(std::sync::atomic::Ordering::Relaxed))
            })
        };
        assert_eq!(
            (count(1)?, count(3)?),
            (4, 4),
            "for two passes, of the graph API and of the older functions"
        );
        let counted = |wanted: &str| -> Vec<u64> {
            let all = fallbacks().into_iter().filter(|f| f.wanted == wanted);
            all.map(|f| f.count).collect()
        };
        assert_eq!(counted("cudnn"), [4, 4]);
        assert!(counted("cudnn graph").is_empty(), "the older functions do not do it, either");
    }
    Ok(())
}

/// The emulated GPU's fastest engine fails here; the other one's result is the convolution's.
#[test]
fn an_engine_that_fails_while_measured_is_passed_over() -> Result<()> {
    use crate::kernels::choice::algorithm::take;
    use crate::kernels::choice::cudnn::set_cudnn_benchmark;
    let test = "kernels::conv::tests::gpus::an_engine_that_fails_while_measured_is_passed_over";
    if gpus().is_empty() || !in_own_process(test, &[("EMULATED_GPU_REFUSE", "exact-engine")]) {
        return Ok(());
    }
    set_cudnn_benchmark(true);
    let mut rng = generator(38);
    let mut on = |dims: &[usize]| random(&mut rng, dims, DType::BF16);
    let (x, weight) = (on(&[2, 8, 6, 7]), on(&[16, 8, 3, 3]));
    for device in gpus() {
        let by_cudnn = Gpu::of(&device).is_some_and(|gpu| gpu.has_convolutions());
        if !(is_emulated(&device)? && by_cudnn) {
            continue;
        }
        assert_gpus_agree(&[&x, &weight], 1.0, |t| {
            let y = forward_last(&t[0], &t[1], None, geometry(1, 1, 1, 1), DType::BF16)?;
            let by = take();
            assert!(
                y.device().is_cpu() || by == Some("cudnn graph, engine 2, tensor cores"),
                "{by:?}"
            );
            Ok(vec![y])
        });
    }
    Ok(())
}

#[test]
fn what_the_graph_api_does_not_support_is_logged_once_and_counted() -> Result<()> {
    let test = "kernels::conv::tests::gpus::what_the_graph_api_does_not_support_is_logged_once_and_counted";
    if gpus().is_empty() || !in_own_process(test, &[("EMULATED_GPU_REFUSE", "graphs")]) {
        return Ok(());
    }
    for device in gpus() {
        let by_cudnn = Gpu::of(&device).is_some_and(|gpu| gpu.has_convolutions());
        if !(is_emulated(&device)? && by_cudnn) {
            continue;
        }
        let mut rng = generator(36);
        let x = random(&mut rng, &[2, 8, 5, 7], DType::F16).to_device(&device)?;
        let weight = random(&mut rng, &[16, 8, 3, 3], DType::F16).to_device(&device)?;
        let warnings = tracing::Dispatch::new(Warnings(std::sync::atomic::AtomicUsize::new(0)));
        tracing::dispatcher::with_default(&warnings, || -> Result<()> {
            for _ in 0..3 {
                let y = forward_last(&x, &weight, None, geometry(1, 1, 1, 1), DType::F16)?;
                assert_eq!(y.dtype(), DType::F16);
            }
            Ok(())
        })?;
        let seen = warnings.downcast_ref::<Warnings>().expect("made above");
        assert_eq!(seen.0.load(std::sync::atomic::Ordering::Relaxed), 1);
        let all = fallbacks();
        let counted: Vec<_> = all.iter().map(|f| (f.pass, f.wanted, f.count)).collect();
        assert_eq!(counted, [("conv forward", "cudnn graph", 3)]);
        assert!(all[0].ran.starts_with("cudnn, "), "{all:?}");
    }
    Ok(())
}

fn is_emulated(device: &Device) -> Result<bool> {
    Ok(Gpu::of(device).map(|gpu| gpu.name()).transpose()?.as_deref() == Some("Emulated GPU"))
}

/// Whoever chooses cuDNN's algorithms, where they are cuDNN's.
#[test]
fn gpus_agree_on_mixed_and_strided_operands() {
    let _held = lock(&SET);
    let mut rng = generator(32);
    let geometry = geometry(1, 1, 1, 1);
    let pairs = [(DType::F16, DType::BF16), (DType::BF16, DType::F32)];
    for (measured, (left, right)) in
        [false, true].into_iter().flat_map(|measured| pairs.map(|pair| (measured, pair)))
    {
        crate::kernels::choice::cudnn::set_cudnn_benchmark(measured);
        let x = random(&mut rng, &[2, 7, 6, 4], left).permute((0, 3, 1, 2)).unwrap();
        let weight = random(&mut rng, &[4, 5, 3, 3], right).transpose(0, 1).unwrap();
        let grad = random(&mut rng, &[5, 2, 7, 6], right).transpose(0, 1).unwrap();
        assert_gpus_agree(&[&x, &weight, &grad], 32.0, |t| {
            Ok(vec![
                forward(&t[0], &t[1], None, geometry, DType::F32)?,
                dgrad(&t[2], &t[1], None, &[2, 4, 7, 6], geometry, DType::F32)?,
                wgrad(&t[0], &t[2], &[5, 4, 3, 3], geometry, DType::F32)?,
                forward_last(&t[0], &t[1], None, geometry, DType::F32)?,
                input_gradient_last(&t[2], &t[1], None, &[2, 4, 7, 6], geometry, DType::F32)?,
                weight_gradient_last(&t[0], &t[2], &[5, 4, 3, 3], geometry, DType::F32)?,
            ])
        });
    }
    crate::kernels::choice::cudnn::set_cudnn_benchmark(false);
}

#[test]
fn gpus_keep_nan_and_infinity_where_they_enter() {
    for poison in [f64::NAN, f64::INFINITY] {
        for (geometry, dtype) in
            [(geometry(1, 1, 1, 1), DType::F16), (geometry(2, 1, 1, 4), DType::F32)]
        {
            let w_dims = [4, 4 / geometry.groups, 3, 3];
            let shape = Shape::new(&[3, 4, 8, 8], &w_dims, geometry).unwrap();
            let x = poisoned([3, 4, 8, 8], 2 * 256 + 70, poison, dtype);
            let grad = poisoned(shape.out_dims(), shape.out_image() + 9, poison, dtype);
            let plain = poisoned(shape.out_dims(), 0, 1., dtype);
            let weight = poisoned(w_dims, 0, 1., dtype);
            assert_gpus_agree(&[&x, &grad, &plain, &weight], 64.0, |t| {
                Ok(vec![
                    forward(&t[0], &t[3], None, geometry, dtype)?,
                    dgrad(&t[1], &t[3], None, &[3, 4, 8, 8], geometry, dtype)?,
                    wgrad(&t[0], &t[2], &w_dims, geometry, dtype)?,
                    forward_last(&t[0], &t[3], None, geometry, dtype)?,
                    input_gradient_last(&t[1], &t[3], None, &[3, 4, 8, 8], geometry, dtype)?,
                    weight_gradient_last(&t[0], &t[2], &w_dims, geometry, dtype)?,
                ])
            });
        }
    }
}
