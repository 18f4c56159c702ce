//! The counts of a histogram, and the exponents that they are of.

/// The exponents counted one by one; what lies beyond counts as the last. `F32` has -149 to 127, and
/// a scale moves them by 127 at most.
pub(crate) const LOWEST: i32 = -300;
pub(crate) const HIGHEST: i32 = 300;
pub(crate) const BINS: usize = (HIGHEST - LOWEST + 1) as usize;

/// Elements by `floor(log2(|x|))`, from [`LOWEST`] up. Each count is three: a power of two itself;
/// what lies between; and from 2 - 2⁻¹¹ times the power on, which `F16` rounds to the next. So the
/// edges of `F16`, after a scale that is a power of two, are edges of the counts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Counts {
    pub(crate) bins: Vec<[u64; 3]>,
    pub(crate) zero: u64,
    pub(crate) infinite: u64,
    pub(crate) nan: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Self { bins: vec![[0; 3]; BINS], zero: 0, infinite: 0, nan: 0 }
    }
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.bins.iter_mut().zip(&other.bins) {
            for (mine, theirs) in mine.iter_mut().zip(theirs) {
                *mine += theirs;
            }
        }
        self.zero += other.zero;
        self.infinite += other.infinite;
        self.nan += other.nan;
    }
}
