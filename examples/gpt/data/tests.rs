use super::*;

fn corpus(text: &str, context: usize) -> Result<Corpus> {
    Corpus::new("test".to_owned(), text, context)
}

#[test]
fn the_last_tenth_is_held_out_and_the_text_comes_back() -> Result<()> {
    let text = "né à Hué,\n".repeat(12);
    let corpus = corpus(&text, 10)?;
    assert_eq!((corpus.characters(), corpus.train.len(), corpus.held_out.len()), (8, 108, 12));
    let whole = [&corpus.train.0[..], &corpus.held_out.0].concat();
    assert_eq!(corpus.show(&whole), text);
    assert_eq!(corpus.show(&[corpus.start()]), "\n");
    Ok(())
}

#[test]
fn control_characters_do_not_reach_the_terminal() -> Result<()> {
    let corpus = corpus(&"\u{1b}[2J\r".repeat(10), 3)?;
    assert_eq!(corpus.show(&corpus.train.0[..5]), "\u{fffd}[2J\u{fffd}");
    Ok(())
}

#[test]
fn windows_stay_inside_and_depend_on_seed_and_step() -> Result<()> {
    let text: String = ('a'..='z').cycle().take(300).collect();
    let corpus = corpus(&text, 7)?;
    let windows = |seed, step| corpus.train.random(seed, step, 200, 7);
    assert!(windows(0, 0).iter().all(|window| window.len() == 8));
    assert_eq!(windows(1, 2), windows(1, 2));
    assert_ne!(windows(1, 2), windows(1, 3));
    assert_ne!(windows(1, 2), windows(2, 2));
    // The first and the last place, drawn in 20,000 of 263.
    let starts: Vec<_> = (0..100).flat_map(|step| windows(0, step)).map(<[u32]>::as_ptr).collect();
    let first = corpus.train.0.as_ptr();
    assert!(starts.contains(&first) && starts.contains(&first.wrapping_add(270 - 8)));
    Ok(())
}

#[test]
fn spread_windows_cover_the_part_without_overlap() -> Result<()> {
    let part = Part((0..100).collect());
    let starts = |count, context| -> Vec<u32> {
        part.spread(count, context).iter().map(|window| window[0]).collect()
    };
    assert_eq!(starts(3, 9), [0, 45, 90]);
    assert_eq!(starts(1, 9), [0]);
    let most = starts(1000, 9);
    assert_eq!((most.len(), most[10]), (11, 90));
    assert!(most.windows(2).all(|pair| pair[1] - pair[0] >= 9));
    Ok(())
}

#[test]
fn a_batch_foretells_the_next_character_at_every_place() -> Result<()> {
    let (x, y) = batch(&[&[5, 6, 7, 8], &[1, 2, 3, 4]], &Device::Cpu)?;
    assert_eq!(x.to_vec2::<u32>()?, [[5, 6, 7], [1, 2, 3]]);
    assert_eq!(y.to_vec1::<u32>()?, [6, 7, 8, 2, 3, 4]);
    Ok(())
}

#[test]
fn texts_that_cannot_be_learnt_are_refused() -> Result<()> {
    let error = corpus("short", 8).expect_err("too short").to_string();
    assert_eq!(error, "5 characters, at least 90 are needed with this context");
    let dir = std::env::temp_dir();
    let path = dir.join(format!("candle-amp-gpt-{}.txt", std::process::id()));
    let refusal = |bytes: &[u8]| {
        fs::write(&path, bytes)?;
        let error = Corpus::read(&path, 8).expect_err("no text");
        fs::remove_file(&path)?;
        anyhow::Ok(format!("{error:#}").replace(&*path.to_string_lossy(), "PATH"))
    };
    assert_eq!(refusal(b"caf\xe9")?, "PATH is not UTF-8: see byte 3");
    assert_eq!(
        refusal(b"")?,
        "cannot learn from PATH: 0 characters, at least 90 are needed with this context"
    );
    let error = Corpus::read(&path, 8).expect_err("no file").to_string();
    assert!(error.starts_with("cannot read "), "{error}");
    let error = Corpus::read(&dir, 8).expect_err("a folder").to_string();
    assert!(error.ends_with(" is a folder, not a text"), "{error}");
    Ok(())
}

#[test]
fn the_text_that_comes_along_is_text() -> Result<()> {
    let corpus = Corpus::shakespeare(128)?;
    assert!(SHAKESPEARE.len() <= 200_000 && SHAKESPEARE.is_ascii());
    assert_eq!(corpus.characters(), 62);
    assert!(SHAKESPEARE.starts_with("First Citizen:\nBefore we proceed"));
    Ok(())
}
