//! How processes without MPI meet: rank 0 hands every rank an id over TCP.
//!
//! ```text
//! a rank:  MAGIC, version of the crate (32 bytes, padded with 0), number of ranks (u64), its rank (u64)
//! rank 0:  MAGIC, 1 and the id (128 bytes); or MAGIC, 0, a length (u64) and a text that says why not
//! ```
//!
//! The numbers are little-endian. Nothing else travels, and the connections end.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::error::{DistError, Result};
use crate::kernels::cuda::{ID, Id};

const MAGIC: &[u8; 16] = b"candle-amp nccl\n";
const VERSION: &str = env!("CARGO_PKG_VERSION");
const GREETING: usize = 16 + 32 + 8 + 8;

/// The longest text that rank 0 sends.
const LONGEST: usize = 4096;

/// How often a rank tries to reach rank 0, and how long rank 0 waits for who says nothing.
const RETRY: Duration = Duration::from_millis(50);
const SILENCE: Duration = Duration::from_secs(5);

/// Where the ranks meet, and which this one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rendezvous {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// The name or address of rank 0's machine.
    pub(super) address: String,
    pub(super) port: u16,
}

/// The id that rank 0 makes.
pub(super) fn exchange(
    place: &Rendezvous,
    timeout: Duration,
    make_id: impl FnOnce() -> Result<Id>,
) -> Result<Id> {
    exchange_as(VERSION, place, timeout, make_id)
}

fn exchange_as(
    version: &str,
    place: &Rendezvous,
    timeout: Duration,
    make_id: impl FnOnce() -> Result<Id>,
) -> Result<Id> {
    let until = Instant::now() + timeout;
    if place.rank == 0 {
        return serve(version, place, until, timeout, make_id);
    }
    ask(version, place, until, timeout).map_err(|reason| place.error(&reason))
}

impl Rendezvous {
    fn error(&self, reason: &str) -> crate::Error {
        let Self { rank, size, address, port } = self;
        let reason = format!("rank {rank} of {size}, at {address} port {port}: {reason}");
        DistError::Start { reason }.into()
    }

    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        Ok((self.address.as_str(), self.port).to_socket_addrs()?.collect())
    }
}

/// Rank 0's part.
fn serve(
    version: &str,
    place: &Rendezvous,
    until: Instant,
    timeout: Duration,
    make_id: impl FnOnce() -> Result<Id>,
) -> Result<Id> {
    let Rendezvous { size, port, .. } = *place;
    if size == 1 {
        return make_id();
    }
    // A machine may have its own name at an address that others do not reach, as at 127.0.1.1. So all of its addresses
    // are listened to, unless the place is "this machine" for everybody.
    let addresses = place.addresses().unwrap_or_default();
    let all = |has: fn(&SocketAddr) -> bool| !addresses.is_empty() && addresses.iter().all(has);
    let is_local = |address: &SocketAddr| {
        [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)].contains(&address.ip())
    };
    let at = match (all(SocketAddr::is_ipv6), all(is_local)) {
        (false, true) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        (false, false) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        (true, true) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        (true, false) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let listener = TcpListener::bind((at, port)).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    let listener = listener.map_err(|error| {
        place.error(&format!(
            "cannot listen: {error}. CANDLE_AMP_DIST_PORT sets another port, the same for all ranks"
        ))
    })?;
    let mut ranks: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
    let refuse = |ranks: &mut [Option<TcpStream>], reason: String| {
        for stream in ranks.iter_mut().flatten() {
            let _ = answer(stream, Err(&format!("rank 0 ended: {reason}")));
        }
        Err(place.error(&reason))
    };
    while ranks[1..].iter().any(Option::is_none) {
        if Instant::now() >= until {
            let missing: Vec<usize> = (1..size).filter(|rank| ranks[*rank].is_none()).collect();
            let waited = timeout.as_secs_f64();
            let reason = format!("ranks {missing:?} have not come in {waited:.1} s");
            return refuse(&mut ranks, reason);
        }
        let Ok((mut stream, peer)) = listener.accept() else {
            std::thread::sleep(RETRY);
            continue;
        };
        // Whoever says something else is none of the ranks.
        let Ok(greeting) = greeting(&mut stream, until) else {
            tracing::warn!("{peer} has come to where ranks meet, and is none");
            continue;
        };
        match read_greeting(&greeting, version, size).and_then(|rank| match &ranks[rank] {
            Some(_) => Err(format!("two processes are rank {rank}")),
            None => Ok(rank),
        }) {
            Ok(rank) => ranks[rank] = Some(stream),
            Err(reason) => {
                let _ = answer(&mut stream, Err(&reason));
                return refuse(&mut ranks, format!("{peer}: {reason}"));
            }
        }
    }
    match make_id() {
        Ok(id) => {
            for (stream, rank) in ranks.iter_mut().zip(0..) {
                let Some(stream) = stream else { continue };
                answer(stream, Ok(&id))
                    .map_err(|error| place.error(&format!("cannot answer rank {rank}: {error}")))?;
            }
            Ok(id)
        }
        Err(error) => {
            let _ = refuse(&mut ranks, error.to_string());
            Err(error)
        }
    }
}

fn greeting(stream: &mut TcpStream, until: Instant) -> io::Result<[u8; GREETING]> {
    stream.set_nonblocking(false)?;
    let left = until.saturating_duration_since(Instant::now()).max(RETRY);
    stream.set_read_timeout(Some(left.min(SILENCE)))?;
    stream.set_write_timeout(Some(SILENCE))?;
    let mut greeting = [0; GREETING];
    stream.read_exact(&mut greeting)?;
    match greeting.starts_with(MAGIC) {
        true => Ok(greeting),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn write_greeting(version: &str, place: &Rendezvous) -> [u8; GREETING] {
    let mut greeting = [0; GREETING];
    greeting[..16].copy_from_slice(MAGIC);
    for (to, byte) in greeting[16..48].iter_mut().zip(version.bytes()) {
        *to = byte;
    }
    greeting[48..56].copy_from_slice(&(place.size as u64).to_le_bytes());
    greeting[56..].copy_from_slice(&(place.rank as u64).to_le_bytes());
    greeting
}

/// The rank that greets, or why it does not fit.
fn read_greeting(
    greeting: &[u8; GREETING],
    version: &str,
    size: usize,
) -> std::result::Result<usize, String> {
    let theirs = String::from_utf8_lossy(&greeting[16..48]);
    let theirs = theirs.trim_end_matches('\0');
    let number = |at: usize| {
        let (words, _) = greeting[at..].as_chunks::<8>();
        words.first().map_or(0, |word| u64::from_le_bytes(*word))
    };
    let (of, rank) = (number(48), number(56));
    if theirs != version {
        return Err(format!("rank {rank} has candle-amp {theirs}, and rank 0 has {version}"));
    }
    if of != size as u64 {
        return Err(format!("rank {rank} is one of {of} ranks, and rank 0 one of {size}"));
    }
    match usize::try_from(rank) {
        Ok(rank) if (1..size).contains(&rank) => Ok(rank),
        _ => Err(format!("there is a rank {rank}, and {size} ranks")),
    }
}

fn answer(stream: &mut TcpStream, id: std::result::Result<&Id, &str>) -> io::Result<()> {
    let message = match id {
        Ok(id) => [&MAGIC[..], &[1], id].concat(),
        Err(reason) => {
            let text: Vec<u8> = reason.bytes().take(LONGEST).collect();
            [&MAGIC[..], &[0], &(text.len() as u64).to_le_bytes(), &text].concat()
        }
    };
    stream.write_all(&message)
}

/// The part of every other rank.
fn ask(
    version: &str,
    place: &Rendezvous,
    until: Instant,
    timeout: Duration,
) -> std::result::Result<Id, String> {
    let waited = timeout.as_secs_f64();
    let mut stream = loop {
        let failure = match connect(place) {
            Ok(stream) => break stream,
            Err(error) => error,
        };
        if Instant::now() >= until {
            return Err(format!("rank 0 was not reached in {waited:.1} s: {failure}"));
        }
        std::thread::sleep(RETRY);
    };
    let left = until.saturating_duration_since(Instant::now()).max(RETRY);
    let mut head = [0; 17];
    let mut talk = || {
        stream.set_write_timeout(Some(left))?;
        // A little longer than rank 0, which says who is missing.
        stream.set_read_timeout(Some(left + SILENCE))?;
        stream.write_all(&write_greeting(version, place))?;
        stream.read_exact(&mut head)
    };
    talk().map_err(|error| format!("rank 0 was reached, and gave no answer: {error}"))?;
    let cut = |error| format!("rank 0 gave half an answer: {error}");
    if !head.starts_with(MAGIC) {
        let reason = "another program than rank 0 answers. CANDLE_AMP_DIST_PORT sets another port, the same for all \
                      ranks";
        return Err(reason.to_owned());
    }
    if head[16] == 1 {
        let mut id = [0; ID];
        stream.read_exact(&mut id).map_err(cut)?;
        return Ok(id);
    }
    let mut length = [0; 8];
    stream.read_exact(&mut length).map_err(cut)?;
    let mut text = Vec::new();
    let length = u64::from_le_bytes(length).min(LONGEST as u64);
    stream.take(length).read_to_end(&mut text).map_err(cut)?;
    Err(String::from_utf8_lossy(&text).into_owned())
}

fn connect(place: &Rendezvous) -> io::Result<TcpStream> {
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for address in place.addresses()? {
        match TcpStream::connect_timeout(&address, SILENCE) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests;
