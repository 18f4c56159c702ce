//! A stand-in for tile registers, so that tests run what is built on them on every processor.

use std::cell::RefCell;

use super::instructions::TileRegisters;
use super::registers::{Configuration, ROWS, WORDS};

thread_local!(static REGISTERS: RefCell<Option<Registers>> = const { RefCell::new(None) });

/// The registers of a thread, as bits.
#[derive(Clone, Copy)]
struct Registers {
    words: [[[u32; WORDS]; ROWS]; 8],
    /// Rows, and words of a row.
    sizes: [[usize; 2]; 8],
}

pub(super) struct Emulated;

#[inline]
fn with<R>(f: impl FnOnce(&mut Registers) -> R) -> R {
    REGISTERS.with_borrow_mut(|registers| f(registers.as_mut().expect("tiles are not configured")))
}

impl TileRegisters for Emulated {
    unsafe fn configure(configuration: &Configuration) {
        let size = |register: usize| {
            let bytes = usize::from(configuration.row_bytes[register]);
            [usize::from(configuration.rows[register]), bytes / 4]
        };
        // What the registers hold before they are loaded is nobody's to rely on.
        let words = [[[f32::NAN.to_bits(); WORDS]; ROWS]; 8];
        REGISTERS.set(Some(Registers { words, sizes: std::array::from_fn(size) }));
    }

    unsafe fn release() {
        REGISTERS.take().expect("tiles are not configured");
    }

    unsafe fn zero() {
        with(|registers| registers.words[..4].fill(Default::default()));
    }

    unsafe fn load<T, const REGISTER: usize>(from: *const T, stride: usize) {
        with(|registers| {
            let [rows, words] = registers.sizes[REGISTER];
            let register = &mut registers.words[REGISTER];
            *register = Default::default();
            for (row, places) in register.iter_mut().enumerate().take(rows) {
                let from = from.wrapping_byte_add(row * stride).cast::<u32>();
                for (word, place) in places.iter_mut().enumerate().take(words) {
                    // SAFETY: the caller's.
                    *place = unsafe { from.add(word).read() };
                }
            }
        });
    }

    unsafe fn store<const REGISTER: usize>(to: *mut f32, stride: usize) {
        with(|registers| {
            let [rows, words] = registers.sizes[REGISTER];
            for (row, values) in registers.words[REGISTER].iter().enumerate().take(rows) {
                let to = to.wrapping_byte_add(row * stride);
                for (word, value) in values.iter().enumerate().take(words) {
                    // SAFETY: the caller's.
                    unsafe { to.add(word).write(f32::from_bits(*value)) };
                }
            }
        });
    }

    /// As Intel's manual has it: sums of even and of odd elements apart, subnormals taken for zero.
    unsafe fn multiply<const SUM: usize, const ROWS: usize, const COLUMNS: usize>() {
        with(|registers| {
            let [rows, width] = registers.sizes[SUM];
            let depth = registers.sizes[ROWS][1].min(registers.sizes[COLUMNS][0]);
            let mut right = [[[0f32; WORDS]; 2]; WORDS];
            for (pairs, words) in right.iter_mut().zip(registers.words[COLUMNS]).take(depth) {
                for (column, word) in words.into_iter().enumerate().take(width) {
                    [pairs[0][column], pairs[1][column]] = pair(word);
                }
            }
            for row in 0..rows {
                let mut sums = [[0f32; WORDS]; 2];
                for (pairs, word) in right.iter().zip(registers.words[ROWS][row]).take(depth) {
                    for ((sums, right), left) in sums.iter_mut().zip(pairs).zip(pair(word)) {
                        for (sum, right) in sums.iter_mut().zip(right) {
                            // A product of two BF16 is exact.
                            *sum = normal(*sum + left * right);
                        }
                    }
                }
                let [even, odd] = sums;
                let places = registers.words[SUM][row].iter_mut().take(width);
                for ((place, even), odd) in places.zip(even).zip(odd) {
                    let before = normal(f32::from_bits(*place));
                    *place = normal(before + normal(even + odd)).to_bits();
                }
            }
        });
    }
}

/// The lower element first.
#[inline]
fn pair(word: u32) -> [f32; 2] {
    [word << 16, word & !0xffff].map(|bits| normal(f32::from_bits(bits)))
}

#[inline]
fn normal(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
