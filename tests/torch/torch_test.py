# SPDX-License-Identifier: Apache-2.0
"""torch.ops.heed against the formulas in PyTorch (formulas.py), their gradients by autograd, gradcheck in double, layouts, masks,
Meta shapes and sentences.

    python3 torch_test.py libheed_torch.so
"""
import pathlib
import sys
import unittest

try:
    import torch
except ImportError:
    print("skipped: python3 has no torch (Debian: python3-torch)")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import formulas as f

BATCH, HEADS, LEN, DIM = 2, 3, 13, 8
double = torch.float64


def normal(*shape, spread=1.0):
    return (torch.randn(*shape, dtype=double) * spread).requires_grad_()


def rate(*shape):
    return torch.rand(*shape, dtype=double).requires_grad_()


def matrix(*shape):
    return normal(*shape, spread=shape[-1] ** -0.5)


# operator: the formula, what the operator is called with beside query, key and value, and the options that the formula has
# under other names.
def variants():
    per_head = lambda low, high: (low + (high - low) * torch.rand(HEADS, dtype=double)).requires_grad_()
    gate = lambda: dict(strength=per_head(0.1, 0.4), vigilance=per_head(0.2, 0.6), sharpness=per_head(4, 8),
                        feedback=per_head(0.2, 0.4))
    half = lambda: normal(DIM // 2, spread=0.3)
    readings = lambda: dict(v_pos_weight=matrix(DIM, DIM), v_neg_weight=matrix(DIM, DIM), synth_weight=matrix(DIM, 3 * DIM),
                            synth_bias=normal(DIM, spread=0.1), gate_weight=matrix(1, DIM), gate_bias=normal(1, spread=0.1), b_pos=normal(1), b_neg=normal(1))
    flow = lambda: dict(rho=per_head(0.05, 0.3), eta=per_head(0.3, 0.9))
    gates = lambda: dict(gate_query_weight=matrix(HEADS, DIM, DIM), gate_key_weight=matrix(HEADS, DIM, DIM),
                         gate_value_weight=matrix(HEADS, DIM, DIM))
    return {
        "sdpa": (f.sdpa, {}, {}, {}),
        "dar": (f.dar, gate(), {}, {}),
        "dar_unrolled": (f.dar, gate(), {"iterations": 3}, {"steps": 3}),
        "dar_converged": (f.dar, gate(), {}, {"steps": 300}),
        "differential": (f.differential, {"lambda_": per_head(0.1, 0.6)}, {}, {}),
        "differential_v1": (f.differential_v1, dict(lambda_q1=half(), lambda_k1=half(), lambda_q2=half(), lambda_k2=half(),
                                                   weight=normal(DIM)), {}, {}),
        "differential_v2": (f.differential_v2, {"extra": normal(BATCH, HEADS, LEN, 1)}, {}, {}),
        "intent": (f.intent, {"extra": normal(BATCH, HEADS, LEN, DIM)}, {}, {}),
        "intent_from_q": (f.intent_from_q, {"gate_weight": matrix(HEADS, DIM, DIM)}, {}, {}),
        "intent_calculated": (f.intent_calculated, gates(), {}, {}),
        "ode": (f.ode, flow(), {"steps": 4}, {"steps": 4}),
        "ode_equilibrium": (f.ode, flow(), {}, {"steps": 60}),
        "dialectical": (f.dialectical, readings(), {"halt_eps": 0.0}, {}),
        "prototype": (f.prototype, dict(W=normal(HEADS, 5, DIM), strength=per_head(0.1, 0.5), pull=per_head(0.05, 0.2)), {}, {}),
    }


def inputs(name):
    query_heads = 2 * HEADS if name == "differential_v2" else HEADS
    return [normal(BATCH, query_heads, LEN, DIM), normal(BATCH, HEADS, LEN, DIM), normal(BATCH, HEADS, LEN, DIM)]


def operator(name):
    return getattr(torch.ops.heed, name)


def causal_mask():
    return torch.zeros(LEN, LEN, dtype=double).masked_fill(torch.ones(LEN, LEN, dtype=torch.bool).triu(1), float("-inf"))


def apart(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()


class Operators(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(7)

    def test_every_variant_is_here(self):
        names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("heed::")} \
            if hasattr(torch._C, "_dispatch_get_all_op_names") else set(variants())
        self.assertEqual(names, set(variants()))

    def test_formulas_and_their_gradients(self):
        for name, (formula, parameters, options, renamed) in variants().items():
            for masked in (False, True):
                with self.subTest(name, causal=masked):
                    qkv = inputs(name)
                    mask = causal_mask() if masked else torch.zeros(LEN, LEN, dtype=double)
                    extra = {"causal": masked, **options}
                    ours = operator(name)(*qkv, **parameters, **extra)
                    theirs = formula(*qkv, mask, **parameters, **renamed)
                    self.assertLess(apart(ours, theirs), 1e-10)
                    learnt = qkv + list(parameters.values())
                    weight = torch.randn_like(ours)
                    mine = torch.autograd.grad(ours, learnt, weight)
                    # What a formula does not read (the feedback of the static gate) has no gradient there.
                    for got, want in zip(mine, torch.autograd.grad(theirs, learnt, weight, allow_unused=True)):
                        self.assertLess(apart(got, torch.zeros_like(got) if want is None else want), 1e-9)

    def test_gradcheck(self):
        for name, (_, parameters, options, _) in variants().items():
            with self.subTest(name):
                qkv = inputs(name)
                names = list(parameters)

                def call(q, k, v, *rest):
                    return operator(name)(q, k, v, **dict(zip(names, rest)), causal=True, **options)

                self.assertTrue(torch.autograd.gradcheck(call, (*qkv, *parameters.values()), fast_mode=True))

    def test_layouts_are_read_in_place(self):
        packed = normal(BATCH, LEN, 3, HEADS, DIM)
        q, k, v = (packed.select(2, n).transpose(1, 2) for n in range(3))
        out = torch.ops.heed.sdpa(q, k, v, causal=True)
        self.assertEqual(out.stride(), (LEN * HEADS * DIM, DIM, HEADS * DIM, 1))  # rows of a token side by side
        same = torch.ops.heed.sdpa(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
        self.assertTrue(torch.equal(out, same))
        (grad,) = torch.autograd.grad(out.sum(), packed)
        (want,) = torch.autograd.grad(f.sdpa(q, k, v, causal_mask()).sum(), packed)  # a gradient of stride 0
        self.assertLess(apart(grad, want), 1e-11)

    def test_masks(self):
        q, k, v = inputs("sdpa")
        at = torch.arange(LEN)
        far = (at[:, None] - at[None, :] > 4) | (at[None, :] > at[:, None])
        lengths = torch.tensor([LEN, 5])
        behind = at[None, :] >= lengths[:, None]
        apart_documents = (at < 6)[:, None] != (at < 6)[None, :]
        slopes = torch.tensor([0.5, 0.25, 0.125], dtype=double)
        allowed = torch.rand(BATCH, 1, LEN, LEN) < 0.7
        allowed |= torch.eye(LEN, dtype=torch.bool)
        hidden = lambda where: torch.zeros(where.shape, dtype=double).masked_fill(where, float("-inf"))
        documents = (at < 6).long().expand(BATCH, LEN)
        cases = {
            "window": (dict(left=4, right=0), hidden(far)),
            "key_lengths": (dict(key_lengths=lengths), hidden(behind)[:, None, None]),
            "documents": (dict(query_documents=documents, key_documents=documents), hidden(apart_documents)),
            "allowed": (dict(allowed=allowed), hidden(~allowed)),
            "slopes": (dict(slopes=slopes), -slopes[:, None, None] * (at[:, None] - at[None, :]).abs()),
        }
        for name, (arguments, mask) in cases.items():
            with self.subTest(name):
                self.assertLess(apart(torch.ops.heed.sdpa(q, k, v, **arguments), f.sdpa(q, k, v, mask)), 1e-11)
        bias = normal(1, HEADS, LEN, LEN)
        ours, theirs = torch.ops.heed.sdpa(q, k, v, bias=bias), f.sdpa(q, k, v, bias)
        for got, want in zip(torch.autograd.grad(ours.sum(), (q, bias)), torch.autograd.grad(theirs.sum(), (q, bias))):
            self.assertLess(apart(got, want), 1e-11)
        capped = 2 * torch.tanh(f.scores(q, k, 0) / 2)
        self.assertLess(apart(torch.ops.heed.sdpa(q, k, v, soft_cap=2.0), torch.softmax(capped, -1) @ v), 1e-11)

    def test_float_and_bfloat16(self):
        q, k, v = (x.detach() for x in inputs("dar"))
        want = torch.ops.heed.dar(q, k, v, causal=True)
        for kind, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
            got = torch.ops.heed.dar(q.to(kind), k.to(kind), v.to(kind), causal=True)
            self.assertEqual(got.dtype, kind)
            self.assertLess(apart(got.double(), want), bound)

    def test_meta_shapes(self):
        for name, (_, parameters, _, _) in variants().items():
            with self.subTest(name):
                qkv = inputs(name)
                meta = lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta")
                out = operator(name)(*map(meta, qkv), **{n: meta(x) for n, x in parameters.items()})
                self.assertEqual(out.shape, operator(name)(*qkv, **parameters).shape)
                self.assertTrue(out.is_meta)

    def test_sentences(self):
        q, k, v = inputs("sdpa")
        for call, sentence in (
            (lambda: torch.ops.heed.sdpa(q, k[..., :4], v), "key has dim_qk 4, query has 8"),
            (lambda: torch.ops.heed.dar(q, k, v, sharpness=torch.tensor([-1.0])), "sharpness is -1"),
            (lambda: torch.ops.heed.sdpa(q, k, v, key_lengths=torch.tensor([3, 99])), "99"),
            (lambda: torch.ops.heed.sdpa(q, k, v.to(torch.complex64)), "value holds ComplexFloat"),
            (lambda: torch.ops.heed.sdpa(q, k, v, key_lengths=torch.tensor([3.5, 4.0])), "whole numbers"),
            (lambda: torch.ops.heed.sdpa(q[:, :, :1], k, v, causal=True, queries_at_end=True), "Align::bottom_right"),
        ):
            with self.subTest(sentence), self.assertRaisesRegex(RuntimeError, sentence):
                call()

    def test_changed_inputs_are_noticed(self):
        q, k, v = inputs("sdpa")
        x = q * 1
        out = torch.ops.heed.sdpa(x, k, v)
        with torch.no_grad():
            x.mul_(2)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            out.sum().backward()


if __name__ == "__main__":
    torch.ops.load_library(sys.argv.pop())
    unittest.main()
