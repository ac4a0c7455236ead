# SPDX-License-Identifier: Apache-2.0
"""torch.ops.heed against the formulas in PyTorch (formulas.py), their gradients by autograd, gradcheck and gradgradcheck in double,
transforms, layouts, masks, dropout, Meta shapes and sentences.

    python3 torch_test.py libheed_torch.so
"""
import pathlib
import sys
import unittest
import warnings

try:
    import torch
    import torch.utils.checkpoint
except ImportError:
    print("skipped: python3 has no torch (Debian: python3-torch)")
    sys.exit(77)
try:
    import torch.func as transforms
except ImportError:
    try:
        import functorch as transforms
    except ImportError:
        transforms = None

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


# operator: the formula, the operator's further arguments beside query, key and value, and the
# options that the formula has under other names.
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


# Operators that have products with their Hessian.
TWICE = ("sdpa", "dar", "dar_unrolled", "dar_converged")


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
        self.assertEqual({name for name in names if not name.startswith("_")}, set(variants()))

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
                    # Arguments that a formula does not read (the feedback of the static gate) have
                    # no gradient there.
                    for got, want in zip(mine, torch.autograd.grad(theirs, learnt, weight, allow_unused=True)):
                        self.assertLess(apart(got, torch.zeros_like(got) if want is None else want), 1e-9)

    def test_gradcheck(self):
        for name, (_, parameters, options, _) in variants().items():
            with self.subTest(name):
                qkv = inputs(name)
                names = list(parameters)

                def call(q, k, v, *rest):
                    return operator(name)(q, k, v, **dict(zip(names, rest)), causal=True, **options)

                learnt = (*qkv, *parameters.values())
                self.assertTrue(torch.autograd.gradcheck(call, learnt, fast_mode=True, check_forward_ad=True))
                if name in TWICE:
                    self.assertTrue(torch.autograd.gradgradcheck(call, learnt, fast_mode=True, check_fwd_over_rev=True))
                    continue
                (first,) = torch.autograd.grad(call(*learnt).square().sum(), learnt[0], create_graph=True)
                with self.assertRaisesRegex(RuntimeError, "the variant has no products with its Hessian"):
                    first.sum().backward()

    def test_second_derivatives_are_those_of_the_formula(self):
        q, k, v = (x.detach() for x in inputs("sdpa"))
        ours = lambda x: torch.ops.heed.sdpa(x, k, v, causal=True).square().sum()
        theirs = lambda x: f.sdpa(x, k, v, causal_mask()).square().sum()
        functional, direction = torch.autograd.functional, torch.randn_like(q)

        def penalty(loss):
            x = q.clone().requires_grad_()
            (slope,) = torch.autograd.grad(loss(x), x, create_graph=True)
            return torch.autograd.grad(slope.square().sum(), x)[0]

        def dual(loss):
            with torch.autograd.forward_ad.dual_level():
                return torch.autograd.forward_ad.unpack_dual(loss(torch.autograd.forward_ad.make_dual(q, direction))).tangent

        for name, of in {
            "jvp": lambda loss: functional.jvp(loss, q, direction)[1],
            "hvp": lambda loss: functional.hvp(loss, q, direction)[1],
            "vhp": lambda loss: functional.vhp(loss, q, direction)[1],
            "gradient penalty": penalty,
            "make_dual": dual,
        }.items():
            with self.subTest(name):
                self.assertGreater(of(theirs).abs().max(), 0.1)
                self.assertLess(apart(of(ours), of(theirs)), 1e-11)
        (slope,) = torch.autograd.grad(ours(q.requires_grad_()), q, create_graph=True)
        (again,) = torch.autograd.grad(slope.square().sum(), q, create_graph=True)
        with self.assertRaisesRegex(RuntimeError, "third derivatives of sdpa"):
            again.sum().backward()

    @unittest.skipUnless(transforms, "neither torch.func nor functorch is here")
    def test_transforms(self):
        warnings.simplefilter("ignore")  # vmap runs an operator once per sample, and says so
        q, k, v = (x.detach()[:, :, :3, :2] for x in inputs("sdpa"))
        ours = lambda x: torch.ops.heed.sdpa(x, k, v).square().sum()
        weights = lambda x: f.scores(x, k, 0).exp()  # torch.softmax has no tangents of gradients everywhere
        theirs = lambda x: (weights(x) @ v / weights(x).sum(-1, keepdim=True)).square().sum()
        t = transforms
        one = torch.ones((), dtype=double)
        inner = lambda loss: lambda x: t.grad(loss)(x).square().sum()
        for name, of in {
            "grad": lambda loss: t.grad(loss)(q),
            "jvp": lambda loss: t.jvp(loss, (q,), (v,))[1],
            "grad of grad": lambda loss: t.grad(inner(loss))(q),
            "jvp of grad": lambda loss: t.jvp(t.grad(loss), (q,), (v,))[1],
            "grad of jvp": lambda loss: t.grad(lambda x: t.jvp(loss, (x,), (v,))[1])(q),
            "hessian": lambda loss: t.hessian(loss)(q),
            "grad of jvp of vjp": lambda loss: t.grad(
                lambda e: t.jvp(lambda g: t.vjp(loss, q)[1](g)[0].square().sum(), (one,), (e,))[1])(one),
            "vmap": lambda loss: t.vmap(loss)(torch.stack([q, 2 * q])),
            "grads of samples": lambda loss: t.vmap(t.grad(loss))(torch.stack([q, 2 * q])),
        }.items():
            with self.subTest(name):
                self.assertLess(apart(of(ours), of(theirs)), 1e-11)
        with self.assertRaisesRegex(RuntimeError, "the tangent of a tangent was asked for"):
            t.jvp(lambda x: t.jvp(ours, (x,), (v,))[1], (q,), (v,))

    @unittest.skipUnless(hasattr(torch, "compile"), "this PyTorch has no torch.compile")
    def test_compiled_modules(self):
        class Module(torch.nn.Module):
            def forward(self, q, k, v):
                return torch.ops.heed.sdpa(2 * q, k, v, causal=True)

        qkv = [x.detach() for x in inputs("sdpa")]
        self.assertLess(apart(torch.compile(Module())(*qkv), Module()(*qkv)), 1e-12)

    def test_dropout_follows_torchs_generator(self):
        q, k, v = inputs("sdpa")
        drop = lambda **more: torch.ops.heed.sdpa(q, k, v, dropout=0.5, **more)
        torch.manual_seed(3)
        first, second = drop(), drop()
        torch.manual_seed(3)
        self.assertTrue(torch.equal(drop(), first))
        self.assertFalse(torch.equal(second, first))
        self.assertTrue(torch.equal(drop(dropout_seed=5), drop(dropout_seed=5)))
        state = torch.random.get_rng_state()
        drop(dropout_seed=5), torch.ops.heed.sdpa(q, k, v)
        self.assertTrue(torch.equal(torch.random.get_rng_state(), state))  # neither asks it
        # Recomputation by checkpoint() drops the same weights, and so does the backward pass.
        grads = []
        for run in (lambda: drop(), lambda: torch.utils.checkpoint.checkpoint(lambda x: torch.ops.heed.sdpa(x, k, v, dropout=0.5), q)):
            torch.manual_seed(4)
            q.grad = None
            run().square().sum().backward()
            grads.append(q.grad)
        self.assertTrue(torch.equal(*grads))

    def test_parameters_of_any_float_and_shape(self):
        q, k, v = inputs("sdpa")
        call = lambda strength: torch.ops.heed.dar(q, k, v, strength=strength)
        one = torch.full((1,), 0.5, dtype=double, requires_grad=True)
        want = call(one)
        (slope,) = torch.autograd.grad(want.sum(), one)
        for kind in (torch.float16, torch.bfloat16, torch.float32, double):
            for shape in ((), (1,), (HEADS,)):
                with self.subTest(kind=kind, shape=shape):
                    strength = torch.full(shape, 0.5, dtype=kind, requires_grad=True)
                    out = call(strength)
                    self.assertLess(apart(out, want), 1e-12)
                    (grad,) = torch.autograd.grad(out.sum(), strength)
                    self.assertEqual((grad.shape, grad.dtype), (torch.Size(shape), kind))
                    self.assertLess(apart(grad.sum().double(), slope.sum()), 0.02)

    def test_two_axes(self):
        q, k, v = (x.detach()[0, 0].requires_grad_() for x in inputs("sdpa"))
        out = torch.ops.heed.sdpa(q, k, v, causal=True)
        self.assertEqual(out.shape, q.shape)
        self.assertLess(apart(out, f.sdpa(q, k, v, causal_mask())), 1e-12)
        self.assertEqual(torch.autograd.grad(out.sum(), k, retain_graph=True)[0].shape, k.shape)
        # Tensors whose strides heed cannot read are copied.
        turned = q.detach().T.contiguous().T.requires_grad_()
        same = torch.ops.heed.sdpa(turned, k, v, causal=True)
        self.assertTrue(torch.equal(same, out))
        self.assertTrue(torch.equal(*(torch.autograd.grad(x.sum(), of, retain_graph=True)[0] for x, of in ((same, turned), (out, q)))))

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
            "window": (dict(window=(4, 0)), hidden(far)),
            "open window": (dict(window=(4, -1), causal=True), hidden(far)),
            "offset": (dict(causal=True, offset=2), hidden(at[None, :] > at[:, None] + 2)),
            "key_range": (dict(key_range=(2, 9)), hidden((at < 2) | (at >= 9))[None]),
            "key_lengths": (dict(key_lengths=lengths), hidden(behind)[:, None, None]),
            "documents": (dict(documents=documents), hidden(apart_documents)),
            "documents of keys": (dict(documents=documents, key_documents=1 - documents), hidden(~apart_documents)),
            "allowed": (dict(allowed=allowed), hidden(~allowed)),
            "alibi": (dict(alibi=slopes), -slopes[:, None, None] * (at[:, None] - at[None, :]).abs()),
            "moved alibi": (dict(alibi=slopes, offset=2), -slopes[:, None, None] * (at[:, None] + 2 - at[None, :]).abs()),
        }
        for name, (arguments, mask) in cases.items():
            with self.subTest(name):
                self.assertLess(apart(torch.ops.heed.sdpa(q, k, v, **arguments), f.sdpa(q, k, v, mask)), 1e-11)
        few = q[:, :, :4]
        later = hidden(at[None, :] > at[:4, None] + LEN - 4)
        self.assertLess(apart(torch.ops.heed.sdpa(few, k, v, causal=True, align="bottom_right"), f.sdpa(few, k, v, later)), 1e-11)
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

    def test_meta_calls_are_checked(self):
        q, k, v = (torch.randn(1, heads, 5, 4) for heads in (4, 2, 2))
        for arguments in (
            dict(key=torch.randn(1, 3, 5, 4), value=torch.randn(1, 3, 5, 4)),
            dict(key=torch.randn(1, 2, 6, 4)),
            dict(strength=torch.ones(3)),
            dict(allowed=torch.ones(5, 6, dtype=torch.bool)),
            dict(bias=torch.ones(1, 3, 5, 5)),
            dict(alibi=torch.ones(3)),
            dict(documents=torch.ones(6, dtype=torch.long)),
            dict(key_lengths=torch.ones(2, dtype=torch.long)),
            dict(key_range=(2, 9)),
            dict(dropout=1.5),
        ):
            said = []
            for place in ("cpu", "meta"):
                given = {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in dict(query=q, key=k, value=v).items()}
                given.update({n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()})
                with self.subTest(arguments.keys(), place=place), self.assertRaises(RuntimeError) as raised:
                    torch.ops.heed.dar(**given)
                said.append(str(raised.exception).split("\n")[0])
            self.assertEqual(*said)

    def test_sentences(self):
        q, k, v = inputs("sdpa")
        for call, sentence in (
            (lambda: torch.ops.heed.sdpa(q, k[..., :4], v), "key has dim_qk 4, query has 8"),
            (lambda: torch.ops.heed.dar(q, k, v, sharpness=torch.tensor([-1.0])), "sharpness is -1"),
            (lambda: torch.ops.heed.sdpa(q, k, v, key_lengths=torch.tensor([3, 99])), "99"),
            (lambda: torch.ops.heed.sdpa(q, k, v.to(torch.complex64)), "value holds ComplexFloat"),
            (lambda: torch.ops.heed.sdpa(q, k, v, key_lengths=torch.tensor([3.5, 4.0])), "whole numbers"),
            (lambda: torch.ops.heed.sdpa(q[:, :, :1], k, v, causal=True, queries_at_end=True), "Align::bottom_right"),
            (lambda: torch.ops.heed.sdpa(None, k, v), "query is None, it must be a tensor"),
            (lambda: torch.ops.heed.sdpa(q, k.to_sparse(), v), "key has the layout Sparse, it must be dense"),
            (lambda: torch.ops.heed.sdpa(q, k, v, align="bottom_right"), "align was given, but none of causal, window and alibi"),
            (lambda: torch.ops.heed.sdpa(q, k, v, offset=1), "offset was given, but none of causal, window and alibi"),
            (lambda: torch.ops.heed.sdpa(q, k, v, causal=True, align="right"), 'align is "right", it must be "top_left" or "bottom_right"'),
            (lambda: torch.ops.heed.sdpa(q, k, v, window=(-5, 0)), "left is -5"),
            (lambda: torch.ops.heed.sdpa(q, k, v, window=(1, 2, 3)), "window has 3 numbers, it must have two"),
            (lambda: torch.ops.heed.sdpa(q, k, v, key_documents=torch.zeros(2, LEN, dtype=torch.long)), "without documents"),
            (lambda: torch.ops.heed.sdpa(q, k, v, soft_cap=0.0), "soft_cap is 0, it must be positive"),
            (lambda: torch.ops.heed.sdpa(q, k, v, dropout=0.5, dropout_seed=-1), "dropout_seed is -1, it must not be negative"),
            (lambda: torch.ops.heed.sdpa(q, k, v, threads=2**40), "threads is 1099511627776"),
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
