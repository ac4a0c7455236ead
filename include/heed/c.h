// SPDX-License-Identifier: Apache-2.0

// heed from C: forward and backward of every variant, over DLPack tensors, in the library libheed. CMake projects of C or
// C++ link heed::c (shared) or heed::c_static after find_package(heed COMPONENTS c), others use `pkg-config libheed`.
//
//   struct heed_parameter strength = {.name = "strength", .number = 0.3};
//   struct heed_mask causal = {.size = sizeof causal, .causal = 1};
//   struct heed_call call = {.size = sizeof call, .variant = "dar", .query = &q, .key = &k, .value = &v,
//                            .parameters = &strength, .parameter_count = 1, .mask = &causal};
//   struct heed_outputs outputs = {.size = sizeof outputs, .out = &out};
//   struct heed_saved* saved = NULL;
//   if (heed_forward(&call, &outputs, &saved) != heed_ok) puts(heed_last_error());
//   struct heed_outputs from = {.size = sizeof from, .out = &grad_out};
//   struct heed_gradients to = {.size = sizeof to, .query = &grad_q, .key = &grad_k, .value = &grad_v};
//   if (heed_backward(&call, saved, &out, &from, &to) != heed_ok) puts(heed_last_error());
//   heed_saved_free(saved);
//
// Structs   begin with their size, which the caller sets; a field that is 0 or NULL has its default. Structs grow at their
//           ends: a program keeps working with later libraries, and an earlier library refuses fields that it does not
//           know. A size ends with a field; it may be up to 4096 more than the library's if all bytes there are 0. Structs
//           without a size (parameters, windows, key ranges) never change.
// Lists     a pointer and a count. A list is refused unread if no call of these sizes can have its count, or, for windows,
//           key ranges, parameters and the array of heed_describe(), if the count is above 4096.
// Tensors   of the CPU, (batch, heads, len, dim), or (len, dim) for one batch and one head. The stride along dim is 1, the
//           others are free and not negative: (batch, len, heads, dim) memory comes in as a transposed tensor, without a
//           copy. NULL is a tensor that is not given.
// Numbers   query decides: a query of float64 computes with double, one of float32, float16 or bfloat16 with float. Each
//           tensor of a call of floats may be float32, float16 or bfloat16 by itself; results are rounded once.
// Errors    a function that can fail returns an enum heed_status. After any other than heed_ok, heed_last_error() says in
//           one sentence, which begins with the function, what was wrong, and the call's outputs mean nothing. Inputs are
//           never changed: outputs must not overlap them or each other.
// Threads   any number of threads may call at a time. A call computes with several threads of its own; its results do
//           not depend on their number, not in the last bit. A process that was forked after a call with several threads
//           computes with one.
#ifndef HEED_C_H
#define HEED_C_H

#ifdef __has_include
#if !__has_include(<dlpack/dlpack.h>)
#error "heed/c.h needs the header dlpack/dlpack.h (Debian: libdlpack-dev)"
#endif
#endif
#include <dlpack/dlpack.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

enum heed_status {
  heed_ok = 0,
  heed_invalid = 1,    // an argument does not fit
  heed_no_memory = 2,  // memory ran out
  heed_failed = 3      // something else, such as a processor that is too old
};

// A parameter or option of an op by name: a number, a tensor or a word.
//
//   learnt numbers    `number`, the same for all heads, or `tensor`, of one number or one per head
//   learnt tensors    `tensor` of the shape that heed_describe() gives; a tensor without elements
//                     means none, if the op works without it
//   options           `number`; flags are 0 or 1
//   choices           `text`, such as "tanh" for the gate of dar, or its `number` from 0
//
// The tensor counts if it is not NULL, else the text if it is not NULL, else the number. Tensors
// may have any strides; they are copied.
struct heed_parameter {
  const char* name;
  const DLTensor* tensor;
  const char* text;
  double number;
};

// The place of query 0 on the axis of keys when lengths differ: at key 0, or so that the last query stands at the last key.
enum heed_align { heed_top_left = 0, heed_bottom_right = 1 };

// The query at position p sees keys in [p - left, p + right]; -1 leaves a side open. p is the query's index, moved by
// `align` and `offset`.
struct heed_window {
  int64_t left, right;
  int64_t offset;
  int align;  // enum heed_align
};

// All queries see keys [begin, end) only.
struct heed_key_range {
  int64_t begin, end;
};

// Returns whether the query at position `query` sees the key: positive for yes, 0 for no. A negative result ends the call,
// which fails. The function is called on any thread, in any order, more than once.
typedef int (*heed_visible)(void* context, int64_t batch, int64_t head, int64_t query, int64_t key);

// A mask, and terms that are added to scores. All given parts apply: a pair is visible if each of them shows it.
struct heed_mask {
  size_t size;
  // Not 0: a query sees keys up to its own position, moved by `causal_align` (enum heed_align) and `causal_offset`.
  int causal, causal_align;
  int64_t causal_offset;
  const struct heed_window* windows;
  size_t window_count;
  const struct heed_key_range* key_ranges;
  size_t key_range_count;
  // Number of visible keys, one per batch.
  const int64_t* key_lengths;
  size_t key_length_count;
  // bool or uint8, 1 where visible; (batch or 1, heads or 1, len_q or 1, len_kv).
  const DLTensor* allowed;
  // Added to scores; -infinity hides. It has the same shape, is float64 if the call computes with
  // double, else float32, and has a gradient.
  const DLTensor* bias;
  // Ids, (batch, len_q) and (batch, len_kv): a query sees keys of its own document. Both are given, or none.
  const int64_t* query_documents;
  size_t query_document_count;
  const int64_t* key_documents;
  size_t key_document_count;
  // ALiBi: -alibi[head] |p - key| is added to scores; one per head. p is the query's index, moved by `alibi_align` and
  // `alibi_offset`.
  const double* alibi;
  size_t alibi_count;
  int alibi_align;  // enum heed_align
  // scale q.k becomes soft_cap tanh(scale q.k / soft_cap); 0 for none.
  double soft_cap;
  // A function of positions, and its first argument. Positions of queries are moved by
  // `visible_align` and `visible_offset`.
  heed_visible visible;
  void* visible_context;
  int visible_align;  // enum heed_align
  // These are added to positions of queries, beside `alibi_align` and `visible_align`. An align or
  // offset without its part is refused.
  int64_t alibi_offset, visible_offset;
  // Lists of the blocks of keys that each block of queries sees: row n sees the blocks list_indices[list_start[n]], ...,
  // list_indices[list_start[n + 1] - 1], which ascend. Rows are those of (list_batch, list_heads, query blocks); of both
  // numbers each is the call's, or 1 for all. Sizes of blocks, batch and heads are 1 where they are 0.
  const int64_t* list_start;
  size_t list_start_count;
  const int64_t* list_indices;
  size_t list_index_count;
  int64_t list_query_block, list_key_block, list_batch, list_heads;
};

enum heed_precision {
  heed_storage = 0,  // products of the numbers as they are
  heed_mixed = 1     // products of bfloat16, sums of float; for calls of floats
};

// Keys and values of a growing sequence, or of some that grow together, for decoding (heed_cache_new()).
struct heed_cache;

// Sequences of lengths of their own, without padding. Tensors are (1, heads, total, dim); sequence n has the queries
// [queries[n], queries[n + 1]) and the keys [keys[n], keys[n + 1]) of them. Nothing is computed across sequences: each has the
// bits of a call of its own, and the gradient of a parameter is the sum over all.
//
//   positions   count from the beginning of each sequence, in scores and in masks
//   masks       causal, windows, key ranges, slopes and functions hold in each sequence, which is batch n to a function;
//               key_lengths has a number per sequence; documents an id per token, packed as they
//               are; `allowed` and bias have the shape of a padded batch (sequences or 1, heads or
//               1, longest len_q or 1, longest len_kv), and a sequence reads its own corner
//   dropout     sequence n drops the pairs of batch n
struct heed_packed {
  size_t size;
  const int64_t* queries;  // 0, ..., total: one per sequence, and the end of the last one
  size_t query_count;
  const int64_t* keys;  // likewise; NULL: those of queries
  size_t key_count;
  const int64_t* first_query;  // one per sequence, in place of the call's; NULL: the call's for all
  size_t first_query_count;
  // One cache per sequence, each of batch 1 and given once, in place of key and value; NULL: none.
  // Only heed_forward() takes them.
  struct heed_cache* const* caches;
  size_t cache_count;
};

struct heed_call {
  size_t size;
  const char* variant;  // a name of heed_variant_name()
  // query (batch, query_heads, len_q, dim_qk), key (batch, kv_heads, len_kv, dim_qk), value (batch, kv_heads, len_kv,
  // dim_v). kv_heads divides heads, which are query_heads, or half of them for differential-v2.
  const DLTensor *query, *key, *value;
  // The extra input of variants that read one: the intent (batch, heads, len_q, dim_v or 1), or the
  // logits of lambda of differential-v2 (batch, heads, len_q, 1).
  const DLTensor* extra;
  const struct heed_parameter* parameters;
  size_t parameter_count;
  const struct heed_mask* mask;  // NULL: every query sees every key
  const double* scale;           // factor on q.k; NULL: 1 / sqrt(width of one score map)
  int threads;                   // 0: as heed_set_threads() says
  int precision;                 // enum heed_precision; backward needs the same as forward
  // The probability, in [0, 1), with which a weight becomes 0; the seed decides which weights do.
  // backward needs both as in forward.
  double dropout;
  uint64_t dropout_seed;
  // Position of query 0 among the keys, for ops that read positions. It does not move masks.
  int64_t first_query;
  // Numbers per token, (batch, heads, len, n), for ops that read some.
  const DLTensor *query_inputs, *key_inputs;
  // Not 0: the queries are the last tokens of the keys, as in decoding. A mask that would place
  // fewer queries than keys at the first keys, by heed_top_left without an offset, is then refused.
  int queries_at_end;
  const struct heed_packed* packed;  // NULL: a batch of sequences of one length
  // In place of key and value: the queries are the last tokens of the cache, whose keys and values were appended before.
  // Only heed_forward() takes one. It keeps the score's features of each key there for later calls.
  struct heed_cache* cache;
};

// The results of forward: out (batch, heads, len_q, dim_v); if given, lse (batch, heads, len_q, maps), the log sum exp of
// the scores of each map (two for differential variants), and steps (batch, heads, len_q, columns), for ops whose rows take
// steps: the time that each row takes, or its state after each step. In backward the same struct holds the gradients of a
// loss for these results.
struct heed_outputs {
  size_t size;
  const DLTensor *out, *lse, *steps;
};

// The gradients that backward writes, each in the shape of its tensor; a gradient that is NULL is not computed. parameters:
// names and tensors of learnt parameters, of floats with any strides, in the shape that the call gave the parameter ((1) or
// () for a number), or that it has by default.
struct heed_gradients {
  size_t size;
  const DLTensor *query, *key, *value, *extra, *bias;
  const struct heed_parameter* parameters;
  size_t parameter_count;
  const DLTensor *query_inputs, *key_inputs;
};

// A direction in which inputs and learnt parameters of a call move, each tensor in the shape of the
// input that it moves; an input whose tangent is NULL does not move.
struct heed_tangents {
  size_t size;
  const DLTensor *query, *key, *value, *extra, *bias;
  const struct heed_parameter* parameters;
  size_t parameter_count;
  const DLTensor *query_inputs, *key_inputs;
};

// Results of forward that backward needs.
struct heed_saved;

// out = attention of the call. `saved`, unless it is NULL, receives what heed_backward() needs, to be freed by
// heed_saved_free(); NULL where the call fails.
int heed_forward(const struct heed_call* call, const struct heed_outputs* outputs,
                 struct heed_saved** saved);

// Gradients of sum(out o grad_out), plus sum(lse o grad_lse) and sum(steps o grad_steps) where they are given. `call` is
// that of heed_forward(), `out` its result. `grad_outputs` holds the gradients, always that of out. The tensors in
// `gradients` are overwritten. `saved` may be used again.
int heed_backward(const struct heed_call* call, const struct heed_saved* saved, const DLTensor* out,
                  const struct heed_outputs* grad_outputs, const struct heed_gradients* gradients);

// Forward mode, for every variant: the change of the results of heed_forward() when inputs and parameters move along
// `tangents`. `call`, `saved` and `out` as for heed_backward(); `to` gets the tangents of the results, always that of out.
int heed_jvp(const struct heed_call* call, const struct heed_saved* saved, const DLTensor* out,
             const struct heed_tangents* tangents, const struct heed_outputs* to);

// Products with the Hessian: the change of the gradients of heed_backward() for this `grad_out` when inputs and parameters
// move along `tangents`, and grad_out along `grad_out_tangent` (NULL: it does not move). Variants with one softmax and no
// further readout have them, such as sdpa and dar; for others the call fails.
int heed_hvp(const struct heed_call* call, const struct heed_saved* saved, const DLTensor* out,
             const DLTensor* grad_out, const struct heed_tangents* tangents,
             const DLTensor* grad_out_tangent, const struct heed_gradients* to);

void heed_saved_free(struct heed_saved* saved);  // NULL is fine

// Writes a number that a variant reports per row, such as "residual" or "steps_used": the report
// `name` goes to `to`, (batch, heads, len_q, 1).
int heed_report(const struct heed_saved* saved, const char* name, const DLTensor* to);
// Name of report number `index`; NULL behind the last one. Valid as long as `saved`.
const char* heed_report_name(const struct heed_saved* saved, size_t index);

// A cache takes memory page by page as it grows, and never copies its contents. Calls with a cache compute with the
// instruction set that was in use when it was made. One call or change at a time may use a cache, and all calls must be of
// one variant, with the same parameters and numbers of heads, until heed_cache_forget(). heed/kv_cache.hpp says how exact
// an int8 cache is. Only C++ has pools of pages (heed/kv_pool.hpp) and partial states (heed/engine/partial.hpp).
struct heed_cache_sizes {
  size_t size;
  int64_t batch, kv_heads, dim_qk, dim_v;
  // The type in which numbers are stored, rounded: float64 for calls of doubles; float32, float16,
  // bfloat16 or int8 (with a scale per row) for calls of floats. All 0: float32.
  DLDataType dtype;
  int64_t page_rows;  // a multiple of 64; 0: 256
};
int heed_cache_new(const struct heed_cache_sizes* sizes, struct heed_cache** cache);
// Adds tokens: key (batch, kv_heads, n, dim_qk), value (batch, kv_heads, n, dim_v). The cache is unchanged if this fails.
int heed_cache_append(struct heed_cache* cache, const DLTensor* key, const DLTensor* value);
// Number of tokens held, and of tokens that fit without new memory.
int64_t heed_cache_length(const struct heed_cache* cache);
int64_t heed_cache_capacity(const struct heed_cache* cache);
int heed_cache_reserve(struct heed_cache* cache, int64_t length);
// Forgets the tokens from `length` on; their memory is kept.
int heed_cache_truncate(struct heed_cache* cache, int64_t length);
// Forgets the features that calls have kept there, so that the next call may be of another variant.
void heed_cache_forget(struct heed_cache* cache);
void heed_cache_free(struct heed_cache* cache);  // NULL is fine

// The shapes that outputs of a call and its extra input must have. Four zeros for steps mean that
// the variant gives none with these options; four zeros for extra that it reads no extra input.
struct heed_shapes {
  size_t size;
  int64_t out[4], lse[4], steps[4], extra[4];
};
// Only shapes and types of query and value are read. The call fails with the sentences of heed_forward().
int heed_shapes_of(const struct heed_call* call, struct heed_shapes* shapes);

// Checks a call: fails as heed_forward() would, without regard to its outputs. All tensors need
// addresses, but inputs, the bias and a mask of bool are not read beyond shapes and types.
int heed_check(const struct heed_call* call);

// Names of variants, from 0; NULL behind the last one. Valid for ever.
const char* heed_variant_name(size_t index);

enum heed_parameter_kind {
  heed_per_head = 0,  // learnt: one number, or one per head
  heed_tensor = 1,    // learnt
  heed_fixed = 2,     // a tensor that is not learnt
  heed_option = 3,    // a number
  heed_choice = 4,    // one of some words
  heed_list = 5       // a tensor of whole numbers
};

struct heed_parameter_info {
  size_t size;
  const char* name;  // valid for ever
  int kind;          // enum heed_parameter_kind
  int required;      // not 0: a call must give it
  // For tensors: shape[0, ndim) as the call has it, or as heed_initial() writes it; ndim 0 if there is none.
  int ndim;
  int64_t shape[8];
  double number;        // number in use, for options, choices and tensors of one number
  const char* text;     // word in use, for choices; valid for ever
  const char* choices;  // all words, joined by ", ", for choices; valid for ever
};

// The values that parameters begin with.
struct heed_start {
  size_t size;
  uint64_t seed;  // seed of tensors that begin with random numbers
  // Number of the layer, from 1; lambda of differential-v1 depends on it. 0 means 1.
  int64_t depth;
  int64_t prototypes;  // per head; 0 stands for 16
};

// Describes the parameters of the call's variant: infos[0] to infos[*count - 1]. *count is the
// number of structs that `infos` has room for; it becomes the number of parameters. If there are
// more of them than room, the first ones are written. The caller has set the size of each struct,
// the same for all. Only shapes and types of query and value are read. `start` may be NULL.
int heed_describe(const struct heed_call* call, const struct heed_start* start,
                  struct heed_parameter_info* infos, size_t* count);

// Writes the values that tensors and learnt numbers begin with to to[0 .. count), tensors of float32 or float64: zeros,
// ones or normal numbers of the deviation 1 / sqrt(columns), as heed's own programs begin.
int heed_initial(const struct heed_call* call, const struct heed_start* start,
                 const struct heed_parameter* to, size_t count);

// The sentence of this thread's last call that failed; empty before any. Valid until the next one fails.
const char* heed_last_error(void);

// "0.1.0"
const char* heed_version(void);

// Number of threads of a call with threads = 0.
int heed_threads(void);
// Sets this number for all calls that begin later; 0: the default, OMP_NUM_THREADS or all
// processors, in a container no more than its CPU quota.
int heed_set_threads(int threads);

// The instruction set in use: "x86-64-v4" (AVX-512), "x86-64-v3" (AVX2) or "x86-64-v2", or on 64-bit Arm
// "armv8.2-a+bf16" or "armv8-a", the highest that this processor has; "native" in a library for other processors.
const char* heed_instructions(void);
// Chooses another instruction set that this processor has, for calls that begin later; NULL for the
// highest. heed_backward() uses that of its heed_forward(). The last bits of results depend on it.
int heed_use_instructions(const char* name);
// Names of the library's instruction sets, from the lowest on; NULL behind the last one.
const char* heed_instructions_name(size_t index);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
