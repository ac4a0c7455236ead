// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parameters and options of any op by name. An op's lists (plug/parameters.hpp) become a list of entries that no longer
// depend on the op, so that functions of entries are compiled once for all ops.

#include <heed/c/lists.hpp>
#include <heed/c/tensors.hpp>
#include <heed/engine/checks.hpp>
#include <heed/plug/parameters.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// The name of an enumerator, as the compiler writes it; empty for a value that has none.
template <auto value>
[[nodiscard]] constexpr std::string_view enumerator_name() {
  std::string_view text =
      __PRETTY_FUNCTION__;  // "... value = heed::GateKind::tanh ...", or "(heed::GateKind)9"
  text.remove_prefix(text.find("value = ") + 8);
  text = text.substr(0, text.find_first_of(";]"));
  if (text.front() == '(') return {};
  return text.substr(text.rfind(':') + 1);
}

// The names of an enumeration that counts from 0.
template <class Enumeration>
[[nodiscard]] const std::vector<std::string>& enumerator_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    [&]<int... n>(std::integer_sequence<int, n...>) {
      const std::string_view all[] = {enumerator_name<Enumeration(n)>()...};
      for (const std::string_view name : all) {
        if (name.empty()) return;
        found.emplace_back(name);
      }
    }
    (std::make_integer_sequence<int, 16>{});
    return found;
  }();
  return names;
}
// "logistic, centred, tanh"
[[nodiscard]] inline std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Functions that read and set an option of some type.
struct OptionType {
  double (*get)(const void* option);
  void (*set)(void* option, double number);
  bool whole;  // numbers in [low, high]
  double low, high;
  const std::vector<std::string>* words;  // words of a choice, else null
  const char* choices;                    // the words, joined
};

template <class Option>
[[nodiscard]] const OptionType& option_type() {
  const auto get = [](const void* option) { return double(*static_cast<const Option*>(option)); };
  const auto set = [](void* option, double number) {
    *static_cast<Option*>(option) = static_cast<Option>(number);
  };
  if constexpr (std::is_enum_v<Option>) {
    static const std::string choices = joined(enumerator_names<Option>());
    static const OptionType type{
        [](const void* option) { return double(int(*static_cast<const Option*>(option))); },
        [](void* option, double number) { *static_cast<Option*>(option) = Option(int(number)); },
        true,
        0,
        double(enumerator_names<Option>().size()) - 1,
        &enumerator_names<Option>(),
        choices.c_str()};
    return type;
  } else if constexpr (std::is_integral_v<Option>) {
    // Doubles hold all whole numbers up to 2^53.
    static const OptionType type{get,
                                 set,
                                 true,
                                 std::max(double(std::numeric_limits<Option>::lowest()), -0x1p53),
                                 std::min(double(std::numeric_limits<Option>::max()), 0x1p53),
                                 nullptr,
                                 nullptr};
    return type;
  } else {
    static_assert(std::is_floating_point_v<Option>,
                  "heed: the C interface knows options that are numbers, flags, enumerations and "
                  "std::vector<heed::Index>");
    static const OptionType type{get, set, false, 0, 0, nullptr, nullptr};
    return type;
  }
}

// A parameter or option of an op, which must outlive it.
template <class Real>
struct Entry {
  const char* name;
  int kind;  // enum heed_parameter_kind
  bool may_be_empty = false;
  Param<Real>* param = nullptr;        // for heed_per_head, heed_tensor and heed_fixed
  std::vector<Index>* list = nullptr;  // for heed_list
  void* option = nullptr;              // for heed_option and heed_choice
  const OptionType* type = nullptr;
  bool required = false;  // the caller has to give it

  [[nodiscard]] bool learnt() const { return kind == heed_per_head || kind == heed_tensor; }
  [[nodiscard]] std::vector<Index> shape() const {
    if (list != nullptr && !list->empty()) return {Index(list->size())};
    return param != nullptr && param->given() ? param->shape() : std::vector<Index>{};
  }
};

template <class Real>
using Entries = std::vector<Entry<Real>>;

// All entries of an op, in the order of its lists. Learnt tensors of the op are required: the
// numbers in the list's op fit other sizes.
template <class Op>
[[nodiscard]] Entries<typename Op::Scalar> entries_of(Op& op) {
  using Real = typename Op::Scalar;
  Entries<Real> entries;
  const auto add = [&]<class Part>(Part& part) {
    for_each_entry<Part>([&]<class Named>(const Named& named) {
      auto& member = part.*named.member;
      using Member = std::remove_reference_t<decltype(member)>;
      Entry<Real> entry{named.name, heed_option, named.may_be_empty};
      if constexpr (is_param<Member>) {
        entry.kind = Named::kind == ParameterKind::per_head ? heed_per_head
                     : Named::kind == ParameterKind::tensor ? heed_tensor
                                                            : heed_fixed;
        entry.param = &member;
        entry.required = entry.kind == heed_tensor && member.given();
      } else if constexpr (std::is_same_v<Member, std::vector<Index>>) {
        entry.kind = heed_list;
        entry.list = &member;
      } else {
        entry.type = &option_type<Member>();
        if (entry.type->words != nullptr) entry.kind = heed_choice;
        entry.option = &member;
      }
      entries.push_back(entry);
    });
  };
  add(op.score);
  add(op.normaliser);
  add(op.readout);
  return entries;
}

template <class Real>
[[nodiscard]] Entry<Real>& find_entry(Entries<Real>& entries, const char* name,
                                      const std::string& where) {
  require(name != nullptr, where, ": a parameter has a null pointer for a name");
  std::string known;
  for (Entry<Real>& entry : entries) {
    if (std::string_view(entry.name) == name) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  fail(where, ": there is no parameter ", name,
       known.empty() ? ", the variant has none" : "; it has ", known);
}

// The number of an option or a choice that the caller gives.
[[nodiscard]] inline double option_number(const heed_parameter& from, const OptionType& type,
                                          const std::string& who) {
  require(from.tensor == nullptr, who, " is a tensor, it must be ",
          type.words != nullptr ? "one of " : "a number",
          type.words != nullptr ? type.choices : "");
  if (from.text == nullptr) {
    const bool fits = !type.whole || (from.number == std::floor(from.number) &&
                                      from.number >= type.low && from.number <= type.high);
    require(fits, who, " is ", from.number, ", it must be a whole number from ", type.low, " to ",
            type.high, type.words != nullptr ? ", or one of " : "",
            type.words != nullptr ? type.choices : "");
    return from.number;
  }
  require(type.words != nullptr, who, " is \"", from.text, "\", it must be a number");
  const auto word = std::find(type.words->begin(), type.words->end(), from.text);
  require(word != type.words->end(), who, " is \"", from.text, "\", it must be one of ",
          type.choices);
  return double(word - type.words->begin());
}

template <class Real>
void set_entry(Entry<Real>& entry, const heed_parameter& from, const std::string& where) {
  const std::string who = where + ": " + entry.name;
  if (entry.type != nullptr)
    return entry.type->set(entry.option, option_number(from, *entry.type, who));
  require(from.text == nullptr || from.tensor != nullptr, who, " is \"",
          from.text != nullptr ? from.text : "", "\", it must be a tensor",
          entry.param != nullptr ? " or a number" : "");
  if (entry.list != nullptr) {
    require(from.tensor != nullptr, who, " is a number, it must be a tensor of whole numbers");
    *entry.list = SmallTensor(*from.tensor, who).whole_numbers();
  } else if (from.tensor == nullptr) {
    *entry.param = Param<Real>(Real(from.number));
  } else {
    const SmallTensor tensor(*from.tensor, who);
    auto numbers = tensor.template numbers<Real>();
    if (numbers.empty())
      *entry.param = Param<Real>();
    else
      *entry.param = Param<Real>(tensor.shape().empty() ? std::vector<Index>{1} : tensor.shape(),
                                 std::move(numbers));
  }
}

// Sets the parameters that the caller gives. Throws for a name that is unknown or stands twice, and
// for a missing one that is required, unless `all` may be missing.
template <class Real>
void set_entries(Entries<Real>& entries, const heed_parameter* given, std::size_t count, bool all,
                 const std::string& where) {
  require_list(given, count, "parameters", kAnyList, where.c_str());
  std::vector<const char*> seen;
  for (std::size_t n = 0; n < count; ++n) {
    Entry<Real>& entry = find_entry(entries, given[n].name, where);
    require(std::find(seen.begin(), seen.end(), entry.name) == seen.end(), where, ": ", entry.name,
            " is given twice");
    seen.push_back(entry.name);
    set_entry(entry, given[n], where);
  }
  for (const Entry<Real>& entry : entries)
    require(all || !entry.required || std::find(seen.begin(), seen.end(), entry.name) != seen.end(),
            where, ": the tensor ", entry.name,
            " was not given; heed_describe() tells its shape, and heed_initial() what it may begin "
            "with");
}

// Sets the tangents of learnt parameters that the caller gives.
template <class Real>
void set_tangents(Entries<Real>& entries, const heed_parameter* given, std::size_t count,
                  const std::string& where) {
  set_entries(entries, given, count, true, where);
  for (std::size_t n = 0; n < count; ++n)
    require(find_entry(entries, given[n].name, where).learnt(), where, ": ", given[n].name,
            " is not learnt, it has no tangent");
}

// Throws where the tensor of one of these parameters, which have names, overlaps a view. `what` stands before the name.
inline void require_apart(const heed_parameter* list, std::size_t count, const char* what,
                          std::span<const detail::NamedMemory> views, const std::string& where) {
  for (std::size_t n = 0; n < count; ++n) {
    if (list[n].tensor == nullptr) continue;
    const MemoryView memory = SmallTensor(*list[n].tensor, where).memory();
    for (const detail::NamedMemory& view : views)
      require(!may_overlap(memory, view.view), where, ": ", what, list[n].name, " overlaps ",
              view.name);
  }
}

// Throws unless write_entries() can write these parameters, which must not overlap each other or the `given` ones.
template <class Real>
void check_targets(Entries<Real>& entries, const heed_parameter* to, std::size_t count,
                   const heed_parameter* given, std::size_t given_count, const char* what,
                   const std::string& where) {
  require_list(to, count, (std::string("the list of ") + what + "s").c_str(), kAnyList,
               where.c_str());
  std::vector<std::pair<SmallTensor, std::string>> others;
  for (std::size_t n = 0; n < given_count; ++n)
    if (given[n].tensor != nullptr)
      others.emplace_back(SmallTensor(*given[n].tensor, where),
                          std::string("the tensor of ") + given[n].name + " that the call gives");
  for (std::size_t n = 0; n < count; ++n) {
    const Entry<Real>& entry = find_entry(entries, to[n].name, where);
    const std::string who = where + ": the " + what + " of " + entry.name;
    require(entry.learnt(), where, ": ", entry.name, " is not learnt, there is no ", what,
            " of it");
    require(entry.param->given(), who, " was asked for, the call has no ", entry.name);
    require(to[n].tensor != nullptr, who, " has no tensor to be written to");
    const SmallTensor written(*to[n].tensor, who);
    written.require_writable(entry.param->shape());
    for (const auto& [other, name] : others)
      require(!written.overlaps(other), who, " overlaps ", name);
    others.emplace_back(written, std::string("that of ") + entry.name);
  }
}
// Writes entries to tensors that check_targets() has seen.
template <class Real>
void write_entries(Entries<Real>& entries, const heed_parameter* to, std::size_t count,
                   const std::string& where) {
  for (std::size_t n = 0; n < count; ++n)
    SmallTensor(*to[n].tensor, where).write(find_entry(entries, to[n].name, where).param->data());
}

// The description of an entry for heed_describe().
template <class Real>
void describe(const Entry<Real>& entry, heed_parameter_info& info) {
  info.name = entry.name;
  info.kind = entry.kind;
  info.required = entry.required ? 1 : 0;
  const std::vector<Index> shape = entry.shape();
  info.ndim = int(shape.size());
  std::copy(shape.begin(), shape.end(), info.shape);
  if (entry.param != nullptr && entry.param->size() == 1) info.number = double((*entry.param)[0]);
  if (entry.type == nullptr) return;
  info.number = entry.type->get(entry.option);
  info.choices = entry.type->choices;
  const auto* words = entry.type->words;
  if (words != nullptr && info.number >= 0 && info.number < double(words->size()))
    info.text = (*words)[std::size_t(info.number)].c_str();
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
