// The inner products of attention: a strip of rows against a block of keys, in registers.
//
// Operands are 32-bit units: one fp32, or (pair) two neighbouring bf16 that one instruction multiplies and sums. Rows
// lie unit after unit; the block is packed with the summed dimension outermost: a vector holds one unit of VW columns.
#ifndef NIGHTMILL_PRODUCT_H
#define NIGHTMILL_PRODUCT_H

#include "vec.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAVE_PAIR 1
#else
#define HAVE_PAIR 0
#endif

enum {
  KEYS = 64,          // keys in a block
  STRIP = 6,          // rows in a strip: with PANEL_VECTORS accumulators each they fill the register file
  MAX_HEAD_DIM = 256,
#if VW == 16
  PANEL_VECTORS = 4,
#else
  PANEL_VECTORS = 2,
#endif
};

typedef uint32_t unit;

// acc[r][j] += Σ_d a[r][d] · b[d][j] for R rows and N vectors of columns; R, N and pair are constants.
INLINE void multiply(vf acc[STRIP][PANEL_VECTORS], const unit *a, int64_t a_stride, const unit *b, int64_t b_stride,
                     int depth, const int R, const int N, const int pair) {
  for (int d = 0; d < depth; d++) {
    vf column[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) memcpy(&column[j], b + d * b_stride + j * VW, sizeof(vf));
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
#if HAVE_PAIR
      if (pair) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r * a_stride + d]);
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) acc[r][j] = (vf)_mm512_dpbf16_ps((__m512)acc[r][j], x, (__m512bh)column[j]);
        continue;
      }
#endif
      (void)pair;
      float x;
      memcpy(&x, a + r * a_stride + d, 4);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) acc[r][j] = fma_v(splat(x), column[j], acc[r][j]);
    }
  }
}

// out[r][0:N·VW] (+)= a · b, `add` telling whether out already holds a sum.
INLINE void panel(float *out, int64_t out_stride, const unit *a, int64_t a_stride, const unit *b, int64_t b_stride,
                  int depth, const int R, const int N, const int add, const int pair) {
  vf acc[STRIP][PANEL_VECTORS];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) acc[r][j] = add ? load(out + r * out_stride, j * VW, 0) : splat(0.0f);
  multiply(acc, a, a_stride, b, b_stride, depth, R, N, pair);
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(out + r * out_stride, j * VW, acc[r][j], 0);
}

// All columns: full panels, then what is left in smaller ones. `columns` is a multiple of 16.
INLINE void product(float *out, int64_t out_stride, const unit *a, int64_t a_stride, const unit *b, int64_t b_stride,
                    int depth, int columns, const int R, const int add, const int pair) {
  int c = 0;
  for (; c + PANEL_VECTORS * VW <= columns; c += PANEL_VECTORS * VW)
    panel(out + c, out_stride, a, a_stride, b + c, b_stride, depth, R, PANEL_VECTORS, add, pair);
#if VW == 16
  if (columns - c >= 2 * VW) {
    panel(out + c, out_stride, a, a_stride, b + c, b_stride, depth, R, 2, add, pair);
    c += 2 * VW;
  }
  if (c < columns) panel(out + c, out_stride, a, a_stride, b + c, b_stride, depth, R, 1, add, pair);
#endif
}

// ---------------------------------------------------------------- packing

// Four rows of four units, transposed. Split: two bf16 become two fp32, each in its own row of the block.
INLINE void transpose4(const unit *rows, int64_t stride, unit *out, int64_t out_stride, const int split) {
  typedef uint32_t u4 __attribute__((vector_size(16)));
  u4 a, b, c, d;
  memcpy(&a, rows, 16);
  memcpy(&b, rows + stride, 16);
  memcpy(&c, rows + 2 * stride, 16);
  memcpy(&d, rows + 3 * stride, 16);
#if defined(__clang__)
#define SHUFFLE4(x, y, i0, i1, i2, i3) __builtin_shufflevector(x, y, i0, i1, i2, i3)
#else
#define SHUFFLE4(x, y, i0, i1, i2, i3) __builtin_shuffle(x, y, (u4){i0, i1, i2, i3})
#endif
  const u4 ab_low = SHUFFLE4(a, b, 0, 4, 1, 5), ab_high = SHUFFLE4(a, b, 2, 6, 3, 7);
  const u4 cd_low = SHUFFLE4(c, d, 0, 4, 1, 5), cd_high = SHUFFLE4(c, d, 2, 6, 3, 7);
  const u4 turned[4] = {SHUFFLE4(ab_low, cd_low, 0, 1, 4, 5), SHUFFLE4(ab_low, cd_low, 2, 3, 6, 7),
                        SHUFFLE4(ab_high, cd_high, 0, 1, 4, 5), SHUFFLE4(ab_high, cd_high, 2, 3, 6, 7)};
  for (int i = 0; i < 4; i++) {
    if (split) {
      const u4 even = turned[i] << 16, odd = turned[i] & 0xffff0000u;
      memcpy(out + (2 * i) * out_stride, &even, 16);
      memcpy(out + (2 * i + 1) * out_stride, &odd, 16);
    } else {
      memcpy(out + i * out_stride, &turned[i], 16);
    }
  }
}

#if defined(__AVX512F__)
// Sixteen rows of `width` units, 16 or 8, transposed.
INLINE void transpose16(const unit *rows, int64_t stride, const int width, unit *out, int64_t out_stride,
                        const int split) {
  const __mmask16 real = (__mmask16)((1u << width) - 1u);
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) x[i] = _mm512_maskz_loadu_epi32(real, rows + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  }
  // x[4g + c] holds column c of each 128-bit lane for rows 4g..4g+3: lanes and row groups trade places.
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512i low01 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xee);
    const __m512i low23 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xee);
    y[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    y[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    y[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    y[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < width; i++) {
    if (split) {
      _mm512_storeu_si512(out + (2 * i) * out_stride, _mm512_slli_epi32(y[i], 16));
      _mm512_storeu_si512(out + (2 * i + 1) * out_stride, _mm512_and_si512(y[i], _mm512_set1_epi32((int)0xffff0000)));
    } else {
      _mm512_storeu_si512(out + i * out_stride, y[i]);
    }
  }
}
#endif

// K of 16 keys, [16, head_dim] bf16 or fp32, into columns of the block: out[unit of the head][key].
INLINE void pack_k(const void *keys, int head_dim, unit *out, const int bf16, const int pair) {
  const int units = bf16 ? head_dim / 2 : head_dim;
  const int split = bf16 && !pair;
  const unit *rows = keys;
#if defined(__AVX512F__)
  int u = 0;
  for (; u + 16 <= units; u += 16)
    transpose16(rows + u, units, 16, out + (split ? 2 : 1) * (int64_t)u * KEYS, KEYS, split);
  if (u < units) transpose16(rows + u, units, 8, out + (split ? 2 : 1) * (int64_t)u * KEYS, KEYS, split);
#else
  for (int u = 0; u < units; u += 4)
    for (int key = 0; key < 16; key += 4)
      transpose4(rows + key * units + u, units, out + (split ? 2 : 1) * (int64_t)u * KEYS + key, KEYS, split);
#endif
}

#if HAVE_PAIR
// Lanes of two rows of 32 bf16, x at 0 and y at 32, as pairs: columns 0..15, then 16..31.
static const uint16_t pair_order[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

// What pack_v and product do, in one go, for a single strip: packing pays when several strips use it. Same sums in the
// same order. `values` are the block's groups of 16 keys; head_dim is a multiple of 64.
INLINE void product_v(float *out, int head_dim, const unit *weights, int64_t stride, const void *const *values,
                      int keys, const int R) {
  const __m512i low = _mm512_loadu_si512(pair_order), high = _mm512_loadu_si512(pair_order + 32);
  for (int c = 0; c < head_dim; c += 64) {
    __m512 acc[STRIP][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) acc[r][j] = _mm512_loadu_ps(out + r * head_dim + c + j * 16);
    for (int key = 0; key < keys; key += 2) {
      const uint16_t *from = (const uint16_t *)values[key / 16] + key % 16 * head_dim + c;
      const __m512i x0 = _mm512_loadu_si512(from), x1 = _mm512_loadu_si512(from + 32);
      const __m512i y0 = _mm512_loadu_si512(from + head_dim), y1 = _mm512_loadu_si512(from + head_dim + 32);
      const __m512bh column[4] = {
          (__m512bh)_mm512_permutex2var_epi16(x0, low, y0), (__m512bh)_mm512_permutex2var_epi16(x0, high, y0),
          (__m512bh)_mm512_permutex2var_epi16(x1, low, y1), (__m512bh)_mm512_permutex2var_epi16(x1, high, y1)};
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)weights[r * stride + key / 2]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], weight, column[j]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) _mm512_storeu_ps(out + r * head_dim + c + j * 16, acc[r][j]);
  }
}
#endif

// V of 16 keys, [16, head_dim], into rows of the block: out[key or pair of keys][head_dim].
INLINE void pack_v(const void *values, int head_dim, unit *out, const int bf16, const int pair) {
#if HAVE_PAIR
  if (pair) {
    const __m512i low = _mm512_loadu_si512(pair_order), high = _mm512_loadu_si512(pair_order + 32);
    for (int c = 0; c + 32 <= head_dim; c += 32) {
      const uint16_t *from = (const uint16_t *)values + c;
#pragma GCC unroll 8
      for (int key = 0; key < 16; key += 2) {
        const __m512i x = _mm512_loadu_si512(from + key * head_dim);
        const __m512i y = _mm512_loadu_si512(from + (key + 1) * head_dim);
        _mm512_storeu_si512(out + key / 2 * head_dim + c, _mm512_permutex2var_epi16(x, low, y));
        _mm512_storeu_si512(out + key / 2 * head_dim + c + 16, _mm512_permutex2var_epi16(x, high, y));
      }
    }
    if (head_dim % 32)
      for (int key = 0; key < 16; key += 2) {
        const uint16_t *from = (const uint16_t *)values + (key + 1) * head_dim - 16;
        const __m512i x = _mm512_maskz_loadu_epi16(0xffff, from), y = _mm512_maskz_loadu_epi16(0xffff, from + head_dim);
        _mm512_storeu_si512(out + (key / 2 + 1) * head_dim - 16, _mm512_permutex2var_epi16(x, low, y));
      }
    return;
  }
#endif
  (void)pair;
  for (int i = 0; i < 16 * head_dim; i += VW) store(out, i, load(values, i, bf16), 0);
}

#endif
