//! The instructions of tile registers. The standard library's are not stable.

use std::arch::asm;

use super::registers::Configuration;

/// What multiplies tiles: the processor, or in tests a stand-in for it.
///
/// # Safety
/// Of all functions but [`configure`](Self::configure): The thread has configured its tiles. As many rows,
/// `stride` bytes apart, as the register is configured for can be read or written. No other code uses the
/// registers.
pub(super) trait TileRegisters {
    /// # Safety
    /// The processor has tiles and the system allows them.
    unsafe fn configure(configuration: &Configuration);

    /// Ends their use: the system would save registers in use at every switch of threads.
    unsafe fn release();

    /// Writes zeros to registers 0 to 3, which hold sums.
    unsafe fn zero();

    unsafe fn load<T, const REGISTER: usize>(from: *const T, stride: usize);

    unsafe fn store<const REGISTER: usize>(to: *mut f32, stride: usize);

    /// Adds the products of pairs of BF16 of `ROWS` and `COLUMNS` to `SUM`.
    unsafe fn multiply<const SUM: usize, const ROWS: usize, const COLUMNS: usize>();
}

/// The processor's.
pub(super) struct Amx;

impl TileRegisters for Amx {
    #[inline(always)]
    unsafe fn configure(configuration: &Configuration) {
        // SAFETY: the caller's. A `Configuration` is valid, and 64 bytes long.
        unsafe { asm!("ldtilecfg [{}]", in(reg) configuration, options(nostack, readonly)) };
    }

    #[inline(always)]
    unsafe fn release() {
        // SAFETY: the caller's.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }

    #[inline(always)]
    unsafe fn zero() {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, nomem),
            )
        };
    }

    #[inline(always)]
    unsafe fn load<T, const REGISTER: usize>(from: *const T, stride: usize) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tileloadd tmm{register}, [{from} + {stride}]",
                register = const REGISTER,
                from = in(reg) from,
                stride = in(reg) stride,
                options(nostack, readonly),
            )
        };
    }

    #[inline(always)]
    unsafe fn store<const REGISTER: usize>(to: *mut f32, stride: usize) {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}], tmm{register}",
                register = const REGISTER,
                to = in(reg) to,
                stride = in(reg) stride,
                options(nostack),
            )
        };
    }

    #[inline(always)]
    unsafe fn multiply<const SUM: usize, const ROWS: usize, const COLUMNS: usize>() {
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "tdpbf16ps tmm{sum}, tmm{rows}, tmm{columns}",
                sum = const SUM,
                rows = const ROWS,
                columns = const COLUMNS,
                options(nostack, nomem),
            )
        };
    }
}
