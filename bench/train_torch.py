# SPDX-License-Identifier: Apache-2.0
"""Training throughput of the GPT-2 stack of `heed_lm train` in PyTorch, for a comparison side by side.

    OMP_NUM_THREADS=2 OPENBLAS_CORETYPE=Zen /usr/bin/python3 bench/train_torch.py --steps 12
    heed_lm train --text FILE --width 256 --heads 4 --depth 4 --len 256 --batch 16 --steps 12 --eval-every 0

Debian's packages: python3-torch and libopenblas0-openmp, without which PyTorch multiplies 40 times slower. OPENBLAS_CORETYPE is the
processor's: Zen or Haswell for AVX2, SkylakeX or Cooperlake for AVX-512.
"""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x, hidden):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, hidden):
        x = x + self.attn(self.ln1(x), hidden)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, words, width, heads, depth, length):
        super().__init__()
        self.embed, self.position = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("hidden", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, ids, targets):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, self.hidden)
        logits = self.norm(x) @ self.embed.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, value in dict(words=65, width=256, heads=4, depth=4, length=256, batch=16, steps=12).items():
        parser.add_argument("--" + name, type=int, default=value)
    a = parser.parse_args()
    torch.manual_seed(1)
    model = Gpt(a.words, a.width, a.heads, a.depth, a.length)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(a.words, (a.batch, a.length + 1))
    times = []
    for _ in range(a.steps):
        start = time.perf_counter()
        optimiser.zero_grad()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        times.append(time.perf_counter() - start)
    median = sorted(times)[len(times) // 2]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads: "
          f"{a.batch * a.length / median:.0f} tokens/s, loss {loss.item():.4f}")


main()
