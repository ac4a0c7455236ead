# SPDX-License-Identifier: Apache-2.0
"""A small language model of characters whose attention is heed's, or the same written in PyTorch, side by side.

    python3 examples/torch/train.py build/lib/libheed_torch.so                     # trains both, prints losses and times of a step
    python3 examples/torch/train.py build/lib/libheed_torch.so --shape 4,8,512,64  # times of attention alone

Both start from the same weights and see the same batches. --variant dar: resonant attention, whose module in PyTorch follows its
source; sdpa: plain attention.
"""
import argparse
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def in_torch(q, k, v, strength, causal=True):
    """Resonant attention as its source writes it: a sigmoid of the cosine beside the scores."""
    score = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if strength is not None:
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        score = score + strength.view(-1, 1, 1) * torch.sigmoid(8 * (cosine - 0.6))
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return score.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def in_heed(q, k, v, strength, causal=True):
    if strength is None:
        return torch.ops.heed.sdpa(q, k, v, causal=causal)
    return torch.ops.heed.dar(q, k, v, strength=strength, causal=causal)


class Attention(nn.Module):
    def __init__(self, width, heads, resonant, run):
        super().__init__()
        self.heads, self.run = heads, run
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.strength = nn.Parameter(torch.full((heads,), 0.3)) if resonant else None

    def forward(self, x):
        batch, length, width = x.shape
        # (batch, len, 3, heads, dim): heed reads queries, keys and values where they lie.
        q, k, v = (y.transpose(1, 2) for y in self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2))
        return self.out(self.run(q, k, v, self.strength).transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(self, words, width, heads, depth, length, resonant, run):
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(width), Attention(width, heads, resonant, run), nn.LayerNorm(width),
                           nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))])
            for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids):
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for norm, attention, norm_of_mlp, mlp in self.blocks:
            x = x + attention(norm(x))
            x = x + mlp(norm_of_mlp(x))
        return self.head(self.norm(x))


def train(a, run, ids, words):
    torch.manual_seed(a.seed)
    model = Model(words, a.width, a.heads, a.depth, a.length, a.variant == "dar", run)
    optimiser = torch.optim.AdamW(model.parameters(), lr=a.lr)
    losses, times = [], []
    for _ in range(a.steps):
        at = torch.randint(len(ids) - a.length, (a.batch,))
        batch = torch.stack([ids[n : n + a.length + 1] for n in at])
        start = time.perf_counter()
        optimiser.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, sorted(times)[len(times) // 2]


def times_of(run, q, k, v, strength):
    """Medians of forward and backward, in seconds."""
    forward, backward = [], []
    for _ in range(15):
        start = time.perf_counter()
        out = run(q, k, v, strength)
        forward.append(time.perf_counter() - start)
        start = time.perf_counter()
        out.backward(torch.ones_like(out))
        backward.append(time.perf_counter() - start)
    return sorted(forward)[7], sorted(backward)[7]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", help="libheed_torch.so")
    parser.add_argument("--variant", choices=("dar", "sdpa"), default="dar")
    parser.add_argument("--shape", help="B,H,T,d: times of attention alone, in place of training")
    parser.add_argument("--text", default=__file__, help="file to train on; this program by default")
    parser.add_argument("--lr", type=float, default=1e-3)
    for name, value in dict(width=128, heads=4, depth=2, length=128, batch=8, steps=40, seed=1).items():
        parser.add_argument("--" + name, type=int, default=value)
    a = parser.parse_args()
    torch.ops.load_library(a.library)
    if a.shape:
        b, h, t, d = map(int, a.shape.split(","))
        q, k, v = (torch.randn(b, t, h, d).transpose(1, 2).requires_grad_() for _ in range(3))
        strength = torch.full((h,), 0.3, requires_grad=True) if a.variant == "dar" else None
        ours, theirs = times_of(in_heed, q, k, v, strength), times_of(in_torch, q, k, v, strength)
        for n, name in enumerate(("forward", "backward")):
            print(f"{name:9} heed {1e3 * ours[n]:9.2f} ms   PyTorch {1e3 * theirs[n]:9.2f} ms   {theirs[n] / ours[n]:.1f} times")
        return 0
    text = open(a.text, encoding="utf-8").read()
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    ours, step = train(a, in_heed, ids, len(letters))
    theirs, their_step = train(a, in_torch, ids, len(letters))
    worst = max(abs(x - y) for x, y in zip(ours, theirs))
    print(f"heed     loss {ours[0]:.4f} to {ours[-1]:.4f}, {1e3 * step:.1f} ms a step")
    print(f"PyTorch  loss {theirs[0]:.4f} to {theirs[-1]:.4f}, {1e3 * their_step:.1f} ms a step: {their_step / step:.2f} times as long")
    print(f"losses differ by {worst:.1e} at most")
    return 0 if worst < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
