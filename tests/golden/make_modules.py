#!/usr/bin/env python3
"""Writes PyTorch's answers for `tests/it/modules`: what modules of torch.nn give, and their gradients.

    pip install torch==2.15.0
    python tests/golden/make_modules.py

rewrites `modules.safetensors` beside this script. All is computed in F64 on a CPU, from numbers of F32.
Every case has a module in training mode without dropout; its loss is the sum of the output times `weigh`.

| tensor              | what                                                                  |
|---------------------|-----------------------------------------------------------------------|
| `C.parameter.NAME`  | the state dict of case C, random                                      |
| `C.input.NAME`      | an input                                                              |
| `C.mask.NAME`       | added to scores; `attends` is 1 where a key attends, 0 for padding    |
| `C.weigh`           | the gradient of the output                                            |
| `C.output`          | the output                                                            |
| `C.gradient.NAME`   | the gradient of a parameter or input                                  |
"""

import pathlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.dont_write_bytecode = True
from make_golden import save  # noqa: E402

SEED = 23
TENSORS = {}


class Function(nn.Module):
    """A function without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def case(name, module, inputs, call, masks=None):
    """Runs `call(module, inputs…)`."""
    module = module.double().train()
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape).double()
    inputs = {k: v.double().requires_grad_() for k, v in inputs.items()}
    output = call(module, *inputs.values())
    weigh = torch.randn(output.shape).double()
    (output * weigh).sum().backward()
    tensors = {"output": output, "weigh": weigh.float()}
    for key, value in (masks or {}).items():
        tensors[f"mask.{key}"] = value.float()
    for key, value in inputs.items():
        tensors |= {f"input.{key}": value.float(), f"gradient.{key}": value.grad}
    for key, value in module.named_parameters():
        tensors |= {f"parameter.{key}": value.float(), f"gradient.{key}": value.grad}
    TENSORS.update({f"{name}.{key}": value for key, value in tensors.items()})


def attention():
    x, memory = torch.randn(2, 5, 6), torch.randn(2, 6, 6)
    new = lambda **settings: nn.MultiheadAttention(6, 3, batch_first=True, **settings)
    case("attention.self", new(), {"x": x}, lambda m, x: m(x, x, x)[0])
    case("attention.no_bias", new(bias=False), {"x": x}, lambda m, x: m(x, x, x)[0])
    future = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    case("attention.causal", new(), {"x": x}, lambda m, x: m(x, x, x, attn_mask=future)[0])
    added = torch.randn(5, 5).double()
    case("attention.masked", new(), {"x": x}, lambda m, x: m(x, x, x, attn_mask=added)[0],
         {"added": added})
    attends = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    case("attention.cross", new(), {"x": x, "memory": memory},
         lambda m, x, y: m(x, y, y, key_padding_mask=attends == 0)[0], {"attends": attends})


def transformer():
    x, memory = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    future = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    attends = torch.tensor([[1, 1, 0], [1, 1, 1]])
    for name, settings in {
        "post": dict(),
        "pre": dict(norm_first=True, activation="gelu", layer_norm_eps=1e-3),
        "no_bias": dict(norm_first=True, bias=False),
    }.items():
        settings |= dict(dim_feedforward=16, dropout=0.0, batch_first=True)
        encoder = nn.TransformerEncoderLayer(8, 2, **settings)
        decoder = nn.TransformerDecoderLayer(8, 2, **settings)
        case(f"encoder.{name}", encoder, {"x": x}, lambda m, x: m(x, src_mask=future))
        case(f"decoder.{name}", decoder, {"x": x, "memory": memory},
             lambda m, x, y: m(x, y, tgt_mask=future, memory_key_padding_mask=attends == 0),
             {"attends": attends})
        if name == "pre":
            norm = lambda: nn.LayerNorm(8, eps=1e-3)
            stack = nn.TransformerEncoder(encoder, 2, norm(), enable_nested_tensor=False)
            case("encoder.stack", stack, {"x": x}, lambda m, x: m(x))
            case("decoder.stack", nn.TransformerDecoder(decoder, 2, norm()),
                 {"x": x, "memory": memory}, lambda m, x, y: m(x, y, tgt_mask=future))


def vision():
    image = torch.randn(2, 3, 7, 5)
    for height, width in [(3, 4), (7, 5), (1, 1), (9, 2)]:
        for kind in ["avg", "max"]:
            pool = getattr(F, f"adaptive_{kind}_pool2d")
            case(f"adaptive.{kind}.{height}x{width}", Function(pool), {"x": image},
                 lambda m, x: m(x, (height, width)))
    case("instance_norm.plain", nn.InstanceNorm2d(3), {"x": image}, lambda m, x: m(x))
    case("instance_norm.affine", nn.InstanceNorm2d(3, eps=1e-3, affine=True), {"x": image},
         lambda m, x: m(x))
    case("instance_norm.1d", nn.InstanceNorm1d(3, affine=True), {"x": torch.randn(2, 3, 7)},
         lambda m, x: m(x))
    transposed = nn.ConvTranspose2d(6, 9, 3, stride=2, padding=1, output_padding=1, groups=3)
    case("conv_transpose2d", transposed, {"x": torch.randn(2, 6, 4, 5)}, lambda m, x: m(x))


def weight_norm():
    image = torch.randn(2, 4, 5, 6)
    old = nn.utils.weight_norm
    case("weight_norm.linear", old(nn.Linear(5, 7)), {"x": torch.randn(3, 5)},
         lambda m, x: m(x))
    case("weight_norm.conv2d", old(nn.Conv2d(4, 6, 3, padding=1, groups=2)), {"x": image},
         lambda m, x: m(x))
    case("weight_norm.conv1d", old(nn.Conv1d(4, 6, 3, bias=False)), {"x": torch.randn(2, 4, 8)},
         lambda m, x: m(x))
    case("weight_norm.transposed", old(nn.ConvTranspose1d(4, 6, 3, stride=2)),
         {"x": torch.randn(2, 4, 8)}, lambda m, x: m(x))


def main():
    torch.manual_seed(SEED)
    for write in [attention, transformer, vision, weight_norm]:
        write()
    metadata = {"torch": torch.__version__.split("+")[0], "seed": str(SEED)}
    save(pathlib.Path(__file__).with_name("modules.safetensors"), TENSORS, metadata)


if __name__ == "__main__":
    main()
