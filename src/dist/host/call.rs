//! The header of a call, which a rank sends its peers before any data moves.

use std::fmt;

use candle_core::{DType, Tensor};

use crate::dist::arguments::DTYPES;
use crate::dist::communicator::ReduceOp;
use crate::error::{ArgumentError, Result};

/// The bytes of a [`Call`] on the wire: 16, and 8 for each of [`DIMS`] dimensions.
pub(in crate::dist) const HEADER: usize = 16 + 8 * DIMS;

/// The most dimensions of a tensor that travels.
const DIMS: usize = 14;

/// No dtype, on the wire.
const NO_DTYPE: u8 = u8::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Collective {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    AllGather,
    Broadcast {
        root: u32,
    },
    Barrier,
    /// The last call of a rank.
    Leave,
}

/// A collective call. Those of all ranks must be equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) kind: Collective,
    /// In the order of this rank's calls, from 1.
    pub(crate) number: u64,
    dtype: Option<DType>,
    dims: Vec<usize>,
}

impl Call {
    /// A call with a tensor; the rank numbers it when its turn comes.
    pub(in crate::dist) fn with(op: &'static str, kind: Collective, x: &Tensor) -> Result<Self> {
        if x.rank() > DIMS {
            let (name, got) = ("x", x.shape().clone());
            let expected = format!("at most {DIMS} dimensions");
            return Err(ArgumentError::Shape { op, name, got, expected }.into());
        }
        Ok(Self { kind, number: 0, dtype: Some(x.dtype()), dims: x.dims().to_vec() })
    }

    /// A call without a tensor.
    pub(in crate::dist) fn bare(kind: Collective) -> Self {
        Self { kind, number: 0, dtype: None, dims: Vec::new() }
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype.unwrap_or(DType::U8)
    }

    pub(in crate::dist) fn encode(&self) -> [u8; HEADER] {
        let sum = |reduction| u32::from(reduction == ReduceOp::Max);
        let (kind, detail) = match self.kind {
            Collective::AllReduce(reduction) => (0, sum(reduction)),
            Collective::ReduceScatter(reduction) => (1, sum(reduction)),
            Collective::AllGather => (2, 0),
            Collective::Broadcast { root } => (3, root),
            Collective::Barrier => (4, 0),
            Collective::Leave => (5, 0),
        };
        let dtype = DTYPES.iter().position(|dtype| Some(*dtype) == self.dtype);
        let mut header = [0; HEADER];
        header[0] = kind;
        header[1] = dtype.map_or(NO_DTYPE, |place| place as u8);
        header[2] = self.dims.len() as u8;
        header[4..8].copy_from_slice(&detail.to_le_bytes());
        header[8..16].copy_from_slice(&self.number.to_le_bytes());
        for (to, dim) in header[16..].chunks_exact_mut(8).zip(&self.dims) {
            to.copy_from_slice(&(*dim as u64).to_le_bytes());
        }
        header
    }

    /// What [`encode`](Self::encode) wrote; `None` for anything else.
    pub(super) fn decode(header: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER] = header.try_into().ok()?;
        let (words, _) = header.as_chunks::<8>();
        let [_, number, dims @ ..] = words else { return None };
        let detail = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        let reduction = if detail == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        let kind = match header[0] {
            0 => Collective::AllReduce(reduction),
            1 => Collective::ReduceScatter(reduction),
            2 => Collective::AllGather,
            3 => Collective::Broadcast { root: detail },
            4 => Collective::Barrier,
            5 => Collective::Leave,
            _ => return None,
        };
        let dtype = match header[1] {
            NO_DTYPE => None,
            place => Some(*DTYPES.get(usize::from(place))?),
        };
        let dims = dims.get(..usize::from(header[2]))?;
        let dims = dims.iter().map(|dim| u64::from_le_bytes(*dim) as usize).collect();
        Some(Self { kind, number: u64::from_le_bytes(*number), dtype, dims })
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |reduction: &ReduceOp| match reduction {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
        };
        match &self.kind {
            Collective::AllReduce(reduction) => write!(f, "all_reduce ({})", name(reduction))?,
            Collective::ReduceScatter(reduction) => {
                write!(f, "reduce_scatter ({})", name(reduction))?
            }
            Collective::AllGather => f.write_str("all_gather")?,
            Collective::Broadcast { root } => write!(f, "broadcast from rank {root}")?,
            Collective::Barrier => f.write_str("barrier")?,
            Collective::Leave => f.write_str("the end of its calls")?,
        }
        match self.dtype {
            Some(dtype) => write!(f, " of {dtype:?} {:?}", self.dims),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_call_survives_the_wire() {
        let x = Tensor::zeros((3, 0, 5), DType::BF16, &Device::Cpu).unwrap();
        let kinds = [
            Collective::AllReduce(ReduceOp::Sum),
            Collective::AllReduce(ReduceOp::Max),
            Collective::ReduceScatter(ReduceOp::Max),
            Collective::AllGather,
            Collective::Broadcast { root: 70_000 },
        ];
        for kind in kinds {
            let mut call = Call::with("test", kind, &x).unwrap();
            call.number = 1 << 40;
            assert_eq!(Call::decode(&call.encode()), Some(call));
        }
        for kind in [Collective::Barrier, Collective::Leave] {
            let call = Call::bare(kind);
            assert_eq!(Call::decode(&call.encode()), Some(call));
        }
    }

    #[test]
    fn what_is_no_call_is_not_read_as_one() {
        let mut header = Call::bare(Collective::Barrier).encode();
        header[0] = 17;
        assert_eq!(Call::decode(&header), None);
        header[0] = 4;
        header[2] = DIMS as u8 + 1;
        assert_eq!(Call::decode(&header), None);
        assert_eq!(Call::decode(&header[1..]), None);
    }
}
