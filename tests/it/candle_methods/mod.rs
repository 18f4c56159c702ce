//! docs/candle-methods.md says of every method of candle what it does in 16 bits: written from measurements.

mod measure;
mod neural;
mod rows;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;

use candle_core::{DType, Result, Tensor};

use crate::util::package;
use measure::{Input, Verdict, measure};

/// A method, how to call it, and what to say of it.
struct Row {
    method: &'static str,
    /// Inputs of a call each.
    probes: Vec<Vec<Input>>,
    f: fn(&[Tensor]) -> Result<Tensor>,
    /// The same in F64, of a method that has none.
    wide: fn(&[Tensor]) -> Result<Tensor>,
    instead: &'static str,
    why: &'static str,
    /// Whether candle computes it by matrix products, whose sums depend on the processor, as does whether there are any
    /// in BF16.
    varies: bool,
}

impl Row {
    fn varies(self) -> Self {
        Self { varies: true, ..self }
    }

    fn against(self, wide: fn(&[Tensor]) -> Result<Tensor>) -> Self {
        Self { wide, ..self }
    }

    /// What is said of F16 and of BF16, result and gradient.
    fn measured(&self) -> [[Option<Verdict>; 2]; 2] {
        let [f16, bf16] = [DType::F16, DType::BF16].map(|dtype| measure(self, dtype));
        let varies = |verdict: Verdict| match verdict {
            Verdict::Silent | Verdict::Wrong | Verdict::Error => verdict,
            _ => Verdict::Varies,
        };
        match self.varies {
            true => [[Some(varies(f16.0)); 2], [f16.1.map(varies); 2]],
            false => [[Some(f16.0), Some(bf16.0)], [f16.1, bf16.1]],
        }
    }
}

/// Rows under one heading.
type Section = (&'static str, Vec<Row>);

/// The operators of candle-core 0.11.1 that its backward knows, each with a row of a method that makes it.
const DIFFERENTIABLE: [(&str, &str); 58] = [
    ("Binary Add", "a + b"),
    ("Binary Sub", "a - b"),
    ("Binary Mul", "a * b"),
    ("Binary Div", "a / b"),
    ("Binary Minimum", "a.minimum(b)"),
    ("Binary Maximum", "a.maximum(b)"),
    ("WhereCond", "c.where_cond(a, b)"),
    ("Conv1D", "x.conv1d(..)"),
    ("Conv2D", "x.conv2d(..)"),
    ("ConvTranspose1D", "x.conv_transpose1d(..)"),
    ("ConvTranspose2D", "x.conv_transpose2d(..)"),
    ("AvgPool2D", "x.avg_pool2d(k)"),
    ("MaxPool2D", "x.max_pool2d(k)"),
    ("UpsampleNearest1D", "x.upsample_nearest1d(n)"),
    ("UpsampleNearest2D", "x.upsample_nearest2d(h, w)"),
    ("UpsampleBilinear2D", "x.upsample_bilinear2d(h, w, corners)"),
    ("SliceScatter0", "x.slice_scatter(s, dim, start)"),
    ("Gather", "x.gather(ids, dim)"),
    ("Scatter", "x.scatter(ids, s, dim)"),
    ("ScatterAdd", "x.scatter_add(ids, s, dim)"),
    ("IndexAdd", "x.index_add(ids, s, dim)"),
    ("IndexSelect", "x.index_select(ids, dim)"),
    ("Matmul", "a.matmul(b)"),
    ("Cat", "Tensor::cat(parts, dim)"),
    ("Broadcast", "x.broadcast_as(shape)"),
    ("Reduce Sum", "x.sum(dims)"),
    ("Reduce Max", "x.max(dim)"),
    ("Reduce Min", "x.min(dim)"),
    ("ToDType", "x.to_dtype(dtype)"),
    ("Copy", "x.copy()"),
    ("Affine", "x * 3.0 + 0.1"),
    ("Unary Log", "x.log()"),
    ("Unary Sin", "x.sin()"),
    ("Unary Cos", "x.cos()"),
    ("Unary Tanh", "x.tanh()"),
    ("Unary Abs", "x.abs()"),
    ("Unary Exp", "x.exp()"),
    ("Unary Neg", "x.neg()"),
    ("Unary Recip", "x.recip()"),
    ("Narrow", "x.narrow(dim, start, len)"),
    ("Reshape", "x.reshape(shape)"),
    ("Unary Ceil", "x.ceil()"),
    ("Unary Floor", "x.floor()"),
    ("Unary Round", "x.round()"),
    ("Unary Sign", "x.sign()"),
    ("Unary Gelu", "x.gelu()"),
    ("Unary Erf", "x.erf()"),
    ("Unary GeluErf", "x.gelu_erf()"),
    ("Unary Relu", "x.relu()"),
    ("Unary Silu", "x.silu()"),
    ("Elu", "x.elu(a)"),
    ("Powf", "x.powf(e)"),
    ("Unary Sqr", "x.sqr()"),
    ("Unary Sqrt", "x.sqrt()"),
    ("ToDevice", "x.to_device(device)"),
    ("Transpose", "x.transpose(a, b)"),
    ("Permute", "x.permute(dims)"),
    ("CustomOp1", "candle_nn::ops::sigmoid(x)"),
];

const HEAD: &str = include_str!("head.md");

/// What is said of both dtypes, or of each where they differ.
fn both(verdicts: [Option<Verdict>; 2]) -> String {
    let text = |verdict: Option<Verdict>| verdict.map_or("—", Verdict::text);
    match verdicts {
        [a, b] if a == b => text(a).into(),
        [a, b] => format!("F16: {}; BF16: {}", text(a), text(b)),
    }
}

fn is_safe(forward: [Option<Verdict>; 2], gradient: [Option<Verdict>; 2]) -> bool {
    forward.iter().chain(&gradient).flatten().all(|verdict| verdict.is_safe())
}

fn sections() -> Vec<Section> {
    rows::sections().into_iter().chain(neural::sections()).collect()
}

fn page(sections: &[Section]) -> String {
    let (mut text, mut unanswered) = (HEAD.to_owned(), Vec::new());
    for (heading, rows) in sections {
        let columns = "| method | as it is | result | gradient | use instead | why |";
        write!(text, "\n## {heading}\n\n{columns}\n|---|---|---|---|---|---|\n").expect("a string");
        for row in rows {
            let [forward, gradient] = row.measured();
            let safe = is_safe(forward, gradient);
            if !safe && row.instead.is_empty() {
                unanswered.push(row.method);
            }
            let safe = if safe { "safe" } else { "**no**" };
            let Row { method, instead, why, .. } = row;
            let (forward, gradient) = (both(forward), both(gradient));
            let line =
                format!("| `{method}` | {safe} | {forward} | {gradient} | {instead} | {why} |");
            writeln!(text, "{}", line.replace("|  |", "| |")).expect("a string");
        }
    }
    assert!(unanswered.is_empty(), "say what to use instead of {unanswered:?}");
    text
}

#[test]
fn candle_methods_do_what_the_page_says() {
    let path = package().join("docs/candle-methods.md");
    let page = page(&sections());
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &page).expect("docs/candle-methods.md can be written");
    }
    let file = fs::read_to_string(&path).unwrap_or_default();
    let differing = page.lines().zip(file.lines()).find(|(a, b)| a != b);
    assert!(
        file == page,
        "docs/candle-methods.md is not what was measured: `UPDATE_DOCS=1 cargo test candle_methods` \
         writes it; measured and written: {differing:?}"
    );
}

#[test]
fn every_differentiable_method_has_a_row() {
    let lock = fs::read_to_string(package().join("Cargo.lock")).expect("Cargo.lock");
    let version = "name = \"candle-core\"\nversion = \"0.11.1\"";
    assert!(lock.contains(version), "look for what is new in candle's backprop.rs and tensor.rs");
    let methods: Vec<&str> =
        sections().iter().flat_map(|(_, rows)| rows.iter().map(|row| row.method)).collect();
    for (op, method) in DIFFERENTIABLE {
        assert!(methods.contains(&method), "{op}: no row of {method}");
    }
    let different: BTreeSet<_> = methods.iter().collect();
    assert_eq!(different.len(), methods.len(), "a method twice");
}

#[test]
fn what_to_use_instead_exists() {
    let names = fs::read_to_string(package().join("docs/public-api.txt")).expect("public-api.txt");
    for row in sections().iter().flat_map(|(_, rows)| rows) {
        for part in [row.instead, row.why].iter().flat_map(|text| text.split("`ops::").skip(1)) {
            let end = part.find(|c: char| !c.is_alphanumeric() && c != '_');
            let name = format!("::ops::{}", &part[..end.unwrap_or(part.len())]);
            let found = names.lines().any(|line| {
                line.split_whitespace().any(|word| {
                    let at = word.strip_prefix("candle_amp").or(word.strip_prefix("crate"));
                    let rest = at.and_then(|word| word.strip_prefix(&name));
                    rest.is_some_and(|rest| {
                        !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
                    })
                })
            });
            assert!(found, "{}: no {name}", row.method);
        }
    }
}
