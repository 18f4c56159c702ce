#!/usr/bin/env python3
"""Writes PyTorch's answers for `tests/it/optim`: a few steps of its optimizers, and its schedules.

    pip install torch==2.15.0
    python tests/golden/make_optimizers.py

rewrites `optimizers.safetensors` beside this script. All is in F32 on a CPU, with PyTorch's plain
implementations (`foreach=False, fused=False`), whose operations its documentation lists.

| tensor                | shape       | what                                                          |
|-----------------------|-------------|---------------------------------------------------------------|
| `initial`             | (37)        | what every optimizer starts from                              |
| `gradients`           | (12, 37)    | of every step, from 1e-6 to 10                                |
| `O.weights`           | (12, 37)    | after every step of optimizer O                               |
| `O.state.NAME`        | (37)        | after the last one                                            |
| `schedule.S`          | (40)        | learning rates of schedule S, from a base of 0.5, F64         |
| `plateau.measures`    | (40)        | what the plateaus are shown, F64                              |
| `plateau.P`           | (40)        | learning rates after each, from a base of 0.5, F64            |
| `ema`                 | (37)        | the average of SGD's weights after every step, decay 0.9      |
"""

import pathlib
import sys

import torch
from torch.optim import lr_scheduler as schedules

sys.dont_write_bytecode = True
from make_golden import save  # noqa: E402

STEPS, LENGTH, SEED = 12, 37, 21

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, dict(lr=0.1)),
    "sgd_momentum": (torch.optim.SGD, dict(
        lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.05, maximize=True)),
    "sgd_nesterov": (torch.optim.SGD, dict(
        lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=True)),
    "adamw": (torch.optim.AdamW, dict()),
    "adamw_amsgrad": (torch.optim.AdamW, dict(
        lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, amsgrad=True, maximize=True)),
    "adamw_low_beta1": (torch.optim.AdamW, dict(lr=0.05, betas=(0.3, 0.9), weight_decay=0.0)),
}

SCHEDULES = {
    "cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=39, eta_min=0.05),
    "one_cycle": lambda o: schedules.OneCycleLR(
        o, max_lr=0.5, total_steps=40, cycle_momentum=False),
    "one_cycle_short": lambda o: schedules.OneCycleLR(
        o, max_lr=0.5, total_steps=40, pct_start=0.45, div_factor=5, final_div_factor=20,
        cycle_momentum=False),
    "step": lambda o: schedules.StepLR(o, step_size=7, gamma=0.5),
    "multi_step": lambda o: schedules.MultiStepLR(o, milestones=[5, 11, 30], gamma=0.1),
}

PLATEAUS = {
    "default": dict(patience=3),
    "max": dict(mode="max", factor=0.5, patience=2, threshold=0.02, threshold_mode="abs",
                cooldown=3, min_lr=0.06),
}


def optimizer(lr):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def main():
    torch.manual_seed(SEED)
    initial = torch.randn(LENGTH)
    gradients = torch.randn(STEPS, LENGTH) * 10 ** (7 * torch.rand(STEPS, LENGTH) - 6)
    tensors = {"initial": initial, "gradients": gradients}
    for name, (kind, settings) in OPTIMIZERS.items():
        weight = torch.nn.Parameter(initial.clone())
        steps = kind([weight], **settings, foreach=False, fused=False)
        weights = []
        average = torch.optim.swa_utils.AveragedModel(
            torch.nn.ParameterList([weight]),
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        average.update_parameters(torch.nn.ParameterList([weight]))  # the first one copies
        for gradient in gradients:
            weight.grad = gradient.clone()
            steps.step()
            weights.append(weight.detach().clone())
            average.update_parameters(torch.nn.ParameterList([weight]))
        tensors[f"{name}.weights"] = torch.stack(weights)
        for key, state in steps.state[weight].items():
            if key != "step" and state is not None:
                tensors[f"{name}.state.{key}"] = state
        if name == "sgd":
            tensors["ema"] = next(average.module.parameters()).detach()
    for name, make in SCHEDULES.items():
        steps = optimizer(0.5)
        schedule = make(steps)
        rates = []
        for _ in range(40):
            rates.append(steps.param_groups[0]["lr"])
            steps.step()
            if len(rates) < 40:
                schedule.step()
        tensors[f"schedule.{name}"] = torch.tensor(rates, dtype=torch.float64)
    measures = (2 / (1 + torch.arange(40, dtype=torch.float64)).sqrt()
                + 0.3 * torch.rand(40, dtype=torch.float64))
    measures[17] = torch.nan
    tensors["plateau.measures"] = measures
    for name, settings in PLATEAUS.items():
        steps = optimizer(0.5)
        schedule = schedules.ReduceLROnPlateau(steps, **settings)
        rates = []
        for measure in measures.tolist():
            schedule.step(measure)
            rates.append(steps.param_groups[0]["lr"])
        tensors[f"plateau.{name}"] = torch.tensor(rates, dtype=torch.float64)
    metadata = {"torch": torch.__version__.split("+")[0], "seed": str(SEED)}
    save(pathlib.Path(__file__).with_name("optimizers.safetensors"), tensors, metadata)


if __name__ == "__main__":
    main()
