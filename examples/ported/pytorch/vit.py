"""ViT-Tiny on patches of 4x4 pixels, with warm-up, a cosine schedule, label smoothing and clipping."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, PATCH, LAYERS = 192, 3, 4, 4


class ViT(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (32 // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def rate(step, steps=100, warm_up=2):
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(run):
    model = run.initialised(ViT(10))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, rate)
    for x, y in run.images(8):
        with run.autocast():
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        run.scaler.scale(loss).backward()
        run.scaler.unscale_(adamw)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.scaler.step(adamw)
        run.scaler.update()
        adamw.zero_grad()
        schedule.step()
        run.report(loss)
