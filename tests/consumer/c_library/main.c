// SPDX-License-Identifier: Apache-2.0
// A C program that links an installed libheed.
#include <heed/c.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char** argv) {
  float x[] = {1, 2, 3, 4}, out[4] = {0, 0, 0, 0};
  int64_t shape[] = {2, 2};
  DLTensor rows = {
      .data = x, .device = {kDLCPU, 0}, .ndim = 2, .dtype = {kDLFloat, 32, 1}, .shape = shape};
  DLTensor to = rows;
  to.data = out;
  struct heed_mask causal = {.size = sizeof causal, .causal = 1};
  struct heed_call call = {.size = sizeof call,
                           .variant = "sdpa",
                           .query = &rows,
                           .key = &rows,
                           .value = &rows,
                           .mask = &causal};
  struct heed_outputs outputs = {.size = sizeof outputs, .out = &to};
  if (heed_forward(&call, &outputs, NULL) != heed_ok) return puts(heed_last_error()), 1;
  printf("%s on %s: %g %g\n", heed_version(), heed_instructions(), out[0], out[1]);
  return out[0] == 1 && out[1] == 2 && (argc < 2 || strcmp(heed_version(), argv[1]) == 0) ? 0 : 1;
}
