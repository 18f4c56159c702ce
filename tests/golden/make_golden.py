#!/usr/bin/env python3
"""Writes PyTorch's answers for `tests/it/golden`: what training a few tiny networks gives.

    pip install torch==2.15.0
    python tests/golden/make_golden.py

rewrites the `.safetensors` files beside this script. Nothing else is needed, and a CPU will do.
Models and data are drawn from fixed seeds and are in the files, so that the tests need no PyTorch.

Every file holds one model and one optimizer, followed for 50 steps in F64, which stands for exact
arithmetic; in F32; and under autocast. `torch.autocast("cpu")` has lists of its own, but not for
these models: what only the lists of CUDA (`Policy::pytorch()`) name, layer norm, gets F32 here as
it is, and the rest is on both lists or on neither.

| tensor                | shape      | what                                                        |
|-----------------------|------------|-------------------------------------------------------------|
| `x`, `y`              | (5, b, …)  | five batches, used in turn                                  |
| `initial.NAME`        |            | what every run starts from, F32                             |
| `P.losses`, `P.norms` | (50)       | of every step: the loss, and the gradients' norm            |
| `P.scales`            | (50)       | the loss scale after every step, F16 only                   |
| `P.loss`, `P.logits`  |            | of the first step, see `unrounded_attention`                |
| `P.first.NAME`        |            | gradients of the first step, likewise                       |
| `f64.final.NAME`      |            | after the last step                                         |
| `P.error.losses`      | (50)       | how far losses came to be from those in F64, see `errors`   |
| `P.error.norms`       | (50)       | likewise, of gradient norms                                 |
| `P.error.logits`      | (1)        | likewise, an L2 norm                                        |
| `P.error.first.NAME`  | (1)        | likewise                                                    |
| `P.error.final.NAME`  | (1)        | likewise                                                    |

with P one of `f64`, `f32`, `bf16`, `f16`. `f64` has no errors.
"""

import copy
import json
import math
import pathlib
import struct

import torch
import torch.nn.functional as F
from torch import nn

STEPS, BATCHES, SEED = 50, 5, 20
HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}

# Models that start this much apart, relatively, round differently everywhere in BF16, and have
# much the same errors.
NUDGE, NUDGED = 2.0**-7, 8


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(13, 37), nn.Linear(37, 21), nn.Linear(21, 7)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Cnn(nn.Module):
    """Convolutions have no bias: batch norm subtracts it, so that its gradient is noise."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 10, 3, stride=2, padding=1, bias=False)
        self.norm2, self.head = nn.BatchNorm2d(10), nn.Linear(40, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 3, 2, 1)
        x = F.avg_pool2d(F.relu(self.norm2(self.conv2(x))), 2, 1)
        return self.head(x.flatten(1))


class Gpt(nn.Module):
    """Keys have no bias: softmax does not see it, so that its gradient is noise."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, 15), nn.Parameter(0.1 * torch.randn(13, 15))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(15), nn.Linear(15, 17)

    def forward(self, x):
        x = self.tokens(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def unrounded_attention(q, k, v, is_causal):
    """`F.scaled_dot_product_attention`, where probabilities stay in F32.

    PyTorch's kernel for CPUs rounds them to half, those for GPUs each have a way of their own.
    """
    assert is_causal
    half = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        q, k, v = [x.to(half).float() for x in (q, k, v)]
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(later, -math.inf).softmax(-1) @ v).to(half)


class Block(nn.Module):
    HEADS = 3
    attention = F.scaled_dot_product_attention

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(15), nn.LayerNorm(15)
        self.qkv, self.out = nn.Linear(15, 45, bias=False), nn.Linear(15, 15)
        self.up, self.down = nn.Linear(15, 37), nn.Linear(37, 15)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = Block.attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def classified(shape, classes, batch):
    """Random inputs, and classes that hang on them smoothly."""
    x = torch.randn(BATCHES, batch, *shape)
    flat = x.flatten(2)
    teacher = torch.randn(flat.shape[2], classes)
    return x, (torch.tanh(flat) @ teacher + 0.5 * torch.randn(BATCHES, batch, classes)).argmax(-1)


def foretold():
    """Sequences whose next token hangs on the last two, mostly, and that token at every place."""
    sequence = [torch.randint(17, (BATCHES, 4)) for _ in range(2)]
    for _ in range(12):
        noise = torch.randint(17, (BATCHES, 4)) * (torch.rand(BATCHES, 4) < 0.2)
        sequence.append((3 * sequence[-1] + sequence[-2] + noise) % 17)
    sequence = torch.stack(sequence, -1)
    return sequence[..., :-1], sequence[..., 1:]


def sgd(parameters, settings):
    return torch.optim.SGD(parameters, **settings, foreach=False)


def adamw(parameters, settings):
    return torch.optim.AdamW(parameters, **settings, foreach=False)


# Rates at which a rounding in F32 grows little in 50 steps: what is compared is not chaos.
SGD = dict(lr=0.05, momentum=0.9, weight_decay=5e-4)
SLOW_SGD = SGD | dict(lr=0.01)
ADAMW = dict(lr=5e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)

# File: model, data, optimizer, its settings, limit of the gradients' norm, the halves to run in.
RUNS = {
    "mlp_sgd": (Mlp, lambda: classified((13,), 7, 24), sgd, SGD, None, ["bf16", "f16"]),
    "mlp_adamw": (Mlp, lambda: classified((13,), 7, 24), adamw, ADAMW, None, ["bf16"]),
    "cnn_sgd": (Cnn, lambda: classified((3, 11, 9), 5, 12), sgd, SLOW_SGD, None, ["bf16", "f16"]),
    "cnn_adamw": (Cnn, lambda: classified((3, 11, 9), 5, 12), adamw, ADAMW, None, ["bf16"]),
    "gpt_sgd": (Gpt, foretold, sgd, SGD, 1.0, ["bf16"]),
    "gpt_adamw": (Gpt, foretold, adamw, ADAMW, 1.0, ["bf16", "f16"]),
}

# The scale grows every 15 clean steps. In one file, the inputs of a step are beyond F16, so that it
# is skipped; runs in other dtypes leave that step out.
SCALER = dict(init_scale=1024.0, growth_interval=15)
POISONED, POISONED_STEP, POISON = "mlp_sgd", 30, 1e6

# What is seen of the first step alone.
FIRST = ("loss", "logits", "first")


def follow(model, data, optimizer, settings, limit, precision, poisoned, steps=STEPS):
    """Trains `model` and returns what was seen on the way."""
    model, (x, y) = copy.deepcopy(model), data
    if precision == "f64":
        model, x = model.double(), x.double() if x.is_floating_point() else x
    half = HALVES.get(precision)
    optimizer = optimizer(model.parameters(), settings)
    scaler = torch.amp.GradScaler("cpu", **SCALER, enabled=precision == "f16")
    seen = {"losses": [], "norms": [], "scales": []}
    for step in range(steps):
        poison = poisoned and step == POISONED_STEP
        inputs = x[step % BATCHES] * (POISON if poison else 1)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=half, enabled=half is not None):
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, -2), y[step % BATCHES].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        norm = nn.utils.get_total_norm(gradients.values())
        if step == 0:
            seen |= {"loss": loss.detach().reshape(1), "logits": logits.detach()}
            seen |= {f"first.{name}": g.clone() for name, g in gradients.items()}
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        if poison and precision != "f16":
            loss, norm = loss * math.nan, norm * math.nan
        else:
            scaler.step(optimizer)
        scaler.update()
        seen["losses"].append(loss.item())
        seen["norms"].append(norm.item())
        seen["scales"].append(scaler.get_scale())
    for name in "losses", "norms", "scales":
        seen[name] = torch.tensor(seen[name], dtype=torch.float64)
    state = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
    return seen | {f"final.{name}": v.clone() for name, v in state.items()}


def errors(runs):
    """The largest distances between a run and its F64 one, over `runs`, pairs of them.

    For losses and norms: up to a step, and in the first pass over the batches together, so that a
    lucky step is no rule. For tensors: L2 norms.
    """
    found = {}
    for run, exact in runs:
        for name, value in run.items():
            if name == "scales":
                continue
            error = (value.double() - exact[name]).abs().nan_to_num(0.0)
            if name in ("losses", "norms"):
                error = error.cummax(0).values
                error[:BATCHES] = error[BATCHES - 1]
            else:
                error = error.norm().reshape(1)
            found[name] = torch.maximum(found[name], error) if name in found else error
    return found


def nudged(model):
    model = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p *= 1 + NUDGE * (2 * torch.rand_like(p) - 1)
    return model


def save(path, tensors, metadata):
    """The safetensors format: a header in JSON, then the bytes."""
    dtypes = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16",
              torch.float16: "F16", torch.int64: "I64"}
    header, data = {"__metadata__": metadata}, bytearray()
    for name, tensor in sorted(tensors.items()):
        start = len(data)
        data += bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def main():
    torch.set_num_threads(1)
    for name, (model, data, optimizer, settings, limit, halves) in RUNS.items():
        torch.manual_seed(SEED)
        model, data = model(), data()
        tensors = {"x": data[0], "y": data[1]}
        initial = model.state_dict().items()
        tensors |= {f"initial.{k}": v for k, v in initial if v.is_floating_point()}

        def run(model, precision, **options):
            poisoned = name == POISONED
            return follow(model, data, optimizer, settings, limit, precision, poisoned, **options)

        models = [model] + [nudged(model) for _ in range(NUDGED)]
        exact = [run(model, "f64") for model in models]
        tensors |= {f"f64.{k}": v for k, v in exact[0].items() if k != "scales"}
        for precision in ["f32", *halves]:
            runs = [run(model, precision) for model in models]
            kept = {k: v for k, v in runs[0].items() if k in ("losses", "norms")}
            if precision == "f16":
                kept["scales"] = runs[0]["scales"]
            if precision in HALVES:
                Block.attention = unrounded_attention
                first = run(model, precision, steps=1)
                kept |= {k: v for k, v in first.items() if k.split(".")[0] in FIRST}
                Block.attention = F.scaled_dot_product_attention
            tensors |= {f"{precision}.{k}": v for k, v in kept.items()}
            found = errors(zip(runs, exact))
            tensors |= {f"{precision}.error.{k}": v for k, v in found.items()}
            print(f"{name:14}{precision:>5}: loss {runs[0]['losses'][0]:.4f} to "
                  f"{runs[0]['losses'][-1]:.4f}, error {found['losses'][0]:.1e} to "
                  f"{found['losses'][-1]:.1e}")
        metadata = {"torch": torch.__version__.split("+")[0], "seed": str(SEED),
                    "optimizer": json.dumps(settings), "limit": str(limit)}
        save(pathlib.Path(__file__).with_name(f"{name}.safetensors"), tensors, metadata)


if __name__ == "__main__":
    main()
