//! Filters that make patches of images white: their outputs have no correlation, and the same variance.

use candle_core::{Device, Result, Tensor};

/// Width and height of a patch.
pub(super) const SIDE: usize = 2;
/// Numbers of a patch: three channels.
pub(super) const PATCH: usize = 3 * SIDE * SIDE;

/// Is added to each variance: directions that hardly vary are noise.
const EPS: f64 = 5e-4;

type Matrix = [[f64; PATCH]; PATCH];

/// For the patches of `images`, `(n, 3, h, w)`: a filter for each principal direction, then the negatives,
/// as the weight of a convolution. It is `F32`, on the CPU.
pub(super) fn filters(images: &Tensor) -> Result<Tensor> {
    let (variances, directions) = eigen(covariance(images)?);
    let mut filters: Vec<f32> = Vec::with_capacity(2 * PATCH * PATCH);
    for (variance, direction) in variances.iter().zip(directions) {
        filters.extend(direction.map(|x| (x / (variance + EPS).sqrt()) as f32));
    }
    let negatives: Vec<f32> = filters.iter().map(|x| -x).collect();
    filters.extend(negatives);
    Tensor::from_vec(filters, (2 * PATCH, 3, SIDE, SIDE), &Device::Cpu)
}

fn covariance(images: &Tensor) -> Result<Matrix> {
    let (_, channels, height, width) = images.dims4()?;
    let values = images.flatten_all()?.to_vec1::<f32>()?;
    let corners = || (0..=height - SIDE).flat_map(|y| (0..=width - SIDE).map(move |x| (y, x)));
    let (mut sums, mut products, mut count) = ([0f64; PATCH], Matrix::default(), 0f64);
    for image in values.chunks_exact(channels * height * width) {
        for (y, x) in corners() {
            let patch: [f64; PATCH] = std::array::from_fn(|i| {
                let (channel, dy, dx) = (i / (SIDE * SIDE), i / SIDE % SIDE, i % SIDE);
                image[(channel * height + y + dy) * width + x + dx].into()
            });
            for (i, row) in products.iter_mut().enumerate() {
                sums[i] += patch[i];
                row.iter_mut().zip(patch).for_each(|(sum, other)| *sum += patch[i] * other);
            }
            count += 1.;
        }
    }
    let mean = sums.map(|sum| sum / count);
    for (i, row) in products.iter_mut().enumerate() {
        row.iter_mut().zip(mean).for_each(|(sum, other)| *sum = *sum / count - mean[i] * other);
    }
    Ok(products)
}

/// Eigenvalues of a symmetric matrix, the largest first, and their eigenvectors, by Jacobi's rotations: each
/// makes two numbers off the diagonal zero, and all of them smaller.
fn eigen(mut matrix: Matrix) -> ([f64; PATCH], Matrix) {
    const SWEEPS: usize = 50;
    let mut vectors: Matrix = std::array::from_fn(|i| std::array::from_fn(|j| f64::from(i == j)));
    let pairs = || (0..PATCH).flat_map(|p| (p + 1..PATCH).map(move |q| (p, q)));
    for _ in 0..SWEEPS {
        for (p, q) in pairs() {
            if matrix[p][q] == 0. {
                continue;
            }
            let theta = (matrix[q][q] - matrix[p][p]) / (2. * matrix[p][q]);
            let tan = theta.signum() / (theta.abs() + theta.hypot(1.));
            let cos = 1. / tan.hypot(1.);
            let rotate = |a: &mut f64, b: &mut f64| {
                (*a, *b) = (cos * (*a - tan * *b), cos * (*b + tan * *a));
            };
            for row in &mut matrix {
                let (left, right) = row.split_at_mut(q);
                rotate(&mut left[p], &mut right[0]);
            }
            for all in [&mut matrix, &mut vectors] {
                let (above, below) = all.split_at_mut(q);
                above[p].iter_mut().zip(&mut below[0]).for_each(|(a, b)| rotate(a, b));
            }
        }
    }
    let mut order: [usize; PATCH] = std::array::from_fn(|i| i);
    order.sort_by(|&a, &b| matrix[b][b].total_cmp(&matrix[a][a]));
    (order.map(|i| matrix[i][i]), order.map(|i| vectors[i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_white() -> Result<()> {
        // Neighbours and channels are alike, as in photographs.
        let noise = Tensor::randn(0f64, 1., (40, 3, 12, 12), &Device::Cpu)?;
        let smooth = (noise.narrow(2, 0, 11)? + noise.narrow(2, 1, 11)?)?;
        let smooth = (smooth.narrow(3, 0, 11)? + smooth.narrow(3, 1, 11)?)?;
        let images =
            smooth.broadcast_add(&smooth.mean_keepdim(1)?)?.to_dtype(candle_core::DType::F32)?;
        let outputs = images.conv2d(&filters(&images)?, 0, 1, 1, 1)?;
        let outputs = outputs.transpose(0, 1)?.flatten_from(1)?;
        let outputs = outputs.broadcast_sub(&outputs.mean_keepdim(1)?)?;
        let count = outputs.dim(1)? as f64;
        let found = (outputs.matmul(&outputs.t()?)? / count)?.to_vec2::<f32>()?;
        for (i, row) in found.iter().enumerate() {
            for (j, &got) in row.iter().enumerate() {
                let expected = match () {
                    () if i == j => 1.,
                    () if i % PATCH == j % PATCH => -1.,
                    () => 0.,
                };
                // Variances are a little less than one, by EPS.
                assert!((got - expected).abs() < 0.02, "{i}, {j}: {got} for {expected}");
            }
        }
        Ok(())
    }

    #[test]
    fn eigenvectors_are_multiplied_by_their_eigenvalues() {
        let matrix: Matrix = std::array::from_fn(|i| {
            std::array::from_fn(|j| 1. / (1 + i + j) as f64 + f64::from(i == j) * i as f64)
        });
        let (values, vectors) = eigen(matrix);
        assert!(values.is_sorted_by(|a, b| a >= b), "{values:?}");
        for (value, vector) in values.iter().zip(vectors) {
            for (row, x) in matrix.iter().zip(vector) {
                let product: f64 = row.iter().zip(vector).map(|(a, b)| a * b).sum();
                assert!((product - value * x).abs() < 1e-12, "{product} for {}", value * x);
            }
            assert!((vector.iter().map(|x| x * x).sum::<f64>() - 1.).abs() < 1e-12);
        }
    }
}
