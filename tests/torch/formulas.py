# SPDX-License-Identifier: Apache-2.0
"""The variants of heed in PyTorch's words, written from the formulas at the top of include/heed/ops/*.hpp.

Each function takes query, key and value, (batch, heads, len, dim) with as many heads each, the additive mask that all of
them share (0 or -inf, or a bias), and the parameters of the operator by their names. Matrices of weights are (len, len):
these are for comparison, not for use.
"""
import torch


def scores(q, k, mask):
    return q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + mask


def per_head(x):
    return x.reshape(-1, 1, 1)


def softmax(s):
    return torch.softmax(s, -1)


def unit(x, eps=1e-8):
    return x / (x.norm(dim=-1, keepdim=True) + eps)


def sdpa(q, k, v, mask):
    return softmax(scores(q, k, mask)) @ v


def dar(q, k, v, mask, strength, vigilance, sharpness, feedback, steps=1):
    cosine = unit(q) @ unit(k).transpose(-2, -1)
    gate = torch.zeros_like(cosine)
    for _ in range(steps):
        gate = torch.sigmoid(per_head(sharpness) * (per_head(feedback) * gate + cosine - per_head(vigilance)))
    return softmax(scores(q, k, mask) + per_head(strength) * gate) @ v


def halves(x):
    return x.chunk(2, -1)


def differential(q, k, v, mask, lambda_):
    (q1, q2), (k1, k2) = halves(q), halves(k)
    return (softmax(scores(q1, k1, mask)) - per_head(lambda_) * softmax(scores(q2, k2, mask))) @ v


def differential_v1(q, k, v, mask, lambda_q1, lambda_k1, lambda_q2, lambda_k2, weight, lambda_init=0.2):
    rate = (lambda_q1 @ lambda_k1).exp() - (lambda_q2 @ lambda_k2).exp() + lambda_init
    out = differential(q, k, v, mask, rate.reshape(1))
    return (1 - lambda_init) * out * (out.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def differential_v2(q, k, v, mask, extra):
    q1, q2 = q[:, 0::2], q[:, 1::2]
    return (softmax(scores(q1, k, mask)) - torch.sigmoid(extra) * softmax(scores(q2, k, mask))) @ v


def intent(q, k, v, mask, extra):
    return torch.sigmoid(extra) * sdpa(q, k, v, mask)


def intent_from_q(q, k, v, mask, gate_weight):
    return torch.sigmoid(q @ gate_weight) * sdpa(q, k, v, mask)


def intent_calculated(q, k, v, mask, gate_query_weight, gate_key_weight, gate_value_weight):
    gate = q @ gate_query_weight + k @ gate_key_weight + v @ gate_value_weight
    return torch.sigmoid(gate) * sdpa(q, k, v, mask)


def ode(q, k, v, mask, rho, eta, steps=5):
    """The source's loop: a <- softmax(a + eta (S - a)), over the keys that the mask shows."""
    distance = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
    drive = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 - per_head(rho) * distance
    hidden = torch.isinf(mask).expand_as(drive)
    a = (~hidden).to(q.dtype)
    a = a / a.sum(-1, keepdim=True)
    for _ in range(steps):
        a = softmax((a + per_head(eta) * (drive - a)).masked_fill(hidden, float("-inf")))
    return a @ v


def dialectical(q, k, v, mask, v_pos_weight, v_neg_weight, synth_weight, synth_bias, gate_weight, gate_bias, b_pos, b_neg,
                steps=3):
    """b_pos and b_neg shift the scores of a softmax each, where they cancel."""
    mixed = sdpa(q, k, v, mask)
    up, un = mixed @ v_pos_weight.T, mixed @ v_neg_weight.T
    tension = torch.sigmoid(-torch.cosine_similarity(up, un, dim=-1, eps=1e-6)).unsqueeze(-1)
    z = q
    for _ in range(steps):
        g = torch.sigmoid(z @ gate_weight.T + gate_bias)
        a = torch.cat([up, un, z], -1) @ synth_weight.T + synth_bias
        z = z + g * tension * torch.nn.functional.silu(a)
    return z


def prototype(q, k, v, mask, W, strength, pull):
    category = (unit(k) @ unit(W).transpose(-2, -1)).argmax(-1)
    winner = (unit(q) @ unit(W).transpose(-2, -1)).argmax(-1)
    rows = lambda of, which: torch.stack([torch.stack([of[h][w[h]] for h in range(of.shape[0])]) for w in which])
    resonance = (q @ rows(unit(W), category).transpose(-2, -1)) / (q.norm(dim=-1, keepdim=True) + 1e-8)
    mixed = softmax(scores(q, k, mask) + per_head(strength) * resonance) @ v
    return mixed + per_head(pull) * (rows(W, winner) - q)
