"""The workloads of `peers`, in PyTorch.

Reads a workload a line, as JSON with the shapes the other side uses, and answers each with a line:
the median time in milliseconds, or the fastest, by memory layout. `null` drops what was built so far.
"""

import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
IMAGES = {"resnet", "conv", "batch_norm_relu"}
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}


def dtype_of(work):
    return {"f32": torch.float32, "bf16": torch.bfloat16}[work["precision"]]


def autocast(work):
    return torch.autocast("cpu", torch.bfloat16, enabled=dtype_of(work) is torch.bfloat16)


def timed(step):
    """A function that runs `step` and returns the seconds it took."""

    def run():
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


def clear(tensors):
    for tensor in tensors:
        tensor.grad = None


def conv_norm(width, out, kernel, stride):
    conv = nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.first = conv_norm(width, out, 3, stride)
        self.second = conv_norm(out, out, 3, 1)
        self.shortcut = conv_norm(width, out, 1, stride) if width != out else nn.Identity()

    def forward(self, x):
        inner = self.second(F.relu(self.first(x), inplace=True))
        return F.relu(inner.add_(self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = conv_norm(3, width, 3, 1)
        blocks, before = [], width
        for stage in range(3):
            for i in range(depth):
                out = width << stage
                blocks.append(Block(before, out, 2 if stage > 0 and i == 0 else 1))
                before = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem(x), inplace=True))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet(work, layout):
    model = ResNet(work["width"], work["depth"]).to(memory_format=layout)
    x = torch.randn(work["batch"], 3, 32, 32).to(memory_format=layout)
    y = torch.arange(work["batch"]) % 10
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step():
        with autocast(work):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step)


def mlp(work, _):
    width = work["width"]
    layers = []
    for _ in range(work["layers"]):
        layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())
    x = torch.randn(work["batch"], width)

    def step():
        with autocast(work):
            loss = model(x).float().mean()
        loss.backward()
        clear(parameters)

    return timed(step)


class GptBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def gpt_block(work, _):
    model = GptBlock(work["width"], work["heads"])
    x = torch.randn(work["batch"], work["context"], work["width"], requires_grad=True)
    leaves = [x, *model.parameters()]

    def step():
        with autocast(work):
            y = model(x)
            loss = (y * y).mean()
        loss.backward()
        clear(leaves)

    return timed(step)


def gemm(work, _):
    m, k, n, transposed = work["m"], work["k"], work["n"], work["weight_gradient"]
    lhs = torch.randn(m, k).to(dtype_of(work))
    lhs = lhs.t() if transposed else lhs
    rhs = torch.randn(m if transposed else k, n).to(dtype_of(work))

    def step():
        with torch.no_grad():
            torch.matmul(lhs, rhs)

    return timed(step)


def layer(work, layout, x, forward, parameters):
    """Forward and backward of a layer that is in the middle of a network."""
    x = x.to(dtype_of(work)).to(memory_format=layout).requires_grad_(x.shape[1] != 3)
    with autocast(work):
        y = forward(x)
    gradient = torch.randn_like(y)
    leaves = [x, *parameters]

    def step():
        with autocast(work):
            y = forward(x)
        y.backward(gradient)
        clear(leaves)

    return timed(step)


def conv(work, layout):
    width, kernel = work["from"], work["kernel"]
    module = nn.Conv2d(width, work["to"], kernel, work["stride"], kernel // 2, bias=False)
    module = module.to(memory_format=layout)
    x = torch.randn(work["batch"], width, work["size"], work["size"])
    return layer(work, layout, x, module, list(module.parameters()))


def batch_norm_relu(work, layout):
    module = nn.Sequential(nn.BatchNorm2d(work["channels"]), nn.ReLU(inplace=True))
    x = torch.randn(work["batch"], work["channels"], work["size"], work["size"])
    return layer(work, layout, x, module, list(module.parameters()))


def read_and_write(work, _):
    source = torch.arange(work["tensors"] * work["length"], dtype=torch.float32)
    into = source.clone()

    def run():
        into.copy_(source)
        return timed(lambda: into.mul_(0.5))()

    return run


def update(work, make):
    """Times what `make` makes of the variables, on new gradients every time."""
    sources = [torch.randn(work["length"]) for _ in range(work["tensors"])]
    variables = [torch.randn(work["length"], requires_grad=True) for _ in sources]
    for variable in variables:
        variable.grad = torch.empty_like(variable)
    gradients = [variable.grad for variable in variables]
    step = timed(make(variables, gradients))

    def run():
        torch._foreach_copy_(gradients, sources)
        return step()

    return run


def unscale(work, _):
    found, inverse = torch.zeros(1), torch.full((1,), 1 / 1024)

    def make(_, gradients):
        def step():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
            found.item()

        return step

    return update(work, make)


def clip(work, _):
    def make(variables, _):
        return lambda: nn.utils.clip_grad_norm_(variables, 1.0, foreach=True)

    return update(work, make)


def sgd(work, _):
    return update(work, lambda variables, _: torch.optim.SGD(variables, **SGD).step)


def adamw(work, _):
    return update(work, lambda variables, _: torch.optim.AdamW(variables, fused=True).step)


WORK = {
    "resnet": resnet,
    "mlp": mlp,
    "gpt_block": gpt_block,
    "gemm": gemm,
    "conv": conv,
    "batch_norm_relu": batch_norm_relu,
    "pass": read_and_write,
    "unscale": unscale,
    "clip": clip,
    "sgd": sgd,
    "adamw": adamw,
}


def typical_of(run, seconds, fastest):
    """As the other side does it."""
    runs, warm = 0, time.perf_counter() + seconds / 5
    while runs < 2 or time.perf_counter() < warm:
        run()
        runs += 1
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(run())
    return min(times) if fastest else statistics.median(times)


def peak():
    """Peak memory in bytes. `getrusage` has that of the process that started this one in it."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def answer(request, built):
    seconds, steps = request.pop("seconds", None), request.pop("steps", None)
    fastest = request.pop("fastest", False)
    make = WORK[request["kind"]]
    if steps:
        count, layout = steps
        before = peak()
        run = make(request, LAYOUTS[layout])
        for _ in range(count):
            run()
        return {layout: peak() - before}
    key = json.dumps(request, sort_keys=True)
    if key not in built:
        layouts = LAYOUTS if request["kind"] in IMAGES else {"contiguous": None}
        built[key] = {name: make(request, layout) for name, layout in layouts.items()}
    return {name: typical_of(run, seconds, fastest) * 1e3 for name, run in built[key].items()}


def main():
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    print(json.dumps({"version": torch.__version__}), flush=True)
    built = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request is None:
            built.clear()
            continue
        try:
            reply = answer(request, built)
        except Exception as error:  # the other side says it, and ends
            reply = {"error": repr(error)}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
