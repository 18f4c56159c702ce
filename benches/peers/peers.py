"""The workloads of `peers`, in PyTorch."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import operators
import zoo
from networks import SGD, GptBlock, ResNet
from peer import serve

LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
IMAGES = {"resnet", "conv", "batch_norm_relu"}


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


def resnet(work, layout):
    model = ResNet(work["size"]).to(memory_format=layout)
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


def gpt_block(work, _):
    model = GptBlock(work["width"], work["heads"], bias=False)
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


def scaled_update(work, _):
    def make(variables, _):
        optimizer = torch.optim.AdamW(variables, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1 << 30)
        scaler.scale(torch.ones(()))

        def step():
            if work["clip"]:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(variables, 1.0, foreach=True)
            scaler.step(optimizer)
            scaler.update()

        return step

    return update(work, make)


def sgd(work, _):
    return update(work, lambda variables, _: torch.optim.SGD(variables, **SGD).step)


def adamw(work, _):
    return update(work, lambda variables, _: torch.optim.AdamW(variables, fused=True).step)


def zoo_network(work, layout):
    training = zoo.Training(work["network"], layout, lambda: autocast(work))
    return checkable(training)


def zoo_operator(work, layout):
    return checkable(operators.Case(work, layout, dtype_of(work), lambda: autocast(work)))


def checkable(subject):
    """As `timed`, of a subject that can also be asked for what both sides must agree on."""
    run = timed(subject.step)
    run.check = subject.check
    return run


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
    "update": scaled_update,
    "sgd": sgd,
    "adamw": adamw,
    "zoo_network": zoo_network,
    "zoo_operator": zoo_operator,
}


def resident():
    """Peak memory in bytes. `getrusage` has that of the process that started this one in it."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def peak(make, steps):
    before = resident()
    run = make()
    for _ in range(steps):
        run()
    return resident() - before


def check(make, steps):
    return make().check(steps)


def layouts_of(work):
    network, operator = (work.get(part, {}).get("name") for part in ("network", "operator"))
    both = work["kind"] in IMAGES or network in zoo.IMAGES or operator in operators.IMAGES
    return LAYOUTS if both else {"contiguous": None}


def main():
    torch.set_num_threads(int(sys.argv[1]))
    numbers = {"peak": peak, "check": check}
    serve(lambda work, layout: WORK[work["kind"]](work, layout), layouts_of, numbers)


if __name__ == "__main__":
    main()
