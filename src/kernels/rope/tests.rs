use candle_core::{DType, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;

const FORMS: [Form; 4] = [
    Form { adjacent: false, positions_first: false },
    Form { adjacent: true, positions_first: false },
    Form { adjacent: false, positions_first: true },
    Form { adjacent: true, positions_first: true },
];

/// Of one, of an odd number of pairs, past a task.
const SHAPES: [[usize; 4]; 4] = [[1, 1, 1, 2], [2, 3, 5, 6], [3, 4, 3, 34], [2, 5, 33, 64]];

/// Angles of more positions than needed, for all or for each batch.
fn angles(shape: [usize; 4], form: Form, per_batch: bool, dtype: DType) -> (Tensor, Tensor) {
    let positions = if form.positions_first { shape[1] } else { shape[2] } + 2;
    let dims = [shape[0], positions, shape[3] / 2];
    let angles = random(&dims[usize::from(!per_batch)..], DType::F64, 9);
    let of = |t: Tensor| t.to_dtype(dtype).unwrap();
    (of(angles.cos().unwrap()), of(angles.sin().unwrap()))
}

fn naive(x: &Tensor, cos: &Tensor, sin: &Tensor, form: Form) -> Vec<f64> {
    let (b, first, second, d) = x.dims4().unwrap();
    let positions = cos.dims()[cos.rank() - 2];
    let per_batch = cos.rank() == 3;
    let (x, cos, sin) = (values(x), values(cos), values(sin));
    let mut y = vec![0.0; x.len()];
    for row in 0..b * first * second {
        let position = if form.positions_first { row / second % first } else { row % second };
        let batch = if per_batch { row / (first * second) } else { 0 };
        for pair in 0..d / 2 {
            let at = (batch * positions + position) * (d / 2) + pair;
            let (i, j) =
                if form.adjacent { (2 * pair, 2 * pair + 1) } else { (pair, pair + d / 2) };
            let (i, j) = (row * d + i, row * d + j);
            y[i] = x[i] * cos[at] - x[j] * sin[at];
            y[j] = x[i] * sin[at] + x[j] * cos[at];
        }
    }
    y
}

#[test]
fn pairs_turn_by_the_angle_of_their_position() {
    for dtype in DTYPES {
        for angle_dtype in [dtype, DType::F32] {
            for shape in SHAPES {
                for form in FORMS {
                    for per_batch in [false, true] {
                        let (cos, sin) = angles(shape, form, per_batch, angle_dtype);
                        let x = strided(&shape, dtype, 1);
                        let expected = naive(&x, &cos, &sin, form);
                        for out in [dtype, DType::F32] {
                            let y = rotate(&x, &cos, &sin, form, false, out).unwrap();
                            assert_eq!((y.dtype(), y.dims()), (out, &shape[..]));
                            assert_close(&y, &expected, 4.0);
                        }
                        let wide = |t: &Tensor| cast(t, accumulator(dtype)).unwrap();
                        let oracle = portable::rotate(&x, &wide(&cos), &wide(&sin), form, dtype);
                        assert_close(&oracle.unwrap(), &expected, 4.0);
                    }
                }
            }
        }
    }
}

#[test]
fn back_is_where_it_came_from() {
    for form in FORMS {
        let (cos, sin) = angles(SHAPES[2], form, false, DType::F64);
        let x = random(&SHAPES[2], DType::F64, 1);
        let there = rotate(&x, &cos, &sin, form, false, DType::F64).unwrap();
        let back = rotate(&there, &cos, &sin, form, true, DType::F64).unwrap();
        assert_close(&back, &values(&x), 8.0);
    }
}

#[test]
fn elements_that_are_not_neighbours_are_found() {
    let x = random(&[3, 6, 5, 2], DType::BF16, 1).permute((3, 2, 0, 1)).unwrap();
    for form in FORMS {
        let (cos, sin) = angles([2, 5, 3, 6], form, false, DType::F32);
        let strided = rotate(&x, &cos, &sin, form, false, DType::BF16).unwrap();
        let copied = rotate(&x.contiguous().unwrap(), &cos, &sin, form, false, DType::BF16);
        assert_eq!(values(&strided), values(&copied.unwrap()));
    }
}

#[test]
fn nothing_beyond_the_end_of_a_storage_is_nothing() {
    let x = random(&[2, 3, 4, 8], DType::F32, 1);
    let nothing = x.narrow(0, 2, 0).unwrap().narrow(1, 3, 0).unwrap();
    for form in FORMS {
        let (cos, sin) = angles([2, 3, 4, 8], form, false, DType::F32);
        let turned = rotate(&nothing, &cos, &sin, form, false, DType::F32).unwrap();
        assert_eq!(turned.dims(), [0, 0, 4, 8]);
    }
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for angle_dtype in [dtype, DType::F32, DType::F16] {
            for shape in SHAPES.into_iter().chain([[2, 3, 4, 32]]) {
                for form in FORMS {
                    for per_batch in [false, true] {
                        let (cos, sin) = angles(shape, form, per_batch, angle_dtype);
                        let x = strided(&shape, dtype, 1);
                        let apart = random(&[shape[3], shape[2], shape[0], shape[1]], dtype, 2);
                        let apart = apart.permute((2, 3, 1, 0)).unwrap();
                        assert_gpus_agree(&[&x, &apart, &cos, &sin], 2.0, |t| {
                            let turn =
                                |x: &Tensor, back, out| rotate(x, &t[2], &t[3], form, back, out);
                            Ok(vec![
                                turn(&t[0], false, dtype)?,
                                turn(&t[0], true, DType::F32)?,
                                turn(&t[1], false, dtype)?,
                            ])
                        });
                    }
                }
            }
        }
    }
}
