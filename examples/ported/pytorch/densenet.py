"""DenseNet-BC-40: every layer sees what all layers before it returned."""

import torch
import torch.nn.functional as F
from torch import nn

DEPTH, GROWTH = 40, 12


def layer(channels, out, kernel):
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, out, kernel, padding=kernel // 2, bias=False),
    )


class Dense(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layers = nn.Sequential(
            layer(channels, 4 * GROWTH, 1),
            layer(4 * GROWTH, GROWTH, 3),
        )

    def forward(self, x):
        return torch.cat([x, self.layers(x)], 1)


def densenet(classes):
    channels, per_stage = 2 * GROWTH, (DEPTH - 4) // 6
    layers = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(3):
        for _ in range(per_stage):
            layers.append(Dense(channels))
            channels += GROWTH
        if stage < 2:
            layers += [layer(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def train(run):
    model = run.initialised(densenet(10))
    sgd = torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, nesterov=True
    )
    for x, y in run.images(8):
        with run.autocast():
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        run.scaler.scale(loss).backward()
        run.scaler.step(sgd)
        run.scaler.update()
        sgd.zero_grad()
        run.report(loss)
