// Linear layers with int8 weights: rows quantised as they come, products of 32 inputs summed exactly in int32, those
// sums scaled and added up in fp32 in a fixed order. All instruction sets give the same bits.
//
// A panel holds 64 columns of the output: four neighbouring inputs of a column are one 32-bit unit, and a vector is a
// unit of each of VW columns.
//
//   vnni      four products a lane and instruction. They are of unsigned by signed numbers: weights lie + 128, and a
//             group's sums start at -128 · Σ of the row's numbers
//   others    pairs of int16 (pmaddwd), which a unit splits into without leaving its lane: its even bytes, its odd ones;
//             rows are stored as int16 in that order. pmaddubsw would be faster, and saturates
//
// A gated layer's columns are its gate's and the gated ones in turns of 16, so that a panel holds both of a pair.
#include <stdlib.h>

#include "gate.h"
#include "linear_int8_rows.h"
#include "linear_work.h"

enum {
  TURN = 16,          // columns
  VECTORS = VW == 16 ? 4 : 2,
  TILE = VECTORS * VW,  // columns that are summed at once
  TILE_ROWS = 3,      // rows that are: twice their vectors, sums of a group and of all, fill the register file
  DEPTH_BLOCK = 128,  // groups of a panel that are gone through at once: 256 KB, to stay in the L2 cache
  QUANTIZE_GRAIN = 32 << 10,
  PANEL_GROUP_BYTES = PANEL * GROUP,
};

static int64_t groups_of(const struct nm_int8_layer *layer) { return (layer->inputs + GROUP - 1) / GROUP; }

static int64_t panels_of(const struct nm_int8_layer *layer) {
  const int64_t turns = (layer->outputs + TURN - 1) / TURN * (layer->gate == NM_NO_GATE ? 1 : 2);
  return (turns * TURN + PANEL - 1) / PANEL;
}

// ---------------------------------------------------------------- sums

#if !VNNI
// Σ of two int16 products in each 32-bit lane.
INLINE vi pairs(vi a, vi b) {
#if VW == 16
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif VW == 8 && defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif VW == 4 && defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((vi)((vu)a << 16) >> 16) * ((vi)((vu)b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

typedef int16_t vs __attribute__((vector_size(VW * 4)));

INLINE vi even_bytes(vi units) { return (vi)((vs)((vs)units << 8) >> 8); }

INLINE vi odd_bytes(vi units) { return (vi)((vs)units >> 8); }
#endif

INLINE vi broadcast(const void *from) {
  int32_t x;
  memcpy(&x, from, 4);
  return (vi){0} + x;
}

// acc[r][j] += Σ of a unit's four inputs; `numbers` are the first row's.
INLINE void add_unit(vi acc[TILE_ROWS][VECTORS], const char *numbers, int64_t row_bytes, const char *panel, int tile,
                     const int R) {
  vi column[VECTORS];
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j++) memcpy(&column[j], panel + UNIT * (tile + j * VW), sizeof(vi));
#if VNNI
  // Held in registers: the compiler would rather load a column again for each row.
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j++) __asm__("" : "+v"(column[j]));
#pragma GCC unroll 3
  for (int r = 0; r < R; r++) {
    const __m512i x = (__m512i)broadcast(numbers + r * row_bytes);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[r][j] = (vi)_mm512_dpbusd_epi32((__m512i)acc[r][j], (__m512i)column[j], x);
  }
#else
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j++) column[j] ^= (vi){0} + (int32_t)0x80808080;
#pragma GCC unroll 3
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[r][j] += pairs(broadcast(numbers + r * row_bytes), even_bytes(column[j]));
#pragma GCC unroll 3
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[r][j] += pairs(broadcast(numbers + r * row_bytes + 4), odd_bytes(column[j]));
#endif
}

// What is read next, fetched from memory meanwhile.
struct ahead {
  const char *at, *end;
  int lines;  // in a group of a tile
};

struct product {
  const struct nm_int8_call *call;
  struct int8_rows rows;
};

// sums[r][c] = what it was (`add`) or 0, + Σ of R rows from `row` on times a panel's columns, over `depth` groups from
// `group` on.
INLINE void tile_rows(float *sums, const struct int8_rows *rows, int64_t row, int64_t group, int depth,
                      const char *panel, struct ahead *ahead, const int R, const int add) {
  const int64_t row_bytes = rows->groups * GROUP_BYTES, at = row * rows->groups + group;
  for (int tile = 0; tile < PANEL; tile += TILE) {
    vf total[TILE_ROWS][VECTORS];
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++)
        total[r][j] = add ? load(sums, r * PANEL + tile + j * VW, 0) : splat(0.0f);
    const char *numbers = rows->numbers + at * GROUP_BYTES, *units = panel;
    for (int g = 0; g < depth; g++, numbers += GROUP_BYTES, units += PANEL_GROUP_BYTES) {
      for (int i = 0; i < ahead->lines; i++) __builtin_prefetch(ahead->at + 64 * i, 0, 2);
      ahead->at += 64 * ahead->lines;
      vi acc[TILE_ROWS][VECTORS];
#pragma GCC unroll 3
      for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++)
          acc[r][j] = VNNI ? broadcast(rows->starts + at + r * rows->groups + g) : (vi){0};
      for (int u = 0; u < GROUP_UNITS; u++)
        add_unit(acc, numbers + u * UNIT * INPUT_BYTES, row_bytes, units + u * PANEL * UNIT, tile, R);
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) {
        const vf scale = (vf)broadcast(rows->scales + at + r * rows->groups + g);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) total[r][j] += __builtin_convertvector(acc[r][j], vf) * scale;
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) store(sums, r * PANEL + tile + j * VW, total[r][j], 0);
  }
}

// One function for each height, so that each has its sums in registers.
typedef void (*tile_fn)(float *, const struct int8_rows *, int64_t, int64_t, int, const char *, struct ahead *);
#define TILE_FN(name, R, add)                                                                                        \
  static __attribute__((noinline)) void name(float *sums, const struct int8_rows *rows, int64_t row, int64_t group, \
                                             int depth, const char *panel, struct ahead *ahead) {                   \
    tile_rows(sums, rows, row, group, depth, panel, ahead, R, add);                                                  \
  }
#define TILE_FNS(R) TILE_FN(begin_##R, R, 0) TILE_FN(add_##R, R, 1)
TILE_FNS(1) TILE_FNS(2) TILE_FNS(3)
static const tile_fn tile_functions[TILE_ROWS][2] = {{begin_1, add_1}, {begin_2, add_2}, {begin_3, add_3}};

// ---------------------------------------------------------------- results

// Up to `left` outputs from `at`, which may be past the end of the row.
INLINE void put(void *out, int64_t at, vf x, int64_t left, const int bf16) {
  if (left >= VW && bf16) {
    const vh half = narrow_v(x);
    memcpy((uint16_t *)out + at, &half, sizeof half);
  } else if (left >= VW)
    store(out, at, x, bf16);
  else if (left > 0)
    store_tail(out, at, x, (int)left, bf16);
}

INLINE vf scaled(const struct nm_int8_layer *layer, const float *sums, int64_t column) {
  return load(sums, column % PANEL, 0) * load(layer->scale, column, 0) + load(layer->bias, column, 0);
}

INLINE void finish_rows(const struct product *product, const float *sums, int64_t panel, int64_t row, int64_t height,
                        const int gate, const int bf16) {
  const struct nm_int8_layer *layer = product->call->layer;
  for (int64_t r = row; r < row + height; r++, sums += PANEL) {
    const int64_t out = r * layer->outputs;
    if (gate == NM_NO_GATE) {
#pragma GCC unroll 4
      for (int64_t c = panel * PANEL; c < (panel + 1) * PANEL; c += VW)
        put(product->call->out, out + c, scaled(layer, sums, c), layer->outputs - c, bf16);
      continue;
    }
    for (int64_t c = panel * PANEL; c < (panel + 1) * PANEL; c += c % TURN + VW == TURN ? TURN + VW : VW) {
      vf g = scaled(layer, sums, c), up = scaled(layer, sums, c + TURN);
      // Rounded as two layers with a gate between them would: the same bits.
      if (bf16) g = widen_v(narrow_v(g)), up = widen_v(narrow_v(up));
      const int64_t feature = c / (2 * TURN) * TURN + c % TURN;
      put(product->call->out, out + feature, gated(g, up, gate), layer->outputs - feature, bf16);
    }
  }
}

static void finish(const struct product *product, const float *sums, int64_t panel, int64_t row, int64_t height) {
  const int gate = product->call->layer->gate, bf16 = product->call->dtype == NM_BF16;
  if (gate == NM_NO_GATE && bf16) finish_rows(product, sums, panel, row, height, NM_NO_GATE, 1);
  if (gate == NM_NO_GATE && !bf16) finish_rows(product, sums, panel, row, height, NM_NO_GATE, 0);
  if (gate == NM_SILU && bf16) finish_rows(product, sums, panel, row, height, NM_SILU, 1);
  if (gate == NM_SILU && !bf16) finish_rows(product, sums, panel, row, height, NM_SILU, 0);
  if (gate == NM_GELU_TANH && bf16) finish_rows(product, sums, panel, row, height, NM_GELU_TANH, 1);
  if (gate == NM_GELU_TANH && !bf16) finish_rows(product, sums, panel, row, height, NM_GELU_TANH, 0);
}

// Fetches the lines that a strip will write, while it is multiplied.
INLINE void fetch_results(const struct nm_int8_call *call, int64_t panel, int64_t row, int64_t height) {
  const struct nm_int8_layer *layer = call->layer;
  const int64_t size = call->dtype == NM_BF16 ? 2 : 4, width = layer->gate == NM_NO_GATE ? PANEL : PANEL / 2;
  const int64_t bytes = width * size;
  const char *at = (const char *)call->out + (row * layer->outputs + panel * width) * size;
  for (int64_t r = 0; r < height; r++, at += layer->outputs * size)
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + b, 1, 3);
}

static void multiply_run(const struct run *run, void *data) {
  const struct product *product = data;
  const struct nm_int8_layer *layer = product->call->layer;
  const int64_t groups = product->rows.groups, first_row = strip_row(run, run->first), strips = run->last - run->first;
  float sums[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t at = 0; at < groups; at += DEPTH_BLOCK) {
    const int64_t end = at + DEPTH_BLOCK < groups ? at + DEPTH_BLOCK : groups;
    const char *panel = (const char *)layer->panels + (run->panel * groups + at) * PANEL_GROUP_BYTES;
    // The next block: of this panel, or of the next one if it is ours.
    const int64_t left = end < groups ? groups - end : run->goes_on ? groups : 0;
    struct ahead ahead = {panel + (end - at) * PANEL_GROUP_BYTES, NULL, 0};
    ahead.end = ahead.at + (left < DEPTH_BLOCK ? left : DEPTH_BLOCK) * PANEL_GROUP_BYTES;
    const int64_t tiles = strips * (STRIP_ROWS / TILE_ROWS) * (PANEL / TILE);
    const int lines = (int)((PANEL_GROUP_BYTES / 64 + tiles - 1) / tiles);
    for (int64_t s = run->first; s < run->last; s++) {
      const int64_t row = strip_row(run, s), after = strip_row(run, s + 1);
      if (end == groups) fetch_results(product->call, run->panel, row, after - row);
      float *to = groups <= DEPTH_BLOCK ? sums : sums + (row - first_row) * PANEL;
      for (int64_t r = row; r < after; r += TILE_ROWS) {
        const int64_t height = after - r < TILE_ROWS ? after - r : TILE_ROWS;
        ahead.lines = ahead.at < ahead.end ? lines : 0;
        tile_functions[height - 1][at > 0](to + (r - row) * PANEL, &product->rows, r, at, (int)(end - at), panel,
                                           &ahead);
      }
      if (end == groups) finish(product, to, run->panel, row, after - row);
    }
  }
}

static void quantize_rows(int64_t first, int64_t last, void *data) {
  const struct product *product = data;
  const struct nm_int8_call *call = product->call;
  for (int64_t r = first; r < last; r++) {
    if (call->dtype == NM_BF16)
      quantize_row(&product->rows, r, call->x, r * call->x_stride, call->layer->inputs, 1);
    else
      quantize_row(&product->rows, r, call->x, r * call->x_stride, call->layer->inputs, 0);
  }
}

int nm_linear_int8(const struct nm_int8_call *call) {
  const struct nm_int8_layer *layer = call->layer;
  if (layer->inputs < 1 || layer->outputs < 1 || layer->gate < NM_NO_GATE || layer->gate > NM_GELU_TANH)
    return NM_UNSUPPORTED;
  if (call->rows <= 0) return NM_OK;
  const int64_t groups = groups_of(layer);
  char *memory = malloc((size_t)(call->rows * int8_row_bytes(groups)));
  if (memory == NULL) return NM_NO_MEMORY;
  struct product product = {call, int8_rows_at(memory, call->rows, groups)};
  nm_for(call->rows, QUANTIZE_GRAIN / (groups * GROUP) + 1, call->threads, quantize_rows, &product);
  for_strips(call->rows, panels_of(layer), call->threads, multiply_run, &product);
  free(memory);
  return NM_OK;
}
