use std::{
    io::Write,
    net::TcpListener,
    process::{Command, Stdio, exit},
    thread::{self, JoinHandle},
};

use flate2::{Compression, write::GzEncoder};

use super::*;
use crate::{
    common::{exit::BadData, start, testing},
    data,
    testing::Folder,
};

/// The archive, of `count` files with one image each.
fn archive(count: usize) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    for (label, file) in FILES.iter().take(count).enumerate() {
        let mut image = vec![7; 3073];
        image[0] = label as u8;
        let mut header = tar::Header::new_gnu();
        header.set_size(image.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, format!("cifar-10-batches-bin/{file}"), &image[..])?;
    }
    Ok(tar.into_inner()?.finish()?)
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A server on this machine that answers once: with `body`, of which it says to have `len` bytes.
fn serve(status: &str, body: Vec<u8>, len: usize) -> Result<(String, JoinHandle<()>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}/cifar.tar.gz", listener.local_addr()?);
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n");
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a request");
        let (mut request, mut bytes) = (Vec::new(), [0; 1024]);
        while !request.ends_with(b"\r\n\r\n") {
            let count = stream.read(&mut bytes).expect("a request");
            request.extend_from_slice(&bytes[..count]);
        }
        // A client that has seen enough may be gone.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body));
    });
    Ok((url, server))
}

#[test]
fn what_is_downloaded_is_read_and_not_downloaded_again() -> Result<()> {
    let parent = Folder::new()?;
    let folder = parent.path("cifar10");
    let body = archive(6)?;
    let (len, sha256) = (body.len(), sha256(&body));
    let (url, server) = serve("200 OK", body, len)?;
    let source = Source { url: &url, sha256: &sha256 };
    fetch(source, &folder)?;
    server.join().expect("the server ends");
    let data = data::read_cifar10(&folder, true)?;
    assert_eq!((data.train.labels(), data.test.labels()), (&[0, 1, 2, 3, 4][..], &[5][..]));
    assert!(data.train.pixels().iter().all(|&byte| byte == 7));
    fetch(source, &folder) // nobody is there any more
}

#[test]
fn a_download_that_fails_leaves_nothing() -> Result<()> {
    let parent = Folder::new()?;
    let folder = parent.path("data").join("cifar10");
    let whole = archive(6)?;
    let half = whole[..whole.len() / 2].to_vec();
    let few = archive(4)?;
    let (right, wrong) = (sha256(&whole), sha256(b"another"));
    for (status, body, len, sha256, message) in [
        ("404 Not Found", Vec::new(), 0, &right, "404"),
        ("200 OK", half, whole.len(), &right, ""),
        ("200 OK", few.clone(), few.len(), &sha256(&few), "the archive has 4 of 6 files"),
        ("200 OK", whole.clone(), whole.len(), &wrong, "the archive's SHA-256 is "),
        ("200 OK", b"<html>".to_vec(), 6, &right, ""),
    ] {
        let (url, server) = serve(status, body, len)?;
        let error = fetch(Source { url: &url, sha256 }, &folder).expect_err("no images");
        let error = format!("{error:#}");
        server.join().expect("the server ends");
        assert!(error.contains(message) && !error.contains('\n'), "{error}");
        assert!(!folder.exists());
        let left = fs::read_dir(parent.path("data")).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{error}");
    }
    Ok(())
}

/// And nothing is downloaded: nobody listens.
#[test]
fn files_of_others_stay_in_the_folder() -> Result<()> {
    let parent = Folder::new()?;
    let folder = parent.path("mine");
    fs::create_dir(&folder)?;
    fs::write(folder.join(FILES[0]), "mine")?;
    let error = fetch(Source { url: "http://127.0.0.1:1/x", sha256: "" }, &folder);
    let error = format!("{:#}", error.expect_err("not empty"));
    assert!(error.contains("mine is not empty, and has no data_batch_2.bin"), "{error}");
    assert_eq!(fs::read(folder.join(FILES[0]))?, b"mine");
    assert_eq!(fs::read_dir(parent.path(""))?.count(), 1);
    Ok(())
}

#[test]
fn without_a_network_the_error_is_a_line() -> Result<()> {
    let parent = Folder::new()?;
    // Not a port that was free a moment ago, which the server of another test may have by now.
    let error = fetch(Source { url: "http://127.0.0.1:1/x", sha256: "" }, &parent.path("x"));
    let text = format!("{:#}", error.expect_err("nobody listens"));
    assert!(!text.contains('\n') && text.to_lowercase().contains("refused"), "{text}");
    Ok(())
}

/// A program that downloads an archive, the first argument, to a folder, the second, where a test runs it.
#[test]
fn program() {
    let Some(line) = testing::command_line() else { return };
    let line: Vec<String> =
        line.into_iter().map(|word| word.into_string().expect("a word")).collect();
    exit(start(|| Ok(line), |line| into(&line[1], &line[2])).into());
}

fn into(url: &str, folder: &str) -> Result<()> {
    fetch(Source { url, sha256: "" }, Path::new(folder)).map_err(BadData::of)
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_download_and_leaves_nothing() -> Result<()> {
    let parent = Folder::new()?;
    let folder = parent.path("cifar10");
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let line = format!("http://{}/x {}", listener.local_addr()?, folder.display());
    let mut child =
        testing::command("hub::tests::program", &line, None)?.stderr(Stdio::piped()).spawn()?;
    let (mut stream, _) = listener.accept()?;
    let mut request = [0; 1024];
    ensure!(stream.read(&mut request)? > 0, "a request");
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")?;
    // The head of an archive whose first file never ends.
    let mut tar = tar::Builder::new(GzEncoder::new(&mut stream, Compression::none()));
    let mut header = tar::Header::new_gnu();
    header.set_size(900_000_000);
    header.set_mode(0o644);
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status()?;
    ensure!(killed.success(), "no signal was sent");
    // It breaks off while the bytes still come.
    tar.append_data(&mut header, FILES[0], io::repeat(7).take(900_000_000))
        .expect_err("nobody reads any more");
    drop(tar);
    let status = child.wait()?;
    let mut text = String::new();
    child.stderr.take().context("a pipe")?.read_to_string(&mut text)?;
    assert_eq!((status.code(), text.as_str()), (Some(130), "error: --data hub: interrupted\n"));
    assert_eq!(fs::read_dir(parent.path(""))?.count(), 0);
    Ok(())
}
