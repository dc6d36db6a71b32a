// A recorded sequence of calls, done again by one call: between two operators of a small step, crossing from Python
// costs more than many of them take, and lets the other threads fall asleep. A recording serves steps of any size:
// its calls are copied, and the copies told where this step's inputs lie and how many rows it has.
#include "nightmill.h"

static int attend(struct nm_attention call, const struct nm_step *step, int drawn) {
  call.query_starts = drawn ? step->drawn_starts : step->query_starts;
  call.context_lens = step->context_lens;
  call.page_tables = step->page_tables;
  call.group_starts = step->group_starts;
  call.group_members = step->group_members;
  call.group_pages = step->group_pages;
  call.num_tokens = drawn ? step->num_drawn : step->num_tokens;
  call.num_sequences = step->num_sequences;
  call.table_width = step->table_width;
  // A member of a group has one query, which one that does not draw lacks.
  const int grouped = !drawn || step->groups_draw;
  call.num_groups = grouped ? step->num_groups : 0;
  call.num_members = grouped ? step->num_members : 0;
  return nm_paged_attention(&call);
}

static int rope(struct nm_rope call, const struct nm_step *step, int64_t rows) {
  call.positions = step->positions;
  call.wide_positions = 0;
  if (call.slots) call.slots = step->slots;
  call.num_tokens = rows;
  return nm_rope_store(&call);
}

static int norm(struct nm_norm call, int64_t rows) {
  call.outer = rows;
  return nm_rms_norm(&call);
}

static int int8(struct nm_int8_call call, int64_t rows) {
  call.rows = rows;
  return nm_linear_int8(&call);
}

static int keep(struct nm_keep call, const struct nm_step *step) {
  call.index = step->drawn;
  call.rows = step->num_tokens;
  call.count = step->num_drawn;
  return nm_keep_rows(&call);
}

static int run(const struct nm_recorded *recorded, const struct nm_step *step) {
  const int drawn = recorded->rows == NM_DRAWN;
  const int64_t rows = drawn ? step->num_drawn : step->num_tokens;
  const void *call = recorded->call;
  if (rows == 0) return NM_OK;
  switch (recorded->op) {
    case NM_OP_RMS_NORM: return norm(*(const struct nm_norm *)call, rows);
    case NM_OP_ROPE_STORE: return rope(*(const struct nm_rope *)call, step, rows);
    case NM_OP_ATTENTION: return attend(*(const struct nm_attention *)call, step, drawn);
    case NM_OP_LINEAR: {
      const struct nm_linear_call *c = call;
      return nm_linear(c->layer, c->x, c->x_stride, c->out, c->out_stride, rows, c->threads);
    }
    case NM_OP_LINEAR_INT8: return int8(*(const struct nm_int8_call *)call, rows);
    case NM_OP_KEEP_ROWS: return keep(*(const struct nm_keep *)call, step);
    default: return NM_UNSUPPORTED;
  }
}

int nm_replay(const struct nm_recorded *recorded, int64_t count, const struct nm_step *step, int64_t *stopped_at) {
  for (int64_t i = 0; i < count; i++) {
    const int status = run(recorded + i, step);
    if (status != NM_OK) {
      *stopped_at = i;
      return status;
    }
  }
  return NM_OK;
}
