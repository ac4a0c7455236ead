// SPDX-License-Identifier: Apache-2.0

// Properties of all tasks, and the parsing of specs.

#include "tasks/task_list.hpp"

#include "catch.hpp"
#include "message_of.hpp"

#include <algorithm>
#include <set>

using namespace tasks;
using heed_test::message_of;

namespace {

// Both settings of every task, and its tests.
[[nodiscard]] std::vector<std::unique_ptr<Task>> all_tasks() {
  std::vector<std::unique_ptr<Task>> all;
  for (const Entry& entry : task_list())
    for (const std::string& spec : {entry.name, entry.name + ":published"}) {
      all.push_back(make_task(spec));
      for (Task::Test& test : all.back()->tests()) all.push_back(std::move(test.task));
    }
  return all;
}

// The FNV-1a hash of the first sequences of a task: inputs, positions and answers.
[[nodiscard]] std::uint64_t hash_of(const Task& task) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  const auto take = [&](Index n) { hash = (hash ^ std::uint64_t(n)) * 0x100000001B3u; };
  for (std::uint64_t i = 0; i < 8; ++i) {
    const Sequence sequence = task.sequence({1, Split::training, i});
    for (const Index token : sequence.inputs) take(token);
    for (const Answer& answer : sequence.answers) {
      take(answer.position);
      take(answer.token);
    }
  }
  return hash;
}

}  // namespace

TEST_CASE("Answers stand in order inside of their sequence, and their source holds them") {
  for (const auto& task : all_tasks()) {
    INFO(task->spec());
    for (std::uint64_t i = 0; i < 20; ++i)
      for (const Split split : {Split::training, Split::validation, Split::test}) {
        const Sequence sequence = task->sequence({3, split, i});
        const Index size = Index(sequence.inputs.size());
        REQUIRE(size >= 1);
        REQUIRE(size <= task->len());
        REQUIRE_FALSE(sequence.answers.empty());
        for (const Index token : sequence.inputs)
          REQUIRE((token >= 0 && token < task->vocabulary()));
        Index before = -1;
        for (const Answer& answer : sequence.answers) {
          REQUIRE((answer.position > before && answer.position < size));
          before = answer.position;
          REQUIRE((answer.token >= 0 && answer.token < task->vocabulary()));
          REQUIRE(answer.difficulty >= 0);
          REQUIRE(answer.source_len >= 0);
          if (answer.source_len == 0) continue;
          // An answer depends only on tokens read up to its position.
          REQUIRE((answer.source >= 0 && answer.source + answer.source_len <= answer.position + 1));
        }
      }
  }
}

TEST_CASE(
    "A batch has sequences as rows, targets where answers are due, and the same bits anywhere") {
  for (const auto& task : all_tasks()) {
    INFO(task->spec());
    const Place place{5, Split::validation, 10};
    const Batch batch = task->batch(place, 6);
    REQUIRE(batch.rows == 6);
    REQUIRE(batch.inputs.size() == std::size_t(6 * batch.len));
    Index longest = 0;
    for (Index row = 0; row < 6; ++row) {
      const Sequence one = task->sequence({5, Split::validation, std::uint64_t(10 + row)});
      const Index size = Index(one.inputs.size());
      longest = std::max(longest, size);
      std::vector<Index> inputs = one.inputs, targets(std::size_t(size), kNoAnswer);
      inputs.resize(std::size_t(batch.len), task->padding());
      for (const Answer& answer : one.answers) targets[std::size_t(answer.position)] = answer.token;
      targets.resize(std::size_t(batch.len), task->padding_target());
      const auto same = [&](const std::vector<Index>& all, const std::vector<Index>& wanted) {
        return std::equal(wanted.begin(), wanted.end(), all.begin() + row * batch.len);
      };
      CHECK(same(batch.inputs, inputs));
      CHECK(same(batch.targets, targets));
      const auto counted =
          Index(targets.size()) - std::count(targets.begin(), targets.end(), kNoAnswer);
      CHECK(Index(batch.answers[std::size_t(row)].size()) == counted);
      for (const Answer& answer : batch.answers[std::size_t(row)])
        CHECK(targets[std::size_t(answer.position)] == answer.token);
    }
    CHECK(batch.len == longest);
    // A row does not depend on the rows beside it.
    const Batch two = task->batch({5, Split::validation, 12}, 1);
    CHECK(std::equal(two.inputs.begin(), two.inputs.end(), batch.inputs.begin() + 2 * batch.len));
    CHECK(two.answers[0].front() == batch.answers[2].front());
  }
  const auto task = make_task("mqar");
  CHECK(message_of([&] { (void)task->batch({}, 0); }) ==
        "Task::batch: rows is 0, it must be at least 1");
}

TEST_CASE("Seeds, splits and numbers have sequences of their own") {
  for (const Entry& entry : task_list()) {
    INFO(entry.name);
    const auto task = make_task(entry.name);
    const auto some = [&](std::uint64_t seed, Split split, std::uint64_t first) {
      std::vector<std::vector<Index>> inputs;
      for (std::uint64_t i = first; i < first + 16; ++i)
        inputs.push_back(task->sequence({seed, split, i}).inputs);
      return inputs;
    };
    const auto first = some(1, Split::training, 0);
    CHECK(first == some(1, Split::training, 0));
    CHECK(first != some(2, Split::training, 0));
    CHECK(first != some(1, Split::training, 16));
    CHECK(first != some(1, Split::validation, 0));
    CHECK(first != some(1, Split::test, 0));
    CHECK(some(1, Split::validation, 0) != some(1, Split::test, 0));
  }
}

TEST_CASE("No sequence of validation or tests is one of training where there are many") {
  for (const std::string name :
       {"mqar", "mqar-forgetting", "noisy-recall", "fuzzy-recall", "selective-copy", "compress",
        "induction", "flip-flop", "needles"}) {
    INFO(name);
    const auto task = make_task(name);
    std::set<std::vector<Index>> trained;
    for (std::uint64_t i = 0; i < 2000; ++i)
      trained.insert(task->sequence({1, Split::training, i}).inputs);
    CHECK(trained.size() == 2000);
    for (const Split split : {Split::validation, Split::test})
      for (std::uint64_t i = 0; i < 500; ++i)
        CHECK(trained.count(task->sequence({1, split, i}).inputs) == 0);
  }
}

TEST_CASE("Tests have the tokens of their task") {
  std::set<std::string> tested;
  for (const Entry& entry : task_list())
    for (const std::string& spec : {entry.name, entry.name + ":published"}) {
      const auto task = make_task(spec);
      for (const Task::Test& test : task->tests()) {
        INFO(entry.name << " " << test.name);
        CHECK(test.task->vocabulary() == task->vocabulary());
        CHECK(test.task->spec() != task->spec());
        CHECK(test.task->spec().rfind(entry.name + ":", 0) == 0);
        tested.insert(entry.name + " " + test.name);
      }
    }
  CHECK(tested == std::set<std::string>{"flip-flop sparse", "flip-flop dense", "dyck longer",
                                        "dyck deeper", "parity 2x", "parity 4x", "parity 8x",
                                        "modular-sum 2x", "modular-sum 4x", "modular-sum 8x"});
  // A test that would leave a range is left out: 2 x 16384 brackets are too many.
  const auto longest = make_task("dyck:len=16384");
  REQUIRE(longest->tests().size() == 1);
  CHECK(longest->tests()[0].name == "deeper");
}

TEST_CASE("A spec makes its task again, and the same sequences") {
  for (const auto& task : all_tasks()) {
    INFO(task->spec());
    const auto again = make_task(task->spec());
    CHECK(again->spec() == task->spec());
    CHECK(again->sequence({1, Split::test, 7}) == task->sequence({1, Split::test, 7}));
  }
  CHECK(make_task("mqar")->spec() == "mqar:len=64,pairs=4,vocabulary=64,power=0.01");
  CHECK(make_task("mqar:published")->spec() == "mqar:len=512,pairs=64,vocabulary=8192,power=0.01");
  CHECK(make_task("mqar:published,len=256,pairs=16")->spec() ==
        "mqar:len=256,pairs=16,vocabulary=8192,power=0.01");
  CHECK(make_task("flip-flop:p_ignore=0.5")->spec() == "flip-flop:len=128,p_ignore=0.5");
  CHECK(task_name("mqar:len=128") == "mqar");
  CHECK(task_name("parens") == "parens");
}

TEST_CASE("Sequences are these on every machine") {
  const std::vector<std::pair<std::string, std::uint64_t>> known = {
      {"mqar", 0x6345B64F4C445AEE},
      {"mqar-forgetting:pairs=6,updates=3", 0x201E4DA1E92778F4},
      {"noisy-recall", 0x6996048C5511E4F0},
      {"fuzzy-recall", 0xCA47CF876ACD72E5},
      {"selective-copy", 0x46A3B7AA4A0D8463},
      {"compress:len=16", 0xFD3B1B40DC792EC3},
      {"memorise", 0x5BB5809EF971822F},
      {"induction", 0xBFC93226E524C0E5},
      {"flip-flop", 0xECB1D66CA21FC2EB},
      {"needles:len=128,needles=6,numbers=32,words=32", 0xF33C5D58FDFAF212},
      {"dyck", 0x10DD807B54810D02},
      {"parity", 0x19D5BD4F7CF945F4},
      {"modular-sum", 0x7843BDF6B850B9C9},
      {"listops", 0x368FAD64EBB4F78B},
      {"modular-addition", 0xE85C6DA77552DFC9},
      {"parens", 0x5F281DF7093ABECE}};
  REQUIRE(known.size() == task_list().size());
  for (const auto& [name, hash] : known) {
    INFO(name);
    CHECK(hash_of(*make_task(name)) == hash);
  }
}

TEST_CASE("What a spec cannot ask for is told in one sentence") {
  const auto says = [](const std::string& spec, const std::string& sentence) {
    CHECK(message_of([&] { (void)make_task(spec); }) == "--task " + sentence);
  };
  says("mqr",
       "is mqr, it must be one of mqar, mqar-forgetting, noisy-recall, fuzzy-recall, "
       "selective-copy, compress, memorise, induction, flip-flop, needles, dyck, parity, "
       "modular-sum, listops, modular-addition, parens; --task help says what they are; did you "
       "mean mqar?");
  const std::pair<const char*, const char*> slips[] = {{"mqra", "mqar"},
                                                       {"Parity", "parity"},
                                                       {"flipflop", "flip-flop"},
                                                       {"modularsum", "modular-sum"}};
  for (const auto& slip : slips)
    CHECK(message_of([&] {
            (void)make_task(slip.first);
          }).ends_with("; did you mean " + std::string(slip.second) + "?"));
  for (const std::string& typed :
       std::vector<std::string>{"", "ab", "recollection", std::string(81, 'p')})
    CHECK(message_of([&] { (void)make_task(typed); }).ends_with("--task help says what they are"));
  says("mqar:lenn=4",
       "mqar: lenn is not one of its numbers, len, pairs, vocabulary, power; did you mean len?");
  says("mqar:", "mqar: nothing is not one of its numbers, len, pairs, vocabulary, power");
  says("mqar:len", "mqar: len needs a value, such as len=512");
  says("mqar:len=", "mqar: len is empty, it must be a whole number from 4 to 65536");
  says("mqar:len=64x", "mqar: len is 64x, it must be a whole number from 4 to 65536");
  says("mqar:len=64.5", "mqar: len is 64.5, it must be a whole number from 4 to 65536");
  says("mqar:len=2", "mqar: len is 2, it must be a whole number from 4 to 65536");
  says("mqar:power=nan", "mqar: power is nan, it must be a number from 0 to 2");
  says("mqar:len=64,published",
       "mqar:len=64,published: published must stand in front of all numbers");
  says("mqar:len=63", "mqar: len is 63, it must be even");
  says("mqar:len=64,pairs=17", "mqar: len is 64, but 17 pairs and 17 queries need 68");
  says("mqar:vocabulary=8", "mqar: vocabulary is 8, half of it has 3 keys, but pairs is 4");
  says("mqar-forgetting:updates=5", "mqar-forgetting: updates is 5, it must be at most pairs, 4");
  says("mqar-forgetting:len=18", "mqar-forgetting: len is 18, but 6 pairs and 4 queries need 20");
  says("noisy-recall:len=65", "noisy-recall: len is 65, it must be even");
  says(
      "noisy-recall:noise_vocabulary=31",
      "noisy-recall: noise_vocabulary is 31 of a vocabulary of 32, at least 2 tokens must be left, "
      "a key and a value");
  says("fuzzy-recall:key_tokens=8",
       "fuzzy-recall: vocabulary is 16, which has 7 tokens for keys, but key_tokens is 8");
  says("fuzzy-recall:value_tokens=9",
       "fuzzy-recall: vocabulary is 16, which has 8 tokens for values, but value_tokens is 9");
  says("fuzzy-recall:len=11", "fuzzy-recall: len is 11, three pairs of 4 tokens need 12");
  says("selective-copy:copies=32",
       "selective-copy: len is 64, it must be more than 65 for 32 copies");
  says("memorise:len=7", "memorise: len is 7, it must be even");
  says("flip-flop:len=7", "flip-flop: len is 7, it must be even");
  says("needles:needles=6,asked=7", "needles: asked is 7, it must be at most needles, 6");
  says("needles:needles=6,cities=5", "needles: cities is 5, it must be at least needles, 6");
  says("needles:needles=6,len=27",
       "needles: len is 27, 6 needles of which 2 are asked for need 28");
  says("dyck:least=64", "dyck: least is 64, it must be less than len, 64");
  says("parity:least=21", "parity: least is 21, it must be at most len, 20");
  says(
      "listops:lists=0.6,arguments=5",
      "listops: lists is 0.6 and arguments is 5, which make 2.1 lists for each list; it must be at "
      "most 1.5");
  says("modular-addition:share=1",
       "modular-addition: share is 1 of 961 pairs, which leaves 961 to train on and 0 held out; it "
       "must be at least 1 and 2");
}

TEST_CASE("The help text has every task with its numbers, ranges and both settings") {
  const std::string help = help_text();
  for (const Entry& entry : task_list()) {
    INFO(entry.name);
    CHECK(help.find("\n" + entry.name + "\n    " + entry.what + ". Source: " + entry.source) !=
          std::string::npos);
    CHECK_FALSE(entry.numbers.empty());
    CHECK(help.find(help_text(entry.name)) != std::string::npos);
    for (const Entry::Number& number : entry.numbers) {
      INFO(number.name);
      CHECK(number.least <= number.published);
      CHECK(number.published <= number.most);
      CHECK(number.least <= number.shrunken);
      CHECK(number.shrunken <= number.most);
      CHECK(help_text(entry.name).find("    " + number.name + " ") != std::string::npos);
    }
  }
  CHECK(help_text("flip-flop") ==
        "flip-flop\n"
        "    Reads the bit that was written last and ignores the others. Source: Liu et al. 2023.\n"
        "    Difficulty: instructions since the last write.\n"
        "    len               128 (published 512; from 4 to 65536): tokens of a sequence with the "
        "last answer\n"
        "    p_ignore          0.8 (published 0.8; from 0 to 1): probability of an instruction to "
        "ignore\n");
}
