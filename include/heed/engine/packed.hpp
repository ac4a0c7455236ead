// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed sequences (Packed in engine/call.hpp) as separate calls: the views, mask and options of each. A call is one
// sequence. Neighbours of one length are one call, of which each is a batch, where mask and op allow this without a change
// of bits. No sequences are one call of no batch.

#include <heed/engine/open.hpp>
#include <heed/mask/sequence_rule.hpp>

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Sequences [first, first + count), of one length: rows [query, query + count * len_q) of queries, and likewise of keys.
struct PackedRun {
  Index first = 0, count = 1;
  Index query = 0, len_q = 0, key = 0, len_kv = 0;
  Index first_query = 0;
};

// The view of f(numbers, false), or of that and f(scales, true) where rows have scales. A view that is not given stays
// so.
template <class Element, class F>
[[nodiscard]] StoredView<Element> part_of(const StoredView<Element>& view, F&& f) {
  if (!view.given()) return view;
  return view.visit([&](const auto& of) -> StoredView<Element> {
    if constexpr (requires { of.scales(); })
      return std::remove_cvref_t<decltype(of)>(f(of.numbers(), false), f(of.scales(), true));
    else
      return f(of, false);
  });
}
template <class Element>
[[nodiscard]] StoredView<Element> rows_of_run(const StoredView<Element>& view, Index first,
                                              Index count, Index len) {
  return part_of(view, [&]<class U>(const TensorView<U>& of, bool) -> TensorView<U> {
    const Strides& s = of.strides();
    return {of.has_elements() ? of.row(0, 0, first) : of.data(),
            {count, of.shape().heads, len, of.shape().dim},
            {len * s.row, s.head, s.row}};
  });
}
// What a sequence reads of a tensor (sequences or 1, heads or 1, longest len_q or 1, longest len_kv): the first rows and
// columns of its batch.
template <class U>
[[nodiscard]] TensorView<U> corner_of(const TensorView<U>& view, const PackedRun& run,
                                      bool scales = false) {
  const Shape& s = view.shape();
  if (!view.given()) return view;
  const Index batch = s.batch == 1 ? 0 : run.first;
  return {view.has_elements() ? view.row(batch, 0, 0) : view.data(),
          {1, s.heads, s.len == 1 ? 1 : run.len_q, scales ? 1 : run.len_kv},
          view.strides()};
}
template <class Element>
[[nodiscard]] StoredView<Element> corner_of(const StoredView<Element>& view, const PackedRun& run) {
  return part_of(view, [&](const auto& of, bool scales) { return corner_of(of, run, scales); });
}

template <class Real>
class PackedCalls;
// One of the calls that packed sequences are, with all that it refers to.
template <class Real>
struct PackedCall {
  Index number;
  Inputs<Real> in;
  Mask<Real> mask;
  Options options;
  OpenCall<Real> open;

  PackedCall(const PackedCalls<Real>& all, Index n);
  PackedCall(const PackedCall&) = delete;  // open refers to the other members
};

// How calls are run. One that is so small a part of all is one item of work: it is prepared, computed and forgotten by one
// worker, in whose cache it stays. Larger ones are prepared ahead, and their panels spread over all workers.
inline constexpr double kSmallPart = 1.0 / 16;  // of a worker's share
template <class Real>
struct PackedPlan {
  Geometry whole;  // of the packed tensors
  int threads = 1;
  std::deque<PackedCall<Real>> large;
  std::vector<Index> small;
};

template <class Real>
class PackedCalls {
 public:
  // Throws std::invalid_argument where the lengths do not fit the tensors or each other. The call must outlive this.
  explicit PackedCalls(const OpenCall<Real>& call)
      : call_(call), in_(call.in), packed_(*in_.packed), mask_(call.mask), where_(call.where) {
    const Inputs<Real>& in = in_;
    require(in.share == Share{}, where_,
            ": packed sequences and a share of a call were given, they do not go together");
    const Index count = packed_.sequences();
    require(!packed_.queries.empty(), where_,
            ": packed.queries has 0 numbers, it needs one per sequence, and one more");
    check_lengths(packed_.queries, count, "queries");
    if (with_caches())
      take_lengths_of_caches(count);
    else
      keys_ = packed_.keys.empty() ? packed_.queries : packed_.keys;
    check_lengths(keys_, count, "keys");
    require(packed_.first_query.empty() || Index(packed_.first_query.size()) == count, where_,
            ": packed.first_query has ", packed_.first_query.size(), " numbers, there are ", count,
            " sequences");
    check_tensor(in.query, packed_.queries.back(), "query", "queries");
    if (!with_caches()) {
      check_tensor(in.key, keys_.back(), "key", "keys");
      check_tensor(in.value, keys_.back(), "value", "keys");
    }
    check_given(in.extra, packed_.queries.back(), "extra", "queries");
    check_given(in.query_inputs, packed_.queries.back(), "query_inputs", "queries");
    check_given(in.key_inputs, keys_.back(), "key_inputs", "keys");
    require(with_caches() || in.key_features == nullptr, where_,
            ": key_features were given, packed sequences take those of packed.caches");
    make_runs(calls_may_join());
    check_mask();
  }

  [[nodiscard]] Index size() const { return Index(runs_.size()); }
  [[nodiscard]] Index sequences() const { return packed_.sequences(); }
  [[nodiscard]] const PackedRun& run(Index n) const { return runs_[std::size_t(n)]; }
  [[nodiscard]] Index total_queries() const { return packed_.queries.back(); }
  [[nodiscard]] Index total_keys() const { return keys_.back(); }
  [[nodiscard]] bool with_caches() const { return !packed_.caches.empty(); }
  [[nodiscard]] const OpTiles<Real>& op() const { return call_.op; }
  [[nodiscard]] Options options(Index n) const {
    Options own = call_.options;
    own.dropout.first_batch += run(n).first;
    return own;
  }
  // The beginning of an error's sentence about call n.
  [[nodiscard]] std::string where(Index n) const {
    if (sequences() == 0) return where_;
    return where_ + " (sequence " + std::to_string(run(n).first) + ")";
  }

  // What belongs to call n: of a tensor, of outputs or their gradients, and of a set.
  template <class Element>
  [[nodiscard]] StoredView<Element> part(const StoredView<Element>& view, TokensOf tokens,
                                         Index n) const {
    const PackedRun& at = run(n);
    return tokens == TokensOf::queries ? rows_of_run(view, at.query, at.count, at.len_q)
           : tokens == TokensOf::keys  ? rows_of_run(view, at.key, at.count, at.len_kv)
                                       : corner_of(view, at);
  }
  template <class Element>
  [[nodiscard]] OutputViews<Element> outputs(const OutputViews<Element>& all, Index n) const {
    return {part(all.out, TokensOf::queries, n), part(all.lse, TokensOf::queries, n),
            part(all.steps, TokensOf::queries, n)};
  }
  template <class Set>
  [[nodiscard]] Set tensors(const Set& all, Index n) const {
    return map_tensors<Set>(
        all, [&](const auto& tensor, TokensOf tokens) { return part(tensor, tokens, n); });
  }
  // All calls; throws where one does not fit.
  [[nodiscard]] std::deque<PackedCall<Real>> calls() const {
    require(!with_caches(), where_, ": packed.caches has ", sequences(),
            " sequences, forward() alone reads keys and values of caches; give them as tensors");
    std::deque<PackedCall<Real>> calls;
    for (Index n = 0; n < size(); ++n) calls.emplace_back(*this, n);
    return calls;
  }
  // The plan of a forward call; throws where a sequence does not fit, before any is computed.
  [[nodiscard]] PackedPlan<Real> plan(const Outputs<Real>& outputs) const {
    PackedPlan<Real> plan;
    std::vector<double> flops;
    double all_flops = 0;
    for (Index n = 0; n < size(); ++n) {
      const PackedCall<Real> one(*this, n);
      check(one.open, outputs);
      plan.whole = whole(one.open.geometry);
      flops.push_back(product_flops(one.open.geometry));
      all_flops += flops.back();
    }
    plan.threads = worker_count(call_.options, all_flops, std::numeric_limits<Index>::max(), 1);
    for (Index n = 0; n < size(); ++n)
      if (mask_.rules.empty() && !with_caches() &&
          flops[std::size_t(n)] * plan.threads <= all_flops * kSmallPart)
        plan.small.push_back(n);
      else
        plan.large.emplace_back(*this, n);
    return plan;
  }

  // The sizes of the packed tensors, of a call's.
  [[nodiscard]] Geometry whole(Geometry g) const {
    g.batch = 1;
    g.len_q = total_queries();
    g.len_kv = total_keys();
    g.first_query = in_.first_query;
    return g;
  }
  // Rows as the caller packs them, beside what backward() reads.
  void gather(Saved<Real>& saved, Index maps, const Geometry& whole) const {
    const std::size_t rows = std::size_t(whole.query_rows());
    saved.lse.assign(std::size_t(maps) * rows, Real(0));
    saved.state.clear();
    saved.mixed.clear();
    saved.diagnostic_names = saved.sequences[0].diagnostic_names;
    saved.diagnostics.assign(saved.diagnostic_names.size(), std::vector<Real>(rows));
    for (Index n = 0; n < size(); ++n) {
      const Saved<Real>& own = saved.sequences[std::size_t(n)];
      gather(own.lse, maps, whole.heads, n, saved.lse);
      for (std::size_t d = 0; d < saved.diagnostics.size(); ++d)
        gather(own.diagnostics[d], 1, whole.heads, n, saved.diagnostics[d]);
    }
  }

  [[nodiscard]] Inputs<Real> inputs(Index n) const {
    Inputs<Real> in = tensors(in_, n);
    in.first_query = run(n).first_query;
    in.queries_at_end = in_.queries_at_end;
    if (!with_caches()) return in;
    const SequenceKeys<Real>& cache = packed_.caches[std::size_t(n)];
    in.key = cache.key;
    in.value = cache.value;
    in.key_features = cache.key_features;
    return in;
  }
  [[nodiscard]] Mask<Real> mask(Index n) const {
    const PackedRun& at = run(n);
    Mask<Real> own;
    own.bands = mask_.bands;
    own.key_ranges = mask_.key_ranges;
    own.slopes = mask_.slopes;
    own.slope_align = mask_.slope_align;
    own.slope_offset = mask_.slope_offset;
    own.soft_cap = mask_.soft_cap;
    own.allowed = corner_of(mask_.allowed, at);
    own.bias = corner_of(mask_.bias, at);
    own.key_lengths = part_of(mask_.key_lengths, at.first, at.count);
    own.query_documents = part_of(mask_.query_documents, at.query, at.len_q);
    own.key_documents = part_of(mask_.key_documents, at.key, at.len_kv);
    for (const auto& rule : mask_.rules) {
      auto of_own = rule->of_sequences(at.first, sequences());
      if (!of_own) of_own = std::make_shared<SequenceRule>(rule, at.first, sequences());
      own.rules.push_back(std::move(of_own));
    }
    return own;
  }
  // to[maps][heads][total] = from[maps][count][heads][len], numbers of the rows of call n.
  void gather(const std::vector<Real>& from, Index maps, Index heads, Index n,
              std::vector<Real>& to) const {
    const PackedRun& at = run(n);
    for (Index m = 0; m < maps; ++m)
      for (Index b = 0; b < at.count; ++b)
        for (Index h = 0; h < heads; ++h)
          std::copy_n(from.data() + ((m * at.count + b) * heads + h) * at.len_q, at.len_q,
                      to.data() + (m * heads + h) * total_queries() + at.query + b * at.len_q);
  }

 private:
  // Throws where mask or outputs do not fit a call.
  void check(const OpenCall<Real>& call, const Outputs<Real>& outputs) const {
    if (mask_.rules.empty()) (void)call.bound_mask(1);
    if (!with_caches()) return;
    for (const NamedMemory& out : memory_of("", outputs)) {
      require_apart(out, named_memory("key", call.in.key), call.where);
      require_apart(out, named_memory("value", call.in.value), call.where);
    }
  }
  void check_lengths(const std::vector<Index>& at, Index count, const char* of) const {
    require(Index(at.size()) == count + 1, where_, ": packed.", of, " has ", at.size(),
            " numbers, packed.queries has ", packed_.queries.size(),
            "; both need one per sequence, and one more");
    require(at[0] == 0, where_, ": packed.", of, " begins with ", at[0], ", it must begin with 0");
    for (Index n = 0; n < count; ++n)
      require(at[std::size_t(n)] <= at[std::size_t(n + 1)], where_, ": packed.", of, " falls from ",
              at[std::size_t(n)], " to ", at[std::size_t(n + 1)], " at sequence ", n,
              ", no sequence has a negative length");
  }
  void take_lengths_of_caches(Index count) {
    require(Index(packed_.caches.size()) == count, where_, ": packed.caches has ",
            packed_.caches.size(), " sequences, packed.queries has ", count);
    require(packed_.keys.empty(), where_, ": packed.keys has ", packed_.keys.size(),
            " numbers beside packed.caches, which have lengths of their own");
    require(!in_.key.given() && !in_.value.given(), where_, ": key or value of shape ",
            in_.key.given() ? in_.key.shape() : in_.value.shape(),
            " was given beside packed.caches");
    keys_.assign(1, 0);
    for (const SequenceKeys<Real>& cache : packed_.caches) {
      require(cache.key.given() && cache.value.given(), where_, ": packed.caches has no ",
              cache.key.given() ? "value" : "key", " for sequence ", keys_.size() - 1);
      keys_.push_back(keys_.back() + cache.key.shape().len);
    }
  }
  template <class Element>
  void check_tensor(const StoredView<Element>& view, Index total, const char* name,
                    const char* of) const {
    require(view.given(), where_, ": ", name, " was not given");
    check_given(view, total, name, of);
  }
  template <class Element>
  void check_given(const StoredView<Element>& view, Index total, const char* name,
                   const char* of) const {
    if (!view.given()) return;
    require_view(view, name, where_);
    require_one_piece(view, name, where_);
    const Shape& s = view.shape();
    require(s.batch == 1, where_, ": ", name, " has batch ", s.batch,
            ", packed sequences lie in a batch of 1");
    require(s.len == total, where_, ": packed.", of, " ends with ", total, ", ", name, " has len ",
            s.len);
  }

  // Do neighbours of one length have the same bits in a batch as in calls by themselves? Not where rows depend on all rows of
  // a call.
  [[nodiscard]] bool calls_may_join() const {
    return !call_.op.readout.traits.rehearses && !with_caches() && !mask_.key_lengths &&
           !mask_.allowed.given() && !mask_.bias.given() && !mask_.query_documents &&
           !mask_.key_documents && mask_.rules.empty();
  }
  void make_runs(bool joins) {
    for (Index n = 0; n < sequences(); ++n) {
      const std::size_t i = std::size_t(n);
      PackedRun next{n,
                     1,
                     packed_.queries[i],
                     packed_.queries[i + 1] - packed_.queries[i],
                     keys_[i],
                     keys_[i + 1] - keys_[i],
                     packed_.first_query.empty() ? in_.first_query : packed_.first_query[i]};
      longest_q_ = std::max(longest_q_, next.len_q);
      longest_kv_ = std::max(longest_kv_, next.len_kv);
      // Few queries of longer keys are read in parts, as many as there are heads in the call.
      if (joins && n > 0 && next.len_kv < 2 * kPartKeys) {
        PackedRun& last = runs_.back();
        if (last.len_q == next.len_q && last.len_kv == next.len_kv &&
            last.first_query == next.first_query) {
          ++last.count;
          continue;
        }
      }
      runs_.push_back(next);
    }
    if (runs_.empty()) runs_.push_back({.count = 0});
  }

  void check_mask() const {
    if (mask_.key_lengths)
      require(Index(mask_.key_lengths->size()) == sequences(), where_, ": key_lengths has ",
              mask_.key_lengths->size(), " entries, there are ", sequences(), " sequences");
    const auto check_corners = [&](const auto& view, const char* what) {
      const Shape& s = view.shape();
      require(!view.given() || ((s.batch == 1 || s.batch == sequences()) &&
                                (s.len == 1 || s.len == longest_q_) && s.dim == longest_kv_),
              where_, ": the ", what, " has shape ", s,
              ", that of packed sequences is of a padded batch, (1 or ", sequences(),
              ",heads,1 or ", longest_q_, ",", longest_kv_, ")");
    };
    check_corners(mask_.allowed, "boolean mask");
    check_corners(mask_.bias, "bias");
    const auto check_ids = [&](const auto& ids, Index total, const char* of) {
      require(!ids || Index(ids->size()) == total, where_, ": documents has ",
              ids ? ids->size() : 0, " ", of, " ids, there are ", total, " in all sequences");
    };
    check_ids(mask_.query_documents, total_queries(), "query");
    check_ids(mask_.key_documents, total_keys(), "key");
  }
  [[nodiscard]] static std::optional<std::vector<Index>> part_of(
      const std::optional<std::vector<Index>>& all, Index first, Index count) {
    if (!all) return {};
    return std::vector<Index>(all->begin() + first, all->begin() + first + count);
  }

  const OpenCall<Real>& call_;
  const Inputs<Real>& in_;
  const Packed<Real>& packed_;
  const Mask<Real>& mask_;
  const std::string& where_;
  std::vector<Index> keys_;  // cumulative
  std::vector<PackedRun> runs_;
  Index longest_q_ = 0, longest_kv_ = 0;
};

template <class Real>
PackedCall<Real>::PackedCall(const PackedCalls<Real>& all, Index n)
    : number(n),
      in(all.inputs(n)),
      mask(all.mask(n)),
      options(all.options(n)),
      open(all.op(), {in, mask, options}, all.where(n)) {
  open.geometry = geometry_of(open.op, in, open.where);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
