// SPDX-License-Identifier: Apache-2.0
// Calls of C that nobody should make: right ones in which some things were changed for random others. Pointers that are not null
// are valid, and so is the memory that a tensor claims, unless no memory could be there. A call succeeds or says in one line what
// is wrong; it changes no input, and nothing but what it has to write.

#include "catch.hpp"

#include <heed/c.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

// A copy of exactly `size` bytes, so that sanitizers see who reads on. It has room for the size at least.
template <class Struct>
class Exact {
 public:
  explicit Exact(const Struct& from, unsigned char behind = 0)
      : bytes_(std::min(std::max(from.size, sizeof from.size), sizeof from + 64), behind) {
    std::memcpy(bytes_.data(), &from, std::min(bytes_.size(), sizeof from));
  }
  [[nodiscard]] Struct* get() { return reinterpret_cast<Struct*>(bytes_.data()); }

 private:
  std::vector<unsigned char> bytes_;
};

template <class Struct>
[[nodiscard]] Struct sized(std::size_t size = sizeof(Struct)) {
  Struct s{};
  s.size = size;
  return s;
}

// call(struct) refuses the sizes that are not in `ends`, and those alone.
template <class Struct, class Call>
void check_sizes(const char* name, const std::set<std::size_t>& ends, Call&& call) {
  INFO(name);
  constexpr std::size_t most = sizeof(Struct) + 4096;
  REQUIRE(*ends.rbegin() == sizeof(Struct));
  std::vector<std::size_t> sizes{most + 1, ~std::size_t{0}};
  for (std::size_t size = 0; size <= sizeof(Struct) + 64; ++size) sizes.push_back(size);
  for (const std::size_t size : sizes) {
    const bool fits = size > sizeof(Struct) ? size <= most : ends.count(size) == 1;
    const std::string refusal = std::string("the size of ") + name + " is " + std::to_string(size) +
                                ", it must be that of its struct, " +
                                std::to_string(sizeof(Struct));
    const int status = call(Exact(sized<Struct>(size)).get());
    INFO("size " << size << ": " << heed_last_error());
    const bool refused =
        status == heed_invalid && std::string(heed_last_error()).find(refusal) != std::string::npos;
    CHECK(refused != fits);
  }
}

[[nodiscard]] std::set<std::size_t> steps_of_8(std::size_t last, std::set<std::size_t> others) {
  for (std::size_t end = 16; end <= last; end += 8) others.insert(end);
  return others;
}

}  // namespace

TEST_CASE("structs of C end where a field ends", "[c]") {
  if constexpr (sizeof(void*) != 8) return;
  std::int64_t axes[] = {2, 4};
  float numbers[8] = {};
  DLTensor rows{};
  rows.data = numbers;
  rows.device = {kDLCPU, 0};
  rows.ndim = 2;
  rows.dtype = {kDLFloat, 32, 1};
  rows.shape = axes;
  auto right = sized<heed_call>();
  right.variant = "sdpa";
  right.query = right.key = right.value = &rows;
  auto nothing = sized<heed_outputs>();
  check_sizes<heed_call>("the call", steps_of_8(128, {84}),
                         [&](heed_call* call) { return heed_forward(call, &nothing, nullptr); });
  check_sizes<heed_mask>("the mask", steps_of_8(176, {12, 140, 172}), [&](heed_mask* mask) {
    heed_call call = right;
    call.mask = mask;
    return heed_forward(&call, &nothing, nullptr);
  });
  check_sizes<heed_outputs>("outputs", {16, 24, 32}, [&](heed_outputs* outputs) {
    return heed_forward(&right, outputs, nullptr);
  });
  check_sizes<heed_shapes>("shapes", {40, 72, 104, 136},
                           [&](heed_shapes* shapes) { return heed_shapes_of(&right, shapes); });
  std::size_t count = 0;
  check_sizes<heed_start>("start", {16, 24, 32}, [&](heed_start* start) {
    return heed_describe(&right, start, nullptr, &count);
  });
  right.variant = "dar";
  check_sizes<heed_parameter_info>("infos", {16, 20, 24, 28, 32, 96, 104, 112, 120},
                                   [&](heed_parameter_info* info) {
                                     count = 1;
                                     return heed_describe(&right, nullptr, info, &count);
                                   });
  auto outputs = sized<heed_outputs>();
  float written[8];
  DLTensor out = rows;
  out.data = written;
  outputs.out = &out;
  heed_saved* saved = nullptr;
  REQUIRE(heed_forward(&right, &outputs, &saved) == heed_ok);
  check_sizes<heed_outputs>("grad_outputs", {16, 24, 32}, [&](heed_outputs* from) {
    auto to = sized<heed_gradients>();
    return heed_backward(&right, saved, &out, from, &to);
  });
  check_sizes<heed_gradients>("gradients", steps_of_8(80, {}), [&](heed_gradients* to) {
    return heed_backward(&right, saved, &out, &nothing, to);
  });
  heed_saved_free(saved);
}

TEST_CASE("an array of shorter structs is described", "[c]") {
  struct Older {
    std::size_t size;
    const char* name;
    int kind, required;
  };
  std::int64_t axes[] = {2, 4};
  DLTensor rows{};
  rows.ndim = 2;
  rows.dtype = {kDLFloat, 32, 1};
  rows.shape = axes;
  auto call = sized<heed_call>();
  call.variant = "dar";
  call.query = call.value = &rows;
  std::vector<Older> older(24, Older{sizeof(Older), nullptr, 0, 0});
  std::vector<heed_parameter_info> infos(24, sized<heed_parameter_info>());
  std::size_t count = older.size(), wanted = infos.size();
  REQUIRE(heed_describe(&call, nullptr, infos.data(), &wanted) == heed_ok);
  INFO(heed_last_error());
  REQUIRE(heed_describe(&call, nullptr, reinterpret_cast<heed_parameter_info*>(older.data()),
                        &count) == heed_ok);
  REQUIRE(count == wanted);
  for (std::size_t n = 0; n < count; ++n) {
    CHECK(older[n].size == sizeof(Older));
    CHECK(std::string(older[n].name) == infos[n].name);
    CHECK(older[n].kind == infos[n].kind);
  }
}
