#!/usr/bin/env python3
"""Trains the cifar10 example in F32, F16 and BF16, with three seeds each, and prints a table: time an
epoch, storage, test accuracy as mean and spread.

    scripts/cifar10-table.py --data DIR --gpu --model resnet18 --epochs 30
    scripts/cifar10-table.py --smoke

The 16-bit runs keep 16-bit variables with F32 masters; --autocast keeps F32 variables. F16 has a dynamic
loss scale. Options that this script does not know are passed to every run of the example. --program is the
built example, for a machine without cargo.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = {
    "f32": ["--precision", "f32"],
    "f16, dynamic scale": ["--precision", "f16", "--loss-scale", "dynamic"],
    "bf16": ["--precision", "bf16"],
}
MIB = 1 << 20


def device_memory() -> int:
    """Bytes in use on the first GPU; 0 without nvidia-smi."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * MIB
    except (OSError, ValueError, subprocess.CalledProcessError):
        return 0


class DevicePeak(threading.Thread):
    """The peak of memory in use on the GPU while it runs, less what was in use before."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before, self.most, self.done = device_memory(), 0, threading.Event()

    def run(self):
        while self.before and not self.done.wait(0.5):
            self.most = max(self.most, device_memory() - self.before)

    def end(self) -> int:
        self.done.set()
        self.join()
        return self.most


def run(command: list[str], arguments: list[str]) -> dict | None:
    """The report of one run, with its time and GPU memory as seen from outside; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        peak, start = DevicePeak(), time.monotonic()
        peak.start()
        command = [*command, *arguments, "--report", str(report)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            peak.end()
            print(f"ended with {done.returncode}: {' '.join(command)}\n{done.stdout[-2000:]}", flush=True)
            return None
        seconds, memory = time.monotonic() - start, peak.end()
        return {**json.loads(report.read_text()), "seconds": seconds, "peak_device_bytes": memory}


def spread(values: list[float], digits: int, unit: str) -> str:
    """The mean, and the standard deviation of a sample."""
    mean = f"{statistics.mean(values):.{digits}f}"
    more = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean}{more} {unit}"


def epoch_seconds(report: dict) -> float:
    return report["train_images"] / report["images_per_second"]


def row(name: str, reports: list[dict], f32: list[dict] | None) -> str:
    accuracy = [100 * report["test_accuracy"] for report in reports]
    off = ""
    if f32 and f32 is not reports:
        beside = statistics.mean(100 * report["test_accuracy"] for report in f32)
        off = f"{statistics.mean(accuracy) - beside:+.2f}"
    peaks = [max(report[key] or 0 for report in reports) for key in ("peak_device_bytes", "peak_rss_bytes")]
    cells = [
        name,
        spread([epoch_seconds(report) for report in reports], 2, "s"),
        f"{reports[0]['weight_bytes'] / MIB:.2f} MiB",
        *(f"{peak / MIB:.0f} MiB" if peak else "" for peak in peaks),
        spread(accuracy, 2, "%"),
        off,
        spread([report["final_loss"] for report in reports], 3, "").strip(),
        ", ".join(str(report["skipped_steps"]) for report in reports),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = "precision | an epoch | weights | peak, GPU | peak, host | test accuracy | off f32 | final loss | skipped"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--program", help="the built example; otherwise cargo builds it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--autocast", action="store_true", help="F32 variables in the 16-bit runs too")
    parser.add_argument("--json", type=pathlib.Path, help="also writes the nine reports")
    options, arguments = parser.parse_known_args()
    command = [options.program] if options.program else build(arguments)
    reports, failed = {}, 0
    for name, precision in RUNS.items():
        half = [] if name == "f32" or options.autocast else ["--master-weights"]
        for seed in options.seeds:
            print(f"{name}, seed {seed} ...", end=" ", flush=True)
            last = run(command, [*arguments, *precision, *half, "--seed", str(seed)])
            if last is None:
                failed += 1
                continue
            reports.setdefault(name, []).append(last)
            print(f"{100 * last['test_accuracy']:.2f} % in {last['seconds']:.1f} s", flush=True)
            if options.json:  # each as it is measured
                options.json.write_text(json.dumps(reports, indent=2) + "\n")
    if not reports:
        sys.exit("every run failed")
    first = next(iter(reports.values()))[0]
    print(
        f"\n{first['model']}, {first['data']}, {first['train_images']} images, {first['epochs']} epochs, "
        f"batches of {first['batch_size']}, on {first['device']}\n"
    )
    print(f"| {HEAD} |\n|{'---|' * (HEAD.count('|') + 1)}")
    for name in reports:
        print(row(name, reports[name], reports.get("f32")))
    if failed:
        sys.exit(f"{failed} of {len(RUNS) * len(options.seeds)} runs failed")


def build(arguments: list[str]) -> list[str]:
    """The command of an example built here, with CUDA where the runs ask for it."""
    command = ["cargo", "build", "--quiet", "--release", "--example", "cifar10", "--message-format=json"]
    command += ["--features", "cuda"] if "--gpu" in arguments else []
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        sys.exit(built.returncode)
    messages = map(json.loads, built.stdout.splitlines())
    programs = [message["executable"] for message in messages if message.get("executable")]
    return [programs[-1]]


if __name__ == "__main__":
    main()
