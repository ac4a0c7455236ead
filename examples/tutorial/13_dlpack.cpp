// SPDX-License-Identifier: Apache-2.0

// Step 13 of 15. You learn to exchange tensors with other libraries through DLPack. Attention reads a foreign (batch, len,
// heads, dim) tensor where it lies; the result goes out as a tensor that owns its memory.

#include <heed/engine/doors.hpp>
#include <heed/io/dlpack.hpp>
#include <heed/ops/dar.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

using namespace heed;
constexpr Index kBatch = 2, kLen = 64, kHeads = 4, kDim = 16;

// Stands for a tensor of NumPy, PyTorch or JAX: x[:, :, part].transpose(1, 2) of a packed projection
// (batch, len, 3, heads, dim).
struct ForeignTensor {
  std::int64_t shape[4] = {kBatch, kHeads, kLen, kDim};
  std::int64_t strides[4] = {kLen * 3 * kHeads * kDim, kDim, 3 * kHeads* kDim, 1};
  DLTensor dl{};

  ForeignTensor(std::vector<float>& projection, Index part) {
    dl.data = projection.data();
    dl.byte_offset = std::uint64_t(part * kHeads * kDim) * sizeof(float);
    dl.device = {kDLCPU, 0};
    dl.dtype = {kDLFloat, 32, 1};
    dl.ndim = 4;
    dl.shape = shape;
    dl.strides = strides;
  }
};

}  // namespace

int main() {
  std::vector<float> projection(kBatch * kLen * 3 * kHeads * kDim);
  for (std::size_t i = 0; i < projection.size(); ++i) projection[i] = 0.01F * float(i % 97) - 0.4F;
  const ForeignTensor query(projection, 0), key(projection, 1), value(projection, 2);

  const Shape shape{kBatch, kHeads, kLen, kDim};
  DlpackPtr<> out = to_dlpack(std::vector<float>(kBatch * kHeads * kLen * kDim), shape);
  const auto read = [](const ForeignTensor& tensor) { return view_dlpack<const float>(tensor.dl); };
  forward(Dar<float>{}, {read(query), read(key), read(value)}, causal<float>(),
          view_dlpack<float>(out->dl_tensor));

  DLManagedTensor* theirs = out.release();  // as a PyCapsule named "dltensor" would carry it
  const auto* numbers = static_cast<const float*>(theirs->dl_tensor.data);
  const float wanted = read(value)(0, 0, 0, 0);  // the first token sees itself alone
  std::printf("out[0] = %.6f, value[0] = %.6f\n", double(numbers[0]), double(wanted));
  const bool same = std::abs(numbers[0] - wanted) < 1e-6F;
  theirs->deleter(theirs);  // frees the result
  return same ? 0 : 1;
}
