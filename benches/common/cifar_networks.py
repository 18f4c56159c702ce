"""Networks of `examples/cifar10/models`, one a family, in PyTorch: the same names of parameters."""

import torch
import torch.nn.functional as F
from torch import nn

from zoo_networks import MobileNet


def add(module, path, part):
    """Makes `part` the one at `path` in `module`, such as `stage1.0.conv`."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, nn.Module())
        module = module._modules[parent]
    module.add_module(name, part)
    return part


class Network(nn.Module):
    """Layers one after another, each at a path of its own, or a function without parameters."""

    def __init__(self):
        super().__init__()
        self.layers = []

    def add(self, path, part):
        self.layers.append(add(self, path, part))
        return self

    def then(self, function):
        self.layers.append(function)
        return self

    def classify(self, width):
        return self.then(lambda x: x.mean((2, 3))).add("head", nn.Linear(width, 10))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def conv(of, to, size, stride=1, groups=1, bias=False):
    return nn.Conv2d(of, to, size, stride, size // 2, groups=groups, bias=bias)


class ConvNorm(nn.Module):
    def __init__(self, of, to, size, activation=None, **settings):
        super().__init__()
        self.conv, self.norm = conv(of, to, size, **settings), nn.BatchNorm2d(to)
        self.activation = activation

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y if self.activation is None else self.activation(y)


def conv_relu(of, to, size, **settings):
    return ConvNorm(of, to, size, F.relu, **settings)


class NormConv(nn.Module):
    """Norm, relu, convolution."""

    def __init__(self, of, to, size, stride=1):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(of), conv(of, to, size, stride)

    def forward(self, x):
        return self.conv(F.relu(self.norm(x)))


class Path(Network):
    """A path, and what it is joined with: its input or a projection of it."""

    def __init__(self, projection=None):
        super().__init__()
        if projection is not None:
            self.projection = projection

    def around(self, x):
        return self.projection(x) if hasattr(self, "projection") else x


class Residual(Path):
    def forward(self, x):
        return F.relu(super().forward(x) + self.around(x))


def stages(network, widths, counts, block, strided=1):
    """Adds blocks, of which the first of each stage from `strided` on halves the image."""
    for stage, (width, count) in enumerate(zip(widths, counts)):
        for i in range(count):
            stride = 2 if stage >= strided and i == 0 else 1
            network.add(f"stage{stage + 1}.{i}", block(width, stride))
    return network


def vgg11():
    network, of = Network(), 3
    for stage, (to, count) in enumerate(zip([64, 128, 256, 512, 512], [1, 1, 2, 2, 2])):
        for i in range(count):
            network.add(f"stage{stage + 1}.{i}", conv_relu(of, to, 3, bias=True))
            of = to
        network.then(lambda x: F.max_pool2d(x, 2))
    return network.classify(of)


def plain(of, to, stride):
    projection = ConvNorm(of, to, 1, stride=stride) if (of, stride) != (to, 1) else None
    path = Residual(projection).add("1", conv_relu(of, to, 3, stride=stride))
    return path.add("2", ConvNorm(to, to, 3))


def resnet18():
    of = 64

    def block(to, stride):
        nonlocal of
        made, of = plain(of, to, stride), to
        return made

    network = Network().add("stem", conv_relu(3, 64, 3))
    return stages(network, [64, 128, 256, 512], [2] * 4, block).classify(512)


class SqueezeExcite(nn.Module):
    def __init__(self, width, inner, activation=F.relu):
        super().__init__()
        self.squeeze, self.excite = nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = activation

    def forward(self, x):
        gate = torch.sigmoid(self.excite(self.activation(self.squeeze(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


class PreAct(nn.Module):
    """Two convolutions, each behind a norm and a relu, with a way around them, and perhaps a gate."""

    def __init__(self, of, to, stride, gated):
        super().__init__()
        for i, (width, stride_of) in enumerate([(of, stride), (to, 1)]):
            add(self, f"{i + 1}.norm", nn.BatchNorm2d(width))
            add(self, f"{i + 1}.conv", conv(width, to, 3, stride_of))
        if (of, stride) != (to, 1):
            self.projection = conv(of, to, 1, stride)
        if gated:
            self.gate = SqueezeExcite(to, to // 16)

    def forward(self, x):
        first, second = self._modules["1"], self._modules["2"]
        activated = F.relu(first.norm(x))
        y = second.conv(F.relu(second.norm(first.conv(activated))))
        y = self.gate(y) if hasattr(self, "gate") else y
        return y + (self.projection(activated) if hasattr(self, "projection") else x)


def preact(gated):
    of = 64

    def block(to, stride):
        nonlocal of
        made, of = PreAct(of, to, stride, gated), to
        return made

    network = Network().add("stem", conv_relu(3, 64, 3) if gated else conv(3, 64, 3))
    return stages(network, [64, 128, 256, 512], [2] * 4, block).classify(512)


class Branches(nn.Module):
    def __init__(self, *branches):
        super().__init__()
        self.branches = branches
        for branch in branches:
            for name, part in branch._modules.items():
                self.merge(self, name, part)

    @staticmethod
    def merge(into, name, part):
        """Parts of branches may share a path."""
        if name not in into._modules:
            into.add_module(name, part)
            return
        for inner, value in part._modules.items():
            Branches.merge(into._modules[name], inner, value)

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception(of, one, to3, three, to5, five, pool):
    def biased(*sizes):
        return conv_relu(*sizes, bias=True)

    return Branches(
        Network().add("1x1", biased(of, one, 1)),
        Network().add("3x3.1", biased(of, to3, 1)).add("3x3.2", biased(to3, three, 3)),
        Network()
        .add("5x5.1", biased(of, to5, 1))
        .add("5x5.2", biased(to5, five, 3))
        .add("5x5.3", biased(five, five, 3)),
        Network().then(lambda x: F.max_pool2d(x, 3, 1, 1)).add("pool", biased(of, pool, 1)),
    )


INCEPTIONS = [
    [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)],
    [
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ],
    [(256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)],
]


def googlenet():
    of = 192
    network = Network().add("stem", conv_relu(3, of, 3, bias=True))
    for stage, blocks in enumerate(INCEPTIONS):
        if stage > 0:
            network.then(lambda x: F.max_pool2d(x, 3, 2, 1))
        for i, widths in enumerate(blocks):
            network.add(f"{stage + 3}.{i}", inception(of, *widths))
            of = widths[0] + widths[2] + widths[4] + widths[5]
    return network.classify(of)


class Dense(Network):
    def forward(self, x):
        return torch.cat([super().forward(x), x], 1)


def densenet_cifar():
    growth, width = 12, 24
    network = Network().add("stem", conv(3, width, 3))
    for stage, count in enumerate([6, 12, 24, 16]):
        if stage > 0:
            network.add(f"stage{stage + 1}.transition", NormConv(width, width // 2, 1))
            network.then(lambda x: F.avg_pool2d(x, 2))
            width //= 2
        for i in range(count):
            layer = Dense().add("1", NormConv(width, 4 * growth, 1))
            layer.add("2", NormConv(4 * growth, growth, 3))
            network.add(f"stage{stage + 1}.{i}", layer)
            width += growth
    return network.add("last.norm", nn.BatchNorm2d(width)).then(F.relu).classify(width)


def resnext29():
    of = 64

    def block(inner, stride):
        nonlocal of
        to = 2 * inner
        projection = ConvNorm(of, to, 1, stride=stride) if (of, stride) != (to, 1) else None
        made = (
            Residual(projection)
            .add("1", conv_relu(of, inner, 1))
            .add("2", conv_relu(inner, inner, 3, stride=stride, groups=32))
            .add("3", ConvNorm(inner, to, 1))
        )
        of = to
        return made

    network = Network().add("stem", conv_relu(3, 64, 1))
    return stages(network, [128, 256, 512], [3] * 3, block).classify(1024)


class DualPath(Path):
    def __init__(self, added, projection):
        super().__init__(projection)
        self.added = added

    def forward(self, x):
        y, around, added = super().forward(x), self.around(x), self.added
        joined = [around[:, :added] + y[:, :added], around[:, added:], y[:, added:]]
        return F.relu(torch.cat(joined, 1))


def dpn26():
    of = 64
    network = Network().add("stem", conv_relu(3, of, 3))
    settings = [(96, 256, 16), (192, 512, 32), (384, 1024, 24), (768, 2048, 128)]
    for stage, (inner, added, grown) in enumerate(settings):
        for i in range(2):
            stride, to = 2 if stage > 0 and i == 0 else 1, added + grown
            block = DualPath(added, ConvNorm(of, to, 1, stride=stride) if i == 0 else None)
            block.add("1", conv_relu(of, inner, 1))
            block.add("2", conv_relu(inner, inner, 3, stride=stride, groups=32))
            block.add("3", ConvNorm(inner, to, 1))
            network.add(f"stage{stage + 1}.{i}", block)
            of = added + (i + 2) * grown
    return network.classify(of)


def mobilenet():
    of = 32
    network = Network().add("stem", conv_relu(3, of, 3))
    widths = [64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]
    for i, to in enumerate(widths):
        stride = 2 if i in (1, 3, 5, 11) else 1
        network.add(f"{i}.depthwise", conv_relu(of, of, 3, stride=stride, groups=of))
        network.add(f"{i}.pointwise", conv_relu(of, to, 1))
        of = to
    return network.classify(of)


def shuffle(groups):
    return lambda x: x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class Inverted(Path):
    def forward(self, x):
        return super().forward(x) + self.around(x)


def mobilenet_v2():
    of = 32
    network = Network().add("stem", conv_relu(3, of, 3))
    for stage, (times, to, count, first) in enumerate(MobileNet.STAGES):
        for i in range(count):
            inner, stride = times * of, first if i == 0 else 1
            projection = ConvNorm(of, to, 1) if stride == 1 and of != to else None
            path = Inverted(projection) if stride == 1 else Network()
            path.add("expand", conv_relu(of, inner, 1))
            path.add("depthwise", conv_relu(inner, inner, 3, stride=stride, groups=inner))
            path.add("project", ConvNorm(inner, to, 1))
            network.add(f"stage{stage + 1}.{i}", path)
            of = to
    return network.add("last", conv_relu(of, 1280, 1)).classify(1280)


class Unit(Network):
    def __init__(self, halves):
        super().__init__()
        self.halves = halves

    def forward(self, x):
        y = super().forward(x)
        return F.relu(torch.cat([y, F.avg_pool2d(x, 3, 2, 1)], 1) if self.halves else y + x)


def shufflenet_g2():
    of, groups = 24, 2
    network = Network().add("stem", conv_relu(3, of, 1))
    for stage, (width, count) in enumerate(zip([200, 400, 800], [4, 8, 4])):
        for i in range(count):
            to, first = width - of if i == 0 else width, 1 if of == 24 else groups
            inner = to // 4
            unit = (
                Unit(i == 0)
                .add("1", conv_relu(of, inner, 1, groups=first))
                .then(shuffle(first))
                .add("2", conv_relu(inner, inner, 3, stride=2 if i == 0 else 1, groups=inner))
                .add("3", ConvNorm(inner, to, 1, groups=groups))
            )
            network.add(f"stage{stage + 1}.{i}", unit)
            of = width
    return network.classify(of)


class HalfPath(Network):
    def forward(self, x):
        kept, rest = x.chunk(2, 1)
        return torch.cat([kept, super().forward(rest)], 1)


def shufflenet_v2():
    of = 24
    network = Network().add("stem", conv_relu(3, of, 3))
    for stage, (width, count) in enumerate(zip([116, 232, 464], [4, 8, 4])):
        for i in range(count):
            half, stride = width // 2, 2 if i == 0 else 1
            path = HalfPath() if i > 0 else Network()
            path.add("1", conv_relu(of if i == 0 else half, half, 1))
            path.add("2", ConvNorm(half, half, 3, stride=stride, groups=half))
            path.add("3", conv_relu(half, half, 1))
            if i == 0:
                other = Network().add("other.1", ConvNorm(of, of, 3, stride=stride, groups=of))
                path = Branches(other.add("other.2", conv_relu(of, half, 1)), path)
            network.add(f"stage{stage + 1}.{i}", path).then(shuffle(2))
        of = width
    return network.add("last", conv_relu(of, 1024, 1)).classify(1024)


class Dropped(Network):
    """A path that is added to its input, for each image with probability `1 - p`."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        ones = torch.ones(len(x), 1, 1, 1, dtype=x.dtype)
        return super().forward(x) * F.dropout(ones, self.p) + x


def efficientnet_b0():
    of, number = 32, 0
    network = Network().add("stem", ConvNorm(3, of, 3, F.silu))
    settings = [
        (1, 16, 1, 3, 1),
        (6, 24, 2, 3, 2),
        (6, 40, 2, 5, 2),
        (6, 80, 3, 3, 2),
        (6, 112, 3, 5, 1),
        (6, 192, 4, 5, 2),
        (6, 320, 1, 3, 1),
    ]
    for stage, (times, to, count, size, first) in enumerate(settings):
        for i in range(count):
            inner, stride = times * of, first if i == 0 else 1
            path = Dropped(0.2 * number / 16) if (stride, of) == (1, to) else Network()
            if times > 1:
                path.add("expand", ConvNorm(of, inner, 1, F.silu))
            settings_of = {"stride": stride, "groups": inner}
            path.add("depthwise", ConvNorm(inner, inner, size, F.silu, **settings_of))
            path.add("gate", SqueezeExcite(inner, of // 4, F.silu))
            path.add("project", ConvNorm(inner, to, 1))
            network.add(f"stage{stage + 1}.{i}", path)
            of, number = to, number + 1
    return network.then(lambda x: F.dropout(x.mean((2, 3)), 0.2)).add("head", nn.Linear(of, 10))


def regnet(widths, depths, group, gated):
    of = 64

    def block(to, stride):
        nonlocal of
        projection = ConvNorm(of, to, 1, stride=stride) if (of, stride) != (to, 1) else None
        made = Residual(projection).add("1", conv_relu(of, to, 1))
        made.add("2", conv_relu(to, to, 3, stride=stride, groups=to // group))
        if gated:
            made.add("gate", SqueezeExcite(to, (of + 2) // 4))
        of = to
        return made.add("3", ConvNorm(to, to, 1))

    network = Network().add("stem", conv_relu(3, 64, 3))
    return stages(network, widths, depths, block, strided=2).classify(widths[-1])


class Tree(nn.Module):
    """Layers one after another, each of whose outputs goes into the root."""

    def __init__(self, of, to, level, stride):
        super().__init__()
        make = plain if level == 1 else lambda *sizes: Tree(*sizes[:2], level - 1, sizes[2])
        self.left, self.right = make(of, to, stride), make(to, to, 1)
        self.root = conv_relu(2 * to, to, 1)

    def forward(self, x):
        left = self.left(x)
        return self.root(torch.cat([left, self.right(left)], 1))


def dla_simple():
    network, of = Network(), 3
    for i, to in enumerate([16, 16, 32]):
        network.add(f"stem.{i}", conv_relu(of, to, 3))
        of = to
    for i, (to, level, stride) in enumerate([(64, 1, 1), (128, 2, 2), (256, 2, 2), (512, 1, 2)]):
        network.add(f"tree{i + 1}", Tree(of, to, level, stride))
        of = to
    return network.classify(of)


class Vit(nn.Module):
    """Patches of 4x4 and a token for the class."""

    def __init__(self, layers):
        super().__init__()
        width, patch = 192, 4
        self.patches = nn.Conv2d(3, width, patch, patch)
        token = lambda count: nn.Parameter(0.02 * torch.randn(1, count, width))
        self.register_parameter("class", token(1))
        self.positions = token(1 + (32 // patch) ** 2)
        settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(width, 3, 4 * width, **settings)
        norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        token = self.get_parameter("class").expand(len(x), -1, -1)
        return self.head(self.encoder(torch.cat([token, tokens], 1) + self.positions)[:, 0])


def gelu(x):
    return F.gelu(x, approximate="tanh")


class PooledBlock(nn.Module):
    """Two convolutions, each with a norm whose weight is frozen; a pool after the first."""

    def __init__(self, of, to):
        super().__init__()
        for name, width in (("1", of), ("2", to)):
            part = conv(width, to, 3)
            part.norm = nn.BatchNorm2d(to)
            part.norm.weight.requires_grad_(False)
            self.add_module(name, part)

    def forward(self, x):
        first, second = self._modules["1"], self._modules["2"]
        x = gelu(first.norm(F.max_pool2d(first(x), 2)))
        return gelu(second.norm(second(x)))


def airbench():
    of = 24
    whitening = nn.Conv2d(3, of, 2, bias=False).requires_grad_(False)
    network = Network().add("whitening", whitening).then(gelu)
    for i, to in enumerate([64, 256, 256]):
        network.add(f"block{i + 1}", PooledBlock(of, to))
        of = to
    network.then(lambda x: F.max_pool2d(x, 3).flatten(1))
    return network.add("head", nn.Linear(of, 10, bias=False)).then(lambda x: x / 9)


MODELS = {
    "vgg11": vgg11,
    "resnet18": resnet18,
    "preact-resnet18": lambda: preact(gated=False),
    "senet18": lambda: preact(gated=True),
    "googlenet": googlenet,
    "densenet-cifar": densenet_cifar,
    "resnext29-32x4d": resnext29,
    "dpn26": dpn26,
    "mobilenet": mobilenet,
    "mobilenet-v2": mobilenet_v2,
    "shufflenet-g2": shufflenet_g2,
    "shufflenet-v2-x1": shufflenet_v2,
    "efficientnet-b0": efficientnet_b0,
    "regnetx-200mf": lambda: regnet([24, 56, 152, 368], [1, 1, 4, 7], 8, False),
    "regnety-400mf": lambda: regnet([32, 64, 160, 384], [1, 2, 7, 12], 16, True),
    "dla-simple": dla_simple,
    "vit-tiny": lambda: Vit(12),
    "airbench": airbench,
}
