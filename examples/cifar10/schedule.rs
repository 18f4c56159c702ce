//! How long to train.

use anyhow::{Result, anyhow, bail};

use crate::{
    common::{exit::BadData, options::Usage, progress::counted},
    options::Options,
};

/// The length of a training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Schedule {
    pub(crate) epochs: usize,
    /// Full batches in an epoch; what is left over comes up in another one.
    pub(crate) steps_per_epoch: usize,
    pub(crate) steps: usize,
}

impl Schedule {
    /// For `train_images` and the options' batch size, epochs and steps.
    pub(crate) fn new(options: &Options, train_images: usize) -> Result<Self> {
        let batch = options.batch_size();
        let steps_per_epoch = train_images / batch;
        if steps_per_epoch == 0 {
            let has = format!("has {}", counted(train_images, "training image"));
            // A folder that lacks images is no fault of the options.
            match options.data.as_ref().filter(|_| options.images().0 > Some(train_images)) {
                Some(dir) => bail!(BadData::of(anyhow!(
                    "{} {has}, fewer than a batch of {batch}",
                    dir.display()
                ))),
                None => bail!(Usage(format!("--batch-size is {batch}, but the set {has}"))),
            }
        }
        let steps = options.steps.or(options.smoke.then_some(6));
        let epochs = match (options.epochs, steps) {
            (Some(epochs), _) => epochs,
            (None, Some(steps)) => steps.div_ceil(steps_per_epoch),
            (None, None) => 8,
        };
        let all = epochs.saturating_mul(steps_per_epoch);
        let steps = steps.map_or(all, |steps| steps.min(all));
        Ok(Self { epochs, steps_per_epoch, steps })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[track_caller]
    fn schedule(arguments: &str, images: usize) -> Schedule {
        let arguments = std::iter::once("cifar10").chain(arguments.split_whitespace());
        Schedule::new(&Options::parse_from(arguments), images).expect("a schedule")
    }

    #[test]
    fn epochs_and_steps_bound_each_other() {
        let lengths = |arguments, images| {
            let schedule = schedule(arguments, images);
            (schedule.epochs, schedule.steps_per_epoch, schedule.steps)
        };
        assert_eq!(lengths("", 1000), (8, 7, 56));
        assert_eq!(lengths("--epochs 3 --batch-size 100", 1000), (3, 10, 30));
        assert_eq!(lengths("--steps 15", 1000), (3, 7, 15));
        assert_eq!(lengths("--steps 15 --epochs 2", 1000), (2, 7, 14));
        assert_eq!(lengths("--smoke", 64), (2, 4, 6));
    }

    #[test]
    fn a_batch_larger_than_the_set_is_a_usage_error() {
        let options = Options::parse_from(["cifar10", "--batch-size", "65"]);
        let error = Schedule::new(&options, 64).expect_err("65 of 64 images");
        assert!(error.is::<Usage>());
        assert_eq!(error.to_string(), "--batch-size is 65, but the set has 64 training images");
        let error = Schedule::new(&options, 1).expect_err("65 of 1 image");
        assert_eq!(error.to_string(), "--batch-size is 65, but the set has 1 training image");
        // --smoke takes 64 images, which this folder does not have.
        let options = Options::parse_from(["cifar10", "--smoke", "--data", "DIR"]);
        let error = Schedule::new(&options, 1).expect_err("16 of 1 image");
        assert!(error.is::<BadData>(), "{error:?}");
        assert_eq!(error.to_string(), "DIR has 1 training image, fewer than a batch of 16");
    }
}
