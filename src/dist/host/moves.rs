//! Collective calls out of what a transport can move, segment by segment.

use candle_core::DType;

use super::combine::combine;
use super::transport::{Fault, Stuck, Transport};
use crate::dist::communicator::ReduceOp;

/// Up to here every rank gets all and adds itself, in one exchange in place of two.
const SMALL: usize = 4096;

pub(super) struct Moves<'a, T> {
    pub(super) transport: &'a mut T,
    pub(super) size: usize,
    pub(super) dtype: DType,
    /// The most bytes of a piece: what one rank gets of another at once. Whole elements.
    pub(super) piece: usize,
    pub(super) stuck: Stuck<'a>,
}

/// The result, or `None` where it does not fit its dtype.
type ReducedBytes = Result<Option<Vec<u8>>, Fault>;

impl<T: Transport> Moves<'_, T> {
    pub(super) fn broadcast(&mut self, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>, Fault> {
        for segment in bytes.chunks_mut(self.piece * self.size) {
            self.transport.broadcast(segment, root, self.stuck)?;
        }
        Ok(bytes)
    }

    pub(super) fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<u8>, Fault> {
        if mine.len() <= self.piece {
            return self.gathered(mine);
        }
        let mut joined = vec![0; mine.len() * self.size];
        for (segment, start) in mine.chunks(self.piece).zip((0..).step_by(self.piece)) {
            let all = self.gathered(segment)?;
            let parts = all.chunks_exact(segment.len());
            for (part, whole) in parts.zip(joined.chunks_exact_mut(mine.len())) {
                whole[start..start + part.len()].copy_from_slice(part);
            }
        }
        Ok(joined)
    }

    pub(super) fn all_reduce(&mut self, mut bytes: Vec<u8>, reduction: ReduceOp) -> ReducedBytes {
        if bytes.len() <= SMALL.min(self.piece) {
            let all = self.gathered(&bytes)?;
            return Ok(self.combined(all, reduction, false));
        }
        let len = bytes.len();
        // Every segment is of equal pieces then.
        bytes.resize(len.next_multiple_of(self.size * self.dtype.size_in_bytes()), 0);
        for segment in bytes.chunks_mut(self.piece * self.size) {
            let parts = self.exchanged(segment)?;
            let Some(sum) = self.combined(parts, reduction, false) else { return Ok(None) };
            self.transport.all_gather(&sum, segment, self.stuck)?;
        }
        bytes.truncate(len);
        Ok(Some(bytes))
    }

    pub(super) fn reduce_scatter(&mut self, bytes: &[u8], reduction: ReduceOp) -> ReducedBytes {
        let share = bytes.len() / self.size;
        if share <= self.piece {
            let parts = self.exchanged(bytes)?;
            return Ok(self.combined(parts, reduction, true));
        }
        let mut results = Vec::new();
        for start in (0..share).step_by(self.piece) {
            let end = share.min(start + self.piece);
            let pieces: Vec<&[u8]> =
                bytes.chunks_exact(share).map(|part| &part[start..end]).collect();
            let parts = self.exchanged(&pieces.concat())?;
            match self.combined(parts, reduction, true) {
                Some(result) => results.extend(result),
                None => return Ok(None),
            }
        }
        Ok(Some(results))
    }

    fn gathered(&mut self, mine: &[u8]) -> Result<Vec<u8>, Fault> {
        let mut all = vec![0; mine.len() * self.size];
        self.transport.all_gather(mine, &mut all, self.stuck)?;
        Ok(all)
    }

    fn exchanged(&mut self, pieces: &[u8]) -> Result<Vec<u8>, Fault> {
        let mut all = vec![0; pieces.len()];
        self.transport.all_to_all(pieces, &mut all, self.stuck)?;
        Ok(all)
    }

    fn combined(&self, parts: Vec<u8>, reduction: ReduceOp, wide: bool) -> Option<Vec<u8>> {
        combine(parts, self.size, self.dtype, reduction, wide)
    }
}
