// A recorded sequence of calls, done again by one call: between two operators of a small step, crossing from Python
// costs more than many of them take, and lets the other threads fall asleep.
#include "nightmill.h"

static int run(const struct nm_step *step) {
  switch (step->op) {
    case NM_OP_RMS_NORM: return nm_rms_norm(step->call);
    case NM_OP_ROPE_STORE: return nm_rope_store(step->call);
    case NM_OP_ATTENTION: return nm_paged_attention(step->call);
    case NM_OP_LINEAR: {
      const struct nm_linear_call *c = step->call;
      return nm_linear(c->layer, c->x, c->x_stride, c->out, c->out_stride, c->rows, c->threads);
    }
    case NM_OP_LINEAR_INT8: return nm_linear_int8(step->call);
    default: return NM_UNSUPPORTED;
  }
}

int nm_replay(const struct nm_step *steps, int64_t count, int64_t *stopped_at) {
  for (int64_t i = 0; i < count; i++) {
    const int status = run(steps + i);
    if (status != NM_OK) {
      *stopped_at = i;
      return status;
    }
  }
  return NM_OK;
}
