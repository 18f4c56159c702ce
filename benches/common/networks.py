"""The networks of `networks.rs`, in PyTorch."""

import torch
import torch.nn.functional as F
from torch import nn

SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}


def conv_norm(width, out, kernel, stride):
    conv = nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class Block(nn.Module):
    def __init__(self, width, narrow, out, stride, bottleneck):
        super().__init__()
        if bottleneck:
            inner = [conv_norm(width, narrow, 1, 1), conv_norm(narrow, narrow, 3, stride)]
            inner.append(conv_norm(narrow, out, 1, 1))
        else:
            inner = [conv_norm(width, out, 3, stride), conv_norm(out, out, 3, 1)]
        self.inner = nn.ModuleList(inner)
        self.shortcut = conv_norm(width, out, 1, stride) if width != out else nn.Identity()

    def forward(self, x):
        around, last = self.shortcut(x), len(self.inner) - 1
        for i, conv in enumerate(self.inner):
            x = conv(x)
            x = F.relu(x.add_(around) if i == last else x, inplace=True)
        return x


class ResNet(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.stem = conv_norm(3, size["width"], 3, 1)
        blocks, before = [], size["width"]
        for stage, count in enumerate(size["stages"]):
            narrow = size["width"] << stage
            out = 4 * narrow if size["bottleneck"] else narrow
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(before, narrow, out, stride, size["bottleneck"]))
                before = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.stem(x), inplace=True))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class GptBlock(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, size):
        super().__init__()
        width = size["width"]
        self.tokens = nn.Embedding(size["vocabulary"], width)
        self.places = nn.Embedding(size["context"], width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        blocks = [GptBlock(width, size["heads"], bias=True) for _ in range(size["layers"])]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight).flatten(0, 1)
