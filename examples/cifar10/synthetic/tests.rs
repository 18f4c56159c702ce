use candle_core::{D, DType, Device, Tensor};

use super::*;

#[test]
fn a_seed_gives_the_same_images_on_any_number_of_threads() -> anyhow::Result<()> {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    let images = draw(Stream::DrawTrain, 60, 4);
    assert_eq!(images, one.install(|| draw(Stream::DrawTrain, 60, 4)));
    assert_ne!(images, draw(Stream::DrawTrain, 60, 5));
    assert_ne!(images, draw(Stream::DrawTest, 60, 4));
    let mut more = draw(Stream::DrawTrain, 90, 4);
    more.truncate(60);
    assert_eq!(images, more, "a smaller set is the start of a larger one");
    Ok(())
}

#[test]
fn classes_are_balanced() {
    let data = dataset(1003, 200, 1);
    let count = |images: &Images, class: usize| {
        images.labels().iter().filter(|&&label| usize::from(label) == class).count()
    };
    for class in 0..CLASSES {
        assert_eq!(count(&data.train, class), 100 + usize::from(class < 3));
        assert_eq!(count(&data.test, class), 20);
    }
}

#[test]
fn every_kind_covers_a_visible_part_of_the_image() {
    for (kind, name) in KINDS {
        for index in 0..200 {
            let shape = Shape::random(kind, &mut rng(Stream::DrawTrain, 2, 0, index));
            let covered =
                (0..PLANE).filter(|i| shape.covers((i % SIDE) as f32, (i / SIDE) as f32)).count();
            assert!((20..400).contains(&covered), "{name}: {covered} pixels");
        }
    }
}

#[test]
fn the_mean_colour_does_not_tell_the_class() {
    let images = draw(Stream::DrawTrain, 4000, 3);
    let mut means = [0f64; CLASSES];
    for (index, label) in images.labels().iter().enumerate() {
        let sum: u64 = images.image(index).iter().map(|&byte| u64::from(byte)).sum();
        means[usize::from(*label)] += sum as f64 / PIXELS as f64 / 400.;
    }
    // The backgrounds alone scatter these means by 19 / sqrt(400), about 1.
    for (mean, (_, name)) in means.into_iter().zip(KINDS) {
        assert!((mean - 128.).abs() < 4., "{name}: {mean}");
    }
}

/// What a linear model learns from the raw pixels of `train` images, on `test` others.
fn linear_accuracy(train: usize, test: usize) -> candle_core::Result<f64> {
    let data = dataset(train, test, 11);
    let all = |images: &Images| {
        let indices: Vec<usize> = (0..images.len()).collect();
        let (x, y) = images.batch(&indices, &data.norm, None, &Device::Cpu)?;
        Ok::<_, candle_core::Error>((x.flatten_from(1)?, y))
    };
    let (x, y) = all(&data.train)?;
    let (x_test, y_test) = all(&data.test)?;
    let classes = Tensor::arange(0u32, CLASSES as u32, &Device::Cpu)?;
    let target = y.unsqueeze(1)?.broadcast_eq(&classes)?.to_dtype(DType::F32)?;
    let transposed = x.t()?.contiguous()?;
    let mut w = Tensor::zeros((PIXELS, CLASSES), DType::F32, &Device::Cpu)?;
    for _ in 0..60 {
        let p = candle_nn::ops::softmax(&x.matmul(&w)?, D::Minus1)?;
        let gradient = (transposed.matmul(&(p - &target)?)? / train as f64)?;
        w = (w - (gradient * 0.01)?)?;
    }
    let hits = x_test.matmul(&w)?.argmax(D::Minus1)?.eq(&y_test)?.to_dtype(DType::F32)?;
    Ok(f64::from(hits.mean_all()?.to_scalar::<f32>()?))
}

#[test]
fn a_linear_model_does_not_solve_it() -> candle_core::Result<()> {
    let accuracy = linear_accuracy(1500, 500)?;
    assert!(accuracy < 0.6, "{accuracy}");
    Ok(())
}
