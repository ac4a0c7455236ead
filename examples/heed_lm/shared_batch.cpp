// SPDX-License-Identifier: Apache-2.0
#include "shared_batch.hpp"

#include "json_fields.hpp"

#include <heed/core/error.hpp>
#include <heed/nn/not_finite.hpp>

#include <cstring>
#include <limits>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed_program::Ranks;

// The rows of a batch that one rank computes: [first, end).
struct Rows {
  Index first, end;
};
[[nodiscard]] Rows rows_of(const Batch& batch, const Ranks& ranks) {
  const Index rank = ranks.rank(), count = ranks.count();
  return {batch.rows * rank / count, batch.rows * (rank + 1) / count};
}

[[nodiscard]] double gradient_of(Model& model, nn::Context<float>& context, Index rows,
                                 std::span<const Index> inputs, std::span<const Index> targets) {
  try {
    return model.gradient(context, rows, inputs, targets);
  } catch (
      const nn::NotFinite&) {  // keys that a memory is to learn; the rows behind them have no loss
    return std::numeric_limits<double>::quiet_NaN();
  }
}

// Replaces the gradients of all weights by their sums over the ranks.
void sum_gradients(Model& model, Ranks& ranks) {
  std::vector<float> all;
  model.visit(
      nn::Visitor<float>([&](const std::string&, heed::Param<float>&, heed::Param<float>& grad) {
        all.insert(all.end(), grad.data(), grad.data() + grad.size());
      }));
  ranks.sum(all);
  const float* from = all.data();
  model.visit(
      nn::Visitor<float>([&](const std::string&, heed::Param<float>&, heed::Param<float>& grad) {
        std::copy_n(from, grad.size(), grad.data());
        from += grad.size();
      }));
}

// Adds to an FNV-1a hash of 32-bit words.
class Hash {
 public:
  void add(const float* numbers, Index count) {
    for (Index i = 0; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, numbers + i, sizeof bits);
      add(bits);
    }
  }
  void add(const std::string& text) {
    for (const char c : text) add(std::uint32_t(static_cast<unsigned char>(c)));
  }
  void add(std::uint64_t number) {
    add(std::uint32_t(number));
    add(std::uint32_t(number >> 32));
  }
  [[nodiscard]] std::uint64_t value() const { return hash_; }

 private:
  void add(std::uint32_t word) { hash_ = (hash_ ^ word) * 0x100000001B3u; }
  std::uint64_t hash_ = 0xCBF29CE484222325u;
};

}  // namespace

double shared_gradient(Model& model, nn::Context<float>& context, const Batch& batch,
                       Ranks& ranks) {
  if (ranks.count() == 1) {
    const Packing all(batch, model.takes_packed());
    const Packed packed(context, all);
    return gradient_of(model, context, all.batch, all.inputs, all.targets);
  }
  const Rows rows = rows_of(batch, ranks);
  const auto first = std::size_t(rows.first * batch.len),
             count = std::size_t((rows.end - rows.first) * batch.len);
  context.part = {Index(first), Index(count), batch.rows * batch.len, count_targets(batch.targets)};
  const double mine = gradient_of(model, context, rows.end - rows.first,
                                  std::span(batch.inputs).subspan(first, count),
                                  std::span(batch.targets).subspan(first, count));
  context.part = {};
  double loss = 0;
  for (const double part : ranks.gather(mine)) loss += part;
  if (std::isfinite(loss)) sum_gradients(model, ranks);
  return loss;
}

void require_shareable(Run& run, const Ranks& ranks) {
  if (ranks.count() == 1) return;
  heed::require(run.train.batch >= ranks.count(), "--batch is ", run.train.batch, ", ",
                ranks.count(), " ranks share it; it must be at least ", ranks.count());
  Index states = 0;
  run.model->visit_state(
      nn::StateVisitor<float>([&](const std::string&, heed::Param<float>&) { ++states; }));
  heed::require(states == 0, "--variant is ", run.config.variant,
                ", whose memory learns the keys of a batch one after another; it trains on one "
                "rank, not on ",
                ranks.count());
}

void require_same_run(Run& run, std::uint64_t data, Ranks& ranks) {
  if (ranks.count() == 1) return;
  Hash weights, settings;
  run.model->visit(nn::Visitor<float>(
      [&](const std::string& name, heed::Param<float>& value, heed::Param<float>&) {
        weights.add(name);
        weights.add(value.data(), value.size());
      }));
  run.optimiser.visit_state(
      [&](const std::string&, std::vector<float>& first, std::vector<float>& second) {
        weights.add(first.data(), Index(first.size()));
        weights.add(second.data(), Index(second.size()));
      });
  settings.add(json_of(run.train));
  settings.add(std::uint64_t(run.step));
  struct Print {
    std::uint64_t weights, settings, data;
  };
  const std::vector<Print> all = ranks.gather(Print{weights.value(), settings.value(), data});
  for (std::size_t r = 1; r < all.size(); ++r) {
    heed::require(all[r].settings == all[0].settings, "rank ", r,
                  " has other settings of training, or another step, than rank 0; all ranks must "
                  "be given the same options and files");
    heed::require(all[r].data == all[0].data, "rank ", r,
                  " has other data than rank 0; all ranks must read the same files");
    heed::require(all[r].weights == all[0].weights, "rank ", r, " has other weights than rank 0 ",
                  run.step == 0 ? "at the beginning" : "after step " + std::to_string(run.step),
                  "; all ranks must run the same program on processors of one kind");
  }
}

}  // namespace heed_lm
