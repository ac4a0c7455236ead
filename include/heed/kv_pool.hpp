// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys and values of many growing sequences in one pool of pages, for continuous decoding:
// sequences come and go, share common beginnings, and one call reads all of them.
//
//   KvPool<float> pool(kv_heads, dim_qk, dim_v, pages);
//   const Index prompt = pool.add();
//   pool.append(prompt, keys, values);                                    // (1, kv_heads, n, dim)
//   const Index a = pool.fork(prompt), b = pool.fork(prompt);             // share the prompt's pages
//   pool.append({a, b}, new_keys, new_values);                            // one token each, packed
//   forward(op, pool.inputs({a, b}, query), causal<float>(Align::bottom_right), out);
//   pool.remove(a);                                                       // its pages serve others
//
// A sequence's results have the bits that they have with a KvCache of its own (kv_cache.hpp), with
// any op, mask and number of threads. A call spreads the work on all its sequences over all
// threads: the longest sequences come first, and long ones are read in parts.
//
// Pages      hold page_rows tokens of all heads. A sequence takes them from the free list as it grows, and gives them back as it
//            is cut or removed. fork() shares all of them: the pool counts the sequences that have a page, and one that
//            writes behind rows that others share first copies the rows of that one page (copy on write).
// Memory     taken as the first sequences need it, at most `pages` pages, and kept until the pool ends; page_bytes() each.
//            Features of keys (KeyFeatures) are stored apart, for each sequence by itself, also where pages are shared.
// Formats    as those of a KvCache: KvPool<bfloat16>, KvPool<half> and KvPool<std::int8_t> take a half and a quarter.
// Errors     std::invalid_argument: the pool is full, a sequence is unknown or was removed, shapes
//            that do not fit. The pool is then unchanged. Views of a call are valid until the pool
//            next changes. One call at a time may use a pool.

#include <heed/engine/call.hpp>
#include <heed/engine/key_features.hpp>
#include <heed/engine/packed.hpp>
#include <heed/engine/packed_doors.hpp>
#include <heed/kv_pages.hpp>

#include <map>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Stored: float, double, bfloat16, half or std::int8_t.
template <class Stored>
class KvPool {
 public:
  using Arithmetic = ArithmeticOf<Stored>;
  using View = typename KvPages<Stored>::View;

  // pages: the most that all sequences together may take. page_rows: a positive multiple of kPanelLanes<Arithmetic>.
  KvPool(Index kv_heads, Index dim_qk, Index dim_v, Index pages, Index page_rows = kDefaultPageRows)
      : shape_("KvPool", 1, kv_heads, dim_qk, dim_v, page_rows), pages_(pages) {
    require(pages >= 0, "KvPool: pages is ", pages, ", it must not be negative");
  }

  // Number of pages of the pool, and of those in no sequence.
  [[nodiscard]] Index pages() const { return pages_; }
  [[nodiscard]] Index free_pages() const {
    return pages_ - Index(memory_.size()) + Index(free_.size());
  }
  [[nodiscard]] Index page_rows() const { return shape_.page_rows(); }
  [[nodiscard]] Index page_bytes() const { return shape_.page_bytes(); }
  [[nodiscard]] Index sequences() const { return Index(sequences_.size()); }

  // A new sequence without tokens, by its number; numbers are not given twice.
  Index add() {
    sequences_.emplace(next_, Sequence(shape_));
    return next_++;
  }
  // A new sequence with the tokens of `sequence`.
  Index fork(Index sequence) {
    const Sequence& from = at(sequence, "fork");
    Sequence copy(shape_);
    copy.table.make_room(from.pages.size());
    copy.pages = from.pages;
    for (const Index page : from.pages) copy.table.add(memory_[std::size_t(page)]);
    copy.table.set_len(from.table.len());
    sequences_.emplace(next_, std::move(copy));
    for (const Index page : from.pages) ++readers_[std::size_t(page)];
    return next_++;
  }
  // Forgets the sequence; pages that no other one shares are free.
  void remove(Index sequence) {
    Sequence& gone = at(sequence, "remove");
    cut(gone, 0);
    sequences_.erase(sequence);
  }
  [[nodiscard]] Index len(Index sequence) const { return at(sequence, "len").table.len(); }
  // Forgets the tokens from `len` on.
  void truncate(Index sequence, Index len) {
    Sequence& of = at(sequence, "truncate");
    require(len >= 0 && len <= of.table.len(), "KvPool::truncate: len is ", len, ", sequence ",
            sequence, " holds ", of.table.len(), " tokens");
    cut(of, len);
  }

  // Adds tokens to a sequence: key (1, kv_heads, n, dim_qk), value (1, kv_heads, n, dim_v), in any layout.
  void append(Index sequence, const StoredView<const Arithmetic>& key,
              const StoredView<const Arithmetic>& value) {
    append({sequence}, key, value, {0, key.shape().len});
  }
  // Adds to each of these sequences its part of packed tokens: rows [tokens[n], tokens[n + 1]) go
  // to sequences[n]. Without `tokens` each gets one token.
  void append(const std::vector<Index>& sequences, const StoredView<const Arithmetic>& key,
              const StoredView<const Arithmetic>& value, std::vector<Index> tokens = {}) {
    take_lengths(tokens, Index(sequences.size()), key.shape().len, "append", "key");
    require_different(sequences, "append");
    shape_.check(key, value);
    // Everything that can fail comes first: room in tables, and all pages.
    Index needed = 0;
    std::map<Index, Index> writers;  // count of sequences that write to each unfilled page
    for (std::size_t n = 0; n < sequences.size(); ++n) {
      const Sequence& to = at(sequences[n], "append");
      const Index count = tokens[n + 1] - tokens[n];
      needed += pages_added(to, count);
      if (count > 0 && to.table.len() % page_rows() != 0) ++writers[to.pages.back()];
    }
    // The last sequence of a shared page writes to the page itself.
    for (const auto& [page, count] : writers)
      needed += std::min(count, readers_[std::size_t(page)] - 1);
    require(needed <= free_pages(), "KvPool::append: the pool is full: ", needed,
            needed == 1 ? " page is needed, " : " pages are needed, ", free_pages(), " of ", pages_,
            " are free");
    for (std::size_t n = 0; n < sequences.size(); ++n) {
      Sequence& to = at(sequences[n], "append");
      const auto more = std::size_t(pages_added(to, tokens[n + 1] - tokens[n]));
      to.table.make_room(more);
      KvPages<Stored>::make_room(to.pages, more);
    }
    provide(needed);
    std::vector<float> row(std::size_t(shape_.widened_numbers()));
    for (std::size_t n = 0; n < sequences.size(); ++n)
      write(at(sequences[n], "append"), key, value, tokens[n], tokens[n + 1] - tokens[n],
            row.data());
  }

  // The keys and values of a sequence, in the form that forward() reads.
  [[nodiscard]] View keys(Index sequence) const { return at(sequence, "keys").table.keys(); }
  [[nodiscard]] View values(Index sequence) const { return at(sequence, "values").table.values(); }

  // The inputs of forward() when these sequences decode together: query (1, query_heads, total, dim_qk) has the last tokens
  // of each, packed as `queries` says (Packed in engine/call.hpp); without it, the last token. Masks place queries by
  // Align::bottom_right; masks that place them at the first keys are refused (Inputs::queries_at_end).
  // Key features of each sequence are kept from call to call, as in KvCache::inputs(). Valid until
  // the next call of inputs() or change of the pool.
  [[nodiscard]] PackedInputs<Arithmetic> inputs(const std::vector<Index>& sequences,
                                                const StoredView<const Arithmetic>& query,
                                                const StoredView<const Arithmetic>& extra = {},
                                                std::vector<Index> queries = {}) {
    take_lengths(queries, Index(sequences.size()), query.shape().len, "inputs", "query");
    require_different(sequences, "inputs");
    Packed<Arithmetic> packed;
    for (std::size_t n = 0; n < sequences.size(); ++n) {
      Sequence& of = at(sequences[n], "inputs");
      const Index count = queries[n + 1] - queries[n];
      require(count <= of.table.len(), "KvPool::inputs: sequence ", sequences[n], " has ", count,
              " queries, it holds ", of.table.len(),
              " tokens; queries are its last tokens, whose keys are appended first");
      packed.caches.push_back({of.table.keys(), of.table.values(), &of.features});
      packed.first_query.push_back(of.table.len() - count);
    }
    packed.queries = std::move(queries);
    packed_ = std::move(packed);
    PackedInputs<Arithmetic> in;
    in.query = query;
    in.extra = extra;
    in.packed = &packed_;
    in.queries_at_end = true;
    if (sequences.empty()) {  // without sequences no keys give heads and width
      in.key = {nullptr, shape_.keys().shape()};
      in.value = {nullptr, shape_.values().shape()};
    }
    return in;
  }
  // Makes the next call compute the key features of all tokens of all sequences.
  void forget_features() {
    for (auto& [number, sequence] : sequences_) sequence.features.forget();
  }

 private:
  struct Sequence {
    KvPages<Stored> table;
    std::vector<Index> pages;  // numbers of its pages, in the order of the table
    KeyFeatures<Arithmetic> features;

    explicit Sequence(const KvPages<Stored>& like) : table(like.empty_copy()) {}
  };

  [[nodiscard]] const Sequence& at(Index sequence, const char* what) const {
    const auto found = sequences_.find(sequence);
    require(found != sequences_.end() || sequence < 0 || sequence >= next_, "KvPool::", what,
            ": sequence ", sequence, " was removed before");
    require(found != sequences_.end(), "KvPool::", what, ": sequence ", sequence,
            " is unknown, the pool has given ", next_, " numbers, from 0 on");
    return found->second;
  }
  [[nodiscard]] Sequence& at(Index sequence, const char* what) {
    return const_cast<Sequence&>(std::as_const(*this).at(sequence, what));
  }

  // Sets one token per sequence, or checks the given numbers.
  void take_lengths(std::vector<Index>& at, Index count, Index total, const char* what,
                    const char* name) const {
    if (at.empty())
      for (Index n = 0; n <= count; ++n) at.push_back(n);
    const char* const of = name[0] == 'q' ? "queries" : "tokens";
    require(Index(at.size()) == count + 1, "KvPool::", what, ": ", of, " has ", at.size(),
            " numbers, there are ", count, " sequences; it needs one for each, and one more");
    require(at[0] == 0, "KvPool::", what, ": ", of, " begins with ", at[0],
            ", it must begin with 0");
    for (std::size_t n = 0; n + 1 < at.size(); ++n)
      require(at[n] <= at[n + 1], "KvPool::", what, ": ", of, " falls from ", at[n], " to ",
              at[n + 1], " at sequence ", n, ", no sequence has a negative length");
    require(at.back() == total, "KvPool::", what, ": ", of, " ends with ", at.back(), ", ", name,
            " has len ", total);
  }
  // Two workers must not add to the same sequence.
  static void require_different(std::vector<Index> sequences, const char* what) {
    std::sort(sequences.begin(), sequences.end());
    const auto twice = std::adjacent_find(sequences.begin(), sequences.end());
    require(twice == sequences.end(), "KvPool::", what, ": sequence ",
            twice == sequences.end() ? 0 : *twice, " is given twice");
  }

  // True if the sequence writes its next token to a page that it shares, behind rows of others.
  [[nodiscard]] bool shares_last(const Sequence& of) const {
    return of.table.len() % page_rows() != 0 && readers_[std::size_t(of.pages.back())] > 1;
  }
  // Number of pages that `count` more tokens add to its table.
  [[nodiscard]] static Index pages_added(const Sequence& of, Index count) {
    return of.table.pages_for(of.table.len() + count) - of.table.pages();
  }
  // Makes sure that the free list has at least `count` pages.
  void provide(Index count) {
    while (Index(free_.size()) < count) {
      KvPages<Stored>::make_room(memory_, 1);
      KvPages<Stored>::make_room(readers_, 1);
      free_.reserve(memory_.size() + 1);  // for all pages: release() needs no memory
      memory_.push_back(shape_.new_page());
      readers_.push_back(0);
      free_.push_back(Index(memory_.size()) - 1);
    }
  }
  [[nodiscard]] Index take() {
    const Index page = free_.back();
    free_.pop_back();
    readers_[std::size_t(page)] = 1;
    return page;
  }
  void release(Index page) {
    if (--readers_[std::size_t(page)] == 0) free_.push_back(page);
  }
  // Keeps the pages of the first `len` tokens only.
  void cut(Sequence& of, Index len) {
    while (of.table.pages() > of.table.pages_for(len)) {
      release(of.pages.back());
      of.pages.pop_back();
      of.table.drop_last();
    }
    of.table.set_len(len);
  }

  // Needs enough free pages, and room for them in the tables.
  void write(Sequence& to, const StoredView<const Arithmetic>& key,
             const StoredView<const Arithmetic>& value, Index first, Index count, float* widened) {
    if (count == 0) return;
    const Index len = to.table.len();
    if (shares_last(to)) {
      const Index own = take(), last = to.pages.back();
      shape_.copy_rows(memory_[std::size_t(last)], memory_[std::size_t(own)], len % page_rows());
      release(last);
      to.pages.back() = own;
      to.table.replace(to.table.pages() - 1, memory_[std::size_t(own)]);
      // Features recognise their keys by the address of the first one.
      if (to.pages.size() == 1) to.features.forget();
    }
    while (to.table.pages() < to.table.pages_for(len + count)) {
      to.pages.push_back(take());
      to.table.add(memory_[std::size_t(to.pages.back())]);
    }
    to.features.truncate(len);
    to.table.write(key, value, first, count, widened);
  }

  KvPages<Stored> shape_;  // without pages
  Index pages_, next_ = 0;
  std::vector<typename KvPages<Stored>::Page> memory_;
  std::vector<Index> readers_,
      free_;  // for each page, how many sequences have it; pages that none has
  std::map<Index, Sequence> sequences_;
  Packed<Arithmetic> packed_;
};

}  // namespace HEED_ABI
}  // namespace heed
