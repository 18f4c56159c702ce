use super::*;
use crate::testing::Folder;

/// A report in which no two numbers are alike.
pub(crate) fn sample() -> Report {
    Report {
        model: "resnet8".to_owned(),
        precision: "f16".to_owned(),
        device: "cpu".to_owned(),
        data: "synthetic images".to_owned(),
        train_images: 1234,
        epochs: 3,
        batch_size: 17,
        lr: 0.25,
        seed: 9,
        master_weights: true,
        channels_last: true,
        loss_scale: "dynamic".to_owned(),
        steps: 216,
        skipped_steps: 4,
        final_scale: 4096.,
        final_loss: 0.75,
        losses: vec![2.25, 1.5, 0.875],
        test_accuracy: 0.625,
        test_accuracy_per_epoch: vec![0.25, 0.5, 0.625],
        test_images_of_nan: 21,
        test_accuracy_per_class: [0., 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.],
        median_step_seconds: 0.0625,
        images_per_second: 250.5,
        peak_rss_bytes: Some(123 << 20),
        weight_bytes: 156_084,
        interrupted: true,
    }
}

#[test]
fn the_report_holds_every_field_and_replaces_what_was_there() -> Result<()> {
    let dir = std::env::temp_dir().join(format!("candle-amp-report-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let path = dir.join("run.json");
    fs::write(&path, "old")?;
    check_writable("--report", &path)?;
    assert_eq!(fs::read_to_string(&path)?, "old");
    sample().write(&path)?;
    let json: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    let names: Vec<_> =
        fs::read_dir(&dir)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
    fs::remove_dir_all(&dir)?;

    assert_eq!(names, ["run.json"], "no scratch file stays behind");
    let expected = serde_json::json!({
        "model": "resnet8", "precision": "f16", "device": "cpu", "data": "synthetic images",
        "train_images": 1234, "epochs": 3, "batch_size": 17, "lr": 0.25, "seed": 9,
        "master_weights": true, "channels_last": true, "loss_scale": "dynamic", "steps": 216, "skipped_steps": 4,
        "final_scale": 4096.0, "final_loss": 0.75, "losses": [2.25, 1.5, 0.875],
        "test_accuracy": 0.625, "test_accuracy_per_epoch": [0.25, 0.5, 0.625],
        "test_accuracy_per_class": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0],
        "test_images_of_nan": 21, "median_step_seconds": 0.0625, "images_per_second": 250.5,
        "peak_rss_bytes": 128974848, "weight_bytes": 156084, "interrupted": true,
    });
    assert_eq!(json, expected);
    Ok(())
}

#[test]
fn a_report_is_read_as_it_was_written() -> Result<()> {
    let text = json(&sample())?;
    assert_eq!(json(&serde_json::from_str::<Report>(&text)?)?, text);
    let report = Report { final_loss: f64::NAN, losses: vec![0.5, f64::INFINITY], ..sample() };
    let text = json(&report)?;
    let read: Report = serde_json::from_str(&text)?;
    assert!(read.final_loss.is_nan() && read.losses[0] == 0.5 && read.losses[1].is_nan());
    assert_eq!(json(&read)?, text);
    Ok(())
}

#[test]
fn a_report_that_cannot_be_written_is_refused_early() {
    let missing = std::env::temp_dir().join("candle-amp-no-such-folder").join("run.json");
    let error = check_writable("--report", &missing).expect_err("no folder");
    assert_eq!(error.to_string(), format!("--report {}: cannot write there", missing.display()));
    let error = check_writable("--report", &std::env::temp_dir()).expect_err("a folder");
    assert!(error.to_string().ends_with(": this is a folder"), "{error}");
    assert!(error.is::<Usage>(), "its exit code is that of wrong options");
}

#[cfg(unix)]
#[test]
fn a_link_stays_a_link_and_its_file_is_written() -> Result<()> {
    let folder = Folder::new()?;
    let (file, link) = (folder.path("file.json"), folder.path("link.json"));
    fs::write(&file, "old")?;
    std::os::unix::fs::symlink("file.json", &link)?;
    check_writable("--report", &link)?;
    write(&link, "new")?;
    assert!(link.is_symlink());
    assert_eq!(fs::read_to_string(&file)?, "new");

    fs::remove_file(&file)?;
    let error = check_writable("--report", &link).expect_err("no file");
    assert!(error.is::<Usage>(), "{error}");
    assert!(error.to_string().ends_with("link.json: this link leads to no file"), "{error}");
    assert!(write(&link, "new").is_err() && link.is_symlink());
    Ok(())
}

#[cfg(unix)]
#[test]
fn a_pipe_is_written_to() -> Result<()> {
    let folder = Folder::new()?;
    let pipe = folder.path("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status()?.success());
    check_writable("--report", &pipe)?;
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe)
    });
    write(&pipe, "a report")?;
    assert_eq!(reader.join().expect("no panic")?, "a report");
    assert!(!fs::metadata(&pipe)?.is_file());
    Ok(())
}

#[cfg(target_os = "linux")]
#[test]
fn a_device_stays_a_device() -> Result<()> {
    let folder = Folder::new()?;
    let link = folder.path("full"); // a link, so that no fault of `write` replaces the device
    std::os::unix::fs::symlink("/dev/full", &link)?;
    check_writable("--report", &link)?;
    let error = format!("{:#}", write(&link, "a report").expect_err("a full device"));
    assert!(error.ends_with(": No space left on device (os error 28)"), "{error}");
    assert!(link.is_symlink());
    Ok(())
}

#[test]
fn a_folder_is_not_written_to() -> Result<()> {
    let folder = Folder::new()?;
    let error = write(&folder.path(""), "a report").expect_err("a folder");
    assert!(error.is::<Usage>() && error.to_string().ends_with(": this is a folder"), "{error}");
    Ok(())
}
