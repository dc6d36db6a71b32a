// Vectors of the machine's width through the compiler's vector extension: one source for every instruction set.
#ifndef NIGHTMILL_VEC_H
#define NIGHTMILL_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX__)
#define VW 8
#else
#define VW 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));

INLINE vf splat(float x) { return (vf){0} + x; }

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

// a > b ? a : b and a < b ? a : b, so the second one when either is NaN: what x86 does in one instruction.
INLINE vf vmax(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
  return choose(a > b, a, b);
#endif
}

INLINE vf vmin(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (vf)_mm_min_ps((__m128)a, (__m128)b);
#else
  return choose(a < b, a, b);
#endif
}

// Whether a > b in any lane; NaN is above nothing.
INLINE int any_above(vf a, vf b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif defined(__AVX__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps(_mm_cmpgt_ps((__m128)a, (__m128)b)) != 0;
#else
  const vi above = a > b;
  return (above[0] | above[1] | above[2] | above[3]) != 0;
#endif
}

// a · b + c. Contraction is off for the library: this is fused where the machine can, and nothing else ever is.
INLINE vf fma_v(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE vi lane_index(void) {
  vi index;
  for (int i = 0; i < VW; i++) index[i] = i;
  return index;
}

INLINE float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

INLINE vf widen_v(vh x) {
#if defined(__AVX512F__) && VW == 16
  // GCC 12 makes five instructions of the conversion below.
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#else
  return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}

// To the nearest bf16, ties to even; NaN stays NaN. The instruction makes zero of what is below 2^-126.
INLINE vh narrow_v(vf x) {
#if defined(__AVX512BF16__) && VW == 16
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#endif
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  vu quiet = (bits >> 16) | 0x40u;
  vu nan = (vu)(x != x);
  return __builtin_convertvector((rounded & ~nan) | (quiet & nan), vh);
}

// `bf16` is a constant at every call, so the branch folds away.
INLINE vf load(const void *base, int64_t index, int bf16) {
  if (bf16) {
    vh x;
    memcpy(&x, (const uint16_t *)base + index, sizeof x);
    return widen_v(x);
  }
  vf x;
  memcpy(&x, (const float *)base + index, sizeof x);
  return x;
}

INLINE void store(void *base, int64_t index, vf x, int bf16) {
  if (bf16) {
    vh y = narrow_v(x);
    memcpy((uint16_t *)base + index, &y, sizeof y);
  } else {
    memcpy((float *)base + index, &x, sizeof x);
  }
}

// The first n < VW elements; the rest are `fill`.
INLINE vf load_tail(const void *base, int64_t index, int n, float fill, int bf16) {
  float x[VW];
  for (int i = 0; i < VW; i++) {
    x[i] = i >= n ? fill : bf16 ? widen(((const uint16_t *)base)[index + i]) : ((const float *)base)[index + i];
  }
  vf out;
  memcpy(&out, x, sizeof out);
  return out;
}

INLINE void store_tail(void *base, int64_t index, vf x, int n, int bf16) {
  if (bf16) {
    vh y = narrow_v(x);
    memcpy((uint16_t *)base + index, &y, (size_t)n * 2);
  } else {
    memcpy((float *)base + index, &x, (size_t)n * 4);
  }
}

// The upper half of the lanes folded onto the lower, until one is left: a fixed order.
#if defined(__AVX__)
INLINE __m128 halves_sum(vf x) {
#if defined(__AVX512F__)
  const __m256 y = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  const __m256 y = (__m256)x;
#endif
  return _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

INLINE __m128 halves_max(vf x) {
#if defined(__AVX512F__)
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
#else
  const __m256 y = (__m256)x;
#endif
  return _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
}

INLINE float hsum(vf x) {
  __m128 y = halves_sum(x);
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

INLINE float hmax(vf x) {
  __m128 y = halves_max(x);
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
#else
INLINE float hsum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }

INLINE float hmax(vf x) {
  const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
#endif

// 2^x to 2 ulp; 0 below -126 (a masked -inf among them), at most 2^127, NaN for NaN.
INLINE vf exp2_v(vf x) {
  const vf low = splat(-126.0f);
  const vi tiny = x < low;
  x = vmin(splat(127.0f), vmax(low, x));
  const float magic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const vf shifted = x + magic;
  const vf f = x - (shifted - magic);
  vf p = splat(1.5403530e-4f);
  p = fma_v(p, f, splat(1.3333558e-3f));
  p = fma_v(p, f, splat(9.6181291e-3f));
  p = fma_v(p, f, splat(5.5504109e-2f));
  p = fma_v(p, f, splat(2.4022651e-1f));
  p = fma_v(p, f, splat(6.9314718e-1f));
  p = fma_v(p, f, splat(1.0f));
  // The integer sits in the low bits of `shifted`: make it an exponent. A product keeps NaN, bit arithmetic may not.
  const vf power = (vf)(((vu)shifted << 23) + (127u << 23));
  return (vf)((vi)(p * power) & ~tiny);
}

#define LOG2E 1.44269504088896341f

// tanh(x) = 1 - 2 / (e^2x + 1), absolute error near 1e-7.
INLINE vf tanh_v(vf x) { return 1.0f - 2.0f / (exp2_v(x * (2.0f * LOG2E)) + 1.0f); }

#endif
