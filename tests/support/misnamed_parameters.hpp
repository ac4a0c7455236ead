// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "message_of.hpp"

#include <heed/core/geometry.hpp>
#include <heed/plug/attention.hpp>

#include <string>
#include <vector>

namespace heed_test {

// The faults in errors about learnt parameters that have numbers for one head too many: each error
// must begin with the parameter's name, and give the wrong number.
template <class Op>
[[nodiscard]] std::vector<std::string> misnamed_parameters(const Op& op, const heed::Geometry& g) {
  std::vector<std::string> names, misnamed;
  heed::for_each_param(op, [&](const char* name, const auto&) { names.emplace_back(name); });
  for (const std::string& of : names) {
    Op other = op;
    std::string number;
    other.visit([&]<class Real>(const char* name, heed::Param<Real>& param) {
      if (name != of) return;
      std::vector<heed::Index> shape = param.shape();
      shape[0] = param.size() == 1 ? g.heads + 1 : shape[0] + 1;
      number = std::to_string(shape[0]);
      param = heed::Param<Real>(shape);
    });
    const std::string said = message_of([&] { other.validate(g, "here"); });
    if (said.find("here: " + of + " has ") != 0 || said.find(number) == std::string::npos)
      misnamed.push_back(of + ": " + said);
  }
  return misnamed;
}

}  // namespace heed_test
