#!/usr/bin/python3
"""Golden fixtures of keys chosen per query, derived readouts, column scores and learnt keys.

    OMP_NUM_THREADS=1 /usr/bin/python3 second.py --seed 11 --profile visible --out second

Same file format, same conventions and same oracle (float64 PyTorch + autograd) as generate.py;
FORMAT.md defines every variant and tensor.  Choices (which keys are kept) are constants for
differentiation; the metadata `margin` is the smallest gap between a chosen and a rejected score.
"""
import argparse
import math

import torch

import generate as g

NEG_INF = g.NEG_INF


# ------------------------------------------------------------------------------------------------
# operators
# ------------------------------------------------------------------------------------------------

def own_rows(t, first, Tq):
    return t[:, :, first:first + Tq]


def exclusive(y, v_own):
    n = v_own.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    u = v_own / n
    return y - (y * u).sum(-1, keepdim=True) * u


def largest(score, ok, count):
    """The `count` largest visible scores of each row; of equal ones the lower position.  Returns the
    chosen set and the smallest gap, but for ties, between a chosen and a rejected score."""
    s = score.detach().masked_fill(~ok, NEG_INF)
    order = torch.sort(s, dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(s, dtype=torch.bool)
    n = min(count, s.shape[-1])
    kept.scatter_(-1, order.indices[..., :n], True)
    kept &= ok
    margin = math.inf
    if n < s.shape[-1]:
        gap = order.values[..., n - 1] - order.values[..., n]
        gap = gap[torch.isfinite(gap) & (gap != 0)]                   # equal scores: decided by position
        margin = gap.min().item() if gap.numel() else math.inf
    return kept, margin


def spread(keep, query_block, key_block, Tq, Tk):
    """Blocks to pairs."""
    m = keep.repeat_interleave(query_block, -2).repeat_interleave(key_block, -1)
    return m[..., :Tq, :Tk]


def moba(q, k, v, block, count, scale):
    B, H, T, _ = q.shape
    kk = g.share_heads(k, H)
    blocks = -(-T // block)
    mean = torch.stack([kk[:, :, b * block:(b + 1) * block].mean(2) for b in range(blocks)], 2)
    gate = (q @ mean.transpose(-1, -2)).detach()
    of = torch.arange(T)[:, None] // block
    b = torch.arange(blocks)[None, :]
    gate = gate.masked_fill(b == of, math.inf)
    kept, margin = largest(gate, (b <= of).expand(B, H, T, blocks), count)
    causal = g.visibility(T, T, right=0)
    ok = kept.repeat_interleave(block, -1)[..., :T] & causal
    out, aux = g.sdpa(q, k, v, ok, scale)
    return out, dict(aux, blocks=kept.double(), margin=margin)


def nsa(q, branch, gates, l, d, lp, n, window, scale):
    """branch: (k, v) of compression, selection, window; gates (B,H,T,3), already in [0,1]."""
    (k1, v1), (k2, v2), (k3, v3) = branch
    B, H, T, _ = q.shape
    Hkv = k1.shape[1]
    count = max((T - l) // d + 1, 0)
    kc = torch.stack([k1[:, :, j * d:j * d + l].mean(2) for j in range(count)], 2)
    vc = torch.stack([v1[:, :, j * d:j * d + l].mean(2) for j in range(count)], 2)
    t, j = torch.arange(T)[:, None], torch.arange(count)[None, :]
    ok1 = (j * d + l - 1 <= t)[None, None]
    o1, a1 = g.sdpa(q, kc, vc, ok1, scale)

    p = a1["attn"].detach()                                           # (B,H,T,count)
    blocks = -(-T // lp)
    importance = torch.zeros(B, H, T, blocks)
    for c in range(blocks):                                           # overlap, counted as a sum of windows
        for m in range(lp // d):
            for s in range(l // d):
                at = (lp // d) * c + m - s
                if 0 <= at < count:
                    importance[..., c] += p[..., at]
    importance = importance.view(B, Hkv, H // Hkv, T, blocks).sum(2)
    c = torch.arange(blocks)[None, :]
    own = t // lp
    forced = (c == 0) | (c == own)
    score = importance.masked_fill(forced, math.inf)
    kept, margin = largest(score, (c <= own).expand(B, Hkv, T, blocks), n)
    kept |= forced & (c <= own)
    causal = g.visibility(T, T, right=0)
    ok2 = g.share_heads(kept, H).repeat_interleave(lp, -1)[..., :T] & causal
    o2, _ = g.sdpa(q, k2, v2, ok2, scale)
    o3, _ = g.sdpa(q, k3, v3, g.visibility(T, T, left=window - 1, right=0), scale)
    out = gates[..., 0:1] * o1 + gates[..., 1:2] * o2 + gates[..., 2:3] * o3
    return out, dict(blocks=kept.double(), importance=importance, margin=margin)


def indexer(qi, ki, w):
    """I (B,T,T) from qi (B,T,J,di), ki (B,T,di), w (B,T,J)."""
    return (w[..., None] * torch.relu(torch.einsum("btjd,bsd->btjs", qi, ki))).sum(2)


def dsa(q, k, v, qi, ki, w, count, scale):
    T = q.shape[2]
    causal = g.visibility(T, T, right=0)[0]
    score = indexer(qi, ki, w)
    kept, margin = largest(score, causal.expand(score.shape), count)
    out, aux = g.sdpa(q, k, v, kept[:, None], scale)
    p = aux["attn"].detach().mean(1)                                  # over heads: sums to one
    logq = score.masked_fill(~kept, NEG_INF)
    logq = logq - torch.logsumexp(logq, -1, keepdim=True)
    term = torch.where(p > 0, p * (p.clamp_min(1e-300).log() - logq.masked_fill(~kept, 0.0)),
                       torch.zeros(()))
    kink = torch.einsum("btjd,bsd->btjs", qi, ki).detach().abs().min().item()
    return out, term.sum(), dict(kept=kept.double(), scores=score.masked_fill(~causal, 0.0),
                                 lse=aux["lse"], margin=margin, kink=kink)


def learnt_keys(q, k, v, ks, vs, ok, scale):
    """ks (H,R,d), vs (H,R,dv) or None for values of zero: first in the row, never masked."""
    B, H, Tq, _ = q.shape
    k, v = g.share_heads(k, H), g.share_heads(v, H)
    R = ks.shape[1]
    S = torch.cat([scale * (q @ ks.transpose(-1, -2)), scale * (q @ k.transpose(-1, -2))], -1)
    ok = torch.cat([torch.ones(B, H, Tq, R, dtype=torch.bool), ok.expand(B, H, Tq, k.shape[2])], -1)
    A, lse = g.softmax_rows(S, ok)
    out = A[..., R:] @ v
    if vs is not None:
        out = out + A[..., :R] @ vs
    return out, {"lse": lse}


# ------------------------------------------------------------------------------------------------
# cases
# ------------------------------------------------------------------------------------------------

class Second(g.Suite):
    def start(self, name, variant, T, B=None, H=None, Hkv=None, d=None, dv=None, Tq=None, gain=1.0, **mask):
        P = self.P
        B, H, d = B or P(2, 1), H or P(2, 4), d or P(8, 6)
        c = self.new(name, variant)
        q, k, v = self.qkv(c, B, H, Tq or T, T, d, dv, Hkv, gain)
        ok = self.mask(c, B, H, Tq or T, T, **mask)
        scale = 1.0 / math.sqrt(d)
        c.meta.update(scale=repr(scale), has_bias=0)
        return c, q, k, v, ok, scale

    def end(self, c, out, aux=None, extra=None):
        """extra: a scalar added to the loss (its gradients flow with the rest)."""
        aux = dict(aux or {})
        for key in ("margin", "kink"):
            value = aux.pop(key, math.inf)
            if value < math.inf:
                c.meta[key] = repr(value)
        aux.pop("attn", None)
        if extra is None:
            return self.write(c.finish(out, aux))
        dout = c.normal(*out.shape)
        c.put("out", out), c.put("dout", dout), c.put("loss", extra)
        c.backward((out * dout).sum() + extra)
        for n, x in aux.items():
            c.put(n, x)
        self.write(c)

    def readouts(self):
        P = self.P
        shapes = [("full", dict(T=P(9, 7)), 0), ("causal", dict(T=P(33, 41), right=0), 0),
                  ("gqa", dict(T=P(12, 10), H=4, Hkv=P(2, 1), right=0), 0),
                  ("decode", dict(T=P(21, 18), Tq=P(3, 1), align="br", right=0), P(18, 17)),
                  ("t130", dict(T=P(130, 97), B=1, H=1, d=P(16, 20), dv=P(24, 12), right=0), 0),
                  ("lengths", dict(T=P(11, 9), B=2, lengths=P([11, 4], [5, 9])), 0)]
        for tag, kw, first in shapes:
            c, q, k, v, ok, s = self.start("exclusive_" + tag, "exclusive", **kw)
            y, aux = g.sdpa(q, k, v, ok, s)
            c.meta["first_query"] = first
            out = exclusive(y, own_rows(g.share_heads(v, q.shape[1]), first, q.shape[2]))
            self.end(c, out, {"lse": aux["lse"]})
        c, q, k, v, ok, s = self.start("exclusive_zero_value", "exclusive", T=P(8, 9), right=0)
        with torch.no_grad():
            v[0, 0, 2] = 0.0
        c.put("v", v)
        y, aux = g.sdpa(q, k, v, ok, s)
        c.meta["first_query"] = 0
        self.end(c, exclusive(y, g.share_heads(v, q.shape[1])), {"lse": aux["lse"]})

        for tag, kw, _ in shapes:
            c, q, k, v, ok, s = self.start("laser_" + tag, "laser", **kw)
            y, aux = g.sdpa(q, k, torch.exp(v), ok, s)
            self.end(c, torch.where(y > 0, y.clamp_min(1e-300).log(), torch.zeros(())),
                     {"lse": aux["lse"]})
        for tag, kw, _ in shapes:
            c, q, k, v, ok, s = self.start("gated_" + tag, "gated", **kw)
            w = c.leaf("w", c.normal(q.shape[1], q.shape[3], scale=0.5))
            b = c.leaf("b", c.normal(q.shape[1], scale=0.5))
            y, aux = g.sdpa(q, k, v, ok, s)
            gate = torch.sigmoid(torch.einsum("bhtd,hd->bht", q, w) + b[None, :, None])
            self.end(c, gate[..., None] * y, {"lse": aux["lse"]})

    def columns(self):
        P = self.P
        for tag, p, kw in [("l1", 1.0, dict(T=P(9, 11))), ("l1_causal", 1.0, dict(T=P(33, 29), right=0)),
                           ("l1_gqa", 1.0, dict(T=P(10, 8), H=4, Hkv=2, right=0)),
                           ("l1_t130", 1.0, dict(T=P(130, 101), B=1, H=1, d=P(17, 24))),
                           ("lp", 1.5, dict(T=P(12, 9))),
                           ("lp_decode", 1.5, dict(T=P(19, 23), Tq=P(2, 1), align="br", right=0))]:
            c, q, k, v, ok, _ = self.start("columns_" + tag, "columns_lp", **kw)
            H = q.shape[1]
            if p == 1.0:                                              # no pair of columns near the kink
                with torch.no_grad():
                    q.copy_(torch.round(q * 64) / 64), k.copy_(torch.round(k * 64) / 64 + 1 / 128)
                c.put("q", q), c.put("k", k)
            gamma = c.leaf("gamma", c.uniform(0.2, 0.9, H))
            diff = q[..., :, None, :] - g.share_heads(k, H)[..., None, :, :]
            S = -g.per_head(gamma) * diff.abs().pow(p).sum(-1)
            A, lse = g.softmax_rows(S, ok)
            c.meta.update(p=repr(p), kink=repr(diff.detach().abs().min().item()))
            self.end(c, A @ g.share_heads(v, H), {"lse": lse})
        for tag, kw in [("short", dict(T=P(9, 12), right=0)), ("t130", dict(T=P(130, 90), B=1, H=2, d=P(16, 8), right=0)),
                        ("decode", dict(T=P(17, 20), Tq=P(2, 3), align="br", right=0))]:
            c, q, k, v, ok, s = self.start("columns_decay_" + tag, "columns_decay", **kw)
            B, H, Tq, d = q.shape
            T = k.shape[2]
            total = torch.cumsum(-c.uniform(0.0, 0.5, B, H, T, d), 2)
            ak = c.leaf("ak", total)
            aq = c.leaf("aq", total[:, :, T - Tq:])
            gap = aq[..., :, None, :] - ak[..., None, :, :]
            gap = torch.where(ok.expand(B, H, Tq, T)[..., None], gap, torch.zeros(()))
            S = s * (q[..., :, None, :] * k[..., None, :, :] * torch.exp(gap)).sum(-1)
            self.end(c, torch.where(ok, S, torch.zeros(())) @ v)

    def keys(self):
        P = self.P
        for tag, R, kw in [("one", 1, dict(T=P(9, 12), right=0)), ("four_gqa", P(4, 3), dict(T=P(33, 20), H=4, Hkv=2, right=0)),
                           ("mask_rows", 2, dict(T=P(7, 9), B=2, H=2, mask="rows")),
                           ("decode", P(2, 5), dict(T=P(15, 70), Tq=1, align="br", right=0)),
                           ("t130", 3, dict(T=P(130, 99), B=1, H=1, d=P(16, 12), right=0))]:
            for values in (0, 1):
                variant = "registers" if values else "key_sink"
                c, q, k, v, ok, s = self.start(variant + "_" + tag, variant, **kw)
                H, d, dv = q.shape[1], q.shape[3], v.shape[3]
                ks = c.leaf("sink_k", c.normal(H, R, d))
                vs = c.leaf("sink_v", c.normal(H, R, dv)) if values else None
                c.meta["R"] = R
                out, aux = learnt_keys(q, k, v, ks, vs, ok, s)
                self.end(c, out, aux)

    def chosen(self):
        P = self.P
        for tag, op, qb, kb, per_head, kw in [
                ("pairs", "sdpa", 1, 1, True, dict(T=P(23, 19))),
                ("pairs_causal", "sdpa", 1, 1, False, dict(T=P(40, 35), right=0)),
                ("blocks", "sdpa", P(8, 5), P(4, 7), True, dict(T=P(37, 44), right=0)),
                ("row_blocks", "sdpa", 1, P(16, 8), True, dict(T=P(130, 100), B=1, H=2, d=P(16, 12), right=0)),
                ("gqa_lengths", "sdpa", 1, P(4, 3), True, dict(T=P(21, 26), B=2, H=4, Hkv=2, lengths=P([21, 9], [13, 26]))),
                ("decode", "sdpa", 1, P(4, 2), True, dict(T=P(35, 27), Tq=P(3, 1), align="br", right=0)),
                ("dar", "dar", 1, P(4, 5), True, dict(T=P(30, 22), right=0))]:
            c, q, k, v, ok, s = self.start("key_list_" + tag, "key_list", **kw)
            B, H, Tq, _ = q.shape
            Tk = k.shape[2]
            shape = (B, H if per_head else 1, -(-Tq // qb), -(-Tk // kb))
            keep = c.uniform(0, 1, *shape) < 0.3
            keep[0, 0, min(1, shape[2] - 1)] = False                  # a list that is empty
            c.put("keep", keep)
            ok = ok & spread(keep, qb, kb, Tq, Tk)
            c.meta.update(query_block=qb, key_block=kb, op=op)
            if op == "sdpa":
                out, aux = g.sdpa(q, k, v, ok, s)
            else:
                p = {n: c.leaf(n, torch.tensor([x])) for n, x in
                     (("lam", 0.4), ("rho", 0.5), ("alpha", 6.0), ("beta", 0.3))}
                out, aux = g.dar(q, k, v, p["lam"], p["rho"], p["alpha"], p["beta"], ok, s, 2)
            self.end(c, out, {"lse": aux["lse"]})

        for tag, count, kw in [("few", P(4, 3), dict(T=P(25, 30), right=0)), ("one", 1, dict(T=P(11, 14), right=0)),
                               ("more_than_keys", 50, dict(T=P(9, 8), right=0)),
                               ("gqa_t130", P(16, 9), dict(T=P(130, 77), B=1, H=4, Hkv=2, right=0)),
                               ("full", P(5, 6), dict(T=P(20, 24), lengths=P([20, 3], [11])))]:
            c, q, k, v, ok, s = self.start("top_k_" + tag, "top_k", **kw)
            score = s * (q @ g.share_heads(k, q.shape[1]).transpose(-1, -2))
            kept, margin = largest(score, ok.expand(score.shape), count)
            out, aux = g.sdpa(q, k, v, kept, s)
            c.meta["k"] = count
            self.end(c, out, {"lse": aux["lse"], "margin": margin})

        for tag, block, count, kw in [("short", P(4, 5), 2, dict(T=P(22, 23))), ("gqa", P(8, 4), 3, dict(T=P(45, 38), H=4, Hkv=2)),
                                      ("t130", P(16, 8), P(3, 4), dict(T=P(130, 99), B=1, H=2, d=P(16, 12))),
                                      ("all", 8, 100, dict(T=P(20, 27)))]:
            c, q, k, v, _, s = self.start("moba_" + tag, "moba", right=0, **kw)
            c.meta.update(block=block, blocks_kept=count)
            out, aux = moba(q, k, v, block, count, s)
            self.end(c, out, aux)

        for tag, l, d, lp, n, w, kw in [("equal", 4, 4, 4, 3, 6, dict(T=P(37, 30), H=4, Hkv=2)),
                                        ("overlap", 8, 4, P(8, 16), P(3, 2), P(10, 7), dict(T=P(70, 66), B=1, H=4, Hkv=P(2, 1)))]:
            c, q, k1, v1, _, s = self.start("nsa_" + tag, "nsa", right=0, **kw)
            B, Hkv, T, dk = k1.shape
            H = q.shape[1]
            branch = [(k1, v1)]
            for b in ("2", "3"):
                branch.append((c.leaf("k" + b, c.normal(B, Hkv, T, dk)), c.leaf("v" + b, c.normal(B, Hkv, T, dk))))
            gates = c.leaf("gates", c.uniform(0.05, 0.95, B, H, T, 3))
            c.meta.update(compress_block=l, compress_stride=d, select_block=lp, blocks_kept=n, window=w)
            out, aux = nsa(q, branch, gates, l, d, lp, n, w, s)
            self.end(c, out, aux)

        for tag, count, J, di, kw in [("few", P(5, 4), P(2, 3), 4, dict(T=P(20, 26))),
                                      ("dense", 1000, 2, P(3, 5), dict(T=P(18, 13))),
                                      ("t130", P(16, 24), 4, 8, dict(T=P(130, 88), B=1, H=P(2, 4), d=P(16, 12)))]:
            c, q, k, v, _, s = self.start("dsa_" + tag, "dsa", right=0, **kw)
            B, _, T, _ = q.shape
            qi, ki = c.leaf("qi", c.normal(B, T, J, di)), c.leaf("ki", c.normal(B, T, di))
            w = c.leaf("wi", c.normal(B, T, J))
            c.meta.update(keys_kept=count, J=J, di=di)
            out, loss, aux = dsa(q, k, v, qi, ki, w, count, s)
            if max(q.shape[2], T) > 40:
                aux.pop("scores"), aux.pop("kept")
            self.end(c, out, aux, loss)

    def run(self):
        for part in (self.readouts, self.columns, self.keys, self.chosen):
            part()
        with open(self.out + "/MANIFEST.txt", "w") as f:
            f.write(f"# profile {self.profile} seed {self.seed}\n")
            for name, size, sha in sorted(self.digest):
                f.write(f"{sha}  {size:8d}  {name}.safetensors\n")
        print(f"{self.out}: {len(self.digest)} cases, {sum(s for _, s, _ in self.digest) / 2 ** 20:.2f} MiB")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--seed", type=int, required=True)
    ap.add_argument("--profile", choices=("visible", "heldout"), default="visible")
    ap.add_argument("--out", required=True)
    a = ap.parse_args()
    Second(a.seed, a.profile, a.out).run()
