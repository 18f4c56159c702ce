use std::collections::HashSet;
use std::panic::catch_unwind;
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::*;
use crate::kernels::cpu::testing::{unless_miri, watched};
use crate::kernels::testing::own_process::in_own_process;

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
}

/// Runs `f` from outside of any pool, and inside of some.
fn everywhere(f: impl Fn() + Send + Sync) {
    f();
    for threads in unless_miri(&[1, 2, 3, 7][..], &[3]) {
        pool(*threads).install(&f);
    }
}

#[test]
fn every_task_runs_once_and_results_are_in_order() {
    everywhere(|| {
        for &tasks in unless_miri(&[0, 1, 2, 3, 64, 1000, 5003][..], &[1, 3, 64]) {
            let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
            let results = map(tasks, |task| {
                counts[task].fetch_add(1, Ordering::Relaxed);
                task * task
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{tasks}");
            assert!(results.into_iter().eq((0..tasks).map(|task| task * task)), "{tasks}");
        }
    });
}

#[test]
fn chunks_and_items_are_each_given_once() {
    everywhere(|| {
        for (len, size) in [(0, 4), (1, 4), (4, 4), (1001, 10), (5, 0)] {
            let mut data = vec![0; len];
            let other: Vec<usize> = (0..2 * len).collect();
            for_each_chunk(&mut data, size, |chunk, part| {
                part.iter_mut().for_each(|x| *x += chunk + 1);
            });
            assert!((0..len).all(|i| data[i] == i / size.max(1) + 1));
            let size = size.max(1);
            for_each_chunk_zipped(&mut data, size, &other, 2 * size, |chunk, part, other| {
                assert_eq!((other.len(), other[0]), (2 * part.len(), chunk * 2 * size));
                part.fill(0);
            });
            assert!(data.iter().all(|&x| x == 0));
        }
        let items = || (0..777).map(|i| vec![i; i % 3 + 1]);
        assert!(map_items(items(), |item| item).into_iter().eq(items()));
        let sizes = [TASK, 1, 0, 3 * TASK, TASK / 2, TASK / 2, 5];
        let twice = map_sized(sizes, |&size| size, |size| 2 * size);
        assert!(twice.into_iter().eq(sizes.map(|size| 2 * size)));
    });
}

/// Small neighbours are a task together, large items are one each.
#[test]
fn small_items_share_a_task() {
    let here = || thread::current().id();
    let many = map_sized(vec![1; 200], |&size| size, |_| here());
    assert_eq!(many.iter().collect::<HashSet<_>>().len(), 1);
    // Threads that meet at a barrier are two.
    pool(2).install(|| {
        let barrier = Barrier::new(2);
        let two = map_sized([TASK, TASK], |&size| size, |_| (barrier.wait(), here()).1);
        assert_ne!(two[0], two[1]);
    });
}

#[test]
fn helpers_come_to_callers_inside_and_outside_of_a_pool() {
    let three = || {
        let barrier = Barrier::new(3);
        for_each(3, |_| _ = barrier.wait());
    };
    pool(3).install(three);
    // A thread that is none of a pool's.
    if threads() > 1 {
        let barrier = Barrier::new(2);
        for_each(2, |_| _ = barrier.wait());
    }
}

/// Of a caller outside of any pool, also where the program keeps rayon's threads busy.
#[test]
fn helpers_outside_have_the_same_tasks_in_every_loop() {
    let test = "kernels::cpu::parallel::tests::helpers_outside_have_the_same_tasks_in_every_loop";
    if cfg!(miri) || !in_own_process(test, &[("RAYON_NUM_THREADS", "4")]) {
        return;
    }
    watched("helpers outside of a pool", || {
        // A pool of another size comes first, and has no say in how many helpers there are outside.
        pool(2).install(|| for_each(100, |_| thread::yield_now()));
        let busy = Arc::new(Barrier::new(5));
        for _ in 0..4 {
            let busy = busy.clone();
            rayon::spawn(move || _ = busy.wait());
        }
        for _ in 0..100 {
            let barrier = Barrier::new(4);
            let here =
                || (thread::current().name().map(str::to_owned), rayon::current_thread_index());
            let places = map(4, |_| (barrier.wait(), here()).1);
            for (thread, (name, place)) in places.into_iter().enumerate() {
                assert_eq!(place, thread.checked_sub(1));
                if let Some(place) = place {
                    assert_eq!(name, Some(format!("amp-helper-{place}")));
                }
            }
        }
        busy.wait();
    });
}

/// What a thread has written in one loop, it reads in the next.
#[test]
fn a_thread_has_the_same_tasks_in_every_loop() {
    pool(3).install(|| {
        for _ in 0..unless_miri(100, 3) {
            let barrier = Barrier::new(3);
            // Threads that meet at a barrier have one task each.
            let places = map(3, |_| (barrier.wait(), rayon::current_thread_index()).1);
            assert_eq!(places, [Some(0), Some(1), Some(2)]);
        }
    });
}

#[test]
fn loops_nest() {
    everywhere(|| {
        let sums = map(20, |a| map(20, |b| map(3, |c| a * b + c).iter().sum::<usize>()));
        for (a, sums) in sums.into_iter().enumerate() {
            assert!(sums.into_iter().eq((0..20).map(|b| 3 * a * b + 3)));
        }
    });
}

#[test]
fn a_panic_is_the_callers_and_items_are_dropped() {
    static ALIVE: AtomicUsize = AtomicUsize::new(0);
    struct Item(usize);
    impl Item {
        fn new(number: usize) -> Self {
            ALIVE.fetch_add(1, Ordering::Relaxed);
            Self(number)
        }
    }
    impl Drop for Item {
        fn drop(&mut self) {
            ALIVE.fetch_sub(1, Ordering::Relaxed);
        }
    }
    everywhere(|| {
        for wrong in [0, 17, 99] {
            let result = catch_unwind(|| {
                map_items((0..100).map(Item::new), |item| {
                    assert!(item.0 != wrong, "task {wrong}");
                    item
                })
            });
            let message = result.err().and_then(|panic| panic.downcast::<String>().ok());
            assert_eq!(message.as_deref(), Some(&format!("task {wrong}")));
        }
        // Of all threads, at once.
        assert!(catch_unwind(|| for_each(50, |task| panic!("{task}"))).is_err());
        assert_eq!(map(3, |task| task), [0, 1, 2]);
    });
    assert_eq!(ALIVE.load(Ordering::Relaxed), 0);
}

/// A caller that waits for a helper runs nobody else's tasks meanwhile: they would see its thread's state.
#[test]
fn a_caller_runs_no_strangers_task() {
    for _ in 0..unless_miri(20, 2) {
        pool(2).scope(|scope| {
            scope.spawn(|scope| {
                let caller = thread::current().id();
                let (inside, strangers) = (Arc::new(AtomicBool::new(true)), 50);
                for _ in 0..strangers {
                    let inside = inside.clone();
                    scope.spawn(move |_| {
                        let stolen = thread::current().id() == caller;
                        assert!(!(stolen && inside.load(Ordering::Relaxed)), "run by the caller");
                    });
                }
                for _ in 0..10 {
                    for_each(8, |_| thread::sleep(Duration::from_micros(100)));
                }
                inside.store(false, Ordering::Relaxed);
            });
        });
    }
}

/// The caller holds a lock that every other task of the pool waits for.
#[test]
fn a_lock_may_be_held_across_a_loop() {
    watched("a lock across a loop", || {
        let lock = Mutex::new(0);
        pool(3).scope(|scope| {
            for _ in 0..30 {
                scope.spawn(|_| {
                    let mut sum = lock.lock().unwrap();
                    *sum += map(20, |task| task).into_iter().sum::<usize>();
                });
            }
        });
        assert_eq!(lock.into_inner().unwrap(), 30 * 190);
    });
}

/// Offers that nobody takes up are limited, and no caller waits for them.
#[test]
fn a_busy_pool_is_not_waited_for() {
    watched("a busy pool", || {
        let pool = pool(2);
        let (busy, free) = (Barrier::new(2), Barrier::new(2));
        pool.scope(|scope| {
            scope.spawn(|_| {
                busy.wait();
                free.wait();
            });
            busy.wait();
            // On the other thread of the pool: nobody is there to help.
            scope.spawn(|_| {
                for _ in 0..unless_miri(1000, 3 * PENDING) {
                    assert_eq!(map(4, |task| task), [0, 1, 2, 3]);
                }
                let most = PENDING * 2;
                let more: Vec<_> = std::iter::from_fn(|| Ticket::take(most)).collect();
                assert!(more.is_empty(), "of all offers some are left to be made");
                free.wait();
            });
        });
    });
    let tickets = [Ticket::take(2), Ticket::take(2), Ticket::take(2)];
    assert!(tickets[0].is_some() && tickets[1].is_some() && tickets[2].is_none());
    drop(tickets);
    assert!(Ticket::take(1).is_some());
}

/// Every order in which a caller and two helpers can pass the gate: nobody is inside once the caller has gone
/// on, and the caller always goes on.
#[test]
fn the_gate_in_every_order() {
    let (mut path, mut orders, mut parked) = (Vec::new(), 0, 0);
    loop {
        let world = orders::World::new(path);
        world.run();
        orders += 1;
        parked += usize::from(world.was_parked());
        match world.next() {
            Some(next) => path = next,
            None => break,
        }
    }
    assert!(orders > 300 && parked > 100, "{orders} orders, in {parked} of which the caller slept");
}

/// A scheduler that lets one of three threads make one atomic step at a time.
mod orders {
    use std::sync::Condvar;

    use super::super::gate::Word;
    use super::*;

    const CALLER: usize = 0;
    const ALL: usize = 3;

    #[derive(Clone, Copy, PartialEq)]
    enum At {
        Running,
        Step,
        Parked,
        End,
    }

    struct State {
        at: [At; ALL],
        turn: Option<usize>,
        /// Which of the threads that could go on did, at every choice, and among how many.
        path: Vec<usize>,
        among: Vec<usize>,
        token: bool,
        slept: bool,
        stuck: bool,
    }

    pub(super) struct World {
        state: Mutex<State>,
        changed: Condvar,
        word: AtomicUsize,
        freed: AtomicBool,
        broken: AtomicBool,
    }

    /// The word of a gate, as one thread sees it.
    struct Seen<'a>(&'a World, usize);

    impl Word for Seen<'_> {
        fn load(&self, order: Ordering) -> usize {
            self.0.stop(self.1, At::Step);
            self.0.word.load(order)
        }
        fn fetch_or(&self, bits: usize, order: Ordering) -> usize {
            self.0.stop(self.1, At::Step);
            self.0.word.fetch_or(bits, order)
        }
        fn fetch_sub(&self, by: usize, order: Ordering) -> usize {
            self.0.stop(self.1, At::Step);
            self.0.must_be_there();
            self.0.word.fetch_sub(by, order)
        }
        fn compare_exchange(
            &self,
            old: usize,
            new: usize,
            order: Ordering,
        ) -> std::result::Result<usize, usize> {
            self.0.stop(self.1, At::Step);
            self.0.word.compare_exchange(old, new, order, Ordering::Relaxed)
        }
    }

    impl World {
        /// Takes the choices of `path`, and then always the first thread.
        pub(super) fn new(path: Vec<usize>) -> Self {
            Self {
                state: Mutex::new(State {
                    at: [At::Running; ALL],
                    turn: None,
                    path,
                    among: Vec::new(),
                    token: false,
                    slept: false,
                    stuck: false,
                }),
                changed: Condvar::new(),
                word: AtomicUsize::new(0),
                freed: AtomicBool::new(false),
                broken: AtomicBool::new(false),
            }
        }

        pub(super) fn run(&self) {
            thread::scope(|scope| {
                for me in 0..ALL {
                    scope.spawn(move || {
                        if me == CALLER {
                            self.caller()
                        } else {
                            self.helper(me)
                        }
                        self.stop(me, At::End);
                    });
                }
            });
            let state = self.state.lock().unwrap();
            assert!(!state.stuck, "nobody can go on, after {:?}", state.path);
            let broken = self.broken.load(Ordering::Relaxed);
            assert!(!broken, "a helper is inside of what is gone, after {:?}", state.path);
        }

        fn caller(&self) {
            let gate = Gate(Seen(self, CALLER));
            if !gate.close() {
                while !gate.is_left() {
                    self.stop(CALLER, At::Parked);
                }
            }
            self.freed.store(true, Ordering::Relaxed);
        }

        fn helper(&self, me: usize) {
            let gate = Gate(Seen(self, me));
            if gate.enter() && {
                self.must_be_there();
                gate.leave()
            } {
                self.stop(me, At::Step);
                self.state.lock().unwrap().token = true;
            }
        }

        /// Noted, not panicked about: the other threads wait for this one.
        fn must_be_there(&self) {
            self.broken.fetch_or(self.freed.load(Ordering::Relaxed), Ordering::Relaxed);
        }

        /// Waits for its turn.
        fn stop(&self, me: usize, at: At) {
            let mut state = self.state.lock().unwrap();
            state.at[me] = at;
            if !state.at.contains(&At::Running) {
                state.choose();
                self.changed.notify_all();
            }
            if at == At::End {
                return;
            }
            while state.turn != Some(me) && !state.stuck {
                state = self.changed.wait(state).unwrap();
            }
            assert!(!state.stuck, "nobody can go on");
            state.turn = None;
            if at == At::Parked {
                state.token = false;
            }
            state.at[me] = At::Running;
        }

        pub(super) fn was_parked(&self) -> bool {
            self.state.lock().unwrap().slept
        }

        /// The next path, if this was not the last.
        pub(super) fn next(self) -> Option<Vec<usize>> {
            let State { mut path, among, .. } = self.state.into_inner().unwrap();
            while let Some(last) = path.pop() {
                if last + 1 < among[path.len()] {
                    path.push(last + 1);
                    return Some(path);
                }
            }
            None
        }
    }

    impl State {
        fn choose(&mut self) {
            self.slept |= self.at[CALLER] == At::Parked && !self.token;
            let can = |&me: &usize| match self.at[me] {
                At::Step => true,
                At::Parked => self.token,
                At::Running | At::End => false,
            };
            let able: Vec<usize> = (0..ALL).filter(can).collect();
            if able.is_empty() {
                self.stuck = self.at.iter().any(|at| *at != At::End);
                return;
            }
            let choice = self.among.len();
            if choice == self.path.len() {
                self.path.push(0);
            }
            self.among.push(able.len());
            self.turn = Some(able[self.path[choice]]);
        }
    }
}
