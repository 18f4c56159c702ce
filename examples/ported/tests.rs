use std::fs;
use std::path::Path;

use super::*;

fn read(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/ported").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Lines that are neither blank nor a comment of Rust's.
fn lines_of_rust(text: &str) -> usize {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

/// Lines that are neither blank nor a comment nor a documentation string of Python's, which is one line here.
fn lines_of_python(text: &str) -> usize {
    let code =
        |line: &&str| !line.is_empty() && !line.starts_with('#') && !line.starts_with("\"\"\"");
    text.lines().map(str::trim).filter(code).count()
}

#[test]
fn three_steps_have_the_losses_of_pytorch() -> anyhow::Result<()> {
    for (name, train) in PROGRAMS {
        let comparison = Comparison::run(name, train, DType::F32, 3)?;
        assert_eq!((comparison.losses.len(), comparison.original.len()), (3, 10), "{name}");
        // After so few steps rounding has not grown, so that a setting of the optimizer shows.
        assert!(comparison.difference() <= 1e-5, "{}", comparison.row(name, DType::F32));
    }
    Ok(())
}

#[test]
fn programs_have_at_most_1_3_times_the_lines_of_the_originals() {
    for (name, _) in PROGRAMS {
        let ours = lines_of_rust(&read(&format!("{name}.rs")));
        let theirs = lines_of_python(&read(&format!("pytorch/{name}.py")));
        assert!(theirs > 20, "{name}: {theirs} lines");
        assert!(10 * ours <= 13 * theirs, "{name}: {ours} lines for {theirs}");
    }
}

#[test]
fn a_loss_that_is_no_number_is_far_away() {
    let comparison = Comparison { losses: vec![1.0, f32::NAN, 1.0], original: vec![1.0; 3] };
    assert_eq!(comparison.difference(), f32::INFINITY);
}

#[test]
fn options_are_checked() {
    let refused = |arguments: &str| Options::try_parse_from(arguments.split(' ')).is_err();
    assert!(refused("ported --steps 0") && refused("ported resnet"));
    assert!(refused("ported --precision f64") && !refused("ported vit --precision bf16"));
}
