//! Lists of parameters, by their lengths.

use serde::{Serialize, Serializer};

/// Whose parameters. PyTorch's side gets the lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Parameters {
    /// Of ResNet-50 for ImageNet: 161 tensors, most of them tiny, 25.6 million numbers.
    Resnet50,
    /// Of GPT-2 small, whose head is its table of tokens: 148 tensors, 124.4 million numbers.
    Gpt2,
    /// Some of one length.
    Even { tensors: usize, length: usize },
}

impl Parameters {
    pub(crate) fn lengths(self) -> Vec<usize> {
        match self {
            Self::Resnet50 => resnet50(),
            Self::Gpt2 => gpt2(),
            Self::Even { tensors, length } => vec![length; tensors],
        }
    }

    pub(crate) fn count(self) -> usize {
        self.lengths().iter().sum()
    }
}

impl Serialize for Parameters {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.lengths())
    }
}

fn resnet50() -> Vec<usize> {
    let mut lengths = Vec::new();
    let mut conv_norm = |from: usize, to: usize, kernel: usize| {
        lengths.extend([from * to * kernel * kernel, to, to]);
    };
    conv_norm(3, 64, 7);
    let mut from = 64;
    for (stage, blocks) in [3, 4, 6, 3].into_iter().enumerate() {
        let narrow = 64 << stage;
        for _ in 0..blocks {
            conv_norm(from, narrow, 1);
            conv_norm(narrow, narrow, 3);
            conv_norm(narrow, 4 * narrow, 1);
            if from != 4 * narrow {
                conv_norm(from, 4 * narrow, 1);
            }
            from = 4 * narrow;
        }
    }
    lengths.extend([from * 1000, 1000]);
    lengths
}

fn gpt2() -> Vec<usize> {
    let width = 768;
    let linear = |from: usize, to: usize| [from * to, to];
    let mut lengths = vec![50257 * width, 1024 * width];
    for _ in 0..12 {
        lengths.extend([width, width]);
        lengths.extend(linear(width, 3 * width));
        lengths.extend(linear(width, width));
        lengths.extend([width, width]);
        lengths.extend(linear(width, 4 * width));
        lengths.extend(linear(4 * width, width));
    }
    lengths.extend([width, width]);
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_those_of_the_networks() {
        let of = |parameters: Parameters| (parameters.lengths().len(), parameters.count());
        assert_eq!(of(Parameters::Resnet50), (161, 25_557_032));
        assert_eq!(of(Parameters::Gpt2), (148, 124_439_808));
    }
}
