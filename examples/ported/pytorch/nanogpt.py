"""nanoGPT: a tied head, four micro-batches to a step, clipping, and no weight decay for norms and biases."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, MICRO_BATCHES = 50, 32, 96, 3, 3, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class NanoGpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, targets):
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        x = self.norm(self.blocks(x))
        logits = F.linear(x, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(run):
    model = run.initialised(NanoGpt())
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    for x, targets in run.tokens(VOCABULARY, MICRO_BATCHES * 4, CONTEXT):
        total = 0.0
        for x, targets in zip(x.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)):
            with run.autocast():
                loss = model(x, targets) / MICRO_BATCHES
            run.scaler.scale(loss).backward()
            total += loss.detach()
        run.scaler.unscale_(adamw)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.scaler.step(adamw)
        run.scaler.update()
        adamw.zero_grad()
        run.report(total)
