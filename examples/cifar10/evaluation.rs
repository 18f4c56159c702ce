//! What a test finds: which images are taken for what, and which the network is most wrong about.

use serde::{Deserialize, Serialize};

use crate::data::CLASSES;

/// How many of the worst images are kept.
pub(crate) const WORST: usize = 12;

/// Images of each class, by the class they were taken for.
pub(crate) type Confusion = [[usize; CLASSES]; CLASSES];

/// What a network made of a test image.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Of the image among those to test with.
    pub(crate) index: usize,
    pub(crate) label: usize,
    pub(crate) prediction: usize,
    /// What the network gave the label, from 0 to 1; 0 where it computed NaN.
    pub(crate) probability: f64,
}

/// The test of a network.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Score {
    pub(crate) confusion: Confusion,
    /// Images of which the network computed NaN, by class. They are in no confusion.
    unanswered: [usize; CLASSES],
    loss: f64,
    /// The least probable labels, the lowest probability first.
    pub(crate) worst: Vec<Answer>,
}

impl Score {
    /// Adds the images from `first` on, of `labels`, with the network's `logits`.
    pub(crate) fn add(&mut self, first: usize, labels: &[u32], logits: &[Vec<f32>]) {
        for (at, (&label, logits)) in labels.iter().zip(logits).enumerate() {
            let (label, prediction) = (label as usize, largest(logits));
            let loss = cross_entropy(logits, label);
            // Of an infinite logit, which is an answer, the loss is NaN too.
            let probability = match (loss.is_nan(), prediction == label) {
                (false, _) => (-loss).exp(),
                (true, is_right) => f64::from(u8::from(is_right && logits[label].is_infinite())),
            };
            match logits.iter().any(|logit| logit.is_nan()) {
                true => self.unanswered[label] += 1,
                false => self.confusion[label][prediction] += 1,
            }
            self.loss += loss;
            self.worst.push(Answer { index: first + at, label, prediction, probability });
        }
        self.worst.sort_by(|a, b| a.probability.total_cmp(&b.probability));
        self.worst.truncate(WORST);
    }

    fn images(&self) -> usize {
        self.confusion.iter().flatten().sum::<usize>() + self.unanswered()
    }

    /// How many images the network computed NaN of: none unless training has diverged. They count as not recognised.
    pub(crate) fn unanswered(&self) -> usize {
        self.unanswered.iter().sum()
    }

    /// The mean over all images.
    pub(crate) fn loss(&self) -> f64 {
        self.loss / self.images().max(1) as f64
    }

    /// The fraction of all images recognised.
    pub(crate) fn accuracy(&self) -> f64 {
        let hits = (0..CLASSES).map(|class| self.confusion[class][class]).sum();
        ratio(hits, self.images())
    }

    /// The fraction recognised of every class; 0 for a class without images.
    pub(crate) fn by_class(&self) -> [f64; CLASSES] {
        std::array::from_fn(|class| {
            let images = self.confusion[class].iter().sum::<usize>() + self.unanswered[class];
            ratio(self.confusion[class][class], images)
        })
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// The first of the largest.
fn largest(logits: &[f32]) -> usize {
    (0..logits.len()).fold(0, |best, at| if logits[at] > logits[best] { at } else { best })
}

/// In F64, without rounding of its own and without label smoothing.
fn cross_entropy(logits: &[f32], label: usize) -> f64 {
    let highest = f64::from(logits[largest(logits)]);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - highest).exp()).sum();
    highest + sum.ln() - f64::from(logits[label])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits that give `class` the probability `p`, and the others equal parts of the rest.
    fn logits(class: usize, p: f64) -> Vec<f32> {
        let rest = ((1. - p) / (CLASSES - 1) as f64).ln() as f32;
        (0..CLASSES).map(|at| if at == class { p.ln() as f32 } else { rest }).collect()
    }

    #[test]
    fn a_score_counts_what_is_taken_for_what() {
        let mut score = Score::default();
        score.add(0, &[0, 0, 3], &[logits(0, 0.5), logits(3, 0.9), logits(3, 0.8)]);
        score.add(3, &[9], &[logits(0, 0.91)]);
        assert_eq!(score.accuracy(), 0.5);
        assert_eq!(score.by_class(), [0.5, 0., 0., 1., 0., 0., 0., 0., 0., 0.]);
        assert_eq!((score.confusion[0][3], score.confusion[9][0]), (1, 1));
        assert_eq!(score.images(), 4);
        let expected = -(0.5f64.ln() + (0.1f64 / 9.).ln() + 0.8f64.ln() + 0.01f64.ln()) / 4.;
        assert!((score.loss() - expected).abs() < 1e-6, "{} for {expected}", score.loss());
    }

    /// Its loss is NaN, and its answer is not.
    #[test]
    fn an_infinite_logit_is_an_answer() {
        let mut score = Score::default();
        let infinite = |class: usize| {
            (0..CLASSES).map(|at| if at == class { f32::INFINITY } else { 1. }).collect()
        };
        let nan = vec![f32::NAN; CLASSES];
        score.add(0, &[2, 2, 2], &[infinite(2), infinite(5), nan]);
        assert_eq!((score.unanswered(), score.confusion[2][2], score.confusion[2][5]), (1, 1, 1));
        assert_eq!(score.accuracy(), 1. / 3.);
        assert_eq!(
            score.worst.last().map(|answer| (answer.index, answer.probability)),
            Some((0, 1.))
        );
    }

    #[test]
    fn the_worst_images_come_first_and_are_few() {
        let mut score = Score::default();
        for index in 0..2 * WORST {
            let p = [0.9, 0.2][index % 2] - 1e-3 * index as f64;
            score.add(index, &[4], &[logits(4, p)]);
        }
        let worst: Vec<usize> = score.worst.iter().map(|answer| answer.index).collect();
        let expected: Vec<usize> = (0..2 * WORST).filter(|index| index % 2 == 1).rev().collect();
        assert_eq!(worst, expected);

        score.add(99, &[4], &[vec![f32::NAN; CLASSES]]);
        assert_eq!((score.worst[0].index, score.worst[0].probability), (99, 0.));
        assert!(score.loss().is_nan(), "a test with NaN has no loss");
        // NaN is no answer, not even to an image of the first class.
        let mut score = Score::default();
        score.add(0, &[0, 0], &[vec![f32::NAN; CLASSES], logits(0, 0.9)]);
        assert_eq!((score.accuracy(), score.by_class()[0], score.unanswered()), (0.5, 0.5, 1));
    }
}
