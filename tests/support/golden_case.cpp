// SPDX-License-Identifier: Apache-2.0
#include "golden_case.hpp"

#include <heed/io/safetensors.hpp>

#include <cstdlib>

namespace heed_test {

std::vector<std::filesystem::path> golden_files(const std::filesystem::path& folder,
                                                const std::string& prefix) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::filesystem::path& path = entry.path();
    if (path.extension() == ".safetensors" && path.filename().string().rfind(prefix, 0) == 0)
      files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  return files;
}

GoldenCase::GoldenCase(const std::filesystem::path& path) : path_(path.string()) {
  const auto file = heed::io::Safetensors::read(path);
  metadata_ = file.metadata();
  for (const auto& [name, info] : file.tensors()) {
    tensors_.emplace(name, file.values<double>(name));
    extents_.emplace(name, info.shape);
  }
}

const std::string& GoldenCase::text(const std::string& key) const {
  const auto found = metadata_.find(key);
  heed::require(found != metadata_.end(), path_, ": the metadata has no ", key);
  return found->second;
}
double GoldenCase::number(const std::string& key) const {
  const std::string& value = text(key);
  char* end = nullptr;
  const double result = std::strtod(value.c_str(), &end);
  heed::require(!value.empty() && *end == '\0', path_, ": metadata ", key, " is \"", value,
                "\", it must be a number");
  return result;
}
Index GoldenCase::integer(const std::string& key) const {
  const double value = number(key);
  heed::require(value == std::floor(value), path_, ": metadata ", key, " is ", value,
                ", it must be whole");
  return Index(value);
}

const std::vector<double>& GoldenCase::tensor(const std::string& tensor) const {
  const auto found = tensors_.find(tensor);
  heed::require(found != tensors_.end(), path_, ": there is no tensor ", tensor);
  return found->second;
}
const std::vector<Index>& GoldenCase::extents(const std::string& tensor) const {
  (void)this->tensor(tensor);
  return extents_.at(tensor);
}
heed::Shape GoldenCase::shape(const std::string& tensor) const {
  const std::vector<Index>& e = extents(tensor);
  heed::require(e.size() == 4, path_, ": ", tensor, " has ", e.size(), " extents, it must have 4");
  return {e[0], e[1], e[2], e[3]};
}

heed::Geometry GoldenCase::geometry() const {
  const heed::Shape q = shape("q"), k = shape("k"), v = shape("v"), out = shape("dout");
  heed::Geometry g{q.batch, out.heads, q.heads, k.heads, q.len, k.len, q.dim, v.dim};
  if (has_text("first_query")) g.first_query = integer("first_query");
  require_equal("B", g.batch);
  require_equal("H", g.heads);
  require_equal("Hkv", g.kv_heads);
  require_equal("Tq", g.len_q);
  require_equal("Tk", g.len_kv);
  require_equal("d", g.dim_qk);
  require_equal("dv", g.dim_v);
  return g;
}

heed::Align GoldenCase::align() const {
  const std::string& value = text("align");
  heed::require(value == "tl" || value == "br", path_, ": metadata align is \"", value,
                "\", it must be tl or br");
  return value == "tl" ? heed::Align::top_left : heed::Align::bottom_right;
}

const bool* GoldenCase::allowed() const {
  if (allowed_ == nullptr) {
    const std::vector<double>& numbers = tensor("mask");
    allowed_ = std::shared_ptr<bool[]>(new bool[std::max<std::size_t>(1, numbers.size())]);
    std::transform(numbers.begin(), numbers.end(), allowed_.get(), [](double x) { return x != 0; });
  }
  return allowed_.get();
}

void GoldenCase::require_equal(const char* key, Index extent) const {
  if (has_text(key))
    heed::require(integer(key) == extent, path_, ": metadata ", key, " is ", integer(key),
                  ", the tensors say ", extent);
}

}  // namespace heed_test
