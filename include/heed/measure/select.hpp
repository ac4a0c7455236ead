// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which keys each query keeps, chosen by scores: lists for block_lists() (mask/block_lists.hpp), which joins other masks by &.
//
//   const heed::BlockLists lists = heed::select_keys(in, causal<float>(), 64);              // the 64 largest q.k of each row
//   heed::forward(op, in, causal<float>() & heed::block_lists<float>(lists), out);
//
//   select_keys(in, mask, count)              the visible keys with the largest q . k
//   select_blocks(in, mask, block, count)     blocks of keys by q . mean of their keys; the query's own block is always kept
//   select_indexed(index, mask, count)        one choice for all heads, by an indexer: sum_a w_a relu(q'_a . k')
//   select_weighed(in, mask, windows)         blocks by weights of windows of keys, summed over the heads that share keys
//   select_largest(...)                       by scores of one's own
//
// Choices are constants for derivatives. The lower position wins among equal scores, and a NaN is
// larger than all numbers, so that it is not lost. A row with fewer visible keys keeps them all.
//
// Queries  stand at Inputs::first_query, as a cache hands them out: decoding chooses for the new tokens alone
// Memory   a row of scores per thread, and the lists
// Cost     the scores of all visible pairs; select_blocks() and select_weighed() those of blocks and windows
// Errors   std::invalid_argument where tensors do not fit, or a count is not positive

#include <heed/core/parallel.hpp>
#include <heed/core/scalar.hpp>
#include <heed/engine/call.hpp>
#include <heed/engine/widened.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/mask/visible.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/storage.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Sizes of a choice: `count` of `blocks` for each of `rows` rows of `heads` heads of `batch`.
struct Choice {
  Index batch = 1, heads = 1, rows = 0, blocks = 0, count = 0;
  Index query_block = 1, key_block = 1;  // of the lists
};

namespace detail {

// Numbers that have the order of scores: a NaN lies above all others, -0 is 0, and 0 stands for a score of -infinity.
template <class Real>
[[nodiscard]] auto rank_of(Real score) {
  using Bits = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;
  constexpr Bits sign = Bits(1) << (8 * sizeof(Real) - 1);
  if (std::isnan(score)) return ~Bits(0);
  if (score == -kInfinity<Real>) return Bits(0);
  const Bits bits = std::bit_cast<Bits>(score + Real(0));
  return Bits(bits & sign ? ~bits : bits | sign);
}

}  // namespace detail

// The blocks with the largest scores. scores(b, h, row, s) fills s[0 ... blocks), which hold -infinity: blocks that keep it
// are no candidates. It runs on `threads` threads (0: the default number).
template <class Real, class Scores>
[[nodiscard]] BlockLists select_largest(const Choice& of, Scores&& scores, int threads = 0) {
  require(of.count > 0, "heed::select_largest: count is ", of.count, ", it must be positive");
  const Index tables = of.batch * of.heads, room = std::min(of.count, of.blocks);
  std::vector<Index> kept(std::size_t(tables * of.rows * room)),
      counts(std::size_t(tables * of.rows));
  const Index chunk = 16, chunks = (of.rows + chunk - 1) / chunk;
  parallel_for(tables * chunks, resolve_threads(threads), [&](Index unit) {
    const Index table = unit / chunks, first = unit % chunks * chunk;
    std::vector<Real> s(std::size_t(of.blocks));
    std::vector<decltype(detail::rank_of(Real(0)))> ranks(s.size()), largest;
    for (Index row = first; row < std::min(first + chunk, of.rows); ++row) {
      std::fill(s.begin(), s.end(), -kInfinity<Real>);
      scores(table / of.heads, table % of.heads, row, s.data());
      std::transform(s.begin(), s.end(), ranks.begin(), detail::rank_of<Real>);
      const Index n = std::min(room, of.blocks - std::count(ranks.begin(), ranks.end(), 0U));
      counts[std::size_t(table * of.rows + row)] = n;
      if (n == 0) continue;
      // The least rank that is kept, and how many blocks of this rank are.
      largest = ranks;
      std::nth_element(largest.begin(), largest.begin() + (n - 1), largest.end(), std::greater<>());
      const auto least = largest[std::size_t(n - 1)];
      Index level = std::count(largest.begin(), largest.begin() + n, least);
      Index* to = kept.data() + (table * of.rows + row) * room;
      for (Index k = 0; k < of.blocks; ++k) {
        const auto rank = ranks[std::size_t(k)];
        if (rank > least || (rank == least && level-- > 0)) *to++ = k;
      }
    }
  });
  BlockLists lists{of.query_block, of.key_block, {0}, {}, of.batch, of.heads};
  for (std::size_t row = 0; row < counts.size(); ++row) {
    const auto first = kept.begin() + Index(row) * room;
    lists.indices.insert(lists.indices.end(), first, first + counts[row]);
    lists.start.push_back(Index(lists.indices.size()));
  }
  return lists;
}

namespace detail {

// Query and key of a call, whose heads share keys evenly, and what its mask shows.
template <class Real>
class ChoiceRows {
 public:
  ChoiceRows(const Inputs<Real>& in, const Mask<Real>& mask, int threads, const char* where)
      : copies_(threads),
        query_(copies_.read(in.query)),
        key_(copies_.read(in.key)),
        geometry_(sizes(in, where)),
        own_mask_(mask),
        mask_(own_mask_, geometry_, where) {}
  ChoiceRows(const ChoiceRows&) = delete;  // mask_ refers to own_mask_

  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] const BoundMask<Real>& mask() const { return mask_; }
  [[nodiscard]] const TensorView<const Real>& key() const { return key_; }
  [[nodiscard]] const Real* query(Index b, Index h, Index i) const { return query_.row(b, h, i); }
  [[nodiscard]] Real dot(Index b, Index h, Index i, const Real* with) const {
    const Real* const query = query_.row(b, h, i);
    return math::dot_product(
        geometry_.dim_qk, [&](Index c) { return query[c]; }, [&](Index c) { return with[c]; });
  }
  // Does the query see one of the keys [first, end), which bands and lengths leave to it?
  [[nodiscard]] bool sees_any(Index b, Index h, Index i, Index first, Index end) const {
    bool any = false;
    for (Index j = first; j < end && !any; ++j) any = mask_.visible(b, h, i, j);
    return any;
  }

  // dots[j] = q_i . k_j of all keys that bands and lengths leave to the query; -infinity where the mask hides one.
  void dots(Index b, Index h, Index i, Real* dots) const {
    const KeyRange keys = mask_.keys_of(b, i);
    const Index page = key_.page_rows() > 0 ? key_.page_rows() : geometry_.len_kv;
    Real some[std::size_t(kRun + kLanes<Real>)];
    // Invariant: dots of the keys before j are known. Each round takes keys that lie on one page.
    for (Index j = keys.begin; j < keys.end;) {
      const Index count = std::min({kRun, keys.end - j, page - j % page});
      const DotQuery<Real> of{query_.row(b, h, i), some};
      const StoredRows<Real> from{key_.row(b, geometry_.kv_head(h), j), key_.strides().row};
      StorageOf<Real, StoredRows<Real>>::dots(UntypedRows(from), 0, count, geometry_.dim_qk, &of,
                                              1);
      std::copy_n(some, count, dots + j);
      j += count;
    }
    mask_.for_hidden_keys(b, h, i, keys.begin, keys.end,
                          [&](Index j) { dots[j] = -kInfinity<Real>; });
  }

 private:
  static constexpr Index kRun = 256;

  [[nodiscard]] static Geometry sizes(const Inputs<Real>& in, const std::string& where) {
    const Shape q = in.query.shape(), k = in.key.shape();
    require(in.query.given() && in.key.given() && q.batch == k.batch && q.dim == k.dim &&
                k.heads > 0 && q.heads % k.heads == 0,
            where, ": query has shape ", q, ", key ", k,
            "; both need the same batch and dim, and heads that share keys evenly");
    require(in.packed == nullptr, where,
            ": packed sequences were given, this takes one of them at a time");
    Geometry g{q.batch, q.heads, q.heads, k.heads, q.len, k.len, q.dim, 1, in.first_query};
    g.queries_at_end = in.queries_at_end;
    return g;
  }

  WidenedTensors<Real> copies_;
  TensorView<const Real> query_, key_;
  Geometry geometry_;
  Mask<Real> own_mask_;
  BoundMask<Real> mask_;
};

// Scores times scale become their softmax; those of -infinity become 0.
template <class Real>
void to_weights(std::vector<Real>& row, Real scale) {
  Real top = -kInfinity<Real>, sum = 0;
  for (Real& x : row) {
    if (x != -kInfinity<Real>) x *= scale;
    top = std::max(top, x);
  }
  for (Real& x : row) sum += x = x == -kInfinity<Real> ? Real(0) : std::exp(x - top);
  for (Real& x : row)
    if (sum > 0) x /= sum;
}

// Lists of key heads as those of the query heads that read them.
[[nodiscard]] inline BlockLists for_query_heads(const BlockLists& of, const Geometry& g) {
  BlockLists lists{of.query_block, of.key_block, {0}, {}, of.batch, g.heads};
  const Index rows = (Index(of.start.size()) - 1) / (of.batch * of.heads);
  for_each_row({of.batch, g.heads, rows}, [&](Index b, Index h, Index i) {
    const auto at = std::size_t((b * of.heads + g.kv_head(h)) * rows + i);
    lists.indices.insert(lists.indices.end(), of.indices.begin() + of.start[at],
                         of.indices.begin() + of.start[at + 1]);
    lists.start.push_back(Index(lists.indices.size()));
  });
  return lists;
}

[[nodiscard]] inline Index pieces_of(Index length, Index block) {
  return (length + block - 1) / block;
}

}  // namespace detail

// The `count` visible keys of each query with the largest q . k; those with the smallest where scale is negative. Lists of
// single keys, one per query and head. value is not read.
template <class Real>
[[nodiscard]] BlockLists select_keys(const Inputs<Real>& in,
                                     const std::type_identity_t<Mask<Real>>& mask, Index count,
                                     const Options& options = {}) {
  const detail::ChoiceRows<Real> rows(in, mask, options.threads, "heed::select_keys");
  const Geometry& g = rows.geometry();
  const bool turned = options.scale.value_or(1.0) < 0;
  return select_largest<Real>(
      {g.batch, g.heads, g.len_q, g.len_kv, count},
      [&](Index b, Index h, Index i, Real* s) {
        rows.dots(b, h, i, s);
        for (Index j = 0; turned && j < g.len_kv; ++j)
          if (s[j] != -kInfinity<Real>) s[j] = -s[j];
      },
      options.threads);
}

// `count` blocks of `block` keys for each query and head: its own, in which the key at its position lies, and those with the
// largest q . mean of the block's keys. Candidates are blocks of which the query sees a key. Mixture of block attention
// (arXiv 2502.13189) under a causal mask.
template <class Real>
[[nodiscard]] BlockLists select_blocks(const Inputs<Real>& in,
                                       const std::type_identity_t<Mask<Real>>& mask, Index block,
                                       Index count, const Options& options = {}) {
  constexpr const char* where = "heed::select_blocks";
  require(block > 0, where, ": block is ", block, ", it must be positive");
  const detail::ChoiceRows<Real> rows(in, mask, options.threads, where);
  const Geometry& g = rows.geometry();
  const Index blocks = detail::pieces_of(g.len_kv, block);
  std::vector<Real> means(std::size_t(g.batch * g.kv_heads * blocks * g.dim_qk));
  parallel_for(g.batch * g.kv_heads * blocks, resolve_threads(options.threads), [&](Index n) {
    const Index b = n / blocks / g.kv_heads, kv = n / blocks % g.kv_heads, k = n % blocks,
                end = std::min((k + 1) * block, g.len_kv);
    Real* const mean = means.data() + n * g.dim_qk;
    for (Index c = 0; c < g.dim_qk; ++c) {
      double sum = 0;
      for (Index j = k * block; j < end; ++j) sum += double(rows.key().row(b, kv, j)[c]);
      mean[c] = Real(sum / double(end - k * block));
    }
  });
  return select_largest<Real>(
      {g.batch, g.heads, g.len_q, blocks, count, 1, block},
      [&](Index b, Index h, Index i, Real* s) {
        const KeyRange keys = rows.mask().keys_of(b, i);
        const Index own = g.query_position(i) / block;
        const Real* const mean = means.data() + (b * g.kv_heads + g.kv_head(h)) * blocks * g.dim_qk;
        const Index some = keys.size() > 0 ? blocks : 0;
        for (Index k = std::min(keys.begin / block, some); k * block < keys.end && k < some; ++k) {
          if (!rows.sees_any(b, h, i, std::max(keys.begin, k * block),
                             std::min(keys.end, (k + 1) * block)))
            continue;
          s[k] = k == own ? kInfinity<Real> : rows.dot(b, h, i, mean + k * g.dim_qk);
        }
      },
      options.threads);
}

// What an indexer reads, in addition to a call's own inputs: queries and weights of a few heads of its own, and one key per
// token.
template <class Real>
struct IndexInputs {
  StoredView<const Real> query;    // (batch, index heads, len_q, index dim)
  StoredView<const Real> key;      // (batch, 1, len_kv, index dim)
  StoredView<const Real> weights;  // (batch, index heads, len_q, 1)
  Index first_query = 0;           // as Inputs::first_query
};

// The `count` visible keys of each query with the largest sum over index heads a of w_a relu(q_a . k): one choice for all heads
// of the call. DeepSeek-V3.2's lightning indexer. The mask has no part that differs by head.
template <class Real>
[[nodiscard]] BlockLists select_indexed(const IndexInputs<Real>& index,
                                        const std::type_identity_t<Mask<Real>>& mask, Index count,
                                        int threads = 0) {
  constexpr const char* where = "heed::select_indexed";
  Inputs<Real> in{index.query, index.key, {}};
  in.first_query = index.first_query;
  const detail::ChoiceRows<Real> rows(in, mask, threads, where);
  const Geometry& g = rows.geometry();
  WidenedTensors<Real> copies(threads);
  const TensorView<const Real> weights = copies.read(index.weights);
  require(weights.shape() == Shape{g.batch, g.heads, g.len_q, 1}, where, ": weights has shape ",
          weights.shape(), ", it must be ", Shape{g.batch, g.heads, g.len_q, 1});
  return select_largest<Real>(
      {g.batch, 1, g.len_q, g.len_kv, count},
      [&](Index b, Index, Index i, Real* s) {
        std::vector<Real> dots(std::size_t(g.len_kv));
        const KeyRange keys = rows.mask().keys_of(b, i);
        for (Index a = 0; a < g.heads; ++a) {
          rows.dots(b, a, i, dots.data());
          const Real w = weights.row(b, a, i)[0];
          for (Index j = keys.begin; j < keys.end; ++j) {
            const Real dot = dots[std::size_t(j)];
            if (dot == -kInfinity<Real>) continue;  // hidden
            s[j] = (a == 0 ? Real(0) : s[j]) + w * std::max(dot, Real(0));
          }
        }
      },
      threads);
}

// Windows of keys, such as the blocks that native sparse attention (arXiv 2502.11089) compresses: window j covers the keys
// [j stride, j stride + size).
struct Windows {
  Index size = 32, stride = 16;  // size is a multiple of stride
  [[nodiscard]] Index count(Index len_kv) const {
    return len_kv < size ? 0 : (len_kv - size) / stride + 1;
  }
  // The windows whose last key is at or before the position of the query.
  template <class Real>
  [[nodiscard]] Mask<Real> seen_by(Index first_query = 0) const {
    return visible<Real>([last = size - 1 - first_query, step = stride](
                             auto, auto, auto i, auto j) { return j * step + last <= i; });
  }
};

// `count` blocks of `block` keys (a multiple of the stride) for each query and key head, by weights of windows: w = softmax of
// scale q . k over the windows that the query sees, in.key one key per window. A block's score is the sum of w over
//
//   windows (block / stride) c + m - r,   m < block / stride,   r < size / stride
//
// and over the query heads of the key head, which share the choice. Block 0 and the query's own are always kept; candidates
// are the blocks that begin at or before the query. Lists are those of query heads.
template <class Real>
[[nodiscard]] BlockLists select_weighed(const Inputs<Real>& in, const Windows& windows,
                                        Index len_kv, Index block, Index count,
                                        const Options& options = {}) {
  constexpr const char* where = "heed::select_weighed";
  require(windows.stride > 0 && windows.size % windows.stride == 0 && windows.size > 0 &&
              block > 0 && block % windows.stride == 0,
          where, ": windows have size ", windows.size, " and stride ", windows.stride, ", blocks ",
          block, " keys; size and block must be multiples of the stride");
  const detail::ChoiceRows<Real> rows(in, windows.seen_by<Real>(in.first_query), options.threads,
                                      where);
  const Geometry& g = rows.geometry();
  require(g.len_kv == windows.count(len_kv), where, ": key has ", g.len_kv, " windows, ", len_kv,
          " keys have ", windows.count(len_kv));
  const Index blocks = detail::pieces_of(len_kv, block), steps = block / windows.stride,
              covers = windows.size / windows.stride;
  const Real scale = Real(options.scale.value_or(1 / std::sqrt(double(g.dim_qk))));
  BlockLists lists = select_largest<Real>(
      {g.batch, g.kv_heads, g.len_q, blocks, count, 1, block},
      [&](Index b, Index kv, Index i, Real* s) {
        const Index position = g.query_position(i), own = position / block;
        std::fill_n(s, std::min(own + 1, blocks), Real(0));
        std::vector<Real> w(std::size_t(g.len_kv));
        for (Index h = kv * g.group(); h < (kv + 1) * g.group(); ++h) {
          std::fill(w.begin(), w.end(), -kInfinity<Real>);
          rows.dots(b, h, i, w.data());
          detail::to_weights(w, scale);
          for (Index c = 0; c <= own && c < blocks; ++c)
            for (Index m = 0; m < steps; ++m)
              for (Index r = 0; r < covers; ++r) {
                const Index j = steps * c + m - r;
                if (j >= 0 && j < g.len_kv) s[c] += w[std::size_t(j)];
              }
        }
        s[0] = kInfinity<Real>;
        if (own < blocks) s[own] = kInfinity<Real>;
      },
      options.threads);
  return detail::for_query_heads(lists, g);
}

}  // namespace HEED_ABI
}  // namespace heed
