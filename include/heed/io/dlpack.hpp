// SPDX-License-Identifier: Apache-2.0
#pragma once

// DLPack: reads tensors of other libraries as views, and gives heed's memory to them as tensors, without a copy.
//
//   address of element (b, h, t, c) = data + byte_offset + sizeof(Real) (b s_0 + h s_1 + t s_2 + c s_3)
//
// Shapes    import: (batch, heads, len, dim), or (len, dim) for one batch and one head; the last stride is
//           1, no stride is negative. (batch, len, heads, dim) memory comes as the transposed tensor that
//           every library makes without a copy. export: always four axes and their strides.
// Lifetime  a view owns nothing: memory lives as long as the managed tensor, see DlpackPtr.
// Devices   CPU and pinned host memory; the caller waits for the device that fills the latter.
// Errors    std::invalid_argument with one sentence, before anything is read from the memory.
// Needs     <dlpack/dlpack.h>, 0.6 or later (Debian: libdlpack-dev). Nothing else in heed includes this
//           file.

#include <heed/core/error.hpp>
#include <heed/core/view.hpp>

#ifdef __has_include
#if !__has_include(<dlpack/dlpack.h>)
#error "heed/io/dlpack.hpp needs the header dlpack/dlpack.h (Debian: libdlpack-dev)"
#endif
#endif
#include <dlpack/dlpack.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct DlpackDeleter {
  template <class Managed>
  void operator()(Managed* tensor) const {
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  }
};

// Owns a managed tensor that was made here or received; release() hands it on. Managed is DLManagedTensor
// or, from DLPack 1.0 on, DLManagedTensorVersioned.
template <class Managed = DLManagedTensor>
using DlpackPtr = std::unique_ptr<Managed, DlpackDeleter>;

namespace detail {

template <class Real, class... Types>
concept OneOf = (std::same_as<std::remove_const_t<Real>, Types> || ...);
template <class Real>
concept DlpackElement = OneOf<Real, float, double, bfloat16, half, bool>;

// kDLBool, which headers before DLPack 0.8 do not name.
inline constexpr std::uint8_t kDlpackBool = 6;

template <DlpackElement Real>
[[nodiscard]] constexpr DLDataType dlpack_dtype() {
  const std::uint8_t code = OneOf<Real, bool>       ? kDlpackBool
                            : OneOf<Real, bfloat16> ? std::uint8_t(kDLBfloat)
                                                    : std::uint8_t(kDLFloat);
  return {code, std::uint8_t(8 * sizeof(Real)), 1};
}

// "float32", "bool", "4 lanes of int8"
[[nodiscard, gnu::cold]] inline std::string dtype_text(const DLDataType& d) {
  constexpr const char* names[] = {"int",
                                   "uint",
                                   "float",
                                   "handle",
                                   "bfloat",
                                   "complex",
                                   "bool",
                                   "float8_e3m4",
                                   "float8_e4m3",
                                   "float8_e4m3b11fnuz",
                                   "float8_e4m3fn",
                                   "float8_e4m3fnuz",
                                   "float8_e5m2",
                                   "float8_e5m2fnuz",
                                   "float8_e8m0fnu",
                                   "float6_e2m3fn",
                                   "float6_e3m2fn",
                                   "float4_e2m1fn"};
  const std::string bits = std::to_string(d.bits);
  std::string text = "an unknown type of " + bits + " bits";
  if (d.code < std::size(names)) text = names[d.code];
  // Names of the codes behind bool have no bits of their own.
  if (d.code < kDlpackBool || (d.code == kDlpackBool && d.bits != 8)) text += bits;
  return d.lanes == 1 ? text : std::to_string(d.lanes) + " lanes of " + text;
}

// The number of a tensor's kind of device. As an enum, the device of a newer producer may be none of its values.
[[nodiscard]] inline std::int32_t device_of(const DLTensor& tensor) {
  std::int32_t device = 0;
  static_assert(sizeof device == sizeof tensor.device.device_type);
  std::memcpy(&device, &tensor.device.device_type, sizeof device);
  return device;
}
[[nodiscard, gnu::cold]] inline std::string device_text(std::int32_t device) {
  constexpr const char* names[] = {"",       "cpu",       "cuda",    "cuda_host",    "opencl",
                                   "",       "",          "vulkan",  "metal",        "vpi",
                                   "rocm",   "rocm_host", "ext_dev", "cuda_managed", "oneapi",
                                   "webgpu", "hexagon",   "maia",    "trn"};
  const bool known = device >= 0 && std::size_t(device) < std::size(names);
  return known && *names[device] ? names[device] : "an unknown device";
}

// A DLTensor's extents and strides, extended to (batch, heads, len, dim).
struct DlpackAxes {
  static constexpr const char* names[] = {"batch", "heads", "len", "dim"};
  std::array<Index, 4> extents{1, 1, 1, 1}, strides{};

  [[nodiscard]] Shape shape() const { return {extents[0], extents[1], extents[2], extents[3]}; }

  // Throws if an extent is negative, or if the product of all extents that are not 0, from which
  // strides are made, is no Index.
  void require_extents(const std::string& who) const {
    Index product = 1;
    for (const Index extent : extents) {
      require(extent >= 0, who, " has shape ", shape(), ", extents must not be negative");
      if (extent > 0) product = checked_product(product, extent, who.c_str());
    }
  }
  // Sets the strides of row-major memory without gaps. The extents must have passed require_extents().
  void set_dense_strides() {
    strides[3] = 1;
    for (std::size_t a = 3; a > 0; --a)
      strides[a - 1] = strides[a] * std::max<Index>(1, extents[a]);
  }
};

[[nodiscard]] inline DlpackAxes dlpack_axes(const DLTensor& tensor, const std::string& who) {
  require(tensor.ndim == 4 || tensor.ndim == 2, who, " has ndim ", tensor.ndim,
          ", it must be 4 or 2");
  require(tensor.shape != nullptr, who, " has ndim ", tensor.ndim, " and a null shape");
  DlpackAxes axes;
  const auto first = std::size_t(4 - tensor.ndim);
  for (std::size_t a = first; a < 4; ++a) {
    axes.extents[a] = tensor.shape[a - first];
    if (tensor.strides != nullptr) axes.strides[a] = tensor.strides[a - first];
  }
  axes.require_extents(who);
  if (tensor.strides == nullptr) axes.set_dense_strides();
  return axes;
}

// Throws unless the strides can be those of a view. Strides that are never used, along axes of extent 1 and in a tensor
// without elements, may be anything. Returns the number of bytes from the first element to the end of the last.
inline Index require_dlpack_strides(const DlpackAxes& axes, Index element_bytes, bool writes,
                                    const std::string& who) {
  constexpr Index most = std::numeric_limits<Index>::max();
  if (element_count(axes.shape(), who.c_str()) == 0) return 0;
  Index span = 1;
  for (std::size_t a = 0; a < 4; ++a) {
    const Index extent = axes.extents[a], stride = axes.strides[a];
    if (extent <= 1) continue;
    require(a < 3 || stride == 1, who, " has stride ", stride, " along dim, it must be 1");
    require(stride >= 0, who, " has stride ", stride, " along ", DlpackAxes::names[a],
            ", it must not be negative");
    require(stride > 0 || !writes, who, " has stride 0 along ", DlpackAxes::names[a], " of extent ",
            extent, ", it can be viewed as const only");
    require(stride <= (most / element_bytes - span) / (extent - 1), who, " has stride ", stride,
            " along ", DlpackAxes::names[a], " of extent ", extent,
            ", its last element lies beyond ", most, " bytes");
    span += stride * (extent - 1);
  }
  return span * element_bytes;
}

// The most bytes that a pointer may be moved by.
inline constexpr std::uint64_t kFurthest = std::numeric_limits<std::ptrdiff_t>::max();

template <class Real>
[[nodiscard]] Real* dlpack_data(const DLTensor& tensor, const Shape& shape, Index bytes,
                                const std::string& who) {
  if (bytes == 0) return nullptr;
  require(tensor.data != nullptr, who, " has a null pointer and shape ", shape);
  const std::uint64_t room = std::min<std::uint64_t>(
      kFurthest, ~std::uintptr_t{0} - reinterpret_cast<std::uintptr_t>(tensor.data));
  require(tensor.byte_offset <= room && std::uint64_t(bytes) <= room - tensor.byte_offset, who,
          " has byte_offset ", tensor.byte_offset, " and ", bytes,
          " bytes, beyond the address space");
  auto* first = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  const auto past = reinterpret_cast<std::uintptr_t>(first) % alignof(Real);
  require(past == 0, who, " lies ", past, " bytes past a multiple of ", alignof(Real),
          ", it must be aligned to ", alignof(Real), " bytes");
  return reinterpret_cast<Real*>(first);
}

// The memory behind a managed tensor that is made here; the tensor's deleter frees it.
template <class Managed>
struct DlpackExport {
  Managed managed{};
  std::array<std::int64_t, 4> extents, strides;
  std::shared_ptr<const void> owner;

  static void destroy(Managed* tensor) { delete static_cast<DlpackExport*>(tensor->manager_ctx); }
};

template <class Real>
void set_dlpack_flags(DLManagedTensor&) {
  static_assert(!std::is_const_v<Real>,
                "a DLManagedTensor cannot say that it is read only: export a view of T, or a "
                "DLManagedTensorVersioned");
}

#ifdef DLPACK_MAJOR_VERSION
template <class Real>
void set_dlpack_flags(DLManagedTensorVersioned& tensor) {
  tensor.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  tensor.flags = std::is_const_v<Real> ? DLPACK_FLAG_BITMASK_READ_ONLY : 0;
}
#endif

// The result of view_dlpack(); `who` begins its errors.
template <DlpackElement Real>
[[nodiscard]] TensorView<Real> view_dlpack_as(const DLTensor& tensor, const std::string& who) {
  const DLDataType dtype = tensor.dtype, wanted = dlpack_dtype<Real>();
  require(dtype.code == wanted.code && dtype.bits == wanted.bits && dtype.lanes == wanted.lanes,
          who, " has dtype ", dtype_text(dtype), ", it must be ", dtype_text(wanted));
  const std::int32_t device = device_of(tensor);
  require(device == kDLCPU || device == kDLCUDAHost || device == kDLROCMHost, who, " is on ",
          device_text(device),
          ", it must be on cpu, or pinned host memory: cuda_host or rocm_host");
  const DlpackAxes axes = dlpack_axes(tensor, who);
  const Index bytes =
      require_dlpack_strides(axes, Index(sizeof(Real)), !std::is_const_v<Real>, who);
  return {dlpack_data<Real>(tensor, axes.shape(), bytes, who),
          axes.shape(),
          {axes.strides[0], axes.strides[1], axes.strides[2]}};
}

}  // namespace detail

// A view of a tensor's memory as float, double, bfloat16, half or bool; with const Real it is for reading only. `name` stands
// for the tensor in error texts.
template <detail::DlpackElement Real>
[[nodiscard]] TensorView<Real> view_dlpack(const DLTensor& tensor, const char* name = "tensor") {
  return detail::view_dlpack_as<Real>(tensor, std::string("heed::view_dlpack: ") + name);
}

#ifdef DLPACK_MAJOR_VERSION
// The same for a versioned tensor, whose flag "read only" is obeyed; a bare DLTensor has no such flag.
template <detail::DlpackElement Real>
[[nodiscard]] TensorView<Real> view_dlpack(const DLManagedTensorVersioned& tensor,
                                           const char* name = "tensor") {
  require(tensor.version.major == DLPACK_MAJOR_VERSION, "heed::view_dlpack: ", name,
          " has DLPack version ", tensor.version.major, ", this program was built for ",
          DLPACK_MAJOR_VERSION);
  require(std::is_const_v<Real> || (tensor.flags & DLPACK_FLAG_BITMASK_READ_ONLY) == 0,
          "heed::view_dlpack: ", name, " is read only, it can be viewed as const only");
  return view_dlpack<Real>(tensor.dl_tensor, name);
}
#endif

// A managed tensor over the view's memory. `owner`, if given, is held until the tensor is deleted; without
// one the memory is borrowed and must outlive the tensor.
template <class Managed = DLManagedTensor, detail::DlpackElement Real>
[[nodiscard]] DlpackPtr<Managed> to_dlpack(const TensorView<Real>& view,
                                           std::shared_ptr<const void> owner = nullptr) {
  const Shape& s = view.shape();
  detail::DlpackAxes{{s.batch, s.heads, s.len, s.dim}, {}}.require_extents("heed::to_dlpack: view");
  require(view.page_rows() == 0, "heed::to_dlpack: view has pages of ", view.page_rows(),
          " rows, it must lie in one piece");
  require(view.data() != nullptr || !view.has_elements(),
          "heed::to_dlpack: view has a null pointer and shape ", s);
  using Export = detail::DlpackExport<Managed>;
  auto made = std::make_unique<Export>();
  made->extents = {s.batch, s.heads, s.len, s.dim};
  made->strides = {view.strides().batch, view.strides().head, view.strides().row, 1};
  made->owner = std::move(owner);
  Managed& managed = made->managed;
  managed.manager_ctx = made.get();
  managed.deleter = Export::destroy;
  detail::set_dlpack_flags<Real>(managed);
  DLTensor& tensor = managed.dl_tensor;
  tensor.data = view.has_elements() ? const_cast<std::remove_const_t<Real>*>(view.data()) : nullptr;
  tensor.device = {kDLCPU, 0};
  tensor.ndim = 4;
  tensor.dtype = detail::dlpack_dtype<Real>();
  tensor.shape = made->extents.data();
  tensor.strides = made->strides.data();
  return DlpackPtr<Managed>(&made.release()->managed);
}

// A managed tensor that owns dense (batch, heads, len, dim) values.
template <class Managed = DLManagedTensor, detail::DlpackElement Real>
[[nodiscard]] DlpackPtr<Managed> to_dlpack(std::vector<Real> values, const Shape& shape) {
  detail::DlpackAxes{{shape.batch, shape.heads, shape.len, shape.dim}, {}}.require_extents(
      "heed::to_dlpack: values");
  const Index count = element_count(shape, "heed::to_dlpack: values");
  require(Index(values.size()) == count, "heed::to_dlpack: values has ", values.size(),
          " numbers, shape ", shape, " has ", count);
  const auto owner = std::make_shared<std::vector<Real>>(std::move(values));
  return to_dlpack<Managed>(TensorView<Real>(owner->data(), shape), owner);
}

}  // namespace HEED_ABI
}  // namespace heed
