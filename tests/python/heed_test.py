# SPDX-License-Identifier: Apache-2.0
"""examples/python/heed.py against plain NumPy (plain.py): all variants, masks, types and gradients; and what is refused."""

import copy
import ctypes
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import unittest
import unittest.mock

try:
    import numpy as np
except ImportError:
    print("skipped: " + sys.executable + " has no numpy (Debian: python3-numpy)")
    sys.exit(77)

try:
    import torch
except ImportError:
    torch = None

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "examples" / "python"))
import heed  # noqa: E402
import plain  # noqa: E402

BATCH, HEADS, KV_HEADS, LEN, DIM = 2, 4, 2, 9, 6


def problem(variant, dtype=np.float64, seed=0, len_kv=LEN):
    """Arrays of a call, with its parameters: q, k, v, extra or None, parameters."""
    rng = np.random.default_rng(seed)
    query_heads = 2 * HEADS if variant == "differential-v2" else HEADS
    q = rng.normal(size=(BATCH, query_heads, LEN, DIM)).astype(dtype)
    k, v = (rng.normal(size=(BATCH, KV_HEADS, len_kv, DIM)).astype(dtype) for _ in range(2))
    extra = None
    if variant in ("intent", "differential-v2"):
        extra = rng.normal(size=(BATCH, HEADS, LEN, DIM if variant == "intent" else 1)).astype(dtype)
    p = heed.parameters(variant, q, v, seed=seed + 1, prototypes=3)
    return q, k, v, extra, p


def positions(len_kv=LEN):
    return np.arange(LEN)[:, None], np.arange(len_kv)[None, :]


def everyone(len_kv=LEN):
    return plain.Rows(np.ones((BATCH, HEADS, LEN, len_kv), bool))


def masks(len_kv=LEN):
    """Names, options of heed, and what they mean in plain NumPy."""
    i, j = positions(len_kv)
    all_seen = np.ones((BATCH, HEADS, LEN, len_kv), bool)
    rng = np.random.default_rng(5)
    allowed = rng.random((BATCH, 1, LEN, len_kv)) < 0.7
    bias = rng.normal(size=(1, HEADS, LEN, len_kv))
    bias[0, 1, 2, :3] = -np.inf
    documents = np.sort(rng.integers(0, 3, (BATCH, LEN)), 1), np.sort(rng.integers(0, 3, (BATCH, len_kv)), 1)
    slopes = np.array([0.5, 0.25, 0.125, 1.0])
    lengths = [4, len_kv]
    in_length = j < np.array(lengths)[:, None, None, None]
    shift = len_kv - LEN
    rows = plain.Rows
    yield "none", {}, rows(all_seen)
    yield "causal", dict(causal=True), rows(all_seen & (j <= i))
    yield "causal, bottom right", dict(causal="bottom_right"), rows(all_seen & (j <= i + shift))
    yield "causal, moved", dict(causal=True, offset=2), rows(all_seen & (j <= i + 2))
    yield "window", dict(window=(3, 1)), rows(all_seen & (j >= i - 3) & (j <= i + 1))
    yield "window, bottom right", dict(window=(3, -1), align="bottom_right"), rows(all_seen & (j >= i + shift - 3))
    yield "key range", dict(key_range=(2, 6)), rows(all_seen & (j >= 2) & (j < 6))
    yield "key lengths", dict(key_lengths=lengths), rows(all_seen & in_length)
    yield "boolean", dict(allowed=allowed), rows(all_seen & allowed)
    yield "bytes", dict(allowed=allowed.astype(np.uint8)), rows(all_seen & allowed)
    yield "bias", dict(bias=bias), rows(all_seen & np.isfinite(bias), np.where(np.isfinite(bias), bias, 0))
    yield "documents", dict(documents=documents), rows(all_seen & (documents[0][:, None, :, None] == documents[1][:, None, None, :]))
    keep = rng.random((1, HEADS, LEN, len_kv)) < 0.4
    yield "table of keys", dict(lists=keep, causal=True), rows(all_seen & keep & (j <= i))
    flat = keep.reshape(-1, len_kv)
    start = np.concatenate(([0], flat.sum(1).cumsum()))
    yield "lists of keys", dict(lists=(start.astype(np.int32), flat.nonzero()[1], 1, HEADS)), rows(all_seen & keep)
    blocks = rng.random((BATCH, 1, -(-LEN // 2), -(-len_kv // 3))) < 0.5
    yield "table of blocks", dict(lists=blocks, list_blocks=(2, 3)), rows(
        all_seen & blocks.repeat(2, 2).repeat(3, 3)[:, :, :LEN, :len_kv])
    yield "alibi", dict(alibi=slopes, align="bottom_right"), rows(all_seen, -slopes[:, None, None] * np.abs(i + shift - j))
    yield "alibi, moved", dict(alibi=slopes, offset=-2), rows(all_seen, -slopes[:, None, None] * np.abs(i - 2 - j))
    yield "soft cap", dict(soft_cap=0.4), rows(all_seen, 0.0, 0.4)
    yield "function", dict(visible=lambda b, h, i, j: (i * 2 + j + b + h) % 3 != 0), rows(
        (i * 2 + j + np.arange(BATCH)[:, None, None, None] + np.arange(HEADS)[:, None, None]) % 3 != 0)
    yield "function, moved", dict(visible=lambda b, h, i, j: j <= i, align="bottom_right", offset=-1), rows(all_seen & (j <= i + shift - 1))
    yield "many parts", dict(causal=True, key_lengths=lengths, allowed=allowed, bias=bias, alibi=slopes, soft_cap=2.0), rows(
        all_seen & (j <= i) & in_length & allowed & np.isfinite(bias),
        np.where(np.isfinite(bias), bias, 0) - slopes[:, None, None] * np.abs(i - j), 2.0)


def near(got, wanted, tolerance):
    """Relative to the largest number of what is wanted."""
    return np.abs(got - wanted).max() <= tolerance * max(1.0, np.abs(wanted).max())


class Forward(unittest.TestCase):
    def test_every_variant_has_a_formula(self):
        for variant in heed.variants():
            with self.subTest(variant):
                q, k, v, extra, p = problem(variant)
                out = heed.attention(q, k, v, variant, extra=extra, **p)
                wanted, _ = plain.attention(variant, q, k, v, everyone(), extra=extra, p=p)
                self.assertEqual(out.dtype, np.float64)
                self.assertTrue(near(out, wanted, 1e-12), np.abs(out - wanted).max())

    def test_masks_hide_and_add_for_every_variant(self):
        for variant in heed.variants():
            for len_kv in (LEN, LEN + 4):
                q, k, v, extra, p = problem(variant, len_kv=len_kv)
                for name, options, rows in masks(len_kv):
                    with self.subTest(variant + ", " + name):
                        out = heed.attention(q, k, v, variant, extra=extra, **options, **p)
                        wanted, _ = plain.attention(variant, q, k, v, rows, extra=extra, p=p)
                        self.assertTrue(near(out, wanted, 1e-12), np.abs(out - wanted).max())

    def test_floats(self):
        for variant in heed.variants():
            with self.subTest(variant):
                q, k, v, extra, p = problem(variant, np.float32)
                out = heed.attention(q, k, v, variant, extra=extra, causal=True, **p)
                self.assertEqual(out.dtype, np.float32)
                wide = [None if x is None else x.astype(float) for x in (q, k, v, extra)]
                wide_p = {name: np.asarray(x, float) for name, x in p.items()}
                i, j = positions()
                wanted, _ = plain.attention(variant, *wide[:3], plain.Rows(everyone().seen & (j <= i)), extra=wide[3], p=wide_p)
                self.assertTrue(near(out, wanted, 1e-5), np.abs(out - wanted).max())

    def test_numbers_of_16_bits(self):
        q, k, v, _, _ = problem("sdpa", np.float16)
        wide, _ = plain.attention("dar", *(x.astype(float) for x in (q, k, v)), everyone())
        half = heed.attention(q, k, v, "dar")
        self.assertEqual(half.dtype, np.float16)
        self.assertTrue(near(half.astype(float), wide, 1e-3))
        # Each array by itself: float queries over keys of bfloat16 and values of half.
        keys = heed.Bfloat16.nearest(k)
        wide, _ = plain.attention("dar", q.astype(float), keys.numbers().astype(float), v.astype(float), everyone())
        out = heed.attention(q.astype(np.float32), keys, v, "dar")
        self.assertTrue(near(out, wide, 1e-5))
        narrow = heed.attention(heed.Bfloat16.nearest(q), keys, v, "dar")
        self.assertIsInstance(narrow, heed.Bfloat16)
        self.assertEqual(narrow.shape, out.shape)
        self.assertTrue(near(narrow.numbers(), out, 1e-2))
        call = heed.forward(q, keys, v, "dar")
        grads = heed.backward(call, np.ones_like(call.out))
        self.assertEqual((grads.query.dtype, type(grads.key)), (np.float16, heed.Bfloat16))

    def test_mixed_precision_is_near(self):
        q, k, v, _, _ = problem("sdpa", np.float32)
        out, mixed = heed.attention(q, k, v), heed.attention(q, k, v, precision="mixed")
        self.assertTrue(near(mixed, out, 2e-2))

    def test_options_of_dar(self):
        rng = np.random.default_rng(2)
        basis = np.linalg.qr(rng.normal(size=(DIM, 3)))[0]
        q, k, v, _, _ = problem("dar")
        for options in (dict(strength=[1, 2, 3, 0]), dict(strength=np.array([2, 1, 1, 3]), vigilance=[0]), dict(gate="tanh", iterations=3), dict(gate="centred"), dict(gate="piecewise_linear", sharpness=2.0),
                        dict(gate="tanh", converged=True, sharpness=2.0, feedback=0.5), dict(adaptive=True), dict(projection=basis),
                        dict(projection=basis, adaptive=True), dict(strength=np.array([0.1, 0.2, 0.3, 0.4]), vigilance=0.1, eps=0.1)):
            with self.subTest(str(list(options))):
                out = heed.attention(q, k, v, "dar", **options)
                self.assertTrue(near(out, plain.attention("dar", q, k, v, everyone(), p=options)[0], 1e-12))

    def test_options_of_the_ode(self):
        q, k, v, _, _ = problem("ode")
        for options in (dict(steps=1), dict(steps=3, eta=np.array([0.1, 0.5, 1.0, 1.5]), rho=0.05), dict(mode="equilibrium", eta=0.7),
                        dict(mode="lagrange", steps=4), dict(mode="lagrange_equilibrium", eta=0.3)):
            with self.subTest(str(options)):
                out = heed.attention(q, k, v, "ode", **options)
                self.assertTrue(near(out, plain.attention("ode", q, k, v, everyone(), p=options)[0], 1e-12))

    def test_other_options(self):
        q, k, v, extra, _ = problem("intent")
        out = heed.attention(q, k, v, "intent", extra=extra[..., :1].copy(), grain="per_head", gate_bias=0.5, scale=0.2)
        wanted, _ = plain.attention("intent", q, k, v, everyone(), scale=0.2, extra=extra[..., :1], p={"gate.bias": 0.5})
        self.assertTrue(near(out, wanted, 1e-12))
        out = heed.attention(q, k, v, "differential", lambda_=[0.1, 0.2, 0.3, 0.4])
        wanted, _ = plain.attention("differential", q, k, v, everyone(), p={"lambda": [0.1, 0.2, 0.3, 0.4]})
        self.assertTrue(near(out, wanted, 1e-12))
        p = heed.parameters("differential-v1", q, v, depth=4)
        self.assertAlmostEqual(p["lambda_init"], 0.8 - 0.6 * np.exp(-0.9))
        self.assertAlmostEqual(p["factor"], 0.2 + 0.6 * np.exp(-0.9))
        wanted, _ = plain.attention("differential-v1", q, k, v, everyone(), p=p)
        self.assertTrue(near(heed.attention(q, k, v, "differential-v1", **p), wanted, 1e-12))

    def test_rows_that_halt_by_probabilities(self):
        q, k, v, _, _ = problem("dialectical")
        options = dict(halting="adaptive", max_steps=6)
        p = heed.parameters("dialectical", q, v, seed=3)
        rng = np.random.default_rng(1)
        p |= {"halt.weight": 0.5 * rng.normal(size=(HEADS, DIM)), "halt.bias": rng.normal(size=HEADS)} | options
        call = heed.forward(q, k, v, "dialectical", with_steps=True, **p)
        wanted, steps = plain.attention("dialectical", q, k, v, everyone(), p=p)
        self.assertTrue(near(call.out, wanted, 1e-12))
        self.assertTrue(near(call.steps, steps, 1e-12))
        self.assertTrue((call.reports["updates"] == np.ceil(call.steps) - 1).all())
        self.assertGreater(len(np.unique(call.reports["updates"])), 1)

    def test_what_each_step_leaves(self):
        q, k, v, _, _ = problem("dialectical")
        p = heed.parameters("dialectical", q, v, seed=3) | dict(halting="outside", max_steps=4)
        call = heed.forward(q, k, v, "dialectical", with_steps=True, **p)
        wanted, steps = plain.attention("dialectical", q, k, v, everyone(), p=p)
        self.assertEqual(call.steps.shape, (BATCH, HEADS, LEN, 3 * DIM))
        self.assertTrue(near(call.out, wanted, 1e-12) and near(call.steps, steps, 1e-12))

    def test_two_axes_are_one_head(self):
        q, k, v, _, _ = problem("sdpa")
        call = heed.forward(q[0, 0], k[0, 0], v[0, 0], causal=True)
        self.assertEqual(call.out.shape, (LEN, DIM))
        grads = heed.backward(call, np.ones_like(call.out))
        self.assertEqual(grads.query.shape, (LEN, DIM))
        one = heed.attention(q[:1, :1], k[:1, :1], v[:1, :1], causal=True)
        self.assertTrue((one[0, 0] == call.out).all())

    def test_lse(self):
        q, k, v, _, _ = problem("sdpa")
        call = heed.forward(q, k, v, with_lse=True)
        scores = plain.dots(q, plain.grouped(k, HEADS)) / np.sqrt(DIM)
        self.assertTrue(near(call.lse[..., 0], np.log(np.exp(scores).sum(-1)), 1e-13))
        self.assertIsNone(call.steps)

    def test_out_is_written_where_the_caller_says(self):
        q, k, v, _, _ = problem("sdpa")
        memory = np.zeros((BATCH, LEN, HEADS, DIM))
        out = memory.transpose(0, 2, 1, 3)
        self.assertIs(heed.attention(q, k, v, out=out), out)
        self.assertTrue((out == heed.attention(q, k, v)).all())


class Memory(unittest.TestCase):
    def test_views_are_read_where_they_lie(self):
        rng = np.random.default_rng(0)
        packed = rng.normal(size=(BATCH, LEN, 3, HEADS, DIM))
        q, k, v = (packed[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
        for x in (q, k, v, q[:, ::2, 1::3]):
            view = heed._View(x, "x")
            self.assertIs(view.array, x)
            self.assertEqual(view.tensor.data, x.ctypes.data)
        dense = [np.ascontiguousarray(x) for x in (q, k, v)]
        for variant in ("dar", "ode"):
            self.assertTrue((heed.attention(q, k, v, variant) == heed.attention(*dense, variant)).all())
        call, twin = heed.forward(q, k, v, "dar"), heed.forward(*dense, "dar")
        w = rng.normal(size=(BATCH, LEN, HEADS, DIM)).transpose(0, 2, 1, 3)
        grads, wanted = heed.backward(call, w), heed.backward(twin, w)
        self.assertTrue((grads.key == wanted.key).all())
        # Views of every second head and every third token; one key head for all.
        few, one = q[:, ::2, 1::3], np.broadcast_to(k[:, :1], k.shape)
        out = heed.attention(few, one[:, :2], v[:, :2])
        self.assertTrue((out == heed.attention(few.copy(), one[:, :2].copy(), v[:, :2].copy())).all())

    def test_arrays_that_lie_otherwise_are_copied(self):
        q, k, v = np.random.default_rng(0).normal(size=(3, BATCH, HEADS, LEN, DIM))
        wide = np.random.default_rng(1).normal(size=(BATCH, HEADS, LEN, 2 * DIM))
        for x in (q[:, :, ::-1], q[..., ::-1], wide[..., ::2], np.asfortranarray(q), np.broadcast_to(q[..., :1], q.shape),
                  np.rec.fromarrays([q.astype(np.float32), q], names="a, x")["x"]):
            dense = x.copy(order="C")
            for arrays, same in (((x, k, v), (dense, k, v)), ((q, x, v), (q, dense, v)), ((q, k, x), (q, k, dense))):
                with self.subTest(str(x.strides)):
                    call, twin = heed.forward(*arrays, "dar"), heed.forward(*same, "dar")
                    self.assertTrue((call.out == twin.out).all())
                    grads, wanted = heed.backward(call, x), heed.backward(twin, dense)
                    self.assertTrue((grads.key == wanted.key).all() and grads.key.flags.c_contiguous)
        allowed, bias = np.random.default_rng(2).random((2, 1, 1, LEN, LEN)).transpose(0, 1, 2, 4, 3)
        for options in (dict(allowed=allowed < 0.7), dict(bias=bias)):
            dense = {name: x.copy(order="C") for name, x in options.items()}
            self.assertTrue((heed.attention(q, k, v, **options) == heed.attention(q, k, v, **dense)).all())
        bits = heed.Bfloat16.nearest(q)
        self.assertTrue((heed.attention(heed.Bfloat16(bits.bits[:, :, ::-1]), bits, bits).bits == heed.attention(bits, bits, bits).bits[:, :, ::-1]).all())

    def test_parameters_may_be_views(self):
        q, k, v, _, p = problem("intent-from-q")
        weight = np.asfortranarray(p["gate.weight"])[:, ::-1]
        same = heed.attention(q, k, v, "intent-from-q", gate_weight=weight)
        self.assertTrue((same == heed.attention(q, k, v, "intent-from-q", gate_weight=weight.copy())).all())

    def test_calls_keep_their_arrays(self):
        call = heed.forward(*(np.random.default_rng(n).normal(size=(1, 2, 40, 8)) for n in range(3)), "dar")
        filler = [np.full((1, 2, 40, 8), 7.0) for _ in range(50)]
        self.assertTrue(np.isfinite(heed.backward(call, np.ones_like(call.out)).query).all())
        del filler


    def test_what_backward_reads_is_not_changed_by_mistake(self):
        q, k, v, _, _ = problem("sdpa")
        mine = np.zeros_like(q)
        for call in (heed.forward(q, k, v), heed.forward(q, k, v, out=mine)):
            with self.assertRaisesRegex(ValueError, "read-only"):
                call.out *= 2
        self.assertTrue((mine == call.out).all() and mine.flags.writeable)
        for out in (heed.attention(q, k, v), heed.forward(q, k, v, save=False).out):
            out *= 2

    def test_a_call_is_not_copied(self):
        q, k, v, _, _ = problem("sdpa")
        call = heed.forward(q, k, v)
        for take in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(TypeError, "^heed: a Call can be neither copied nor pickled: "):
                take(call)
        grads = copy.deepcopy(heed.backward(call, q))
        self.assertEqual(grads.query.shape, q.shape)


class Lent:
    """A tensor of a library of its own, this file, that offers its memory and nothing else."""

    def __init__(self, array, device=1):
        self.array, self.device = array, device

    def __dlpack__(self, **options):
        capsule = self.array.__dlpack__(**options)
        lent = ctypes.cast(heed._pointer_of(capsule, b"dltensor"), ctypes.POINTER(heed._ManagedTensor)).contents.tensor
        lent.data, lent.byte_offset = lent.data - 64, 64  # an offset, as views of some libraries have it
        return capsule

    def __dlpack_device__(self):
        return self.device, 0


def from_dlpack(x):
    return Lent(x)


class Tensors(unittest.TestCase):
    """What other libraries lend by DLPack."""

    def numbers(self, x):
        return x.array if isinstance(x, Lent) else x.numpy()

    def check(self, lend):
        q, k, v, extra, p = problem("intent", np.float32)
        bias = np.random.default_rng(4).normal(size=(1, HEADS, LEN, LEN)).astype(np.float32)
        allowed = np.tril(np.ones((1, 1, LEN, LEN), bool))
        expected = heed.forward(q, k, v, "intent", extra=extra, bias=bias, allowed=allowed, with_lse=True)
        wanted = heed.backward(expected, np.ones_like(expected.out))
        lent, own = {}, dict(extra=extra, bias=bias, allowed=allowed.astype(np.uint8))
        lent = {name: lend(x) for name, x in own.items()}
        call = heed.forward(lend(q), lend(k), lend(v), "intent", with_lse=True, **lent)
        grads = heed.backward(call, lend(np.ones_like(expected.out)))
        for name in ("out", "lse"):
            self.assertIsInstance(getattr(call, name), type(lend(q)))
            np.testing.assert_array_equal(self.numbers(getattr(call, name)), getattr(expected, name))
        for name in ("query", "key", "value", "extra", "bias"):
            self.assertIsInstance(getattr(grads, name), type(lend(q)))
            np.testing.assert_array_equal(self.numbers(getattr(grads, name)), getattr(wanted, name))
        # Written where it lies, with the strides of (batch, len, heads, dim); an array where an array lends it room.
        out = np.zeros((BATCH, LEN, HEADS, DIM), np.float32)
        to = lend(out.transpose(0, 2, 1, 3))
        self.assertIs(heed.attention(q, k, v, "intent", extra=extra, bias=bias, allowed=allowed, out=to), to)
        np.testing.assert_array_equal(self.numbers(to), expected.out)
        # Parameters, as they begin and as they are given.
        q, k, v, _, p = problem("prototype", np.float32)
        begun = heed.parameters("prototype", lend(q), lend(v), seed=1, prototypes=3)
        for name, x in p.items():
            self.assertIsInstance(begun[name], type(lend(q)))
            np.testing.assert_array_equal(self.numbers(begun[name]), x)
        call, expected = heed.forward(q, k, v, "prototype", **begun), heed.forward(q, k, v, "prototype", **p)
        grads, wanted = (heed.backward(c, np.ones_like(c.out)).parameters for c in (call, expected))
        for name in p:
            np.testing.assert_array_equal(self.numbers(grads[name]), wanted[name])

    def test_any_library(self):
        self.check(Lent)
        alive = np.ones((3, 4), np.float32)
        borrowed = heed.attention(Lent(alive), alive, alive)
        before = sys.getrefcount(alive)
        for _ in range(3):
            borrowed = heed.attention(Lent(alive), alive, alive)
        self.assertEqual(sys.getrefcount(alive), before)
        self.assertEqual(borrowed.array.shape, (3, 4))
        with self.assertRaisesRegex(TypeError, "heed: query lies on a device of DLPack's type 2, it must lie in the processor's memory, type 1"):
            heed.attention(Lent(alive, 2), alive, alive)
        with self.assertRaisesRegex(TypeError, "heed: query is of type Lent that does not lend its memory: "):
            alive.flags.writeable = False
            heed.attention(Lent(alive), alive, alive)

    @unittest.skipIf(torch is None, "no torch (Debian: python3-torch)")
    def test_torch(self):
        self.check(torch.from_numpy)
        q = torch.randn(1, 2, 5, 8).to(torch.bfloat16)
        bits = heed.Bfloat16(q.view(torch.int16).numpy().view(np.uint16))
        call, expected = heed.forward(q, q, q, "dar"), heed.forward(bits, bits, bits, "dar")
        self.assertEqual((call.out.dtype, call.out.shape), (q.dtype, q.shape))
        np.testing.assert_array_equal(call.out.float().numpy(), expected.out.numbers())
        grads = heed.backward(call, torch.ones_like(call.out))
        self.assertEqual((grads.key.dtype, grads.key.shape), (q.dtype, q.shape))
        with self.assertRaisesRegex(TypeError, "heed: key is of type Tensor that does not lend its memory: .*requires? grad"):
            heed.attention(q.float(), torch.ones(1, 2, 5, 8, requires_grad=True), q.float())


class Backward(unittest.TestCase):
    def check(self, variant, options, rows, p, extra, q, k, v, steps=None):
        rng = np.random.default_rng(11)
        call = heed.forward(q, k, v, variant, extra=extra, with_steps=steps is not None, **options, **p)
        w = rng.normal(size=call.out.shape)
        grads = heed.backward(call, w, grad_steps=None if steps is None else np.full_like(call.steps, steps))
        learnt = {parameter.name: parameter for parameter in heed.describe(variant) if parameter.learnt}

        def loss():
            out, taken = plain.attention(variant, q, k, v, rows, extra=extra, p=p)
            return (out * w).sum() + (0 if steps is None else steps * taken.sum())
        pieces = [("query", q, grads.query), ("key", k, grads.key), ("value", v, grads.value)]
        if extra is not None:
            pieces.append(("extra", extra, grads.extra))
        if "bias" in options:
            pieces.append(("bias", rows.added, grads.bias))
        for name, x in p.items():
            if name in learnt and isinstance(x, np.ndarray):
                pieces.append((name, x, grads.parameters[name]))
        for name, x, gradient in pieces:
            self.assertEqual(np.shape(gradient), x.shape)
            flat, step = x.reshape(-1), 1e-6
            self.assertTrue(np.shares_memory(flat, x))
            places = rng.choice(flat.size, min(5, flat.size), replace=False)
            for n in places:
                kept = flat[n]
                flat[n] = kept + step
                above = loss()
                flat[n] = kept - step
                below = loss()
                flat[n] = kept
                slope = (above - below) / (2 * step)
                with self.subTest(variant + ", " + name):
                    self.assertLess(abs(gradient.reshape(-1)[n] - slope), 1e-7 * (1 + abs(slope)))
        return grads

    def test_gradients_are_those_of_plain_numpy(self):
        for variant in heed.variants():
            q, k, v, extra, p = problem(variant)
            if variant == "dialectical":
                p["halt_eps"] = 0.0  # rows do not halt, so that nothing jumps
            self.check(variant, {}, everyone(), p, extra, q, k, v)

    def test_gradients_under_masks(self):
        i, j = positions()
        bias = np.random.default_rng(8).normal(size=(BATCH, HEADS, LEN, LEN))
        rows = plain.Rows(everyone().seen & (j <= i) & (j < np.array([5, LEN])[:, None, None, None]), bias, 1.5)
        for variant in heed.variants():
            q, k, v, extra, p = problem(variant, seed=4)
            if variant == "dialectical":
                p["halt_eps"] = 0.0
            self.check(variant, dict(causal=True, key_lengths=[5, LEN], bias=bias, soft_cap=1.5), rows, p, extra, q, k, v)

    def test_the_time_of_rows_has_a_gradient(self):
        q, k, v, _, p = problem("dialectical", seed=2)
        rng = np.random.default_rng(1)
        p |= {"halt.weight": 0.5 * rng.normal(size=(HEADS, DIM)), "halt.bias": rng.normal(size=HEADS), "halting": "adaptive", "max_steps": 4}
        self.check("dialectical", {}, everyone(), p, None, q, k, v, steps=0.3)
        p = heed.parameters("dialectical", q, v, seed=3) | dict(halting="outside", max_steps=3)
        self.check("dialectical", {}, everyone(), p, None, q, k, v, steps=0.3)

    def test_parameters_by_head_and_by_default(self):
        q, k, v, _, _ = problem("dar")
        grads = self.check("dar", {}, everyone(), {"strength": np.array([0.1, 0.2, 0.3, 0.4]), "vigilance": 0.2, "sharpness": np.array([3.0])}, None, q, k, v)
        self.assertEqual(np.shape(grads.parameters["vigilance"]), ())
        self.assertEqual(set(grads.parameters), {"strength", "vigilance", "sharpness", "feedback"})

    def test_lse_has_a_gradient(self):
        q, k, v, _, _ = problem("sdpa")
        call = heed.forward(q, k, v, with_lse=True)
        grads = heed.backward(call, np.zeros_like(call.out), grad_lse=np.ones_like(call.lse))
        keys = plain.grouped(k, HEADS)
        weights = plain.softmax(plain.dots(q, keys) / np.sqrt(DIM), everyone().seen)
        self.assertTrue(near(grads.query, plain.mix(weights, keys) / np.sqrt(DIM), 1e-13))
        self.assertFalse(grads.value.any())

    def test_dropout_is_the_same_in_both_passes(self):
        q, k, v, _, _ = problem("sdpa")
        v[:] = 0
        for row in range(DIM):
            v[..., row, row] = 1  # out holds the first weights
        call = heed.forward(q, k, v, dropout=0.5, dropout_seed=4)
        again = heed.attention(q, k, v, dropout=0.5, dropout_seed=4)
        other = heed.attention(q, k, v, dropout=0.5, dropout_seed=5)
        self.assertTrue((call.out == again).all() and (call.out == 0).any() and (call.out != other).any())
        one = np.zeros_like(call.out)
        one[0, 0, 0, 0] = 1
        self.assertEqual(heed.backward(call, one).value[0, 0, 0, 0], call.out[0, 0, 0, 0])


class Sequences(unittest.TestCase):
    QUERIES, KEYS = [0, 4, 4, 9], [0, 6, 7, 15]

    def packed(self, variant, rng):
        """q, k, v, extra of packed sequences, whose keys are as many as their queries where the variant reads own rows."""
        query_heads = 2 * HEADS if variant == "differential-v2" else HEADS
        keys = self.QUERIES if variant == "intent-calculated" else self.KEYS
        q, k, v = (rng.normal(size=(1, heads, total, DIM)) for heads, total in ((query_heads, 9), (KV_HEADS, keys[-1]), (KV_HEADS, keys[-1])))
        extra = None
        if variant in ("intent", "differential-v2"):
            extra = rng.normal(size=(1, HEADS, 9, DIM if variant == "intent" else 1))
        return q, k, v, extra, keys

    def test_packed_sequences_are_calls_of_their_own(self):
        for variant in heed.variants():
            with self.subTest(variant):
                rng = np.random.default_rng(4)
                q, k, v, extra, keys = self.packed(variant, rng)
                p = heed.parameters(variant, q, v, seed=2, prototypes=3)
                lengths = np.minimum(np.diff(keys), 5)
                options = dict(causal="bottom_right", alibi=[0.5, 0.25, 0.125, 1.0], **p)
                call = heed.forward(q, k, v, variant, extra=extra, packed=(self.QUERIES, keys), key_lengths=lengths, **options)
                w = rng.normal(size=call.out.shape)
                grads, sums = heed.backward(call, w), {}
                for n in range(3):
                    rows, of_keys = slice(*self.QUERIES[n:n + 2]), slice(*keys[n:n + 2])
                    own = heed.forward(q[:, :, rows], k[:, :, of_keys], v[:, :, of_keys], variant, key_lengths=lengths[n:n + 1],
                                       extra=None if extra is None else extra[:, :, rows], **options)
                    self.assertTrue((own.out == call.out[:, :, rows]).all())
                    mine = heed.backward(own, w[:, :, rows])
                    self.assertTrue((mine.query == grads.query[:, :, rows]).all())
                    self.assertTrue((mine.key == grads.key[:, :, of_keys]).all() and (mine.value == grads.value[:, :, of_keys]).all())
                    if extra is not None:
                        self.assertTrue((mine.extra == grads.extra[:, :, rows]).all())
                    for name, x in mine.parameters.items():
                        sums[name] = sums.get(name, 0) + x
                    for name, x in own.reports.items():
                        self.assertTrue((x == call.reports[name][:, :, rows]).all())
                for name, x in sums.items():
                    self.assertTrue(near(grads.parameters[name], x, 1e-12), name)

    def test_one_list_is_of_queries_and_keys(self):
        q, k, v, _, _ = problem("sdpa")
        q, k, v = q[:1], k[:1], v[:1]
        out = heed.attention(q, k, v, packed=[0, 5, LEN], causal=True)
        self.assertTrue((out[:, :, 5:] == heed.attention(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], causal=True)).all())

    def test_a_cache_decodes_as_the_whole_call(self):
        for variant in heed.variants():
            with self.subTest(variant):
                q, k, v, extra, p = problem(variant)
                whole = heed.attention(q, k, v, variant, extra=extra, causal=True, **p)
                cache, first = heed.Cache(BATCH, KV_HEADS, DIM, DIM, np.float64), 0
                for end, rows in ((5, 5), (7, 2), (8, 1), (LEN, 1)):
                    cache.append(k[:, :, first:end], v[:, :, first:end])
                    first, last = end, slice(end - rows, end)
                    self.assertEqual(len(cache), end)
                    out = heed.attention(q[:, :, last], variant=variant, cache=cache, causal="bottom_right",
                                         extra=None if extra is None else extra[:, :, last], **p)
                    self.assertTrue(near(out, whole[:, :, last], 1e-12), np.abs(out - whole[:, :, last]).max())

    def test_a_cache_of_each_type(self):
        q, k, v, _, _ = problem("sdpa", np.float32)
        whole = heed.attention(q, k, v, "dar")
        for dtype, tolerance in (("float32", 1e-6), (np.float16, 2e-3), ("bfloat16", 2e-2), (np.int8, 2e-2)):
            with self.subTest(str(dtype)):
                cache = heed.Cache(BATCH, KV_HEADS, DIM, DIM, dtype, page_rows=64)
                cache.append(k, v)
                self.assertTrue(near(heed.attention(q, variant="dar", cache=cache), whole, tolerance))
                self.assertEqual(cache.capacity, 64)
        cache.reserve(65)
        self.assertEqual(cache.capacity, 128)
        cache.truncate(3)
        out = heed.attention(q[:, :, :3], variant="dar", cache=cache)
        self.assertTrue(near(out, heed.attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], "dar"), 2e-2))

    def test_packed_sequences_with_caches(self):
        rng = np.random.default_rng(8)
        q = rng.normal(size=(1, HEADS, 3, DIM))
        caches = [heed.Cache(1, KV_HEADS, DIM, DIM, "float64") for _ in range(2)]
        for cache, total in zip(caches, (4, 6)):
            cache.append(*(rng.normal(size=(1, KV_HEADS, total, DIM)) for _ in range(2)))
        out = heed.attention(q, variant="dar", packed=[0, 1, 3], cache=caches, causal="bottom_right")
        for cache, rows in zip(caches, (slice(0, 1), slice(1, 3))):
            own = heed.attention(q[:, :, rows], variant="dar", cache=cache, causal="bottom_right")
            self.assertTrue((own == out[:, :, rows]).all())

    def test_what_does_not_fit(self):
        q, k, v, _, _ = problem("sdpa")
        cache = heed.Cache(BATCH, KV_HEADS, DIM, DIM, "float64")

        def refused(error, text, f, *arguments, **options):
            with self.assertRaises(error) as caught:
                f(*arguments, **options)
            self.assertEqual(str(caught.exception), text)
        refused(ValueError, "heed::forward(sdpa): query has len 9, the cache holds 0 tokens; queries are its last tokens, whose keys are appended first", heed.attention, q, cache=cache)
        cache.append(k, v)
        refused(ValueError, "heed::forward(sdpa): key was given beside a cache, which holds it", heed.attention, q, k, v, cache=cache)
        refused(ValueError, "heed::forward(sdpa): query has floats, the cache is one of doubles", heed.attention, q.astype(np.float32), cache=cache)
        refused(ValueError, "heed_cache_append: value has len 8, key has 9", cache.append, k, v[:, :, :8])
        refused(ValueError, "heed_cache_truncate: len is 10, the cache holds 9 tokens", cache.truncate, 10)
        refused(ValueError, "heed: dtype is 'int4', it must be one of float64, float32, float16, bfloat16, int8", heed.Cache, 1, 1, 4, 4, "int4")
        refused(TypeError, "heed: cache is of type list, it must be a heed.Cache, or packed says where its sequences begin", heed.attention, q, cache=[cache])
        refused(TypeError, "heed: cache holds one of type NoneType, it must be a list of heed.Cache", heed.attention, q[:1], packed=[0, 9], cache=[None])
        refused(ValueError, "heed::forward(sdpa): packed.queries ends with 8, query has len 9", heed.attention, q[:1], k[:1], v[:1], packed=[0, 8])
        refused(ValueError, "heed::forward(sdpa): key has batch 2, packed sequences lie in a batch of 1", heed.attention, q[:1], k, v[:1], packed=[0, 9])
        call = heed.forward(q, cache=cache)
        refused(ValueError, "heed::backward: the call has a cache, heed_forward() alone takes one; give keys and values as tensors", heed.backward, call, call.out)
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            refused(TypeError, "heed: a Cache is neither copied nor pickled; append the same keys and values to another one", copies, cache)

        def append(*_):
            cache.append(k, v)
            return True
        refused(RuntimeError, "heed: the cache is in use by another call, one at a time may use it", heed.attention, q, cache=cache, visible=append, align="bottom_right")
        self.assertEqual(len(cache), LEN)


class Errors(unittest.TestCase):
    def refused(self, error, text, *arrays, **options):
        with self.assertRaises(error) as caught:
            heed.attention(*arrays, **options)
        self.assertEqual(str(caught.exception), text)

    def test_sentences_are_those_of_cpp(self):
        q, k, v, _, _ = problem("sdpa")
        self.refused(ValueError, "heed::forward(dar): key has dim_qk 5, query has 6", q, k[..., :5], v, variant="dar")
        self.refused(ValueError, "heed::forward(dar): value has len 8, key has 9", q, k, v[:, :, :8], variant="dar")
        self.refused(ValueError, "heed::forward(sdpa): 4 heads cannot share 3 kv_heads evenly", q, q[:, :3], q[:, :3])
        self.refused(ValueError, "heed::forward(dar): sharpness is -1, it must be positive", q, k, v, variant="dar", sharpness=-1)
        self.refused(ValueError, "heed::forward(dar): strength has 3 values, the call has 4 heads; it needs 1 value, or one per head", q, k, v, variant="dar", strength=[1.0, 2.0, 3.0])
        self.refused(ValueError, "heed::forward(sdpa): key_lengths has 0 entries, the batch is 2", q, k, v, key_lengths=[])
        self.refused(ValueError, "heed::forward(sdpa): key_lengths has 3 entries, the batch is 2", q, k, v, key_lengths=[1, 2, 3])
        self.refused(ValueError, "heed::forward(sdpa): key_lengths[1] is 10, it must lie in [0, 9]", q, k, v, key_lengths=[1, 10])
        self.refused(ValueError, "heed::forward(sdpa): the bias has shape (3,1,1,9), it must broadcast to (2,4,9,9)", q, k, v, bias=np.zeros((3, 1, 1, 9)))
        self.refused(ValueError, "heed::forward(sdpa): the bias has shape (1,1,9,1), its last extent must be len_kv, 9: it does not broadcast over keys", q, k, v, bias=np.zeros((1, 1, 9, 1)))
        self.refused(ValueError, "heed::forward(sdpa): the boolean mask has shape (1,1,9,1), its last extent must be len_kv, 9: it does not broadcast over keys", q, k, v, allowed=np.ones((1, 1, 9, 1), bool))
        self.refused(ValueError, "heed::forward(sdpa): a window's left is -2 and right is 0, each must be -1 (open) or at least 0", q, k, v, window=(-2, 0))
        self.refused(ValueError, "heed::forward(sdpa): Options: scale is nan, it must be finite", q, k, v, scale=float("nan"))
        self.refused(ValueError, "heed::forward(intent): the op needs the input intent of shape (2,4,9,6), none was given", q, k, v, variant="intent")
        self.refused(ValueError, "heed::forward(sdpa): out overlaps query", q, k, v, out=q)
        self.refused(ValueError, "heed::forward(sdpa): the queries are the last tokens of the keys, len_q is 1 and len_kv is 9; the mask's bands place them at the first keys, Align::bottom_right at the last ones", q[:, :, :1], k, v, causal=True, queries_at_end=True)
        self.assertEqual(heed.attention(q[:, :, :1], k, v, causal="bottom_right", queries_at_end=True).shape, (2, 4, 1, 6))
        self.refused(ValueError, "heed::forward(ode): eta is 4, it must lie between 0 and 3 for the equilibrium to be unique and reached", q, k, v, variant="ode", mode="equilibrium", eta=4)

    def test_names(self):
        q, k, v, _, _ = problem("sdpa")
        self.refused(ValueError, "heed::forward(sdpa): there is no parameter strength, the variant has none", q, k, v, strength=1)
        self.refused(ValueError, "heed::forward(differential): there is no parameter lamda; it has lambda, pairing", q, k, v, variant="differential", lamda=1)
        self.refused(ValueError, 'heed::forward(dar): gate is "relu", it must be one of logistic, centred, tanh, piecewise_linear', q, k, v, variant="dar", gate="relu")
        self.refused(ValueError, "heed::forward(dar): iterations is 1.5, it must be a whole number from -2147483648 to 2147483647", q, k, v, variant="dar", iterations=1.5)
        with self.assertRaisesRegex(ValueError, "^heed_describe: there is no variant dra, it must be one of sdpa, dar, "):
            heed.describe("dra")
        with self.assertRaisesRegex(ValueError, "^heed::forward: there is no variant dra, it must be one of sdpa, dar, "):
            heed.attention(q, k, v, "dra")
        with self.assertRaisesRegex(ValueError, r"^heed::forward\(intent-from-q\): the tensor gate.weight was not given; "):
            heed.attention(q, k, v, "intent-from-q")

    def test_arrays(self):
        q, k, v, _, _ = problem("sdpa")
        self.refused(TypeError, "heed: query is of type list, it must be an array", q.tolist(), k, v)
        self.refused(TypeError, "heed: query is an array of complex128, which heed does not read", q + 0j, k, v)
        self.refused(TypeError, "heed: query is an array of >f8, its bytes must have the machine's order", q.astype(">f8"), k, v)
        self.refused(ValueError, "heed: query is int64, it must be float64, float32, float16 or bfloat16", q.astype(int), k, v)
        self.refused(ValueError, "heed: key is float32, query is float64: it must be float64", q, k.astype(np.float32), v)
        self.refused(ValueError, "heed: value is float64, query is float16: it must be float32, float16 or bfloat16", q.astype(np.float16), heed.Bfloat16.nearest(k), v)
        self.refused(ValueError, "heed: bias is float64, query is float32: it must be float32", *(x.astype(np.float32) for x in (q, k, v)), bias=np.zeros((1, 1, 9, 9)))
        self.refused(ValueError, "heed: allowed is int64, it must be bool or uint8", q, k, v, allowed=np.ones((1, 1, 9, 9), int))
        self.refused(ValueError, "heed: out is float32, query is float64: it must be float64", q, k, v, out=np.zeros(q.shape, np.float32))
        self.refused(ValueError, "heed::forward(sdpa): query has ndim 3, it must be 4 or 2", q[0], k, v)
        self.refused(ValueError, "heed: out has strides of (1728, 432, -48, 8) bytes, and is written where it lies: the last must be 8, the others multiples of it, none negative", q, k, v, out=np.zeros_like(q)[:, :, ::-1])
        self.refused(TypeError, "heed: key_lengths holds float64, it must hold whole numbers", q, k, v, key_lengths=[1.5, 2.0])
        self.refused(TypeError, "heed: strength is of type NoneType, it must be a number, a str or an array", q, k, v, variant="dar", strength=None)
        frozen = np.zeros_like(q)
        frozen.flags.writeable = False
        self.refused(ValueError, "heed: out is read only", q, k, v, out=frozen)
        self.refused(TypeError, "heed: window is 3, it must be two whole numbers", q, k, v, window=3)
        self.refused(TypeError, "heed: key_range is (0, 1.5), it must be two whole numbers", q, k, v, key_range=(0, 1.5))
        self.refused(ValueError, "heed: soft_cap is 0, it must be positive and finite", q, k, v, soft_cap=0)
        self.refused(ValueError, "heed: soft_cap is -1, it must be positive and finite", q, k, v, soft_cap=-1)
        floats = [x.astype(np.float32) for x in (q, k, v)]
        self.refused(ValueError, "heed::forward(sdpa): soft_cap is 1e-300, too small for the numbers of this call", *floats, soft_cap=1e-300)
        self.refused(ValueError, "heed: soft_cap is nan, it must be positive and finite", q, k, v, soft_cap=np.nan)
        for causal in ("left", "top_left", 1, None):
            self.refused(ValueError, "heed: causal is " + repr(causal) + ', it must be True, False or "bottom_right"', q, k, v, causal=causal)
        self.refused(ValueError, 'heed: align is 1, it must be "top_left" or "bottom_right"', q, k, v, align=1)
        self.refused(TypeError, "heed: visible is an array of bool, it must be a function of batch, head, query and key", q, k, v, visible=np.ones(1, bool))

    def test_what_has_nothing_to_apply_to_is_refused(self):
        q, k, v, _, _ = problem("sdpa")
        nothing = ", but there is no causal, window, alibi or visible that it could move"
        self.refused(ValueError, "heed: align is 'bottom_right'" + nothing, q, k, v, align="bottom_right")
        self.refused(ValueError, "heed: offset is -2" + nothing, q, k, v, offset=-2, key_range=(0, 3), soft_cap=1.0)
        self.refused(ValueError, "heed::forward(sdpa): a window's left is -5 and right is 0, each must be -1 (open) or at least 0", q, k, v, window=(-5, 0))
        self.refused(TypeError, "heed.forward: there is no keyword mask, what is visible is called allowed", q, k, v, mask=np.ones((1, 1, 9, 9), bool))
        for name, arrays, options in (("query", (np.ma.array(q), k, v), {}), ("allowed", (q, k, v), dict(allowed=np.ma.ones((1, 1, 9, 9), bool))),
                                      ("key_lengths", (q, k, v), dict(key_lengths=np.ma.array([1, 2]))), ("alibi", (q, k, v), dict(alibi=np.ma.ones(4))),
                                      ("strength", (q, k, v), dict(variant="dar", strength=np.ma.masked)), ("scale", (q, k, v), dict(scale=np.ma.masked))):
            self.refused(TypeError, "heed: " + name + " is a masked array, its mask would be lost; give its data, and `allowed` what is visible", *arrays, **options)
        self.refused(ValueError, 'heed: extra has one column, it needs 6; grain="per_head" takes one', q, k, v, variant="intent", extra=q[..., :1])

    def test_numbers_that_do_not_fit_are_refused(self):
        q, k, v, _, _ = problem("sdpa")
        low, high = str(-2**63), str(2**63 - 1)
        for name, value, least, most in (("threads", 2**40, 0, 2**31 - 1), ("threads", -1, 0, 2**31 - 1), ("dropout_seed", -1, 0, 2**64 - 1),
                                         ("dropout_seed", 2**64, 0, 2**64 - 1), ("first_query", -1, 0, high), ("offset", 2**70, low, high)):
            self.refused(ValueError, "heed: %s is %d, it must lie between %s and %s" % (name, value, least, most), q, k, v, causal=True, **{name: value})
        for name, value in (("window", (2**70, 0)), ("key_range", (0, 2**70)), ("key_lengths", [1, 2**70]), ("documents", np.full((2, 9), 2**63, np.uint64))):
            self.refused(ValueError, "heed: %s is %d, it must lie between %s and %s" % (name, 2**63 if name == "documents" else 2**70, low, high), q, k, v, **{name: value})
        self.refused(TypeError, "heed: alibi holds <U1, it must hold numbers", q, k, v, alibi=["a"] * 4)
        self.refused(TypeError, "heed: threads is 1.5, it must be a whole number", q, k, v, threads=1.5)
        self.refused(TypeError, "heed: scale is of type str, it must be a number", q, k, v, scale="0.5")
        self.refused(ValueError, "heed: scale is beyond the numbers of double", q, k, v, scale=10**400)
        self.refused(ValueError, "heed::forward(sdpa): alibi has offset 1099511627776, it must lie between -536870912 and 536870912", q, k, v, alibi=np.ones(4), offset=2**40)
        with self.assertRaisesRegex(ValueError, "^heed: threads is 1099511627776, it must lie between 0 and 2147483647$"):
            heed.set_threads(2**40)
        with self.assertRaisesRegex(ValueError, "^heed: seed is -1, it must lie between 0 and "):
            heed.parameters("dar", q, v, seed=-1)

    def test_backward(self):
        q, k, v, _, _ = problem("sdpa")
        call = heed.forward(q, k, v, "dar")
        with self.assertRaisesRegex(ValueError, r"^heed::backward\(dar\): grad_out has shape \(2,4,8,6\), it must be \(2,4,9,6\)$"):
            heed.backward(call, call.out[:, :, :8])
        with self.assertRaisesRegex(ValueError, "^heed: grad_out is float32, query is float64: it must be float64$"):
            heed.backward(call, call.out.astype(np.float32))
        with self.assertRaisesRegex(ValueError, "^heed.backward: the call has saved nothing"):
            heed.backward(heed.forward(q, k, v, save=False), call.out)
        ode = heed.forward(q, k, v, "ode", with_lse=True)
        with self.assertRaisesRegex(ValueError, r"^heed::forward\(sdpa\): steps was given, "):
            heed.forward(q, k, v, with_steps=True)
        with self.assertRaisesRegex(ValueError, "no derivative of lse"):
            heed.backward(ode, ode.out, grad_lse=ode.lse)

    def test_an_error_of_the_mask_s_function_comes_back(self):
        q, k, v, _, _ = problem("sdpa")
        with self.assertRaises(ZeroDivisionError):
            heed.attention(q, k, v, visible=lambda b, h, i, j: 1 // (j - 3) > -10)
        with self.assertRaises(KeyboardInterrupt):
            def stop(*_):
                raise KeyboardInterrupt
            heed.attention(q, k, v, visible=stop)

        # The first error ends the call, in backward, too: the library asks no further.
        right = [True]

        def once(b, h, i, j):
            if not right:
                raise OSError("asked once")
            return True
        with unittest.mock.patch.object(heed._Asked, "answer", autospec=True, side_effect=heed._Asked.answer) as answer:
            call = heed.forward(q, k, v, visible=once, threads=1)
            right.clear()
            for function in (lambda: heed.forward(q, k, v, visible=once, threads=1), lambda: heed.backward(call, call.out)):
                answer.reset_mock()
                with self.assertRaisesRegex(OSError, "asked once"):
                    function()
                self.assertEqual(answer.call_count, 1)

    def test_ctrl_c_ends_the_answers_of_a_function(self):
        x = np.ones((1, 1, 3000, 4))
        for _ in range(6):
            asked = threading.Event()

            def interrupt():
                asked.wait()
                os.kill(os.getpid(), signal.SIGINT)
            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            with self.assertRaises(KeyboardInterrupt):
                heed.attention(x, x, x, visible=lambda b, h, i, j: asked.is_set() or asked.set() or True, threads=1)
            interrupting.join()
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_a_library_that_is_not_there(self):
        run = subprocess.run([sys.executable, "-c", "import heed"], cwd=pathlib.Path(heed.__file__).parent, capture_output=True, text=True,
                             env=os.environ | {"HEED_LIBRARY": "/nowhere/libheed.so"})
        self.assertNotEqual(run.returncode, 0)
        last = run.stderr.strip().splitlines()[-1]
        self.assertTrue(last.startswith("ImportError: heed: the library libheed could not be loaded (/nowhere/libheed.so: "), last)
        self.assertIn("HEED_LIBRARY is /nowhere/libheed.so; build it by: ", last)
        for library, text in (("", "heed: HEED_LIBRARY is empty, it must name the file libheed.so, or be unset"),
                              ("libc.so.6", "heed: libc.so.6 has no heed_forward, it is no libheed, or an older one than heed.py")):
            run = subprocess.run([sys.executable, "-c", "import heed"], cwd=pathlib.Path(heed.__file__).parent, capture_output=True, text=True,
                                 env=os.environ | {"HEED_LIBRARY": library})
            self.assertEqual(run.stderr.strip().splitlines()[-1], "ImportError: " + text)


def sum_of_one(n):
    """What a forked child computes."""
    x = np.full((1, 4, 64, 8), float(n))
    return round(heed.attention(x, x, x, threads=2).sum())


class Library(unittest.TestCase):
    def test_forked_children_compute(self):
        self.assertEqual(sum_of_one(1), 2048)
        pool = multiprocessing.get_context("fork").Pool(2)
        try:
            self.assertEqual(pool.map_async(sum_of_one, range(3)).get(60), [0, 2048, 4096])
        finally:
            pool.terminate()

    def test_fewer_threads_where_there_is_no_memory_for_more(self):
        code = """if True:
            import resource, numpy as np, heed
            x = np.ones((1, 8, 64, 16), np.float32)
            one = heed.attention(x, x, x, threads=1)
            pages = int(open("/proc/self/statm").read().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20),) * 2)
            print((heed.attention(x, x, x, threads=4) == one).all())"""
        run = subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(heed.__file__).parent, capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stdout, run.stderr), (0, "True\n", ""))

    def test_threads(self):
        rng = np.random.default_rng(0)
        q, k, v = (rng.normal(size=(1, 4, 300, 16)).astype(np.float32) for _ in range(3))
        outs = [heed.attention(q, k, v, "dar", threads=n) for n in (1, 2, 3)]
        self.assertTrue((outs[0] == outs[1]).all() and (outs[0] == outs[2]).all())
        heed.set_threads(2)
        self.assertEqual(heed.threads(), 2)
        heed.set_threads(0)
        with self.assertRaisesRegex(ValueError, "threads is -1, it must lie between 0 and"):
            heed.set_threads(-1)

    def test_calls_of_many_threads(self):
        q, k, v, _, _ = problem("dar")
        wanted, wrong = heed.attention(q, k, v, "dar"), []

        def work(n):
            for _ in range(20):
                if (heed.attention(q, k, v, "dar") != wanted).any():
                    wrong.append("out")
                try:
                    heed.attention(q, k, v, "no-" + str(n))
                except ValueError as error:
                    if "no-" + str(n) not in str(error):
                        wrong.append(str(error))
        workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.assertEqual(wrong, [])

    def test_instruction_sets(self):
        q, k, v, _, _ = problem("dar")
        best, wanted = heed.instructions(), heed.attention(q, k, v, "dar")
        with self.assertRaisesRegex(ValueError, "the library has no abacus, it has "):
            heed.use_instructions("abacus")
        for name in ("x86-64-v2", "x86-64-v3", "x86-64-v4", "armv8-a", "armv8.2-a+bf16"):
            try:
                heed.use_instructions(name)
            except ValueError as error:
                print(error)
                continue
            self.assertEqual(heed.instructions(), name)
            self.assertTrue(near(heed.attention(q, k, v, "dar"), wanted, 1e-13))
        heed.use_instructions()
        self.assertEqual(heed.instructions(), best)

    def test_descriptions(self):
        gate = {parameter.name: parameter for parameter in heed.describe("dar")}["gate"]
        self.assertEqual((gate.kind, gate.default, gate.choices), ("choice", "logistic", ["logistic", "centred", "tanh", "piecewise_linear"]))
        steps = {parameter.name: parameter for parameter in heed.describe("ode")}
        self.assertEqual((steps["steps"].default, steps["rho"].default, steps["rho"].learnt), (5.0, 0.2, True))
        self.assertTrue({parameter.name: parameter for parameter in heed.describe("prototype")}["W"].required)
        self.assertEqual(heed.version().count("."), 2)

    def test_parameters_begin_as_the_seed_says(self):
        q, _, v, _, _ = problem("prototype")
        one, same, other = (heed.parameters("prototype", q, v, seed=n, prototypes=5) for n in (1, 1, 2))
        self.assertEqual(one["W"].shape, (HEADS, 5, DIM))
        self.assertTrue((one["W"] == same["W"]).all() and (one["W"] != other["W"]).any())
        self.assertEqual(heed.parameters("dar", q.astype(np.float32), v.astype(np.float32))["strength"].dtype, np.float32)

    def test_reports_of_rows(self):
        q, k, v, _, p = problem("ode")
        call = heed.forward(q, k, v, "ode", **p)
        self.assertEqual(call.reports["residual"].shape, (BATCH, HEADS, LEN, 1))
        self.assertEqual(heed.forward(q, k, v).reports, {})


if __name__ == "__main__":
    unittest.main()
