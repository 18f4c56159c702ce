//! docs/operators.md says what the code says.

use std::fmt::Write as _;
use std::fs;

use candle_amp::Op;

use crate::cases;
use crate::util::package;

const HEAD: &str = "\
# Operators

What `Autocast` does with each operator. *Rule* is that of the crate's own preset,
`Policy::default()`; *PyTorch* that of `Policy::pytorch()`, the CUDA lists of PyTorch 2.15.
`amp.allow(op)` makes a rule `Lower`, and `amp.deny(op)` makes it `Full`. `policy.with(op, cast)` sets any rule, and
`amp.with_policy(policy)` applies it.

| rule | inputs | output |
|---|---|---|
| `Lower` | cast to the compute dtype | compute dtype |
| `Full` | cast to `F32` | `F32` |
| `FullMath` | as they are | dtype of the first input |
| `Promote` | cast to the widest among them; `F16` with `BF16` is `F32` | that dtype |
| `Keep` | as they are | dtype of the first input |
| `Banned` | an error, if the compute dtype has 16 bits | |

Arithmetic is `F32` under every rule. Integers and `F64` are never cast, and an operator given any `F64` runs as it is,
in `F64`. The losses return `F32` under every rule (`F64` for `F64` inputs). `pixel_shuffle`, `pixel_unshuffle` and
`replication_pad2d` are candle's, and ignore scopes.

Variants have no row, and follow that of their operator:

| variants | follow |
|---|---|
| `adaptive_avg_pool2d`, `adaptive_max_pool2d` | `avg_pool2d`, `max_pool2d` |
| `batch_norm_eval` | `batch_norm` |
| `conv_transpose2d_grouped` | `conv_transpose2d` |
| `rope_i`, `rope_thd` | `rope` |
| `sdpa_packed`, `sdpa_softcapped` | `sdpa` |
| `upsample_bilinear2d_with_scale` | `upsample_bilinear2d` |
| names that end in `_smoothed`, `_dims` or `_keepdim` | the name without that end |
| functions of `ops::channels_last` | the function of that name in `ops` |

For contributors: `tests/it/dtype_flow.rs` tests every rule, for every input dtype. `tests/it/gradients.rs` tests every
gradient, in every dtype and layout, on the cases in the last column.

This file is written by `UPDATE_DOCS=1 cargo test operator_table`, and checked by `cargo test`.

";

fn table() -> String {
    let mut text = HEAD.to_owned();
    text += "| operator | rule | PyTorch | reason | test cases |\n|---|---|---|---|---|\n";
    let files = cases::files();
    for op in Op::ALL {
        let proof = files.iter().find(|(of, _)| of == op).map_or("", |(_, file)| *file);
        let (name, reason) = (op.name(), op.reason());
        let (rule, pytorch) = (op.default_cast(), op.pytorch_cast());
        writeln!(text, "| `{name}` | `{rule:?}` | `{pytorch:?}` | {reason} | `{proof}` |")
            .expect("a string takes everything");
    }
    text
}

#[test]
fn operator_table() {
    let path = package().join("docs/operators.md");
    let table = table();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &table).expect("docs/operators.md can be written");
    }
    let file = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        file == table,
        "docs/operators.md is not what the code says: `UPDATE_DOCS=1 cargo test operator_table` \
         writes it; it should be\n\n{table}"
    );
}
