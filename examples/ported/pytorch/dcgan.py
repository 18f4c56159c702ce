"""A DCGAN: two networks, two optimizers, one scaler."""

import torch
import torch.nn.functional as F
from torch import nn

LATENT, WIDTH = 32, 16


def up(channels, out, stride):
    return [
        nn.ConvTranspose2d(channels, out, 4, stride, stride - 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    ]


def generator():
    return nn.Sequential(
        *up(LATENT, 4 * WIDTH, 1),
        *up(4 * WIDTH, 2 * WIDTH, 2),
        *up(2 * WIDTH, WIDTH, 2),
        nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def down(channels, out):
    return [
        nn.Conv2d(channels, out, 4, 2, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.LeakyReLU(0.2),
    ]


def critic():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        *down(WIDTH, 2 * WIDTH),
        *down(2 * WIDTH, 4 * WIDTH),
        nn.Conv2d(4 * WIDTH, 1, 4, bias=False),
    )


def judged(logits, real):
    target = torch.full_like(logits, 1.0 if real else 0.0)
    return F.binary_cross_entropy_with_logits(logits, target)


def train(run):
    makes, judges = run.initialised(generator(), critic())
    settings = {"lr": 2e-4, "betas": (0.5, 0.999)}
    of_generator = torch.optim.Adam(makes.parameters(), **settings)
    of_critic = torch.optim.Adam(judges.parameters(), **settings)
    for step, (real, _) in enumerate(run.images(8)):
        latent = run.latent((8, LATENT, 1, 1), step)
        with run.autocast():
            fake = makes(latent)
            apart = judged(judges(real), True) + judged(judges(fake.detach()), False)
        run.scaler.scale(apart).backward()
        run.scaler.step(of_critic)
        of_critic.zero_grad()
        with run.autocast():
            alike = judged(judges(fake), True)
        run.scaler.scale(alike).backward()
        run.scaler.step(of_generator)
        run.scaler.update()
        of_generator.zero_grad()
        of_critic.zero_grad()
        run.report(apart + alike)
