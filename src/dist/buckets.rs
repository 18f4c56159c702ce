//! Which gradients travel together.

use candle_core::{DType, DeviceLocation, Var};

use crate::kernels::accumulator;

/// A parameter whose gradients are reduced.
#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) name: String,
    pub(super) variable: Var,
    /// Of its gradients.
    pub(super) dtype: DType,
}

impl Parameter {
    pub(super) fn new(name: &str, variable: Var) -> Self {
        let dtype = accumulator(variable.dtype());
        Self { name: name.to_owned(), variable, dtype }
    }

    pub(super) fn elements(&self) -> usize {
        self.variable.elem_count()
    }

    /// What gradients of one bucket have in common.
    fn kind(&self) -> (DType, DeviceLocation) {
        (self.dtype, self.variable.device().location())
    }
}

/// How many elements of a tensor of `elements` each of `size` ranks has: the last ranks' are padded.
pub(super) fn shard_len(elements: usize, size: usize) -> usize {
    elements.div_ceil(size).max(1)
}

/// The parameters in buckets, in the order in which these travel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Buckets {
    /// The numbers of the parameters in each.
    pub(super) members: Vec<Vec<usize>>,
    /// The bucket of each parameter.
    pub(super) of: Vec<usize>,
}

impl Buckets {
    /// Buckets of parameters in this `order`, each up to its limit of bytes: the first one's, that of all others.
    ///
    /// One that is larger than the limit has a bucket of its own.
    pub(super) fn new(parameters: &[Parameter], order: &[usize], limits: [usize; 2]) -> Self {
        let (mut members, mut of) = (Vec::<Vec<usize>>::new(), vec![0; parameters.len()]);
        let mut bytes = 0;
        for &at in order {
            let parameter = &parameters[at];
            let own = parameter.elements() * parameter.dtype.size_in_bytes();
            let limit = if members.len() <= 1 { limits[0] } else { limits[1] };
            let fits = members.last().and_then(|last| last.last()).is_some_and(|&last| {
                bytes + own <= limit && parameters[last].kind() == parameter.kind()
            });
            match members.last_mut() {
                Some(last) if fits => last.push(at),
                _ => {
                    members.push(vec![at]);
                    bytes = 0;
                }
            }
            bytes += own;
            of[at] = members.len() - 1;
        }
        Self { members, of }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn buckets_end_at_their_limits_and_where_the_dtype_changes() {
        let of = |elements: usize, dtype: DType| {
            Parameter::new("p", Var::zeros(elements, dtype, &Device::Cpu).unwrap())
        };
        // Gradients of 16-bit variables are F32: 4 bytes each.
        let parameters = [
            of(2, DType::F32),
            of(2, DType::BF16),
            of(3, DType::F32),
            of(100, DType::F32),
            of(1, DType::F64),
            of(1, DType::F64),
        ];
        let buckets = Buckets::new(&parameters, &[5, 4, 3, 2, 1, 0], [16, 28]);
        assert_eq!(buckets.members, [vec![5, 4], vec![3], vec![2, 1, 0]]);
        assert_eq!(buckets.of, [2, 2, 2, 1, 0, 0]);
        let buckets = Buckets::new(&parameters, &[0, 1, 2, 3, 4, 5], [16, 1000]);
        assert_eq!(buckets.members, [vec![0, 1], vec![2, 3], vec![4, 5]]);
        let tiny = Buckets::new(&parameters, &[0, 1, 2, 3, 4, 5], [1, 1]);
        assert_eq!(tiny.members.len(), 6);
    }

    #[test]
    fn every_rank_has_a_shard() {
        assert_eq!(shard_len(10, 4), 3);
        assert_eq!(shard_len(8, 4), 2);
        assert_eq!(shard_len(1, 4), 1);
        assert_eq!(shard_len(0, 4), 1);
    }
}
