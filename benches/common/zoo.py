"""Steps of the networks of `zoo.rs`, in PyTorch: the same batches, losses and optimizers."""

import torch
import torch.nn.functional as F

from cifar_networks import MODELS
from networks import SGD
from zoo_networks import Dcgan, DenseNet, Generator, LstmLm, MobileNet, NanoGpt, UNet, ViT

# Those of images: PyTorch may hold them in either layout.
IMAGES = {"mobilenet_v2", "dcgan", "densenet", "unet", "cifar"}


def scrambled(shape, seed):
    """The numbers of `scrambled` in `values.rs`: unsigned ones of 32 bits, in wrapping ones of 64."""
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 2654435761 + (seed + 1) * 40503) & 0xFFFFFFFF
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)).view(shape)


def noise(shape, seed):
    return (scrambled(shape, seed).double() / 2**31 - 1).float()


def tokens(vocabulary, shape, seed):
    return scrambled(shape, seed) % vocabulary


def known_values(shape, seed):
    values = noise(shape, seed)
    if len(shape) == 1:
        return values * 0.5 + 0.5
    return values * (3 * shape[0] / values.numel()) ** 0.5


def classification(model, network, layout):
    x = noise((network["batch"], 3, 32, 32), 0)
    x, y = x if layout is None else x.to(memory_format=layout), torch.arange(len(x)) % 10
    return lambda: F.cross_entropy(model(x).float(), y)


def prediction(model, vocabulary, shape):
    x, following = tokens(vocabulary, shape, 0), tokens(vocabulary, shape, 1).flatten()
    return lambda: F.cross_entropy(model(x).flatten(0, 1).float(), following)


def segmentation(model, network, layout):
    batch, size = network["batch"], network["size"]
    x = noise((batch, 3, size, size), 0).to(memory_format=layout)
    mask = (noise((batch, 1, size, size), 1) >= 0).float()
    return lambda: F.binary_cross_entropy_with_logits(model(x).float(), mask)


def model_of(network):
    match network:
        case {"name": "mobilenet_v2", "width": width}:
            return MobileNet(width)
        case {"name": "vit_tiny", "layers": layers}:
            return ViT(layers)
        case {"name": "nanogpt", "size": size}:
            return NanoGpt(size)
        case {"name": "dcgan", "width": width}:
            return Dcgan(width)
        case {"name": "lstm_lm", "vocabulary": vocabulary, "width": width, "layers": layers}:
            return LstmLm(vocabulary, width, layers)
        case {"name": "densenet", "depth": depth, "growth": growth}:
            return DenseNet(depth, growth)
        case {"name": "cifar", "model": model}:
            return MODELS[model]()
        case {"name": "unet", "channels": channels}:
            return UNet(channels)


def loss_of(model, network, layout):
    """What a step minimises, of a network with one loss."""
    match network:
        case {"name": "nanogpt", "size": {"vocabulary": vocabulary, "context": context}}:
            return prediction(model, vocabulary, (network["batch"], context))
        case {"name": "lstm_lm", "vocabulary": vocabulary, "context": context}:
            return prediction(model, vocabulary, (network["batch"], context))
        case {"name": "unet"}:
            return segmentation(model, network, layout)
    return classification(model, network, layout)


class Training:
    """Steps of a network. `autocast` makes the scope of a forward pass."""

    def __init__(self, network, layout, autocast):
        self.model, self.autocast = model_of(network), autocast
        if layout is not None:
            self.model.to(memory_format=layout)
        if network["name"] == "dcgan":
            self.step = self.adversarial(network["batch"], layout)
            return
        self.loss = loss_of(self.model, network, layout)
        if network["name"] in ("mobilenet_v2", "densenet", "cifar"):
            self.optimizer = torch.optim.SGD(self.model.parameters(), **SGD)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)

    def step(self):
        with self.autocast():
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def adversarial(self, batch, layout):
        """A function that does a step of both networks of a DCGAN."""
        parts = generator, discriminator = self.model.generator, self.model.discriminator
        settings = {"lr": 2e-4, "betas": (0.5, 0.999)}
        optimizers = [
            torch.optim.AdamW(part.parameters(), weight_decay=0.0, fused=True, **settings)
            for part in parts
        ]
        real = noise((batch, 3, 32, 32), 0).to(memory_format=layout)
        latent = noise((batch, Generator.LATENT, 1, 1), 1)
        yes, no = torch.ones(batch, 1, 1, 1), torch.zeros(batch, 1, 1, 1)

        def judged(x, verdict):
            return F.binary_cross_entropy_with_logits(discriminator(x).float(), verdict)

        def step():
            with self.autocast():
                fake = generator(latent)
                apart = judged(real, yes) + judged(fake.detach(), no)
            apart.backward()
            optimizers[1].step()
            optimizers[1].zero_grad(set_to_none=True)
            with self.autocast():
                alike = judged(fake, yes)
            alike.backward()
            optimizers[0].step()
            self.model.zero_grad(set_to_none=True)
            return apart.detach() + alike.detach()

        return step

    def check(self, steps):
        """What the other side must have too: how many parameters, and losses from known values on."""
        parameters = sorted(self.model.named_parameters())
        with torch.no_grad():
            for i, (_, parameter) in enumerate(parameters):
                parameter.copy_(known_values(parameter.shape, i))
        numbers = {"parameters": sum(parameter.numel() for _, parameter in parameters)}
        for i in range(steps):
            numbers[f"loss {i + 1}"] = self.step().item()
        return numbers
