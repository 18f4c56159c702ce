"""MobileNetV2 for images of CIFAR-10's size: inverted residuals around depthwise convolutions."""

import torch
import torch.nn.functional as F
from torch import nn

# Of each stage: the factor by which its blocks are wider inside, channels, blocks, stride.
STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


def conv(channels, out, kernel, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    )


class Inverted(nn.Module):
    def __init__(self, channels, out, expansion, stride):
        super().__init__()
        wide = expansion * channels
        self.expand = conv(channels, wide, 1) if expansion > 1 else None
        self.depthwise = conv(wide, wide, 3, stride, groups=wide)
        self.project = conv(wide, out, 1)
        self.residual = stride == 1 and channels == out

    def forward(self, x):
        y = F.relu6(self.expand(x)) if self.expand else x
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        blocks, channels = [], 32
        for expansion, out, count, stride in STAGES:
            for i in range(count):
                blocks.append(Inverted(channels, out, expansion, stride if i == 0 else 1))
                channels = out
        self.stem, self.blocks = conv(3, 32, 3, 2), nn.Sequential(*blocks)
        self.last, self.head = conv(320, 1280, 1), nn.Linear(1280, classes)

    def forward(self, x):
        x = self.blocks(F.relu6(self.stem(x)))
        x = F.adaptive_avg_pool2d(F.relu6(self.last(x)), 1)
        return self.head(x.flatten(1))


def train(run):
    model = run.initialised(MobileNet(10)).to(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, weight_decay=4e-5)
    for x, y in run.images(8):
        x = x.to(memory_format=torch.channels_last)
        with run.autocast():
            loss = F.cross_entropy(model(x), y)
        run.scaler.scale(loss).backward()
        run.scaler.step(sgd)
        run.scaler.update()
        sgd.zero_grad()
        run.report(loss)
