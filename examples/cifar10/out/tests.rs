use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use candle_amp::{checkpoints::Checkpointer, random};
use roxmltree::{Document, ParsingOptions};
use serde_json::Value;

use super::{
    pictures::{COLOURS, Colour},
    rows::{Row, read},
};
use crate::{
    common::{self, options::Usage, testing::parse},
    data::CLASSES,
    evaluation::WORST,
    options::Options,
    run,
};

/// A place for a folder of a test's own, which goes with it.
struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("candle-amp-out-{}-{name}", std::process::id())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The history of the run in `folder`, without what no two runs share.
pub(crate) fn rows_without_times(folder: &Path) -> Result<Vec<Row>> {
    let mut rows = read(&folder.join("history.jsonl"))?;
    for row in &mut rows {
        if let Row::Step(step) = row {
            step.ms = 0.;
        }
    }
    Ok(rows)
}

/// Trains with `arguments` and `--out place`.
fn train(place: &Place, arguments: &str) -> Result<()> {
    let _fork = random::fork_rng_guard();
    let mut options: Options = parse(&format!("--smoke --model mlp --lr 0.001 {arguments}"))?;
    options.out = Some(place.0.clone());
    run(&options)
}

fn json(path: &Path) -> Result<Value> {
    let text = fs::read(path).with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text).with_context(|| path.display().to_string())
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let name = |entry: std::io::Result<fs::DirEntry>| -> Result<String> {
        Ok(entry?.file_name().to_string_lossy().into_owned())
    };
    let mut names = fs::read_dir(folder)?.map(name).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn document(text: &str) -> Result<Document<'_>> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Ok(Document::parse_with_options(text, options)?)
}

#[test]
fn a_comparison_leaves_a_folder_with_everything() -> Result<()> {
    let place = Place::new("compare");
    // F16 overflows until its scale has halved often enough.
    train(&place, "--compare f32,bf16,f16 --steps 7 --init-scale 16777216")?;
    let folder = place.0.as_path();
    let runs = ["bf16-seed-0", "f16-seed-0", "f32-seed-0"];
    let files = ["index.html", "options.toml", "pictures", "report.json"];
    assert_eq!(names(folder)?, [&runs[..2], &runs[2..], &files].concat());
    let options: toml::Table = fs::read_to_string(folder.join("options.toml"))?.parse()?;
    assert_eq!(
        options["compare"].as_array(),
        Some(&["f32", "bf16", "f16"].map(Into::into).to_vec())
    );
    assert_eq!((&options["steps"], &options["model"]), (&7.into(), &"mlp".into()));
    let summary = json(&folder.join("report.json"))?;
    assert_eq!(summary["runs"].as_array().map(Vec::len), Some(3));

    for run in runs {
        let folder = folder.join(run);
        let report = json(&folder.join("report.json"))?;
        let all = summary["runs"].as_array().context("runs")?;
        assert!(all.iter().any(|one| one["precision"] == report["precision"]), "{run}");
        history_is_the_run_s(&folder, &report)?;
        test_is_the_run_s(&folder, &report)?;
        let saved = names(&folder.join("checkpoints"))?;
        assert!((1..=2).contains(&saved.len()), "the last and the best: {saved:?}");
        assert_eq!(saved.last().map(String::as_str), Some("step-00000007.safetensors"));
    }
    let skipped = json(&folder.join("f16-seed-0/report.json"))?["skipped_steps"].clone();
    assert!(skipped.as_u64() > Some(0), "no step of F16 was skipped, which this test is for");
    Ok(())
}

/// Checks the rows against the report, which the loop wrote by another way.
fn history_is_the_run_s(folder: &Path, report: &Value) -> Result<()> {
    let rows = read(&folder.join("history.jsonl"))?;
    let (mut steps, mut epochs) = (Vec::new(), Vec::new());
    for row in &rows {
        match row {
            Row::Step(step) => steps.push(step),
            Row::Epoch(epoch) => epochs.push(epoch),
        }
    }
    assert_eq!(steps.len(), 7);
    assert!(steps.iter().zip(1..).all(|(step, number)| step.step == number && step.ms > 0.));
    let skipped: Vec<bool> = steps.iter().map(|step| step.skipped).collect();
    let count = skipped.iter().filter(|skipped| **skipped).count();
    assert_eq!(report["skipped_steps"], count, "{folder:?}");

    // The scale halves after each skipped step, and the rate stands still.
    let schedule = common::rates(7);
    let mut taken = 0;
    let mut scale = steps[0].scale;
    for step in &steps {
        assert_eq!(step.scale, scale, "step {} of {folder:?}", step.step);
        let rate = 0.001 * schedule.factor(taken);
        assert!((step.lr - rate).abs() < 1e-12, "step {}: {} for {rate}", step.step, step.lr);
        if step.skipped {
            scale /= 2.;
        } else {
            taken += 1;
        }
    }
    assert_eq!(report["final_scale"].as_f64(), Some(scale.into()));

    assert_eq!(report["epochs"], epochs.len());
    for (index, epoch) in epochs.iter().enumerate() {
        let own = steps.iter().filter(|step| step.epoch == epoch.epoch);
        let losses: Vec<f64> = own.filter_map(|step| step.loss).map(f64::from).collect();
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        let loss = epoch.train_loss.context("a loss")?;
        assert!((loss - mean).abs() < 1e-6, "{loss} for {mean}");
        assert_eq!(report["losses"][index], loss);
        assert_eq!(report["test_accuracy_per_epoch"][index], epoch.test_accuracy);
        assert!(epoch.test_loss > Some(0.));
        let gradients = epoch.gradients.as_ref().context("gradients")?;
        assert_eq!(gradients.elements(), report_weights(report)?);
        let fit = gradients.in_f16;
        let counted: u64 = gradients.exponents.iter().map(|(_, count)| count).sum();
        assert_eq!(fit.to_zero + fit.subnormal + fit.normal + fit.overflow, counted);
        let last = steps.iter().rfind(|step| step.epoch == epoch.epoch).context("a step")?;
        assert_eq!(gradients.scale, last.scale);
        assert_eq!(gradients.infinite + gradients.nan > 0, last.skipped, "{folder:?}");
    }
    Ok(())
}

/// The number of weights, which are F32.
fn report_weights(report: &Value) -> Result<u64> {
    Ok(report["weight_bytes"].as_u64().context("weights")? / 4)
}

fn test_is_the_run_s(folder: &Path, report: &Value) -> Result<()> {
    let test = json(&folder.join("test.json"))?;
    let count = |label: usize, prediction: usize| {
        test["confusion"][label][prediction].as_u64().unwrap_or(u64::MAX)
    };
    let all: u64 = (0..CLASSES * CLASSES).map(|at| count(at / CLASSES, at % CLASSES)).sum();
    assert_eq!(all, 40, "test images of --smoke");
    let trace: u64 = (0..CLASSES).map(|class| count(class, class)).sum();
    assert_eq!(report["test_accuracy"], trace as f64 / 40.);
    assert_eq!(test["classes"].as_array().map(Vec::len), Some(CLASSES));

    let worst = test["worst"].as_array().context("worst images")?;
    assert_eq!(worst.len(), WORST);
    let probability = |answer: &Value| answer["probability"].as_f64().unwrap_or(f64::NAN);
    assert!(worst.is_sorted_by(|a, b| probability(a) <= probability(b)), "{worst:?}");
    for at in 1..=WORST {
        let file = fs::read(folder.join(format!("worst-{at:02}.png")))?;
        png::Decoder::new(std::io::Cursor::new(file)).read_info()?;
    }
    Ok(())
}

#[test]
fn the_page_holds_all_pictures_and_needs_nothing_else() -> Result<()> {
    let place = Place::new("page");
    train(&place, "--compare f32,f16 --seeds 2 --seed 3 --steps 3")?;
    let pictures = names(&place.0.join("pictures"))?;
    let expected = [
        "accuracy",
        "confusion-f16",
        "confusion-f32",
        "gradient-exponents",
        "learning-rate",
        "loss",
        "loss-scale",
        "step-time",
    ];
    let files = expected.map(|name| ["png", "svg"].map(|ending| format!("{name}.{ending}")));
    let mut files = files.concat();
    files.sort();
    assert_eq!(pictures, files);
    let (svgs, pngs): (Vec<_>, Vec<_>) =
        pictures.into_iter().partition(|name| name.ends_with("svg"));
    for name in &pngs {
        let file = fs::read(place.0.join("pictures").join(name))?;
        let mut reader = png::Decoder::new(std::io::Cursor::new(file)).read_info()?;
        let mut pixels = vec![0; reader.output_buffer_size().context("its size")?];
        let info = reader.next_frame(&mut pixels)?;
        assert_eq!(info.width, 1260, "{name}");
        let pixels: Vec<_> = pixels
            .as_chunks()
            .0
            .iter()
            .map(|[r, g, b]| format!("#{r:02X}{g:02X}{b:02X}"))
            .collect();
        let has = |name: &str| {
            let colour = COLOURS.iter().find(|colour| colour.name == name).map(Colour::light);
            pixels.iter().filter(|&pixel| Some(pixel) == colour.as_ref()).count() > 100
        };
        // The colours of a matrix are mixed ones.
        let line = if name.starts_with("confusion") { "lines" } else { "f16" };
        for colour in ["paper", "ink", line] {
            assert!(has(colour), "{name}: no {colour}");
        }
    }
    for name in &svgs {
        let text = fs::read_to_string(place.0.join("pictures").join(name))?;
        let svg = document(&text).with_context(|| name.clone())?;
        assert_eq!(svg.root_element().tag_name().name(), "svg");
        let has = |tag: &str| {
            svg.descendants().any(|node| node.has_tag_name(("http://www.w3.org/2000/svg", tag)))
        };
        assert!(has("text") && (has("polyline") || has("rect")), "{name} is empty");
        let size = svg.root_element().attribute("viewBox");
        assert!(size.is_some_and(|size| size.starts_with("0 0 1260 ")), "{name}: {size:?}");
    }

    let html = fs::read_to_string(place.0.join("index.html"))?;
    for run in ["f32, seed 3", "f16, seed 3", "f32, seed 4", "f16, seed 4"] {
        assert!(html.contains(&format!("<th scope=\"row\">{run}</th>")), "{run}");
    }
    let page = document(&html)?;
    let all =
        |tag: &'static str| page.descendants().filter(move |node| node.tag_name().name() == tag);
    assert_eq!(all("svg").count(), svgs.len());
    for svg in all("svg") {
        let title = svg.children().find(|node| node.tag_name().name() == "title");
        assert!(title.and_then(|title| title.text()).is_some_and(|text| !text.is_empty()));
    }
    assert_eq!(all("img").count(), 2 * WORST, "the first run of each precision");
    for image in all("img") {
        let source = image.attribute("src").unwrap_or_default();
        assert!(source.starts_with("data:image/png;base64,"), "{source:.80}");
        assert!(image.attribute("alt").is_some_and(|alt| !alt.is_empty()));
    }
    for tag in ["script", "link", "iframe", "object", "a"] {
        assert_eq!(all(tag).count(), 0, "{tag}");
    }
    assert!(!html.contains("url(") && !html.contains("@import"), "a resource from elsewhere");
    for colour in COLOURS {
        let (name, light) = (colour.name, colour.light());
        assert_eq!(html.matches(&light).count(), 1, "{name}, {light}, where it is defined");
        let used = html.contains(&format!("var(--{name})"));
        assert!(used || name == "bf16", "{name} is not used");
    }
    Ok(())
}

#[test]
fn the_last_checkpoint_has_the_accuracy_of_the_report() -> Result<()> {
    let place = Place::new("checkpoint");
    train(&place, "--precision f16 --master-weights --steps 6")?;
    let folder = place.0.join("f16-seed-0");
    let saved = Checkpointer::new(folder.join("checkpoints"))?.latest()?.context("a checkpoint")?;
    let parts: Vec<&str> = saved.parts().collect();
    let all = ["history", "model", "optimizer", "random", "run", "scaler", "scheduler"];
    assert_eq!((saved.step(), parts), (6, all.to_vec()));
    assert_eq!(saved.metric(), json(&folder.join("report.json"))?["test_accuracy"].as_f64());
    Ok(())
}

#[test]
fn each_run_of_a_comparison_has_a_profile() -> Result<()> {
    let place = Place::new("profile");
    train(&place, "--compare f32,bf16 --steps 5 --profile")?;
    for run in ["f32-seed-0", "bf16-seed-0"] {
        let trace = json(&place.0.join(run).join("profile.json"))?;
        assert!(trace["traceEvents"].as_array().is_some_and(|events| !events.is_empty()), "{run}");
    }
    Ok(())
}

#[test]
fn a_folder_that_will_not_do_is_refused_before_training() -> Result<()> {
    let place = Place::new("refused");
    fs::create_dir_all(&place.0)?;
    let shown = place.0.display().to_string();
    train(&place, "--precision f32 --steps 1")?; // an empty one will do
    let before = fs::read(place.0.join("report.json"))?;
    let error = train(&place, "--precision bf16 --steps 1").expect_err("a run");
    assert!(error.is::<Usage>());
    let message = format!(
        "--out {shown}: this folder holds a run; name a new one, or go on with --resume {shown}"
    );
    assert_eq!(format!("{error:#}"), message);
    assert_eq!(fs::read(place.0.join("report.json"))?, before);
    assert!(!place.0.join("bf16-seed-0").exists(), "nothing was trained");

    fs::remove_file(place.0.join("options.toml"))?;
    let error = train(&place, "--steps 1").expect_err("other files");
    let message = format!("--out {shown}: this folder is not empty; name a new one");
    assert_eq!(format!("{error:#}"), message);

    let file = Place(place.0.join("report.json"));
    let error = train(&file, "--steps 1").expect_err("a file");
    let message = format!("--out {}: this is a file; name a folder", file.0.display());
    assert_eq!(format!("{error:#}"), message);
    assert!(error.is::<Usage>());

    let within = Place(file.0.join("run"));
    let error = format!("{:#}", train(&within, "--steps 1").expect_err("below a file"));
    let start = format!("--out {}: cannot make this folder: ", within.0.display());
    assert!(error.starts_with(&start) && error.lines().count() == 1, "{error}");
    Ok(())
}
