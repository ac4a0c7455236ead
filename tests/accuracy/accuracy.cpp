// SPDX-License-Identifier: Apache-2.0
// How far out and gradients of every variant are from its plain loops on inputs that are hard for rounding: float from double,
// double from long double.
//
//   error of a tensor = max |fast - exact| / size,  size = the larger of max |exact| here and on ordinary inputs
//
// so that a gradient that vanishes, as behind a weight of 1, is not measured by its own smallness. Hessian-vector products of
// variants that have them are measured likewise, float against double.
//
//   heed_accuracy            prints the worst error of each variant, and where it is
//   heed_accuracy FOLDER     besides, ends with 1 where a line `accuracy of NAME` or `second derivatives of NAME` in a header of
//                            this folder says less

#include <heed/check/op_gradcheck.hpp>

#include "conformance/runner.hpp"
#include "hessian_products.hpp"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <string>
#include <vector>

namespace {

using namespace heed_test;

// The tape of a longer row takes gigabytes.
constexpr Index kOutAlone = 100000;

// Inputs that are hard: change() makes them of an ordinary call of this geometry.
template <class T>
struct Hard {
  const char* name;
  Index len_q, len_kv, dim;
  void (*change)(Call<T>&);
};

template <class T, class F>
void each_number(Tensor<T>& x, F&& f) {
  const Shape s = x.shape();
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index t = 0; t < s.len; ++t)
        for (Index c = 0; c < s.dim; ++c) x(b, h, t, c) = T(f(b, h, t, c));
}

template <class T>
const Hard<T> kHard[] = {
    {"ordinary", 40, 40, 16, [](Call<T>&) {}},
    {"large logits", 40, 40, 16,
     [](Call<T>& call) {
       each_number(call.query, [&](auto... at) { return 40 * call.query(at...); });
     }},
    {"logits that cancel", 40, 40, 16,
     [](Call<T>& call) {
       each_number(call.key, [&, like = call.key](Index b, Index h, Index t, Index c) {
         return 8 * like(b, h, 0, c) + T(1e-3) * like(b, h, t, c);
       });
     }},
    {"rows near parallel", 40, 40, 16,
     [](Call<T>& call) {
       each_number(call.key, [&, like = call.key](Index b, Index h, Index t, Index c) {
         return call.query(b, h, t % 3, c) + T(1e-3) * like(b, h, t, c);
       });
     }},
    {"tiny rows", 40, 40, 16,
     [](Call<T>& call) {
       each_number(call.query, [&](auto... at) { return T(1e-4) * call.query(at...); });
       each_number(call.key, [&](auto... at) { return T(1e-4) * call.key(at...); });
     }},
    {"values that cancel", 40, 40, 16,
     [](Call<T>& call) {
       each_number(call.value, [&](auto... at) { return 100 + call.value(at...); });
     }},
    {"width 1", 40, 40, 1, [](Call<T>&) {}},
    {"width 1, each third row tiny", 40, 40, 1,
     [](Call<T>& call) {
       for (Tensor<T>* rows : {&call.query, &call.key})
         each_number(*rows, [&](Index b, Index h, Index t, Index c) {
           return (t % 3 == 0 ? T(4e-4) : T(1)) * (*rows)(b, h, t, c);
         });
     }},
    {"width 2", 40, 40, 2, [](Call<T>&) {}},
    {"width 3", 40, 40, 3, [](Call<T>&) {}},
    {"a row of 5,000 keys", 1, 5000, 2, [](Call<T>&) {}},
    {"a row of 100,000 keys", 1, kOutAlone, 2, [](Call<T>&) {}},
};

// Parameters at their ends: the value of those whose names hold this word, or, where it is not 0, a factor.
struct End {
  const char* parameter;
  double value, factor;
};
constexpr End kEnds[] = {{"", 0, 1},           {"strength", 30, 0},    {"strength", -30, 0},
                         {"sharpness", 60, 0}, {"sharpness", 0.01, 0}, {"feedback", 0.49, 0},
                         {"feedback", -3, 0},  {"vigilance", 1, 0},    {"lambda", 0.999, 0},
                         {"eta", 1e-3, 0},     {"eta", 0.999, 0},      {"rho", 0, 0},
                         {"rho", 8, 0},        {"pull", 5, 0},         {"gate", 0, 30},
                         {"weight", 0, 8}};

// The op with its parameters at this end; none if it has no such parameter, or refuses the value.
template <class Op>
[[nodiscard]] std::optional<Op> at_end(const Op& op, const Geometry& g, const End& end) {
  Op moved = op;
  bool found = *end.parameter == '\0';
  moved.visit([&](const char* name, auto& param) {
    if (found && *end.parameter == '\0') return;
    if (!param.given() || std::string(name).find(end.parameter) == std::string::npos) return;
    found = true;
    for (Index i = 0; i < param.size(); ++i) {
      using T = typename Op::Scalar;
      param[i] = end.factor == 0 ? T(end.value) : T(double(param[i]) * end.factor);
    }
  });
  if (!found) return std::nullopt;
  try {
    moved.validate(g, "accuracy");
  } catch (const std::invalid_argument&) {
    return std::nullopt;
  }
  return moved;
}

struct Worst {
  double error = 0;
  std::string where;
  void note(double e, const std::string& place) {
    if (e > error || where.empty()) error = e, where = place;
  }
};
struct Accuracy {
  Worst out, gradients, products, narrow_products;
};
// By "dar float".
using Table = std::map<std::string, Accuracy>;

// The largest numbers of tensors on ordinary inputs.
using Sizes = std::map<std::string, double>;

[[nodiscard]] double error_of(const std::string& name, const std::vector<double>& fast,
                              const std::vector<double>& exact, Sizes& sizes) {
  double& ordinary = sizes[name];
  if (ordinary == 0) ordinary = largest(exact);
  double worst = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double e = std::abs(fast[i] - exact[i]);
    worst = e <= worst ? worst : e;  // NaN counts
  }
  return worst == 0 ? 0 : worst / std::max(ordinary, largest(exact));
}

void note_errors(const Named& fast, const Named& exact, const std::string& where, Sizes& sizes,
                 Worst& worst) {
  for (const heed::NamedTensor& one : exact)
    for (const heed::NamedTensor& mine : fast)
      if (mine.name == one.name)
        worst.note(error_of(one.name, mine.values, one.values, sizes), one.name + ", " + where);
}

// A Hessian-vector product of the call along a direction whose numbers are floats.
template <class Op>
[[nodiscard]] Named product_of(const Op& op, const Call<float>& call) {
  using T = typename Op::Scalar;
  heed::OpCall<Op> of(op, call.geometry);
  of.query = call.query.template dense<T>();
  of.key = call.key.template dense<T>();
  of.value = call.value.template dense<T>();
  of.grad_out = call.grad_out.template dense<T>();
  Direction<Op> direction(of, 7);
  for (auto* numbers : {&direction.query, &direction.key, &direction.value, &direction.grad_out})
    for (T& x : *numbers) x = T(float(x));
  direction.op.visit([&](const char*, auto& param) {
    for (Index i = 0; i < param.size(); ++i) param[i] = T(float(param[i]));
  });
  const Product<T> product = run_hvp(of, direction);
  Named named;
  Product<T>::for_each([&](const char* name, auto part) {
    const std::vector<T>& numbers = product.*part;
    named.push_back({std::string("product of ") + name, {numbers.begin(), numbers.end()}});
  });
  return named;
}

template <class Wide, class T, class Op>
void measure(const Op& op, const Call<T>& call, const std::string& where, Sizes& sizes,
             Accuracy& accuracy) {
  Runner<T> runner;
  runner.geometry = call.geometry;
  detail::attach<T, Needs{.backward = true}>(runner, std::make_shared<const Op>(op));
  const Outcome<T> fast = forward(runner, call);
  const auto wide = heed::reference::cast_whole_op<Wide>(op);
  const auto exact = heed::reference::forward(wide, detail::problem_of<Wide>(call));
  const std::vector<double> out(exact.out.begin(), exact.out.end());
  accuracy.out.note(error_of("out", fast.out.template dense<double>(), out, sizes), where);
  if (call.geometry.len_kv >= kOutAlone) return;
  note_errors(backward(runner, call, fast), detail::run_tape<Wide>(op, call), where, sizes,
              accuracy.gradients);
  if constexpr (std::is_same_v<T, float> && heed::detail::hvp_parts<Op>().all())
    note_errors(product_of(op, call), product_of(wide, call), where, sizes,
                call.geometry.dim_qk == 1 ? accuracy.narrow_products : accuracy.products);
}

template <class T, class Wide>
void measure_all(const char* scalar, Table& table) {
  std::map<std::string, Sizes> ordinary;  // by variant and geometry
  for (const Hard<T>& hard : kHard<T>) {
    const Geometry g = geometry(1, 2, 2, hard.len_q, hard.len_kv, hard.dim, hard.dim);
    heed::for_each_variant<T>(
        g,
        [&]<class Op>(const heed::Variant<Op>& variant) {
          if (variant.traits.even_dim_qk && hard.dim % 2 != 0) return;
          // Rows of one number have cosines of 1 and -1 alone: rounding chooses among prototypes.
          if (std::string(variant.name) == "prototype" && hard.dim == 1) return;
          for (const End& end : kEnds) {
            if (*end.parameter != '\0' && hard.len_kv > 1000) continue;
            const std::optional<Op> op = at_end(variant.op, variant.geometry, end);
            if (!op) continue;
            auto call = random_call<T>(variant.geometry, op->extra_dim(variant.geometry));
            std::string where = hard.name;
            if (*end.parameter != '\0')
              where += std::string(", ") + end.parameter + (end.factor == 0 ? " " : " times ") +
                       heed::detail::sentence(end.factor == 0 ? end.value : end.factor);
            // The first end has the parameters as they are.
            auto& sizes =
                ordinary[heed::detail::sentence(variant.name, " ", hard.dim, " ", hard.len_kv)];
            Accuracy& accuracy = table[std::string(variant.name) + " " + scalar];
            if (sizes.empty()) measure<Wide>(*op, call, where, sizes, accuracy);
            hard.change(call);
            measure<Wide>(*op, call, where, sizes, accuracy);
          }
        },
        {.prototypes = 3});
  }
}

// The bounds that headers state, by "dar float":
//   accuracy of NAME  float OUT, GRADIENTS; double OUT, GRADIENTS
//   second derivatives of NAME  float PRODUCTS, of rows of width 1 PRODUCTS
struct Bounds {
  double out = -1, gradients = -1, products = -1, narrow_products = -1;
};
[[nodiscard]] std::map<std::string, Bounds> stated(const std::string& folder) {
  std::map<std::string, Bounds> bounds;
  const std::regex first(R"(accuracy of ([a-z0-9-]+) +float (\S+), (\S+); double (\S+), (\S+))"),
      second(R"(second derivatives of ([a-z0-9-]+) +float (\S+), of rows of width 1 (\S+))");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    std::ifstream file(entry.path());
    std::smatch found;
    for (std::string text; std::getline(file, text);) {
      if (std::regex_search(text, found, first)) {
        Bounds &single = bounds[found[1].str() + " float"],
               &wide = bounds[found[1].str() + " double"];
        single.out = std::stod(found[2]), single.gradients = std::stod(found[3]);
        wide.out = std::stod(found[4]), wide.gradients = std::stod(found[5]);
      } else if (std::regex_search(text, found, second)) {
        Bounds& single = bounds[found[1].str() + " float"];
        single.products = std::stod(found[2]), single.narrow_products = std::stod(found[3]);
      }
    }
  }
  return bounds;
}

int run(int argc, char** argv) {
  Table table;
  measure_all<float, double>("float", table);
  measure_all<double, long double>("double", table);
  const auto bounds = argc < 2 ? std::map<std::string, Bounds>{} : stated(argv[1]);
  int held = 0, count = 0;
  for (const auto& [name, accuracy] : table) {
    const auto bound = bounds.find(name);
    const auto report = [&](const char* of, const Worst& worst, double Bounds::*stated) {
      if (worst.where.empty()) return;
      std::printf("%-26s %s %.1e (%s)", name.c_str(), of, worst.error, worst.where.c_str());
      const bool holds = bound != bounds.end() && worst.error <= bound->second.*stated;
      std::printf(argc < 2 || holds ? "\n" : ": no header says so\n");
      held += holds, ++count;
    };
    report("out", accuracy.out, &Bounds::out);
    report("gradients", accuracy.gradients, &Bounds::gradients);
    report("second derivatives", accuracy.products, &Bounds::products);
    report("second derivatives", accuracy.narrow_products, &Bounds::narrow_products);
  }
  if (argc < 2) return 0;
  std::printf("%d of %d bounds hold\n", held, count);
  return held == count ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "heed_accuracy: %s\n", error.what());
    return 1;
  }
}
