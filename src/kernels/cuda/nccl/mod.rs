//! Ranks that NCCL connects: what one of them starts on a stream of its own.
//!
//! No call here waits. NCCL's communicators do not block: a call may go on in the background, and [`Link::is_settled`]
//! says when it has given its work to the stream. Nothing else may be given to the stream before.

mod step;

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{CudaDevice, DType, Error, Tensor};
use cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, PinnedHostSlice};
use cudarc::driver::{DriverError, result};
use cudarc::nccl::sys::{self, ncclResult_t};

use super::address::{address, address_mut};
use super::compile::{self, Source};
use super::gpu::Gpu;
use super::grid::{Grid, suffix};
use super::launch::Launch;
use super::streams::launched;
use crate::error::bail;
pub(crate) use step::{Combine, Step};

type Result<T, E = Error> = std::result::Result<T, E>;

static SOURCE: Source = Source { name: "combine", code: include_str!("combine.cu") };

/// Whether this program has NCCL.
pub(crate) const HAS_NCCL: bool = true;

/// The bytes of an [`Id`].
pub(crate) const ID: usize = 128;
/// By which ranks find one another.
pub(crate) type Id = [u8; ID];

/// An id that one rank makes for all.
#[allow(unsafe_code)]
pub(crate) fn new_id() -> Result<Id, String> {
    let mut id = MaybeUninit::<sys::ncclUniqueId>::uninit();
    // SAFETY: `id` is there to be written, and is read only after NCCL has written it.
    let id = unsafe {
        check(sys::ncclGetUniqueId(id.as_mut_ptr()), std::ptr::null_mut())?;
        id.assume_init()
    };
    Ok(id.internal.map(|byte| byte as u8))
}

/// What a stream had been given.
#[derive(Debug)]
pub(crate) struct Event(CudaEvent);

impl Event {
    /// Whether the stream has done all that.
    pub(crate) fn is_done(&self) -> Result<bool, String> {
        self.0.try_is_complete().map_err(of_driver)
    }
}

/// NCCL's settings as version 2.14 had them: a prefix of those of every later version.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

/// One rank, and a stream for what it exchanges.
///
/// Dropped, it aborts what is under way.
#[derive(Debug)]
pub(crate) struct Link {
    comm: sys::ncclComm_t,
    device: CudaDevice,
    stream: Arc<CudaStream>,
    size: usize,
    /// The bytes of a header.
    header: usize,
    /// This rank's header, those of all ranks, and whether a sum has overflown.
    scratch: CudaSlice<u8>,
    /// For each slot: the same on the host.
    slots: Vec<PinnedBuffer>,
}

/// Memory of the host that the device reads and writes while the host goes on.
#[derive(Debug)]
struct PinnedBuffer {
    memory: PinnedHostSlice<u8>,
    start: *mut u8,
}

// SAFETY: NCCL allows a communicator to be used by one thread after another, and its owner has it alone. The slots'
// memory belongs to it too.
#[allow(unsafe_code)]
unsafe impl Send for Link {}

impl Link {
    /// Starts to connect rank `rank` of `size`, with so many slots for headers of `header` bytes.
    #[allow(unsafe_code)]
    pub(crate) fn new(
        gpu: &Gpu,
        id: &Id,
        [rank, size]: [usize; 2],
        [slots, header]: [usize; 2],
    ) -> Result<Self, String> {
        let device = gpu.0.clone();
        let context =
            CudaContext::new(device.cuda_stream().context().ordinal()).map_err(of_driver)?;
        // SAFETY: nobody else has this object. Its streams are ordered by the events that this module records.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(of_driver)?;
        let scratch = stream.alloc_zeros(header * (size + 1) + 4).map_err(of_driver)?;
        let slots = (0..slots).map(|_| PinnedBuffer::new(&context, header * (size + 1) + 4));
        let slots = slots.collect::<Result<_, _>>().map_err(of_driver)?;
        let mut config =
            Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 };
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as std::ffi::c_char) };
        let mut comm = std::ptr::null_mut();
        // SAFETY: `comm` is there to be written. NCCL reads of the settings as many bytes as they say that they
        // have, before it returns.
        let started = unsafe {
            sys::ncclCommInitRankConfig(
                &raw mut comm,
                size as i32,
                id,
                rank as i32,
                (&raw mut config).cast(),
            )
        };
        check(started, comm)?;
        Ok(Self { comm, device, stream, size, header, scratch, slots })
    }

    /// Whether NCCL has done what it was last asked for; the error that it has met since, of this rank or of a peer.
    #[allow(unsafe_code)]
    pub(crate) fn is_settled(&self) -> Result<bool, String> {
        let mut state = ncclResult_t::ncclSuccess;
        // SAFETY: the communicator is there, and `state` is there to be written.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.comm, &raw mut state) };
        self.check(asked)?;
        self.check(state)?;
        Ok(state == ncclResult_t::ncclSuccess)
    }

    /// Has the stream wait for another stream's event.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), String> {
        self.stream.wait(&event.0).map_err(of_driver)
    }

    /// Of what the stream was given until now.
    pub(crate) fn record(&self) -> Result<Event, String> {
        self.stream.record_event(None).map(Event).map_err(of_driver)
    }

    /// Starts a step. The memory that it names is the stream's until it is done.
    pub(crate) fn start(&self, step: &Step) -> Result<(), String> {
        match *step {
            Step::AllToAll { from, to, bytes } => self.all_to_all(from, to, bytes),
            Step::AllGather { from, to, bytes } => self.all_gather(from, to, bytes),
            Step::Broadcast { at, bytes, root } => self.broadcast(at, bytes, root),
            Step::Combine(combine) => self.combine(&combine).map_err(|error| error.to_string()),
        }
    }

    #[allow(unsafe_code)]
    fn all_to_all(&self, from: u64, to: u64, bytes: usize) -> Result<(), String> {
        let stream = self.stream.cu_stream().cast();
        // SAFETY: a group has no requirements.
        self.check(unsafe { sys::ncclGroupStart() })?;
        let start = |peer: usize| {
            let (from, to) = (from + (peer * bytes) as u64, to + (peer * bytes) as u64);
            // SAFETY: the caller's memory has `size` pieces of so many bytes at both addresses, and keeps them until
            // the stream is done. The communicator is there.
            unsafe {
                self.check(sys::ncclSend(from as _, bytes, BYTE, peer as i32, self.comm, stream))?;
                self.check(sys::ncclRecv(to as _, bytes, BYTE, peer as i32, self.comm, stream))
            }
        };
        let started = (0..self.size).try_for_each(start);
        // SAFETY: this ends the group above.
        let ended = self.check(unsafe { sys::ncclGroupEnd() });
        started.and(ended)
    }

    #[allow(unsafe_code)]
    fn all_gather(&self, from: u64, to: u64, bytes: usize) -> Result<(), String> {
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the caller's memory has so many bytes at `from` and `size` times as many at `to`, and keeps them
        // until the stream is done. The communicator is there.
        self.check(unsafe {
            sys::ncclAllGather(from as _, to as _, bytes, BYTE, self.comm, stream)
        })
    }

    #[allow(unsafe_code)]
    fn broadcast(&self, at: u64, bytes: usize, root: usize) -> Result<(), String> {
        let stream = self.stream.cu_stream().cast();
        // SAFETY: the caller's memory has so many bytes at `at`, and keeps them until the stream is done. The
        // communicator is there.
        self.check(unsafe {
            sys::ncclBroadcast(at as _, at as _, bytes, BYTE, root as i32, self.comm, stream)
        })
    }

    #[allow(unsafe_code)]
    fn combine(&self, combine: &Combine) -> Result<()> {
        let Combine { to, parts, count, piece, dtype, out, max } = *combine;
        let op = if max { "max" } else { "sum" };
        let kinds = match dtype {
            _ if dtype.is_float() => [suffix(dtype)?, suffix(out)?],
            DType::U8 => ["u8", ""],
            DType::U32 => ["u32", ""],
            DType::I16 => ["i16", ""],
            DType::I32 => ["i32", ""],
            DType::I64 => ["i64", ""],
            _ => bail!("no kernel combines {dtype:?}"),
        };
        let name = ["combine", op, kinds[0], kinds[1]].into();
        let function = compile::function(&self.device.cuda_stream(), &SOURCE, name)?;
        // Addresses as words: whoever asks a tensor for its address may have to wait for other threads.
        let launch =
            Launch::new(function, self.stream.clone()).sizes(&[to as usize, parts as usize]);
        let launch = if dtype.is_float() || max {
            launch
        } else {
            let overflow = self.at(self.overflow());
            // SAFETY: the last 4 bytes of the scratch memory are this stream's.
            unsafe { result::memset_d8_async(overflow, 0, 4, self.stream.cu_stream()) }.w()?;
            launch.size(overflow as usize)
        };
        launch.sizes(&[count, piece, self.size]).run(Grid::over(count, 16 / dtype.size_in_bytes()))
    }

    /// Starts to tell all ranks this rank's header, by memory of a slot that is not in use.
    #[allow(unsafe_code)]
    pub(crate) fn start_headers(&self, slot: usize, header: &[u8]) -> Result<(), String> {
        let own = self.slots[slot].bytes(0, self.header);
        // SAFETY: the slot's memory begins with a header's bytes, and nobody uses the slot.
        let own = unsafe { std::slice::from_raw_parts_mut(own, self.header) };
        own.copy_from_slice(header);
        // SAFETY: the scratch memory begins with a header's bytes too, and is this stream's. The slot stays as it is
        // until it is given back, after the stream is done.
        unsafe { result::memcpy_htod_async(self.at(0), own, self.stream.cu_stream()) }
            .map_err(of_driver)?;
        self.all_gather(self.at(0), self.at(self.header), self.header)
    }

    /// Starts to bring the headers of all ranks to the slot.
    pub(crate) fn fetch_headers(&self, slot: usize) -> Result<(), String> {
        self.fetch(slot, self.header, self.header * self.size)
    }

    /// The headers of all ranks, once the stream has brought them.
    pub(crate) fn headers(&self, slot: usize) -> Vec<u8> {
        self.slots[slot].read(self.header, self.header * self.size)
    }

    /// Starts to bring to the slot whether the last sum has overflown.
    pub(crate) fn fetch_overflow(&self, slot: usize) -> Result<(), String> {
        self.fetch(slot, self.overflow(), 4)
    }

    /// Whether that sum has overflown, once the stream has brought it.
    pub(crate) fn has_overflown(&self, slot: usize) -> bool {
        self.slots[slot].read(self.overflow(), 4) != [0; 4]
    }

    /// Where the scratch memory and the slots say whether a sum has overflown.
    fn overflow(&self) -> usize {
        self.header * (self.size + 1)
    }

    #[allow(unsafe_code)]
    fn fetch(&self, slot: usize, start: usize, len: usize) -> Result<(), String> {
        // SAFETY: a slot is as large as the scratch memory, and nobody reads it before the stream is done.
        let to = unsafe { std::slice::from_raw_parts_mut(self.slots[slot].bytes(start, len), len) };
        // SAFETY: the scratch memory has these bytes, and the slot lives until the stream is done.
        unsafe { result::memcpy_dtoh_async(to, self.at(start), self.stream.cu_stream()) }
            .map_err(of_driver)
    }

    /// The address of a byte of the scratch memory.
    fn at(&self, byte: usize) -> u64 {
        self.scratch.device_ptr(&self.stream).0 + byte as u64
    }

    /// Starts to part from the other ranks, after the last step. They do the same.
    #[allow(unsafe_code)]
    pub(crate) fn start_to_leave(&self) -> Result<(), String> {
        // SAFETY: the communicator is there.
        self.check(unsafe { sys::ncclCommFinalize(self.comm) })
    }

    /// Frees what NCCL has, once [`start_to_leave`](Self::start_to_leave) is settled.
    #[allow(unsafe_code)]
    pub(crate) fn leave(mut self) -> Result<(), String> {
        let comm = std::mem::replace(&mut self.comm, std::ptr::null_mut());
        // SAFETY: the communicator is there, and nobody has it any more.
        check(unsafe { sys::ncclCommDestroy(comm) }, std::ptr::null_mut())
    }

    fn check(&self, result: ncclResult_t) -> Result<(), String> {
        check(result, self.comm)
    }
}

const BYTE: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;

impl Drop for Link {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // SAFETY: the communicator is there, and nobody has it any more. What its error would be, nobody asks:
            // this follows another one.
            let _ = unsafe { sys::ncclCommAbort(self.comm) };
        }
        // The slots may be freed once the stream is done.
        let _ = self.stream.synchronize();
    }
}

impl PinnedBuffer {
    #[allow(unsafe_code)]
    fn new(context: &Arc<CudaContext>, len: usize) -> Result<Self, DriverError> {
        // SAFETY: nobody reads a byte that neither the host nor the device has written.
        let mut memory = unsafe { context.alloc_pinned_with_flags::<u8>(len, 0) }?;
        let start = memory.as_mut_ptr()?;
        Ok(Self { memory, start })
    }

    /// Where some of its bytes are.
    fn bytes(&self, start: usize, len: usize) -> *mut u8 {
        assert!(start + len <= self.memory.len(), "within the buffer");
        self.start.wrapping_add(start)
    }

    /// Some of its bytes, which the stream has written.
    #[allow(unsafe_code)]
    fn read(&self, start: usize, len: usize) -> Vec<u8> {
        // SAFETY: the buffer has these bytes. The stream has written them, and does not write them now.
        unsafe { std::slice::from_raw_parts(self.bytes(start, len), len) }.to_vec()
    }
}

fn of_driver(error: DriverError) -> String {
    format!("CUDA: {error}")
}

/// What NCCL says of an error.
#[allow(unsafe_code)]
fn check(result: ncclResult_t, comm: sys::ncclComm_t) -> Result<(), String> {
    if matches!(result, ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress) {
        return Ok(());
    }
    // SAFETY: NCCL returns text that ends with 0 and stays, or null. It takes null for no communicator.
    let [what, why] = unsafe { [sys::ncclGetErrorString(result), sys::ncclGetLastError(comm)] }
        .map(|text| match text.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        });
    Err(if why.is_empty() { format!("NCCL: {what}") } else { format!("NCCL: {what}: {why}") })
}

impl Gpu {
    /// Of what candle's stream was given until now.
    pub(crate) fn record(&self) -> Result<Event> {
        self.0.cuda_stream().record_event(None).map(Event).w()
    }

    /// Has candle's stream wait for another stream's event.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        let stream = self.0.cuda_stream();
        stream.wait(&event.0).w()?;
        launched(&stream);
        Ok(())
    }

    /// Copies the elements of a contiguous tensor to the beginning of another one of the same dtype.
    #[allow(unsafe_code)]
    pub(crate) fn copy(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        let bytes = from.elem_count() * from.dtype().size_in_bytes();
        if from.dtype() != to.dtype() || from.elem_count() > to.elem_count() {
            bail!("cannot copy {from:?} to {to:?}")
        }
        if bytes == 0 {
            return Ok(());
        }
        let stream = self.0.cuda_stream();
        let (from, to) = (address(from)?, address_mut(to)?);
        // SAFETY: both have so many bytes, as was checked, and live until they are freed in this stream's order.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.w()?;
        launched(&stream);
        Ok(())
    }
}
