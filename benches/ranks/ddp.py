#!/usr/bin/env python3
"""The steps of `ranks`, in PyTorch: alone, or as a rank that torch.distributed.run has started, with gloo.

    python3 -m torch.distributed.run --standalone --nproc-per-node 2 benches/ranks/ddp.py --network resnet20

Prints the median time of a step, in the faster memory layout.
"""
import argparse
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "common"))
from networks import SGD, ResNet  # noqa: E402

BATCH = 128
RESNET20 = {"width": 16, "stages": [3, 3, 3], "bottleneck": False}
WIDTHS = [1024, 2048, 2048, 2048, 10]


def perceptron():
    layers = []
    for at, (before, after) in enumerate(zip(WIDTHS, WIDTHS[1:])):
        layers += [nn.Linear(before, after)] + [nn.ReLU(inplace=True)] * (at < len(WIDTHS) - 2)
    return nn.Sequential(*layers)


def median_step(network, ranks, steps, layout):
    torch.manual_seed(0)
    shape = (BATCH // ranks, 3, 32, 32) if network == "resnet20" else (BATCH // ranks, WIDTHS[0])
    x, y = torch.randn(shape), torch.arange(BATCH // ranks) % 10
    model = ResNet(RESNET20) if network == "resnet20" else perceptron()
    if x.dim() == 4:
        model, x = model.to(memory_format=layout), x.to(memory_format=layout)
    sgd = torch.optim.SGD(model.parameters(), **SGD)
    if ranks > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    times = []
    for _ in range(steps + -(-steps // 5)):
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        sgd.step()
        sgd.zero_grad()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[-steps:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=["resnet20", "mlp"], required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--measure", action="store_true", help="as `ranks` has it: no other mode")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        distributed.init_process_group("gloo")
    layouts = [torch.contiguous_format] + [torch.channels_last] * (options.network == "resnet20")
    best = min(median_step(options.network, ranks, options.steps, layout) for layout in layouts)
    if rank == 0:
        print("milliseconds", best, flush=True)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
