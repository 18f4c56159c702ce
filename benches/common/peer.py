"""PyTorch's side of a comparison: reads a workload a line, as JSON with the shapes the other side uses,
and answers each with a line: the typical time in milliseconds, or another number that was asked for, by memory
layout. `null` drops what was built so far.
"""

import gc
import json
import statistics
import sys
import time

import torch


def typical_of(run, seconds, fastest):
    """The median of what `run` returns, or the least. As the other side does it."""
    if seconds == 0:
        return run()
    runs, warm = 0, time.perf_counter() + seconds / 5
    while runs < 2 or time.perf_counter() < warm:
        run()
        runs += 1
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(run())
    return min(times) if fastest else statistics.median(times)


def answer(request, built, make, layouts_of, numbers):
    """The reply to one request.

    `make(work, layout)` returns a function that does the work once and returns the seconds it took, or None where
    the work cannot be done here and `make` has said why;
    `layouts_of(work)` the layouts to try, by name; `numbers` has by name what else can be asked for:
    functions of `make` and how many runs, which return None where nobody counts, and a dictionary where there
    are several.
    """
    seconds, fastest = request.pop("seconds", None), request.pop("fastest", False)
    asked = {name: request.pop(name) for name in list(request) if name in numbers}
    layouts = layouts_of(request)
    for name, (count, layout) in asked.items():
        number = numbers[name](lambda: make(request, layouts[layout]), count)
        if isinstance(number, dict):
            return number
        return {} if number is None else {layout: number}
    key = json.dumps(request, sort_keys=True)
    if key not in built:
        built[key] = {name: make(request, layout) for name, layout in layouts.items()}
    return {name: typical_of(run, seconds, fastest) * 1e3 for name, run in built[key].items() if run}


def serve(make, layouts_of, numbers, dropped=lambda: None):
    """Answers until there is nothing to read. `dropped` runs after each `null`."""
    torch.manual_seed(0)
    print(json.dumps({"version": torch.__version__}), flush=True)
    built = {}
    for line in sys.stdin:
        request = json.loads(line)
        if request is None:
            built.clear()
            gc.collect()
            dropped()
            continue
        try:
            reply = answer(request, built, make, layouts_of, numbers)
        except Exception as error:  # the other side says it, and ends
            reply = {"error": repr(error)}
        print(json.dumps(reply), flush=True)
