// SPDX-License-Identifier: Apache-2.0
#include "commands.hpp"

#include "open_model.hpp"
#include "reading.hpp"

#include "../program/program.hpp"
#include "../report/links.hpp"
#include "../report/page.hpp"
#include "../report/plots.hpp"

#include <heed/compiled.hpp>
#include <heed/io/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>

namespace heed_lm {

namespace {

using heed::WeightLink;
using heed::WeightMeasures;
using heed_program::as_usage;
using Json = nlohmann::ordered_json;

constexpr int kJsonFormat = 1;
// Most pictures of heads on a page, unless a layer or a head was chosen.
constexpr std::size_t kMostPictures = 64;
constexpr std::size_t kMostSpecial = 100;  // special tokens that are listed

// The readings of the chosen heads.
struct Inspection {
  std::string checkpoint, variant, special;
  std::vector<std::string> tokens;
  std::vector<WeightMeasures> layers;
  std::vector<HeadReading> chosen;  // layer by layer
};

[[nodiscard]] std::string text_of(double x, const char* format) {
  if (!std::isfinite(x)) return "not finite";
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

// 50256 '<|endoftext|>', ...; empty where the tokenizer has no special token.
[[nodiscard]] std::string special_text(const Tokenizer& tokenizer) {
  const std::vector<Index> ids = tokenizer.special_tokens();
  std::string text;
  for (std::size_t i = 0; i < std::min(ids.size(), kMostSpecial); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ids[i]) + " " +
            heed::io::in_quotes(tokenizer.token(ids[i]));
  if (ids.size() > kMostSpecial)
    text += " and " + std::to_string(ids.size() - kMostSpecial) + " more";
  return text;
}

// The links of a row: 3 'e' 0.456, 0 'T' 0.120
[[nodiscard]] std::string links_text(const Inspection& in, const WeightMeasures& m, Index row) {
  std::string text;
  for (const WeightLink& link : m.links_of(row)) {
    if (!std::isfinite(link.weight)) return "weights that are not finite";
    if (link.key < 0) break;
    text += (text.empty() ? "" : ", ") + std::to_string(link.key) + " " +
            heed::io::in_quotes(in.tokens[std::size_t(link.key)]) + " " +
            text_of(link.weight, "%.3f");
  }
  return text.empty() ? "nothing" : text;
}

// Prints means of each chosen head, and below them the links of all its tokens, or of the last one.
void print_readings(const Inspection& in, bool all_tokens, std::FILE* to) {
  std::fprintf(to, "tokens %zu, layers %zu; %s\n", in.tokens.size(), in.layers.size(),
               in.variant.c_str());
  if (!in.special.empty()) std::fprintf(to, "special tokens: %s\n", in.special.c_str());
  for (const HeadReading& head : in.chosen) {
    const WeightMeasures& m = in.layers[std::size_t(head.layer)];
    std::fprintf(to, "layer %td head %td  entropy %s nats  largest weight %s  distance %s tokens\n",
                 head.layer, head.head, text_of(head.entropy, "%.3f").c_str(),
                 text_of(head.top_weight, "%.3f").c_str(), text_of(head.distance, "%.1f").c_str());
    for (Index i = all_tokens ? 0 : m.len_q - 1; i < m.len_q; ++i)
      std::fprintf(to, "  %td %s  reads %s\n", i,
                   heed::io::in_quotes(in.tokens[std::size_t(i)]).c_str(),
                   links_text(in, m, m.row(0, head.head, i)).c_str());
  }
}

[[nodiscard]] Json json_of(const WeightMeasures& m, Index row) {
  Json links = Json::array();
  for (const WeightLink& link : m.links_of(row))
    if (link.key >= 0) links.push_back({{"token", link.key}, {"weight", link.weight}});
  const auto at = std::size_t(row);
  return {{"entropy", m.entropy[at]},
          {"distance", m.distance[at]},
          {"total", m.total[at]},
          {"size", m.size[at]},
          {"links", links}};
}
[[nodiscard]] std::string json_of(const Inspection& in) {
  Json heads = Json::array();
  for (const HeadReading& head : in.chosen) {
    const WeightMeasures& m = in.layers[std::size_t(head.layer)];
    Json rows = Json::array();
    for (Index i = 0; i < m.len_q; ++i) rows.push_back(json_of(m, m.row(0, head.head, i)));
    heads.push_back({{"layer", head.layer},
                     {"head", head.head},
                     {"entropy", head.entropy},
                     {"largest_weight", head.top_weight},
                     {"distance", head.distance},
                     {"rows", rows}});
  }
  const Json whole = {{"format", kJsonFormat},
                      {"checkpoint", in.checkpoint},
                      {"variant", in.variant},
                      {"tokens", in.tokens},
                      {"heads", heads}};
  // Tokens and file names may be no UTF-8.
  return whole.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// A picture with one number per layer and head.
[[nodiscard]] heed_report::Picture map_of(const Inspection& in, const char* name, const char* title,
                                          const char* unit, double HeadReading::*number) {
  heed_report::HeatMap map{name, title, "Means over tokens.", "head", "layer", unit, 0, 0, {}};
  map.rows = in.layers.size();
  for (const WeightMeasures& m : in.layers)
    map.columns = std::max(map.columns, std::size_t(m.heads));
  for (std::size_t layer = 0; layer < map.rows; ++layer)
    for (Index head = 0; head < Index(map.columns); ++head) {
      const bool has = head < in.layers[layer].heads;
      map.hidden.push_back(!has);
      map.values.push_back(has ? head_reading(in.layers, Index(layer), head).*number : 0.0);
    }
  return draw(map);
}
[[nodiscard]] heed_report::Picture picture_of(const Inspection& in, const HeadReading& head) {
  const WeightMeasures& m = in.layers[std::size_t(head.layer)];
  const std::string layer = std::to_string(head.layer), number = std::to_string(head.head);
  heed_report::LinkMap map;
  map.name = "reads_" + layer + "_" + number;
  map.title = "Layer " + layer + ", head " + number;
  map.note = "Entropy " + text_of(head.entropy, "%.2f") + " nats, largest weight " +
             text_of(head.top_weight, "%.2f") + ", distance " + text_of(head.distance, "%.1f") +
             " tokens, means over tokens.";
  map.tokens = in.tokens;
  for (Index i = 0; i < m.len_q; ++i)
    for (const WeightLink& link : m.links_of(m.row(0, head.head, i)))
      if (link.key >= 0) map.links.push_back({std::size_t(i), std::size_t(link.key), link.weight});
  return draw(map);
}
[[nodiscard]] heed_report::Page page_of(const Inspection& in, const InspectCommand& command) {
  heed_report::Page page;
  page.title = "Which tokens a language model reads";
  page.facts = {{"model", in.checkpoint + ", " + in.variant},
                {"prompt", command.prompt},
                {"links", "the " + std::to_string(command.top) + " largest weights of each token"}};
  page.pictures = {map_of(in, "entropy", "Entropy of the weights of each head", "entropy, nats",
                          &HeadReading::entropy),
                   map_of(in, "largest_weight", "Largest weight of each head", "weight",
                          &HeadReading::top_weight)};
  if (in.chosen.size() > kMostPictures && !command.layer && !command.head)
    page.facts.emplace_back("heads",
                            std::to_string(in.chosen.size()) +
                                " heads, too many to draw each; --layer and --head choose");
  else
    for (const HeadReading& head : in.chosen) page.pictures.push_back(picture_of(in, head));
  return page;
}

// Throws UsageError unless all outputs can be written, and none of them replaces an input.
void require_outputs(const InspectCommand& command) {
  const std::vector<heed_program::NamedFile> files = {{"the checkpoint", command.checkpoint},
                                                      {"--vocab", command.vocab},
                                                      {"--merges", command.merges}};
  const heed_program::NamedFile json{"--json", command.json == "-" ? "" : command.json};
  heed_program::require_apart(json, files);
  if (!json.path.empty()) heed_program::require_output(json.option, json.path);
  std::vector<heed_program::NamedFile> others = files;
  others.push_back(json);
  heed_program::require_pages_apart({"--report", command.report}, others);
  if (!command.report.empty())
    as_usage([&] {
      heed_report::prepare_folder(command.report);
      return 0;
    });
}

// Throws unless `number`, if it is given, is the number of a layer or a head.
void require_among(const char* option, const std::optional<Index>& number, Index count,
                   const char* what) {
  heed::require(!number || *number < count, option, " is ", number.value_or(0), ", the model has ",
                what, " 0 to ", count - 1);
}

}  // namespace

int run_inspect(const InspectCommand& command) {
  require_outputs(command);
  const Run run =
      as_usage([&] { return open_run(command.checkpoint, command.vocab, command.merges); });
  const std::vector<Index> ids = encode_prompt(*run.tokenizer, command.prompt, command.end_of_text);
  heed::require(Index(ids.size()) <= run.config.len, "--prompt has ", ids.size(),
                " tokens, the model reads ", run.config.len, " at most");
  require_among("--layer", command.layer, Index(run.model->blocks().size()), "layers");
  heed::nn::Context<float> context;
  context.threads = command.threads;

  Inspection in{command.checkpoint, run.config.variant, special_text(*run.tokenizer), {}, {}, {}};
  for (const Index id : ids) in.tokens.push_back(run.tokenizer->token(id));
  in.layers = read_layers(*run.model, context, 1, ids, {.links = command.top});
  Index most = 0;
  for (const WeightMeasures& m : in.layers) most = std::max(most, m.heads);
  require_among("--head", command.head, most, "heads");
  for (Index layer = 0; layer < Index(in.layers.size()); ++layer)
    for (Index head = 0; head < in.layers[std::size_t(layer)].heads; ++head)
      if (layer == command.layer.value_or(layer) && head == command.head.value_or(head))
        in.chosen.push_back(head_reading(in.layers, layer, head));

  print_readings(in, command.layer || command.head, command.json == "-" ? stderr : stdout);
  heed_program::all_of({[&] {
                          if (!command.json.empty())
                            heed_program::write_output(command.json, json_of(in));
                        },
                        [&] {
                          if (!command.report.empty())
                            heed_report::write_page(command.report, page_of(in, command));
                        }});
  return 0;
}

}  // namespace heed_lm
