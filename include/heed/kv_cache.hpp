// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values of a growing sequence, for decoding: forward() reads it in place.
//
//   KvCache<float> cache(batch, kv_heads, dim_qk, dim_v);
//   cache.append(new_keys, new_values);                          // (batch, kv_heads, n, dim) each
//   forward(op, cache.inputs(query), causal<float>(Align::bottom_right), out);
//
// Calls on inputs() keep a score's features of each key (norms, categories, projected keys) in the
// cache, and so compute them once for each token; {query, cache.keys(), cache.values()} with the
// same first_query computes them again in each call, with the same bits.
//
// Memory  pages of `page_rows` rows for all batches and heads; growing adds pages and copies none. KvCache<bfloat16> and
//         KvCache<half> take half of it, and half of the time that decoding waits for memory: append() rounds.
//         KvCache<std::int8_t> takes a quarter, and 4 bytes per row.
//
// int8    Each row x of keys or values, of one token and head, is stored as x~ = s n with a float s = max |x| / 127 and
//         integers n (simd/quantise.hpp); calls compute with x~. Per number |x~ - x| <= s (1/2 + 2^-16), hence
//
//           a logit  errs by at most |scale| sum_c |q(c)| s_key (1/2 + 2^-16),
//           a row of outputs of a softmax whose logits err by at most e  by at most
//                    (exp(2 e) - 1) max_j |v_j(c)| + max_j s_value(j) (1/2 + 2^-16) in column c,
//
//         besides the rounding of the call itself. A row that holds a NaN or an infinity becomes NaN as a whole, and so
//         does every output that sees it. Only forward() reads such a cache, with any op and any number of queries: few
//         queries read the bytes directly, many read a tile of floats. Backward takes no pages.

#include <heed/engine/call.hpp>
#include <heed/engine/key_features.hpp>
#include <heed/kv_pages.hpp>

#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Stored: float, double, bfloat16, half or std::int8_t.
template <class Stored>
class KvCache {
 public:
  static constexpr Index kDefaultPageRows = heed::kDefaultPageRows;
  // The type in which calls on the cache compute.
  using Arithmetic = ArithmeticOf<Stored>;
  // True if rows are stored with a scale.
  static constexpr bool scaled = KvPages<Stored>::scaled;
  using View = typename KvPages<Stored>::View;

  // page_rows: a positive multiple of kPanelLanes<Arithmetic>. Throws std::invalid_argument.
  KvCache(Index batch, Index kv_heads, Index dim_qk, Index dim_v,
          Index page_rows = kDefaultPageRows)
      : pages_("KvCache", batch, kv_heads, dim_qk, dim_v, page_rows) {}

  // A cache that was moved from is an empty cache of its shape.
  KvCache(KvCache&& other) noexcept
      : pages_(std::move(other.pages_)),
        memory_(std::exchange(other.memory_, {})),
        features_(std::move(other.features_)) {}
  KvCache& operator=(KvCache&& other) noexcept {
    KvCache taken(std::move(other));
    std::swap(pages_, taken.pages_);
    std::swap(memory_, taken.memory_);
    std::swap(features_, taken.features_);
    return *this;
  }

  // Number of tokens held, and number of tokens that fit without new pages.
  [[nodiscard]] Index len() const { return pages_.len(); }
  [[nodiscard]] Index capacity() const { return pages_.capacity(); }

  // Room for `len` tokens. Throws std::invalid_argument, std::bad_alloc; the cache is then unchanged.
  void reserve(Index len) {
    require(len >= 0, "KvCache::reserve: len is ", len, ", it must not be negative");
    if (len <= capacity()) return;
    const auto count = std::size_t(pages_.pages_for(len - capacity()));
    std::vector<Page> added;
    KvPages<Stored>::make_room(added, count);
    while (added.size() < count) added.push_back(pages_.new_page());
    KvPages<Stored>::make_room(memory_, count);
    pages_.make_room(count);
    for (Page& page : added) {  // nothing throws from here on
      pages_.add(page);
      memory_.push_back(std::move(page));
    }
  }

  // Adds the tokens of `key` (batch, kv_heads, n, dim_qk) and `value` (batch, kv_heads, n, dim_v), in
  // any layout, rounded to the nearest numbers that the cache holds. Throws std::invalid_argument,
  // std::bad_alloc; the cache is then unchanged. Views taken before are no longer valid.
  void append(const StoredView<const Arithmetic>& key, const StoredView<const Arithmetic>& value) {
    pages_.check(key, value);
    const Index count = key.shape().len;
    std::vector<float> row(std::size_t(pages_.widened_numbers()));
    reserve(len() + count);
    features_.truncate(len());
    pages_.write(key, value, 0, count, row.data());
  }

  // Forgets the tokens from `len` on; their memory is kept.
  void truncate(Index len) {
    require(len >= 0 && len <= this->len(), "KvCache::truncate: len is ", len, ", the cache holds ",
            this->len(), " tokens");
    pages_.set_len(len);
  }

  // Valid until the next append() or reserve().
  [[nodiscard]] View keys() const { return pages_.keys(); }
  [[nodiscard]] View values() const { return pages_.values(); }

  // The inputs of forward() for decoding: keys, values and the key features of earlier calls, to which each call adds those
  // of new tokens (engine/key_features.hpp). The queries are the last tokens of the cache: Inputs::first_query and
  // queries_at_end say so, and a mask that places them at the first keys is refused. Such calls change the cache: only one
  // may run at a time, and all must be of one op with the same numbers of heads. Another op, or another value of a number
  // that key features depend on, is refused until forget_features(). Throws std::invalid_argument if there are more queries
  // than tokens. Valid until the next append(), reserve() or move.
  [[nodiscard]] Inputs<Arithmetic> inputs(const StoredView<const Arithmetic>& query,
                                          const StoredView<const Arithmetic>& extra = {}) {
    const Index queries = query.shape().len;
    require(queries <= len(), "KvCache::inputs: query has len ", queries, ", the cache holds ",
            len(), " tokens; queries are its last tokens, whose keys are appended first");
    Inputs<Arithmetic> in{query, keys(), values(), extra, &features_};
    in.first_query = len() - queries;
    in.queries_at_end = true;
    return in;
  }
  [[nodiscard]] const KeyFeatures<Arithmetic>& key_features() const { return features_; }
  // Makes the next call on inputs() compute the key features of all tokens.
  void forget_features() noexcept { features_.forget(); }

 private:
  using Page = typename KvPages<Stored>::Page;

  KvPages<Stored> pages_;
  std::vector<Page> memory_;
  KeyFeatures<Arithmetic> features_;
};

}  // namespace HEED_ABI
}  // namespace heed
