"""What the PyTorch originals share: data and initial values that `../run.rs` has too, and the loop around a program."""

import torch


def hashed(shape, seed):
    """Whole numbers from 0 to 2**32 - 1, of a hash of their position."""
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 2654435761 + (seed + 1) * 40503) & 0xFFFFFFFF
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)).view(shape)


def noise(shape, seed):
    """Numbers from -1 to 1."""
    return (hashed(shape, seed).double() / 2**31 - 1).float()


def initial(shape, seed):
    """Vectors, which are norms' and biases, are positive. Matrices have the variance of 1 over the fan-in."""
    values = noise(shape, seed)
    if len(shape) == 1:
        return values * 0.5 + 0.5
    return values * (3 * shape[0] / values.numel()) ** 0.5


class Run:
    def __init__(self, dtype, steps):
        self.dtype, self.steps, self.losses = dtype, steps, []
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

    def autocast(self):
        return torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32)

    def initialised(self, model):
        """The model, its parameters set by the order of their names."""
        with torch.no_grad():
            for seed, (_, parameter) in enumerate(sorted(model.named_parameters())):
                parameter.copy_(initial(parameter.shape, seed))
        return model

    def images(self, batch):
        """Noise over the pattern of one of ten classes, and the class."""
        patterns = noise((10, 3, 32, 32), 1000)
        for step in range(self.steps):
            classes = hashed((batch,), 2000 + step) % 10
            yield patterns[classes] * 0.5 + noise((batch, 3, 32, 32), step) * 0.5, classes

    def masks(self, batch, size):
        """Images of blocks in noise, and where the blocks are."""
        for step in range(self.steps):
            blocks = (noise((batch, 1, size // 8, size // 8), 3000 + step) >= 0).float()
            mask = blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)
            yield noise((batch, 3, size, size), step) * 0.5 + mask, mask

    def tokens(self, vocabulary, batch, length):
        """Sequences that count in steps of 1, 2 or 3, and the tokens that follow."""
        for step in range(self.steps):
            first, pace = hashed((2, batch, 1), 4000 + step)
            text = (first % vocabulary + torch.arange(length + 1) * (pace % 3 + 1)) % vocabulary
            yield text[:, :-1], text[:, 1:]

    def latent(self, shape, step):
        """What a generator makes an image of."""
        return noise(shape, 5000 + step)

    def report(self, loss):
        self.losses.append(loss.item())
