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

static const void *at_row(const void *base, int64_t row, int64_t stride, int dtype) {
  return (const char *)base + row * stride * (dtype == NM_BF16 ? 2 : 4);
}

// Calls that take each row for itself: done for rows [first, last) alone, on so many threads.
struct span {
  int64_t first, last;
  int threads;
};

static int rope(struct nm_rope call, const struct nm_step *step, const struct span *span) {
  call.q = (void *)at_row(call.q, span->first, call.q_stride, call.dtype);
  call.k = (void *)at_row(call.k, span->first, call.k_stride, call.dtype);
  call.v = at_row(call.v, span->first, call.v_stride, call.dtype);
  call.positions = step->positions + span->first;
  call.wide_positions = 0;
  if (call.slots) call.slots = step->slots + span->first;
  call.num_tokens = span->last - span->first;
  call.threads = span->threads;
  return nm_rope_store(&call);
}

static int norm(struct nm_norm call, const struct span *span) {
  call.x = at_row(call.x, span->first, call.x_stride, call.dtype);
  if (call.residual) call.residual = (void *)at_row(call.residual, span->first, call.inner * call.dim, call.dtype);
  call.out = (void *)at_row(call.out, span->first, call.out_stride, call.dtype);
  call.outer = span->last - span->first;
  call.threads = span->threads;
  return nm_rms_norm(&call);
}

static int linear(const struct nm_linear_call *c, const struct span *span) {
  const int dtype = c->layer->dtype;
  const void *x = at_row(c->x, span->first, c->x_stride, dtype);
  void *out = (void *)at_row(c->out, span->first, c->out_stride, dtype);
  return nm_linear(c->layer, x, c->x_stride, out, c->out_stride, span->last - span->first, span->threads);
}

static int int8(struct nm_int8_call call, const struct span *span) {
  call.x = at_row(call.x, span->first, call.x_stride, call.dtype);
  call.out = (void *)at_row(call.out, span->first, call.layer->outputs, call.dtype);
  call.rows = span->last - span->first;
  call.threads = span->threads;
  return nm_linear_int8(&call);
}

static int keep(struct nm_keep call, const struct nm_step *step) {
  call.index = step->drawn;
  call.rows = step->num_tokens;
  call.count = step->num_drawn;
  return nm_keep_rows(&call);
}

static int is_by_row(const struct nm_recorded *recorded) {
  return recorded->op == NM_OP_RMS_NORM || recorded->op == NM_OP_ROPE_STORE || recorded->op == NM_OP_LINEAR ||
         recorded->op == NM_OP_LINEAR_INT8;
}

static int run_rows(const struct nm_recorded *recorded, const struct nm_step *step, const struct span *span) {
  const void *call = recorded->call;
  switch (recorded->op) {
    case NM_OP_RMS_NORM: return norm(*(const struct nm_norm *)call, span);
    case NM_OP_ROPE_STORE: return rope(*(const struct nm_rope *)call, step, span);
    case NM_OP_LINEAR: return linear(call, span);
    case NM_OP_LINEAR_INT8: return int8(*(const struct nm_int8_call *)call, span);
    default: return NM_UNSUPPORTED;
  }
}

// ---------------------------------------------------------------- runs of calls, some rows at a time

// One thread takes some rows through every call up to the next attention: what one call leaves for the next stays in
// its core's cache, and threads wait for each other once, not at every call. Each thread then reads all weights itself:
// the fewer rows it has, the less that pays, and the more threads do so. On two Zen 4 cores, a step of 16 rows
// 17.3 → 15.9 ms, 32: 31.9 → 29.9, 64: 74.3 → 72.0, 512: 320 → 308; 12 rows would lose.
enum {
  MIN_PIECE_ROWS = 4,  // times the number of threads
  MAX_PIECE_ROWS = 128,
};

struct chain {
  const struct nm_recorded *calls;
  int64_t count, rows, pieces;
  const struct nm_step *step;
  int status;
  int64_t stopped_at;
};

static void run_pieces(int64_t first, int64_t last, void *data) {
  struct chain *chain = data;
  for (int64_t piece = first; piece < last; piece++) {
    const struct span span = {chain->rows * piece / chain->pieces, chain->rows * (piece + 1) / chain->pieces, 1};
    for (int64_t i = 0; i < chain->count; i++) {
      const int status = run_rows(chain->calls + i, chain->step, &span);
      if (status == NM_OK) continue;
      int none = NM_OK;
      if (__atomic_compare_exchange_n(&chain->status, &none, status, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        chain->stopped_at = i;
      return;
    }
  }
}

static int64_t rows_of(const struct nm_recorded *recorded, const struct nm_step *step) {
  return recorded->rows == NM_DRAWN ? step->num_drawn : step->num_tokens;
}

static int threads_of(const struct nm_recorded *recorded) {
  const void *call = recorded->call;
  switch (recorded->op) {
    case NM_OP_RMS_NORM: return ((const struct nm_norm *)call)->threads;
    case NM_OP_ROPE_STORE: return ((const struct nm_rope *)call)->threads;
    case NM_OP_LINEAR: return ((const struct nm_linear_call *)call)->threads;
    default: return ((const struct nm_int8_call *)call)->threads;
  }
}

static int run(const struct nm_recorded *recorded, const struct nm_step *step) {
  const int64_t rows = rows_of(recorded, step);
  if (rows == 0) return NM_OK;
  if (recorded->op == NM_OP_ATTENTION)
    return attend(*(const struct nm_attention *)recorded->call, step, recorded->rows == NM_DRAWN);
  if (recorded->op == NM_OP_KEEP_ROWS) return keep(*(const struct nm_keep *)recorded->call, step);
  if (!is_by_row(recorded)) return NM_UNSUPPORTED;
  return run_rows(recorded, step, &(struct span){0, rows, threads_of(recorded)});
}

int nm_replay(const struct nm_recorded *recorded, int64_t count, const struct nm_step *step, int64_t *stopped_at) {
  int64_t i = 0;
  while (i < count) {
    struct chain chain = {.calls = recorded + i, .rows = rows_of(recorded + i, step), .step = step};
    while (i + chain.count < count && is_by_row(recorded + i + chain.count) &&
           recorded[i + chain.count].rows == recorded[i].rows)
      chain.count++;
    const int64_t threads = chain.count > 1 ? threads_of(recorded + i) : 1;
    if (threads > 1 && chain.rows >= MIN_PIECE_ROWS * threads * threads) {
      chain.pieces = threads * ((chain.rows + threads * MAX_PIECE_ROWS - 1) / (threads * MAX_PIECE_ROWS));
      nm_for(chain.pieces, 1, (int)threads, run_pieces, &chain);
    } else {
      chain.count = 1;
      chain.status = run(recorded + i, step);
    }
    if (chain.status != NM_OK) {
      *stopped_at = i + chain.stopped_at;
      return chain.status;
    }
    i += chain.count;
  }
  return NM_OK;
}
