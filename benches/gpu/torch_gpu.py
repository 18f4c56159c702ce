"""The workloads of `gpu`, in PyTorch: under autocast, with fused optimizers; eager, unless the other side has a graph."""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from networks import SGD, Gpt, ResNet
from operators import operator_step
from peer import serve

# The CPU is for trying this file out.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
DTYPES = {"f32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
HELD = 4 << 30  # bytes of gradients that a run has at most, as on the other side
COPIES = 20  # as on the other side
# As CUDA graphs; the CPU's compiler takes a minute, to no purpose.
COMPILE = {"mode": "reduce-overhead"} if DEVICE.type == "cuda" else {"backend": "aot_eager"}
RUN = 0.05  # seconds of steps before somebody waits, as on the other side


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(work, count):
    """The seconds of one `work`, of `count` that follow one another."""
    wait()
    start = time.perf_counter()
    for i in range(count):
        work(i)
    wait()
    return (time.perf_counter() - start) / count


def copy(work, _):
    source = torch.ones(work["bytes"], dtype=torch.uint8, device=DEVICE)
    into = torch.zeros_like(source)
    return lambda: timed(lambda _: into.copy_(source), COPIES)


class Sets:
    """Variables, and as many sets of gradients as the other side has."""

    def __init__(self, work, gradients=True):
        lengths = work["parameters"]
        normal = lambda: [torch.randn(length, device=DEVICE) for length in lengths]
        self.variables = [variable.requires_grad_() for variable in normal()]
        self.count = max(2, min(16, HELD // (4 * sum(lengths))))
        self.source = normal()
        self.sets = [normal() for _ in range(self.count)] if gradients else []

    def give(self, i):
        """Puts the gradients of set `i` into the variables."""
        for variable, gradient in zip(self.variables, self.sets[i]):
            variable.grad = gradient

    def passes(self, work):
        """Runs of as many passes as there are sets, on new gradients."""

        def run():
            for gradients in self.sets:
                torch._foreach_copy_(gradients, self.source)
            return timed(work, self.count)

        run.step = lambda i: work(i % self.count)
        return run


def unscale(work, _):
    sets = Sets(work)
    found, inverse = torch.zeros(1, device=DEVICE), torch.full((1,), 1 / 1024, device=DEVICE)

    def step(i):
        torch._amp_foreach_non_finite_check_and_unscale_(sets.sets[i], found, inverse)

    return sets.passes(step)


def clip(work, _):
    sets = Sets(work)

    def step(i):
        sets.give(i)
        nn.utils.clip_grad_norm_(sets.variables, 1.0, foreach=True)

    return sets.passes(step)


def optimizer(work, make):
    sets = Sets(work)
    update = make(sets.variables)

    def step(i):
        sets.give(i)
        update.step()

    return sets.passes(step)


def sgd(work, _):
    return optimizer(work, lambda variables: torch.optim.SGD(variables, **SGD))


def adamw(work, _):
    return optimizer(work, lambda variables: torch.optim.AdamW(variables, fused=True))


def scaled_update(work, _):
    sets = Sets(work)
    update = torch.optim.AdamW(sets.variables, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, growth_interval=1 << 30)
    scaler.scale(torch.ones((), device=DEVICE))

    def step(i):
        sets.give(i)
        if work["clip"]:
            scaler.unscale_(update)
            nn.utils.clip_grad_norm_(sets.variables, 1.0, foreach=True)
        scaler.step(update)
        scaler.update()

    return sets.passes(step)


def ema(work, _):
    sets = Sets(work, gradients=False)
    variables = [variable.detach() for variable in sets.variables]
    averages = [variable.clone() for variable in variables]
    return sets.passes(lambda _: torch._foreach_lerp_(averages, variables, 1 - 0.999))


def refresh(work, _):
    sets = Sets(work, gradients=False)
    masters = [variable.detach() for variable in sets.variables]
    halves = [master.to(torch.bfloat16) for master in masters]
    return sets.passes(lambda _: torch._foreach_copy_(halves, masters))


def training(work, model, loss_of, optimizer, max_norm=None):
    dtype = DTYPES[work["precision"]]
    half = dtype is not torch.float32
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype is torch.float16)

    def step(_):
        with torch.autocast(DEVICE.type, dtype if half else torch.bfloat16, enabled=half):
            loss = loss_of()
        scaler.scale(loss).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return runs(work, step)


def set_tf32(work):
    """F32 is F32 on both sides: PyTorch lets convolutions round to TF32 by itself."""
    allow_tf32 = work["precision"] == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32


def runs(work, step):
    """Runs of as many steps as RUN has, from the second on."""
    count = 1

    def run():
        nonlocal count
        set_tf32(work)
        each = timed(step, count)
        count = max(1, min(100, int(RUN / each)))
        return each

    run.step = step
    return run


def as_it_is(function):
    return function


def gpt(work, _, prepared=as_it_is):
    size, batch = work["size"], work["batch"]
    model = Gpt(size).to(DEVICE)
    draw = lambda *shape: torch.randint(size["vocabulary"], shape, device=DEVICE)
    x, y = draw(batch, size["context"]), draw(batch * size["context"])
    loss = prepared(lambda x, y: F.cross_entropy(model(x), y))
    loss_of = lambda: loss(x, y)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return training(work, model, loss_of, adamw, max_norm=1.0)


def resnet(work, layout, prepared=as_it_is):
    model = ResNet(work["size"]).to(DEVICE, memory_format=layout)
    x = torch.randn(work["batch"], 3, 32, 32, device=DEVICE).to(memory_format=layout)
    y = torch.arange(work["batch"], device=DEVICE) % 10
    loss = prepared(lambda x, y: F.cross_entropy(model(x), y))
    loss_of = lambda: loss(x, y)
    return training(work, model, loss_of, torch.optim.SGD(model.parameters(), **SGD))


def compiled(make):
    """The steps of `make` with a compiled loss, forward and backward each as one CUDA graph. Compiling is not timed."""

    def made(work, layout):
        what, start = f"torch.compile of {work['kind']}, {work['precision']}", time.perf_counter()
        try:
            run = make(work, layout, lambda loss: torch.compile(loss, **COMPILE))
            set_tf32(work)  # with another setting it would be compiled again
            for i in range(3):  # compiles, records, replays
                run.step(i)
            wait()
        except Exception as error:  # no C compiler, no Triton
            print(f"{what} is not possible here, and not measured: {error!r}", file=sys.stderr, flush=True)
            return None
        print(f"{what} took {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        return run

    return made


def dropped():
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what is compiled keeps the memory of its graphs
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def operator(work, _):
    step = operator_step(work["operator"], work["pass"], DTYPES[work["precision"]], DEVICE)
    return runs(work, step)


WORK = {
    "copy": copy,
    "operator": operator,
    "unscale": unscale,
    "clip": clip,
    "update": scaled_update,
    "sgd": sgd,
    "adamw": adamw,
    "ema": ema,
    "refresh_weights": refresh,
    "refresh_vars": refresh,
    "gpt": gpt,
    "resnet": resnet,
    "graphed_gpt": compiled(gpt),
    "graphed_resnet": compiled(resnet),
}


def layouts_of(work):
    last = work["kind"] == "graphed_resnet" or work.get("channels_last", False)
    name = "channels-last" if last else "contiguous"
    return {name: LAYOUTS[name]}


def make(work, layout):
    return WORK[work["kind"]](work, layout)


def peak(make, steps):
    if DEVICE.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    run = make()
    for _ in range(steps):
        run()
    return torch.cuda.max_memory_allocated()


def host(make, steps):
    run = make()
    run()
    times = []
    for i in range(steps):
        wait()
        start = time.perf_counter()
        run.step(i)
        times.append(time.perf_counter() - start)
    wait()
    return statistics.median(times)


if __name__ == "__main__":
    torch.backends.cudnn.benchmark = "--cudnn-benchmark" in sys.argv
    serve(make, layouts_of, {"peak": peak, "host": host}, dropped)
