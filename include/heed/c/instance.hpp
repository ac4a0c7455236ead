// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions of c.h for the instruction set that this file is compiled for and for the variants of a List (c/calls.hpp), as a
// table. A file that lists heed's own variants and links heed::compiled includes compiled.hpp besides.

#include <heed/c/caches.hpp>
#include <heed/c/calls.hpp>
#include <heed/c/guarded.hpp>
#include <heed/c/requests.hpp>
#include <heed/c/structs.hpp>
#include <heed/c/table.hpp>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

namespace heed {
inline namespace HEED_ABI {
namespace c {

template <class List>
[[nodiscard]] const heed_table& table();

// The numbers that heed_forward() saves.
struct SavedCall : heed_saved {
  const char* variant = "";
  std::variant<Saved<float>, Saved<double>> numbers;
};

template <class List>
int forward(const heed_call* given, const heed_outputs* given_outputs, heed_saved** saved,
            int threads, std::string& error) {
  if (saved != nullptr) *saved = nullptr;
  constexpr const char* door = "heed::forward";
  const heed_table* other = nullptr;
  const int status = guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    const heed_outputs to = adopt(given_outputs, "outputs", door);
    const heed_cache* const cache = first_cache(call, door);
    if (cache != nullptr && cache->table != &table<List>()) {
      other = cache->table;
      return;
    }
    with_real(call.query, door, [&]<class Real>(Real) {
      const VariantCalls<Real>& variant = find_variant(variants<List, Real>(), call.variant, door);
      const std::string where = detail::door_name(door, variant.name());
      const auto request = request_of<Real>(call, variant, &table<List>(), where, threads);
      std::unique_ptr<SavedCall> kept;
      Saved<Real>* numbers = nullptr;
      if (saved != nullptr) {
        kept = std::make_unique<SavedCall>();
        kept->table = &table<List>();
        kept->variant = variant.name();
        numbers = &kept->numbers.template emplace<Saved<Real>>();
      }
      variant.forward(request,
                      Outputs<Real>(stored_view<Real>(to.out, "out", where),
                                    stored_view<Real>(to.lse, "lse", where),
                                    stored_view<Real>(to.steps, "steps", where)),
                      numbers);
      if (saved != nullptr) *saved = kept.release();
    });
  });
  return other != nullptr ? other->forward(given, given_outputs, saved, threads, error) : status;
}

// Calls f(variant, request, numbers) for a call whose forward saved these numbers.
template <class List, class F>
void with_saved(const heed_call& call, const heed_saved* saved, const char* door, int threads,
                F&& f) {
  const auto& kept = *static_cast<const SavedCall*>(saved);
  require(call.cache == nullptr, door,
          ": the call has a cache, heed_forward() alone takes one; give keys and values as "
          "tensors");
  with_real(call.query, door, [&]<class Real>(Real) {
    const VariantCalls<Real>& variant = find_variant(variants<List, Real>(), call.variant, door);
    const std::string where = detail::door_name(door, variant.name());
    require(kept.variant == variant.name(), where, ": saved is of a call of ", kept.variant);
    const auto* numbers = std::get_if<Saved<Real>>(&kept.numbers);
    require(numbers != nullptr, where, ": saved is of a call of ",
            sizeof(Real) == 4 ? "doubles, query has floats" : "floats, query has doubles");
    f(variant, request_of<Real>(call, variant, &table<List>(), where, threads), *numbers);
  });
}

template <class Real>
[[nodiscard]] Gradients<Real> gradients_of(const heed_gradients& to, const std::string& where) {
  return {stored_view<Real>(to.query, "grad_query", where),
          stored_view<Real>(to.key, "grad_key", where),
          stored_view<Real>(to.value, "grad_value", where),
          stored_view<Real>(to.extra, "grad_extra", where),
          stored_view<Real>(to.bias, "grad_bias", where),
          stored_view<Real>(to.query_inputs, "grad_query_inputs", where),
          stored_view<Real>(to.key_inputs, "grad_key_inputs", where)};
}
template <class Real>
[[nodiscard]] Direction<Real> direction_of(const heed_tangents& of, const std::string& where) {
  const auto view = [&](const DLTensor* tensor, const char* name) {
    return stored_view<const Real>(tensor, name, where);
  };
  return {
      {view(of.query, "the tangent of query"), view(of.key, "the tangent of key"),
       view(of.value, "the tangent of value"), view(of.extra, "the tangent of extra"),
       view(of.bias, "the tangent of bias"), view(of.query_inputs, "the tangent of query_inputs"),
       view(of.key_inputs, "the tangent of key_inputs")},
      of.parameters,
      of.parameter_count};
}

template <class List>
int backward(const heed_call* given, const heed_saved* saved, const DLTensor* out,
             const heed_outputs* given_outputs, const heed_gradients* given_gradients, int threads,
             std::string& error) {
  constexpr const char* door = "heed::backward";
  return guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    const heed_outputs from = adopt(given_outputs, "grad_outputs", door);
    const heed_gradients to = adopt(given_gradients, "gradients", door);
    const auto run = [&]<class Real>(const VariantCalls<Real>& variant,
                                     const Request<Real>& request, const Saved<Real>& numbers) {
      const std::string& where = request.where;
      variant.backward(
          request, {numbers, stored_view<const Real>(out, "out", where),
                    OutputGradients<Real>(stored_view<const Real>(from.out, "grad_out", where),
                                          stored_view<const Real>(from.lse, "grad_lse", where),
                                          stored_view<const Real>(from.steps, "grad_steps", where)),
                    gradients_of<Real>(to, where), to.parameters, to.parameter_count});
    };
    with_saved<List>(call, saved, door, threads, run);
  });
}

template <class List>
int jvp(const heed_call* given, const heed_saved* saved, const DLTensor* out,
        const heed_tangents* given_tangents, const heed_outputs* given_outputs, int threads,
        std::string& error) {
  constexpr const char* door = "heed::jvp";
  return guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    const heed_tangents along = adopt(given_tangents, "tangents", door);
    const heed_outputs to = adopt(given_outputs, "the tangents of outputs", door);
    const auto run = [&]<class Real>(const VariantCalls<Real>& variant,
                                     const Request<Real>& request, const Saved<Real>& numbers) {
      const std::string& where = request.where;
      variant.jvp(
          request,
          {numbers, stored_view<const Real>(out, "out", where), direction_of<Real>(along, where),
           Outputs<Real>(stored_view<Real>(to.out, "the tangent of out", where),
                         stored_view<Real>(to.lse, "the tangent of lse", where),
                         stored_view<Real>(to.steps, "the tangent of steps", where))});
    };
    with_saved<List>(call, saved, door, threads, run);
  });
}

template <class List>
int hvp(const heed_call* given, const heed_saved* saved, const DLTensor* out,
        const DLTensor* grad_out, const heed_tangents* given_tangents,
        const DLTensor* grad_out_tangent, const heed_gradients* given_gradients, int threads,
        std::string& error) {
  constexpr const char* door = "heed::hvp";
  return guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    const heed_tangents along = adopt(given_tangents, "tangents", door);
    const heed_gradients to = adopt(given_gradients, "gradients", door);
    const auto run = [&]<class Real>(const VariantCalls<Real>& variant,
                                     const Request<Real>& request, const Saved<Real>& numbers) {
      const std::string& where = request.where;
      variant.hvp(
          request,
          {numbers, stored_view<const Real>(out, "out", where),
           stored_view<const Real>(grad_out, "grad_out", where), direction_of<Real>(along, where),
           stored_view<const Real>(grad_out_tangent, "the tangent of grad_out", where),
           gradients_of<Real>(to, where), to.parameters, to.parameter_count});
    };
    with_saved<List>(call, saved, door, threads, run);
  });
}

inline void free_saved(heed_saved* saved) { delete static_cast<SavedCall*>(saved); }

inline int report(const heed_saved* saved, const char* name, const DLTensor* to,
                  std::string& error) {
  constexpr const char* where = "heed_report";
  return guarded(error, where, [&] {
    require(name != nullptr, where, ": name is a null pointer");
    require(to != nullptr, where, ": to is a null pointer");
    std::visit(
        [&](const auto& numbers) {
          const SmallTensor tensor(*to, std::string(where) + ": to");
          const Geometry& g = numbers.stamp.geometry;
          const auto& names = numbers.diagnostic_names;
          require(std::find(names.begin(), names.end(), name) != names.end(), where,
                  ": the call reports no ", name, ", it reports ",
                  names.empty() ? "nothing" : joined(names));
          const auto& rows = numbers.diagnostic(name);
          tensor.require_writable({g.batch, g.heads, g.len_q, 1});
          tensor.write(rows.data());
        },
        static_cast<const SavedCall*>(saved)->numbers);
  });
}
inline const char* report_name(const heed_saved* saved, std::size_t index) {
  return std::visit(
      [index](const auto& numbers) -> const char* {
        const auto& names = numbers.diagnostic_names;
        return index < names.size() ? names[index].c_str() : nullptr;
      },
      static_cast<const SavedCall*>(saved)->numbers);
}

// The sizes of a call whose tensors may have no memory, for heads of the variant.
template <class Real>
[[nodiscard]] Geometry sizes_of(const heed_call& call, const VariantCalls<Real>& variant,
                                const std::string& where) {
  const heed_cache* const cache = first_cache(call, where.c_str());
  require(call.query != nullptr && (call.value != nullptr || cache != nullptr), where, ": ",
          call.query != nullptr ? "value" : "query", " was not given, its shape is asked for");
  const Shape q = detail::dlpack_axes(*call.query, where + ": query").shape(),
              v = cache != nullptr ? Shape{cache->batch, cache->kv_heads,
                                           cache->table->cache_length(cache), cache->dim_v}
                                   : detail::dlpack_axes(*call.value, where + ": value").shape();
  require(q.dim > 0 && v.dim > 0, where, ": query has dim_qk ", q.dim, " and value dim_v ", v.dim,
          ", both must be at least 1");
  const Index heads = q.heads / variant.query_heads();
  return {q.batch, heads, q.heads, v.heads, q.len, v.len, q.dim, v.dim};
}

template <class List>
int shapes_of(const heed_call* given, heed_shapes* shapes, std::string& error) {
  constexpr const char* door = "heed::forward";  // errors are those of this call
  return guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    heed_shapes found = adopt(shapes, "shapes", door);
    with_real(call.query, door, [&]<class Real>(Real) {
      const VariantCalls<Real>& variant = find_variant(variants<List, Real>(), call.variant, door);
      const std::string where = detail::door_name(door, variant.name());
      const Geometry g = sizes_of(call, variant, where);
      const auto write = [&](std::int64_t* to, Index width) {
        const Index shape[] = {g.batch, g.heads, g.len_q, width};
        for (int axis = 0; axis < 4; ++axis) to[axis] = width > 0 ? shape[axis] : 0;
      };
      write(found.out, g.dim_v);
      write(found.lse, variant.maps());
      const auto widths = variant.widths(call.parameters, call.parameter_count, g, where);
      write(found.steps, widths.steps);
      write(found.extra, widths.extra);
    });
    write_back(found, shapes);
  });
}

template <class List>
int check(const heed_call* given, std::string& error) {
  constexpr const char* door = "heed::forward";  // errors are those of this call
  const heed_table* other = nullptr;
  const int status = guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    const heed_cache* const cache = first_cache(call, door);
    if (cache != nullptr && cache->table != &table<List>()) {
      other = cache->table;
      return;
    }
    with_real(call.query, door, [&]<class Real>(Real) {
      const VariantCalls<Real>& variant = find_variant(variants<List, Real>(), call.variant, door);
      const std::string where = detail::door_name(door, variant.name());
      variant.check(request_of<Real>(call, variant, &table<List>(), where, 1));
    });
  });
  return other != nullptr ? other->check(given, error) : status;
}

// Calls f(entries) with the entries of the call's variant as heed's own programs begin with it,
// changed by the call's parameters.
template <class List, class F>
void with_initial(const heed_call& call, const heed_start* given, const char* door, F&& f) {
  const heed_start start = given != nullptr ? adopt(given, "start", door) : heed_start{};
  with_real(call.query, door, [&]<class Real>(Real) {
    const VariantCalls<Real>& variant = find_variant(variants<List, Real>(), call.variant, door);
    const std::string where = detail::door_name(door, variant.name());
    // The baseline's sizes: if the op reads several query heads at a time, the baseline has that many times the width.
    Geometry g = sizes_of(call, variant, where);
    g.query_heads = g.heads;
    g.dim_qk *= variant.query_heads();
    require(start.depth >= 0 && start.prototypes >= 0, where, ": depth is ", start.depth,
            " and prototypes is ", start.prototypes, ", neither may be negative");
    VariantOptions options;
    if (start.seed != 0) options.seed = start.seed;
    if (start.depth != 0) options.depth = Index(start.depth);
    if (start.prototypes != 0) options.prototypes = Index(start.prototypes);
    const VariantList<Real> list = make_variants<List, Real>(g, options);
    Entries<Real> entries = find_variant(list, call.variant, door).entries();
    set_entries(entries, call.parameters, call.parameter_count, true, where);
    f(entries, where);
  });
}

template <class List>
int describe_variant(const heed_call* given, const heed_start* start, heed_parameter_info* infos,
                     size_t* count, std::string& error) {
  constexpr const char* door = "heed_describe";
  return guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    require(count != nullptr, door, ": count is a null pointer");
    require_list(infos, *count, "infos", kAnyList, door);
    with_initial<List>(call, start, door, [&](const auto& entries, const std::string& where) {
      const std::size_t room = std::min(*count, entries.size());
      // The caller's array. Each struct is as long as its size says.
      const std::size_t step = room > 0 ? padded<heed_parameter_info>(infos->size) : 0;
      for (std::size_t n = 0; n < room; ++n) {
        auto* to =
            reinterpret_cast<heed_parameter_info*>(reinterpret_cast<std::byte*>(infos) + n * step);
        require(to->size == infos->size, where, ": infos[", n, "] has size ", to->size,
                ", infos[0] has ", infos->size);
        (void)adopt(to, "infos", door);
        heed_parameter_info info{};
        describe(entries[n], info);
        write_back(info, to);
      }
      *count = entries.size();
    });
  });
}

template <class List>
int initial(const heed_call* given, const heed_start* start, const heed_parameter* to, size_t count,
            std::string& error) {
  constexpr const char* door = "heed_initial";
  return guarded(error, door, [&] {
    const heed_call call = adopt(given, "the call", door);
    with_initial<List>(call, start, door, [&](auto& entries, const std::string& where) {
      check_targets(entries, to, count, call.parameters, call.parameter_count, "initial value",
                    where);
      write_entries(entries, to, count, where);
    });
  });
}

// Null behind the last one, and if there is no memory for the list.
template <class List>
const char* variant_name(size_t index) {
  const char* name = nullptr;
  std::string error;
  (void)guarded(error, "heed_variant_name", [&] {
    const auto& list = variants<List, float>();
    if (index < list.size()) name = list[index]->name();
  });
  return name;
}

inline int default_threads() { return resolve_threads(0); }

template <class List>
int cache_new(const heed_cache_sizes* sizes, heed_cache** cache, std::string& error) {
  if (cache != nullptr) *cache = nullptr;
  constexpr const char* door = "heed_cache_new";
  return guarded(error, door, [&] {
    require(cache != nullptr, door, ": cache is a null pointer");
    *cache = make_cache(adopt(sizes, "sizes", door), &table<List>(), door).release();
  });
}

template <class List>
const heed_table& table() {
  static constexpr heed_table all{&forward<List>,   &backward<List>,
                                  &jvp<List>,       &hvp<List>,
                                  &free_saved,      &report,
                                  &report_name,     &shapes_of<List>,
                                  &check<List>,     &describe_variant<List>,
                                  &initial<List>,   &variant_name<List>,
                                  &default_threads, &cache_new<List>,
                                  &cache_free,      &cache_append,
                                  &cache_reserve,   &cache_truncate,
                                  &cache_forget,    &cache_length,
                                  &cache_capacity};
  return all;
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
