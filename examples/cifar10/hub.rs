//! CIFAR-10 from the page of its authors: `--data hub`.

use std::{
    env, fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Error, Result, bail, ensure};
use flate2::read::GzDecoder;
use sha2::{Digest, Sha256};
use tar::Archive;
use ureq::Agent;

use crate::common::{
    exit::Interrupted,
    interrupted,
    progress::{Display, print},
};

/// An archive, and the SHA-256 of all its bytes.
#[derive(Clone, Copy, Debug)]
struct Source<'a> {
    url: &'a str,
    sha256: &'a str,
}

/// The binary version, 170 MB.
const CIFAR10: Source<'_> = Source {
    url: "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    sha256: "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
};

/// What is kept of it.
const FILES: [&str; 6] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
];

/// How long a server may take to connect, and then to answer.
const PATIENCE: Option<Duration> = Some(Duration::from_secs(20));

/// How long it may take to send all, at 100 kB a second.
const IN_ALL: Option<Duration> = Some(Duration::from_secs(30 * 60));

/// The folder with the images, which are downloaded once: `CANDLE_AMP_DATA`, or one in the user's cache.
pub(crate) fn folder() -> Result<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let cache = named("XDG_CACHE_HOME").or_else(|| named("LOCALAPPDATA"));
    let cache = cache.or_else(|| Some(named("HOME")?.join(".cache")));
    let folder =
        named("CANDLE_AMP_DATA").or_else(|| Some(cache?.join("candle-amp").join("cifar10")));
    let folder = folder.context("--data hub: set CANDLE_AMP_DATA to a folder for the images")?;
    fetch(CIFAR10, &folder)?;
    Ok(folder)
}

/// Downloads `source` to `folder`, unless its files are there. All of them are there afterwards, or none.
fn fetch(source: Source<'_>, folder: &Path) -> Result<()> {
    let missing = FILES.iter().find(|file| !folder.join(file).is_file());
    let Some(missing) = missing else { return Ok(()) };
    if fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!(
            "--data hub: {} is not empty, and has no {missing}; empty it, or name another folder in CANDLE_AMP_DATA",
            folder.display()
        );
    }
    download(source, folder).map_err(|error| match interrupted() {
        true => Error::new(Interrupted).context("--data hub"),
        false => error.context(format!(
            "--data hub cannot download {}; get it another way, unpack it, and give its folder to \
             --data",
            source.url
        )),
    })
}

/// Downloads to a folder that is new or empty: whose else its files are, nobody knows.
fn download(source: Source<'_>, folder: &Path) -> Result<()> {
    print(&format!("downloading {} to {}\n", source.url, folder.display()));
    let config = Agent::config_builder().timeout_connect(PATIENCE).timeout_recv_response(PATIENCE);
    let config = config.timeout_recv_body(IN_ALL);
    let mut response = config.build().new_agent().get(source.url).call()?;
    let name = folder.file_name().context("no name of a folder")?.to_string_lossy();
    let scratch = folder.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let (len, body) = (response.body().content_length(), response.body_mut().as_reader());
    let body = Shown { bytes: body, read: 0, display: Display::new(mib(len.unwrap_or(0))) };
    let unpacked = unpack(body, source.sha256, &scratch).and_then(|()| {
        if folder.exists() {
            let taken = || format!("{} is not empty any more", folder.display());
            fs::remove_dir(folder).with_context(taken)?;
        }
        Ok(fs::rename(&scratch, folder)?)
    });
    unpacked.inspect_err(|_| drop(fs::remove_dir_all(&scratch)))
}

/// Writes the files of a compressed archive to `folder`, and checks that it is the one of this checksum.
fn unpack(archive: impl Read, sha256: &str, folder: &Path) -> Result<()> {
    let mut bytes = Hashed { bytes: archive, sha256: Sha256::new() };
    let mut archive = Archive::new(GzDecoder::new(&mut bytes));
    let mut count = 0;
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.file_name().map(ToOwned::to_owned).unwrap_or_default();
        if FILES.iter().any(|file| name == *file) {
            entry.unpack(folder.join(name))?;
            count += 1;
        }
    }
    drop(archive);
    io::copy(&mut bytes, &mut io::sink())?; // padding
    let digest = bytes.sha256.finalize();
    let found: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    ensure!(found == sha256, "the archive's SHA-256 is {found}, expected {sha256}");
    ensure!(count == FILES.len(), "the archive has {count} of {} files", FILES.len());
    Ok(())
}

fn mib(bytes: u64) -> usize {
    (bytes >> 20) as usize
}

/// Bytes on their way, and how many have passed, where somebody looks.
struct Shown<R> {
    bytes: R,
    read: u64,
    display: Display,
}

impl<R: Read> Read for Shown<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read(into)?;
        self.read += count as u64;
        let (prefix, status) = ("downloading ".to_owned(), "MiB".to_owned());
        let line = format!("{} MiB\n", mib(self.read));
        self.display.step(mib(self.read), prefix, status, &line);
        Ok(count)
    }
}

/// Bytes on their way, and the checksum of those that have passed. Ctrl-C ends them.
struct Hashed<R> {
    bytes: R,
    sha256: Sha256,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if interrupted() {
            return Err(io::Error::other("Ctrl-C"));
        }
        let count = self.bytes.read(into)?;
        self.sha256.update(&into[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests;
