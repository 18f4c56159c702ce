//! Plans each call as steps on the device.
//!
//! Reductions are not NCCL's, whose order of sums depends on the machine. Pieces travel as they are, and each rank adds
//! those it gets in the order of the ranks, as the engines on the host do.

use candle_core::{DType, Tensor};

use crate::dist::arguments::wide;
use crate::dist::communicator::ReduceOp;
use crate::error::Result;
use crate::kernels::cuda::{Combine, Gpu, Step, address, address_mut};

/// Up to so many bytes every rank gets all and adds itself, by one exchange in place of two.
const SMALL: usize = 4096;

/// The bytes of what a piece is a multiple of, so that a kernel reads it by 16 bytes.
const ALIGNED: usize = 16;

/// The steps of a call, in memory of its own.
pub(super) struct DeviceCall {
    pub(super) steps: Vec<Step>,
    /// What the steps use and nobody else.
    pub(super) kept: Vec<Tensor>,
    /// What they write in the end.
    pub(super) result: Tensor,
}

/// `x` at the beginning of `len` elements.
fn copy(gpu: &Gpu, x: &Tensor, len: usize) -> Result<Tensor> {
    let buffer = gpu.empty(len, x.dtype())?;
    gpu.copy(x, &buffer)?;
    Ok(buffer)
}

fn bytes(count: usize, dtype: DType) -> usize {
    count * dtype.size_in_bytes()
}

pub(super) fn all_reduce(
    gpu: &Gpu,
    x: &Tensor,
    reduction: ReduceOp,
    rank: usize,
    size: usize,
) -> Result<DeviceCall> {
    let (len, dtype, max) = (x.elem_count(), x.dtype(), reduction == ReduceOp::Max);
    if len == 0 {
        return Ok(DeviceCall {
            steps: Vec::new(),
            kept: Vec::new(),
            result: copy(gpu, x, 0)?.reshape(x.shape())?,
        });
    }
    let is_small = bytes(len, dtype) <= SMALL;
    let piece = match is_small {
        true => len,
        false => len.div_ceil(size).next_multiple_of(ALIGNED / dtype.size_in_bytes()),
    };
    let buffer = copy(gpu, x, if is_small { len } else { piece * size })?;
    let parts = gpu.empty(piece * size, dtype)?;
    let (all, from) = (address_mut(&buffer)?, address_mut(&parts)?);
    let combine = |to, count| {
        Step::Combine(Combine { to, parts: from, count, piece, dtype, out: dtype, max })
    };
    let piece = bytes(piece, dtype);
    let steps = if is_small {
        vec![Step::AllGather { from: all, to: from, bytes: piece }, combine(all, len)]
    } else {
        let before = rank * piece / dtype.size_in_bytes();
        let own = all + (rank * piece) as u64;
        vec![
            Step::AllToAll { from: all, to: from, bytes: piece },
            combine(own, len.saturating_sub(before).min(piece / dtype.size_in_bytes())),
            Step::AllGather { from: own, to: all, bytes: piece },
        ]
    };
    let result = buffer.narrow(0, 0, len)?.reshape(x.shape())?;
    Ok(DeviceCall { steps, kept: vec![parts], result })
}

pub(super) fn reduce_scatter(
    gpu: &Gpu,
    x: &Tensor,
    reduction: ReduceOp,
    size: usize,
    share: Vec<usize>,
) -> Result<DeviceCall> {
    let (dtype, max) = (x.dtype(), reduction == ReduceOp::Max);
    let out = wide(dtype);
    let result = gpu.empty(share, out)?;
    let piece = result.elem_count();
    if piece == 0 {
        return Ok(DeviceCall { steps: Vec::new(), kept: Vec::new(), result });
    }
    let buffer = copy(gpu, x, piece * size)?;
    let received = gpu.empty(piece * size, dtype)?;
    let (to, parts) = (address_mut(&result)?, address_mut(&received)?);
    let steps = vec![
        Step::AllToAll { from: address(&buffer)?, to: parts, bytes: bytes(piece, dtype) },
        Step::Combine(Combine { to, parts, count: piece, piece, dtype, out, max }),
    ];
    Ok(DeviceCall { steps, kept: vec![buffer, received], result })
}

pub(super) fn all_gather(gpu: &Gpu, x: &Tensor, joined: Vec<usize>) -> Result<DeviceCall> {
    let result = gpu.empty(joined, x.dtype())?;
    let len = x.elem_count();
    if len == 0 {
        return Ok(DeviceCall { steps: Vec::new(), kept: Vec::new(), result });
    }
    let buffer = copy(gpu, x, len)?;
    let (from, to) = (address(&buffer)?, address_mut(&result)?);
    let steps = vec![Step::AllGather { from, to, bytes: bytes(len, x.dtype()) }];
    Ok(DeviceCall { steps, kept: vec![buffer], result })
}

pub(super) fn broadcast(gpu: &Gpu, x: &Tensor, root: usize) -> Result<DeviceCall> {
    let len = x.elem_count();
    let buffer = copy(gpu, x, len)?;
    let steps = match len {
        0 => Vec::new(),
        _ => {
            vec![Step::Broadcast { at: address_mut(&buffer)?, bytes: bytes(len, x.dtype()), root }]
        }
    };
    Ok(DeviceCall { steps, kept: Vec::new(), result: buffer.reshape(x.shape())? })
}
