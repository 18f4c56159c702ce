use std::path::PathBuf;

use super::*;

/// A folder that goes when the test ends.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("candle-amp-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary folder");
        Self(dir)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.0.join(name), bytes).expect("a temporary file");
    }

    /// What reading the folder fails with, without the folder's own path.
    #[track_caller]
    fn error(&self) -> String {
        let error = read_cifar10(&self.0, true).expect_err("the folder is bad");
        format!("{error:#}").replace(&self.0.display().to_string(), "DIR")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Records of the labels given; the bytes of each image count up from `start`.
fn records(labels: &[u8], start: usize) -> Vec<u8> {
    let record = |&label: &u8| {
        let image = (0..PIXELS).map(move |i| ((start + i) % 251) as u8);
        std::iter::once(label).chain(image)
    };
    labels.iter().flat_map(record).collect()
}

#[test]
fn reads_the_training_files_present_and_the_test_file() -> Result<()> {
    let dir = Folder::new("good");
    dir.write("data_batch_2.bin", &records(&[3, 9], 0));
    dir.write("data_batch_5.bin", &records(&[0], 7));
    dir.write("test_batch.bin", &records(&[5], 11));
    dir.write("batches.meta.txt", b"airplane\n");
    let data = read_cifar10(&dir.0, true)?;
    assert_eq!(data.train.labels(), [3, 9, 0]);
    assert_eq!(data.train.image(1)[..3], [0, 1, 2]);
    assert_eq!(data.train.image(2)[..3], [7, 8, 9]);
    assert_eq!(data.test.labels(), [5]);
    assert_eq!(data.test.image(0)[PIXELS - 1], ((11 + PIXELS - 1) % 251) as u8);
    assert_eq!(data.classes[5], "dog");
    Ok(())
}

#[test]
fn a_part_is_no_whole_set() -> Result<()> {
    let dir = Folder::new("part");
    for number in 1..=5 {
        dir.write(&format!("data_batch_{number}.bin"), &vec![0; 10_000 * RECORD]);
    }
    dir.write("test_batch.bin", &vec![0; 10_000 * RECORD]);
    let data = read_cifar10(&dir.0, false)?;
    assert_eq!((data.train.len(), data.test.len()), WHOLE);
    let error = || {
        let error = read_cifar10(&dir.0, false).expect_err("a part").to_string();
        let (has, cure) = error.split_once("; ").expect("a cure");
        assert_eq!(cure, "to train on a part, give --train-images");
        has.replace(&dir.0.display().to_string(), "DIR")
    };
    dir.write("test_batch.bin", &vec![0; RECORD]);
    let has =
        "DIR has 50,000 of 50,000 training images, in 5 of 5 files, and 1 of 10,000 test images";
    assert_eq!(error(), has);
    fs::remove_file(dir.0.join("data_batch_3.bin"))?;
    dir.write("test_batch.bin", &vec![0; 10_000 * RECORD]);
    let has = "DIR has 40,000 of 50,000 training images, in 4 of 5 files, and 10,000 of 10,000 test images";
    assert_eq!(error(), has);
    Ok(())
}

#[test]
fn a_missing_folder_is_named() {
    let dir = Folder::new("missing");
    fs::remove_dir(&dir.0).expect("an empty folder");
    assert_eq!(dir.error(), "DIR: no such folder");
    fs::write(&dir.0, "").expect("a file");
    assert_eq!(dir.error(), "DIR is a file, not a folder of CIFAR-10 files");
    fs::remove_file(&dir.0).expect("the file");
}

#[test]
fn missing_files_are_named() {
    let dir = Folder::new("files");
    let none = "DIR has no training file, data_batch_1.bin to data_batch_5.bin";
    assert_eq!(dir.error(), none);
    dir.write("data_batch_1", b"");
    let python = "; these are the files for Python, the binary version is needed";
    assert_eq!(dir.error(), format!("{none}{python}"));
    fs::create_dir(dir.0.join("cifar-10-batches-bin")).expect("a folder");
    assert_eq!(dir.error(), format!("{none}; did you mean DIR/cifar-10-batches-bin?"));
    dir.write("data_batch_1.bin", &records(&[1], 0));
    assert_eq!(dir.error(), "DIR has no test_batch.bin");
}

#[test]
fn files_of_a_wrong_length_or_label_are_named() {
    let dir = Folder::new("wrong");
    dir.write("data_batch_1.bin", b"");
    assert_eq!(dir.error(), "DIR/data_batch_1.bin is empty");
    dir.write("data_batch_1.bin", &records(&[1, 2], 0)[..5000]);
    let message = "DIR/data_batch_1.bin has 5000 bytes, expected a multiple of 3073 \
                   (10000 images are 30730000)";
    assert_eq!(dir.error(), message);
    dir.write("data_batch_1.bin", &records(&[1, 2], 0));
    dir.write("test_batch.bin", &records(&[9, 0, 10], 0));
    let message = "DIR/test_batch.bin: the label of record 2 is 10, expected 0 to 9";
    assert_eq!(dir.error(), message);
}

#[test]
fn a_batch_is_normalised_channel_by_channel() -> Result<()> {
    let mut pixels = records(&[4, 8], 0);
    pixels.remove(RECORD);
    pixels.remove(0);
    let images = Images::new(pixels, vec![4, 8]);
    let (x, y) = images.batch(&[1, 0, 1], &Norm::of(&images), None, &Device::Cpu)?;
    assert_eq!(x.dims(), [3, 3, SIDE, SIDE]);
    assert_eq!(y.to_vec1::<u32>()?, [8, 4, 8]);
    for channel in x.transpose(0, 1)?.flatten_from(1)?.to_vec2::<f32>()? {
        let len = channel.len() as f32;
        let mean = channel.iter().sum::<f32>() / len;
        let variance = channel.iter().map(|v| v * v).sum::<f32>() / len;
        assert!(mean.abs() < 1e-4, "{mean}");
        assert!((variance - 1.).abs() < 1e-4, "{variance}");
    }
    Ok(())
}

#[test]
fn an_epoch_visits_every_image_once_in_an_order_of_its_own() {
    let images = Images::new(vec![0; 50 * PIXELS], vec![0; 50]);
    let order = images.shuffled(1, 0);
    assert_eq!(order, images.shuffled(1, 0));
    assert_ne!(order, images.shuffled(1, 1));
    assert_ne!(order, images.shuffled(2, 0));
    let mut sorted = order;
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..50));
}

#[test]
fn truncating_keeps_the_first_images() {
    let mut images = Images::new(vec![7; 3 * PIXELS], vec![0, 1, 2]);
    images.truncate(2);
    assert_eq!(images, Images::new(vec![7; 2 * PIXELS], vec![0, 1]));
    images.truncate(5);
    assert_eq!(images.len(), 2);
}
