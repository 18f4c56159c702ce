//! The test of a network: all test images, uncropped.

use anyhow::Result;
use candle_amp::{Autocast, no_grad, optim::Ema};
use candle_core::{DType, Tensor};

use crate::{evaluation::Score, feed::Feed, models::Model, ranks, recipe::Recipe};

/// Recognises `count` images. Each rank takes a part of them, and all get the score.
#[derive(Debug)]
pub(crate) struct Tester<'a> {
    pub(crate) amp: &'a Autocast,
    pub(crate) model: &'a Model,
    pub(crate) test: Feed<'a>,
    pub(crate) count: usize,
    pub(crate) recipe: Recipe,
}

impl Tester<'_> {
    /// With the average, if there is one, in place of the weights.
    pub(crate) fn test(&self, average: &mut Option<Ema>) -> Result<Score> {
        match average {
            Some(average) => average.scope(|| self.score())?,
            None => self.score(),
        }
    }

    fn score(&self) -> Result<Score> {
        let mut score = Score::default();
        let all: Vec<usize> = (0..self.count).collect();
        for indices in all.chunks(500 * ranks::count()) {
            let (x, y) = self.test.batch(&ranks::part(indices), None)?;
            let mut logits = self.logits(&x)?;
            if self.recipe.flip_test {
                logits = ((logits + self.logits(&x.flip(&[3])?)?)? / 2.)?;
            }
            let [logits, y] = [logits, y].map(|rows| ranks::joined(&rows, indices.len()));
            score.add(indices[0], &y?.to_vec1()?, &logits?.to_vec2()?);
        }
        Ok(score)
    }

    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let logits = no_grad(|| self.amp.scope(|| self.model.forward(x, false)))?;
        Ok(logits.to_dtype(DType::F32)?)
    }
}

#[cfg(test)]
mod tests {
    use candle_amp::{Parameters, nn, random};
    use candle_core::Device;
    use candle_nn::VarMap;

    use super::*;
    use crate::{
        common::testing::parse,
        data::{Images, Norm, SIDE},
        options::Options,
        rng::Stream,
        synthetic,
    };

    fn model() -> Result<(Model, Parameters)> {
        random::manual_seed(6);
        let varmap = VarMap::new();
        let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
        let options = parse::<Options>("--model resnet8")?;
        Ok((Model::new(options.model, vb, false)?, Parameters::from_varmap(&varmap)))
    }

    fn test(
        model: &Model,
        images: &Images,
        line: &str,
        average: &mut Option<Ema>,
    ) -> Result<Score> {
        let (norm, amp) = (Norm::cifar10(), Autocast::disabled());
        let recipe = parse::<Options>(line)?.recipe;
        let tester = Tester {
            amp: &amp,
            model,
            test: Feed::Host(images, &norm),
            count: images.len(),
            recipe,
        };
        tester.test(average)
    }

    #[test]
    fn an_image_and_its_mirror_image_are_one_to_a_flip_test() -> Result<()> {
        let _fork = random::fork_rng_guard();
        let (model, _) = model()?;
        let images = synthetic::draw(Stream::DrawTest, 20, 1);
        let mirrored = images.pixels().chunks(SIDE).flat_map(|row| row.iter().rev().copied());
        let mirrored = Images::new(mirrored.collect(), images.labels().to_vec());
        let losses = |line: &str| {
            let loss = |images| anyhow::Ok(test(&model, images, line, &mut None)?.loss());
            anyhow::Ok([loss(&images)?, loss(&mirrored)?])
        };
        let [plain, turned] = losses("")?;
        assert!((plain - turned).abs() > 1e-4, "{plain} and {turned}");
        let [both, turned] = losses("--flip-test")?;
        assert!((both - turned).abs() < 1e-6, "{both} and {turned}");
        assert!((both - plain).abs() > 1e-5, "{both} and {plain}");
        Ok(())
    }

    #[test]
    fn an_average_is_tested_and_the_weights_are_back() -> Result<()> {
        let _fork = random::fork_rng_guard();
        let (model, parameters) = model()?;
        let images = synthetic::draw(Stream::DrawTest, 20, 1);
        let recipe = parse::<Options>("--ema 0.5")?.recipe;
        let mut average = recipe.average(&parameters)?;
        let loss =
            |average: &mut Option<Ema>| anyhow::Ok(test(&model, &images, "", average)?.loss());
        let before = loss(&mut None)?;
        for (_, var) in parameters.iter().chain(parameters.buffers()) {
            var.set(&(var.as_tensor() * 1.5)?)?;
        }
        let after = loss(&mut None)?;
        assert_ne!(before, after);
        assert_eq!(loss(&mut average)?, before, "nothing has moved the average");
        assert_eq!(loss(&mut None)?, after, "the weights are back");
        Ok(())
    }
}
