// SPDX-License-Identifier: Apache-2.0
#pragma once

// The functions of one instruction set, which the functions of c.h call. One library holds several
// of these tables (c/dispatch.hpp chooses), so that nothing here stands in heed's own namespace,
// which has another name for each instruction set: these types are the same for all of them.

#include <heed/c.h>

#include <string>

// Each function that returns an int returns an enum heed_status and throws nothing; if it fails, it
// sets `error` to a sentence. `threads` is the number of threads for calls with threads = 0.
struct heed_table {
  int (*forward)(const heed_call* call, const heed_outputs* outputs, heed_saved** saved,
                 int threads, std::string& error);
  int (*backward)(const heed_call* call, const heed_saved* saved, const DLTensor* out,
                  const heed_outputs* grad_outputs, const heed_gradients* gradients, int threads,
                  std::string& error);
  int (*jvp)(const heed_call* call, const heed_saved* saved, const DLTensor* out,
             const heed_tangents* tangents, const heed_outputs* to, int threads,
             std::string& error);
  int (*hvp)(const heed_call* call, const heed_saved* saved, const DLTensor* out,
             const DLTensor* grad_out, const heed_tangents* tangents,
             const DLTensor* grad_out_tangent, const heed_gradients* to, int threads,
             std::string& error);
  void (*free)(heed_saved* saved);
  int (*report)(const heed_saved* saved, const char* name, const DLTensor* to, std::string& error);
  const char* (*report_name)(const heed_saved* saved, size_t index);
  int (*shapes)(const heed_call* call, heed_shapes* shapes, std::string& error);
  int (*check)(const heed_call* call, std::string& error);
  int (*describe)(const heed_call* call, const heed_start* start, heed_parameter_info* infos,
                  size_t* count, std::string& error);
  int (*initial)(const heed_call* call, const heed_start* start, const heed_parameter* to,
                 size_t count, std::string& error);
  const char* (*variant_name)(size_t index);
  int (*threads)();  // number of OpenMP's threads
  int (*cache_new)(const heed_cache_sizes* sizes, heed_cache** cache, std::string& error);
  void (*cache_free)(heed_cache* cache);
  int (*cache_append)(heed_cache* cache, const DLTensor* key, const DLTensor* value,
                      std::string& error);
  int (*cache_reserve)(heed_cache* cache, int64_t length, std::string& error);
  int (*cache_truncate)(heed_cache* cache, int64_t length, std::string& error);
  void (*cache_forget)(heed_cache* cache);
  int64_t (*cache_length)(const heed_cache* cache);
  int64_t (*cache_capacity)(const heed_cache* cache);
};

// The first fields of the numbers that heed_forward() saves: the table that saved them.
struct heed_saved {
  const heed_table* table;
};

// The first fields of a cache: its table, and its sizes.
struct heed_cache {
  const heed_table* table;
  int64_t batch, kv_heads, dim_qk, dim_v;
};
