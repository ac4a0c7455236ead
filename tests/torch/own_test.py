# SPDX-License-Identifier: Apache-2.0
"""A score of one's own in PyTorch: own.cmake makes a library of own/recency.hpp, which is loaded beside heed's and compared with its formula.

    python3 own_test.py CMAKE own.cmake libheed_torch.so FOLDER
"""
import pathlib
import subprocess
import sys

try:
    import torch
except ImportError:
    print("skipped: python3 has no torch (Debian: python3-torch)")
    sys.exit(77)


def main():
    cmake, own, library, folder = sys.argv[1:]
    here = pathlib.Path(__file__).parent
    subprocess.run([cmake, "-P", own, str(here / "own" / "recency.hpp"), folder], check=True)
    torch.ops.load_library(library)
    torch.ops.load_library(str(pathlib.Path(folder) / "librecency.so"))
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    slope = torch.rand(3, dtype=torch.float64, requires_grad=True)
    at = torch.arange(9)
    score = q @ k.transpose(-2, -1) * 8 ** -0.5 - slope.view(-1, 1, 1) * (at[:, None] - at[None, :])
    want = score.masked_fill(at[:, None] < at[None, :], float("-inf")).softmax(-1) @ v
    got = torch.ops.heed.recency(q, k, v, slope=slope, causal=True)
    assert (got - want).abs().max() < 1e-12, "the library differs from its formula"
    inputs = (q, k, v, slope)
    weight = torch.randn_like(want)
    for name, a, b in zip(("query", "key", "value", "slope"), torch.autograd.grad(got, inputs, weight),
                          torch.autograd.grad(want, inputs, weight)):
        assert (a - b).abs().max() < 1e-11, f"the gradient of {name} differs from that of its formula"
    call = lambda *tensors: torch.ops.heed.recency(*tensors[:3], slope=tensors[3], causal=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True, check_fwd_over_rev=True)
    assert torch.ops.heed.sdpa(q, k, v).shape == want.shape  # heed's own library lives beside it
    # A file that cannot be made into a library is refused in one sentence.
    capitals = pathlib.Path(folder) / "Recency.hpp"
    capitals.write_text("")
    for formula, sentence in ((here / "own" / "nothing.hpp", "there is no file"), (capitals, "my_score.hpp holds MyScore")):
        ran = subprocess.run([cmake, "-P", own, str(formula), folder], capture_output=True, text=True)
        assert ran.returncode != 0, formula
        assert sentence in " ".join(ran.stderr.split()), ran.stderr
    print("1 passed, 0 failed")


main()
