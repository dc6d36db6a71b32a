// Sixteen keys of a plain page as a group, see product.h.
#ifndef NIGHTMILL_PACK_H
#define NIGHTMILL_PACK_H

#include "product.h"

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

// K of 16 keys, [16, head_dim] bf16 or fp32, as a group.
INLINE void pack_k(const void *keys, int head_dim, unit *out, const int bf16, const int pair) {
  const int units = bf16 ? head_dim / 2 : head_dim;
  const int split = bf16 && !pair;
  const unit *rows = keys;
#if defined(__AVX512F__)
  int u = 0;
  for (; u + 16 <= units; u += 16)
    transpose16(rows + u, units, 16, out + (split ? 2 : 1) * (int64_t)u * GROUP, GROUP, split);
  if (u < units) transpose16(rows + u, units, 8, out + (split ? 2 : 1) * (int64_t)u * GROUP, GROUP, split);
#else
  for (int u = 0; u < units; u += 4)
    for (int key = 0; key < 16; key += 4)
      transpose4(rows + key * units + u, units, out + (split ? 2 : 1) * (int64_t)u * GROUP + key, GROUP, split);
#endif
}

#if HAVE_PAIR
// Lanes of two rows of 32 bf16, x at 0 and y at 32, as pairs: columns 0..15, then 16..31.
static const uint16_t pair_order[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                        8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                        16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                        24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
#endif

// V of 16 keys, [16, head_dim], as a group.
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
