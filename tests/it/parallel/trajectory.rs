//! Several ranks take the path of one.

use candle_amp::Result;

use super::on_ranks;
use crate::ranks::trajectory::{
    DTYPES, alone, check_saved, compare, go_on, save_half, train_and_save,
};

#[test]
fn ranks_take_the_path_of_one() -> Result<()> {
    for dtype in DTYPES {
        let alone = alone(dtype)?;
        for size in [2, 3, 4] {
            on_ranks(size, |communicator| compare(&communicator, dtype, &alone))?;
        }
    }
    Ok(())
}

#[test]
fn another_number_of_ranks_goes_on_on_that_path() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("candle-amp-path-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    for dtype in DTYPES {
        on_ranks(4, |communicator| save_half(&communicator, dtype, &folder))?;
        for size in [1, 2] {
            on_ranks(size, |communicator| go_on(&communicator, dtype, &folder, 4))?;
        }
    }
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}

#[test]
fn what_ranks_save_step_by_step_is_whole() -> Result<()> {
    let folder = std::env::temp_dir().join(format!("candle-amp-steps-{}", std::process::id()));
    on_ranks(2, |communicator| train_and_save(&communicator, &folder, 5))?;
    assert!(check_saved(&folder, 2)?);
    // Of another step than the other rank's, none goes on.
    for step in 3..=5 {
        let path = folder.join("1").join(format!("step-{step:08}.safetensors"));
        std::fs::remove_file(path).expect("a checkpoint");
    }
    assert!(!check_saved(&folder, 2)?);
    std::fs::remove_dir_all(&folder).expect("the folder");
    Ok(())
}
