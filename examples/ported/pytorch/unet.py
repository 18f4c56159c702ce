"""A U-Net that finds a mask, trained by binary cross entropy and the dice loss."""

import torch
import torch.nn.functional as F
from torch import nn


def double(channels, out):
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
        nn.Conv2d(out, out, 3, padding=1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(),
    )


class Up(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(channels, out, 2, 2)
        self.convs = double(channels, out)

    def forward(self, x, skip):
        return self.convs(torch.cat([skip, self.upsample(x)], 1))


class UNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.down = nn.ModuleList([double(3, c), double(c, 2 * c)])
        self.bottom = double(2 * c, 4 * c)
        self.up = nn.ModuleList([Up(4 * c, 2 * c), Up(2 * c, c)])
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        skips = []
        for double in self.down:
            skips.append(double(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(x, skips.pop())
        return self.head(x)


def dice(logits, mask):
    p = torch.sigmoid(logits)
    overlap, total = (p * mask).sum((1, 2, 3)), (p + mask).sum((1, 2, 3))
    return (1 - (2 * overlap + 1) / (total + 1)).mean()


def train(run):
    model = run.initialised(UNet(8))
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for x, mask in run.masks(4, 32):
        with run.autocast():
            logits = model(x).float()
            loss = F.binary_cross_entropy_with_logits(logits, mask) + dice(logits, mask)
        run.scaler.scale(loss).backward()
        run.scaler.step(adamw)
        run.scaler.update()
        adamw.zero_grad()
        run.report(loss)
