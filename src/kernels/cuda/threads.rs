//! Order among threads. candle's default device has a stream of each thread's own, and nothing orders those: a thread
//! that gets a tensor from another one could read it before it is written.
//!
//! So every thread counts what it launches. Before a thread takes the address of a tensor or memory for a new one, it
//! waits for the device if others have launched anything since it last did. The first time it waits in any case, for
//! what candle has launched in other threads before. With one thread that is all. Threads that launch at the same
//! time wait for one another all the time: for them there is `Device::new_cuda_with_stream`, one stream for all
//! threads.
//!
//! Later launches by candle's own operators are not counted.
//!
//! # Tensors that are dropped on another thread
//!
//! On candle's default device, a tensor is freed in the stream of the thread that drops it, maybe before a kernel of another
//! thread has read it. The crate's operators never see what that breaks: whoever asks for memory waits first, as above,
//! so that freed memory is not handed out before the kernels that were launched until then are done. candle's own operators
//! do not wait: they may get the memory too soon. Nor does the driver: it may give what is freed back to the system.
//!
//! The crate can neither order such a free nor refuse it:
//!
//! - It is not asked. candle's `Tensor` is an `Arc` of its storage, and the last owner drops cudarc's `CudaSlice`, which
//!   frees by `cuMemFreeAsync` in its stream: the handle 2, which is another stream on each thread. A `CudaSlice` knows no
//!   thread, and neither type has a place for code of others.
//! - cudarc orders a free by events, if its context has several streams (`is_managing_stream_synchronization`). A context of
//!   the crate's own could say so. But each tensor would have two events, four calls of the driver; and an event is
//!   recorded when its guard is dropped, `SyncOnDrop`, so that guards of all arguments would have to outlive each launch.
//! - In the legacy default stream, a free waits for all threads' streams and holds them all up. A capture refuses it.
//!
//! So `docs/tuning.md` asks for one stream: on a device of `Device::new_cuda_with_stream` every free is in order.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// More than a machine has.
pub(super) const DEVICES: usize = 64;

/// What all threads have launched, by the device's ordinal.
static LAUNCHES: [AtomicU64; DEVICES] = [const { AtomicU64::new(0) }; DEVICES];

/// The count of a thread that has not waited yet.
const NEVER: u64 = u64::MAX;

/// Of one thread.
#[derive(Clone, Copy)]
struct Own {
    launches: u64,
    /// How many of other threads' launches were waited for.
    waited_for: u64,
}

thread_local! {
    static OWN: [Cell<Own>; DEVICES] =
        const { [const { Cell::new(Own { launches: 0, waited_for: NEVER }) }; DEVICES] };
}

/// Says that this thread has launched something: after it has.
pub(super) fn launched(ordinal: usize) {
    OWN.with(|own| {
        let own = &own[ordinal % DEVICES];
        own.set(Own { launches: own.get().launches + 1, ..own.get() });
    });
    LAUNCHES[ordinal % DEVICES].fetch_add(1, Ordering::Release);
}

/// Calls `wait` where other threads have launched something since this one last waited, and where it never has; says
/// whether it is known that others have launched anything.
pub(super) fn wait_for_others<E>(
    ordinal: usize,
    wait: impl FnOnce(bool) -> Result<(), E>,
) -> Result<(), E> {
    OWN.with(|own| {
        let own = &own[ordinal % DEVICES];
        // Of whoever hands a tensor over, this has all launches before that.
        let all = LAUNCHES[ordinal % DEVICES].load(Ordering::Acquire);
        let others = all.wrapping_sub(own.get().launches);
        if others != own.get().waited_for {
            wait(others > 0)?;
            own.set(Own { waited_for: others, ..own.get() });
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Whether this thread waits, on a device that no test has.
    fn waits(ordinal: usize) -> bool {
        let mut waited = false;
        let Ok(()) = wait_for_others(ordinal, |_| {
            waited = true;
            Ok::<_, std::convert::Infallible>(())
        });
        waited
    }

    #[test]
    fn a_thread_waits_once_for_what_others_launched_and_never_for_itself() {
        let ordinal = 63;
        assert!(waits(ordinal), "for what nobody has counted");
        launched(ordinal);
        assert!(!waits(ordinal));
        thread::scope(|scope| {
            scope.spawn(|| {
                assert!(waits(ordinal) && !waits(ordinal));
                launched(ordinal);
                assert!(!waits(ordinal));
            });
        });
        assert!(waits(ordinal) && !waits(ordinal));
        assert!(waits(62) && !waits(62), "another device");
        // Alone, a thread is not told of others.
        launched(60);
        assert_eq!(wait_for_others(60, Err), Err(false));
        thread::scope(|scope| {
            scope.spawn(|| assert_eq!(wait_for_others(60, Err), Err(true)));
        });
    }

    #[test]
    fn a_wait_that_failed_is_tried_again() {
        let ordinal = 61;
        thread::scope(|scope| {
            scope.spawn(|| launched(ordinal));
        });
        assert_eq!(wait_for_others(ordinal, |_| Err("no device")), Err("no device"));
        assert!(waits(ordinal) && !waits(ordinal));
    }

    mod on_gpus {
        use candle_core::{DType, Device, Result, Tensor};

        use crate::kernels;
        use crate::kernels::cuda::Gpu;
        use crate::kernels::elementwise::{self, add};
        use crate::kernels::testing::devices::gpus;
        use crate::kernels::testing::own_process::in_own_process;

        /// With streams that are behind, where the GPU is emulated.
        const BEHIND: [(&str, &str); 1] = [("EMULATED_GPU_DELAY", "3")];
        const HERE: &str = "kernels::cuda::threads::tests::on_gpus::";

        fn doubled(x: &Tensor, times: usize) -> Result<Tensor> {
            (0..times).try_fold(x.clone(), |x, _| add(&x, &x))
        }

        #[test]
        fn a_thread_sees_what_another_one_has_made() -> Result<()> {
            let name = "a_thread_sees_what_another_one_has_made";
            if gpus().is_empty() || !in_own_process(&format!("{HERE}{name}"), &BEHIND) {
                return Ok(());
            }
            let device = Device::new_cuda(0)?;
            let ones = Tensor::ones(1 << 16, DType::F32, &device)?;
            for _ in 0..20 {
                let eight = doubled(&ones, 3)?;
                let many = std::thread::spawn(move || doubled(&eight, 5));
                let many = many.join().expect("nothing panics")?;
                let more = doubled(&many, 1)?;
                assert_eq!(more.to_vec1::<f32>()?, [512.0; 1 << 16]);
            }
            Ok(())
        }

        /// Not by an operator, which would have waited by itself.
        #[test]
        fn a_thread_reads_what_another_one_has_made() -> Result<()> {
            let name = "a_thread_reads_what_another_one_has_made";
            if gpus().is_empty() || !in_own_process(&format!("{HERE}{name}"), &BEHIND) {
                return Ok(());
            }
            let device = Device::new_cuda(0)?;
            let ones = Tensor::ones(1 << 16, DType::F32, &device)?;
            for _ in 0..20 {
                let eight = doubled(&ones, 3)?;
                let read = std::thread::spawn(move || Gpu::to_host::<f32>(&eight));
                assert_eq!(read.join().expect("nothing panics")?, [8.0; 1 << 16]);
            }
            Ok(())
        }

        /// By kernels of candle's, which know no order of threads.
        #[test]
        fn a_thread_copies_what_another_one_has_made() -> Result<()> {
            let name = "a_thread_copies_what_another_one_has_made";
            if gpus().is_empty() || !in_own_process(&format!("{HERE}{name}"), &BEHIND) {
                return Ok(());
            }
            let device = Device::new_cuda(0)?;
            let ones = Tensor::ones((1 << 8, 1 << 8), DType::F32, &device)?;
            let yes = Tensor::ones((1 << 8, 1 << 8), DType::U8, &device)?;
            type Copy = fn(&Tensor, &Tensor) -> Result<Tensor>;
            let copies: [Copy; 4] = [
                |x, _| kernels::contiguous(&x.t()?),
                |x, _| kernels::cat(&[x.clone(), x.clone()], 0),
                |x, yes| elementwise::where_cond(yes, x, x),
                |x, _| kernels::ordered(x.device(), || x.affine(1.0, 0.0)),
            ];
            for copy in copies {
                for _ in 0..10 {
                    let eight = doubled(&ones, 3)?;
                    let yes = yes.clone();
                    let copied = std::thread::spawn(move || copy(&eight, &yes));
                    // Nor does this thread read before the other one has copied.
                    let copied = copied.join().expect("nothing panics")?;
                    let read = Gpu::to_host::<f32>(&doubled(&copied, 1)?)?;
                    assert!(read.iter().all(|&x| x == 16.0));
                }
            }
            Ok(())
        }

        /// One stream for all threads: tensors may be dropped wherever that is.
        #[test]
        fn with_one_stream_for_all_threads_tensors_are_dropped_anywhere() -> Result<()> {
            let name = "with_one_stream_for_all_threads_tensors_are_dropped_anywhere";
            if gpus().is_empty() || !in_own_process(&format!("{HERE}{name}"), &BEHIND) {
                return Ok(());
            }
            let device = Device::new_cuda_with_stream(0)?;
            let ones = Tensor::ones(1 << 16, DType::F32, &device)?;
            for _ in 0..20 {
                let eight = doubled(&ones, 3)?;
                let sixteen = doubled(&eight, 1)?;
                let many = std::thread::spawn(move || {
                    drop(eight); // which a kernel may still be reading
                    doubled(&sixteen, 4)
                });
                let many = many.join().expect("nothing panics")?;
                assert_eq!(many.to_vec1::<f32>()?, [256.0; 1 << 16]);
            }
            Ok(())
        }
    }
}
