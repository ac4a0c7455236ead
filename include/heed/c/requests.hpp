// SPDX-License-Identifier: Apache-2.0
#pragma once

// Makes a Request from a struct heed_call: its tensors, mask, packed sequences and caches.

#include <heed/c/caches.hpp>
#include <heed/c/calls.hpp>
#include <heed/c/lists.hpp>
#include <heed/c/mask.hpp>
#include <heed/c/structs.hpp>
#include <heed/c/table.hpp>
#include <heed/engine/packed.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// The cache whose instruction set computes the call; null: any set may.
[[nodiscard]] inline heed_cache* first_cache(const heed_call& call, const char* where) {
  if (call.packed == nullptr) return call.cache;
  const heed_packed packed = adopt(call.packed, "packed", where);
  return packed.caches != nullptr && packed.cache_count > 0 ? packed.caches[0] : call.cache;
}

// The limits of a mask's lists in a call whose `query_heads` query heads are one head.
template <class Real>
[[nodiscard]] MaskLimits mask_limits(const Inputs<Real>& in, Index query_heads) {
  const Shape &q = in.query.shape(), &v = in.value.shape();
  Index keys = v.batch * v.len;
  if (in.packed != nullptr)
    for (const SequenceKeys<Real>& of : in.packed->caches) keys += of.key.shape().len;
  // Sizes of tensors, so that the first product fits; there may be more pairs than numbers for them.
  const Index rows = q.batch * q.heads * q.len, most = std::numeric_limits<Index>::max();
  const Index pairs = rows > 0 && v.len > most / rows ? most : rows * v.len;
  const char* const there_are = "there are ";
  const char* const tokens = in.packed != nullptr ? " in all sequences" : " (batch x length)";
  return {in.packed != nullptr ? ListLimit{there_are, in.packed->sequences(), " sequences"}
                               : ListLimit{"the batch is ", q.batch},
          {there_are, q.batch * q.len, tokens},
          {there_are, keys, tokens},
          {there_are, q.heads / query_heads, " heads"},
          {"it must have at most ", rows + 1},
          {"it must have at most ", pairs}};
}

// The sequences of a call with these inputs.
template <class Real>
[[nodiscard]] std::unique_ptr<Packed<Real>> packed_of(const heed_packed* given,
                                                      const Inputs<Real>& in,
                                                      const heed_table* table,
                                                      const std::string& where) {
  if (given == nullptr) return nullptr;
  const char* const door = where.c_str();
  const heed_packed from = adopt(given, "packed", door);
  require(from.queries != nullptr, where, ": packed.queries is a null pointer");
  auto packed = std::make_unique<Packed<Real>>();
  const Index starts = Index(from.query_count);
  // Some sequences may be empty.
  const ListLimit most{"it must have at most ", in.query.shape().len + kAnyList.most},
      like_starts{"packed.queries has ", starts},
      one_each{"there are ", std::max<Index>(0, starts - 1), " sequences"};
  const auto take = [&](const std::int64_t* list, std::size_t count, const char* name,
                        const ListLimit& limit) {
    return copy_of_list<Index>(list, count, name, limit, door).value_or(std::vector<Index>{});
  };
  packed->queries = take(from.queries, from.query_count, "packed.queries", most);
  packed->keys = take(from.keys, from.key_count, "packed.keys", like_starts);
  packed->first_query =
      take(from.first_query, from.first_query_count, "packed.first_query", one_each);
  require_list(from.caches, from.cache_count, "packed.caches", one_each, door);
  require(from.first_query == nullptr || from.caches == nullptr, where,
          ": packed.first_query was given beside packed.caches, whose last tokens the queries are");
  std::vector<heed_cache*> caches(from.caches, from.caches + from.cache_count);
  for (std::size_t n = 0; n < caches.size(); ++n) {
    require(caches[n] != nullptr, where, ": packed.caches[", n, "] is a null pointer");
    require(caches[n]->table == table, where, ": packed.caches[", n,
            "] was made with another instruction set than packed.caches[0]");
    const Inputs<Real> own = inputs_of_cache<Real>(cache_of(caches[n]), {}, {}, where);
    Index count = 0;  // the C++ call reports a negative one
    require(!__builtin_sub_overflow(packed->queries[n + 1], packed->queries[n], &count) &&
                count <= own.key.shape().len,
            where, ": sequence ", n, " has the queries [", packed->queries[n], ", ",
            packed->queries[n + 1], "), its cache holds ", own.key.shape().len,
            " tokens; queries are its last tokens, whose keys are appended first");
    packed->caches.push_back({own.key, own.value, own.key_features});
    packed->first_query.push_back(own.first_query - std::max<Index>(0, count));
  }
  std::sort(caches.begin(), caches.end());
  require(std::adjacent_find(caches.begin(), caches.end()) == caches.end(), where,
          ": packed.caches has one cache twice, each sequence needs one of its own");
  return packed;
}

// Keys and values of the call's cache, if it has one.
template <class Real>
void take_cache(const heed_call& call, Inputs<Real>& in, const std::string& where) {
  if (call.cache == nullptr) return;
  require(call.packed == nullptr, where,
          ": a cache and packed sequences were given; give one cache per sequence (packed.caches)");
  require(call.key == nullptr && call.value == nullptr, where, ": ",
          call.key != nullptr ? "key" : "value", " was given beside a cache, which holds it");
  require(call.first_query == 0, where, ": first_query is ", call.first_query,
          " beside a cache, whose last tokens the queries are");
  const Inputs<Real> of = inputs_of_cache(cache_of(call.cache), in.query, in.extra, where);
  in.key = of.key;
  in.value = of.value;
  in.key_features = of.key_features;
  in.first_query = of.first_query;
  in.queries_at_end = true;
}

template <class Real>
[[nodiscard]] Request<Real> request_of(const heed_call& call, const VariantCalls<Real>& variant,
                                       const heed_table* table, const std::string& where,
                                       int threads) {
  Request<Real> request{
      {stored_view<const Real>(call.query, "query", where),
       stored_view<const Real>(call.key, "key", where),
       stored_view<const Real>(call.value, "value", where),
       stored_view<const Real>(call.extra, "extra", where), nullptr,
       stored_view<const Real>(call.query_inputs, "query_inputs", where),
       stored_view<const Real>(call.key_inputs, "key_inputs", where), Index(call.first_query)},
      {},
      {},
      call.parameters,
      call.parameter_count,
      where};
  request.in.queries_at_end = call.queries_at_end != 0;
  take_cache(call, request.in, where);
  request.packed = packed_of(call.packed, request.in, table, where);
  request.in.packed = request.packed.get();
  if (request.packed != nullptr && !request.packed->caches.empty())
    request.in.queries_at_end = true;
  const bool has_keys = request.in.value.given() || request.in.packed != nullptr;
  if (request.in.query.given() && has_keys)  // else the call is refused
    request.mask =
        mask_of<Real>(call.mask, mask_limits(request.in, variant.query_heads()), where.c_str());
  Options& options = request.options;
  if (call.scale != nullptr) options.scale = *call.scale;
  options.threads = call.threads != 0 ? call.threads : threads;
  options.name = variant.name();
  options.dropout = {call.dropout, call.dropout_seed};
  require(call.precision == heed_storage || call.precision == heed_mixed, where, ": precision is ",
          call.precision, ", it must be ", int(heed_storage), " (heed_storage) or ",
          int(heed_mixed), " (heed_mixed)");
  if (call.precision == heed_mixed) options.precision = Precision::mixed;
  return request;
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
