//! That blocks fit their scratch, and cover all tiles.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::super::sizes::{LARGE, SMALL, STRIDED};
use super::*;
use crate::kernels::tensors::format::Format;

#[test]
fn blocks_fit_their_scratch_and_cover_each_tile_once() {
    let mut rng = ChaCha8Rng::seed_from_u64(61);
    for case in 0..900 {
        let sizes = [STRIDED, SMALL, LARGE][case % 3];
        let (stride, taps) = if case % 3 == 0 { (2, rng.random_range(3..5)) } else { (1, 3) };
        let padding = (rng.random_range(0..3), rng.random_range(0..3));
        let geometry =
            Geometry { stride, padding, dilation: 1, groups: 1, format: Format::ChannelsFirst };
        let (height, width) = (rng.random_range(4..40), rng.random_range(4..160));
        let dims = [rng.random_range(1..9), 16, height, width];
        let shape = Shape::new(&dims, &[16, 16, taps, taps], geometry).unwrap();
        for order in [Order::Forward, Order::Backward] {
            let grid = Grid::new(&shape, order, &sizes);
            let (threads, product) = (rng.random_range(1..65), 8 * rng.random_range(1..3));
            let grid = if rng.random() { grid.for_threads(threads, product) } else { grid };
            let what = format!("{grid:?} {order:?} {shape:?}");
            let both = [Sides::read, Sides::written].map(|of| of(&shape, order, sizes.made));
            let mut covered = vec![0; grid.tiles()];
            for block in (0..grid.blocks()).map(|index| grid.block(index)) {
                assert!((1..=sizes.tiles).contains(&block.tiles()), "{what}");
                for line in block.lines.clone() {
                    let columns = block.columns.clone();
                    columns.for_each(|column| covered[line * grid.columns + column] += 1);
                }
                for sides in both {
                    let (pitch, room) = (block.pitch(sides), grid.room(sides));
                    let last = (sides.0.extent - 1) * pitch + sides.1.extent;
                    let starts: Vec<_> = grid.starts(&block, sides).collect();
                    assert_eq!(starts.len(), block.tiles());
                    assert!(starts.iter().all(|start| start + last <= room), "{what}");
                    let mut images = grid.images(&block, sides);
                    assert!(
                        images.all(|(_, rows, at)| (at + rows.len()) * pitch <= room),
                        "{what}"
                    );
                }
            }
            assert!(covered.iter().all(|&times| times == 1), "{what}");
        }
    }
}
