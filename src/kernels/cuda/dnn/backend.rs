//! Descriptors of cuDNN's graph API: attributes by name, each an array of one type, until a descriptor is finished.

use std::ffi::c_void;

use cudarc::cudnn::result::CudnnError;
use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind,
};

pub(super) type Answer<T> = std::result::Result<T, CudnnError>;

/// A type of attributes, as wide as cuDNN's type of that name.
pub(super) trait Attribute: Copy {
    const TYPE: Type;
}

macro_rules! attributes {
    ($($rust:ty: $cudnn:ident,)*) => {
        $(impl Attribute for $rust {
            const TYPE: Type = Type::$cudnn;
        })*
    };
}
attributes! {
    i64: CUDNN_TYPE_INT64,
    f32: CUDNN_TYPE_FLOAT,
    bool: CUDNN_TYPE_BOOLEAN,
    *mut c_void: CUDNN_TYPE_VOID_PTR,
    Raw: CUDNN_TYPE_BACKEND_DESCRIPTOR,
    sys::cudnnHandle_t: CUDNN_TYPE_HANDLE,
    sys::cudnnDataType_t: CUDNN_TYPE_DATA_TYPE,
    sys::cudnnConvolutionMode_t: CUDNN_TYPE_CONVOLUTION_MODE,
    sys::cudnnPointwiseMode_t: CUDNN_TYPE_POINTWISE_MODE,
    sys::cudnnBackendHeurMode_t: CUDNN_TYPE_HEUR_MODE,
}

/// A descriptor, as attributes of others name it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct Raw(sys::cudnnBackendDescriptor_t);

/// A descriptor, which is destroyed with this.
#[derive(Debug)]
pub(super) struct Descriptor(Raw);

#[allow(unsafe_code)]
impl Descriptor {
    pub(super) fn new(kind: Kind) -> Answer<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: one pointer is written, for which there is room.
        unsafe { sys::cudnnBackendCreateDescriptor(kind, &mut raw) }.result()?;
        Ok(Self(Raw(raw)))
    }

    pub(super) fn raw(&self) -> Raw {
        self.0
    }

    /// The descriptor with an attribute more.
    pub(super) fn with<T: Attribute>(self, name: Name, values: &[T]) -> Answer<Self> {
        let count = values.len() as i64;
        // SAFETY: the descriptor is alive. As many values of the type as it says are there, and cuDNN copies them.
        unsafe {
            sys::cudnnBackendSetAttribute(self.0.0, name, T::TYPE, count, values.as_ptr().cast())
        }
        .result()?;
        Ok(self)
    }

    /// The descriptor with all its attributes, which cuDNN checks together.
    pub(super) fn finish(self) -> Answer<Self> {
        // SAFETY: the descriptor is alive.
        unsafe { sys::cudnnBackendFinalize(self.0.0) }.result()?;
        Ok(self)
    }

    /// An attribute that is one number.
    pub(super) fn number(&self, name: Name) -> Answer<i64> {
        let (mut count, mut value) = (0, 0i64);
        let value_at: *mut i64 = &mut value;
        // SAFETY: the descriptor is alive, and there is room for one number of this type.
        unsafe {
            sys::cudnnBackendGetAttribute(self.0.0, name, i64::TYPE, 1, &mut count, value_at.cast())
        }
        .result()?;
        Ok(value)
    }

    /// The numerical notes of an engine, by their numbers: later versions of cuDNN have others.
    pub(super) fn notes(&self) -> Answer<Vec<u32>> {
        let (mut count, mut notes) = (0, [0u32; 32]);
        let name = Name::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE;
        // SAFETY: the descriptor is alive, and there is room for as many notes as are asked for. A note is an `enum` of
        // C, of 32 bits.
        unsafe {
            sys::cudnnBackendGetAttribute(
                self.0.0,
                name,
                Type::CUDNN_TYPE_NUMERICAL_NOTE,
                notes.len() as i64,
                &mut count,
                notes.as_mut_ptr().cast(),
            )
        }
        .result()?;
        Ok(notes.into_iter().take(count.max(0) as usize).collect())
    }

    /// An attribute that is at most so many descriptors of a kind.
    pub(super) fn descriptors(&self, name: Name, kind: Kind, most: usize) -> Answer<Vec<Self>> {
        let mut found = (0..most).map(|_| Self::new(kind)).collect::<Answer<Vec<_>>>()?;
        let mut raw: Vec<Raw> = found.iter().map(Self::raw).collect();
        let mut count = 0;
        // SAFETY: the descriptor is alive. cuDNN fills the descriptors that it is given, as many as are asked for.
        unsafe {
            sys::cudnnBackendGetAttribute(
                self.0.0,
                name,
                Raw::TYPE,
                most as i64,
                &mut count,
                raw.as_mut_ptr().cast(),
            )
        }
        .result()?;
        found.truncate(count.max(0) as usize);
        Ok(found)
    }

    /// Runs this plan on what `pack` names.
    pub(super) fn execute(&self, handle: sys::cudnnHandle_t, pack: &Self) -> Answer<()> {
        // SAFETY: the handle, the plan and the pack are alive. That the pack's addresses are those of the plan's tensors
        // is what `graph::ExecutionPlan::run` asks of its caller.
        unsafe { sys::cudnnBackendExecute(handle, self.0.0, pack.0.0) }.result()
    }
}

#[allow(unsafe_code)]
impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and destroyed here alone.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0.0) };
    }
}
