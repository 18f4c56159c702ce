"""The operators of `operators.rs`, in PyTorch: the same shapes and values."""

import torch
import torch.nn.functional as F

from zoo import noise, tokens

# Those of images: PyTorch may hold them in either layout.
IMAGES = {"conv", "conv_transpose", "cat"}


def gates(count, width):
    return [(count * width, width)] * 2 + [(count * width,)] * 2


def shapes(operator, batch):
    """Those of inputs, and those of parameters."""
    match operator:
        case {"name": "conv", "from": width, "to": out, "size": size, "kernel": k, "groups": g}:
            return [(batch, width, size, size)], [(out, width // g, k, k)]
        case {"name": "conv_transpose", "from": width, "to": out, "size": size}:
            return [(batch, width, size, size)], [(width, out, 4, 4)]
        case {"name": "cat", "channels": channels, "size": size}:
            return [(batch, channels, size, size)] * 2, []
        case {"name": "attention", "heads": heads, "context": context, "width": width}:
            return [(batch, heads, context, width)] * 3, []
        case {"name": "lstm" | "gru" as name, "context": context, "width": width}:
            return [(batch, context, width)], gates(4 if name == "lstm" else 3, width)
        case {"name": "embedding", "vocabulary": vocabulary, "width": width}:
            return [], [(vocabulary, width)]
        case {"name": "layer_norm", "rows": rows, "width": width}:
            return [(batch, rows, width)], [(width,)] * 2
        case {"rows": rows, "width": width}:
            return [(batch, rows, width)], []


def forward_of(operator, batch):
    """A function of inputs and parameters."""
    match operator:
        case {"name": "conv", "kernel": k, "stride": stride, "groups": groups}:
            return lambda x, w: F.conv2d(x[0], w[0], None, stride, k // 2, groups=groups)
        case {"name": "conv_transpose"}:
            return lambda x, w: F.conv_transpose2d(x[0], w[0], None, 2, 1)
        case {"name": "cat"}:
            return lambda x, _: torch.cat(x, 1)
        case {"name": "dropout"}:
            return lambda x, _: F.dropout(x[0], 0.1)
        case {"name": "layer_norm", "width": width}:
            return lambda x, w: F.layer_norm(x[0], (width,), *w)
        case {"name": "gelu_erf"}:
            return lambda x, _: F.gelu(x[0])
        case {"name": "softmax", "dim": dim}:
            return lambda x, _: x[0].softmax(dim)
        case {"name": "attention"}:
            return lambda x, _: F.scaled_dot_product_attention(*x)
        case {"name": "lstm" | "gru" as name, "width": width}:
            run, zeros = getattr(torch, name), torch.zeros(1, batch, width)
            # Biases, layers, dropout, training, both directions, batch first: as `nn.LSTM` calls it.
            settings = (True, 1, 0.0, True, False, True)
            if name == "lstm":
                return lambda x, w: run(x[0], (zeros.to(x[0]),) * 2, w, *settings)[0]
            return lambda x, w: run(x[0], zeros.to(x[0]), w, *settings)[0]
        case {"name": "embedding", "vocabulary": vocabulary, "context": context}:
            ids = tokens(vocabulary, (batch, context), 0)
            return lambda _, w: F.embedding(ids, w[0])
        case {"name": "mean_middle"}:
            return lambda x, _: x[0].mean(1)
        case {"name": "relu_transposed"}:
            return lambda x, _: F.relu(x[0].transpose(1, 2))


class Case:
    """Forward and backward of an operator. `autocast` makes the scope of forward."""

    def __init__(self, work, layout, dtype, autocast):
        operator, batch = work["operator"], work["batch"]
        inputs, parameters = shapes(operator, batch)
        inputs = [noise(shape, i).to(dtype) for i, shape in enumerate(inputs)]
        parameters = [noise(shape, i) * 0.1 for i, shape in enumerate(parameters)]
        if layout is not None:
            inputs = [x.to(memory_format=layout) for x in inputs]
            parameters = [w.to(memory_format=layout) for w in parameters]
        is_image = operator["name"] == "conv" and operator["from"] == 3
        self.inputs = [x.requires_grad_(not is_image) for x in inputs]
        self.parameters = [w.requires_grad_() for w in parameters]
        self.forward, self.autocast = forward_of(operator, batch), autocast
        self.gradient = None
        y = self.run()
        # In the memory layout that the output has.
        self.gradient = torch.empty_like(y).copy_(noise(y.shape, 9))

    def run(self):
        with self.autocast():
            y = self.forward(self.inputs, self.parameters)
        if self.gradient is not None:
            y.backward(self.gradient)
        return y

    def leaves(self):
        return [x for x in (*self.inputs, *self.parameters) if x.requires_grad]

    def step(self):
        self.run()
        for leaf in self.leaves():
            leaf.grad = None

    def check(self, _):
        """The mean squares of what it returns and of all gradients, which the other side has too."""
        mean_square = lambda x: x.double().square().mean().item()
        numbers = {"output": mean_square(self.run())}
        for i, leaf in enumerate(self.leaves()):
            numbers[f"gradient {i + 1}"] = mean_square(leaf.grad)
        return numbers
