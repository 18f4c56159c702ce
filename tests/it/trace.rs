//! A trace says what ran, in the order it ran.

use std::sync::{Arc, Mutex};

use candle_amp::{Autocast, Op, no_grad, ops};
use candle_core::{DType, Device, Result, Shape, Tensor, Var};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::util::{listening, random};

/// Another test's backward may empty the cache in between, but not every time.
#[test]
fn a_cast_that_is_found_again_is_counted() -> Result<()> {
    let (w, x) =
        (Var::from_tensor(&random(1, (4, 4), DType::F32))?, random(2, (3, 4), DType::BF16));
    let amp = Autocast::new(DType::BF16);
    let hits = (0..100).map(|_| {
        let (y, trace) = amp.trace(|| ops::matmul(&ops::matmul(&x, &w)?, &w));
        y.map(|_| trace.cache_hits())
    });
    let hits: Vec<usize> = hits.collect::<Result<_>>()?;
    assert_eq!(hits.iter().max(), Some(&1));
    Ok(())
}

#[test]
fn a_trace_has_a_row_an_operator() -> Result<()> {
    let w = Var::from_tensor(&random(1, (4, 4), DType::F32))?;
    let x = random(2, (3, 4), DType::F16);
    let targets = Tensor::new(&[0u32, 1, 2], &Device::Cpu)?;
    let amp = Autocast::new(DType::BF16);
    let (loss, trace) = amp.trace(|| {
        let y = ops::relu(&ops::matmul(&ops::matmul(&x, &w)?, &w)?)?;
        let y = Autocast::disabled().scope(|| ops::softmax(&y, 1))?;
        ops::cross_entropy(&y, &targets)
    });
    loss?;
    let rows: Vec<_> =
        trace.rows().iter().map(|r| (r.op, r.cast, r.output, r.cache_hits)).collect();
    let (bf16, f32) = (DType::BF16, DType::F32);
    assert_eq!(
        rows[..5],
        [
            (Op::Matmul, Some(bf16), bf16, 0),
            (Op::Matmul, Some(bf16), bf16, rows[1].3),
            (Op::Relu, None, bf16, 0),
            (Op::Softmax, None, bf16, 0),
            (Op::CrossEntropy, Some(f32), f32, 0),
        ]
    );
    // Another test's backward may have emptied the cache in between.
    assert!(rows[1].3 <= 1 && trace.cache_hits() == rows[1].3);
    assert_eq!(trace.rows()[0].inputs, [DType::F16, f32]);
    assert_eq!(trace.rows()[4].inputs, [bf16, DType::U32]);
    Ok(())
}

/// What backward keeps: `x` for the first weight, the relu's output for itself and the second weight. Variables are none
/// of it, sums keep nothing, and what is kept is counted in the dtype it was cast to.
#[test]
fn a_trace_counts_the_activations_that_backward_keeps() -> Result<()> {
    let (v, w) = (Var::from_tensor(&random(1, (8, 4), DType::F32))?, random(3, (4, 8), DType::F32));
    let w = Var::from_tensor(&w)?;
    let x = random(2, (3, 4), DType::F32);
    let forward = || {
        let y = ops::relu(&ops::linear(&x, &v, None)?)?;
        let y = ops::linear(&y, &w, None)?;
        ops::batch_norm_relu(&y, None, None, Some(&ops::add(&y, &y)?), 1e-5)
    };
    for (amp, bytes) in [(Autocast::disabled(), 4), (Autocast::new(DType::BF16), 2)] {
        let (y, trace) = amp.trace(forward);
        y?;
        let rows: Vec<_> = trace.rows().iter().map(|row| row.saved_bytes / bytes).collect();
        assert_eq!(rows, [3 * 4, 3 * 8, 0, 0, 2 * 3 * 4]);
        assert_eq!(trace.saved_bytes(), bytes * (12 + 24 + 24));
        let row = &trace.rows()[2];
        assert_eq!(row.input_shapes, [Shape::from((3, 8)), Shape::from((4, 8))]);
        assert_eq!(row.output_shape, Shape::from((3, 4)));
        let (y, trace) = amp.trace(|| no_grad(forward));
        y?;
        assert_eq!(trace.saved_bytes(), 0);
    }
    Ok(())
}

#[test]
fn traces_nest_and_end() -> Result<()> {
    let x = random(1, 4, DType::F32);
    let amp = Autocast::new(DType::F16);
    let ((inner, outer_y), outer) = amp.trace(|| {
        let (_, inner) = Autocast::disabled().trace(|| ops::relu(&x));
        (inner, ops::silu(&x))
    });
    outer_y?;
    assert_eq!(inner.rows().len(), 1);
    assert_eq!(outer.rows().len(), 2);
    let failed = amp.trace(|| ops::matmul(&x, &x.narrow(0, 0, 3)?));
    assert!(failed.0.is_err() && failed.1.rows().is_empty());
    let panicked = std::panic::catch_unwind(|| amp.trace(|| panic!("in the forward pass")));
    assert!(panicked.is_err());
    let (_, after) = amp.trace(|| ops::relu(&x));
    assert_eq!(after.rows().len(), 1);
    Ok(())
}

/// Each operator that has a choice, and only those, on every kind of processor.
#[test]
fn a_row_names_the_algorithm_of_its_own_operator() -> Result<()> {
    let (x, weight) = (random(1, (2, 3, 8, 8), DType::F32), random(2, (4, 3, 3, 3), DType::F32));
    let heads = random(3, (1, 2, 5, 8), DType::F32);
    let double = random(4, (6, 6), DType::F64);
    let (done, trace) = Autocast::disabled().trace(|| {
        ops::relu(&ops::conv2d(&x, &weight, None, Default::default())?)?;
        ops::relu(&ops::sdpa(&heads, &heads, &heads, None, false, 1.0)?)?;
        ops::matmul(&double, &double)
    });
    done?;
    let named: Vec<_> = trace.rows().iter().map(|row| row.algorithm).collect();
    let [Some(conv), None, Some("blocks"), None, Some("gemm crate, f64")] = named[..] else {
        panic!("{named:?}")
    };
    assert!(["im2col", "winograd, avx2", "winograd, avx512"].contains(&conv), "{conv}");
    let table = format!("{trace:#}");
    assert!(table.contains("algorithm") && table.contains(conv), "{table}");
    assert!(!trace.to_string().contains(conv));
    Ok(())
}

/// Keeps the passes and algorithms of the log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(String, String)>>>);

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "candle_amp::algorithm"
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        #[derive(Default)]
        struct Fields(String, String, String);
        impl Visit for Fields {
            fn record_str(&mut self, field: &Field, value: &str) {
                match field.name() {
                    "pass" => self.0 = value.to_owned(),
                    "algorithm" => self.1 = value.to_owned(),
                    _ => {}
                }
            }
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                if field.name() == "sizes" {
                    self.2 = format!("{value:?}");
                }
            }
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        assert_eq!(*event.metadata().level(), Level::TRACE);
        assert!(!fields.2.is_empty());
        self.0.lock().unwrap().push((fields.0, fields.1));
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn backward_logs_its_algorithms() -> Result<()> {
    let log = Log::default();
    listening(log.clone(), || {
        let x = Var::from_tensor(&random(1, (2, 3, 5, 5), DType::F64))?;
        let weight = Var::from_tensor(&random(2, (4, 3, 3, 3), DType::F64))?;
        ops::mean(&ops::conv2d(&x, &weight, None, Default::default())?)?.backward()
    })?;
    let passes = ["conv forward", "conv dgrad", "conv wgrad"];
    let expected = passes.map(|pass| (pass.to_owned(), "im2col, f64".to_owned()));
    assert_eq!(*log.0.lock().unwrap(), expected);
    Ok(())
}

/// Also where another thread, which has no subscriber, is the first to log something.
#[test]
fn a_subscriber_sees_what_another_thread_has_logged_first() {
    let say =
        || tracing::trace!(target: "candle_amp::algorithm", pass = "a", algorithm = "b", sizes = 1);
    let log = Log::default();
    listening(log.clone(), || {
        std::thread::scope(|scope| scope.spawn(say).join().unwrap());
        say();
    });
    assert_eq!(*log.0.lock().unwrap(), [("a".to_owned(), "b".to_owned())]);
}
