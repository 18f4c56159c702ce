//! Steps as events of Chrome's trace format, which <https://ui.perfetto.dev> opens.

use std::time::Duration;

use candle_amp::diagnostics::ProfileRow;
use candle_core::Shape;
use serde_json::{Value, json};

use super::Step;

/// All steps, one after the other as they ran.
pub(super) fn trace(steps: &[Step]) -> Value {
    let Some(first) = steps.first() else { return json!({ "traceEvents": [] }) };
    let mut events = vec![json!({
        "name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": { "name": "cifar10" },
    })];
    for step in steps {
        let (profile, zero) = (&step.profile, first.profile.began());
        let began = profile.began().duration_since(zero);
        let name = format!("step {}", step.number + 1);
        events.push(event(&name, "step", began, profile.duration(), json!({})));
        for phase in &step.phases {
            let start = phase.start.duration_since(zero);
            events.push(event(phase.name, "phase", start, phase.duration, json!({})));
        }
        for row in profile.rows() {
            let (pass, prime) = if row.backward { ("backward", "'") } else { ("forward", "") };
            let name = format!("{}{prime}", row.name);
            events.push(event(&name, pass, began + row.start, row.duration, arguments(row)));
        }
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

/// A complete event. Those within it are drawn below it.
fn event(name: &str, kind: &str, start: Duration, duration: Duration, args: Value) -> Value {
    let microseconds = |time: Duration| time.as_nanos() as f64 / 1000.;
    json!({
        "name": name, "cat": kind, "ph": "X", "pid": 1, "tid": 1,
        "ts": microseconds(start), "dur": microseconds(duration), "args": args,
    })
}

fn arguments(row: &ProfileRow) -> Value {
    json!({
        "inputs": row.input_shapes.iter().map(shape).collect::<Vec<_>>(),
        "output": shape(&row.output_shape),
        "dtype": row.output.as_str(),
        "algorithm": row.algorithm,
    })
}

/// `8x3x32x32`; `scalar` without dimensions.
pub(super) fn shape(shape: &Shape) -> String {
    let dims: Vec<String> = shape.dims().iter().map(usize::to_string).collect();
    if dims.is_empty() { "scalar".to_owned() } else { dims.join("x") }
}
