// Linear layers with int8 weights: rows quantised as they come, products summed exactly in int32, one scaling in fp32.
//
// A panel holds 64 columns of the output: four neighbouring inputs of a column are one 32-bit unit, and a vector is a
// unit of each of VW columns. Sums are of integers: they do not depend on the instruction set, on the other rows or on
// how work was split.
//
//   vnni      four products a lane and instruction. They are of unsigned by signed numbers, so rows are stored + 128,
//             and sums start at -128 · Σ weights of the column
//   others    pairs of int16 (pmaddwd), which a unit splits into without leaving its lane: its even bytes, its odd ones;
//             rows are stored as int16 in that order. pmaddubsw would be faster, and saturates
//
// A gated layer's columns are its gate's and the gated ones in turns of 16, so that a tile holds both of a pair.
#include <stdlib.h>

#include "gate.h"
#include "linear_work.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI 1
#else
#define VNNI 0
#endif

enum {
  UNIT = 4,                       // inputs in a unit
  TURN = 16,                      // columns
  VECTORS = VW == 16 ? 4 : 2,
  TILE = VECTORS * VW,            // columns that are summed at once
  TILE_ROWS = VNNI ? STRIP_ROWS : 3,  // rows that are summed at once: what the register file holds
  ROW_BYTES = VNNI ? 1 : 2,       // of an input
  DEPTH_BLOCK = 1024,             // units of a panel that are gone through at once: 256 KB, to stay in the L2 cache
  UNROLL = 4,
  QUANTIZE_GRAIN = 32 << 10,
};

#define LARGEST 127.0f
#define TINY 0x1p-100f
#define ROUNDER 12582912.0f  // 1.5 · 2^23: adding it leaves the nearest integer in the low bits

INLINE int64_t units_of(const struct nm_int8_layer *layer) { return (layer->inputs + UNIT - 1) / UNIT; }

INLINE int64_t columns_of(const struct nm_int8_layer *layer) {
  return layer->gate == NM_NO_GATE ? layer->outputs : (layer->outputs + TURN - 1) / TURN * TURN * 2;
}

// ---------------------------------------------------------------- rows

struct rows {
  const struct nm_int8_call *call;
  char *quantized;
  float *scale;
  int64_t units;  // of a row
};

// Bits of the largest magnitude: as integers they order as the magnitudes do, infinities and NaN above all.
INLINE int32_t largest_bits(const void *x, int64_t first, int64_t n, const int bf16) {
  const vi magnitude = (vi){0} + 0x7fffffff;
  vi most = {0};
  for (int64_t i = 0; i < n; i += VW) {
    const vf value = i + VW <= n ? load(x, first + i, bf16) : load_tail(x, first + i, (int)(n - i), 0.0f, bf16);
    const vi bits = (vi)value & magnitude;
    const vi above = bits > most;
    most = (bits & above) | (most & ~above);
  }
  int32_t out = 0;
  for (int i = 0; i < VW; i++) out = most[i] > out ? most[i] : out;
  return out;
}

INLINE void store_units(char *row, vi q) {
#if VNNI
  _mm_storeu_si128((__m128i *)row, _mm512_cvtepi32_epi8((__m512i)(q + 128)));
#else
  int16_t out[VW];
  for (int i = 0; i < VW; i += UNIT) {
    out[i] = (int16_t)q[i];
    out[i + 1] = (int16_t)q[i + 2];
    out[i + 2] = (int16_t)q[i + 1];
    out[i + 3] = (int16_t)q[i + 3];
  }
  memcpy(row, out, sizeof out);
#endif
}

INLINE void quantize_row(const struct rows *rows, int64_t r, const int bf16) {
  const struct nm_int8_call *call = rows->call;
  const int64_t first = r * call->x_stride, n = call->layer->inputs, width = rows->units * UNIT;
  const int32_t bits = largest_bits(call->x, first, n, bf16);
  float largest;
  memcpy(&largest, &bits, 4);
  const int finite = bits < 0x7f800000, sound = finite && largest >= TINY;
  rows->scale[r] = sound ? largest / LARGEST : finite ? 0.0f : NAN;
  const vf factor = splat(sound ? LARGEST / largest : 0.0f);
  char *row = rows->quantized + r * width * ROW_BYTES;
  for (int64_t i = 0; i < n; i += VW) {
    const int whole = i + VW <= n;
    const vf value = whole ? load(call->x, first + i, bf16) : load_tail(call->x, first + i, (int)(n - i), 0.0f, bf16);
    const vf scaled = sound ? value * factor : splat(0.0f);  // 0 · NaN is NaN
    const vi q = (vi)(scaled + ROUNDER) - 0x4b400000;
    if (i + VW <= width) {
      store_units(row + i * ROW_BYTES, q);
    } else {
      char tail[VW * ROW_BYTES];
      store_units(tail, q);
      memcpy(row + i * ROW_BYTES, tail, (size_t)(width - i) * ROW_BYTES);
    }
  }
}

static void quantize_rows(int64_t first, int64_t last, void *data) {
  const struct rows *rows = data;
  for (int64_t r = first; r < last; r++) {
    if (rows->call->dtype == NM_BF16)
      quantize_row(rows, r, 1);
    else
      quantize_row(rows, r, 0);
  }
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

INLINE vi broadcast(const char *from) {
  int32_t x;
  memcpy(&x, from, 4);
  return (vi){0} + x;
}

// Where a tile's vector j lies among the panel's columns. Two vectors of a tile are one turn apart.
INLINE int place(int tile, int j) {
  return VW == 16 ? tile + j * VW : tile / (2 * TURN) * 2 * TURN + tile % (2 * TURN) / 2 + j * TURN;
}

INLINE void add_unit(vi acc[TILE_ROWS][VECTORS], const char *rows, int64_t row_bytes, const char *panel, int tile,
                     const int R) {
  vi column[VECTORS];
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j++) memcpy(&column[j], panel + UNIT * place(tile, j), sizeof(vi));
#if VNNI
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
    const __m512i x = (__m512i)broadcast(rows + r * row_bytes);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[r][j] = (vi)_mm512_dpbusd_epi32((__m512i)acc[r][j], x, (__m512i)column[j]);
  }
#else
#pragma GCC unroll 3
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[r][j] += pairs(broadcast(rows + r * row_bytes), even_bytes(column[j]));
#pragma GCC unroll 3
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[r][j] += pairs(broadcast(rows + r * row_bytes + 4), odd_bytes(column[j]));
#endif
}

// What is read next, fetched from memory meanwhile.
struct ahead {
  const char *at, *end;
  int lines;  // in UNROLL units of a tile
};

// sums[r][c] = start[c] or, `add`, what it was, + Σ of R rows times a panel's columns.
INLINE void tile_rows(int32_t *sums, const int32_t *start, const char *rows, int64_t row_bytes, const char *panel,
                      int depth, struct ahead *ahead, const int R, const int add) {
  for (int tile = 0; tile < PANEL; tile += TILE) {
    vi acc[TILE_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) {
        acc[r][j] = (vi){0};
        if (add)
          memcpy(&acc[r][j], sums + r * PANEL + place(tile, j), sizeof(vi));
        else if (VNNI)
          memcpy(&acc[r][j], start + place(tile, j), sizeof(vi));
      }
    int u = 0;
    for (; u + UNROLL <= depth; u += UNROLL) {
      for (int i = 0; i < ahead->lines; i++) __builtin_prefetch(ahead->at + 64 * i, 0, 2);
      ahead->at += 64 * ahead->lines;
#pragma GCC unroll 4
      for (int i = 0; i < UNROLL; i++)
        add_unit(acc, rows + (u + i) * UNIT * ROW_BYTES, row_bytes, panel + (u + i) * PANEL * UNIT, tile, R);
    }
    for (; u < depth; u++) add_unit(acc, rows + u * UNIT * ROW_BYTES, row_bytes, panel + u * PANEL * UNIT, tile, R);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) memcpy(sums + r * PANEL + place(tile, j), &acc[r][j], sizeof(vi));
  }
}

// One function for each height, so that each has its sums in registers.
typedef void (*tile_fn)(int32_t *, const int32_t *, const char *, int64_t, const char *, int, struct ahead *);
#define TILE_FN(name, R, add)                                                                                  \
  static __attribute__((noinline)) void name(int32_t *sums, const int32_t *start, const char *rows, int64_t b, \
                                             const char *panel, int depth, struct ahead *ahead) {              \
    tile_rows(sums, start, rows, b, panel, depth, ahead, R, add);                                              \
  }
#define TILE_FNS(R) TILE_FN(start_##R, R, 0) TILE_FN(add_##R, R, 1)
TILE_FNS(1) TILE_FNS(2) TILE_FNS(3)
#if VNNI
TILE_FNS(4) TILE_FNS(5) TILE_FNS(6)
#endif
static const tile_fn tile_functions[TILE_ROWS][2] = {
    {start_1, add_1}, {start_2, add_2}, {start_3, add_3},
#if VNNI
    {start_4, add_4}, {start_5, add_5}, {start_6, add_6},
#endif
};

// ---------------------------------------------------------------- results

struct product {
  const struct nm_int8_call *call;
  const char *quantized;
  const float *row_scale;
  int64_t units;
};

// Up to `left` outputs from `at`, which may be past the end of the row.
INLINE void put(void *out, int64_t at, vf x, int64_t left, const int bf16) {
  if (left >= VW)
    store(out, at, x, bf16);
  else if (left > 0)
    store_tail(out, at, x, (int)left, bf16);
}

INLINE vf scaled(const struct nm_int8_layer *layer, const int32_t *sums, vf row_scale, int64_t column) {
  vi sum;
  memcpy(&sum, sums + column % PANEL, sizeof sum);
  const vf factor = row_scale * load(layer->scale, column, 0);
  return __builtin_convertvector(sum, vf) * factor + load(layer->bias, column, 0);
}

INLINE void finish_rows(const struct product *product, const int32_t *sums, int64_t panel, int64_t row, int64_t height,
                        const int gate, const int bf16) {
  const struct nm_int8_layer *layer = product->call->layer;
  for (int64_t r = row; r < row + height; r++, sums += PANEL) {
    const vf row_scale = splat(product->row_scale[r]);
    const int64_t out = r * layer->outputs;
    if (gate == NM_NO_GATE) {
#pragma GCC unroll 4
      for (int64_t c = panel * PANEL; c < (panel + 1) * PANEL; c += VW)
        put(product->call->out, out + c, scaled(layer, sums, row_scale, c), layer->outputs - c, bf16);
      continue;
    }
    for (int64_t c = panel * PANEL; c < (panel + 1) * PANEL; c += c % TURN + VW == TURN ? TURN + VW : VW) {
      vf g = scaled(layer, sums, row_scale, c), up = scaled(layer, sums, row_scale, c + TURN);
      // Rounded as two layers with a gate between them would: the same bits.
      if (bf16) g = widen_v(narrow_v(g)), up = widen_v(narrow_v(up));
      const int64_t feature = c / (2 * TURN) * TURN + c % TURN;
      put(product->call->out, out + feature, gated(g, up, gate), layer->outputs - feature, bf16);
    }
  }
}

static void finish(const struct product *product, const int32_t *sums, int64_t panel, int64_t row, int64_t height) {
  const int gate = product->call->layer->gate, bf16 = product->call->dtype == NM_BF16;
  if (gate == NM_NO_GATE && bf16) finish_rows(product, sums, panel, row, height, NM_NO_GATE, 1);
  if (gate == NM_NO_GATE && !bf16) finish_rows(product, sums, panel, row, height, NM_NO_GATE, 0);
  if (gate == NM_SILU && bf16) finish_rows(product, sums, panel, row, height, NM_SILU, 1);
  if (gate == NM_SILU && !bf16) finish_rows(product, sums, panel, row, height, NM_SILU, 0);
  if (gate == NM_GELU_TANH && bf16) finish_rows(product, sums, panel, row, height, NM_GELU_TANH, 1);
  if (gate == NM_GELU_TANH && !bf16) finish_rows(product, sums, panel, row, height, NM_GELU_TANH, 0);
}

static void multiply_run(const struct run *run, void *data) {
  const struct product *product = data;
  const struct nm_int8_layer *layer = product->call->layer;
  const int64_t units = product->units, row_bytes = units * UNIT * ROW_BYTES, strips = run->last - run->first;
  int32_t sums[CHUNK_ROWS * PANEL] __attribute__((aligned(64)));
  const int64_t first_row = strip_row(run, run->first);
  for (int64_t at = 0; at < units; at += DEPTH_BLOCK) {
    const int64_t end = at + DEPTH_BLOCK < units ? at + DEPTH_BLOCK : units;
    const char *panel = (const char *)layer->panels + (run->panel * units + at) * PANEL * UNIT;
    // The next block: of this panel, or of the next one if it is ours.
    const int64_t left = end < units ? units - end : run->goes_on ? units : 0;
    struct ahead ahead = {panel + (end - at) * PANEL * UNIT, NULL, 0};
    ahead.end = ahead.at + (left < DEPTH_BLOCK ? left : DEPTH_BLOCK) * PANEL * UNIT;
    const int64_t tiles = strips * (STRIP_ROWS / TILE_ROWS) * (PANEL / TILE);
    const int lines = (int)((UNROLL * PANEL * UNIT / 64 + tiles - 1) / tiles);
    for (int64_t s = run->first; s < run->last; s++) {
      const int64_t row = strip_row(run, s), after = strip_row(run, s + 1);
      int32_t *to = units <= DEPTH_BLOCK ? sums : sums + (row - first_row) * PANEL;
      for (int64_t r = row; r < after; r += TILE_ROWS) {
        const int height = (int)(after - r < TILE_ROWS ? after - r : TILE_ROWS);
        ahead.lines = ahead.at < ahead.end ? lines : 0;
        const char *rows = product->quantized + r * row_bytes + at * UNIT * ROW_BYTES;
        tile_functions[height - 1][at > 0](to + (r - row) * PANEL, layer->start + run->panel * PANEL, rows, row_bytes,
                                           panel, (int)(end - at), &ahead);
      }
      if (end == units) finish(product, to, run->panel, row, after - row);
    }
  }
}

int nm_linear_int8(const struct nm_int8_call *call) {
  const struct nm_int8_layer *layer = call->layer;
  if (layer->inputs < 1 || layer->inputs > NM_INT8_MAX_INPUTS || layer->outputs < 1) return NM_UNSUPPORTED;
  if (layer->gate < NM_NO_GATE || layer->gate > NM_GELU_TANH) return NM_UNSUPPORTED;
  if (call->rows <= 0) return NM_OK;
  const int64_t units = units_of(layer), bytes = call->rows * units * UNIT * ROW_BYTES;
  char *quantized = malloc((size_t)(bytes + call->rows * (int64_t)sizeof(float)));
  if (quantized == NULL) return NM_NO_MEMORY;
  float *scale = (float *)(quantized + bytes);
  struct rows rows = {call, quantized, scale, units};
  nm_for(call->rows, QUANTIZE_GRAIN / (units * UNIT) + 1, call->threads, quantize_rows, &rows);
  struct product product = {call, quantized, scale, units};
  for_strips(call->rows, (columns_of(layer) + PANEL - 1) / PANEL, call->threads, multiply_run, &product);
  free(quantized);
  return NM_OK;
}
