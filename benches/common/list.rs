//! The rows of a table, and what is wanted of them.

use crate::workload::Workload;

/// A row: something of the crate's beside something else.
#[derive(Clone, Debug)]
pub struct Row<W> {
    /// What the table calls it, and `--filter` looks for.
    pub name: String,
    /// The crate's side.
    pub ours: W,
    /// The other.
    pub peer: Peer<W>,
    /// The largest ratio of times that is good enough.
    pub target: Option<f64>,
}

/// What a row is compared with.
#[derive(Clone, Copy, Debug)]
pub enum Peer<W> {
    /// The same in PyTorch.
    Torch,
    /// Something else measured in this program, and what it is called.
    Own(W, &'static str),
    /// A number of seconds.
    Bound(f64),
    /// What would get through so much of the work's amount a second, and what it is called.
    Rate(f64, &'static str),
    /// Nothing.
    Nothing,
}

/// Rows whose sides take turns. What is compared within the crate is in one group.
#[derive(Debug)]
pub struct Group<W> {
    /// In the table's order.
    pub rows: Vec<Row<W>>,
}

impl<W> Default for Group<W> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

impl<W: Workload> Group<W> {
    /// Adds a row.
    pub fn row(&mut self, name: impl Into<String>, ours: W, peer: Peer<W>, target: Option<f64>) {
        self.rows.push(Row { name: name.into(), ours, peer, target });
    }

    /// Keeps the rows whose name has `substring` in it.
    pub fn retain(&mut self, substring: &str) {
        self.rows.retain(|row| row.name.contains(substring));
    }

    /// Makes all work small, and not to be judged.
    pub fn shrink(&mut self) {
        for row in &mut self.rows {
            row.target = None;
            row.ours.shrink();
            if let Peer::Own(other, _) = &mut row.peer {
                other.shrink();
            }
        }
    }
}
