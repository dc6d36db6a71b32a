// x Wᵀ + b with int8 weights: rows quantised as they come, products summed exactly in int32, one scaling in fp32.
//
// Weights lie in panels of 64 output channels: four neighbouring inputs of a channel are one 32-bit unit, and a vector
// holds a unit of each of VW channels. Sums are of integers: no result depends on the instruction set, on other rows
// or on how work was split.
//
//   vnni      four products a lane and instruction. They are of unsigned by signed numbers, so rows are stored + 128,
//             and sums start at -128 · Σ weights of the channel
//   others    pairs of int16 (pmaddwd), which a unit splits into without leaving its lane: its even bytes, its odd ones;
//             rows are stored as int16 in that order. pmaddubsw would be faster, and saturates
#include "nightmill.h"
#include "vec.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI 1
#else
#define VNNI 0
#endif

enum {
  PANEL = 64,              // channels in a panel
  UNIT = 4,                // inputs in a unit
  ROWS = VNNI ? 6 : 4,     // rows in a strip: what the register file holds
  VECTORS = VW == 16 ? 4 : 2,
  COLUMNS = VECTORS * VW,  // channels that a strip computes at once
  ROW_BYTES = VNNI ? 1 : 2,
  BLOCK_BYTES = 256 << 10, // of rows that stay in the second-level cache while panels pass
  QUANTIZE_GRAIN = 32 << 10,
  PREFETCH_BYTES = 2048,
};

#define LARGEST 127.0f
#define TINY 0x1p-100f
#define ROUNDER 12582912.0f  // 1.5 · 2^23: adding it leaves the nearest integer in the low bits

// ---------------------------------------------------------------- rows

struct rows {
  const struct nm_linear_int8 *call;
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

INLINE void store_units(void *row, int64_t index, vi q) {
#if VNNI
  _mm_storeu_si128((__m128i *)((uint8_t *)row + index), _mm512_cvtepi32_epi8((__m512i)(q + 128)));
#else
  int16_t *out = (int16_t *)row + index;
  for (int i = 0; i < VW; i += UNIT) {
    out[i] = (int16_t)q[i];
    out[i + 1] = (int16_t)q[i + 2];
    out[i + 2] = (int16_t)q[i + 1];
    out[i + 3] = (int16_t)q[i + 3];
  }
#endif
}

INLINE void quantize_row(const struct rows *rows, int64_t r, const int bf16) {
  const struct nm_linear_int8 *call = rows->call;
  const int64_t first = r * call->x_stride, n = call->in_features, width = rows->units * UNIT;
  const int32_t bits = largest_bits(call->x, first, n, bf16);
  float largest;
  memcpy(&largest, &bits, 4);
  const int finite = bits < 0x7f800000, sound = finite && largest >= TINY;
  call->row_scale[r] = sound ? largest / LARGEST : finite ? 0.0f : NAN;
  const vf factor = splat(sound ? LARGEST / largest : 0.0f);
  char *row = (char *)call->rows + r * width * ROW_BYTES;
  int64_t i = 0;
  for (; i < n; i += VW) {
    const int whole = i + VW <= n;
    const vf value = whole ? load(call->x, first + i, bf16) : load_tail(call->x, first + i, (int)(n - i), 0.0f, bf16);
    const vf scaled = sound ? value * factor : splat(0.0f);
    const vi q = (vi)(scaled + ROUNDER) - 0x4b400000;
    if (i + VW <= width) {
      store_units(row, i, q);
    } else {
      char tail[VW * ROW_BYTES];
      store_units(tail, 0, q);
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

// ---------------------------------------------------------------- products

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

// acc[r][j] += Σ of a strip of R rows times VECTORS vectors of a panel's channels.
INLINE void multiply(vi acc[ROWS][VECTORS], const char *rows, int64_t row_bytes, const char *panel, int64_t units,
                     const int R, const int prefetch) {
  for (int64_t u = 0; u < units; u++) {
    const char *from = panel + u * PANEL * UNIT;
    vi column[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      memcpy(&column[j], from + j * (int)sizeof(vi), sizeof(vi));
      if (prefetch) __builtin_prefetch(from + PREFETCH_BYTES + j * (int)sizeof(vi), 0, 3);
    }
#if VNNI
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const __m512i x = (__m512i)broadcast(rows + r * row_bytes + u * UNIT);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++)
        acc[r][j] = (vi)_mm512_dpbusd_epi32((__m512i)acc[r][j], x, (__m512i)column[j]);
    }
#else
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const vi x = broadcast(rows + r * row_bytes + u * UNIT * ROW_BYTES);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) acc[r][j] += pairs(x, even_bytes(column[j]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const vi x = broadcast(rows + r * row_bytes + u * UNIT * ROW_BYTES + 4);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) acc[r][j] += pairs(x, odd_bytes(column[j]));
    }
#endif
  }
}

struct product {
  const struct nm_linear_int8 *call;
  int64_t units, block_rows, num_panels;
};

INLINE void store_row(const struct nm_linear_int8 *call, int64_t r, int64_t column, const vi *acc, const int bf16) {
  const vf row_scale = splat(call->row_scale[r]);
  const int64_t out = r * call->out_features;
#pragma GCC unroll 4
  for (int j = 0; j < VECTORS; j++) {
    const int64_t c = column + j * VW;
    const vf factor = row_scale * load(call->scale, c, 0);
    const vf y = __builtin_convertvector(acc[j], vf) * factor + load(call->bias, c, 0);
    const int64_t left = call->out_features - c;
    if (left >= VW)
      store(call->out, out + c, y, bf16);
    else if (left > 0)
      store_tail(call->out, out + c, y, (int)left, bf16);
  }
}

INLINE void strip(const struct product *product, int64_t row, int64_t channel, const int R, const int prefetch,
                  const int bf16) {
  const struct nm_linear_int8 *call = product->call;
  const int64_t row_bytes = product->units * UNIT * ROW_BYTES;
  const char *rows = (const char *)call->rows + row * row_bytes;
  const char *panel = (const char *)call->panels + channel / PANEL * PANEL * UNIT * product->units;
  for (int c = 0; c < PANEL; c += COLUMNS) {
    vi acc[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) {
        if (VNNI)
          memcpy(&acc[r][j], call->start + channel + c + j * VW, sizeof(vi));
        else
          acc[r][j] = (vi){0};
      }
    multiply(acc, rows, row_bytes, panel + c * UNIT, product->units, R, prefetch);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) store_row(call, row + r, channel + c, acc[r], bf16);
  }
}

// The rows of a block against one panel.
INLINE void block(const struct product *product, int64_t row, int64_t end, int64_t channel, const int bf16) {
  int prefetch = 1;
  for (; row + ROWS <= end; row += ROWS, prefetch = 0) {
    if (prefetch)
      strip(product, row, channel, ROWS, 1, bf16);
    else
      strip(product, row, channel, ROWS, 0, bf16);
  }
  switch (end - row) {
    case 1: strip(product, row, channel, 1, 1, bf16); break;
    case 2: strip(product, row, channel, 2, 1, bf16); break;
    case 3: strip(product, row, channel, 3, 1, bf16); break;
#if VNNI
    case 4: strip(product, row, channel, 4, 1, bf16); break;
    case 5: strip(product, row, channel, 5, 1, bf16); break;
#endif
    default: break;
  }
}

static void multiply_blocks(int64_t first, int64_t last, void *data) {
  const struct product *product = data;
  for (int64_t i = first; i < last; i++) {
    const int64_t row = i / product->num_panels * product->block_rows, channel = i % product->num_panels * PANEL;
    const int64_t after = row + product->block_rows, rows = product->call->num_rows;
    const int64_t end = after < rows ? after : rows;
    if (product->call->dtype == NM_BF16)
      block(product, row, end, channel, 1);
    else
      block(product, row, end, channel, 0);
  }
}

// Rows of a block: few enough to stay in cache, and so few that threads end together.
static int64_t block_rows(int64_t rows, int64_t row_bytes, int64_t num_panels, int threads) {
  const int64_t fitting = BLOCK_BYTES / row_bytes;
  int64_t blocks = fitting > 0 ? (rows + fitting - 1) / fitting : rows;
  if (threads > 1 && rows >= 4 * ROWS)
    while (blocks * num_panels < 8 * threads && rows / (blocks + 1) >= 2 * ROWS) blocks++;
  if (blocks < 1) blocks = 1;
  const int64_t each = (rows + blocks - 1) / blocks;
  return (each + ROWS - 1) / ROWS * ROWS;
}

int64_t nm_int8_row_bytes(int64_t in_features) { return (in_features + UNIT - 1) / UNIT * UNIT * ROW_BYTES; }

int nm_linear_int8(const struct nm_linear_int8 *call) {
  if (call->num_rows <= 0) return NM_OK;
  if (call->in_features < 1 || call->in_features > NM_INT8_MAX_INPUTS || call->out_features < 1) return NM_UNSUPPORTED;
  const int64_t units = (call->in_features + UNIT - 1) / UNIT;
  struct rows rows = {call, units};
  nm_for(call->num_rows, QUANTIZE_GRAIN / (units * UNIT) + 1, call->threads, quantize_rows, &rows);
  struct product product = {.call = call, .units = units, .num_panels = (call->out_features + PANEL - 1) / PANEL};
  product.block_rows = block_rows(call->num_rows, units * UNIT * ROW_BYTES, product.num_panels, call->threads);
  const int64_t blocks = (call->num_rows + product.block_rows - 1) / product.block_rows;
  nm_for(blocks * product.num_panels, 1, call->threads, multiply_blocks, &product);
  return NM_OK;
}
