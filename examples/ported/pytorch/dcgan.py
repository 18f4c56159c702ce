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


def new_generator():
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


def new_critic():
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        *down(WIDTH, 2 * WIDTH),
        *down(2 * WIDTH, 4 * WIDTH),
        nn.Conv2d(4 * WIDTH, 1, 4, bias=False),
    )


def loss_of(logits, real):
    target = torch.full_like(logits, 1.0 if real else 0.0)
    return F.binary_cross_entropy_with_logits(logits, target)


def train(run):
    models = {"generator": new_generator(), "critic": new_critic()}
    generator, critic = run.initialised(nn.ModuleDict(models)).values()
    settings = {"lr": 2e-4, "betas": (0.5, 0.999)}
    generator_adam = torch.optim.Adam(generator.parameters(), **settings)
    critic_adam = torch.optim.Adam(critic.parameters(), **settings)
    for step, (real, _) in enumerate(run.images(8)):
        latent = run.latent((8, LATENT, 1, 1), step)
        with run.autocast():
            fake = generator(latent)
            critic_loss = loss_of(critic(real), True) + loss_of(critic(fake.detach()), False)
        run.scaler.scale(critic_loss).backward()
        run.scaler.step(critic_adam)
        critic_adam.zero_grad()
        with run.autocast():
            generator_loss = loss_of(critic(fake), True)
        run.scaler.scale(generator_loss).backward()
        run.scaler.step(generator_adam)
        run.scaler.update()
        generator_adam.zero_grad()
        critic_adam.zero_grad()
        run.report(critic_loss + generator_loss)
