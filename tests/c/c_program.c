// SPDX-License-Identifier: Apache-2.0

// A C program that calls heed: every variant on every instruction set that the processor has, forward and backward, against
// central differences, plain attention in plain loops and numbers by hand; and all wrong calls.

#include <heed/c.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int checks, wrong;

static void check(int right, const char* what, const char* of) {
  ++checks;
  if (right) return;
  ++wrong;
  printf("WRONG on %s: %s (%s)\n  last error: %s\n", heed_instructions(), what, of,
         heed_last_error());
}
static void check_text(const char* text, const char* wanted) {
  ++checks;
  if (strcmp(text, wanted) == 0) return;
  ++wrong;
  printf("WRONG on %s:\n  it said  %s\n  not      %s\n", heed_instructions(), text, wanted);
}
static int close_to(double a, double b, double tolerance) {
  return fabs(a - b) <= tolerance * (1 + fabs(b));
}

// Dense numbers in [-1, 1) with up to four axes.
struct tensor {
  double* numbers;
  int64_t shape[4];
  int64_t size;
  DLTensor dl;
};

static double draw(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (double)(state >> 11) * 0x1p-52 - 1;
}

static void make(struct tensor* t, int ndim, const int64_t* shape) {
  memset(t, 0, sizeof *t);
  t->size = 1;
  for (int axis = 0; axis < ndim; ++axis) t->size *= t->shape[axis] = shape[axis];
  t->numbers = malloc((size_t)(t->size > 0 ? t->size : 1) * sizeof(double));
  for (int64_t n = 0; n < t->size; ++n) t->numbers[n] = draw();
  t->dl.data = t->numbers;
  t->dl.device.device_type = kDLCPU;
  t->dl.ndim = ndim;
  t->dl.dtype.code = kDLFloat;
  t->dl.dtype.bits = 64;
  t->dl.dtype.lanes = 1;
  t->dl.shape = t->shape;
}
static void make4(struct tensor* t, int64_t batch, int64_t heads, int64_t len, int64_t dim) {
  const int64_t shape[4] = {batch, heads, len, dim};
  make(t, 4, shape);
}
static void drop(struct tensor* t) { free(t->numbers); }

static double dot(const struct tensor* a, const struct tensor* b) {
  double sum = 0;
  for (int64_t n = 0; n < a->size; ++n) sum += a->numbers[n] * b->numbers[n];
  return sum;
}

// One call of a variant, with a random linear loss of its outputs.
enum { kBatch = 2, kHeads = 2, kLen = 5, kDim = 4, kMostParameters = 24 };

struct problem {
  const char* variant;
  struct tensor query, key, value, extra, bias, out, lse, loss_out, loss_lse;
  int has_extra, has_lse;
  struct tensor values[kMostParameters], gradients[kMostParameters];
  struct heed_parameter parameters[kMostParameters], targets[kMostParameters];
  size_t learnt, count;
  struct heed_mask mask;
  struct heed_call call;
  struct heed_outputs outputs;
};

static double loss(struct problem* p) {
  check(heed_forward(&p->call, &p->outputs, NULL) == heed_ok, "forward", p->variant);
  return dot(&p->out, &p->loss_out) + (p->has_lse ? dot(&p->lse, &p->loss_lse) : 0);
}

static void open_problem(struct problem* p, const char* variant) {
  memset(p, 0, sizeof *p);
  p->variant = variant;
  make4(&p->query, kBatch, kHeads, kLen, kDim);
  make4(&p->key, kBatch, 1, kLen, kDim);
  make4(&p->value, kBatch, 1, kLen, kDim);
  make4(&p->bias, 1, kHeads, kLen, kLen);
  make4(&p->out, kBatch, kHeads, kLen, kDim);
  make4(&p->loss_out, kBatch, kHeads, kLen, kDim);
  p->mask.size = sizeof p->mask;
  p->mask.causal = 1;
  p->mask.bias = &p->bias.dl;
  p->call.size = sizeof p->call;
  p->call.variant = variant;
  p->call.query = &p->query.dl;
  p->call.key = &p->key.dl;
  p->call.value = &p->value.dl;
  p->call.mask = &p->mask;
  p->outputs.size = sizeof p->outputs;
  p->outputs.out = &p->out.dl;
  struct heed_shapes shapes = {.size = sizeof shapes};
  check(heed_shapes_of(&p->call, &shapes) == heed_ok, "shapes", variant);
  if (shapes.out[1] == kHeads / 2) {  // it reads query heads in twos
    drop(&p->query);
    make4(&p->query, kBatch, 2 * kHeads, kLen, kDim);
  }

  // The parameters of the variant with their initial values; learnt ones are given.
  struct heed_parameter_info infos[kMostParameters];
  size_t count = kMostParameters;
  for (size_t n = 0; n < count; ++n) infos[n].size = sizeof infos[n];
  const struct heed_start start = {.size = sizeof start, .seed = 7, .prototypes = 3};
  check(heed_describe(&p->call, &start, infos, &count) == heed_ok, "describe", variant);
  check(count < kMostParameters, "few parameters", variant);
  for (size_t n = 0; n < count; ++n) {
    const struct heed_parameter_info* info = &infos[n];
    if (strcmp(info->name, "halt_eps") == 0) {  // 0: rows do not halt, so that nothing jumps
      p->parameters[p->count].name = info->name;
      p->parameters[p->count++].number = 0;
    }
  }
  for (size_t n = 0; n < count; ++n) {
    const struct heed_parameter_info* info = &infos[n];
    if (info->kind != heed_per_head && info->kind != heed_tensor) continue;
    if (info->ndim == 0) continue;
    const size_t at = p->learnt++;
    make(&p->values[at], info->ndim, info->shape);
    make(&p->gradients[at], info->ndim, info->shape);
    p->targets[at].name = info->name;
    p->targets[at].tensor = &p->values[at].dl;
  }
  check(heed_initial(&p->call, &start, p->targets, p->learnt) == heed_ok, "initial", variant);
  for (size_t n = 0; n < p->learnt; ++n) {
    p->parameters[p->count].name = p->targets[n].name;
    p->parameters[p->count++].tensor = &p->values[n].dl;
    p->targets[n].tensor = &p->gradients[n].dl;
  }
  p->call.parameters = p->parameters;
  p->call.parameter_count = p->count;

  check(heed_shapes_of(&p->call, &shapes) == heed_ok, "shapes", variant);
  check(memcmp(shapes.out, p->out.shape, sizeof shapes.out) == 0, "out has its shape", variant);
  if (shapes.extra[3] > 0) {
    make(&p->extra, 4, shapes.extra);
    p->has_extra = 1;
    p->call.extra = &p->extra.dl;
  }
  make(&p->lse, 4, shapes.lse);
  make(&p->loss_lse, 4, shapes.lse);
  p->has_lse = 1;
  p->outputs.lse = &p->lse.dl;
}

static void close_problem(struct problem* p) {
  drop(&p->query), drop(&p->key), drop(&p->value), drop(&p->bias), drop(&p->out);
  drop(&p->lse), drop(&p->loss_out), drop(&p->loss_lse);
  if (p->has_extra) drop(&p->extra);
  for (size_t n = 0; n < p->learnt; ++n) drop(&p->values[n]), drop(&p->gradients[n]);
}

// Checks that `gradient` holds the slopes of the loss in the numbers of `of`.
static void check_slopes(struct problem* p, struct tensor* of, const struct tensor* gradient,
                         const char* name) {
  const double step = 1e-6;
  int right = 1;
  const int64_t stride = of->size / 7 + 1;
  for (int64_t n = 0; n < of->size; n += stride) {
    const double kept = of->numbers[n];
    of->numbers[n] = kept + step;
    const double above = loss(p);
    of->numbers[n] = kept - step;
    const double below = loss(p);
    of->numbers[n] = kept;
    const double slope = (above - below) / (2 * step);
    if (!close_to(gradient->numbers[n], slope, 1e-7)) {
      right = 0;
      printf("  %s[%d]: %.12g, central difference %.12g\n", name, (int)n, gradient->numbers[n],
             slope);
    }
  }
  check(right, name, p->variant);
}

static void check_gradients(const char* variant) {
  struct problem p;
  open_problem(&p, variant);
  struct tensor query, key, value, extra, bias;
  make4(&query, kBatch, p.query.shape[1], kLen, kDim);
  make4(&key, kBatch, 1, kLen, kDim);
  make4(&value, kBatch, 1, kLen, kDim);
  make4(&bias, 1, kHeads, kLen, kLen);
  make4(&extra, kBatch, kHeads, kLen, p.has_extra ? p.extra.shape[3] : 1);
  struct heed_saved* saved = NULL;
  check(heed_forward(&p.call, &p.outputs, &saved) == heed_ok, "forward that saves", variant);
  struct heed_outputs from = {.size = sizeof from, .out = &p.loss_out.dl};
  from.lse = &p.loss_lse.dl;
  struct heed_gradients to = {.size = sizeof to,
                              .query = &query.dl,
                              .key = &key.dl,
                              .value = &value.dl,
                              .extra = p.has_extra ? &extra.dl : NULL,
                              .bias = &bias.dl,
                              .parameters = p.targets,
                              .parameter_count = p.learnt};
  int status = heed_backward(&p.call, saved, &p.out.dl, &from, &to);
  if (status == heed_invalid && strstr(heed_last_error(), "has no derivative of lse") != NULL) {
    p.has_lse = 0;
    from.lse = NULL;
    status = heed_backward(&p.call, saved, &p.out.dl, &from, &to);
  }
  check(status == heed_ok, "backward", variant);
  heed_saved_free(saved);
  check_slopes(&p, &p.query, &query, "grad_query");
  check_slopes(&p, &p.key, &key, "grad_key");
  check_slopes(&p, &p.value, &value, "grad_value");
  check_slopes(&p, &p.bias, &bias, "grad_bias");
  if (p.has_extra) check_slopes(&p, &p.extra, &extra, "grad_extra");
  for (size_t n = 0; n < p.learnt; ++n)
    check_slopes(&p, &p.values[n], &p.gradients[n], p.targets[n].name);
  drop(&query), drop(&key), drop(&value), drop(&extra), drop(&bias);
  close_problem(&p);
}

// The first program of README.md: three tokens that read themselves.
static void check_first_program(void) {
  float x[] = {1, 0, 0, 1, 1, 1}, out[6], grad_out[] = {1, 0, 1, 0, 1, 0}, grad_query[6];
  float strength = 0, theirs[3][3];
  int64_t shape[] = {3, 2};
  DLTensor rows = {
      .data = x, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  DLTensor to = rows, from = rows, gradient = rows, one = rows;
  int64_t single[] = {1};
  to.data = out, from.data = grad_out, gradient.data = grad_query;
  one.data = &strength, one.ndim = 1, one.shape = single;
  struct heed_mask mask = {.size = sizeof mask, .causal = 1};
  struct heed_call call = {.size = sizeof call,
                           .variant = "dar",
                           .query = &rows,
                           .key = &rows,
                           .value = &rows,
                           .mask = &mask};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &to};
  struct heed_saved* saved = NULL;
  check(heed_forward(&call, &outputs, &saved) == heed_ok, "forward", "first program");
  check(fabs(out[4] - 0.7614) < 6e-5 && fabs(out[5] - 0.7614) < 6e-5, "out of token 3",
        "first program");
  struct heed_outputs grad_outputs = {.size = sizeof grad_outputs, .out = &from};
  struct heed_parameter target = {.name = "strength", .tensor = &one};
  struct heed_gradients gradients = {
      .size = sizeof gradients, .query = &gradient, .parameters = &target, .parameter_count = 1};
  check(heed_backward(&call, saved, &to, &grad_outputs, &gradients) == heed_ok, "backward",
        "first program");
  check(fabs(strength + 0.1556) < 6e-5, "dL/dstrength", "first program");
  // A parameter as a number, and as a strided tensor of one number per head.
  theirs[1][0] = 0.25F;
  one.data = &theirs[1][0];
  struct heed_parameter given = {.name = "strength", .tensor = &one};
  call.parameters = &given, call.parameter_count = 1;
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", "strength as a tensor");
  const float by_tensor = out[4];
  given.tensor = NULL, given.number = 0.25;
  check(heed_forward(&call, &outputs, NULL) == heed_ok && out[4] == by_tensor, "the same bits",
        "strength as a number");
  check(fabs(by_tensor - 0.7614) > 1e-4, "another number", "strength as a number");
  heed_saved_free(saved);
}

// Attention in plain loops.
struct who {
  int (*sees)(int64_t b, int64_t h, int64_t i, int64_t j);
  double (*adds)(int64_t b, int64_t h, int64_t i, int64_t j);
  double cap;
};
static int all_see(int64_t b, int64_t h, int64_t i, int64_t j) {
  (void)b, (void)h, (void)i, (void)j;
  return 1;
}
static double nothing(int64_t b, int64_t h, int64_t i, int64_t j) {
  (void)b, (void)h, (void)i, (void)j;
  return 0;
}
enum { kQueries = 6, kKeys = 9 };

static void check_mask(const struct heed_mask* mask, struct who who, const char* name) {
  struct tensor query, key, value, out;
  make4(&query, 2, 2, kQueries, kDim);
  make4(&key, 2, 2, kKeys, kDim);
  make4(&value, 2, 2, kKeys, 3);
  make4(&out, 2, 2, kQueries, 3);
  const double scale = 0.7;
  struct heed_call call = {.size = sizeof call,
                           .variant = "sdpa",
                           .query = &query.dl,
                           .key = &key.dl,
                           .value = &value.dl,
                           .mask = mask,
                           .scale = &scale};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &out.dl};
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", name);
  if (who.sees == NULL) who.sees = all_see;
  if (who.adds == NULL) who.adds = nothing;
  int right = 1, hidden = 0;
  for (int64_t row = 0; row < 4 * kQueries; ++row) {
    const int64_t b = row / (2 * kQueries), h = row / kQueries % 2, i = row % kQueries;
    double sum = 0, mixed[3] = {0, 0, 0};
    for (int64_t j = 0; j < kKeys; ++j) {
      if (!who.sees(b, h, i, j)) {
        hidden = 1;
        continue;
      }
      double s = 0;
      for (int c = 0; c < kDim; ++c)
        s += query.numbers[row * kDim + c] * key.numbers[((b * 2 + h) * kKeys + j) * kDim + c];
      s *= scale;
      if (who.cap != 0) s = who.cap * tanh(s / who.cap);
      const double weight = exp(s + who.adds(b, h, i, j));
      sum += weight;
      for (int c = 0; c < 3; ++c)
        mixed[c] += weight * value.numbers[((b * 2 + h) * kKeys + j) * 3 + c];
    }
    for (int c = 0; c < 3; ++c)
      if (!close_to(out.numbers[row * 3 + c], sum > 0 ? mixed[c] / sum : 0, 1e-13)) right = 0;
  }
  check(right, "agrees with plain loops", name);
  check(hidden == (who.sees != all_see), "hides something, where it hides", name);
  drop(&query), drop(&key), drop(&value), drop(&out);
}

static int causal_top(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, (void)h, j <= i + 1;
}
static int causal_bottom(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, (void)h, j <= i + 3;
}
static int in_window(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, (void)h, j >= i - 2 && j <= i + 1;
}
static int in_range(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, (void)h, (void)i, j >= 2 && j < 7;
}
static int in_length(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)h, (void)i, j < (b == 0 ? 4 : 9);
}
static int document(int64_t b, int64_t i) { return i >= 3 + b; }
static int same_document(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)h, document(b, i) == document(b, j);
}
static int third(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, (void)i, (j + h) % 3 != 0;
}
// The first head sees every key, so that conclusions from it hold for no other head.
static int by_function(int64_t b, int64_t h, int64_t i, int64_t j) {
  return b + h == 0 || (i * 3 + j + b + 2 * h) % 4 != 0;
}
static int moved_function(int64_t b, int64_t h, int64_t i, int64_t j) {
  return by_function(b, h, i + 3, j);
}
static double slope_adds(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, -(h == 0 ? 0.5 : 0.25) * fabs((double)(i + 3 - j));
}
static double moved_slope_adds(int64_t b, int64_t h, int64_t i, int64_t j) {
  return slope_adds(b, h, i - 5, j);
}
static double bias_adds(int64_t b, int64_t h, int64_t i, int64_t j) {
  return (void)b, (void)h, 0.1 * (double)i - 0.2 * (double)j;
}
static int two_parts(int64_t b, int64_t h, int64_t i, int64_t j) {
  return causal_top(b, h, i, j) && in_length(b, h, i, j);
}

static int asked(void* context, int64_t batch, int64_t head, int64_t query, int64_t key) {
  *(volatile int*)context = 1;
  return by_function(batch, head, query, key);
}

static int ending(void* context, int64_t batch, int64_t head, int64_t query, int64_t key) {
  return (void)context, (void)batch, (void)head, query == 4 && key == 2 ? -7 : 1;
}

static void check_masks(void) {
  const struct heed_mask none = {.size = sizeof none};
  struct heed_mask mask = none;
  check_mask(NULL, (struct who){0}, "no mask");
  mask.causal = 1, mask.causal_offset = 1;
  check_mask(&mask, (struct who){.sees = causal_top}, "causal");
  const int64_t lengths[] = {4, 9};
  mask.key_lengths = lengths, mask.key_length_count = 2;
  check_mask(&mask, (struct who){.sees = two_parts}, "causal and key lengths");
  mask = none, mask.causal = 1, mask.causal_align = heed_bottom_right;
  check_mask(&mask, (struct who){.sees = causal_bottom}, "causal, bottom right");
  const struct heed_window window = {.left = 2, .right = 1};
  mask = none, mask.windows = &window, mask.window_count = 1;
  check_mask(&mask, (struct who){.sees = in_window}, "window");
  const struct heed_key_range ranges[] = {{0, 7}, {2, 9}};
  mask = none, mask.key_ranges = ranges, mask.key_range_count = 2;
  check_mask(&mask, (struct who){.sees = in_range}, "key ranges");
  mask = none, mask.key_lengths = lengths, mask.key_length_count = 2;
  check_mask(&mask, (struct who){.sees = in_length}, "key lengths");
  int64_t queries[2 * kQueries], keys[2 * kKeys];
  for (int64_t n = 0; n < 2 * kQueries; ++n) queries[n] = document(n / kQueries, n % kQueries);
  for (int64_t n = 0; n < 2 * kKeys; ++n) keys[n] = document(n / kKeys, n % kKeys);
  mask = none, mask.query_documents = queries, mask.query_document_count = 2 * kQueries;
  mask.key_documents = keys, mask.key_document_count = 2 * kKeys;
  check_mask(&mask, (struct who){.sees = same_document}, "documents");
  uint8_t allowed[2 * kKeys];
  for (int64_t n = 0; n < 2 * kKeys; ++n) allowed[n] = (uint8_t)third(0, n / kKeys, 0, n % kKeys);
  int64_t shape[] = {1, 2, 1, kKeys};
  DLTensor bytes = {
      .data = allowed, .device = {kDLCPU, 0}, .ndim = 4, .dtype = {kDLUInt, 8, 1}, .shape = shape};
  mask = none, mask.allowed = &bytes;
  check_mask(&mask, (struct who){.sees = third}, "bytes");
  bytes.dtype.code = 6;  // kDLBool of DLPack 0.8
  check_mask(&mask, (struct who){.sees = third}, "bool");
  struct tensor bias;
  make4(&bias, 1, 1, kQueries, kKeys);
  for (int64_t n = 0; n < bias.size; ++n) bias.numbers[n] = bias_adds(0, 0, n / kKeys, n % kKeys);
  mask = none, mask.bias = &bias.dl;
  check_mask(&mask, (struct who){.adds = bias_adds}, "bias");
  // Rows of lists of the whole batch, of each head: the keys that third() shows.
  int64_t start[2 * kQueries + 1] = {0}, indices[2 * kQueries * kKeys], count = 0;
  for (int64_t row = 0; row < 2 * kQueries; start[++row] = count)
    for (int64_t j = 0; j < kKeys; ++j)
      if (third(0, row / kQueries, 0, j)) indices[count++] = j;
  mask = none, mask.list_start = start, mask.list_start_count = 2 * kQueries + 1;
  mask.list_indices = indices, mask.list_index_count = (size_t)count, mask.list_heads = 2;
  check_mask(&mask, (struct who){.sees = third}, "lists");
  const double slopes[] = {0.5, 0.25};
  mask = none, mask.alibi = slopes, mask.alibi_count = 2, mask.alibi_align = heed_bottom_right;
  check_mask(&mask, (struct who){.adds = slope_adds}, "ALiBi");
  mask.alibi_offset = -5;
  check_mask(&mask, (struct who){.adds = moved_slope_adds}, "ALiBi, moved");
  mask = none, mask.soft_cap = 0.5;
  check_mask(&mask, (struct who){.cap = 0.5}, "soft cap");
  int was_asked = 0;
  mask = none, mask.visible = asked, mask.visible_context = &was_asked;
  check_mask(&mask, (struct who){.sees = by_function}, "function");
  check(was_asked, "gets its context", "function");
  mask.visible_align = heed_bottom_right;
  check_mask(&mask, (struct who){.sees = moved_function}, "function, bottom right");
  mask.visible_align = heed_top_left, mask.visible_offset = 3;
  check_mask(&mask, (struct who){.sees = moved_function}, "function, moved");

  // Calls that do not fit.
  struct tensor x, out;
  make4(&x, 2, 2, kQueries, kDim);
  make4(&out, 2, 2, kQueries, kDim);
  struct heed_call call = {.size = sizeof call,
                           .variant = "sdpa",
                           .query = &x.dl,
                           .key = &x.dl,
                           .value = &x.dl,
                           .mask = &mask};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &out.dl};
  mask = none, mask.key_lengths = lengths, mask.key_length_count = 1;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused",
        "one key length for two batches");
  check_text(heed_last_error(), "heed::forward(sdpa): key_lengths has 1 entries, the batch is 2");
  mask = none, mask.causal = 1, mask.causal_align = 2;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "align");
  check_text(heed_last_error(),
             "heed::forward(sdpa): the mask's causal_align is 2, it must be 0 (heed_top_left) or 1 "
             "(heed_bottom_right)");
  mask = none, mask.causal_offset = -1;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "an offset of nothing");
  check_text(
      heed_last_error(),
      "heed::forward(sdpa): the mask has causal_align 0 and causal_offset -1, but no causal");
  mask = none, mask.alibi_align = heed_bottom_right;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "a place of no slopes");
  check_text(heed_last_error(),
             "heed::forward(sdpa): the mask has alibi_align 1 and alibi_offset 0, but no alibi");
  mask = none, mask.visible_offset = 2;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused",
        "a place of no function");
  check_text(
      heed_last_error(),
      "heed::forward(sdpa): the mask has visible_align 0 and visible_offset 2, but no visible");
  mask = none, mask.visible = ending;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "ends the call", "a function");
  check_text(heed_last_error(),
             "heed::forward: the mask's function answered -7, which ends the call");
  mask = none, mask.visible = asked, mask.visible_context = &was_asked;
  mask.visible_offset = INT64_MAX;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "a far function");
  check_text(heed_last_error(),
             "heed::forward(sdpa): the mask's function has offset 9223372036854775807, it must lie "
             "between -536870912 and 536870912");
  shape[3] = kQueries, bytes.dtype.code = kDLUInt, allowed[8] = 2;
  mask = none, mask.allowed = &bytes;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused",
        "a byte that is no bool");
  check_text(heed_last_error(),
             "heed::forward(sdpa): the boolean mask holds 2 at (0,1,0,2), it must hold 0 and 1");
  mask = none, mask.size = 0;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "a mask without a size");
  mask = none, mask.window_count = 1;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "no windows");
  check_text(heed_last_error(),
             "heed::forward(sdpa): windows has 1 entries and a null pointer to them");

  // Queries at the end of their keys.
  struct tensor key;
  make4(&key, 2, 2, kKeys, kDim);
  call.key = call.value = &key.dl, call.queries_at_end = 1;
  const char* at_first_keys =
      "heed::forward(sdpa): the queries are the last tokens of the keys, len_q is 6 and len_kv is "
      "9; the "
      "mask's bands place them at the first keys, Align::bottom_right at the last ones";
  mask = none, mask.causal = 1;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "causal, top left");
  check_text(heed_last_error(), at_first_keys);
  mask.causal_offset = 3;
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "is obeyed", "an offset");
  mask.causal_offset = 0, mask.causal_align = heed_bottom_right;
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "is taken", "causal, bottom right");
  mask = none, mask.visible = asked, mask.visible_context = &was_asked;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid &&
            strstr(heed_last_error(), "the mask's functions of positions place them") != NULL,
        "is refused", "a function, top left");
  drop(&bias), drop(&x), drop(&out), drop(&key);
}

// Rows in place: (batch, len, heads, dim) memory, and one head for all.
static void check_strides(void) {
  struct tensor packed, dense, out, strided_out;
  make4(&packed, 2, kLen, 3, kDim);  // batch, len, heads, dim
  make4(&dense, 2, 3, kLen, kDim);
  for (int64_t n = 0; n < dense.size; ++n) {
    const int64_t c = n % kDim, t = n / kDim % kLen, h = n / kDim / kLen % 3,
                  b = n / kDim / kLen / 3;
    dense.numbers[n] = packed.numbers[((b * kLen + t) * 3 + h) * kDim + c];
  }
  make4(&out, 2, 3, kLen, kDim);
  make4(&strided_out, 2, kLen, 3, kDim);
  int64_t shape[] = {2, 3, kLen, kDim}, strides[] = {kLen * 3 * kDim, kDim, 3 * kDim, 1};
  DLTensor view = packed.dl, to = strided_out.dl;
  view.shape = to.shape = shape;
  view.strides = to.strides = strides;
  struct heed_call call = {.size = sizeof call,
                           .variant = "ode",
                           .query = &dense.dl,
                           .key = &dense.dl,
                           .value = &dense.dl};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &out.dl};
  struct heed_saved* saved = NULL;
  check(heed_forward(&call, &outputs, &saved) == heed_ok, "forward", "dense");
  call.query = call.key = call.value = &view;
  outputs.out = &to;
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", "strided");
  int same = 1;
  for (int64_t n = 0; n < out.size; ++n) {
    const int64_t c = n % kDim, t = n / kDim % kLen, h = n / kDim / kLen % 3,
                  b = n / kDim / kLen / 3;
    if (out.numbers[n] != strided_out.numbers[((b * kLen + t) * 3 + h) * kDim + c]) same = 0;
  }
  check(same, "the same bits", "strided");
  // The report of each row.
  struct tensor residual;
  make4(&residual, 2, 3, kLen, 1);
  check(heed_report_name(saved, 0) != NULL && strcmp(heed_report_name(saved, 0), "residual") == 0 &&
            heed_report_name(saved, 1) == NULL,
        "names its report", "ode");
  check(heed_report(saved, "residual", &residual.dl) == heed_ok, "reports", "ode");
  int positive = 1;
  for (int64_t n = 0; n < residual.size; ++n)
    positive = positive && residual.numbers[n] >= 0 && residual.numbers[n] < 0.1;
  check(positive, "has small residuals", "ode");
  check(heed_report(saved, "tension", &residual.dl) == heed_invalid, "is refused",
        "a report that is none");
  check_text(heed_last_error(), "heed_report: the call reports no tension, it reports residual");
  heed_saved_free(saved);
  drop(&packed), drop(&dense), drop(&out), drop(&strided_out), drop(&residual);
}

// With one key, out is its value in any type.
static int near_pair(const float* out) {
  return fabs(out[0] - 3) < 1e-5 && fabs(out[1] + 9) < 1e-5;
}

static void check_storage(void) {
  float one[] = {1, 2}, out[2];
  uint16_t bfloat[] = {0x4040, 0xC110}, half[] = {0x4200, 0xC880}, narrow[2];  // 3, -9
  int64_t shape[] = {1, 2};
  DLTensor query = {
      .data = one, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  DLTensor value = query, to = query;
  value.data = bfloat, value.dtype.code = kDLBfloat, value.dtype.bits = 16;
  to.data = out;
  struct heed_call call = {
      .size = sizeof call, .variant = "sdpa", .query = &query, .key = &query, .value = &value};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &to};
  check(heed_forward(&call, &outputs, NULL) == heed_ok && near_pair(out), "is read", "bfloat16");
  value.data = half, value.dtype.code = kDLFloat, out[0] = out[1] = 0;
  check(heed_forward(&call, &outputs, NULL) == heed_ok && near_pair(out), "is read", "half");
  to.data = narrow, to.dtype = value.dtype;
  check(heed_forward(&call, &outputs, NULL) == heed_ok && narrow[0] == half[0] &&
            narrow[1] == half[1],
        "is written", "half");
  call.precision = heed_mixed, to.data = out, to.dtype = query.dtype, out[0] = 0;
  check(heed_forward(&call, &outputs, NULL) == heed_ok && fabs(out[0] - 3) < 0.03, "computes",
        "mixed precision");
  call.precision = 7;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "precision 7");
  check_text(heed_last_error(),
             "heed::forward(sdpa): precision is 7, it must be 0 (heed_storage) or 1 (heed_mixed)");
  query.dtype.code = kDLInt;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "integers");
  check_text(heed_last_error(),
             "heed::forward: query has dtype int32, it must be float64, float32, float16 or "
             "bfloat16");
}

static void refuse(const struct heed_call* call, const struct heed_outputs* outputs,
                   const char* text) {
  struct heed_saved* saved = (struct heed_saved*)(void*)&checks;
  check(heed_forward(call, outputs, &saved) == heed_invalid, "is refused", text);
  check(saved == NULL, "saves nothing", text);
  check_text(heed_last_error(), text);
}

// Whichever part refuses a mask or a tensor, the sentence begins with the call and gives types in words.
static void check_messages_of_masks(const struct heed_call* right, const struct heed_outputs* to) {
  struct heed_mask mask = {.size = sizeof mask};
  struct heed_call call = *right;
  call.mask = &mask;
  struct heed_window windows[] = {{.left = 1, .right = 0}, {.left = -2, .right = 5}};
  mask.windows = windows, mask.window_count = 2;
  refuse(&call, to,
         "heed::forward(dar): a window's left is -2 and right is 5, each must be -1 (open) or at "
         "least 0");
  mask.window_count = 0;
  struct tensor bias;
  make4(&bias, 1, 1, 3, 1);
  mask.bias = &bias.dl;
  refuse(&call, to,
         "heed::forward(dar): the bias has shape (1,1,3,1), its last extent must be len_kv, 3: it "
         "does not broadcast over keys");
  bias.dl.device.device_type = kDLCUDA;
  refuse(&call, to,
         "heed::forward(dar): the bias is on cuda, it must be on cpu, or pinned host memory: "
         "cuda_host or rocm_host");
  mask.bias = NULL, mask.allowed = &bias.dl;
  refuse(&call, to,
         "heed::forward(dar): the boolean mask has dtype float64, it must be bool or uint8");
  bias.dl.device.device_type = kDLCPU, bias.dl.dtype.code = kDLUInt, bias.dl.dtype.bits = 8;
  memset(bias.dl.data, 0, 3 * sizeof(double));
  refuse(&call, to,
         "heed::forward(dar): the boolean mask has shape (1,1,3,1), its last extent must be "
         "len_kv, 3: it does not broadcast over keys");
  const double no_number = NAN;
  call.mask = NULL, call.scale = &no_number;
  refuse(&call, to, "heed::forward(dar): Options: scale is nan, it must be finite");
  struct heed_parameter one = {.name = "strength", .tensor = &bias.dl};
  call = *right, call.parameters = &one, call.parameter_count = 1;
  refuse(&call, to,
         "heed::forward(dar): strength has dtype uint8, it must be float64, float32, float16 or "
         "bfloat16");
  bias.dl.device.device_type = kDLVulkan;
  refuse(&call, to, "heed::forward(dar): strength is on vulkan, it must be on cpu");
  // Errors that no check of a call foresees.
  const struct heed_start start = {.size = sizeof start, .prototypes = INT64_MAX};
  size_t count = 0;
  call = *right, call.variant = "prototype";
  check(heed_describe(&call, &start, NULL, &count) == heed_invalid &&
            strstr(heed_last_error(), "heed_describe: ") == heed_last_error() &&
            strstr(heed_last_error(), "9223372036854775807") != NULL,
        "is refused", heed_last_error());
  drop(&bias);
}

static void check_errors(void) {
  struct tensor x, narrow, out;
  make4(&x, 1, 2, 3, 4);
  make4(&narrow, 1, 2, 3, 2);
  make4(&out, 1, 2, 3, 4);
  const struct heed_call right = {
      .size = sizeof right, .variant = "dar", .query = &x.dl, .key = &x.dl, .value = &x.dl};
  const struct heed_outputs to = {.size = sizeof to, .out = &out.dl};
  struct heed_call call = right;
  refuse(NULL, &to, "heed::forward: the call is a null pointer");
  refuse(&right, NULL, "heed::forward: outputs is a null pointer");
  call.variant = NULL;
  refuse(&call, &to, "heed::forward: variant is a null pointer, it must be a name");
  call.variant = "dra";
  check(heed_forward(&call, &to, NULL) == heed_invalid &&
            strstr(heed_last_error(),
                   "heed::forward: there is no variant dra, it must be one of sdpa, dar, "
                   "dar-unrolled, ") == heed_last_error(),
        "is named", "an unknown variant");
  call = right, call.key = &narrow.dl;
  refuse(&call, &to, "heed::forward(dar): key has dim_qk 2, query has 4");
  call = right, call.value = NULL;
  refuse(&call, &to, "heed::forward(dar): value was not given");
  call = right, call.threads = -2;
  refuse(&call, &to,
         "heed::forward(dar): Options: threads is -2, it must be 0 (default) or positive");
  struct heed_outputs other = to;
  other.out = &narrow.dl;
  refuse(&right, &other, "heed::forward(dar): out has shape (1,2,3,2), it must be (1,2,3,4)");
  other.out = NULL;
  refuse(&right, &other, "heed::forward(dar): out was not given, it must have shape (1,2,3,4)");
  other.out = &x.dl;
  refuse(&right, &other, "heed::forward(dar): out overlaps query");
  DLTensor single = x.dl;
  single.dtype.bits = 32;
  call = right, call.key = &single;
  refuse(&call, &to,
         "heed::forward(dar): key has dtype float32, beside this query it must be float64");
  check_messages_of_masks(&right, &to);

  struct heed_parameter one = {.name = "strenght", .number = 1};
  call = right, call.parameters = &one, call.parameter_count = 1;
  refuse(&call, &to,
         "heed::forward(dar): there is no parameter strenght; it has strength, vigilance, "
         "sharpness, feedback, projection, gate, iterations, converged, adaptive, eps, zero_norm");
  one.name = "sharpness", one.number = -1;
  refuse(&call, &to, "heed::forward(dar): sharpness is -1, it must be positive");
  one.name = "iterations", one.number = 1.5;
  refuse(&call, &to,
         "heed::forward(dar): iterations is 1.5, it must be a whole number from -2147483648 to "
         "2147483647");
  one.number = -1;
  refuse(&call, &to, "heed::forward(dar): iterations is -1, it must be at least 0");
  one.name = "gate", one.text = "relu";
  refuse(&call, &to,
         "heed::forward(dar): gate is \"relu\", it must be one of logistic, centred, tanh, "
         "piecewise_linear");
  one.text = NULL, one.number = 4;
  refuse(&call, &to,
         "heed::forward(dar): gate is 4, it must be a whole number from 0 to 3, or one of "
         "logistic, centred, tanh, piecewise_linear");
  one.name = "converged", one.number = 2;
  refuse(&call, &to, "heed::forward(dar): converged is 2, it must be a whole number from 0 to 1");
  one.name = "strength", one.text = "big";
  refuse(&call, &to, "heed::forward(dar): strength is \"big\", it must be a tensor or a number");
  one.text = NULL, one.tensor = &narrow.dl;
  refuse(&call, &to,
         "heed::forward(dar): strength has 12 values, the call has 2 heads; it needs 1 value, "
         "or one per head");
  one.name = NULL;
  refuse(&call, &to, "heed::forward(dar): a parameter has a null pointer for a name");
  const struct heed_parameter twice[] = {{.name = "eps", .number = 1},
                                         {.name = "eps", .number = 1}};
  call.parameters = twice, call.parameter_count = 2;
  refuse(&call, &to, "heed::forward(dar): eps is given twice");
  call.parameters = NULL;
  refuse(&call, &to, "heed::forward(dar): parameters has 2 entries and a null pointer to them");
  call = right, call.variant = "intent-from-q";
  refuse(&call, &to,
         "heed::forward(intent-from-q): the tensor gate.weight was not given; heed_describe() "
         "tells its shape, and heed_initial() what it may begin with");
  call.variant = "intent";
  refuse(&call, &to,
         "heed::forward(intent): the op needs the input intent of shape (1,2,3,4), none was given");

  // Structs of other versions.
  struct {
    struct heed_call call;
    int64_t more;
  } longer = {right, 0};
  longer.call.size = sizeof longer;
  check(heed_forward(&longer.call, &to, NULL) == heed_ok, "is taken", "a longer struct of zeros");
  longer.more = 1;
  check(heed_forward(&longer.call, &to, NULL) == heed_invalid &&
            strstr(heed_last_error(), "heed::forward: the call has something at byte ") ==
                heed_last_error(),
        "is refused", "a longer struct");
  call = right, call.size = offsetof(struct heed_call, parameters), call.parameter_count = 99;
  check(heed_forward(&call, &to, NULL) == heed_ok, "is taken", "a shorter struct");
  call.size = 0;
  check(heed_forward(&call, &to, NULL) == heed_invalid &&
            strstr(heed_last_error(), "heed::forward: the size of the call is 0, ") ==
                heed_last_error(),
        "is refused", "a struct without a size");

  // Backward.
  struct heed_saved* saved = NULL;
  check(heed_forward(&right, &to, &saved) == heed_ok, "forward", "dar");
  struct heed_gradients gradients = {.size = sizeof gradients};
  struct heed_outputs from = {.size = sizeof from};
  check(heed_backward(&right, NULL, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "nothing saved");
  check_text(heed_last_error(),
             "heed::backward: saved is a null pointer, it must come from heed_forward()");
  check(heed_backward(&right, saved, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "no grad_out");
  check_text(heed_last_error(),
             "heed::backward(dar): grad_out was not given, it must have shape (1,2,3,4)");
  struct tensor grad_out;
  make4(&grad_out, 1, 2, 3, 4);
  from.out = &grad_out.dl;
  call = right, call.variant = "dar-unrolled";
  check(heed_backward(&call, saved, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "another variant");
  check_text(heed_last_error(), "heed::backward(dar-unrolled): saved is of a call of dar");
  const double scale = 0.25;
  call = right, call.scale = &scale;
  check(heed_backward(&call, saved, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "another scale");
  check_text(heed_last_error(),
             "heed::backward(dar): saved is of a call with scale 0.5, this one has 0.25");
  struct heed_mask mask = {.size = sizeof mask, .causal = 1}, moved = mask;
  struct heed_saved* masked = NULL;
  call = right, call.mask = &mask;
  check(heed_forward(&call, &to, &masked) == heed_ok, "forward", "dar, causal");
  moved.causal_offset = 1, call.mask = &moved;
  check(heed_backward(&call, masked, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "a mask that was moved");
  check_text(heed_last_error(),
             "heed::backward(dar): saved is of a call with the bands (left -1, right 0, offset 0, "
             "top_left), this one has (left -1, right 0, offset 1, top_left)");
  heed_saved_free(masked);
  struct heed_parameter target = {.name = "eps", .tensor = &narrow.dl};
  gradients.parameters = &target, gradients.parameter_count = 1;
  check(heed_backward(&right, saved, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "the gradient of an option");
  check_text(heed_last_error(),
             "heed::backward(dar): eps is not learnt, there is no gradient of it");
  target.name = "strength";
  check(heed_backward(&right, saved, &out.dl, &from, &gradients) == heed_invalid, "is refused",
        "a gradient of another shape");
  check_text(heed_last_error(),
             "heed::backward(dar): the gradient of strength has shape (1,2,3,2), it must be (1)");
  heed_saved_free(saved);
  heed_saved_free(NULL);
  drop(&x), drop(&narrow), drop(&out), drop(&grad_out);
}

static void* ask_wrongly(void* text) {
  for (int n = 0; n < 200; ++n) {
    struct heed_call call = {.size = sizeof call, .variant = text};
    struct heed_outputs outputs = {.size = sizeof outputs};
    if (heed_forward(&call, &outputs, NULL) != heed_invalid ||
        strstr(heed_last_error(), text) == NULL)
      return text;
  }
  return NULL;
}

static void check_threads(void) {
  struct tensor x, out, again;
  make4(&x, 1, 4, 150, 8);
  make4(&out, 1, 4, 150, 8);
  make4(&again, 1, 4, 150, 8);
  struct heed_call call = {.size = sizeof call,
                           .variant = "differential",
                           .query = &x.dl,
                           .key = &x.dl,
                           .value = &x.dl,
                           .threads = 1};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &out.dl};
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", "one thread");
  call.threads = 0;
  outputs.out = &again.dl;
  check(heed_set_threads(3) == heed_ok && heed_threads() == 3, "is set", "number of threads");
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", "three threads");
  check(memcmp(out.numbers, again.numbers, (size_t)out.size * sizeof(double)) == 0, "the same bits",
        "three threads");
  check(heed_set_threads(-1) == heed_invalid, "is refused", "-1 threads");
  check_text(heed_last_error(),
             "heed_set_threads: threads is -1, it must be 0 (default) or positive");
  check(heed_threads() == 3 && heed_set_threads(0) == heed_ok && heed_threads() >= 1, "is OpenMP's",
        "number of threads");

  pthread_t threads[2];
  char names[][8] = {"left", "right"};
  void* results[2];
  for (int n = 0; n < 2; ++n) pthread_create(&threads[n], NULL, ask_wrongly, names[n]);
  for (int n = 0; n < 2; ++n) pthread_join(threads[n], &results[n]);
  check(results[0] == NULL && results[1] == NULL, "keeps the errors of each thread apart",
        "threads");
  drop(&x), drop(&out), drop(&again);
}

static void check_dropout(void) {
  struct tensor x, out, whole;
  make4(&x, 1, 1, 40, 4);
  make4(&out, 1, 1, 40, 4);
  make4(&whole, 1, 1, 40, 4);
  struct heed_call call = {
      .size = sizeof call, .variant = "sdpa", .query = &x.dl, .key = &x.dl, .value = &x.dl};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &whole.dl};
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", "without dropout");
  call.dropout = 0.5, call.dropout_seed = 3, outputs.out = &out.dl;
  check(heed_forward(&call, &outputs, NULL) == heed_ok, "forward", "dropout");
  check(memcmp(out.numbers, whole.numbers, sizeof(double) * 40) != 0, "changes rows", "dropout");
  call.dropout = 1;
  check(heed_forward(&call, &outputs, NULL) == heed_invalid, "is refused", "dropout of all");
  drop(&x), drop(&out), drop(&whole);
}

int main(int argc, char** argv) {
  if (strcmp(heed_last_error(), "") != 0) ++wrong;
  if (argc > 1 && strcmp(heed_version(), argv[1]) != 0) {
    printf("WRONG: the version is %s, the project has %s\n", heed_version(), argv[1]);
    ++wrong;
  }
  if (argc > 2 && strcmp(heed_instructions(), argv[2]) != 0) {
    printf("WRONG: %s runs, this processor has %s\n", heed_instructions(), argv[2]);
    ++wrong;
  }
  check(heed_use_instructions("abacus") == heed_invalid, "is refused",
        "an unknown instruction set");
  check(strstr(heed_last_error(), "heed_use_instructions: the library has no abacus, it has ") ==
            heed_last_error(),
        "is named", "an unknown instruction set");
  size_t sets = 0;
  for (size_t n = 0; heed_instructions_name(n) != NULL; ++n) {
    const char* name = heed_instructions_name(n);
    if (heed_use_instructions(name) != heed_ok) {
      printf("not run: %s\n", heed_last_error());
      continue;
    }
    ++sets;
    check(strcmp(heed_instructions(), name) == 0, "runs", name);
    for (size_t v = 0; heed_variant_name(v) != NULL; ++v) check_gradients(heed_variant_name(v));
    check_first_program();
    check_masks();
    check_strides();
    check_storage();
    check_errors();
    check_threads();
    check_dropout();
    printf("%s: done\n", name);
  }
  check(sets > 0, "has one", "the library");
  check(heed_use_instructions(NULL) == heed_ok, "goes back to the highest", "the library");
  printf("%d checks, %d wrong\n", checks, wrong);
  return wrong == 0 ? 0 : 1;
}
