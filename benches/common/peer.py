"""PyTorch's side of a comparison: reads a workload a line, as JSON with the shapes the other side uses,
and answers each with a line: the typical time in milliseconds, or the peak memory in bytes, by memory
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


def answer(request, built, make, layouts_of, peak):
    """The reply to one request.

    `make(work, layout)` returns a function that does the work once and returns the seconds it took;
    `layouts_of(kind)` the layouts to try, by name; `peak(make, steps)` the peak memory of that many runs, or None where nobody counts.
    """
    seconds, steps = request.pop("seconds", None), request.pop("steps", None)
    fastest = request.pop("fastest", False)
    layouts = layouts_of(request["kind"])
    if steps:
        count, layout = steps
        most = peak(lambda: make(request, layouts[layout]), count)
        return {} if most is None else {layout: most}
    key = json.dumps(request, sort_keys=True)
    if key not in built:
        built[key] = {name: make(request, layout) for name, layout in layouts.items()}
    return {name: typical_of(run, seconds, fastest) * 1e3 for name, run in built[key].items()}


def serve(make, layouts_of, peak, dropped=lambda: None):
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
            reply = answer(request, built, make, layouts_of, peak)
        except Exception as error:  # the other side says it, and ends
            reply = {"error": repr(error)}
        print(json.dumps(reply), flush=True)
