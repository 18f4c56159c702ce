//! NHWC convolutions by packed GEMM.
//!
//! In NHWC, the pixels that one row of the kernel meets are contiguous: `kw × channels` elements. So there is no
//! im2col. A thread copies some input rows with their padding into scratch, and the micro-kernel reads overlapping
//! stretches of that copy as the rows of the left matrix. Positions are the rows of the product, output channels
//! its columns, and each row of the kernel is a segment of the sum. Sums are rounded into whole pixels.
//!
//! Between two image rows the left matrix has positions that no output pixel belongs to. They are computed and
//! dropped, which costs less than leaving them out.
//!
//! F32 and F16 run on AMX as BF16x3 where the channels fill its registers. If a sum is not finite, the whole
//! convolution is computed again in F32, because BF16x3 cannot tell infinity from NaN.

mod lines;
mod rows;
mod store;
mod wgrad;

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};

use super::layout::{Part, Taps};
use super::pass::ConvPass;
use super::rows::{Stored, with_stored};
use super::weights::{self, Order};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::InstructionSet::{self, AmxBf16x3};
use crate::kernels::gemm::micro::{KeptWords, PackedGemm, Rounded, padded_words, with_words};
use crate::kernels::tensors::format::Format;
use lines::Lines;
use rows::NhwcImage;
use store::NhwcStore;
pub(in crate::kernels::conv) use wgrad::wgrad;

/// Whether F32 and F16 are faster as BF16x3: a pixel is padded to whole registers of 32 channels, and in wgrad an output
/// channel is a row of the product.
pub(super) fn prefers_terms(pass: PassKind, shape: &Shape, isa: InstructionSet) -> bool {
    let pays = |channels: usize| 2 * channels.next_multiple_of(32) <= 3 * channels;
    let bf16x3 = match pass {
        PassKind::Forward | PassKind::Dgrad => pays(shape.group_in()) && pays(shape.group_out()),
        PassKind::Wgrad => shape.group_out() >= 16,
    };
    let nhwc = shape.geometry.format == Format::ChannelsLast;
    nhwc && isa.is_f32() && bf16x3 && AmxBf16x3.is_available()
}

/// See [`super::forward`]; `None` where a sum of BF16x3 is not finite.
pub(in crate::kernels::conv) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let pass = ConvPass::forward(shape, isa);
    let taps = Taps::forward(shape);
    let phases = vec![Phase::new(taps, (0, 0), weight, shape, Order::Forward, isa)?];
    let data = Phases::new(pass, phases).run::<O>(x, bias)?;
    Ok(data.map(|data| tensor(data, &shape.out_dims())))
}

/// See [`super::dgrad`]; `None` also where a sum of BF16x3 is not finite.
pub(in crate::kernels::conv) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    if weights::meets_padding(weight, shape)? {
        return Ok(None);
    }
    let pass = ConvPass::backward(shape, isa);
    let phases = Taps::backward(shape).into_iter();
    let phases = phases.map(|(at, taps)| Phase::new(taps, at, weight, shape, Order::Backward, isa));
    let data = Phases::new(pass, phases.collect::<Result<_>>()?).run::<O>(grad, bias)?;
    Ok(data.map(|data| tensor(data, &shape.input_dims())))
}

/// The output pixels that meet the same taps: in both directions every `out_step`th, from `at` on.
struct Phase {
    taps: Taps,
    at: (usize, usize),
    /// `(group, channel / 16, segment, word, channel % 16)`
    weight: KeptWords,
}

impl Phase {
    fn new(
        mut taps: Taps,
        at: (usize, usize),
        weight: &Tensor,
        shape: &Shape,
        order: Order,
        isa: InstructionSet,
    ) -> Result<Self> {
        // Neighbours in the image are neighbours in a sum.
        taps.columns.sort_unstable();
        let weight = weights::pack_blocks(weight, shape, &taps, order, isa)?;
        Ok(Self { taps, at, weight })
    }
}

/// A convolution by phases. Pixels of no phase are the bias, or zeros.
struct Phases {
    pass: ConvPass,
    phases: Vec<Phase>,
    /// Whether all BF16x3 sums are finite.
    finite: AtomicBool,
}

impl Phases {
    fn new(pass: ConvPass, phases: Vec<Phase>) -> Self {
        Self { pass, phases, finite: AtomicBool::new(true) }
    }

    /// Words of a pixel.
    fn words(&self) -> usize {
        padded_words(self.pass.ins.div_ceil(self.pass.isa.per_word()), self.pass.isa.terms())
    }

    /// `None` where a sum of terms is not finite.
    fn run<O: Rounded>(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Option<Vec<O>>> {
        let (pass, phases) = (&self.pass, &self.phases);
        let bias = bias.map(weights::widened).transpose()?;
        let bias = bias.as_deref();
        let image = pass.groups * pass.ins * pass.size.0 * pass.size.1;
        let row = pass.groups * pass.outs * pass.out_size.1;
        let out_image = row * pass.out_size.0;
        let step = phases.first().map_or(1, |phase| phase.taps.out_step);
        // Rows of a task: as many as keep a task's input in the cache, in whole steps.
        let wanted = (1 << 16) / (self.words() * pass.size.1 * step).max(1);
        let rows =
            wanted.min(1024_usize.div_ceil(pass.out_size.1)).clamp(1, pass.out_size.0.max(1));
        let rows = rows.next_multiple_of(step);
        let few = pass.batch < parallel::threads();
        let met: usize = phases.iter().map(|phase| phase.taps.grid.0 * phase.taps.grid.1).sum();
        let channels = pass.groups * pass.outs;
        with_stored!(x, O, x => {
            let x: &[_] = &x;
            assert!(x.len() == pass.batch * image, "every image has a result");
            Ok(try_uninit_vec(pass.batch * out_image, |out: &mut [MaybeUninit<O>]| {
                parallel::for_each_chunk_zipped(out, out_image, x, image, |_, out, x| {
                    let each = |task: usize, out: &mut [MaybeUninit<O>]| {
                        if met < pass.out_size.0 * pass.out_size.1 {
                            for (i, out) in out.iter_mut().enumerate() {
                                let bias = bias.map_or(0.0, |bias| bias[i % channels]);
                                out.write(O::narrowed(bias));
                            }
                        }
                        for phase in phases {
                            self.rows(x, phase, task * rows, bias, out);
                        }
                    };
                    match few {
                        true => parallel::for_each_chunk(out, rows * row, each),
                        false => {
                            let tasks = out.chunks_mut(rows * row).enumerate();
                            tasks.for_each(|(task, out)| each(task, out));
                        }
                    }
                });
                self.finite.load(Ordering::Relaxed)
            }))
        })
    }

    /// Writes the pixels of a phase in some rows of an image, from `first` on.
    fn rows<S: Stored + 'static, O: Rounded>(
        &self,
        x: &[S],
        phase: &Phase,
        first: usize,
        bias: Option<&[f32]>,
        out: &mut [MaybeUninit<O>],
    ) {
        let (pass, taps, width) = (&self.pass, &phase.taps, self.pass.out_size.1);
        let step = taps.out_step;
        let channels = pass.groups * pass.outs;
        let count = out.len() / (width * channels);
        // Of the grid of the phase.
        let start = first / step;
        let rows = start..start + count.saturating_sub(phase.at.0).div_ceil(step);
        if rows.is_empty() || taps.grid.1 == 0 {
            return;
        }
        let part = Part { images: 1, rows, columns: 0..taps.grid.1 };
        let lines = Lines::new(taps, &part, self.words());
        let segments = lines.segments(taps);
        let block = 16 * lines.depth * segments.len();
        let right_starts: Vec<_> = (0..segments.len()).map(|s| s * 16 * lines.depth).collect();
        let blocks = pass.outs.div_ceil(16);
        let weight = phase.weight.as_slice();
        let positions = (part.rows.len() - 1) * lines.positions + taps.grid.1;
        // Rows are read in whole blocks, beyond the last position too.
        with_words([lines.len() + 16 * lines.step], |[left]| {
            for group in 0..pass.groups {
                let source = NhwcImage {
                    x,
                    size: pass.size,
                    channels: group * pass.ins..(group + 1) * pass.ins,
                    all: pass.groups * pass.ins,
                };
                source.fill(&lines, pass.isa, left);
                let gemm = PackedGemm {
                    left,
                    left_block: pass.isa.rows() * lines.step,
                    left_row: lines.step,
                    left_step: 1,
                    left_starts: &segments,
                    right: &weight[group * blocks * block..],
                    right_block: block,
                    right_step: 16,
                    right_starts: &right_starts,
                    rows: positions,
                    columns: pass.outs,
                    depth: lines.depth,
                    terms: pass.isa.terms(),
                    row_panels: false,
                };
                let places = NhwcStore {
                    positions: lines.positions,
                    columns: taps.grid.1,
                    start: phase.at.0 * width + phase.at.1,
                    row: step * width,
                    column: step,
                    channels,
                };
                gemm.multiply(pass.isa, |tile| {
                    if pass.isa == InstructionSet::AmxBf16x3 && !tile.is_finite() {
                        self.finite.store(false, Ordering::Relaxed);
                    }
                    let from = group * pass.outs + tile.column;
                    let bias = bias.map(|bias| &bias[from..from + tile.columns]);
                    places.store(pass.isa, &tile, from, bias, out);
                });
            }
        });
    }
}
