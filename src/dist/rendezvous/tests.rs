//! Ranks as threads that meet over TCP.

use std::net::{Shutdown, TcpListener};
use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

fn place(rank: usize, size: usize, port: u16) -> Rendezvous {
    Rendezvous { rank, size, address: "127.0.0.1".to_owned(), port }
}

fn id() -> Result<Id> {
    Ok(std::array::from_fn(|at| at as u8 + 1))
}

fn none() -> Result<Id> {
    panic!("only rank 0 makes an id")
}

/// What each of `ranks` gets.
fn meet(ranks: &[(usize, usize, &str)], port: u16, timeout: Duration) -> Vec<Result<Id, String>> {
    thread::scope(|scope| {
        let start = |&(rank, size, version): &(usize, usize, &'static str)| {
            scope.spawn(move || {
                let make = if rank == 0 { id } else { none };
                exchange_as(version, &place(rank, size, port), timeout, make)
                    .map_err(|error| error.to_string())
            })
        };
        // The type of the closure needs `'static` names.
        let ranks: Vec<(usize, usize, &'static str)> = ranks
            .iter()
            .map(|&(rank, size, version)| {
                (rank, size, if version == VERSION { VERSION } else { "0.0.9" })
            })
            .collect();
        let threads: Vec<_> = ranks.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_gets_the_id_of_rank_0() {
    let ranks: Vec<_> = (0..4).rev().map(|rank| (rank, 4, VERSION)).collect();
    let ids = meet(&ranks, free_port(), LONG);
    assert_eq!(ids, vec![Ok(id().unwrap()); 4]);
    assert_eq!(exchange(&place(0, 1, free_port()), LONG, id).unwrap(), id().unwrap());
}

/// Debian has the machine's own name at 127.0.1.1, where other ranks of it look for rank 0.
#[test]
fn the_own_name_may_be_at_any_loopback_address() {
    let port = free_port();
    let place = |rank| Rendezvous { address: "127.0.1.1".to_owned(), ..place(rank, 2, port) };
    let ids = thread::scope(|scope| {
        let other = scope.spawn(|| exchange(&place(1), LONG, none));
        [exchange(&place(0), LONG, id), other.join().unwrap()]
    });
    assert_eq!(ids.map(Result::unwrap), [id().unwrap(); 2]);
}

#[test]
fn ranks_that_differ_in_version_size_or_number_are_told_so() {
    for (other, says) in [
        ((1, 2, "0.0.9"), format!("rank 1 has candle-amp 0.0.9, and rank 0 has {VERSION}")),
        ((1, 3, VERSION), "rank 1 is one of 3 ranks, and rank 0 one of 2".to_owned()),
        ((2, 2, VERSION), "there is a rank 2, and 2 ranks".to_owned()),
    ] {
        for result in meet(&[(0, 2, VERSION), other], free_port(), LONG) {
            let message = result.unwrap_err();
            assert!(message.contains(&says), "{message}");
        }
    }
    let twice = [(0, 4, VERSION), (1, 4, VERSION), (1, 4, VERSION)];
    for result in meet(&twice, free_port(), LONG) {
        let message = result.unwrap_err();
        assert!(message.contains("two processes are rank 1"), "{message}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all() {
    // Rank 2 has that long to come.
    let results = meet(&[(0, 4, VERSION), (2, 4, VERSION)], free_port(), Duration::from_secs(2));
    for result in results {
        let message = result.unwrap_err();
        assert!(message.contains("ranks [1, 3] have not come in 2.0 s"), "{message}");
    }
    let message = meet(&[(1, 2, VERSION)], free_port(), SHORT).remove(0).unwrap_err();
    assert!(message.contains("rank 1 of 2, at 127.0.0.1 port"), "{message}");
    assert!(message.contains("rank 0 was not reached in 0.3 s"), "{message}");
}

#[test]
fn a_port_that_is_taken_is_an_error_for_all() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let message = exchange(&place(0, 2, port), SHORT, id).unwrap_err().to_string();
    assert!(message.contains("cannot listen"), "{message}");
    assert!(message.contains("CANDLE_AMP_DIST_PORT"), "{message}");
    // The program there says something else.
    let other = thread::spawn(move || {
        let (mut stream, _) = taken.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let _ = stream.read(&mut [0; GREETING]);
    });
    let message = exchange(&place(1, 2, port), LONG, none).unwrap_err().to_string();
    assert!(message.contains("another program than rank 0 answers"), "{message}");
    other.join().unwrap();
}

#[test]
fn whoever_else_comes_is_not_taken_for_a_rank() {
    let port = free_port();
    let (rank_0, rank_1) = thread::scope(|scope| {
        let rank_0 = scope.spawn(move || exchange(&place(0, 2, port), LONG, id));
        for says in [&[0x16; GREETING][..], b"GET / HTTP/1.1\r\n", b""] {
            let mut stream = loop {
                match connect(&place(1, 2, port)) {
                    Ok(stream) => break stream,
                    Err(_) => thread::sleep(RETRY),
                }
            };
            stream.write_all(says).unwrap();
            let _ = stream.shutdown(Shutdown::Write);
        }
        let rank_1 = exchange(&place(1, 2, port), LONG, none);
        (rank_0.join().unwrap(), rank_1)
    });
    assert_eq!(rank_0.unwrap(), id().unwrap());
    assert_eq!(rank_1.unwrap(), id().unwrap());
}

#[test]
fn an_id_that_rank_0_cannot_make_is_its_error_and_the_others_are_told() {
    let port = free_port();
    let (rank_0, rank_1) = thread::scope(|scope| {
        let fails = || Err(DistError::Start { reason: "NCCL is broken".to_owned() }.into());
        let rank_0 = scope.spawn(move || exchange(&place(0, 2, port), LONG, fails));
        let rank_1 = exchange(&place(1, 2, port), LONG, none);
        (rank_0.join().unwrap(), rank_1)
    });
    for result in [rank_0, rank_1] {
        let message = result.unwrap_err().to_string();
        assert!(message.contains("NCCL is broken"), "{message}");
    }
}
