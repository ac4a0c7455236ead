// SPDX-License-Identifier: Apache-2.0
#pragma once

// All tasks by name. A spec selects a task by its name and the parameters that differ from the shrunken setting:
//
//   mqar        mqar:len=128,pairs=8        mqar:published        mqar:published,len=256

#include "task.hpp"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace tasks {

// An entry of the list, for people and programs.
struct Entry {
  struct Number {
    std::string name, meaning;
    bool whole = true;
    double least = 0, most = 0, published = 0, shrunken = 0;
  };
  std::string name, what, source;
  std::string difficulty;  // meaning of Answer::difficulty; empty if it is 0 everywhere
  std::vector<Number> numbers;
  // Makes the task with these numbers; other numbers are those of the shrunken setting. The names must be in the list.
  std::function<std::unique_ptr<Task>(const std::map<std::string, double>&)> make;
};

[[nodiscard]] const std::vector<Entry>& task_list();

// Throws std::invalid_argument in the words of --task.
[[nodiscard]] const Entry& task_entry(const std::string& name);
[[nodiscard]] std::unique_ptr<Task> make_task(const std::string& spec);

// The name in a spec.
[[nodiscard]] std::string task_name(const std::string& spec);

// All tasks, or the named one, with their numbers, ranges and both settings.
[[nodiscard]] std::string help_text(const std::string& name = "");

}  // namespace tasks
