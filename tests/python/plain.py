# SPDX-License-Identifier: Apache-2.0
"""The variants in plain NumPy, written from the formulas at the head of include/heed/ops/*.hpp: what heed.py is held against.

All of it is (batch, heads, len, ...) in double, with every key of every query at once, and slow.
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(scores, seen):
    """Rows of weights; 0 for what is hidden, and for rows that see nothing."""
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True)
    e = np.where(seen, np.exp(scores - np.where(np.isfinite(top), top, 0)), 0)
    return e / np.maximum(e.sum(-1, keepdims=True), np.finfo(float).tiny)


def norm(x):
    return np.sqrt((x * x).sum(-1))


def unit(x, eps):
    return x / (norm(x) + eps)[..., None]


def per_head(x):
    """A number, or one per head, beside (batch, heads, len_q, len_kv)."""
    return np.reshape(np.asarray(x, float), (1, -1, 1, 1))


class Rows:
    """What masks do: `seen` and `added` (batch, heads, len_q, len_kv), and a soft cap."""

    def __init__(self, seen, added=0.0, soft_cap=None):
        self.seen, self.added, self.soft_cap = seen, added, soft_cap

    def logits(self, dots, scale):
        logits = scale * dots
        return logits if self.soft_cap is None else self.soft_cap * np.tanh(logits / self.soft_cap)


def dots(q, k):
    return np.einsum("bhic,bhjc->bhij", q, k)


def mix(weights, v):
    return np.einsum("bhij,bhjc->bhic", weights, v)


def grouped(x, heads):
    """Keys or values for all heads that share them."""
    return np.repeat(x, heads // x.shape[1], 1)


# --- scores: what a pair scores before bias and mask -------------------------------------------------------------------

def dar_gate(c, rho, alpha, beta, gate, iterations, converged):
    def g(y):
        if gate == "tanh":
            return (1 + np.tanh(alpha * y)) / 2
        if gate == "piecewise_linear":
            return np.clip(alpha * y + 0.5, 0, 1)
        return sigmoid(alpha * y)
    if gate == "centred":
        c = (c + 1) / 2
    r = np.zeros_like(c)
    for _ in range(2000 if converged else max(1, iterations)):
        r = g(beta * r - (rho - c))
    return r


def dar_score(q, k, logits, strength=0.3, vigilance=0.6, sharpness=8.0, feedback=0.5, projection=None, gate="logistic",
              iterations=0, converged=False, adaptive=False, eps=1e-8):
    qp, kp = (q, k) if projection is None else (q @ projection, k @ projection)
    c = dots(qp, kp) / ((norm(qp) + eps)[..., :, None] * (norm(kp) + eps)[..., None, :])
    r = dar_gate(c, per_head(vigilance), per_head(sharpness), per_head(feedback), gate, iterations, converged)
    L = per_head(strength)
    if adaptive:
        w = norm(q)[..., :, None] * norm(k)[..., None, :] / q.shape[-1]
        L = L * w / (1 + w)
    return logits + L * r


def resonant_drive(q, k, logits, rho):
    return logits + per_head(rho) * (2 * dots(q, k) - (k * k).sum(-1)[..., None, :])


def resonant_flow(drive, seen, eta, mode, steps):
    eta = per_head(eta)
    if mode in ("steps", "equilibrium"):
        a = softmax(eta * drive, seen)
        for _ in range(steps - 1 if mode == "steps" else 500):
            a = softmax((1 - eta) * a + eta * drive, seen)
        return a
    count = np.maximum(seen.sum(-1, keepdims=True), 1)
    centred = drive - np.where(seen, drive, 0).sum(-1, keepdims=True) / count
    w = 1 - (1 - eta) ** steps if mode == "lagrange" else 1.0
    return np.where(seen, 1 / count + w * centred, 0)


# --- readouts ----------------------------------------------------------------------------------------------------------

def gate_rows(logits, out, bias):
    return sigmoid(logits + (0 if bias is None else per_head(bias))) * out


def dialectical(q, m, p, max_steps=3, halt_eps=1e-3, halting="per_token", spare_eps=0.01):
    d = q.shape[-1]
    plus, minus = m @ p["v_pos.weight"].T, m @ p["v_neg.weight"].T
    synth = p["synth.weight"]
    fixed = np.concatenate([plus, minus], -1) @ synth[:, :2 * d].T + p["synth.bias"]
    cosine = (plus * minus).sum(-1) / (np.maximum(norm(plus), 1e-6) * np.maximum(norm(minus), 1e-6))
    tension = sigmoid(-cosine)[..., None]

    def step(z):
        g = sigmoid(z @ p["gate.weight"].T + p["gate.bias"])
        a = fixed + z @ synth[:, 2 * d:].T
        return z + g * tension * a * sigmoid(a)
    z, moving = q, np.ones(q.shape[:-1] + (1,), bool)
    if halting == "adaptive":
        out, spent, steps = np.zeros_like(q), np.zeros_like(tension), np.zeros_like(tension)
        for n in range(1, max_steps + 1):
            z = np.where(moving, step(z), z)
            h = sigmoid(np.einsum("bhic,hc->bhi", z, p["halt.weight"]) + p["halt.bias"][None, :, None])[..., None]
            last = moving & ((spent + h >= 1 - spare_eps) | (n == max_steps))
            out = out + np.where(last, 1 - spent, np.where(moving, h, 0)) * z
            steps = np.where(last, n + 1 - spent, steps)
            spent, moving = spent + np.where(moving, h, 0), moving & ~last
        return out, steps
    if halting == "outside":
        trail = [step(z)]
        while len(trail) < max_steps:
            trail.append(step(trail[-1]))
        return trail[-1], np.concatenate(trail[:-1], -1)
    for _ in range(max_steps):
        moved = np.where(moving, step(z), z)
        moving = moving & ((norm(moved - z) >= halt_eps * (norm(z) + 1e-6))[..., None])
        z = moved
    return z, None


def winners(x, W, eps):
    """The prototype of each row with the largest cosine, (batch, heads, len)."""
    return np.einsum("bhic,hmc->bhim", x, unit(W, eps)).argmax(-1)


# --- the variants ------------------------------------------------------------------------------------------------------

VARIANTS = ("sdpa", "dar", "dar-unrolled", "dar-converged", "differential", "differential-v1", "differential-v2", "intent",
            "intent-from-q", "intent-calculated", "ode", "ode-equilibrium", "dialectical", "prototype")


def attention(variant, q, k, v, rows, scale=None, extra=None, p=None):
    """out, and what else the variant gives (steps of adaptive rows), of q, k, v as the caller has them."""
    if variant not in VARIANTS:
        raise NotImplementedError("plain.py has no formula of " + variant)
    p = dict(p or {})
    heads = q.shape[1] // 2 if variant == "differential-v2" else q.shape[1]
    k, v = grouped(k, heads), grouped(v, heads)
    seen = np.broadcast_to(rows.seen, (q.shape[0], heads, q.shape[2], k.shape[2]))

    if variant.startswith("differential"):
        if variant == "differential-v2":
            maps = [(q[:, 0::2], k), (q[:, 1::2], k)]
        else:
            w = q.shape[-1] // 2
            maps = [(q[..., :w], k[..., :w]), (q[..., w:], k[..., w:])]
        s = 1 / np.sqrt(maps[0][0].shape[-1]) if scale is None else scale
        first, second = (softmax(rows.logits(dots(a, b), s) + rows.added, seen) for a, b in maps)
        if variant == "differential":
            lam = per_head(p.get("lambda", 0.05))
        elif variant == "differential-v2":
            lam = sigmoid(extra)
        else:
            lam = np.exp(p["lambda_q1"] @ p["lambda_k1"]) - np.exp(p["lambda_q2"] @ p["lambda_k2"]) + p.get("lambda_init", 0.2)
        out = mix(first - lam * second, v)
        if variant == "differential-v1":
            out = p.get("factor", 0.8) * out / np.sqrt((out * out).mean(-1, keepdims=True) + 1e-5) * p["weight"]
        return out, None

    s = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    logits = rows.logits(dots(q, k), s)
    if variant.startswith("dar"):
        p.setdefault("iterations", 2 if variant == "dar-unrolled" else 0)
        p.setdefault("converged", variant == "dar-converged")
        p.setdefault("feedback", 0.4 if variant == "dar-converged" else 0.5)
        logits = dar_score(q, k, logits, **p)
    if variant.startswith("ode"):
        drive = resonant_drive(q, k, logits, p.get("rho", 0.2)) + rows.added
        mode = p.get("mode", "equilibrium" if variant == "ode-equilibrium" else "steps")
        return mix(resonant_flow(drive, seen, p.get("eta", 0.5), mode, p.get("steps", 5)), v), None
    if variant == "prototype":
        eps, W = p.get("eps", 1e-8), p["W"]
        of_keys = unit(W, eps)[np.arange(heads)[None, :, None], winners(k, W, eps)]
        logits = logits + per_head(p.get("strength", 0.1)) * dots(q, of_keys) / (norm(q) + eps)[..., None]
    mixed = mix(softmax(logits + rows.added, seen), v)
    if variant == "prototype":
        own = W[np.arange(heads)[None, :, None], winners(q, W, eps)]
        mixed = mixed + per_head(p.get("pull", 0.1)) * (own - q)
    elif variant == "intent":
        mixed = gate_rows(extra, mixed, p.get("gate.bias"))
    elif variant == "intent-from-q":
        mixed = gate_rows(np.einsum("bhic,hcd->bhid", q, p["gate.weight"]), mixed, p.get("gate.bias"))
    elif variant == "intent-calculated":
        intent = sum(np.einsum("bhic,hcd->bhid", x, p["gate." + name + "_weight"]) for x, name in ((q, "query"), (k[:, :, :q.shape[2]], "key"), (v[:, :, :q.shape[2]], "value")))
        mixed = gate_rows(intent, mixed, p.get("gate.bias"))
    elif variant == "dialectical":
        options = {name: p[name] for name in ("max_steps", "halt_eps", "halting", "spare_eps") if name in p}
        return dialectical(q, mixed, p, **options)
    return mixed, None
