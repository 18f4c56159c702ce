"""An LSTM language model: truncated backpropagation through time, the state handed from piece to piece."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, PIECES = 50, 64, 4


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, state):
        x, state = self.lstm(self.tokens(x), state)
        return self.head(x), state


def train(run):
    model = run.initialised(LanguageModel())
    adamw = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for x, targets in run.tokens(VOCABULARY, 8, PIECES * 16):
        state, total = None, 0.0
        for x, targets in zip(x.chunk(PIECES, 1), targets.chunk(PIECES, 1)):
            with run.autocast():
                logits, state = model(x, state)
                loss = F.cross_entropy(logits.transpose(1, 2), targets)
            run.scaler.scale(loss).backward()
            run.scaler.unscale_(adamw)
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            run.scaler.step(adamw)
            run.scaler.update()
            adamw.zero_grad()
            state = tuple(part.detach() for part in state)
            total += loss.detach() / PIECES
        run.report(total)
