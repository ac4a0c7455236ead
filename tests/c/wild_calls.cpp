// SPDX-License-Identifier: Apache-2.0
// Wrong calls of C: right ones with some random changes. Pointers that are not null are valid, and
// so is the memory that a tensor claims, unless no memory could be there. A call succeeds or says
// in one line what is wrong; it changes no input, and writes only its outputs.

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

// A copy of exactly `size` bytes, so that sanitizers notice a read behind it. It has room for the size at least.
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

// call(struct) refuses exactly the sizes that are not in `ends`.
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

// xorshift64*, the same everywhere.
class Chance {
 public:
  explicit Chance(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}
  [[nodiscard]] std::uint64_t bits() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1DU;
  }
  [[nodiscard]] std::size_t below(std::size_t count) { return std::size_t(bits() >> 33) % count; }
  [[nodiscard]] bool one_in(std::size_t count) { return below(count) == 0; }
  template <class T>
  [[nodiscard]] T of(std::initializer_list<T> all) {
    return all.begin()[below(all.size())];
  }

 private:
  std::uint64_t state_;
};

// Number of wild calls; any number will do.
constexpr std::uint64_t kCases = 1200;

constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min(),
                       kHighest = std::numeric_limits<std::int64_t>::max();

// Wild numbers. None asks for work or memory that a call may request but a test cannot have.
[[nodiscard]] std::int64_t wild_index(Chance& chance) {
  return chance.of<std::int64_t>({-1, 0, 1, 2, 3, 5, kLowest, kLowest + 1, kHighest, kHighest - 1,
                                  kHighest / 2, -(std::int64_t{1} << 32)});
}
[[nodiscard]] int wild_int(Chance& chance) {
  return chance.of<int>({-1, 0, 1, 2, 3, 7, std::numeric_limits<int>::min()});
}
[[nodiscard]] double wild_number(Chance& chance) {
  return chance.of<double>({-1, -0.0, 0, 1e-310, 0.5, 1, 2, 3, 1e300, -1e300, INFINITY, -INFINITY,
                            std::nan(""), -0x1p31, 0x1p63});
}

// The memory of all tensors, in pieces that hold any of them.
constexpr std::size_t kPiece = 2048, kPieces = 64, kBytes = kPiece * kPieces;

struct Tensor {
  DLTensor dl{};
  std::array<std::int64_t, 10> shape{}, strides{};
};

// The place of a tensor's numbers.
enum class Place { in_memory, elsewhere, nowhere };  // nowhere: no memory could hold them

// Calls f(first byte, bytes) for each number of a tensor that lies in the memory, counted from its first byte.
template <class F>
Place each_number(const DLTensor& t, const unsigned char* memory, F&& f) {
  __extension__ using Wide = __int128;
  if (t.ndim < 0 || t.ndim > 8 || (t.ndim > 0 && t.shape == nullptr)) return Place::nowhere;
  Wide low = 0, high = 0, count = 1;
  std::array<Wide, 8> strides{};
  Wide dense = 1;
  for (int axis = t.ndim; axis-- > 0;) {
    if (t.shape[axis] < 0) return Place::nowhere;
    strides[std::size_t(axis)] = t.strides != nullptr ? t.strides[axis] : dense;
    if (t.shape[axis] > 0 && dense < Wide{1} << 64) dense *= t.shape[axis];
  }
  const int bytes = std::max(1, t.dtype.bits / 8);
  for (int axis = 0; axis < t.ndim; ++axis) {
    if (t.shape[axis] == 0) return Place::in_memory;
    if (count < Wide{1} << 64) count *= t.shape[axis];
    const Wide span = strides[std::size_t(axis)] * (t.shape[axis] - 1);
    (span < 0 ? low : high) += span;
  }
  if (t.data == nullptr) return Place::nowhere;
  const Wide base = Wide(std::uintptr_t(t.data)) + t.byte_offset;
  const Wide first = base + low * bytes, last = base + high * bytes + bytes;
  if (first < 0 || last > Wide{1} << 64) return Place::nowhere;
  const auto begin = Wide(std::uintptr_t(memory));
  if (first < begin || last > begin + Wide(kBytes) || count > Wide(kBytes)) return Place::elsewhere;
  for (std::int64_t n = 0; n < std::int64_t(count); ++n) {
    Wide at = base - begin;
    std::int64_t rest = n;
    for (int axis = t.ndim; axis-- > 0; rest /= t.shape[axis])
      at += rest % t.shape[axis] * strides[std::size_t(axis)] * bytes;
    f(std::size_t(at), std::size_t(bytes));
  }
  return Place::in_memory;
}

// One case: a right call of a variant, the structs and tensors around it, and changes to them.
class Case {
 public:
  Case(std::uint64_t seed, const std::vector<std::string>& variants)
      : chance_(seed), memory_(kBytes) {
    for (std::size_t n = 0; n < kBytes; n += sizeof(float)) {
      const float number = float(chance_.below(2001)) / 1000 - 1;
      std::memcpy(&memory_[n], &number, sizeof number);
    }
    bits_ = chance_.of({32, 64});
    call.variant = variants[chance_.below(variants.size())].c_str();
    const std::int64_t batch = 1 + std::int64_t(chance_.below(2)),
                       len_q = 1 + std::int64_t(chance_.below(4)),
                       len_kv = chance_.one_in(3) ? 1 + std::int64_t(chance_.below(5)) : len_q,
                       kv_heads = chance_.of<std::int64_t>({1, 2}), dim = 4;
    call.query = tensor({batch, 2, len_q, dim});
    call.value = tensor({batch, kv_heads, len_kv, dim});
    auto shapes = sized<heed_shapes>();
    if (heed_shapes_of(&call, &shapes) == heed_ok && shapes.out[1] == 1)
      call.query = tensor({batch, 4, len_q, dim});
    call.key = tensor({batch, kv_heads, len_kv, dim});
    list_parameters();
    const bool right = heed_shapes_of(&call, &shapes) == heed_ok;
    INFO(call.variant << ": " << heed_last_error());
    REQUIRE(right);
    const auto of = [&](const std::int64_t* s) -> const DLTensor* {
      return s[3] > 0 ? tensor({s[0], s[1], s[2], s[3]}) : nullptr;
    };
    call.extra = of(shapes.extra);
    outputs.out = of(shapes.out);
    if (chance_.one_in(2)) outputs.lse = of(shapes.lse);
    if (chance_.one_in(2)) outputs.steps = of(shapes.steps);
    from.out = of(shapes.out);
    if (chance_.one_in(3)) from.lse = of(shapes.lse);
    if (chance_.one_in(3)) from.steps = of(shapes.steps);
    const auto like = [&](const DLTensor* t) -> const DLTensor* {
      if (t == nullptr || chance_.one_in(4)) return nullptr;
      return tensor({t->shape[0], t->shape[1], t->shape[2], t->shape[3]});
    };
    to.query = like(call.query), to.key = like(call.key), to.value = like(call.value);
    to.extra = like(call.extra);
    add_mask(batch, len_q, len_kv);
    add_sequences(batch, len_q, len_kv);
    to.bias = mask.bias != nullptr ? like(mask.bias) : nullptr;
    report = tensor({shapes.out[0], shapes.out[1], shapes.out[2], 1});
  }

  Case(const Case&) = delete;
  ~Case() { heed_cache_free(cache_); }

  // Runs all functions on it; each may see other structs than the one before.
  void run() {
    change(chance_.of({0, 0, 1, 1, 2, 5}));
    const auto shapes = sized<heed_shapes>(wild_size(sizeof(heed_shapes)));
    checked("heed_shapes_of", {}, parameters_read(),
            [&] { return heed_shapes_of(exact_call(), Exact(shapes, tail()).get()); });
    describe();
    const std::size_t targets = chance_.below(targets_.size() + 1);
    std::vector<const DLTensor*> written;
    for (std::size_t n = 0; n < targets; ++n) written.push_back(targets_[n].tensor);
    checked("heed_initial", written, parameters_read(),
            [&] { return heed_initial(exact_call(), start_or_null(), targets_.data(), targets); });

    checked("heed_check", {}, all_read(), [&] { return heed_check(exact_call()); });

    heed_saved* saved = nullptr;
    checked("heed_forward", {outputs.out, outputs.lse, outputs.steps}, all_read(), [&] {
      return heed_forward(exact_call(), chance_.one_in(50) ? nullptr : Exact(outputs, tail()).get(),
                          chance_.one_in(8) ? nullptr : &saved);
    });
    if (saved != nullptr) {
      const char* name = chance_.one_in(9) ? "size" : heed_report_name(saved, chance_.below(2));
      checked("heed_report", {report}, {}, [&] { return heed_report(saved, name, report); });
    }
    change(chance_.of({0, 0, 0, 1, 1, 3}));
    to.parameters = chance_.one_in(20) ? nullptr : targets_.data();
    to.parameter_count = to.parameters == nullptr ? wild_count() : targets;
    written = {to.query, to.key, to.value, to.extra, to.bias, to.query_inputs, to.key_inputs};
    for (std::size_t n = 0; n < targets && to.parameters != nullptr; ++n)
      written.push_back(targets_[n].tensor);
    std::vector<const DLTensor*> read = all_read();
    read.insert(read.end(), {outputs.out, from.out, from.lse, from.steps});
    checked("heed_backward", written, read, [&] {
      return heed_backward(exact_call(), saved, outputs.out, Exact(from, tail()).get(),
                           Exact(to, tail()).get());
    });
    run_second(saved, written);
    heed_saved_free(saved);
  }
  // Inputs move along themselves, or along another tensor.
  void run_second(const heed_saved* saved, const std::vector<const DLTensor*>& written) {
    auto along = sized<heed_tangents>(wild_size(sizeof(heed_tangents)));
    along.query = call.query;
    along.key = chance_.one_in(3) ? nullptr : call.key;
    along.value = call.value;
    along.extra = call.extra;
    along.bias = call.mask != nullptr ? mask.bias : nullptr;
    if (chance_.one_in(6)) along.value = &tensors_[chance_.below(tensors_.size())].dl;
    along.parameters = chance_.one_in(20) ? nullptr : directions_.data();
    along.parameter_count = along.parameters == nullptr ? wild_count() : directions_.size();
    std::vector<const DLTensor*> read = all_read();
    read.insert(read.end(), {outputs.out, along.value});
    for (const heed_parameter& direction : directions_) read.push_back(direction.tensor);
    checked("heed_jvp", {from.out, from.lse, from.steps}, read, [&] {
      return heed_jvp(exact_call(), saved, outputs.out, Exact(along, tail()).get(),
                      Exact(from, tail()).get());
    });
    read.push_back(from.out);
    checked("heed_hvp", written, read, [&] {
      return heed_hvp(exact_call(), saved, outputs.out, from.out, Exact(along, tail()).get(),
                      chance_.one_in(2) ? from.out : nullptr, Exact(to, tail()).get());
    });
  }
  std::size_t successes = 0;

 private:
  // A tensor over a piece of its own.
  [[nodiscard]] Tensor* make(std::initializer_list<std::int64_t> shape) {
    Tensor& t = tensors_.emplace_back();
    std::copy(shape.begin(), shape.end(), t.shape.begin());
    t.dl.data = &memory_[(tensors_.size() - 1) % kPieces * kPiece];
    t.dl.device = {kDLCPU, 0};
    t.dl.ndim = int(shape.size());
    t.dl.dtype = {kDLFloat, std::uint8_t(bits_), 1};
    t.dl.shape = t.shape.data();
    if (shape.size() == 4 && chance_.one_in(3)) {  // (batch, len, heads, dim) memory
      const auto& s = t.shape;
      t.strides = {s[1] * s[2] * s[3], s[3], s[1] * s[3], 1};
      t.dl.strides = t.strides.data();
    }
    return &t;
  }
  [[nodiscard]] const DLTensor* tensor(std::initializer_list<std::int64_t> shape) {
    return &make(shape)->dl;
  }
  [[nodiscard]] unsigned char tail() { return chance_.one_in(6) ? 1 : 0; }
  [[nodiscard]] std::size_t wild_count() {
    return chance_.of<std::size_t>({0, 1, 7, ~std::size_t{0}, ~std::size_t{0} / 2 + 1});
  }
  [[nodiscard]] std::size_t wild_size(std::size_t size) {
    if (!chance_.one_in(10)) return size;
    if (chance_.one_in(5)) return wild_count();
    return chance_.below(size + 65);
  }
  [[nodiscard]] const heed_start* start_or_null() {
    if (chance_.one_in(3)) return nullptr;
    start_ = std::make_unique<Exact<heed_start>>(start, tail());
    return start_->get();
  }

  // Calls heed_describe() with an array of structs of some size.
  void describe() {
    std::size_t room = chance_.below(8), size = wild_size(sizeof(heed_parameter_info));
    const std::size_t step =
        (std::min(std::max(size, sizeof size), sizeof(heed_parameter_info) + 64) + 7) / 8 * 8;
    std::vector<unsigned char> infos(room * step, tail());
    for (std::size_t n = 0; n < room; ++n) {
      if (n > 0 && chance_.one_in(50)) size = wild_size(size);
      std::memcpy(&infos[n * step], &size, sizeof size);
    }
    std::size_t count = room == 0 && chance_.one_in(3) ? wild_count() : room;
    checked("heed_describe", {}, parameters_read(), [&] {
      return heed_describe(exact_call(), start_or_null(),
                           reinterpret_cast<heed_parameter_info*>(infos.data()), &count);
    });
  }
  [[nodiscard]] const heed_call* exact_call() {
    mask_ = std::make_unique<Exact<heed_mask>>(mask, tail());
    packed_ = std::make_unique<Exact<heed_packed>>(packed, tail());
    heed_call copy = call;
    if (copy.mask != nullptr) copy.mask = mask_->get();
    if (copy.packed != nullptr) copy.packed = packed_->get();
    call_ = std::make_unique<Exact<heed_call>>(copy, tail());
    return call_->get();
  }

  // Required parameters of the variant, and some optional ones.
  void list_parameters() {
    std::size_t count = 24;
    std::vector<heed_parameter_info> infos(count, sized<heed_parameter_info>());
    start.seed = 1, start.prototypes = 3;
    REQUIRE(heed_describe(&call, &start, infos.data(), &count) == heed_ok);
    REQUIRE(count < infos.size());
    for (std::size_t n = 0; n < count; ++n) {
      const heed_parameter_info& info = infos[n];
      heed_parameter given{info.name, nullptr, nullptr, info.number};
      const bool learnt = info.kind == heed_per_head || info.kind == heed_tensor;
      if (learnt && info.ndim > 0) {
        Tensor* t = make({});
        std::copy_n(info.shape, info.ndim, t->shape.begin());
        t->dl.ndim = info.ndim;
        given.tensor = &t->dl;
        REQUIRE(heed_initial(&call, &start, &given, 1) == heed_ok);
        if (info.kind == heed_per_head && chance_.one_in(2)) {  // one number for each head
          auto* numbers = static_cast<unsigned char*>(t->dl.data);
          std::memcpy(numbers + bits_ / 8, numbers, std::size_t(bits_ / 8));
          t->shape[0] = 2;
        }
        Tensor* gradient = make({});
        gradient->shape = t->shape;
        gradient->dl.ndim = info.ndim;
        targets_.push_back({info.name, &gradient->dl, nullptr, 0});
        directions_.push_back({info.name, &t->dl, nullptr, 0});
        of_parameters_.insert(of_parameters_.end(), {t, gradient});
      }
      names_.push_back(info.name);
      if (info.required != 0 || (given.tensor != nullptr && chance_.one_in(2)))
        parameters_.push_back(given);
      else if (info.kind == heed_choice && chance_.one_in(4))
        parameters_.push_back({info.name, nullptr, nullptr, double(chance_.below(2))});
    }
    call.parameters = parameters_.data();
    call.parameter_count = parameters_.size();
  }

  void add_mask(std::int64_t batch, std::int64_t len_q, std::int64_t len_kv) {
    if (chance_.one_in(3)) return;
    call.mask = &mask;
    mask.causal = int(chance_.below(2));
    mask.causal_align = int(chance_.below(2)) * mask.causal;
    windows_ = {{2, 1, 0, 0}, {-1, 0, 1, 1}};
    ranges_ = {{0, 4}, {1, 9}};
    lengths_.assign(std::size_t(batch), 2);
    query_documents_.assign(std::size_t(batch * len_q), 1);
    key_documents_.assign(std::size_t(batch * len_kv), 1);
    slopes_ = {0.5, 0.25};
    if (chance_.one_in(3)) mask.windows = windows_.data(), mask.window_count = 2;
    if (chance_.one_in(3)) mask.key_ranges = ranges_.data(), mask.key_range_count = 2;
    if (chance_.one_in(3))
      mask.key_lengths = lengths_.data(), mask.key_length_count = lengths_.size();
    if (chance_.one_in(3)) {
      mask.query_documents = query_documents_.data();
      mask.query_document_count = query_documents_.size();
      mask.key_documents = key_documents_.data();
      mask.key_document_count = key_documents_.size();
    }
    if (chance_.one_in(4)) mask.alibi = slopes_.data(), mask.alibi_count = 2;
    if (chance_.one_in(4)) mask.bias = tensor({1, 2, len_q, len_kv});
    if (chance_.one_in(4)) {
      Tensor* allowed = make({batch, 1, len_q, len_kv});
      allowed->dl.dtype = {kDLUInt, 8, 1};
      auto* bytes = static_cast<unsigned char*>(allowed->dl.data);
      std::fill_n(bytes, kPiece, static_cast<unsigned char>(1));
      mask.allowed = &allowed->dl;
    }
    if (chance_.one_in(4)) {
      // One row for all queries, which sees the first and the last key.
      list_start_[1] = list_indices_[1] = 0;
      mask.list_query_block = len_q;
      list_indices_[list_start_[1]++] = 0;
      if (len_kv > 1) list_indices_[list_start_[1]++] = len_kv - 1;
      mask.list_start = list_start_, mask.list_start_count = 2;
      mask.list_indices = list_indices_, mask.list_index_count = std::size_t(list_start_[1]);
    }
    if (chance_.one_in(4))
      mask.visible = [](void*, std::int64_t, std::int64_t, std::int64_t i, std::int64_t j) {
        return int((std::uint64_t(i) ^ std::uint64_t(j)) & 1U);
      };
  }

  // Some are of two packed sequences, some of a cache, which has its own keys and values.
  void add_sequences(std::int64_t batch, std::int64_t len_q, std::int64_t len_kv) {
    if (batch == 1 && chance_.one_in(3)) {
      call.packed = &packed;
      packed_queries_ = {0, std::int64_t(chance_.below(std::size_t(len_q) + 1)), len_q};
      packed_keys_ = {0, std::int64_t(chance_.below(std::size_t(len_kv) + 1)), len_kv};
      packed.queries = packed_queries_.data(), packed.query_count = packed_queries_.size();
      packed.keys = packed_keys_.data(), packed.key_count = packed_keys_.size();
      mask.key_lengths = nullptr, mask.key_length_count = 0;
    }
    if (!chance_.one_in(5)) return;
    const std::int64_t* key = call.key->shape;
    auto sizes = sized<heed_cache_sizes>();
    sizes.batch = key[0], sizes.kv_heads = key[1], sizes.dim_qk = sizes.dim_v = key[3];
    sizes.dtype = {kDLFloat, std::uint8_t(bits_), 1};
    REQUIRE(heed_cache_new(&sizes, &cache_) == heed_ok);
    REQUIRE(heed_cache_append(cache_, call.key, call.value) == heed_ok);
    if (call.packed == nullptr) {
      call.key = call.value = nullptr;
      call.cache = cache_;
    } else {
      caches_ = {cache_, cache_};  // caches that do not fit
      packed.caches = caches_.data(), packed.cache_count = chance_.below(3);
    }
  }

  // Makes `count` changes.
  void change(int count) {
    for (; count > 0; --count) switch (chance_.below(9)) {
        case 0: change_size(); break;
        case 1: change_pointer(); break;
        case 2: change_number(); break;
        case 3: change_list(); break;
        case 4: change_parameter(); break;
        case 5:
          if (!of_parameters_.empty())
            change_tensor(*of_parameters_[chance_.below(of_parameters_.size())]);
          break;
        default: change_tensor(tensors_[chance_.below(tensors_.size())]); break;
      }
  }
  void change_size() {
    const auto wild = [&](auto& s) { s.size = wild_size(sizeof s); };
    wild(call), wild(outputs), wild(from), wild(to), wild(start), wild(mask), wild(packed);
  }
  void change_pointer() {
    const DLTensor** all[] = {&call.query,        &call.key,        &call.value,    &call.extra,
                              &call.query_inputs, &call.key_inputs, &outputs.out,   &outputs.lse,
                              &outputs.steps,     &from.out,        &from.lse,      &from.steps,
                              &to.query,          &to.key,          &to.value,      &to.extra,
                              &to.bias,           &to.query_inputs, &to.key_inputs, &mask.allowed,
                              &mask.bias,         &report};
    const DLTensor*& changed = *all[chance_.below(std::size(all))];
    changed = chance_.one_in(3) ? nullptr : &tensors_[chance_.below(tensors_.size())].dl;
    if (chance_.one_in(9)) call.variant = chance_.of<const char*>({nullptr, "", "sdpa ", "dar"});
    if (chance_.one_in(9)) call.mask = chance_.one_in(2) ? nullptr : &mask;
    if (chance_.one_in(9)) call.scale = chance_.one_in(2) ? nullptr : &scale_;
  }
  void change_number() {
    std::int64_t* indices[] = {&mask.causal_offset,    &mask.alibi_offset,   &mask.visible_offset,
                               &mask.list_query_block, &mask.list_key_block, &mask.list_batch,
                               &mask.list_heads,       &call.first_query,    &start.depth,
                               &start.prototypes};
    int* ints[] = {&mask.causal,  &mask.causal_align, &mask.alibi_align,   &mask.visible_align,
                   &call.threads, &call.precision,    &call.queries_at_end};
    double* numbers[] = {&mask.soft_cap, &call.dropout, &scale_};
    switch (chance_.below(3)) {
      case 0: *indices[chance_.below(std::size(indices))] = wild_index(chance_); break;
      case 1: *ints[chance_.below(std::size(ints))] = wild_int(chance_); break;
      default: *numbers[chance_.below(std::size(numbers))] = wild_number(chance_); break;
    }
    if (call.scale == nullptr && chance_.one_in(2)) call.scale = &scale_;
    if (chance_.one_in(9)) call.threads = std::numeric_limits<int>::max();
  }
  // Lists lose entries or all of them, and their numbers change.
  void change_list() {
    const auto lose = [&](auto& list, std::size_t& count) {
      if (!chance_.one_in(4)) return;
      if (chance_.one_in(3)) list = nullptr;
      count = list == nullptr ? wild_count() : chance_.below(count + 1);
      // A count beyond any call's: such a list must not be read.
      if (chance_.one_in(6))
        count = chance_.of<std::size_t>(
            {4097, std::size_t{1} << 40, ~std::size_t{0} / 2 + 1, ~std::size_t{0}});
    };
    switch (chance_.below(10)) {
      case 7: lose(packed.queries, packed.query_count); break;
      case 8: lose(packed.keys, packed.key_count); break;
      case 9: lose(packed.caches, packed.cache_count); break;
      case 0: lose(mask.windows, mask.window_count); break;
      case 1: lose(mask.key_ranges, mask.key_range_count); break;
      case 2: lose(mask.key_lengths, mask.key_length_count); break;
      case 3: lose(mask.query_documents, mask.query_document_count); break;
      case 4: lose(mask.key_documents, mask.key_document_count); break;
      case 5: lose(mask.alibi, mask.alibi_count); break;
      default: lose(call.parameters, call.parameter_count); break;
    }
    for (heed_window& w : windows_) {
      if (chance_.one_in(3)) w.left = wild_index(chance_);
      if (chance_.one_in(3)) w.right = wild_index(chance_);
      if (chance_.one_in(3)) w.offset = wild_index(chance_);
      if (chance_.one_in(9)) w.align = wild_int(chance_);
    }
    for (heed_key_range& r : ranges_) {
      if (chance_.one_in(3)) r.begin = wild_index(chance_);
      if (chance_.one_in(3)) r.end = wild_index(chance_);
    }
    for (auto* list :
         {&lengths_, &query_documents_, &key_documents_, &packed_queries_, &packed_keys_})
      for (std::int64_t& number : *list)
        if (chance_.one_in(6)) number = wild_index(chance_);
    for (double& slope : slopes_)
      if (chance_.one_in(3)) slope = wild_number(chance_);
  }
  void change_parameter() {
    auto& list = chance_.one_in(4) ? targets_ : parameters_;
    if (list.empty()) return;
    heed_parameter& changed = list[chance_.below(list.size())];
    const char* name = names_[chance_.below(names_.size())];
    switch (chance_.below(4)) {
      case 0: changed.name = chance_.of<const char*>({nullptr, "", "strenght", name, name}); break;
      case 1:
        changed.tensor = chance_.one_in(4) ? nullptr : list[chance_.below(list.size())].tensor;
        break;
      case 2: changed.text = chance_.of<const char*>({nullptr, "", "tanh", "safe", "heads"}); break;
      default: changed.number = wild_number(chance_), changed.tensor = nullptr; break;
    }
  }
  void change_tensor(Tensor& t) {
    const Tensor before = t;
    DLTensor& dl = t.dl;
    const std::size_t axis = chance_.below(std::size_t(std::clamp(dl.ndim, 1, 4)));
    switch (chance_.below(14)) {
      case 0:
        dl.ndim = chance_.of({-1, 0, 1, 2, 3, 4, 5, 8, 9, std::numeric_limits<int>::max(),
                              std::numeric_limits<int>::min()});
        break;
      case 1: t.shape[axis] = wild_index(chance_); break;
      case 2: dl.shape = nullptr; break;
      case 3: dl.data = nullptr; break;
      case 4:
        dl.dtype = {std::uint8_t(chance_.below(8)),
                    chance_.of<std::uint8_t>({0, 1, 8, 16, 32, 64, 128, 255}),
                    chance_.of<std::uint16_t>({0, 1, 1, 1, 2, 65535})};
        break;
      case 5: {
        const int device = chance_.of({-1, 0, 2, 3, 4, 11, std::numeric_limits<int>::max()});
        std::memcpy(&dl.device.device_type, &device, sizeof device);
        break;
      }
      case 6:
        dl.byte_offset = chance_.of<std::uint64_t>(
            {1, 2, 4, 8, 16, ~std::uint64_t{0}, ~std::uint64_t{0} - 3, std::uint64_t{1} << 63});
        break;
      case 7: dl.data = &memory_[chance_.below(kBytes - kPiece)]; break;
      case 8:
      case 9:
      case 10: dl.data = tensors_[chance_.below(tensors_.size())].dl.data; break;
      default:
        if (dl.strides == nullptr) {
          std::int64_t stride = 1;
          for (std::size_t a = t.strides.size(); a-- > 0;) {
            t.strides[a] = stride;
            if (int(a) < dl.ndim && t.shape[a] > 0 && t.shape[a] < 9) stride *= t.shape[a];
          }
        }
        t.strides[axis] =
            chance_.one_in(2) ? wild_index(chance_) : std::int64_t(chance_.below(9)) - 2;
        if (t.strides[axis] == 0) t.shape[axis] = wild_index(chance_);
        dl.strides = t.strides.data();
    }
    if (each_number(dl, memory_.data(), [](std::size_t, std::size_t) {}) == Place::elsewhere)
      t = before;
  }

  // The tensors of the call's parameters.
  [[nodiscard]] std::vector<const DLTensor*> parameters_read() const {
    std::vector<const DLTensor*> read;
    for (std::size_t n = 0; n < call.parameter_count && call.parameters != nullptr; ++n)
      read.push_back(call.parameters[n].tensor);
    return read;
  }
  [[nodiscard]] std::vector<const DLTensor*> all_read() const {
    std::vector<const DLTensor*> read = parameters_read();
    read.insert(read.end(),
                {call.query, call.key, call.value, call.extra, call.query_inputs, call.key_inputs});
    if (call.mask != nullptr) read.insert(read.end(), {mask.allowed, mask.bias});
    return read;
  }

  // For each byte the number of these tensors' numbers to which it belongs.
  [[nodiscard]] std::vector<int> owners(const std::vector<const DLTensor*>& tensors) const {
    std::vector<int> counts(kBytes);
    for (const DLTensor* t : tensors)
      if (t != nullptr)
        each_number(*t, memory_.data(), [&](std::size_t at, std::size_t bytes) {
          for (std::size_t n = at; n < at + bytes; ++n) ++counts[n];
        });
    return counts;
  }

  // f() succeeds or reports an error. It changes none of the tensors that it reads and nothing but
  // those that it writes, which do not overlap each other if it succeeds.
  template <class F>
  void checked(const char* door, const std::vector<const DLTensor*>& written,
               const std::vector<const DLTensor*>& read, F&& f) {
    const std::vector<unsigned char> before = memory_;
    const int status = f();
    const std::string text = status != heed_ok ? heed_last_error() : "";
    INFO(door << " of " << (call.variant != nullptr ? call.variant : "none") << ", status "
              << status << ": " << text);
    if (memory_ != before) {
      const std::vector<int> writers = owners(written), readers = owners(read);
      std::size_t outside = 0, inputs = 0;
      int most = 0;
      for (std::size_t n = 0; n < kBytes; ++n) {
        if (memory_[n] == before[n]) continue;
        outside += writers[n] == 0 ? 1 : 0;
        inputs += readers[n] > 0 ? 1 : 0;
        most = std::max(most, writers[n]);
      }
      CHECK(outside == 0);
      CHECK(inputs == 0);
      CHECK((status != heed_ok || most <= 1));
      memory_ = before;
    }
    if (status == heed_ok) {
      ++successes;
      return;
    }
    const bool known = status == heed_invalid || status == heed_no_memory;
    const bool one_line = text.find('\n') == std::string::npos;
    const bool has_door = text.substr(0, 4) == "heed" && text.find(": ") != std::string::npos;
    CHECK((known && one_line && has_door));
  }

  Chance chance_;
  std::vector<unsigned char> memory_;
  std::deque<Tensor> tensors_;
  int bits_ = 32;
  std::vector<heed_parameter> parameters_, targets_, directions_;
  std::vector<Tensor*> of_parameters_;
  std::vector<const char*> names_;
  std::vector<heed_window> windows_;
  std::vector<heed_key_range> ranges_;
  std::vector<std::int64_t> lengths_, query_documents_, key_documents_, packed_queries_,
      packed_keys_;
  heed_cache* cache_ = nullptr;
  std::vector<heed_cache*> caches_;
  std::int64_t list_start_[2] = {}, list_indices_[2] = {};
  std::vector<double> slopes_;
  double scale_ = 0.5;
  std::unique_ptr<Exact<heed_start>> start_;
  std::unique_ptr<Exact<heed_mask>> mask_;
  std::unique_ptr<Exact<heed_packed>> packed_;
  std::unique_ptr<Exact<heed_call>> call_;

 public:
  heed_call call = sized<heed_call>();
  heed_mask mask = sized<heed_mask>();
  heed_packed packed = sized<heed_packed>();
  heed_outputs outputs = sized<heed_outputs>(), from = sized<heed_outputs>();
  heed_gradients to = sized<heed_gradients>();
  heed_start start = sized<heed_start>();
  const DLTensor* report = nullptr;
};

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
  check_sizes<heed_call>("the call", steps_of_8(152, {84, 132}),
                         [&](heed_call* call) { return heed_forward(call, &nothing, nullptr); });
  check_sizes<heed_mask>("the mask", steps_of_8(256, {12, 140, 172}), [&](heed_mask* mask) {
    heed_call call = right;
    call.mask = mask;
    return heed_forward(&call, &nothing, nullptr);
  });
  check_sizes<heed_packed>("packed", steps_of_8(72, {}), [&](heed_packed* packed) {
    heed_call call = right;
    call.packed = packed;
    return heed_forward(&call, &nothing, nullptr);
  });
  check_sizes<heed_cache_sizes>("sizes", steps_of_8(56, {44}), [&](heed_cache_sizes* sizes) {
    heed_cache* cache = nullptr;
    const int status = heed_cache_new(sizes, &cache);
    heed_cache_free(cache);
    return status;
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
  check_sizes<heed_tangents>("tangents", steps_of_8(80, {}), [&](heed_tangents* along) {
    return heed_jvp(&right, saved, &out, along, &nothing);
  });
  heed_saved_free(saved);
}

TEST_CASE("tensors of parameters may interleave, and overlap nothing that is written", "[c]") {
  float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8], dx[8], table[2][3] = {}, given[2] = {0.5F, 0.25F};
  std::int64_t axes[] = {1, 2, 2, 2}, heads[] = {2}, column[] = {3}, none[] = {0},
               endless[] = {std::int64_t{1} << 62};
  const auto tensor = [](float* data, int ndim, std::int64_t* shape, std::int64_t* strides) {
    DLTensor t{};
    t.data = data;
    t.device = {kDLCPU, 0};
    t.ndim = ndim;
    t.dtype = {kDLFloat, 32, 1};
    t.shape = shape;
    t.strides = strides;
    return t;
  };
  DLTensor rows = tensor(x, 4, axes, nullptr), out = tensor(y, 4, axes, nullptr),
           to_rows = tensor(dx, 4, axes, nullptr), learnt = tensor(given, 1, heads, nullptr),
           strength = tensor(&table[0][0], 1, heads, column),
           vigilance = tensor(&table[0][1], 1, heads, column);
  const heed_parameter parameters[] = {{"strength", &learnt, nullptr, 0},
                                       {"vigilance", &learnt, nullptr, 0}};
  const heed_parameter gradients[] = {{"strength", &strength, nullptr, 0},
                                      {"vigilance", &vigilance, nullptr, 0}};
  auto call = sized<heed_call>();
  call.variant = "dar";
  call.query = call.key = call.value = &rows;
  call.parameters = parameters;
  call.parameter_count = 2;
  auto outputs = sized<heed_outputs>(), from = sized<heed_outputs>();
  outputs.out = &out;
  from.out = &rows;
  auto to = sized<heed_gradients>();
  to.query = &to_rows;
  to.parameters = gradients;
  to.parameter_count = 2;
  heed_saved* saved = nullptr;
  REQUIRE(heed_forward(&call, &outputs, &saved) == heed_ok);
  const auto backward = [&] { return heed_backward(&call, saved, &out, &from, &to); };
  CHECK(backward() == heed_ok);
  CHECK((table[0][0] != 0 && table[1][0] != 0 && table[0][1] != 0 && table[1][1] != 0));
  CHECK((table[0][2] == 0 && table[1][2] == 0));

  const auto refused = [](int status, const std::string& text) {
    CHECK(status == heed_invalid);
    CHECK(heed_last_error() == text);
  };
  vigilance.data = &table[1][0];
  refused(backward(), "heed::backward(dar): the gradient of vigilance overlaps that of strength");
  vigilance.data = given;
  refused(backward(),
          "heed::backward(dar): the gradient of vigilance overlaps the tensor of strength that the "
          "call gives");
  vigilance.data = dx;
  refused(backward(), "heed::backward(dar): the gradient of vigilance overlaps grad_query");
  vigilance.data = y;
  refused(backward(), "heed::backward(dar): the gradient of vigilance overlaps out");
  vigilance.data = x;
  refused(backward(), "heed::backward(dar): the gradient of vigilance overlaps grad_out");
  vigilance.data = &table[0][1];
  vigilance.strides = none;
  refused(
      backward(),
      "heed::backward(dar): the gradient of vigilance has stride 0 along axis 0 of extent 2, it "
      "is written: its numbers must not overlap");
  learnt.data = dx;
  vigilance.strides = column;
  refused(backward(), "heed::backward(dar): strength overlaps grad_query");
  learnt.data = y;
  refused(heed_forward(&call, &outputs, nullptr), "heed::forward(dar): strength overlaps out");
  refused(heed_initial(&call, nullptr, parameters, 1),
          "heed_initial(dar): the initial value of strength overlaps the tensor of strength that "
          "the call gives");
  learnt.data = given;
  learnt.byte_offset = std::uint64_t{1} << 63;
  refused(heed_forward(&call, &outputs, nullptr),
          "heed::forward(dar): strength has strides (1) and byte_offset 9223372036854775808, its "
          "numbers lie beyond the address space");
  learnt.byte_offset = 0;
  learnt.strides = &endless[0];
  refused(heed_forward(&call, &outputs, nullptr),
          "heed::forward(dar): strength has strides (4611686018427387904) and byte_offset 0, its "
          "numbers lie beyond the address space");
  learnt.shape = endless;
  learnt.strides = none;
  CHECK(heed_forward(&call, &outputs, nullptr) == heed_no_memory);
  CHECK(std::string(heed_last_error()) == "heed::forward: memory ran out");
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

TEST_CASE("wild calls of C succeed or say in one line what is wrong", "[c]") {
  std::vector<std::string> variants;
  while (const char* name = heed_variant_name(variants.size())) variants.emplace_back(name);
  std::size_t successes = 0;
  for (std::uint64_t seed = 0; seed < kCases; ++seed) {
    INFO("seed " << seed);
    Case one(seed, variants);
    one.run();
    successes += one.successes;
  }
  // A case makes about nine calls, half of which are right.
  CHECK(successes > 3 * kCases);
}

TEST_CASE("C knows no name behind the last one", "[c]") {
  for (const std::size_t index : {std::size_t{1000}, ~std::size_t{0}}) {
    CHECK(heed_variant_name(index) == nullptr);
    CHECK(heed_instructions_name(index) == nullptr);
    CHECK(heed_report_name(nullptr, index) == nullptr);
  }
}
