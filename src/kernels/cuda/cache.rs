//! Machine code on disk, so that a source is compiled once per machine, not once per process.
//!
//! ```text
//! a file: MAGIC, length of the key and of the code (u64), key, code, CRC-32 of all that
//! ```
//!
//! The numbers are little-endian. What is damaged is compiled anew, as what is not there. The whole key
//! is in the file and is compared, so that no two keys can be taken for one another. The file's name has
//! a checksum of it; two keys with one checksum replace each other.
//!
//! A file that nobody has asked for in [`KEPT`] goes when something else is compiled. For a key has the
//! source and the compiler's version in it, so every update leaves files behind.

use std::ffi::OsString;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, fs, io};

/// What files of any layout begin with.
const OURS: &[u8] = b"candle-amp kernels ";
/// Another layout has another one.
const MAGIC: &[u8] = b"candle-amp kernels 1\n";

const DAY: Duration = Duration::from_hours(24);
/// How long a file is kept that nobody asks for.
const KEPT: Duration = Duration::from_hours(90 * 24);

/// A folder of machine code.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    /// Whether a failed write was logged already.
    warned: AtomicBool,
}

impl Cache {
    /// The one that the environment asks for: see [`folder`].
    pub(super) fn from_env() -> Option<Self> {
        folder(|name| env::var_os(name), env::home_dir()).map(Self::new)
    }

    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, warned: AtomicBool::new(false) }
    }

    /// The machine code for `key`, and what `compile` makes where there is none, which is kept.
    ///
    /// That it cannot be kept is no error. `name` is a part of the file's name.
    pub(super) fn get_or<E>(
        &self,
        name: &str,
        key: &str,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        let path = self.path(name, key);
        if let Some(code) = fs::read(&path).ok().and_then(|file| unpack(&file, key)) {
            asked_for(&path);
            return Ok(code);
        }
        let code = compile()?;
        self.remove_old();
        if let Err(error) = self.store(&path, &pack(key, &code))
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                folder = %self.folder.display(),
                "compiled kernels cannot be kept, every process compiles them: {error}; \
                 CANDLE_AMP_CACHE names another folder, or is empty for none"
            );
        }
        Ok(code)
    }

    /// Removes what nobody has asked for in [`KEPT`], and what a process left that was killed.
    fn remove_old(&self) {
        let files = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let old = files.map(|file| file.path()).filter(|path| is_older(path, KEPT));
        old.filter(|path| is_ours(path)).for_each(|path| drop(fs::remove_file(path)));
    }

    fn path(&self, name: &str, key: &str) -> PathBuf {
        self.folder.join(format!("{name}-{:08x}.cubin", crc32fast::hash(key.as_bytes())))
    }

    /// Writes beside `path` and moves there: who reads finds a whole file, old or new.
    fn store(&self, path: &Path, file: &[u8]) -> io::Result<()> {
        let mut folder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
        folder.recursive(true).create(&self.folder)?;
        // A name of its own for each process, thread and machine that shares the folder.
        let number = RandomState::new().build_hasher().finish();
        let temporary = self.folder.join(format!(".{number:016x}.tmp"));
        let stored = fs::write(&temporary, file).and_then(|()| fs::rename(&temporary, path));
        if stored.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        stored
    }
}

/// Notes the day on the file, if it can be written.
fn asked_for(path: &Path) {
    if is_older(path, DAY)
        && let Ok(file) = fs::File::options().write(true).open(path)
    {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Whether a file was last written, or asked for, that long ago.
fn is_older(path: &Path, age: Duration) -> bool {
    let written = fs::metadata(path).and_then(|file| file.modified());
    written.is_ok_and(|written| written.elapsed().is_ok_and(|elapsed| elapsed > age))
}

/// Whether it is a file of this cache's: the folder may be anybody's.
fn is_ours(path: &Path) -> bool {
    let mut start = [0; OURS.len()];
    let mut read = |mut file: fs::File| io::Read::read_exact(&mut file, &mut start);
    let named = path.extension().is_some_and(|end| end == "cubin" || end == "tmp");
    named && fs::File::open(path).is_ok_and(|file| read(file).is_ok()) && start == OURS
}

/// `$CANDLE_AMP_CACHE`, and none where that is empty; else `candle-amp` in `$XDG_CACHE_HOME`, else in
/// `.cache` of `home`.
fn folder(variable: impl Fn(&str) -> Option<OsString>, home: Option<PathBuf>) -> Option<PathBuf> {
    if let Some(folder) = variable("CANDLE_AMP_CACHE") {
        return Some(PathBuf::from(folder)).filter(|folder| !folder.as_os_str().is_empty());
    }
    // Relative ones are to be ignored, by the specification of that variable.
    let caches = variable("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = caches.or_else(|| home.map(|home| home.join(".cache")));
    caches.filter(|path| path.is_absolute()).map(|caches| caches.join("candle-amp"))
}

fn header(key: &str, code: usize) -> Vec<u8> {
    let lengths = [key.len(), code].map(|length| (length as u64).to_le_bytes());
    [MAGIC, lengths.as_flattened(), key.as_bytes()].concat()
}

fn pack(key: &str, code: &[u8]) -> Vec<u8> {
    let mut file = header(key, code.len());
    file.extend_from_slice(code);
    file.extend_from_slice(&crc32fast::hash(&file).to_le_bytes());
    file
}

/// The code in `file`, if that is what [`pack`] has made of it and `key`.
fn unpack(file: &[u8], key: &str) -> Option<Vec<u8>> {
    let (packed, sum) = file.split_last_chunk()?;
    let length = packed.len().checked_sub(header(key, 0).len())?;
    let code = packed.strip_prefix(&header(key, length)[..])?;
    (crc32fast::hash(packed).to_le_bytes() == *sum).then(|| code.to_vec())
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// A folder that is removed in the end, and a cache in a folder in it, which is not there yet.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("candle-amp-cache-{name}-{}", std::process::id());
            Self(env::temp_dir().join(name))
        }

        fn cache(&self) -> Cache {
            Cache::new(self.0.join("one").join("two"))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const CODE: &[u8] = b"\x7fELF machine code";

    /// What the cache has for `key`, or `None` after it has asked for it and was given `code`.
    #[track_caller]
    fn look_up(cache: &Cache, key: &str, code: &[u8]) -> Option<Vec<u8>> {
        let mut asked = false;
        let compile = || -> Result<_, Infallible> {
            asked = true;
            Ok(code.to_vec())
        };
        let Ok(found) = cache.get_or("name", key, compile);
        assert!(!asked || found == code);
        (!asked).then_some(found)
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn what_is_kept_is_found_by_its_key_alone() {
        let folder = Folder::new("key");
        assert_eq!(look_up(&folder.cache(), "key", CODE), None);
        assert_eq!(look_up(&folder.cache(), "key", b"else").as_deref(), Some(CODE));
        for other in ["", "ke", "key2", "Key"] {
            assert_eq!(look_up(&folder.cache(), other, b"else"), None, "{other:?}");
        }
        assert_eq!(look_up(&folder.cache(), "key", b"else").as_deref(), Some(CODE));
    }

    #[test]
    fn a_file_with_another_key_is_not_taken_whatever_its_name() {
        let folder = Folder::new("collision");
        let cache = folder.cache();
        assert_eq!(look_up(&cache, "key", CODE), None);
        fs::rename(cache.path("name", "key"), cache.path("name", "Key")).unwrap();
        assert_eq!(look_up(&cache, "Key", b"else"), None);
        // Nor one whose code goes on where a longer key does.
        fs::write(cache.path("name", "ke"), pack("key", CODE)).unwrap();
        assert_eq!(look_up(&cache, "ke", b"else"), None);
    }

    #[test]
    fn damage_is_compiled_anew_and_replaced() {
        let folder = Folder::new("damage");
        let cache = folder.cache();
        look_up(&cache, "key", CODE);
        let path = cache.path("name", "key");
        let good = fs::read(&path).unwrap();
        let cut = (0..good.len()).map(|length| good[..length].to_vec());
        let longer = [[&good[..], b"\0"].concat(), [&good[..], &good].concat()];
        let flipped = (0..good.len() * 8).map(|bit| {
            let mut file = good.clone();
            file[bit / 8] ^= 1 << (bit % 8);
            file
        });
        for damaged in cut.chain(longer).chain(flipped) {
            fs::write(&path, &damaged).unwrap();
            assert_eq!(look_up(&cache, "key", CODE), None, "{damaged:?}");
            assert_eq!(fs::read(&path).unwrap(), good);
        }
        assert_eq!(files(&cache.folder), [path]);
    }

    #[test]
    fn what_nobody_asks_for_goes_in_the_end() {
        let folder = Folder::new("old");
        let cache = folder.cache();
        let file = |name: &str| cache.folder.join(name);
        let aged = |path: &Path, age: Duration| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
        };
        for key in ["asked for", "forgotten", "young"] {
            look_up(&cache, key, CODE);
        }
        // Of an older layout, of a process that was killed, and of somebody else.
        fs::write(file("other.cubin"), b"candle-amp kernels 0\nand more").unwrap();
        fs::write(file(".0123456789abcdef.tmp"), &pack("key", CODE)[..40]).unwrap();
        for name in ["theirs.cubin", "short.tmp"] {
            fs::write(file(name), b"candle").unwrap();
        }
        fs::write(file("theirs.txt"), pack("key", CODE)).unwrap();
        for path in files(&cache.folder) {
            aged(&path, KEPT + DAY);
        }
        aged(&cache.path("name", "young"), KEPT - DAY);
        assert_eq!(look_up(&cache, "asked for", b"else").as_deref(), Some(CODE));
        assert!(!is_older(&cache.path("name", "asked for"), DAY));
        look_up(&cache, "new", CODE);
        let left = ["asked for", "young", "new"].map(|key| cache.path("name", key)).into_iter();
        let mut left: Vec<_> =
            left.chain(["theirs.cubin", "short.tmp", "theirs.txt"].map(file)).collect();
        let mut found = files(&cache.folder);
        left.sort();
        found.sort();
        assert_eq!(found, left);
    }

    #[test]
    fn nothing_is_kept_of_a_failure() {
        let folder = Folder::new("failure");
        let cache = folder.cache();
        assert_eq!(cache.get_or("name", "key", || Err("no such architecture")).ok(), None);
        assert_eq!(look_up(&cache, "key", CODE), None);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let folder = Folder::new("unwritable");
        fs::create_dir_all(&folder.0).unwrap();
        // A file where a folder should be: that stops root too, as permissions do not.
        fs::write(folder.0.join("one"), "").unwrap();
        let cache = folder.cache();
        for _ in 0..2 {
            assert_eq!(look_up(&cache, "key", CODE), None);
            assert!(cache.warned.load(Ordering::Relaxed));
        }
        // Nor is a folder in the file's place, and nothing is left behind.
        let cache = Cache::new(folder.0.join("folder"));
        fs::create_dir_all(cache.path("name", "key")).unwrap();
        assert_eq!(look_up(&cache, "key", CODE), None);
        assert_eq!(files(&cache.folder), [cache.path("name", "key")]);
    }

    #[test]
    fn whoever_reads_while_others_write_finds_nothing_or_all() {
        let folder = Folder::new("threads");
        let code = |number: u8| vec![number; 100_000];
        std::thread::scope(|scope| {
            for number in 0..4 {
                let cache = folder.cache();
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache
                            .store(&cache.path("name", "key"), &pack("key", &code(number)))
                            .unwrap();
                        let found = look_up(&cache, "key", b"else").expect("a whole file");
                        assert_eq!(found, code(found[0]));
                    }
                });
            }
        });
        assert_eq!(files(&folder.cache().folder).len(), 1);
    }

    #[test]
    fn the_environment_says_where() {
        #[cfg(windows)]
        let root = Path::new("C:\\");
        #[cfg(not(windows))]
        let root = Path::new("/");
        let at = |cache: Option<&str>, xdg: Option<PathBuf>, home: Option<PathBuf>| {
            let variable = |name: &str| match name {
                "CANDLE_AMP_CACHE" => cache.map(OsString::from),
                "XDG_CACHE_HOME" => xdg.clone().map(OsString::from),
                _ => None,
            };
            folder(variable, home)
        };
        let (xdg, home) = (|| Some(root.join("xdg")), || Some(root.join("me")));
        assert_eq!(at(Some("here"), xdg(), home()), Some("here".into()));
        assert_eq!(at(Some(""), xdg(), home()), None);
        assert_eq!(at(None, xdg(), home()), Some(root.join("xdg").join("candle-amp")));
        for ignored in [None, Some("".into()), Some("relative".into())] {
            let in_home = root.join("me").join(".cache").join("candle-amp");
            assert_eq!(at(None, ignored, home()), Some(in_home));
        }
        assert_eq!(at(None, None, Some("".into())), None);
        assert_eq!(at(None, None, None), None);
    }
}
