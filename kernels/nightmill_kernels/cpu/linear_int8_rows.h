// Rows of activations as int8: 32 neighbours share a scale, the largest magnitude among them over 127.
#ifndef NIGHTMILL_LINEAR_INT8_ROWS_H
#define NIGHTMILL_LINEAR_INT8_ROWS_H

#include "nightmill.h"
#include "vec.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI 1
#else
#define VNNI 0
#endif

enum {
  UNIT = 4,                      // inputs that lie together
  GROUP = 32,                    // inputs that share a scale
  GROUP_UNITS = GROUP / UNIT,
  INPUT_BYTES = VNNI ? 1 : 2,    // of a quantised input
  GROUP_BYTES = GROUP * INPUT_BYTES,
};

#define LARGEST 127.0f
#define TINY 0x1p-100f       // below it a group counts as zeros: 127 / it would overflow
#define ROUNDER 12582912.0f  // 1.5 · 2^23: adding it leaves the nearest integer in the low bits

// Quantised rows: numbers [rows, groups, 32], of each group a scale and where its sums start (VNNI).
struct int8_rows {
  char *numbers;
  float *scales;
  int32_t *starts;
  int64_t groups;  // of a row
};

INLINE int64_t int8_row_bytes(int64_t groups) { return groups * (GROUP_BYTES + 8); }

INLINE struct int8_rows int8_rows_at(char *memory, int64_t rows, int64_t groups) {
  char *scales = memory + rows * groups * GROUP_BYTES;
  return (struct int8_rows){memory, (float *)scales, (int32_t *)(scales + rows * groups * 4), groups};
}

// Bits of the largest magnitude: as integers they order as magnitudes do, infinities and NaN above all.
INLINE float largest_of(const void *x, int64_t first, int n, const int bf16) {
  int32_t bits = 0;
#if defined(__AVX512BW__)
  if (bf16) {
    const __mmask32 real = n < GROUP ? (1u << n) - 1u : 0xffffffffu;
    const __m512i wide = _mm512_maskz_loadu_epi16(real, (const uint16_t *)x + first);
    // The complement of a magnitude, for there is an instruction for the smallest of eight.
    const __m512i turned = _mm512_andnot_si512(wide, _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(turned), _mm512_extracti64x4_epi64(turned, 1));
    const __m128i least = _mm_minpos_epu16(_mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
    bits = (0x7fff - (_mm_cvtsi128_si32(least) & 0xffff)) << 16;
  } else
#endif
  {
    vi most = {0};
    for (int i = 0; i < n; i += VW) {
      const int left = n - i;
      const vf value = left >= VW ? load(x, first + i, bf16) : load_tail(x, first + i, left, 0.0f, bf16);
      const vi magnitude = (vi)value & ((vi){0} + 0x7fffffff), above = magnitude > most;
      most = (magnitude & above) | (most & ~above);
    }
    for (int i = 0; i < VW; i++) bits = most[i] > bits ? most[i] : bits;
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// A group's numbers, in ±127, to where they belong; where its sums start.
INLINE int32_t store_group(char *group, const vi q[GROUP / VW]) {
#if VNNI
  const __m128i low = _mm512_cvtepi32_epi8((__m512i)q[0]), high = _mm512_cvtepi32_epi8((__m512i)q[1]);
  const __m256i numbers = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  _mm256_storeu_si256((__m256i *)group, numbers);
  const __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(numbers, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return -128 * ((int32_t)(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1)) - 128 * GROUP);
#else
  int16_t out[GROUP];
  for (int i = 0; i < GROUP; i += UNIT) {
    const vi units = q[i / VW];
    out[i] = (int16_t)units[i % VW];
    out[i + 1] = (int16_t)units[i % VW + 2];
    out[i + 2] = (int16_t)units[i % VW + 1];
    out[i + 3] = (int16_t)units[i % VW + 3];
  }
  memcpy(group, out, sizeof out);
  return 0;
#endif
}

// From the largest magnitudes of n groups, what their numbers are multiplied with, and their scales in place. Where there
// is an infinity or NaN the scale is NaN, so that the row's sums are, and its numbers do not matter.
INLINE void scales_of(float *largest, float *factors, int n) {
  for (int g = 0; g < n; g += VW) {
    const vf a = n - g >= VW ? load(largest, g, 0) : load_tail(largest, g, n - g, 0.0f, 0);
    const vi tiny = a < splat(TINY), finite = a < splat(INFINITY);
    const vf scale = (vf)((vi)choose(finite, a / LARGEST, splat(NAN)) & ~tiny);
    const vf factor = (vf)((vi)(LARGEST / a) & ~tiny);
    store(factors, g, factor, 0);
    if (n - g >= VW)
      store(largest, g, scale, 0);
    else
      store_tail(largest, g, scale, n - g, 0);
  }
}

// Row r of x, whose first element is number `first` and which has n.
INLINE void quantize_row(const struct int8_rows *rows, int64_t r, const void *x, int64_t first, int64_t n,
                         const int bf16) {
  enum { BLOCK = 64 };
  float factors[BLOCK + VW];
  for (int64_t start = 0; start < rows->groups; start += BLOCK) {
    const int count = rows->groups - start < BLOCK ? (int)(rows->groups - start) : BLOCK;
    float *scales = rows->scales + r * rows->groups + start;
    for (int g = 0; g < count; g++) {
      const int64_t at = (start + g) * GROUP;
      scales[g] = largest_of(x, first + at, n - at < GROUP ? (int)(n - at) : GROUP, bf16);
    }
    scales_of(scales, factors, count);
    for (int g = 0; g < count; g++) {
      char *group = rows->numbers + (r * rows->groups + start + g) * GROUP_BYTES;
      const vf factor = splat(factors[g]);
      vi q[GROUP / VW];
#pragma GCC unroll 8
      for (int i = 0; i < GROUP / VW; i++) {
        const int64_t at = (start + g) * GROUP + i * VW, left = n - at;
        vf value = splat(0.0f);
        if (left >= VW)
          value = load(x, first + at, bf16);
        else if (left > 0)
          value = load_tail(x, first + at, (int)left, 0.0f, bf16);
        q[i] = (vi)((vu)(value * factor + ROUNDER) - 0x4b400000u);
      }
      rows->starts[r * rows->groups + start + g] = store_group(group, q);
    }
  }
}

#endif
