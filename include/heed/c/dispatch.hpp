// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions of c.h, by the table of one instruction set. One file of a library includes this
// header, since it defines them, and defines heed_c::library(), which lists the tables. That file
// is compiled without -m flags: it runs on every processor, and chooses the table.

#include <heed/c/table.hpp>
#include <heed/core/system.hpp>
#include <heed/version.hpp>

#include <atomic>
#include <charconv>
#include <string>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace heed_c {

// The code of one instruction set, and whether this processor has it.
struct Instance {
  const char* name;
  const heed_table& (*table)();
  bool (*runs_here)();
};
// Instances from the lowest instruction set to the highest.
struct Library {
  const Instance* instances;
  int count;
};
const Library& library();

inline bool runs_everywhere() { return true; }

#if defined(__x86_64__)
// The levels of the x86-64 psABI. __builtin_cpu_supports() is true for AVX and AVX-512 only if the
// operating system saves their registers. Some compilers do not know three of the features.
inline bool runs_x86_64_v2() {
  return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
}
inline bool runs_x86_64_v3() {
  if (!runs_x86_64_v2() || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2"))
    return false;
  constexpr unsigned movbe = 1U << 22, f16c = 1U << 29, lzcnt = 1U << 5;
  unsigned a = 0, b = 0, basic = 0, extended = 0, d = 0;
  return __get_cpuid(1, &a, &b, &basic, &d) != 0 && (basic & movbe) != 0 && (basic & f16c) != 0 &&
         __get_cpuid(0x80000001U, &a, &b, &extended, &d) != 0 && (extended & lzcnt) != 0;
}
inline bool runs_x86_64_v4() {
  return runs_x86_64_v3() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#elif defined(__aarch64__)
inline bool runs_armv8_2_a_bf16() { return heed::has_bfloat_products(); }
#endif

// The error of this thread's last call that failed.
inline std::string& last_error() {
  thread_local std::string text;
  return text;
}
template <class... Parts>
void add_error(const Parts&... parts) noexcept {
  try {
    ((last_error() += parts), ...);
  } catch (...) {
    last_error().clear();  // no memory for the sentence
  }
}
// Keeps the sentence that `parts` make, and returns the status.
template <class... Parts>
int failed(int status, const Parts&... parts) noexcept {
  last_error().clear();
  add_error(parts...);
  return status;
}

// The highest instance that runs here; null if none does.
inline const Instance* best_instance() {
  const Library& all = library();
  for (int n = all.count; n-- > 0;)
    if (all.instances[n].runs_here()) return &all.instances[n];
  return nullptr;
}
// The instance in use; null before the first call.
inline std::atomic<const Instance*>& chosen() {
  static std::atomic<const Instance*> instance{nullptr};
  return instance;
}
inline const Instance* current() {
  const Instance* instance = chosen().load();
  if (instance == nullptr) chosen().store(instance = best_instance());
  return instance;
}
// The digits of a number, as a part of a sentence.
inline std::string_view digits(int number) {
  thread_local char text[16];
  return {text, std::size_t(std::to_chars(text, text + sizeof text, number).ptr - text)};
}

inline std::atomic<int>& thread_count() {
  static std::atomic<int> count{0};
  return count;
}

// Calls f(table) of the instance that saved this.
template <class F>
int with_table_of(const heed_saved* saved, const char* door, F&& f) {
  if (saved == nullptr)
    return failed(heed_invalid, door,
                  ": saved is a null pointer, it must come from heed_forward()");
  return f(*saved->table);
}
// Calls f(table) of the instance in use.
template <class F>
int with_table(F&& f) {
  const Instance* instance = current();
  if (instance == nullptr)
    return failed(heed_failed, "heed: this processor lacks what the library is compiled for");
  return f(instance->table());
}

inline int no_cache(const char* door) {
  return failed(heed_invalid, door,
                ": cache is a null pointer, it must come from heed_cache_new()");
}

}  // namespace heed_c

int heed_forward(const heed_call* call, const heed_outputs* outputs, heed_saved** saved) {
  return heed_c::with_table([&](const heed_table& table) {
    return table.forward(call, outputs, saved, heed_c::thread_count(), heed_c::last_error());
  });
}
int heed_backward(const heed_call* call, const heed_saved* saved, const DLTensor* out,
                  const heed_outputs* grad_outputs, const heed_gradients* gradients) {
  return heed_c::with_table_of(saved, "heed::backward", [&](const heed_table& table) {
    return table.backward(call, saved, out, grad_outputs, gradients, heed_c::thread_count(),
                          heed_c::last_error());
  });
}
int heed_jvp(const heed_call* call, const heed_saved* saved, const DLTensor* out,
             const heed_tangents* tangents, const heed_outputs* to) {
  return heed_c::with_table_of(saved, "heed::jvp", [&](const heed_table& table) {
    return table.jvp(call, saved, out, tangents, to, heed_c::thread_count(), heed_c::last_error());
  });
}
int heed_hvp(const heed_call* call, const heed_saved* saved, const DLTensor* out,
             const DLTensor* grad_out, const heed_tangents* tangents,
             const DLTensor* grad_out_tangent, const heed_gradients* to) {
  return heed_c::with_table_of(saved, "heed::hvp", [&](const heed_table& table) {
    return table.hvp(call, saved, out, grad_out, tangents, grad_out_tangent, to,
                     heed_c::thread_count(), heed_c::last_error());
  });
}
void heed_saved_free(heed_saved* saved) {
  if (saved != nullptr) saved->table->free(saved);
}

int heed_report(const heed_saved* saved, const char* name, const DLTensor* to) {
  return heed_c::with_table_of(saved, "heed_report", [&](const heed_table& table) {
    return table.report(saved, name, to, heed_c::last_error());
  });
}
const char* heed_report_name(const heed_saved* saved, size_t index) {
  return saved != nullptr ? saved->table->report_name(saved, index) : nullptr;
}

const char* heed_variant_name(size_t index) {
  const heed_c::Instance* instance = heed_c::current();
  return instance != nullptr ? instance->table().variant_name(index) : nullptr;
}
int heed_shapes_of(const heed_call* call, heed_shapes* shapes) {
  return heed_c::with_table(
      [&](const heed_table& table) { return table.shapes(call, shapes, heed_c::last_error()); });
}
int heed_check(const heed_call* call) {
  return heed_c::with_table(
      [&](const heed_table& table) { return table.check(call, heed_c::last_error()); });
}
int heed_describe(const heed_call* call, const heed_start* start, heed_parameter_info* infos,
                  size_t* count) {
  return heed_c::with_table([&](const heed_table& table) {
    return table.describe(call, start, infos, count, heed_c::last_error());
  });
}
int heed_initial(const heed_call* call, const heed_start* start, const heed_parameter* to,
                 size_t count) {
  return heed_c::with_table([&](const heed_table& table) {
    return table.initial(call, start, to, count, heed_c::last_error());
  });
}

int heed_cache_new(const heed_cache_sizes* sizes, heed_cache** cache) {
  return heed_c::with_table(
      [&](const heed_table& table) { return table.cache_new(sizes, cache, heed_c::last_error()); });
}
int heed_cache_append(heed_cache* cache, const DLTensor* key, const DLTensor* value) {
  if (cache == nullptr) return heed_c::no_cache("heed_cache_append");
  return cache->table->cache_append(cache, key, value, heed_c::last_error());
}
int heed_cache_reserve(heed_cache* cache, int64_t length) {
  if (cache == nullptr) return heed_c::no_cache("heed_cache_reserve");
  return cache->table->cache_reserve(cache, length, heed_c::last_error());
}
int heed_cache_truncate(heed_cache* cache, int64_t length) {
  if (cache == nullptr) return heed_c::no_cache("heed_cache_truncate");
  return cache->table->cache_truncate(cache, length, heed_c::last_error());
}
void heed_cache_forget(heed_cache* cache) {
  if (cache != nullptr) cache->table->cache_forget(cache);
}
int64_t heed_cache_length(const heed_cache* cache) {
  return cache != nullptr ? cache->table->cache_length(cache) : 0;
}
int64_t heed_cache_capacity(const heed_cache* cache) {
  return cache != nullptr ? cache->table->cache_capacity(cache) : 0;
}
void heed_cache_free(heed_cache* cache) {
  if (cache != nullptr) cache->table->cache_free(cache);
}

const char* heed_last_error(void) { return heed_c::last_error().c_str(); }
const char* heed_version(void) { return heed::kVersionText; }

int heed_threads(void) {
  const int set = heed_c::thread_count();
  const heed_c::Instance* instance = heed_c::current();
  return set > 0 || instance == nullptr ? set : instance->table().threads();
}
int heed_set_threads(int threads) {
  if (threads < 0)
    return heed_c::failed(heed_invalid, "heed_set_threads: threads is ", heed_c::digits(threads),
                          ", it must be 0 (default) or positive");
  heed_c::thread_count() = threads;
  return heed_ok;
}

const char* heed_instructions(void) {
  const heed_c::Instance* instance = heed_c::current();
  return instance != nullptr ? instance->name : "none";
}
const char* heed_instructions_name(size_t index) {
  const heed_c::Library& all = heed_c::library();
  return index < size_t(all.count) ? all.instances[index].name : nullptr;
}
int heed_use_instructions(const char* name) {
  const heed_c::Library& all = heed_c::library();
  if (name == nullptr) {
    heed_c::chosen() = heed_c::best_instance();
    return heed_ok;
  }
  for (int n = 0; n < all.count; ++n)
    if (std::string_view(name) == all.instances[n].name) {
      if (!all.instances[n].runs_here())
        return heed_c::failed(heed_invalid, "heed_use_instructions: this processor has no ", name,
                              ", its highest is ", heed_instructions());
      heed_c::chosen() = &all.instances[n];
      return heed_ok;
    }
  heed_c::failed(heed_invalid, "heed_use_instructions: the library has no ", name, ", it has");
  for (int n = 0; n < all.count; ++n) heed_c::add_error(n == 0 ? " " : ", ", all.instances[n].name);
  return heed_invalid;
}
