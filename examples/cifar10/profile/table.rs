//! The table of `--profile`.

use std::time::Duration;

use candle_amp::diagnostics::ProfileRow;

use super::Step;
use crate::models::products;

/// A line of the table: the time of all steps measured.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Line {
    pub(super) name: &'static str,
    /// Forward; backward follows.
    pub(super) calls: usize,
    pub(super) forward: Duration,
    pub(super) backward: Duration,
    /// Of no pass.
    pub(super) rest: Duration,
    /// Of its products, forward and backward.
    pub(super) flops: f64,
}

impl Line {
    pub(super) fn total(&self) -> Duration {
        self.forward + self.backward + self.rest
    }
}

/// The time of each row without that of the rows within it.
pub(super) fn own_times(rows: &[ProfileRow]) -> Vec<Duration> {
    let mut own: Vec<Duration> = rows.iter().map(|row| row.duration).collect();
    let mut around: Vec<usize> = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        around.truncate(row.depth);
        if let Some(&outer) = around.last() {
            own[outer] = own[outer].saturating_sub(row.duration);
        }
        around.push(at);
    }
    own
}

/// Two for each multiply-add. Backward has as many for each of the inputs that get a gradient; attention, whose inputs
/// are one tensor, twice as many.
fn flops(row: &ProfileRow) -> f64 {
    let forward = 2. * products(row.name, &row.input_shapes, &row.output_shape) as f64;
    let wanted = row.wanted.iter().take(2).filter(|&&wanted| wanted).count() as f64;
    match (row.backward, row.name) {
        (false, _) => forward,
        (true, "sdpa") => 2. * forward,
        (true, _) => wanted * forward,
    }
}

/// The lines whose totals are the time of the steps together: operators, longest first, and the rest.
pub(super) fn lines(steps: &[Step]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    let mut between = Line { name: "between operators", ..Line::default() };
    let mut others: Vec<Line> = Vec::new();
    let mut other = Line { name: "other", ..Line::default() };
    for step in steps {
        let rows = step.profile.rows();
        for (row, own) in rows.iter().zip(own_times(rows)) {
            let at = lines.iter().position(|line| line.name == row.name).unwrap_or_else(|| {
                lines.push(Line { name: row.name, ..Line::default() });
                lines.len() - 1
            });
            let line = &mut lines[at];
            line.calls += usize::from(!row.backward);
            *(if row.backward { &mut line.backward } else { &mut line.forward }) += own;
            line.flops += flops(row);
        }
        let mut in_phases = Duration::ZERO;
        for phase in &step.phases {
            in_phases += phase.duration;
            let start = phase.start.duration_since(step.profile.began());
            let inside = |row: &&ProfileRow| {
                row.depth == 0 && row.start >= start && row.start < start + phase.duration
            };
            let inside: Duration = rows.iter().filter(inside).map(|row| row.duration).sum();
            let rest = phase.duration.saturating_sub(inside);
            match phase.name {
                "forward" => between.forward += rest,
                "backward" => between.backward += rest,
                name => match others.iter_mut().find(|line| line.name == name) {
                    Some(line) => line.rest += rest,
                    None => others.push(Line { name, rest, ..Line::default() }),
                },
            }
        }
        other.rest += step.profile.duration().saturating_sub(in_phases);
    }
    lines.sort_by_key(|line| std::cmp::Reverse(line.total()));
    lines.push(between);
    lines.extend(others);
    lines.push(other);
    lines
}

/// The table, in milliseconds a step.
pub(super) fn table(steps: &[Step], synchronised: bool) -> String {
    let (count, first) = (steps.len(), steps.first().map_or(0, |step| step.number));
    let plural = if count == 1 { "" } else { "s" };
    let mut text = format!(
        "\nProfile of {count} step{plural} after step {first}, in milliseconds a step:\n\n\
         {:<18} {:>6} {:>9} {:>9} {:>9} {:>8} {:>8}\n",
        "", "calls", "forward", "backward", "total", "share", "GFLOP/s"
    );
    let all: Duration = steps.iter().map(|step| step.profile.duration()).sum();
    let a_step = |time: Duration| time.as_secs_f64() / count.max(1) as f64;
    let some = |is: bool, text: String| if is { text } else { String::new() };
    let ms = |time: Duration| some(!time.is_zero(), format!("{:.3}", 1000. * a_step(time)));
    for line in lines(steps) {
        let calls = line.calls as f64 / count.max(1) as f64;
        let share = 100. * line.total().as_secs_f64() / all.as_secs_f64();
        let speed = line.flops / (line.forward + line.backward).as_secs_f64() / 1e9;
        let row = format!(
            "{:<18} {:>6} {:>9} {:>9} {:>9} {share:>6.1} % {:>8}",
            line.name,
            some(line.calls > 0, format!("{calls:.0}")),
            ms(line.forward),
            ms(line.backward),
            ms(line.total()),
            some(line.flops > 0., format!("{speed:.1}")),
        );
        text += row.trim_end();
        text.push('\n');
    }
    text += &format!("{:<45} {:>9} {:>6.1} %\n", "a step", ms(all), 100.);
    if synchronised {
        text += "\nThe device was waited for after each operator: other steps take less time.\n";
    }
    text + "\n"
}
