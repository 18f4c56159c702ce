//! The casts of variables that the scopes of a thread have made.

use std::collections::HashMap;

use candle_core::{DType, Tensor, TensorId};

use crate::kernels::WeakTensor;

/// 16-bit copies of variables, made once per scope, and freed some casts after their variable.
#[derive(Default)]
pub(super) struct CastCache {
    epoch: u64,
    casts: HashMap<(TensorId, DType), CachedCast>,
    /// What may be done before the next sweep; see [`HIT`].
    credit: usize,
    /// How many entries sweeps have looked at.
    #[cfg(test)]
    swept: usize,
}

struct CachedCast {
    /// Weak, so that a variable that its model has dropped is freed within the scope.
    variable: Option<WeakTensor>,
    cast: Tensor,
}

/// What is taken of the credit for a cast that is found, and for one that is made. A sweep gives
/// [`CREDIT`] for each entry: it looks at one entry for four casts that are found, or for one that
/// is made. Copies whose variable is gone are few then, as there are to be many sweeps where there
/// are many new copies.
const HIT: usize = 1;
const MISS: usize = 4;
const CREDIT: usize = 4;
/// For the first few.
const LEAST: usize = 16;

impl CastCache {
    /// The cast of the variable, if it was made since `epoch` began.
    pub(super) fn get(&mut self, variable: &Tensor, dtype: DType, epoch: u64) -> Option<Tensor> {
        if self.epoch != epoch {
            self.clear();
            self.epoch = epoch;
        }
        let found = self.casts.get(&(variable.id(), dtype)).map(|entry| entry.cast.clone());
        self.pay(if found.is_some() { HIT } else { MISS });
        found
    }

    pub(super) fn insert(&mut self, variable: &Tensor, cast: Tensor) {
        let key = (variable.id(), cast.dtype());
        let variable = WeakTensor::of(variable);
        self.casts.insert(key, CachedCast { variable, cast });
    }

    pub(super) fn forget(&mut self, variable: &Tensor) {
        if !self.casts.is_empty() {
            self.casts.retain(|(id, _), _| *id != variable.id());
        }
    }

    pub(super) fn clear(&mut self) {
        self.casts.clear();
        self.credit = 0;
    }

    fn pay(&mut self, price: usize) {
        if let Some(left) = self.credit.checked_sub(price) {
            self.credit = left;
            return;
        }
        #[cfg(test)]
        {
            self.swept += self.casts.len();
        }
        self.casts.retain(|_, entry| entry.variable.as_ref().is_none_or(WeakTensor::is_alive));
        self.credit = LEAST + CREDIT * self.casts.len();
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Result, Var};

    use super::*;

    fn var() -> Result<Var> {
        Var::zeros(2, DType::F32, &Device::Cpu)
    }

    fn cached(cache: &mut CastCache, var: &Var) -> Result<bool> {
        let found = cache.get(var, DType::BF16, 0).is_some();
        if !found {
            cache.insert(var, var.to_dtype(DType::BF16)?.detach());
        }
        Ok(found)
    }

    #[test]
    fn copies_of_dropped_variables_are_freed() -> Result<()> {
        let (mut cache, kept) = (CastCache::default(), var()?);
        cached(&mut cache, &kept)?;
        for _ in 0..1000 {
            assert!(!cached(&mut cache, &var()?)?);
            assert!(cache.casts.len() <= 12, "{} copies", cache.casts.len());
        }
        assert!(cached(&mut cache, &kept)?, "that of a variable that is there stays");
        // A model that is dropped, where no other variable is new.
        let model = (0..500).map(|_| var()).collect::<Result<Vec<_>>>()?;
        for var in &model {
            cached(&mut cache, var)?;
        }
        for var in &model {
            assert!(cached(&mut cache, var)?);
        }
        drop(model);
        for _ in 0..4 * 520 {
            cached(&mut cache, &kept)?;
        }
        assert_eq!(cache.casts.len(), 1);
        Ok(())
    }

    /// Sweeps look at each entry some times, however many there are.
    #[test]
    fn a_sweep_is_paid_for() -> Result<()> {
        let mut cache = CastCache::default();
        let model = (0..2000).map(|_| var()).collect::<Result<Vec<_>>>()?;
        for (round, most) in [(0, 2 * 2000), (1, 2000), (2, 2000)] {
            let before = cache.swept;
            for var in &model {
                assert_eq!(cached(&mut cache, var)?, round > 0);
            }
            let swept = cache.swept - before;
            assert!(swept <= most, "round {round}: {swept} entries were looked at");
        }
        assert!(cache.swept > 0);
        Ok(())
    }
}
