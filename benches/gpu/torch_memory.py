"""Counts what PyTorch's tensors hold at the peak of an eager training step, on a machine without a GPU.

Tensors without memory of their own (`FakeTensorMode`) go through the step of `torch_gpu.py`, with the casts of
autocast on CUDA. Not counted: workspaces of cuBLAS and cuDNN, fragments of the allocator.

    python3 torch_memory.py
"""

import contextlib
import sys
import weakref
from pathlib import Path

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parent.parent / "common"))
from networks import Gpt, ResNet

BLOCK = 512  # bytes that the allocator rounds to
HALF = {"conv2d", "linear", "scaled_dot_product_attention"}
FULL = {"layer_norm", "cross_entropy"}
SIZES = {
    "resnet18": {"width": 64, "stages": [2, 2, 2, 2], "bottleneck": False},
    "resnet50": {"width": 64, "stages": [3, 4, 6, 3], "bottleneck": True},
    "gpt2": {"vocabulary": 50257, "context": 1024, "width": 768, "layers": 12, "heads": 12},
}


class Autocast(TorchFunctionMode):
    """The casts of `torch.autocast("cuda", torch.bfloat16)`, which needs a GPU, for these networks."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def to(self, x, dtype):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == dtype:
            return x
        if not x.requires_grad or not x.is_leaf or dtype is torch.float32:
            return x.to(dtype)
        if id(x) not in self.cache:
            self.cache[id(x)] = x.to(dtype)
        return self.cache[id(x)]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        dtype = torch.bfloat16 if name in HALF else torch.float32 if name in FULL else None
        given = args, kwargs or {}
        if dtype:
            given = tree_map(lambda x: self.to(x, dtype), given)
        return function(*given[0], **given[1])


class Memory(TorchDispatchMode):
    """What is held now, and was at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.held = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.held:
                    self.held[storage._cdata] = -(-storage.nbytes() // BLOCK) * BLOCK
                    self.now += self.held[storage._cdata]
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.drop, storage._cdata)
        return out

    def drop(self, key):
        self.now -= self.held.pop(key)


def peak(name, batch, half):
    """Of the second of two steps; the first makes the optimizer's state."""
    size, memory, state = SIZES[name], Memory(), {}
    moments = 1 if "stages" in size else 2
    with FakeTensorMode(), memory:
        if moments == 1:
            model, x = ResNet(size), torch.empty(batch, 3, 32, 32)
            x = x.to(memory_format=torch.channels_last)
            y = torch.empty(batch, dtype=torch.long)
        else:
            model, x = Gpt(size), torch.empty(batch, size["context"], dtype=torch.long)
            y = torch.empty(x.numel(), dtype=torch.long)
        for _ in range(2):
            with Autocast() if half else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in model.parameters():
                state.setdefault(p, [torch.empty_like(p) for _ in range(moments)])
                p.grad = None
    return memory.most


if __name__ == "__main__":
    print(f"PyTorch {torch.__version__}: peak of a training step, MiB")
    steps = [("resnet18", 128), ("resnet18", 512), ("resnet50", 128), ("resnet50", 512), ("gpt2", 8)]
    for name, batch in steps:
        f32, bf16 = (peak(name, batch, half) / 2**20 for half in (False, True))
        print(f"{name:9} batch {batch:4}   f32 {f32:7.0f}   bf16 {bf16:7.0f}", flush=True)
