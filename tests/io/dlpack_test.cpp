// SPDX-License-Identifier: Apache-2.0

// Views of tensors of other libraries, and heed's memory as tensors of theirs.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>
#include <heed/io/dlpack.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

namespace {

using heed::Index;
using heed::Shape;
using heed::TensorView;
using heed::to_dlpack;
using heed::view_dlpack;
using heed_test::message_of;

using Axes = std::vector<std::int64_t>;

// A tensor of another library: numbers 0, 1, 2, ... and four axes on them.
template <class T>
struct Foreign {
  std::vector<T> memory;
  Axes shape, strides;
  DLTensor tensor{};

  Foreign(Axes extents, Axes steps)
      : memory(200), shape(std::move(extents)), strides(std::move(steps)) {
    std::iota(memory.begin(), memory.end(), T(0));
    tensor.data = memory.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = int(shape.size());
    tensor.dtype = {kDLFloat, 8 * sizeof(T), 1};
    tensor.shape = shape.data();
    tensor.strides = strides.empty() ? nullptr : strides.data();
  }
  Foreign(const Foreign&) = delete;
};

// True if element (b, h, t, c) is the number that lies at the sum of the strides, at the same address.
template <class T>
[[nodiscard]] bool reads_in_place(const Foreign<T>& from, const TensorView<const T>& view,
                                  Index offset = 0) {
  const Shape& s = view.shape();
  Index wrong = s == Shape{from.shape[0], from.shape[1], from.shape[2], from.shape[3]} ? 0 : 1;
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t)
        for (Index c = 0; c < s.dim; ++c) {
          const Index at = offset + b * from.strides[0] + h * from.strides[1] +
                           t * from.strides[2] + c * from.strides[3];
          wrong += &view(b, h, t, c) != from.memory.data() + at;
        }
  return wrong == 0;
}

[[nodiscard]] Axes axes(const std::int64_t* values) { return {values, values + 4}; }

// The error of viewing a tensor that `spoil` has changed, as T.
template <class T = const float, class Spoil>
[[nodiscard]] std::string refusal(const Spoil& spoil) {
  Foreign<float> from({2, 3, 5, 4}, {60, 20, 4, 1});
  spoil(from.tensor);
  return message_of([&] { (void)view_dlpack<T>(from.tensor, "query"); });
}

// The same, with other axes.
template <class T = const float>
[[nodiscard]] std::string refusal_of_axes(Axes shape, Axes strides) {
  const Foreign<float> from(std::move(shape), std::move(strides));
  return message_of([&] { (void)view_dlpack<T>(from.tensor, "query"); });
}

}  // namespace

TEST_CASE("a DLPack tensor of any strides is viewed where it lies", "[dlpack]") {
  const Axes layouts[] = {
      {60, 20, 4, 1},  // dense
      {60, 4, 12, 1},  // (batch, len, heads, dim)
      {4, 40, 8, 1},   // batch between the heads' rows
      {95, 31, 6, 1},  // room behind each row, head and batch
      {0, 0, 4, 1},    // one head for all, to read
  };
  for (const Axes& strides : layouts) {
    CAPTURE(strides);
    const Foreign<float> single({2, 3, 5, 4}, strides);
    CHECK(reads_in_place(single, view_dlpack<const float>(single.tensor)));
    const Foreign<double> twice({2, 3, 5, 4}, strides);
    CHECK(reads_in_place(twice, view_dlpack<const double>(twice.tensor)));
  }
}

TEST_CASE("a DLPack tensor without strides is dense", "[dlpack]") {
  Foreign<float> from({2, 3, 5, 4}, {});
  const auto view = view_dlpack<const float>(from.tensor);
  from.strides = {60, 20, 4, 1};
  CHECK(reads_in_place(from, view));
}

TEST_CASE("byte_offset moves the view by bytes", "[dlpack]") {
  Foreign<double> from({2, 3, 5, 4}, {60, 20, 4, 1});
  from.tensor.byte_offset = 7 * sizeof(double);
  CHECK(reads_in_place(from, view_dlpack<const double>(from.tensor), 7));
}

TEST_CASE("DLPack tensors of 16-bit numbers and of bool are viewed as what they hold", "[dlpack]") {
  const auto viewed = [](auto number, std::uint8_t code) {
    using Number = decltype(number);
    Foreign<float> from({2, 3, 5, 4}, {60, 20, 4, 1});
    from.tensor.dtype = {code, 8 * sizeof(Number), 1};
    auto* numbers = reinterpret_cast<Number*>(from.memory.data());
    numbers[1 * 60 + 2 * 20 + 3 * 4 + 1] = number;
    const auto view = view_dlpack<const Number>(from.tensor);
    CHECK(&view(1, 2, 3, 1) == numbers + 113);
    CHECK(float(view(1, 2, 3, 1)) == float(number));
    const std::string text =
        message_of([&] { (void)view_dlpack<const float>(from.tensor, "key"); });
    CHECK(text.find("heed::view_dlpack: key has dtype ") == 0);
  };
  viewed(heed::bfloat16(1.5F), kDLBfloat);
  viewed(heed::half(1.5F), kDLFloat);
  viewed(true, 6);  // kDLBool since DLPack 0.8
  std::vector<heed::half> numbers(6, heed::half(2.0F));
  const auto made = to_dlpack(std::move(numbers), {1, 1, 2, 3});
  CHECK(made->dl_tensor.dtype.bits == 16);
  CHECK(float(view_dlpack<heed::half>(made->dl_tensor)(0, 0, 1, 2)) == 2.0F);
}

TEST_CASE("a DLPack tensor of two dimensions is one head", "[dlpack]") {
  const Foreign<float> from({5, 4}, {9, 1});
  const auto view = view_dlpack<const float>(from.tensor);
  CHECK(view.shape() == Shape{1, 1, 5, 4});
  CHECK(view(0, 0, 3, 2) == 29.0F);
  const Foreign<float> dense({5, 4}, {});
  CHECK(view_dlpack<const float>(dense.tensor)(0, 0, 3, 2) == 14.0F);
}

TEST_CASE("what is written to a view of a DLPack tensor stands in the tensor's memory",
          "[dlpack]") {
  const Foreign<float> from({2, 3, 5, 4}, {60, 4, 12, 1});
  const TensorView<float> view = view_dlpack<float>(from.tensor);
  view(1, 2, 3, 1) = -1.0F;
  CHECK(from.memory[60 + 2 * 4 + 3 * 12 + 1] == -1.0F);
}

TEST_CASE("strides that no element uses may be anything", "[dlpack]") {
  const Foreign<float> ones({1, 1, 5, 1}, {-7, 0, 3, -2});
  CHECK(view_dlpack<float>(ones.tensor)(0, 0, 4, 0) == 12.0F);
  Foreign<float> empty({2, 3, 0, 4}, {});
  empty.tensor.data = nullptr;
  empty.tensor.byte_offset = 3;
  CHECK(view_dlpack<float>(empty.tensor).shape() == Shape{2, 3, 0, 4});
}

TEST_CASE("pinned host memory is viewed like any other", "[dlpack]") {
  for (const auto device : {kDLCUDAHost, kDLROCMHost})
    CHECK(refusal([&](DLTensor& t) { t.device.device_type = device; }) == "nothing was thrown");
}

TEST_CASE("a DLPack tensor of another dtype is refused in one sentence", "[dlpack]") {
  const auto with = [](int code, std::uint8_t bits, std::uint16_t lanes = 1) {
    return refusal([=](DLTensor& t) { t.dtype = {std::uint8_t(code), bits, lanes}; });
  };
  const auto refused = [](const std::string& dtype, const std::string& wanted = "float32") {
    return "heed::view_dlpack: query has dtype " + dtype + ", it must be " + wanted;
  };
  CHECK(with(kDLFloat, 32) == "nothing was thrown");
  CHECK(with(kDLInt, 32) == refused("int32"));
  CHECK(with(kDLUInt, 8) == refused("uint8"));
  CHECK(with(kDLFloat, 16) == refused("float16"));
  CHECK(with(kDLFloat, 32, 4) == refused("4 lanes of float32"));
  CHECK(with(kDLBfloat, 16) == refused("bfloat16"));
  CHECK(with(5, 64) == refused("complex64"));
  CHECK(with(6, 8) == refused("bool"));
  CHECK(with(6, 1) == refused("bool1"));
  CHECK(with(10, 8) == refused("float8_e4m3fn"));
  CHECK(with(17, 4) == refused("float4_e2m1fn"));
  CHECK(with(18, 4) == refused("an unknown type of 4 bits"));
  CHECK(refusal<const double>([](DLTensor&) {}) == refused("float32", "float64"));
  CHECK(refusal<const heed::bfloat16>([](DLTensor&) {}) == refused("float32", "bfloat16"));
  CHECK(refusal<const bool>([](DLTensor&) {}) == refused("float32", "bool"));
}

TEST_CASE("a DLPack tensor on a device is refused in one sentence", "[dlpack]") {
  const std::string end = ", it must be on cpu, or pinned host memory: cuda_host or rocm_host";
  CHECK(refusal([](DLTensor& t) { t.device.device_type = kDLCUDA; }) ==
        "heed::view_dlpack: query is on cuda" + end);
  CHECK(refusal([](DLTensor& t) { t.device.device_type = kDLCUDAManaged; }) ==
        "heed::view_dlpack: query is on cuda_managed" + end);
  // Numbers that no enumerator of this dlpack.h has, as a newer producer may send; the sanitizer of
  // enums notices if they are loaded as one.
  for (const std::int32_t newer : {99, 19, 5, -1})
    CHECK(refusal([=](DLTensor& t) { std::memcpy(&t.device.device_type, &newer, sizeof newer); }) ==
          "heed::view_dlpack: query is on an unknown device" + end);
}

TEST_CASE("a DLPack tensor of a wrong shape is refused in one sentence", "[dlpack]") {
  CHECK(refusal([](DLTensor& t) { t.ndim = 3; }) ==
        "heed::view_dlpack: query has ndim 3, it must be 4 or 2");
  CHECK(refusal([](DLTensor& t) { t.ndim = 0; }) ==
        "heed::view_dlpack: query has ndim 0, it must be 4 or 2");
  CHECK(refusal([](DLTensor& t) { t.shape = nullptr; }) ==
        "heed::view_dlpack: query has ndim 4 and a null shape");
  CHECK(refusal_of_axes({2, 3, -5, 4}, {60, 20, 4, 1}) ==
        "heed::view_dlpack: query has shape (2,3,-5,4), extents must not be negative");
  const auto most = std::numeric_limits<std::int64_t>::max();
  CHECK(refusal_of_axes({most, 3, 5, 4}, {}) ==
        "heed::view_dlpack: query: 9223372036854775807 x 3 overflows a 64-bit index");
}

TEST_CASE("extents and strides of a DLPack tensor that overflow are refused in one sentence",
          "[dlpack]") {
  const auto most = std::numeric_limits<std::int64_t>::max();
  const std::string beyond = "overflows a 64-bit index";
  CHECK(refusal_of_axes({0, most, 3, 4}, {}) ==
        "heed::view_dlpack: query: 9223372036854775807 x 3 " + beyond);
  CHECK(refusal_of_axes({0, most, 2, 1}, {1, 1, 1, 1}) ==
        "heed::view_dlpack: query: 9223372036854775807 x 2 " + beyond);
  CHECK(refusal_of_axes({0, most, 1, 1}, {}) == "nothing was thrown");
  CHECK(refusal_of_axes({2, 1, 5, 4}, {most / 4, 20, 4, 1}) ==
        "heed::view_dlpack: query has stride 2305843009213693951 along batch of extent 2, its last "
        "element lies "
        "beyond 9223372036854775807 bytes");
  CHECK(refusal_of_axes({most, 1, 1, 1}, {2, 1, 1, 1}).find("stride 2 along batch") !=
        std::string::npos);
  CHECK(refusal([](DLTensor& t) {
          t.byte_offset = ~std::uint64_t{0} - 3;
        }).find("has byte_offset 18446744073709551612 and 480 bytes, beyond") != std::string::npos);
  CHECK(refusal([](DLTensor& t) {
          t.byte_offset = std::uint64_t{1} << 63;
        }).find("has byte_offset 9223372036854775808 and 480 bytes, beyond") != std::string::npos);
}

TEST_CASE("a DLPack tensor without memory, or at an odd address, is refused in one sentence",
          "[dlpack]") {
  CHECK(refusal([](DLTensor& t) { t.data = nullptr; }) ==
        "heed::view_dlpack: query has a null pointer and shape (2,3,5,4)");
  CHECK(
      refusal([](DLTensor& t) { t.byte_offset = 3; }) ==
      "heed::view_dlpack: query lies 3 bytes past a multiple of 4, it must be aligned to 4 bytes");
}

TEST_CASE("strides that a view cannot have are refused in one sentence", "[dlpack]") {
  CHECK(refusal_of_axes({2, 3, 5, 4}, {60, 20, 1, 5}) ==
        "heed::view_dlpack: query has stride 5 along dim, it must be 1");
  CHECK(refusal_of_axes({2, 3, 5, 4}, {0, 0, 0, 0}) ==
        "heed::view_dlpack: query has stride 0 along dim, it must be 1");
  CHECK(refusal_of_axes({2, 3, 5, 4}, {60, 20, -4, 1}) ==
        "heed::view_dlpack: query has stride -4 along len, it must not be negative");
  CHECK(refusal_of_axes<float>({2, 3, 5, 4}, {60, 0, 4, 1}) ==
        "heed::view_dlpack: query has stride 0 along heads of extent 3, it can be viewed as const "
        "only");
}

TEST_CASE("an exported view says where its elements lie and comes back as the same view",
          "[dlpack]") {
  std::vector<double> memory(200);
  const TensorView<double> view = heed::view_bthd(memory.data() + 3, 2, 5, 3, 4);
  const auto exported = to_dlpack(view);
  const DLTensor& tensor = exported->dl_tensor;
  CHECK(tensor.data == view.data());
  CHECK(tensor.byte_offset == 0);
  CHECK(tensor.ndim == 4);
  CHECK(axes(tensor.shape) == Axes{2, 3, 5, 4});
  CHECK(axes(tensor.strides) == Axes{60, 4, 12, 1});
  CHECK((tensor.device.device_type == kDLCPU && tensor.device.device_id == 0));
  CHECK((tensor.dtype.code == kDLFloat && tensor.dtype.bits == 64 && tensor.dtype.lanes == 1));
  const auto back = view_dlpack<double>(tensor);
  CHECK(&back(1, 2, 4, 3) == &view(1, 2, 4, 3));
}

TEST_CASE("an export keeps its owner until its deleter is called, which happens once", "[dlpack]") {
  int freed = 0;
  std::shared_ptr<float[]> owner(new float[120], [&](const float* p) { ++freed, delete[] p; });
  auto exported = to_dlpack(TensorView<float>(owner.get(), {2, 3, 5, 4}), owner);
  CHECK(owner.use_count() == 2);
  owner.reset();
  CHECK(freed == 0);
  view_dlpack<float>(exported->dl_tensor)(1, 2, 4, 3) = 1.0F;

  DLManagedTensor* handed_on = exported.release();
  CHECK(freed == 0);
  handed_on->deleter(handed_on);
  CHECK(freed == 1);
}

TEST_CASE("a received tensor is deleted once, and one without a deleter is left alone",
          "[dlpack]") {
  int deleted = 0;
  DLManagedTensor received{};
  received.manager_ctx = &deleted;
  { const heed::DlpackPtr<> without(&received); }
  received.deleter = [](DLManagedTensor* self) { ++*static_cast<int*>(self->manager_ctx); };
  {
    heed::DlpackPtr<> first(&received);
    const heed::DlpackPtr<> second = std::move(first);
    CHECK(deleted == 0);
  }
  CHECK(deleted == 1);
}

TEST_CASE("exported values move into the tensor", "[dlpack]") {
  std::vector<float> values(120);
  std::iota(values.begin(), values.end(), 0.0F);
  const float* place = values.data();
  const auto exported = to_dlpack(std::move(values), {2, 3, 5, 4});
  CHECK(exported->dl_tensor.data == place);
  CHECK(axes(exported->dl_tensor.strides) == Axes{60, 20, 4, 1});
  CHECK(view_dlpack<const float>(exported->dl_tensor)(1, 2, 4, 3) == 119.0F);
}

TEST_CASE("a refused export lets go of its owner and says why", "[dlpack]") {
  CHECK(message_of([] {
          (void)to_dlpack(std::vector<float>(7), {1, 1, 2, 3});
        }) == "heed::to_dlpack: values has 7 numbers, shape (1,1,2,3) has 6");
  CHECK(message_of([] {
          (void)to_dlpack(TensorView<float>(nullptr, {1, 1, 2, 3}));
        }) == "heed::to_dlpack: view has a null pointer and shape (1,1,2,3)");
  std::vector<float> memory(64);
  float* const pages[] = {memory.data()};
  const auto paged = TensorView<float>::paged(pages, 16, {1, 1, 16, 4}, {64, 64, 4});
  const auto owner = std::make_shared<int>(0);
  CHECK(message_of([&] { (void)to_dlpack(paged, owner); }) ==
        "heed::to_dlpack: view has pages of 16 rows, it must lie in one piece");
  CHECK(owner.use_count() == 1);
}

TEST_CASE("an export of negative extents, or of too many, is refused in one sentence", "[dlpack]") {
  float number = 0;
  const auto of = [&](const Shape& shape) {
    return message_of([&] { (void)to_dlpack(TensorView<float>(&number, shape, {1, 1, 1})); });
  };
  CHECK(of({-2, 3, 5, 4}) ==
        "heed::to_dlpack: view has shape (-2,3,5,4), extents must not be negative");
  CHECK(of({0, 1, -1, 4}) ==
        "heed::to_dlpack: view has shape (0,1,-1,4), extents must not be negative");
  const Index most = std::numeric_limits<Index>::max();
  CHECK(of({0, most, 2, 4}) ==
        "heed::to_dlpack: view: 9223372036854775807 x 2 overflows a 64-bit index");
  CHECK(message_of([] {
          (void)to_dlpack(std::vector<float>(6), {-1, -1, 2, 3});
        }) == "heed::to_dlpack: values has shape (-1,-1,2,3), extents must not be negative");
}

TEST_CASE("an export without elements has no data", "[dlpack]") {
  float number = 0;
  const auto exported = to_dlpack(TensorView<float>(&number, {2, 3, 0, 4}));
  CHECK(exported->dl_tensor.data == nullptr);
  CHECK(axes(exported->dl_tensor.shape) == Axes{2, 3, 0, 4});
}

TEST_CASE("attention reads and writes DLPack tensors in place", "[dlpack]") {
  constexpr Index batch = 2, len = 9, heads = 3, dim = 8, count = batch * len * heads * dim;
  std::vector<float> packed(3 * count), own(count), theirs(count);
  const heed::CounterRandom random(5, 1);
  for (std::size_t i = 0; i < packed.size(); ++i) packed[i] = float(random.normal(i));
  const auto part = [&](Index p) {
    return heed::view_packed(packed.data(), batch, len, heads, dim, 3, p);
  };
  heed::forward(heed::ScaledDot<float>{}, {part(0), part(1), part(2), {}}, heed::causal<float>(),
                heed::view_bthd(own.data(), batch, len, heads, dim));

  const auto query = to_dlpack(part(0)), key = to_dlpack(part(1)), value = to_dlpack(part(2));
  const auto out = to_dlpack(heed::view_bthd(theirs.data(), batch, len, heads, dim));
  const auto read = [](const auto& tensor) { return view_dlpack<const float>(tensor->dl_tensor); };
  heed::forward(heed::ScaledDot<float>{}, {read(query), read(key), read(value), {}},
                heed::causal<float>(), view_dlpack<float>(out->dl_tensor));
  CHECK(theirs == own);
}

#ifdef DLPACK_MAJOR_VERSION
TEST_CASE("a versioned tensor carries its version and whether it may be written", "[dlpack]") {
  std::vector<float> memory(120);
  const TensorView<float> view(memory.data(), {2, 3, 5, 4});
  const auto free = to_dlpack<DLManagedTensorVersioned>(view);
  CHECK(free->version.major == DLPACK_MAJOR_VERSION);
  CHECK(free->version.minor == DLPACK_MINOR_VERSION);
  CHECK(free->flags == 0);
  CHECK(&view_dlpack<float>(*free)(1, 2, 4, 3) == &memory[119]);

  const auto fixed = to_dlpack<DLManagedTensorVersioned>(TensorView<const float>(view));
  CHECK(fixed->flags == DLPACK_FLAG_BITMASK_READ_ONLY);
  CHECK(&view_dlpack<const float>(*fixed)(1, 2, 4, 3) == &memory[119]);
  CHECK(message_of([&] { (void)view_dlpack<float>(*fixed, "out"); }) ==
        "heed::view_dlpack: out is read only, it can be viewed as const only");

  fixed->version.major = DLPACK_MAJOR_VERSION + 1;
  CHECK(message_of([&] { (void)view_dlpack<const float>(*fixed, "out"); }) ==
        "heed::view_dlpack: out has DLPack version " + std::to_string(DLPACK_MAJOR_VERSION + 1) +
            ", this program was built for " + std::to_string(DLPACK_MAJOR_VERSION));
}

TEST_CASE("a versioned export keeps its owner until it is deleted", "[dlpack]") {
  const auto owner = std::make_shared<std::vector<double>>(120);
  auto exported =
      to_dlpack<DLManagedTensorVersioned>(TensorView<double>(owner->data(), {2, 3, 5, 4}), owner);
  CHECK(owner.use_count() == 2);
  exported.reset();
  CHECK(owner.use_count() == 1);
}
#endif
