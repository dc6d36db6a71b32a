// Linear layers: x · Wᵀ + b with weights packed once, for any number of rows; gates on the way out.
#include "gate.h"
#include "linear_tile.h"

struct product_call {
  const struct nm_linear *layer;
  const char *x;
  char *out;
  int64_t x_stride, out_stride;  // bytes
};

static int64_t units_of(const struct nm_linear *c) { return c->dtype == NM_BF16 ? (c->inputs + 1) / 2 : c->inputs; }

static int64_t panels_of(const struct nm_linear *c) {
  return c->gate == NM_NO_GATE ? (c->outputs + PANEL - 1) / PANEL : (2 * c->outputs + PANEL - 1) / PANEL;
}

static int is_known(const struct nm_linear *c) {
  return (c->dtype == NM_F32 || c->dtype == NM_BF16) && c->inputs > 0 && c->outputs > 0 && c->gate >= NM_NO_GATE &&
         c->gate <= NM_GELU_TANH;
}

int64_t nm_linear_bytes(const struct nm_linear *c) {
  if (!is_known(c)) return -1;
  return panels_of(c) * PANEL * 4 * (units_of(c) + (c->has_bias ? 1 : 0));
}

// ---------------------------------------------------------------- packing

// Which row of the weight a panel's column holds; -1: none. A gate's columns alternate with the values it gates, a
// vector of each, so that both are in registers when they are multiplied.
INLINE int64_t row_of(const struct nm_linear *c, int64_t panel, int column) {
  if (c->gate == NM_NO_GATE) {
    const int64_t row = panel * PANEL + column;
    return row < c->outputs ? row : -1;
  }
  const int vector = column / VW;
  const int64_t feature = panel * (PANEL / 2) + vector / 2 * VW + column % VW;
  return feature >= c->outputs ? -1 : vector % 2 ? c->outputs + feature : feature;
}

enum { PACK_UNITS = 64, PACK_AHEAD = 8 };

struct packing {
  const struct nm_linear *layer;
  const char *weight, *bias;
  int64_t stride;  // bytes
  char *packed;
};

static float bias_at(const struct packing *p, int64_t row) {
  if (row < 0) return 0.0f;
  return p->layer->dtype == NM_BF16 ? widen(((const uint16_t *)p->bias)[row]) : ((const float *)p->bias)[row];
}

static void pack_panels(int64_t first, int64_t last, void *data) {
  const struct packing *p = data;
  const struct nm_linear *c = p->layer;
  const int64_t units = units_of(c), whole = c->dtype == NM_BF16 ? c->inputs / 2 : c->inputs;
  static const uint32_t nothing[PACK_UNITS];
  for (int64_t panel = first; panel < last; panel++) {
    uint32_t *to = (uint32_t *)p->packed + panel * PANEL * units;
    // In blocks of units, which stay in the L1 cache while column after column is written into them.
    for (int64_t at = 0; at < whole; at += PACK_UNITS) {
      const int64_t end = at + PACK_UNITS < whole ? at + PACK_UNITS : whole;
      for (int column = 0; column < PANEL; column++) {
        const int64_t row = row_of(c, panel, column);
        const char *from = row < 0 ? (const char *)nothing : p->weight + row * p->stride + 4 * at;
        if (row >= 0)  // of a few bytes of each row no machine sees a pattern
          for (int i = 0; i < 4 * PACK_UNITS; i += 64) __builtin_prefetch(from + PACK_AHEAD * p->stride + i);
        uint32_t *put = to + at * PANEL + column;
        for (int64_t d = 0; d < end - at; d++) memcpy(put + d * PANEL, from + 4 * d, 4);
      }
    }
    for (int column = 0; column < PANEL; column++) {
      const int64_t row = row_of(c, panel, column);
      if (whole < units) {
        uint16_t half = 0;
        if (row >= 0) memcpy(&half, p->weight + row * p->stride + 4 * whole, 2);
        to[whole * PANEL + column] = half;
      }
      if (c->has_bias)
        ((float *)p->packed)[panels_of(c) * PANEL * units + panel * PANEL + column] = bias_at(p, row);
    }
  }
}

int nm_linear_pack(const struct nm_linear *c, const void *weight, int64_t stride, const void *bias, int threads) {
  if (!is_known(c) || !c->has_bias != !bias) return NM_UNSUPPORTED;
  struct packing packing = {c, weight, bias, stride * (c->dtype == NM_BF16 ? 2 : 4), c->packed};
  nm_for(panels_of(c), 1, threads, pack_panels, &packing);
  return NM_OK;
}

// ---------------------------------------------------------------- multiplying

// Up to `left` columns from `at`, which may be past the end of the row.
INLINE void put(char *row, int64_t at, vf x, int64_t left, const int bf16) {
  if (left >= VW) {
    if (bf16) {
      const vh half = narrow_v(x);
      memcpy(row + 2 * at, &half, sizeof half);
    } else {
      memcpy(row + 4 * at, &x, sizeof x);
    }
  } else if (left > 0) {
    store_tail(row, at, x, (int)left, bf16);
  }
}

// Sums of `height` rows and one panel's columns, on their way out.
INLINE void finish(const struct product_call *call, const float *sums, int64_t panel, int64_t row, int height,
                   const int bf16, const int gate) {
  const struct nm_linear *c = call->layer;
  const float *bias = (const float *)c->packed + panels_of(c) * PANEL * units_of(c) + panel * PANEL;
  const int64_t column = gate == NM_NO_GATE ? panel * PANEL : panel * (PANEL / 2), left = c->outputs - column;
  for (int r = 0; r < height; r++, sums += PANEL) {
    char *out = call->out + (row + r) * call->out_stride;
    vf x[PANEL / VW];
    for (int j = 0; j < PANEL / VW; j++) {
      x[j] = load(sums, j * VW, 0);
      if (c->has_bias) x[j] += load(bias, j * VW, 0);
    }
    if (gate == NM_NO_GATE) {
      for (int j = 0; j < PANEL / VW; j++) put(out, column + j * VW, x[j], left - j * VW, bf16);
      continue;
    }
    for (int j = 0; j < PANEL / VW / 2; j++) {
      // Rounded as two layers with a gate between them would: the same bits.
      const vf g = bf16 ? widen_v(narrow_v(x[2 * j])) : x[2 * j];
      const vf up = bf16 ? widen_v(narrow_v(x[2 * j + 1])) : x[2 * j + 1];
      put(out, column + j * VW, gated(g, up, gate), left - j * VW, bf16);
    }
  }
}

static void finish_strip(const struct product_call *call, const float *sums, int64_t panel, int64_t row, int height) {
  const int bf16 = call->layer->dtype == NM_BF16, gate = call->layer->gate;
  if (bf16 && gate == NM_NO_GATE) finish(call, sums, panel, row, height, 1, NM_NO_GATE);
  if (bf16 && gate == NM_SILU) finish(call, sums, panel, row, height, 1, NM_SILU);
  if (bf16 && gate == NM_GELU_TANH) finish(call, sums, panel, row, height, 1, NM_GELU_TANH);
  if (!bf16 && gate == NM_NO_GATE) finish(call, sums, panel, row, height, 0, NM_NO_GATE);
  if (!bf16 && gate == NM_SILU) finish(call, sums, panel, row, height, 0, NM_SILU);
  if (!bf16 && gate == NM_GELU_TANH) finish(call, sums, panel, row, height, 0, NM_GELU_TANH);
}

struct block {
  int64_t first, depth;    // units
  int is_first, has_tail;  // the tail: half a unit, after the others
};

INLINE void strip(const struct product_call *call, const struct block *block, int64_t panel, int64_t row, float *sums,
                  struct ahead *ahead, const int R, const int kind) {
  const struct nm_linear *c = call->layer;
  const char *x = call->x + row * call->x_stride + 4 * block->first;
  const uint32_t *weights = (const uint32_t *)c->packed + (panel * units_of(c) + block->first) * PANEL;
  for (int t = 0; t < PANEL; t += TILE) {
    vf acc[STRIP_ROWS][TILE_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; j++)
        acc[r][j] = block->is_first ? splat(0.0f) : load(sums, r * PANEL + t + j * VW, 0);
    multiply_units(acc, x, call->x_stride, weights + t, (int)block->depth, ahead, R, kind);
    if (block->has_tail) {
      uint32_t units[STRIP_ROWS];
      for (int r = 0; r < R; r++) {
        uint16_t half;
        memcpy(&half, x + r * call->x_stride + 4 * block->depth, 2);
        units[r] = half;
      }
      add_unit(acc, units, weights + t + block->depth * PANEL, R, kind);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; j++) store(sums, r * PANEL + t + j * VW, acc[r][j], 0);
  }
}

// The lines that finish_strip will write, brought in while the strip is multiplied: 5 % at 512 rows.
static void fetch_outputs(const struct product_call *call, int64_t panel, int64_t row, int height) {
  const int64_t bytes = (call->layer->gate == NM_NO_GATE ? PANEL : PANEL / 2) * (call->layer->dtype == NM_BF16 ? 2 : 4);
  const char *at = call->out + row * call->out_stride + panel * bytes;
  for (int r = 0; r < height; r++, at += call->out_stride)
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1, 3);
}

// One function for each height, so that each has its sums in registers.
#define STRIP(R, kind)                                                                                               \
  static __attribute__((noinline)) void strip_##R##_##kind(const struct product_call *call, const struct block *b,   \
                                                           int64_t panel, int64_t row, float *sums,                  \
                                                           struct ahead *ahead) {                                    \
    strip(call, b, panel, row, sums, ahead, R, kind);                                                                \
  }
#define STRIPS(kind) STRIP(1, kind) STRIP(2, kind) STRIP(3, kind) STRIP(4, kind) STRIP(5, kind) STRIP(6, kind)
STRIPS(F32)
#if defined(__AVX512BF16__)
STRIPS(PAIR)
#define STRIP_TABLE(R) {strip_##R##_F32, strip_##R##_PAIR}
#else
STRIPS(SPLIT)
#define STRIP_TABLE(R) {strip_##R##_F32, strip_##R##_SPLIT}
#endif

typedef void (*strip_fn)(const struct product_call *, const struct block *, int64_t, int64_t, float *, struct ahead *);
static const strip_fn strip_functions[STRIP_ROWS][2] = {STRIP_TABLE(1), STRIP_TABLE(2), STRIP_TABLE(3),
                                                        STRIP_TABLE(4), STRIP_TABLE(5), STRIP_TABLE(6)};

static void multiply_run(const struct run *run, void *data) {
  const struct product_call *call = data;
  const struct nm_linear *c = call->layer;
  const int64_t units = units_of(c), whole = c->dtype == NM_BF16 ? c->inputs / 2 : c->inputs;
  float sums[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
  const int64_t first_row = strip_row(run, run->first), strips = run->last - run->first;
  for (int64_t at = 0; at < units; at += DEPTH_BLOCK) {
    const int64_t end = at + DEPTH_BLOCK < units ? at + DEPTH_BLOCK : units;
    const struct block block = {at, (end < whole ? end : whole) - at, at == 0, end > whole};
    struct ahead ahead = {(const char *)c->packed + (run->panel * units + end) * PANEL * 4, NULL, 0};
    // The next block: of this panel, or of the next one if it is ours.
    const int64_t next = end < units ? (units - end < DEPTH_BLOCK ? units - end : DEPTH_BLOCK)
                         : run->goes_on ? (units < DEPTH_BLOCK ? units : DEPTH_BLOCK) : 0;
    ahead.end = ahead.at + next * PANEL * 4;
    const int lines = (int)((UNROLL * 4 * TILE / PANEL + strips - 1) / strips);
    for (int64_t s = run->first; s < run->last; s++) {
      const int64_t row = strip_row(run, s), height = strip_row(run, s + 1) - row;
      ahead.lines = ahead.at < ahead.end ? lines : 0;
      float *to = units <= DEPTH_BLOCK ? sums : sums + (row - first_row) * PANEL;
      if (end == units) fetch_outputs(call, run->panel, row, (int)height);
      strip_functions[height - 1][c->dtype](call, &block, run->panel, row, to, &ahead);
      if (end == units) finish_strip(call, to, run->panel, row, (int)height);
    }
  }
}

int nm_linear(const struct nm_linear *c, const void *x, int64_t x_stride, void *out, int64_t out_stride, int64_t rows,
              int threads) {
  const int64_t size = c->dtype == NM_BF16 ? 2 : 4;
  if (!is_known(c)) return NM_UNSUPPORTED;
  struct product_call call = {c, x, out, x_stride * size, out_stride * size};
  for_strips(rows, panels_of(c), threads, multiply_run, &call);
  return NM_OK;
}

// ---------------------------------------------------------------- rows of the weight, out of the panels

struct picking {
  const struct nm_linear *layer;
  const void *rows;
  char *out;
  int wide;
};

static int64_t picked(const struct picking *p, int64_t i) {
  return p->wide ? ((const int64_t *)p->rows)[i] : ((const int32_t *)p->rows)[i];
}

static void pick_rows(int64_t first, int64_t last, void *data) {
  const struct picking *p = data;
  const struct nm_linear *c = p->layer;
  const int64_t units = units_of(c), whole = c->dtype == NM_BF16 ? c->inputs / 2 : c->inputs;
  const int64_t bytes = c->inputs * (c->dtype == NM_BF16 ? 2 : 4);
  for (int64_t i = first; i < last; i++) {
    const int64_t row = picked(p, i);
    const uint32_t *from = (const uint32_t *)c->packed + row / PANEL * PANEL * units + row % PANEL;
    char *to = p->out + i * bytes;
    for (int64_t d = 0; d < whole; d++) memcpy(to + 4 * d, from + d * PANEL, 4);
    if (whole < units) memcpy(to + 4 * whole, from + whole * PANEL, 2);
  }
}

int nm_linear_rows(const struct nm_linear *c, const void *rows, int64_t count, int wide_rows, void *out, int threads) {
  if (!is_known(c) || c->gate != NM_NO_GATE) return NM_UNSUPPORTED;
  struct picking picking = {c, rows, out, wide_rows};
  for (int64_t i = 0; i < count; i++)
    if (picked(&picking, i) < 0 || picked(&picking, i) >= c->outputs) return NM_BAD_ROW;
  nm_for(count, 8, threads, pick_rows, &picking);
  return NM_OK;
}
