// SPDX-License-Identifier: Apache-2.0
#pragma once

// The caches of c.h: a KvCache of any type behind one name.

#include <heed/c/guarded.hpp>
#include <heed/c/structs.hpp>
#include <heed/c/table.hpp>
#include <heed/c/tensors.hpp>
#include <heed/kv_cache.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace heed {
inline namespace HEED_ABI {
namespace c {

struct Cache : heed_cache {
  using Any = std::variant<KvCache<float>, KvCache<double>, KvCache<bfloat16>, KvCache<half>,
                           KvCache<std::int8_t>>;
  Any numbers;

  Cache(const heed_cache& head, Any of) : heed_cache(head), numbers(std::move(of)) {}
};
[[nodiscard]] inline Cache& cache_of(heed_cache* cache) { return *static_cast<Cache*>(cache); }
[[nodiscard]] inline const Cache& cache_of(const heed_cache* cache) {
  return *static_cast<const Cache*>(cache);
}

template <class Stored>
[[nodiscard]] Cache::Any numbers_of_cache(const heed_cache_sizes& sizes) {
  const Index rows = sizes.page_rows != 0 ? Index(sizes.page_rows) : kDefaultPageRows;
  return KvCache<Stored>(sizes.batch, sizes.kv_heads, sizes.dim_qk, sizes.dim_v, rows);
}
[[nodiscard]] inline std::unique_ptr<Cache> make_cache(const heed_cache_sizes& sizes,
                                                       const heed_table* table, const char* where) {
  const auto stored_as = [&](std::uint8_t code, int bits) {
    return sizes.dtype.code == code && sizes.dtype.bits == bits && sizes.dtype.lanes == 1;
  };
  const auto make = [&]<class Stored>(Stored) {
    return std::make_unique<Cache>(
        heed_cache{table, sizes.batch, sizes.kv_heads, sizes.dim_qk, sizes.dim_v},
        numbers_of_cache<Stored>(sizes));
  };
  if (stored_as(kDLFloat, 32) || (sizes.dtype.bits == 0 && sizes.dtype.lanes == 0))
    return make(float());
  if (stored_as(kDLFloat, 64)) return make(double());
  if (stored_as(kDLBfloat, 16)) return make(bfloat16());
  if (stored_as(kDLFloat, 16)) return make(half());
  require(stored_as(kDLInt, 8), where, ": dtype is ", detail::dtype_text(sizes.dtype),
          ", it must be float64, float32, float16, bfloat16 or int8");
  return make(std::int8_t());
}

inline void append_to_cache(Cache& cache, const DLTensor* key, const DLTensor* value,
                            const char* where) {
  require(key != nullptr && value != nullptr, where, ": ", key != nullptr ? "value" : "key",
          " is a null pointer");
  std::visit(
      [&]<class Stored>(KvCache<Stored>& to) {
        using Real = typename KvCache<Stored>::Arithmetic;
        const char* of = "for this cache";
        to.append(stored_view<const Real>(key, "key", where, of),
                  stored_view<const Real>(value, "value", where, of));
      },
      cache.numbers);
}

// The inputs of forward() for a cache and these queries.
template <class Real>
[[nodiscard]] Inputs<Real> inputs_of_cache(Cache& cache, const StoredView<const Real>& query,
                                           const StoredView<const Real>& extra,
                                           const std::string& where) {
  return std::visit(
      [&]<class Stored>(KvCache<Stored>& of) -> Inputs<Real> {
        if constexpr (std::is_same_v<typename KvCache<Stored>::Arithmetic, Real>) {
          require(query.shape().len <= of.len(), where, ": query has len ", query.shape().len,
                  ", the cache holds ", of.len(),
                  " tokens; queries are its last tokens, whose keys are appended first");
          return of.inputs(query, extra);
        } else {
          fail(where, ": query has ", sizeof(Real) == 4 ? "floats" : "doubles",
               ", the cache is one of ", sizeof(Real) == 4 ? "doubles" : "floats");
        }
      },
      cache.numbers);
}

// The cache functions of c.h, except heed_cache_new().
inline void cache_free(heed_cache* cache) { delete &cache_of(cache); }
inline int cache_append(heed_cache* cache, const DLTensor* key, const DLTensor* value,
                        std::string& error) {
  constexpr const char* door = "heed_cache_append";
  return guarded(error, door, [&] { append_to_cache(cache_of(cache), key, value, door); });
}
inline int cache_reserve(heed_cache* cache, int64_t length, std::string& error) {
  return guarded(error, "heed_cache_reserve", [&] {
    std::visit([length](auto& of) { of.reserve(length); }, cache_of(cache).numbers);
  });
}
inline int cache_truncate(heed_cache* cache, int64_t length, std::string& error) {
  return guarded(error, "heed_cache_truncate", [&] {
    std::visit([length](auto& of) { of.truncate(length); }, cache_of(cache).numbers);
  });
}
inline void cache_forget(heed_cache* cache) {
  std::visit([](auto& of) { of.forget_features(); }, cache_of(cache).numbers);
}
inline int64_t cache_length(const heed_cache* cache) {
  return std::visit([](const auto& of) { return of.len(); }, cache_of(cache).numbers);
}
inline int64_t cache_capacity(const heed_cache* cache) {
  return std::visit([](const auto& of) { return of.capacity(); }, cache_of(cache).numbers);
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
