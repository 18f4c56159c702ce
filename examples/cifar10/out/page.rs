//! The page: all pictures and tables in one file, which needs nothing else.

use std::fmt::Write;

use anyhow::Result;

use super::{
    images,
    pictures::{self, COLOURS, Picture},
    run::Finished,
};
use crate::{common::progress::short, compare::Comparison, report::Report};

const STYLE: &str = include_str!("page.css");

/// What is on the page.
#[derive(Debug)]
pub(crate) struct Page<'a> {
    comparison: &'a Comparison,
    runs: Vec<Finished>,
    charts: Vec<Picture>,
    confusions: Vec<Picture>,
}

impl<'a> Page<'a> {
    /// A page of the `runs` of a `comparison`, in its order.
    pub(crate) fn new(comparison: &'a Comparison, runs: Vec<Finished>) -> Result<Self> {
        let charts = pictures::charts(&runs)?;
        let confusion = |precision| {
            let mut tests = runs.iter().filter(|run| run.precision == precision);
            let first = tests.next().map(|run| run.test.clone());
            let all = tests.fold(first, |sum, run| {
                sum.map(|mut sum| {
                    sum.add(&run.test);
                    sum
                })
            });
            all.map(|test| pictures::confusion(precision, &test))
        };
        let confusions = pictures::precisions(&runs).into_iter().filter_map(confusion);
        let confusions = confusions.collect::<Result<_>>()?;
        Ok(Self { comparison, charts, confusions, runs })
    }

    pub(crate) fn pictures(&self) -> impl Iterator<Item = &Picture> {
        self.charts.iter().chain(&self.confusions)
    }

    /// The page: HTML that is XML too.
    pub(crate) fn html(&self) -> String {
        let precisions = pictures::precisions(&self.runs).join(", ");
        let title = match self.comparison.runs().first() {
            Some(run) => escape(&format!("{} in {precisions}", run.model)),
            None => "No run".to_owned(),
        };
        let caption = self.comparison.caption().unwrap_or_default();
        let body = [
            table(&self.comparison.rows()),
            self.comparison.notes().iter().map(|note| paragraph(note)).collect(),
            figures(&self.charts),
            self.gradients(),
            section("Confusion matrix", &figures(&self.confusions)),
            self.worst(),
            self.all_runs(),
        ]
        .concat();
        format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
             <title>{title}</title>\n<style>\n{}{STYLE}</style>\n</head>\n<body>\n<main>\n\
             <h1>{title}</h1>\n{}{body}</main>\n</body>\n</html>\n",
            colours(),
            paragraph(&caption)
        )
    }

    /// What F16 makes of the gradients of each run.
    fn gradients(&self) -> String {
        let head = ["", "loss scale", "to zero", "subnormal", "normal", "overflow", "zero before"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for run in &self.runs {
            let Some(gradients) = pictures::last_gradients(run) else { continue };
            let fit = gradients.in_f16;
            let share = |part: u64| {
                format!("{:.2} %", 100. * part as f64 / gradients.elements().max(1) as f64)
            };
            rows.push(vec![
                run.name(),
                short(gradients.scale),
                share(fit.to_zero),
                share(fit.subnormal),
                share(fit.normal),
                share(fit.overflow + gradients.infinite + gradients.nan),
                share(gradients.zeros),
            ]);
        }
        let what = "The gradients of the last step as they would be in F16, times the loss scale. \
                    To zero: lost. Overflow: infinite.";
        section("Gradients in F16", &(paragraph(what) + &table(&rows)))
    }

    /// The images that the first run of each precision is most wrong about.
    fn worst(&self) -> String {
        let mut html = String::new();
        for precision in pictures::precisions(&self.runs) {
            let Some(run) = self.runs.iter().find(|run| run.precision == precision) else {
                continue;
            };
            let _ = write!(html, "<h3>{}</h3>\n<ul class=\"images\">\n", escape(&run.name()));
            for (answer, png) in run.test.worst.iter().zip(&run.worst) {
                let class = |class: usize| escape(run.test.classes.get(class).map_or("?", |s| s));
                let (label, prediction) = (class(answer.label), class(answer.prediction));
                let _ = writeln!(
                    html,
                    "<li><img src=\"{}\" width=\"96\" height=\"96\" alt=\"test image {}: \
                     {label}\"/><span>{label}, taken for {prediction} ({:.1} %)</span></li>",
                    images::data_uri(png),
                    answer.index,
                    100. * answer.probability
                );
            }
            html += "</ul>\n";
        }
        let what = "The test images whose right class got the lowest probability, which is in \
                    brackets.";
        section("Worst images", &(paragraph(what) + &html))
    }

    /// A line for each run.
    fn all_runs(&self) -> String {
        let head = ["", "epochs", "steps", "skipped", "last loss", "test accuracy", "median step"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for (run, report) in self.runs.iter().zip(self.comparison.runs()) {
            let Report { epochs, steps, skipped_steps, final_loss, interrupted, .. } = report;
            let cut = if *interrupted { ", interrupted" } else { "" };
            rows.push(vec![
                run.name(),
                epochs.to_string(),
                format!("{steps}{cut}"),
                skipped_steps.to_string(),
                format!("{final_loss:.4}"),
                format!("{:.2} %", 100. * report.test_accuracy),
                format!("{:.1} ms", 1000. * report.median_step_seconds),
            ]);
        }
        let what = "Every step, checkpoints and all numbers are in the folder of this page, a \
                    subfolder for each run.";
        section("Runs", &(table(&rows) + &paragraph(what)))
    }
}

impl Finished {
    fn name(&self) -> String {
        format!("{}, seed {}", self.precision, self.seed)
    }
}

/// The colours of both pages, for the rules that use them.
fn colours() -> String {
    let light = COLOURS.map(|colour| format!("--{}: {}; ", colour.name, colour.light())).concat();
    let dark = COLOURS.map(|colour| format!("--{}: {}; ", colour.name, colour.dark)).concat();
    format!(
        ":root {{ color-scheme: light dark; {light}}}\n\
         @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
    )
}

fn figures(pictures: &[Picture]) -> String {
    let mut html = "<div class=\"pictures\">\n".to_owned();
    for picture in pictures {
        let (svg, caption) = (picture.inline(), escape(&picture.caption));
        let _ = writeln!(html, "<figure>{svg}<figcaption>{caption}</figcaption></figure>");
    }
    html + "</div>\n"
}

fn section(title: &str, html: &str) -> String {
    format!("<section>\n<h2>{}</h2>\n{html}</section>\n", escape(title))
}

fn paragraph(text: &str) -> String {
    format!("<p>{}</p>\n", escape(text))
}

/// A table whose first row and column are names.
fn table(rows: &[Vec<String>]) -> String {
    let mut html = "<div class=\"wide\"><table>\n".to_owned();
    for (at, row) in rows.iter().enumerate() {
        html += "<tr>";
        for (column, cell) in row.iter().enumerate() {
            let (tag, scope) = match (at, column) {
                (0, _) => ("th", " scope=\"col\""),
                (_, 0) => ("th", " scope=\"row\""),
                _ => ("td", ""),
            };
            let _ = write!(html, "<{tag}{scope}>{}</{tag}>", escape(cell));
        }
        html += "</tr>\n";
    }
    html + "</table></div>\n"
}

/// `text` as a part of HTML.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
