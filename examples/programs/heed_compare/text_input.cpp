// SPDX-License-Identifier: Apache-2.0
#include "text_input.hpp"

#include "settings.hpp"

#include <heed/core/parallel.hpp>
#include <heed/core/random.hpp>
#include <heed/io/atomic_file.hpp>

#include <cmath>

namespace compare {

namespace {

constexpr Index kWidth = TextInput::width;

// A table of shape (256, width).
[[nodiscard]] std::vector<double> byte_embedding(std::uint64_t seed) {
  const heed::CounterRandom random(seed, 0);
  std::vector<double> table(std::size_t(256 * kWidth));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = random.normal(i);
  return table;
}

// Sine in even columns, cosine in odd ones.
void add_position(Index t, double* row) {
  for (Index c = 0; c < kWidth; c += 2) {
    const double angle = double(t) * std::pow(10000.0, -double(c) / double(kWidth));
    row[c] += std::sin(angle);
    row[c + 1] += std::cos(angle);
  }
}

void normalise(double* row) {
  double squares = 0;
  for (Index c = 0; c < kWidth; ++c) squares += row[c] * row[c];
  const double factor = 1 / std::sqrt(squares / double(kWidth) + 1e-6);
  for (Index c = 0; c < kWidth; ++c) row[c] *= factor;
}

// A matrix per head, (heads, width, dim).
[[nodiscard]] std::vector<double> projection(std::uint64_t seed, std::uint64_t stream, Index heads,
                                             Index dim) {
  const heed::CounterRandom random(seed, stream);
  const double spread = 1 / std::sqrt(double(kWidth));
  std::vector<double> matrix(std::size_t(heads * kWidth * dim));
  for (std::size_t i = 0; i < matrix.size(); ++i) matrix[i] = spread * random.normal(i);
  return matrix;
}

// out (dim) = x (width) . matrix (width, dim)
void multiply(const double* x, const double* matrix, Index dim, double* out) {
  for (Index c = 0; c < dim; ++c) out[c] = 0;
  for (Index k = 0; k < kWidth; ++k)
    for (Index c = 0; c < dim; ++c) out[c] += x[k] * matrix[k * dim + c];
}

}  // namespace

std::string read_text(const std::string& path, const std::string& option) {
  std::vector<std::byte> bytes;
  try {
    bytes = heed::io::read_file(path);
  } catch (const std::runtime_error& error) {
    throw UsageError(option + " " + error.what());
  }
  if (bytes.empty()) throw UsageError(option + " " + path + ": the file is empty");
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TextInput::TextInput(const std::string& text, Index batch, Index len, std::uint64_t seed)
    : batch_(batch), len_(len), seed_(seed), x_(std::size_t(batch * len * width)) {
  const std::vector<double> embedding = byte_embedding(seed);
  for (Index token = 0; token < batch * len; ++token) {
    const auto byte = static_cast<unsigned char>(text[std::size_t(token) % text.size()]);
    double* row = x_.data() + token * width;
    for (Index c = 0; c < width; ++c) row[c] = embedding[std::size_t(byte * width + c)];
    add_position(token % len, row);
    normalise(row);
  }
}

std::vector<double> TextInput::project(std::uint64_t stream, Index heads, Index dim) const {
  const std::vector<double> matrix = projection(seed_, stream, heads, dim);
  std::vector<double> out(std::size_t(batch_ * heads * len_ * dim));
  heed::parallel_for(batch_ * heads, heed::resolve_threads(0), [&](Index unit) {
    const double* head_matrix = matrix.data() + unit % heads * width * dim;
    for (Index t = 0; t < len_; ++t)
      multiply(x_.data() + (unit / heads * len_ + t) * width, head_matrix, dim,
               out.data() + (unit * len_ + t) * dim);
  });
  return out;
}

}  // namespace compare
