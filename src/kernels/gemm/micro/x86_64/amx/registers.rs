//! The tile registers: their size, and how a thread configures them.

/// Rows of a tile register.
pub(super) const ROWS: usize = 16;
/// Words of a row of a tile register.
pub(super) const WORDS: usize = 16;

/// What `ldtilecfg` reads: the number of the palette, and the size of each register.
#[repr(C, align(64))]
pub(super) struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    pub(super) row_bytes: [u16; 16],
    pub(super) rows: [u8; 16],
}

impl Configuration {
    /// Registers 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns; where there is a tail, 5 is rows and 7
    /// columns of so many words.
    pub(super) fn new(tail: usize) -> Self {
        let mut configuration =
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for register in 0..8 {
            configuration.row_bytes[register] = 64;
            configuration.rows[register] = 16;
        }
        if tail > 0 {
            configuration.row_bytes[5] = tail as u16 * 4;
            configuration.rows[7] = tail as u8;
        }
        configuration
    }
}
