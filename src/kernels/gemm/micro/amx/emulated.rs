//! A stand-in for tile registers, so that tests run what is built on them on every processor.

use std::cell::RefCell;

use super::instructions::Tiles;
use super::{CELLS, Configuration, ROWS};

thread_local!(static REGISTERS: RefCell<Option<Registers>> = const { RefCell::new(None) });

/// The registers of a thread, as bits.
#[derive(Clone, Copy)]
struct Registers {
    cells: [[[u32; CELLS]; ROWS]; 8],
    /// Rows, and cells of a row.
    sizes: [[usize; 2]; 8],
}

pub(super) struct Emulated;

fn with<R>(f: impl FnOnce(&mut Registers) -> R) -> R {
    REGISTERS.with_borrow_mut(|registers| f(registers.as_mut().expect("tiles are not configured")))
}

impl Tiles for Emulated {
    unsafe fn configure(configuration: &Configuration) {
        let size = |register: usize| {
            let bytes = usize::from(configuration.row_bytes[register]);
            [usize::from(configuration.rows[register]), bytes / 4]
        };
        // What the registers hold before they are loaded is nobody's to rely on.
        let cells = [[[f32::NAN.to_bits(); CELLS]; ROWS]; 8];
        REGISTERS.set(Some(Registers { cells, sizes: std::array::from_fn(size) }));
    }

    unsafe fn release() {
        REGISTERS.take().expect("tiles are not configured");
    }

    unsafe fn zero() {
        with(|registers| registers.cells[..4].fill(Default::default()));
    }

    unsafe fn load<T, const REGISTER: usize>(from: *const T, stride: usize) {
        with(|registers| {
            let [rows, cells] = registers.sizes[REGISTER];
            let register = &mut registers.cells[REGISTER];
            *register = Default::default();
            for (row, places) in register.iter_mut().enumerate().take(rows) {
                let from = from.wrapping_byte_add(row * stride).cast::<u32>();
                for (cell, place) in places.iter_mut().enumerate().take(cells) {
                    // SAFETY: the caller's.
                    *place = unsafe { from.add(cell).read() };
                }
            }
        });
    }

    unsafe fn store<const REGISTER: usize>(to: *mut f32, stride: usize) {
        with(|registers| {
            let [rows, cells] = registers.sizes[REGISTER];
            for (row, values) in registers.cells[REGISTER].iter().enumerate().take(rows) {
                let to = to.wrapping_byte_add(row * stride);
                for (cell, value) in values.iter().enumerate().take(cells) {
                    // SAFETY: the caller's.
                    unsafe { to.add(cell).write(f32::from_bits(*value)) };
                }
            }
        });
    }

    /// As Intel's manual has it: sums of even and of odd elements apart, subnormals taken for zero.
    unsafe fn multiply<const SUM: usize, const ROWS: usize, const COLUMNS: usize>() {
        with(|registers| {
            let [rows, width] = registers.sizes[SUM];
            let depth = registers.sizes[ROWS][1].min(registers.sizes[COLUMNS][0]);
            let mut right = [[[0f32; CELLS]; 2]; CELLS];
            for (pairs, cells) in right.iter_mut().zip(registers.cells[COLUMNS]).take(depth) {
                for (column, cell) in cells.into_iter().enumerate().take(width) {
                    [pairs[0][column], pairs[1][column]] = pair(cell);
                }
            }
            for row in 0..rows {
                let mut sums = [[0f32; CELLS]; 2];
                for (pairs, cell) in right.iter().zip(registers.cells[ROWS][row]).take(depth) {
                    for ((sums, right), left) in sums.iter_mut().zip(pairs).zip(pair(cell)) {
                        for (sum, right) in sums.iter_mut().zip(right) {
                            // A product of two BF16 is exact.
                            *sum = normal(*sum + left * right);
                        }
                    }
                }
                let [even, odd] = sums;
                let places = registers.cells[SUM][row].iter_mut().take(width);
                for ((place, even), odd) in places.zip(even).zip(odd) {
                    let before = normal(f32::from_bits(*place));
                    *place = normal(before + normal(even + odd)).to_bits();
                }
            }
        });
    }
}

/// The lower element first.
fn pair(cell: u32) -> [f32; 2] {
    [cell << 16, cell & !0xffff].map(|bits| normal(f32::from_bits(bits)))
}

fn normal(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}
