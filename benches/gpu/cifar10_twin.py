#!/usr/bin/env python3
"""The cifar10 example's default run, in PyTorch: ResNet-20 on 5,000 images, 8 epochs, batches of 128, crop and flip, SGD
with a cosine schedule; in F32, BF16 and F16. Prints the time of an epoch, from the second on, and of the whole run.

    benches/gpu/cifar10_twin.py [--json FILE] [--compile] [--smoke]

Images are random numbers, so that losses say nothing beside the example's: what is compared is time.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "common"))
from networks import ResNet  # noqa: E402

RESNET20 = {"width": 16, "stages": [3, 3, 3], "bottleneck": False}
PRECISIONS = {"f32": None, "bf16": torch.bfloat16, "f16": torch.float16}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def augmented(x):
    """Each image shifted by up to 4 pixels, and half of them mirrored."""
    count, _, height, width = x.shape
    padded = F.pad(x, (4, 4, 4, 4))
    down, right = (torch.randint(0, 9, (count, 1, 1, 1), device=DEVICE) for _ in range(2))
    rows = torch.arange(height, device=DEVICE).view(1, 1, -1, 1) + down
    columns = torch.arange(width, device=DEVICE).view(1, 1, 1, -1) + right
    mirrored = torch.rand((count, 1, 1, 1), device=DEVICE) < 0.5
    columns = torch.where(mirrored, width - 1 + 2 * right - columns, columns)
    each = torch.arange(count, device=DEVICE).view(-1, 1, 1, 1)
    channels = torch.arange(3, device=DEVICE).view(1, -1, 1, 1)
    return padded[each, channels, rows, columns].contiguous(memory_format=torch.channels_last)


def train(precision, options):
    """Seconds of each epoch, and the last loss."""
    torch.manual_seed(0)
    dtype, batch = PRECISIONS[precision], options.batch
    images = torch.randn(options.images, 3, 32, 32, device=DEVICE)
    labels = torch.randint(0, 10, (options.images,), device=DEVICE)
    model = ResNet(RESNET20).to(DEVICE, memory_format=torch.channels_last)
    # As CUDA graphs; the CPU's compiler takes a minute, to no purpose.
    how = {"mode": "reduce-overhead"} if DEVICE.type == "cuda" else {"backend": "aot_eager"}
    forward = torch.compile(model, **how) if options.compile else model
    fused = {"fused": True} if DEVICE.type == "cuda" else {}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, **fused)
    steps = options.images // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, options.epochs * steps)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == torch.float16)
    seconds, loss = [], None
    for _ in range(options.epochs):
        wait()
        start = time.perf_counter()
        order = torch.randperm(options.images, device=DEVICE)
        for step in range(steps):
            chosen = order[step * batch : (step + 1) * batch]
            x, y = augmented(images[chosen]), labels[chosen]
            with torch.autocast(DEVICE.type, dtype or torch.bfloat16, enabled=dtype is not None):
                loss = F.cross_entropy(forward(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad(set_to_none=True)
            schedule.step()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds, loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--compile", action="store_true", help="by torch.compile, as CUDA graphs")
    parser.add_argument("--smoke", action="store_true", help="two small epochs")
    options = parser.parse_args()
    options.images, options.batch, options.epochs = (64, 16, 2) if options.smoke else (5000, 128, 8)
    # F32 is F32 on both sides: PyTorch lets convolutions round to TF32 by itself.
    torch.backends.cudnn.allow_tf32 = False
    rows, failed = [], 0
    print(f"PyTorch {torch.__version__} on {DEVICE.type}")
    for precision in PRECISIONS:
        try:
            seconds, loss = train(precision, options)
        except Exception as error:
            what = "torch.compile is not possible here" if options.compile else "failed"  # no C compiler, no Triton
            print(f"{precision:5} {what}: {error!r}", flush=True)
            failed += not options.compile
            continue
        epoch = statistics.median(seconds[1:])
        row = {"precision": precision, "epoch": epoch, "run": sum(seconds), "loss": loss}
        row["images a second"] = options.images // options.batch * options.batch / epoch
        rows.append(row)
        print(f"{precision:5} an epoch {epoch:8.3f} s, a run {row['run']:8.3f} s, {row['images a second']:8.0f} images/s")
        if options.json:  # each as it is measured
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(failed > 0)


main()
