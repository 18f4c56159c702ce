//! How the blocks of a product are taken in parts that stay in a cache.

use std::ops::Range;

/// Words of the right matrix that stay in the second-level cache while all rows pass: half of 1 MiB.
pub(super) const NEAR: usize = 1 << 17;

/// `range` in parts of `each`, and what is left.
pub(super) fn parts(range: Range<usize>, each: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(each).map(move |first| first..end.min(first + each))
}
