//! Pooling on CUDA: one launch for each pass, of `pool.cu` for NCHW or of `pool_nhwc.cu` for NHWC.
//!
//! Each layout has kernels of its own, so that no tensor is transposed. Max pooling saves the index of each maximum, so
//! that backward does not read the input. Kernels write gradients in the dtype they come in or in the arithmetic's;
//! another dtype takes a second launch, a cast.

use candle_core::{DType, Result, Tensor};

use super::window::{Dims4, Window};
use crate::kernels::accumulator;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, pack, suffix};
use crate::kernels::in_dtype;
use crate::kernels::reduce::cuda::Tiling;
use crate::kernels::tensors::format::Format;

static SOURCE: Source =
    Source { name: "pool", code: concat!(include_str!("windows.cuh"), include_str!("pool.cu")) };
static LAST: Source = Source {
    name: "pool_nhwc",
    code: concat!(include_str!("windows.cuh"), include_str!("pool_nhwc.cu")),
};

/// The sizes of some images, `[n, c, h, w]`, and the order a tensor has them in.
#[derive(Clone, Copy)]
struct ImageShape {
    sizes: [usize; 4],
    format: Format,
}

impl ImageShape {
    fn of((a, b, c, d): Dims4, format: Format) -> Self {
        Self { sizes: format.split([a, b, c, d]), format }
    }

    fn dims(self) -> [usize; 4] {
        self.format.join(self.sizes)
    }

    /// An element for each of the windows.
    fn pooled(self, window: Window) -> Self {
        let [n, c, h, w] = self.sizes;
        let (oh, ow) = window.out_size((h, w));
        Self { sizes: [n, c, oh, ow], ..self }
    }

    fn planes(self) -> usize {
        self.sizes[0] * self.sizes[1]
    }

    fn area(self) -> usize {
        self.sizes[2] * self.sizes[3]
    }

    fn launch(self, gpu: &Gpu, name: &'static str, types: [&'static str; 2]) -> Result<Launch> {
        match self.format {
            Format::ChannelsFirst => gpu.launch(&SOURCE, [name, types[0], types[1]]),
            Format::ChannelsLast => gpu.launch(&LAST, [name, "last", types[0], types[1]]),
        }
    }

    /// A thread for each of `count` elements, which are those of the output, or of the input, or for a
    /// few channels of a pixel. It reads the elements of its channels on the other side: windows and
    /// padding are cut to what is there.
    fn run(self, kernel: Launch, window: Window, (count, read): (usize, DType)) -> Result<()> {
        let [n, c, h, w] = self.sizes;
        let (oh, ow) = window.out_size((h, w));
        let Window { kernel: (kh, kw), stride: (sh, sw), padding: (ph, pw), .. } = window;
        let kernel = kernel.sizes(&[n * c, h, w, oh, ow, kh, kw, sh, sw, ph, pw]);
        match self.format {
            Format::ChannelsFirst => kernel.run(Grid::over(count, 1)),
            Format::ChannelsLast => kernel.size(c).run(Grid::over(count, self.each(read))),
        }
    }

    /// Channels a thread has.
    fn each(self, read: DType) -> usize {
        let each = pack(read, read);
        if self.sizes[1].is_multiple_of(each) { each } else { 1 }
    }
}

pub(super) fn max_forward(gpu: &Gpu, x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    let images = ImageShape::of(x.dims4()?, window.format);
    let dims = images.pooled(window).dims();
    let (y, index) = (gpu.empty(&dims, x.dtype())?, gpu.empty(&dims, DType::U32)?);
    let kernel = images.launch(gpu, "max_forward", [suffix(x.dtype())?, ""])?;
    let kernel = kernel.read(x)?.write_new(&y)?.write_new(&index)?;
    images.run(kernel, window, (y.elem_count(), x.dtype()))?;
    Ok((y, index))
}

/// `grad` and `index` are contiguous, and as large as [`max_forward`]'s results for `dims`.
pub(super) fn max_backward(
    gpu: &Gpu,
    grad: &Tensor,
    index: &Tensor,
    dims: Dims4,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let (images, dx) = (ImageShape::of(dims, window.format), gradient(gpu, grad, dims, out)?);
    let kernel = images.launch(gpu, "max_backward", types(grad, &dx)?)?;
    let kernel = kernel.read(grad)?.read(index)?.write_new(&dx)?;
    images.run(kernel, window, (dx.elem_count(), grad.dtype()))?;
    in_dtype(&dx, out)
}

pub(super) fn avg_forward(gpu: &Gpu, x: &Tensor, window: Window) -> Result<Tensor> {
    let images = ImageShape::of(x.dims4()?, window.format);
    let y = gpu.empty(&images.pooled(window).dims(), x.dtype())?;
    let kernel = images.launch(gpu, "avg_forward", [suffix(x.dtype())?, ""])?;
    images.run(kernel.read(x)?.write_new(&y)?, window, (y.elem_count(), x.dtype()))?;
    Ok(y)
}

/// `grad` is contiguous, and as large as [`avg_forward`]'s result for `dims`.
pub(super) fn avg_backward(
    gpu: &Gpu,
    grad: &Tensor,
    dims: Dims4,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let (images, dx) = (ImageShape::of(dims, window.format), gradient(gpu, grad, dims, out)?);
    let kernel = images.launch(gpu, "avg_backward", types(grad, &dx)?)?;
    let kernel = kernel.read(grad)?.write_new(&dx)?;
    images.run(kernel, window, (dx.elem_count(), grad.dtype()))?;
    in_dtype(&dx, out)
}

pub(super) fn global_avg_forward(gpu: &Gpu, x: &Tensor, format: Format) -> Result<Tensor> {
    let images = ImageShape::of(x.dims4()?, format);
    let [n, c, ..] = images.sizes;
    let y = gpu.empty((n, c), x.dtype())?;
    let kernel = images.launch(gpu, "global_avg_forward", [suffix(x.dtype())?, ""])?;
    let kernel = kernel.read(x)?.write_new(&y)?.size(images.area());
    match format {
        Format::ChannelsFirst => kernel.run(planes(images))?,
        Format::ChannelsLast => {
            // A block reads a tile of an image's channels, and writes their averages.
            let tiling = Tiling::over(&[x], images.area(), c)?;
            let kernel = kernel.sizes(&[c, tiling.tiles]).int(tiling.packed.into());
            kernel.run(Grid::flat(n * tiling.tiles, 256))?;
        }
    }
    Ok(y)
}

/// `grad` is contiguous and has an element for every plane of `dims`.
pub(super) fn global_avg_backward(
    gpu: &Gpu,
    grad: &Tensor,
    dims: Dims4,
    format: Format,
    out: DType,
) -> Result<Tensor> {
    let (images, dx) = (ImageShape::of(dims, format), gradient(gpu, grad, dims, out)?);
    let kernel = images.launch(gpu, "global_avg_backward", types(grad, &dx)?)?;
    let kernel = kernel.read(grad)?.write_new(&dx)?;
    match format {
        Format::ChannelsFirst => kernel.size(images.area()).run(planes(images))?,
        Format::ChannelsLast => {
            // A thread writes elements of a pixel, of the image that it reads the channels of.
            let (count, each) = (dx.elem_count(), images.each(grad.dtype()));
            let kernel = kernel.sizes(&[count, images.area(), images.sizes[1]]);
            kernel.run(Grid::over(count, each))?;
        }
    }
    in_dtype(&dx, out)
}

/// In `out`, or where no kernel writes that, in the dtype of the arithmetic, to be rounded after.
fn gradient(gpu: &Gpu, grad: &Tensor, dims: Dims4, out: DType) -> Result<Tensor> {
    let dtype = if out == grad.dtype() { out } else { accumulator(grad.dtype()) };
    gpu.empty(dims, dtype)
}

fn types(grad: &Tensor, dx: &Tensor) -> Result<[&'static str; 2]> {
    Ok([suffix(grad.dtype())?, suffix(dx.dtype())?])
}

/// A block for every plane, of as many threads as keep busy.
fn planes(images: ImageShape) -> Grid {
    let threads = (images.area() / 8).next_power_of_two().clamp(32, 512);
    Grid::flat(images.planes(), threads)
}
