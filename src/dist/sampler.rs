//! Which samples each rank sees.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::communicator::Communicator;
use crate::Result;
use crate::checkpoints::{State, Stateful};
use crate::error::{ArgumentError, CheckpointError};

/// What becomes of samples that do not divide among the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uneven {
    /// Some are seen twice in the epoch: the first of its order follow its last. Every sample is seen.
    #[default]
    Repeat,
    /// The last of the epoch's order are left out, fewer than there are ranks. None is seen twice.
    Drop,
}

/// Deals a data set's samples out to the ranks: every sample once per epoch, each to one rank.
///
/// The order of an epoch is that of its number and the seed, the same on all ranks. Ranks take turns: `N` ranks with
/// batches of `B / N` see, batch by batch, the samples that one rank sees in batches of `B`. All ranks have the
/// same number of batches, the last of which may be smaller.
///
/// As part of a [`Checkpoint`](crate::checkpoints::Checkpoint) it goes on in the middle of an epoch, on as many ranks
/// as there are then.
///
/// # Examples
///
/// ```
/// use candle_amp::dist::{Sampler, Single};
///
/// let mut sampler = Sampler::new(&Single, 10, 7)?; // ten samples, seed 7
/// for _ in 0..2 {
///     let mut seen = Vec::new();
///     while let Some(samples) = sampler.next_batch(4) {
///         seen.extend(samples); // 4, 4 and 2
///     }
///     seen.sort();
///     assert_eq!(seen, (0..10).collect::<Vec<_>>());
/// }
/// assert_eq!(sampler.epoch(), 2);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.utils.data.DistributedSampler`.
#[derive(Clone, Debug)]
pub struct Sampler {
    samples: usize,
    rank: usize,
    size: usize,
    seed: u64,
    shuffle: bool,
    uneven: Uneven,
    epoch: u64,
    /// Samples of the epoch that all ranks have taken together.
    taken: usize,
    /// Of the epoch that it was made for.
    order: Option<(u64, Vec<usize>)>,
}

impl Sampler {
    /// A sampler of `samples` in shuffled order, at the start of epoch 0.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`]: there is no sample.
    pub fn new(communicator: &dyn Communicator, samples: usize, seed: u64) -> Result<Self> {
        if samples == 0 {
            let (name, got, expected) = ("samples", 0.0, "1 or more");
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
        let (rank, size) = (communicator.rank(), communicator.size());
        let (shuffle, uneven) = (true, Uneven::default());
        Ok(Self { samples, rank, size, seed, shuffle, uneven, epoch: 0, taken: 0, order: None })
    }

    /// The same in the order of the data set, if not `shuffle`.
    #[must_use]
    pub fn with_shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, order: None, ..self }
    }

    /// The same with another fate of the samples that do not divide.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`] for [`Uneven::Drop`] with fewer samples than ranks: none would be left.
    pub fn with_uneven(self, uneven: Uneven) -> Result<Self> {
        if uneven == Uneven::Drop && self.samples < self.size {
            let (name, got) = ("samples", self.samples as f64);
            let expected = "one for every rank, or `Uneven::Repeat`";
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
        Ok(Self { uneven, ..self })
    }

    /// The epoch that the next batch belongs to, or ends.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Starts an epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        (self.epoch, self.taken) = (epoch, 0);
    }

    /// How many samples each rank sees in an epoch.
    pub fn samples_per_rank(&self) -> usize {
        match self.uneven {
            Uneven::Repeat => self.samples.div_ceil(self.size),
            Uneven::Drop => self.samples / self.size,
        }
    }

    /// The next samples of this rank: `batch` of them, or what is left of the epoch. `None` at its end; the call after
    /// that begins the next epoch.
    pub fn next_batch(&mut self, batch: usize) -> Option<Vec<usize>> {
        // Not a multiple of the turns where another number of ranks has taken some.
        let rest = self.samples.saturating_sub(self.taken);
        let left = match self.uneven {
            Uneven::Repeat => rest.div_ceil(self.size),
            Uneven::Drop => rest / self.size,
        };
        if left == 0 {
            self.set_epoch(self.epoch + 1);
            return None;
        }
        let (start, count) = (self.taken + self.rank, batch.clamp(1, left));
        self.taken += count * self.size;
        let (size, samples) = (self.size, self.samples);
        let order = self.order();
        Some((0..count).map(|turn| order[(start + turn * size) % samples]).collect())
    }

    /// The order of the epoch.
    fn order(&mut self) -> &[usize] {
        let made = self.order.take().filter(|(epoch, _)| *epoch == self.epoch);
        let (_, order) = self.order.insert(made.unwrap_or_else(|| {
            let mut order: Vec<usize> = (0..self.samples).collect();
            if self.shuffle {
                let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
                rng.set_stream(self.epoch);
                order.shuffle(&mut rng);
            }
            (self.epoch, order)
        }));
        order
    }
}

/// Seed, epoch, and how much of it is taken. The data set must have as many samples; the number of ranks may differ.
impl Stateful for Sampler {
    fn save(&self) -> Result<State> {
        let state = State::default().with("samples", self.samples).with("seed", self.seed);
        Ok(state.with("epoch", self.epoch).with("taken", self.taken))
    }

    fn check(&self, state: &State) -> Result<()> {
        state.expect([], &["samples", "seed", "epoch", "taken"])?;
        for name in ["seed", "epoch", "taken"] {
            state.value::<u64>(name)?;
        }
        let samples: usize = state.value("samples")?;
        if samples == self.samples {
            return Ok(());
        }
        let (name, got) = ("the number of samples".to_owned(), samples.to_string());
        let expected = self.samples.to_string();
        Err(CheckpointError::State { name, got, expected }.into())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        (self.seed, self.epoch) = (state.value("seed")?, state.value("epoch")?);
        (self.taken, self.order) = (state.value("taken")?, None);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dist::{Pending, ReduceOp, Single};
    use candle_core::Tensor;

    /// A rank that exchanges nothing.
    #[derive(Debug)]
    struct Rank(usize, usize);

    impl Communicator for Rank {
        fn rank(&self) -> usize {
            self.0
        }
        fn size(&self) -> usize {
            self.1
        }
        fn start_all_reduce(&self, _: &Tensor, _: ReduceOp) -> Result<Pending> {
            unreachable!()
        }
        fn start_reduce_scatter(&self, _: &Tensor, _: ReduceOp) -> Result<Pending> {
            unreachable!()
        }
        fn start_all_gather(&self, _: &Tensor) -> Result<Pending> {
            unreachable!()
        }
        fn start_broadcast(&self, _: &Tensor, _: usize) -> Result<Pending> {
            unreachable!()
        }
        fn barrier(&self) -> Result<()> {
            unreachable!()
        }
    }

    fn samplers(size: usize, samples: usize) -> Vec<Sampler> {
        (0..size).map(|rank| Sampler::new(&Rank(rank, size), samples, 3).unwrap()).collect()
    }

    /// The samples of all ranks in the next batches, sorted.
    fn together(samplers: &mut [Sampler], batch: usize) -> Option<Vec<usize>> {
        let batches: Vec<_> = samplers.iter_mut().map(|s| s.next_batch(batch)).collect();
        let all: Option<Vec<_>> = batches.into_iter().collect();
        let mut all = all?.concat();
        all.sort_unstable();
        Some(all)
    }

    #[test]
    fn ranks_see_together_what_one_sees_alone() {
        for size in [1, 2, 3, 4] {
            let (mut one, mut all) = (samplers(1, 60), samplers(size, 60));
            for _ in 0..2 {
                let mut seen = Vec::new();
                while let Some(batch) = together(&mut all, 12 / size) {
                    assert_eq!(together(&mut one, 12), Some(batch.clone()), "{size} ranks");
                    seen.extend(batch);
                }
                assert_eq!(together(&mut one, 12), None);
                seen.sort_unstable();
                assert_eq!(seen, (0..60).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn what_does_not_divide_is_repeated_or_dropped() {
        let count = |sampler: &mut Sampler| -> Vec<usize> {
            std::iter::from_fn(|| sampler.next_batch(2)).map(|batch| batch.len()).collect()
        };
        for mut sampler in samplers(4, 10) {
            assert_eq!(count(&mut sampler), [2, 1]);
            let mut dropping = sampler.with_uneven(Uneven::Drop).unwrap();
            assert_eq!((count(&mut dropping), dropping.epoch()), (vec![2], 2));
        }
        let mut all = samplers(4, 10);
        let mut seen = together(&mut all, 3).unwrap();
        let order = all[0].order().to_vec();
        for repeated in &order[..2] {
            let at = seen.iter().rposition(|sample| sample == repeated).unwrap();
            seen.remove(at);
        }
        assert_eq!(seen, (0..10).collect::<Vec<_>>());
        let error = samplers(4, 3).remove(0).with_uneven(Uneven::Drop).unwrap_err();
        assert!(error.to_string().contains("one for every rank"), "{error}");
    }

    #[test]
    fn the_order_is_that_of_seed_and_epoch() {
        let epoch = |seed, epoch| {
            let mut sampler = Sampler::new(&Single, 50, seed).unwrap();
            sampler.set_epoch(epoch);
            sampler.next_batch(50).unwrap()
        };
        assert_eq!(epoch(1, 2), epoch(1, 2));
        assert_ne!(epoch(1, 2), epoch(1, 3));
        assert_ne!(epoch(1, 2), epoch(2, 2));
        let mut sorted = Sampler::new(&Single, 5, 1).unwrap().with_shuffle(false);
        assert_eq!(sorted.next_batch(9).unwrap(), [0, 1, 2, 3, 4]);
    }

    /// One rank has taken seven of nine: four ranks repeat two more, or drop the last two.
    #[test]
    fn what_is_left_after_a_resume_is_repeated_or_dropped() {
        let mut one = samplers(1, 9);
        let taken = together(&mut one, 7).unwrap();
        let state = one[0].save().unwrap();
        for (uneven, more) in [(Uneven::Repeat, 4), (Uneven::Drop, 0)] {
            let four = samplers(4, 9).into_iter().map(|four| four.with_uneven(uneven).unwrap());
            let mut four: Vec<Sampler> = four.collect();
            four.iter_mut().for_each(|sampler| sampler.load(&state).unwrap());
            let rest = together(&mut four, 3).unwrap_or_default();
            assert_eq!(rest.len(), more, "{uneven:?}");
            let new = rest.iter().filter(|sample| !taken.contains(sample)).count();
            assert_eq!(new, more.min(2), "{uneven:?}");
        }
    }

    #[test]
    fn it_resumes_in_the_middle_on_another_number_of_ranks() {
        let mut two = samplers(2, 24);
        let mut seen = together(&mut two, 3).unwrap();
        let state = two[0].save().unwrap();
        let mut three = samplers(3, 24);
        for sampler in &mut three {
            sampler.check(&state).unwrap();
            sampler.load(&state).unwrap();
        }
        while let Some(batch) = together(&mut three, 2) {
            seen.extend(batch);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..24).collect::<Vec<_>>());
        let other = Sampler::new(&Single, 23, 3).unwrap();
        assert!(other.check(&state).unwrap_err().to_string().contains("24"));
    }
}
