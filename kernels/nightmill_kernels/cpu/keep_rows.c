// Some rows of a matrix moved to its front, in place: after the last attention only drawn tokens go on.
#include <string.h>

#include "nightmill.h"

int nm_keep_rows(const struct nm_keep *c) {
  for (int64_t i = 0; i < c->count; i++)
    if (c->index[i] < (i ? c->index[i - 1] + 1 : 0) || c->index[i] >= c->rows) return NM_BAD_KEEP;
  // index[i] >= i: nothing is overwritten that is still to be moved.
  for (int64_t i = 0; i < c->count; i++)
    if (c->index[i] != i) memcpy((char *)c->x + i * c->stride, (char *)c->x + c->index[i] * c->stride, (size_t)c->width);
  return NM_OK;
}
