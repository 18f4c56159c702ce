"""The networks of `zoo`, in PyTorch: the same names of parameters."""

import torch
import torch.nn.functional as F
from torch import nn


def conv(width, out, kernel, stride=1, groups=1):
    return nn.Conv2d(width, out, kernel, stride, kernel // 2, groups=groups, bias=False)


class ConvNorm(nn.Module):
    def __init__(self, width, out, kernel, stride=1, groups=1):
        super().__init__()
        self.conv, self.norm = conv(width, out, kernel, stride, groups), nn.BatchNorm2d(out)

    def forward(self, x):
        return self.norm(self.conv(x))

    def relu(self, x):
        return F.relu(self(x), inplace=True)

    def relu6(self, x):
        return F.relu6(self(x), inplace=True)


class Inverted(nn.Module):
    def __init__(self, width, out, expansion, stride):
        super().__init__()
        wide = expansion * width
        self.expand = ConvNorm(width, wide, 1) if expansion > 1 else None
        self.depthwise = ConvNorm(wide, wide, 3, stride, groups=wide)
        self.project = ConvNorm(wide, out, 1)
        self.residual = stride == 1 and width == out

    def forward(self, x):
        y = self.expand.relu6(x) if self.expand else x
        y = self.project(self.depthwise.relu6(y))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    # Of each stage: how many times wider its blocks are inside, channels, blocks, stride.
    STAGES = [
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]

    def __init__(self, width):
        super().__init__()
        self.stem = ConvNorm(3, width, 3)
        channels, blocks = lambda original, stem=width: original * stem // 32, []
        for expansion, out, count, stride in self.STAGES:
            out = channels(out)
            for i in range(count):
                blocks.append(Inverted(width, out, expansion, stride if i == 0 else 1))
                width = out
        self.blocks = nn.Sequential(*blocks)
        last = channels(1280)
        self.last, self.head = ConvNorm(width, last, 1), nn.Linear(last, 10)

    def forward(self, x):
        x = self.last.relu6(self.blocks(self.stem.relu6(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class NormConv(nn.Module):
    def __init__(self, width, out, kernel):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(width), conv(width, out, kernel)

    def forward(self, x):
        return self.conv(F.relu(self.norm(x), inplace=True))


class DenseLayer(nn.Module):
    def __init__(self, width, growth):
        super().__init__()
        self.narrow, self.grow = NormConv(width, 4 * growth, 1), NormConv(4 * growth, growth, 3)

    def forward(self, x):
        return torch.cat([x, self.grow(self.narrow(x))], 1)


class DenseStage(nn.Module):
    def __init__(self, width, growth, count, last):
        super().__init__()
        self.layers = nn.Sequential(*(DenseLayer(width + i * growth, growth) for i in range(count)))
        width += count * growth
        self.transition = None if last else NormConv(width, width // 2, 1)
        self.out = width if last else width // 2

    def forward(self, x):
        x = self.layers(x)
        return F.avg_pool2d(self.transition(x), 2) if self.transition else x


class DenseNet(nn.Module):
    STAGES = 3

    def __init__(self, depth, growth):
        super().__init__()
        width, count, stages = 2 * growth, (depth - 4) // (2 * self.STAGES), []
        self.stem = conv(3, width, 3)
        for i in range(self.STAGES):
            stages.append(DenseStage(width, growth, count, last=i + 1 == self.STAGES))
            width = stages[-1].out
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.stages(self.stem(x))), inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Double(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.first, self.second = ConvNorm(width, out, 3), ConvNorm(out, out, 3)

    def forward(self, x):
        return self.second.relu(self.first.relu(x))


class Up(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.larger, self.convs = nn.ConvTranspose2d(width, out, 2, 2), Double(width, out)

    def forward(self, x, kept):
        return self.convs(torch.cat([kept, self.larger(x)], 1))


class UNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.down = nn.ModuleList([Double(3, c), Double(c, 2 * c)])
        self.bottom = Double(2 * c, 4 * c)
        self.up = nn.ModuleList([Up(4 * c, 2 * c), Up(2 * c, c)])
        self.head = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        kept = []
        for double in self.down:
            kept.append(double(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.bottom(x)
        for up in self.up:
            x = up(x, kept.pop())
        return self.head(x)


class GeneratorLayer(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv = nn.ConvTranspose2d(width, out, 4, stride, stride - 1, bias=False)
        self.norm = nn.BatchNorm2d(out)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Generator(nn.Module):
    LATENT = 100

    def __init__(self, width):
        super().__init__()
        sides = [(self.LATENT, 4 * width, 1), (4 * width, 2 * width, 2), (2 * width, width, 2)]
        self.layers = nn.Sequential(*(GeneratorLayer(*side) for side in sides))
        self.last = nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)

    def forward(self, x):
        return torch.tanh(self.last(self.layers(x)))


class DiscriminatorLayer(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, out, 4, 2, 1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), 0.2, inplace=True)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, 2, 1, bias=False)
        sides = [(width, 2 * width), (2 * width, 4 * width)]
        self.layers = nn.Sequential(*(DiscriminatorLayer(*side) for side in sides))
        self.last = nn.Conv2d(4 * width, 1, 4, bias=False)

    def forward(self, x):
        return self.last(self.layers(F.leaky_relu(self.first(x), 0.2, inplace=True)))


class Dcgan(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.generator, self.discriminator = Generator(width), Discriminator(width)


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    WIDTH, HEADS, PATCH = 192, 3, 4

    def __init__(self, layers):
        super().__init__()
        width = self.WIDTH
        self.patches = nn.Conv2d(3, width, self.PATCH, self.PATCH)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1 + (32 // self.PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, self.HEADS, False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], 1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class NanoGpt(nn.Module):
    def __init__(self, size):
        super().__init__()
        width, heads = size["width"], size["heads"]
        self.tokens = nn.Embedding(size["vocabulary"], width)
        self.places = nn.Embedding(size["context"], width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(size["layers"])))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class LstmLm(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        x = self.tokens(x)
        if torch.is_autocast_enabled("cpu"):
            # oneDNN refuses the cast that autocast makes where the processor has no BF16.
            x = x.to(torch.get_autocast_dtype("cpu"))
        return self.head(self.lstm(x)[0])
