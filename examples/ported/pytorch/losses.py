"""Writes ../losses.json: the losses of ten steps of each program in F32, on one thread."""

import importlib
import json
import pathlib

import torch

from run import Run

PROGRAMS = ["mobilenet", "densenet", "unet", "vit", "nanogpt", "dcgan", "lstm", "fine_tune"]

torch.set_num_threads(1)
losses = {}
for name in PROGRAMS:
    run = Run(torch.float32, 10)
    importlib.import_module(name).train(run)
    losses[name] = run.losses
    print(name, *(f"{loss:.4f}" for loss in run.losses))
rows = [f'  "{name}": {json.dumps(numbers)}' for name, numbers in losses.items()]
path = pathlib.Path(__file__).parent.parent / "losses.json"
path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
