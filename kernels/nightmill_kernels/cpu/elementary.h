// Logarithm, exponential and Philox noise by plain operations, each rounded once: the same bits on every machine, and in
// reference/elementary.py and reference/philox.py, which say where the numbers come from. No fma_v here.
#ifndef NIGHTMILL_ELEMENTARY_H
#define NIGHTMILL_ELEMENTARY_H

#include "vec.h"

typedef uint64_t vq __attribute__((vector_size(VW * 4)));

#define WEIGHT_BITS 42
#define MAX_GUMBEL 22.88f  // no noise is larger

// Natural logarithm, x > 0.
INLINE vf log_v(vf x) {
  const vi bits = (vi)x - 0x3f3504f3;
  const vf exponent = __builtin_convertvector(bits >> 23, vf);
  const vf f = (vf)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
  vf y = f * 7.0376836292e-2f - 1.1514610310e-1f;
  y = y * f + 1.1676998740e-1f;
  y = y * f - 1.2420140846e-1f;
  y = y * f + 1.4249322787e-1f;
  y = y * f - 1.6668057665e-1f;
  y = y * f + 2.0000714765e-1f;
  y = y * f - 2.4999993993e-1f;
  y = y * f + 3.3333331174e-1f;
  const vf square = f * f;
  y = y * f * square;
  y = y + exponent * -2.12194440e-4f;
  y = y - square * 0.5f;
  return (f + y) + exponent * 0.693359375f;
}

// e^x for x ≤ 0 as mantissa · 2^-(shift + 24): 24-bit integers and how far to shift them.
INLINE void weight_v(vf x, vi *mantissa, vi *shift) {
  const vf y = vmax(x * 1.44269504088896341f, splat(-60.0f));
  const vf whole = (y + 12582912.0f) - 12582912.0f, f = y - whole;
  vf p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  *mantissa = __builtin_convertvector(p * 16777216.0f, vi);
  *shift = __builtin_convertvector(-whole, vi);
}

INLINE uint64_t weight_of(int32_t mantissa, int32_t shift) {
  return ((uint64_t)mantissa << (WEIGHT_BITS - 24)) >> shift;
}

// ---------------------------------------------------------------- Philox-4x32-10

struct philox {  // what the blocks of a row have in common
  uint32_t key[2], position[2];
};

// Products of the even lanes, 32 × 32 → 64 bits.
INLINE vq mul_even(vq a, vq b) {
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && VW == 4
  return (vq)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

INLINE void mul_wide(vu a, uint32_t by, vu *high, vu *low) {
  const vq factor = (vq){0} + by, even = mul_even((vq)a, factor), odd = mul_even((vq)a >> 32, factor);
  *low = (vu)((even & 0xffffffffu) | (odd << 32));
  *high = (vu)((even >> 32) | (odd & 0xffffffff00000000u));
}

// Words of the blocks first, first + 1, …: lane i of out[j] belongs to token 4 · (first + i) + j.
INLINE void philox_v(const struct philox *p, uint32_t first, vu out[4]) {
  vu c0 = (vu)lane_index() + first, c1 = (vu){0} + p->position[0], c2 = (vu){0} + p->position[1], c3 = {0};
  uint32_t k0 = p->key[0], k1 = p->key[1];
#pragma GCC unroll 10
  for (int round = 0; round < 10; round++) {
    vu high0, low0, high1, low1;
    mul_wide(c0, 0xd2511f53u, &high0, &low0);
    mul_wide(c2, 0xcd9e8d57u, &high1, &low1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

// -log(-log(1 - w)) for w uniform in (0, 1).
INLINE vf gumbel_v(vu words) {
  // In halves, each exact: few machines convert unsigned numbers, and all must round the sum alike.
  const vf whole = __builtin_convertvector((vi)(words >> 16), vf) * 65536.0f + __builtin_convertvector((vi)(words & 0xffffu), vf);
  const vf survival = vmin((whole + 0.5f) * 0x1p-32f, splat(1.0f - 0x1p-24f));
  const vf rest = 1.0f - survival, left_out = -survival - (rest - 1.0f);
  return -log_v(-(log_v(rest) + left_out / rest));
}

INLINE vu umin_v(vu a, vu b) {
  const vu mask = (vu)(a < b);
  return (a & mask) | (b & ~mask);
}

#endif
